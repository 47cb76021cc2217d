//! `refrain bench ttft`: time to first token of methods over prompt lengths.

use std::io;

use anyhow::Result;
use refrain::engine::{Engine, Prompt, RequestStats};
use refrain::eviction::Eviction;
use serde::Serialize;
use serde_json::json;

use super::measurement::{ModelSetup, Spread};
use super::prompts::{engine, prompts};
use crate::args;
use crate::machine;
use crate::methods::{self, Method};
use crate::output::{bytes, print, print_json, seconds};
use crate::settings::Context;
use crate::table::{Table, columns};

/// One method at one length.
#[derive(Debug, Serialize)]
struct MethodTiming {
    length: usize,
    method: String,
    /// With chunks held in memory, without waiting for them to be placed.
    compute_ttft: Spread,
    /// With chunks read from disk.
    ttft: Spread,
    /// With chunks held in memory.
    memory_ttft: Spread,
    /// Median over rounds of TTFT from disk / TTFT from memory; none if nothing is loaded.
    disk_to_memory: Option<f64>,
    /// Bytes of keys and values read from disk.
    bytes_loaded: u64,
    /// `bytes_loaded` over the median TTFT from disk.
    bytes_per_second: f64,
    /// Seconds that threads were busy reading them from disk and placing them, summed over the threads.
    load_seconds: Spread,
    charged_ratio: f64,
    /// Tokens of the prompt that attention has before it / tokens of the prompt.
    sequence_ratio: f64,
    /// Bytes of keys, values and summaries read from disk / bytes of the documents' keys and values.
    read_ratio: f64,
    /// Vanilla's median TTFT divided by the method's, chunks in memory; none if vanilla was not measured.
    speedup: Option<f64>,
    /// Floating-point operations of the computed rows and the keys that they saw.
    operations: f64,
    /// Vanilla's operations over the method's: the speed-up if only arithmetic took time; none if vanilla was not measured.
    bound: Option<f64>,
    share_of_bound: Option<f64>,
    /// Seconds of scoring and choosing rows, chunks in memory.
    select_seconds: Spread,
    /// Peak memory of the process while the method ran.
    peak_memory_bytes: Option<u64>,
}

/// `refrain bench ttft`
pub(crate) fn run(context: &Context, args: &args::Ttft) -> Result<()> {
    let (asked, policy) = (methods::methods(&args.methods)?, methods::policy(&args.evict)?);
    let eviction = &policy.built;
    let (engine, _folder) = engine(context)?;
    let prompts = prompts(
        &engine,
        &args.docs,
        &args.question,
        &args.lengths,
        args.document_tokens.map(|n| n as usize),
    )?;
    let mut rows = Vec::new();
    for prompt in &prompts {
        rows.extend(measure(context, &engine, prompt, (&asked, eviction), args.runs)?);
    }
    let about = TtftSetup {
        model: ModelSetup::new(context, &engine, args.runs),
        chunk_tokens: engine.settings().chunk_tokens,
        evict: policy.spec.clone(),
    };
    if context.json {
        return print_json(&json!({ "about": about, "results": rows }));
    }
    let (shown, note) = match args.markdown || columns(&io::stdout()).is_none() {
        true => (&COLUMNS[..], ""),
        false => (&AT_A_TERMINAL[..], "--markdown and --json have more columns.\n"),
    };
    print(&about.model.page(&about.line(), &table(&rows, shown), note, args.markdown))
}

/// One method's accounts, a pair a round.
#[derive(Clone, Debug, Default)]
struct MethodRuns {
    /// Every chunk is read from its file, which the system has in its page cache.
    disk: Vec<RequestStats>,
    memory: Vec<RequestStats>,
    peak: Option<u64>,
}

/// Measures all methods in turn, from disk and from memory, so that a slow moment of the machine slows all of them. The
/// first round fills the store, warms everything up and does not count.
fn measure(
    context: &Context,
    engine: &Engine,
    prompt: &Prompt,
    (asked, eviction): (&[Method], &Eviction),
    runs: u32,
) -> Result<Vec<MethodTiming>> {
    let bar = context.bar("measuring", &format!("{{pos}}/{{len}} at {} tokens", prompt.len()));
    bar.set_length((runs as usize + 1) as u64 * asked.len() as u64);
    let mut all = vec![MethodRuns::default(); asked.len()];
    for round in 0..=runs {
        for (asked, runs) in asked.iter().zip(&mut all) {
            machine::forget_peak_memory();
            engine.store().forget_memory();
            let disk = engine.measure(prompt, &asked.built, eviction)?;
            let memory = match disk.bytes_loaded {
                0 if round > 0 => disk.clone(),
                _ => {
                    engine.load_into_memory(prompt, asked.built.as_ref())?;
                    engine.measure(prompt, &asked.built, eviction)?
                }
            };
            if round > 0 {
                runs.disk.push(disk);
                runs.memory.push(memory);
                runs.peak = runs.peak.max(machine::peak_memory());
            }
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let memory: Vec<Spread> = all.iter().map(|runs| spread(&runs.memory, |stats| stats.ttft)).collect();
    let vanilla = asked.iter().position(|asked| asked.name == "vanilla");
    let (fresh, all_operations) =
        (vanilla.map(|i| memory[i].median), vanilla.map(|i| all[i].memory[0].operations));
    let row = |(index, asked): (usize, &Method)| {
        let speedup = fresh.map(|fresh| fresh / memory[index].median);
        let runs = &all[index];
        let ttft = spread(&runs.disk, |stats| stats.ttft);
        let ratios = runs.disk.iter().zip(&runs.memory).map(|(disk, memory)| disk.ttft / memory.ttft);
        let bytes_loaded = runs.disk[0].bytes_loaded;
        let operations = runs.memory[0].operations;
        let bound = all_operations.map(|all| all / operations);
        MethodTiming {
            length: prompt.len(),
            method: asked.spec.clone(),
            compute_ttft: spread(&runs.memory, |stats| stats.compute_ttft),
            ttft,
            memory_ttft: memory[index],
            disk_to_memory: (bytes_loaded > 0).then(|| Spread::of(ratios.collect()).median),
            bytes_loaded,
            bytes_per_second: bytes_loaded as f64 / ttft.median,
            load_seconds: spread(&runs.disk, |stats| stats.load_seconds),
            charged_ratio: runs.disk[0].charged_ratio,
            sequence_ratio: runs.disk[0].sequence_ratio,
            read_ratio: runs.disk[0].bytes_read as f64 / runs.disk[0].document_bytes.max(1) as f64,
            speedup,
            operations,
            bound,
            share_of_bound: speedup.zip(bound).map(|(speedup, bound)| speedup / bound),
            select_seconds: spread(&runs.memory, |stats| stats.select_seconds),
            peak_memory_bytes: runs.peak,
        }
    };
    Ok(asked.iter().enumerate().map(row).collect())
}

fn spread(accounts: &[RequestStats], of: fn(&RequestStats) -> f64) -> Spread {
    Spread::of(accounts.iter().map(of).collect())
}

/// Model and settings of the measurement.
#[derive(Debug, Serialize)]
struct TtftSetup {
    #[serde(flatten)]
    model: ModelSetup,
    chunk_tokens: usize,
    evict: String,
}

impl TtftSetup {
    fn line(&self) -> String {
        format!(
            "{}{}, chunks of {} tokens, median (min–max) of {}",
            self.model.model_line(),
            if self.evict == "full" { String::new() } else { format!(" ({})", self.evict) },
            self.chunk_tokens,
            self.model.runs()
        )
    }
}

const COLUMNS: [&str; 14] = [
    "tokens",
    "<method",
    "TTFT in memory",
    "from disk",
    "disk/memory",
    "loaded",
    "charged",
    "kept",
    "read",
    "speed-up",
    "bound",
    "of bound",
    "chosen in",
    "peak memory",
];
/// The columns that fit a terminal.
const AT_A_TERMINAL: [&str; 6] = ["tokens", "<method", "TTFT in memory", "from disk", "charged", "speed-up"];

/// The timings in these columns.
fn table(rows: &[MethodTiming], shown: &[&'static str]) -> Table {
    let mut table = Table::new(shown);
    let or_none = |text: Option<String>| text.unwrap_or_else(|| "–".to_owned());
    for row in rows {
        let cells = [
            row.length.to_string(),
            row.method.clone(),
            row.memory_ttft.text(),
            seconds(row.ttft.median),
            or_none(row.disk_to_memory.map(|ratio| format!("{ratio:.2}"))),
            or_none((row.bytes_loaded > 0).then(|| format!("{}/s", bytes(row.bytes_per_second as u64)))),
            format!("{:.1} %", 100.0 * row.charged_ratio),
            format!("{:.1} %", 100.0 * row.sequence_ratio),
            format!("{:.1} %", 100.0 * row.read_ratio),
            or_none(row.speedup.map(|speedup| format!("{speedup:.2}x"))),
            or_none(row.bound.map(|bound| format!("{bound:.1}x"))),
            or_none(row.share_of_bound.map(|share| format!("{:.0} %", 100.0 * share))),
            or_none((row.select_seconds.median > 0.0).then(|| seconds(row.select_seconds.median))),
            or_none(row.peak_memory_bytes.map(bytes)),
        ];
        let cells = COLUMNS.iter().zip(cells).filter(|(name, _)| shown.contains(name));
        table.push(cells.map(|(_, cell)| cell).collect());
    }
    table
}
