//! `refrain bench kernels`: each kernel beside what this machine reaches at best.

use std::time::Instant;

use anyhow::{Context as _, Result};
use refrain_kernels::Cpu;
use serde::Serialize;
use serde_json::json;

use super::work::{Case, Kind, Ready, cases};
use super::{About, Spread, roofline};
use crate::args;
use crate::machine;
use crate::output::{Fail, bytes, count, number, print, print_json, seconds};
use crate::settings::Context;
use crate::table::Table;

/// Seconds that the calls of one run take at least: as long as a round of the peaks, which share what interrupts.
const RUN: f64 = 1e-3;
/// Seconds of all runs at least.
const RUNS: f64 = 0.1;
/// Bytes of weights, or of keys and values, that the calls for one token take turns with.
const TURNS: u64 = 1 << 30;
/// Kernels that touch more bytes than this in a call ...
const LARGE: usize = 256 << 20;
/// ... need so much free memory, and the peaks need half of it.
const ROOM: u64 = 2 << 30;

/// What the machine reaches.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Peak {
    /// Operations per second.
    pub(super) f32_flops: f64,
    pub(super) bf16_flops: f64,
    /// Bytes per second.
    pub(super) read_bytes: f64,
    pub(super) copy_bytes: f64,
}

impl Peak {
    fn measure(cpu: &Cpu, threads: usize) -> Peak {
        Peak {
            f32_flops: cpu.peak_f32(threads),
            bf16_flops: cpu.peak_bf16(threads),
            read_bytes: cpu.peak_read(threads),
            copy_bytes: cpu.peak_copy(threads),
        }
    }

    /// The same with what holds a kernel back measured anew: machines do not reach the same at all times.
    fn now(&self, cpu: &Cpu, threads: usize, bound: &str) -> Peak {
        match bound {
            "f32" => Peak { f32_flops: cpu.peak_f32(threads), ..*self },
            "bf16" => Peak { bf16_flops: cpu.peak_bf16(threads), ..*self },
            _ => Peak { read_bytes: cpu.peak_read(threads), copy_bytes: cpu.peak_copy(threads), ..*self },
        }
    }

    /// The best of both.
    fn best(&self, other: &Peak) -> Peak {
        Peak {
            f32_flops: self.f32_flops.max(other.f32_flops),
            bf16_flops: self.bf16_flops.max(other.bf16_flops),
            read_bytes: self.read_bytes.max(other.read_bytes),
            copy_bytes: self.copy_bytes.max(other.copy_bytes),
        }
    }

    fn line(&self, threads: usize) -> String {
        let giga = |value: f64| number(value / 1e9);
        format!(
            "peaks of {}: f32 {} GFLOP/s, bf16 {} GFLOP/s, memory read {} GB/s, copied {} GB/s",
            count(threads, "thread"),
            giga(self.f32_flops),
            giga(self.bf16_flops),
            giga(self.read_bytes),
            giga(self.copy_bytes)
        )
    }
}

#[derive(Debug, Serialize)]
struct Peaks {
    all_threads: Peak,
    one_thread: Peak,
}

impl Peaks {
    fn measure(cpu: &Cpu) -> Peaks {
        let one_thread = Peak::measure(cpu, 1);
        let all_threads = if cpu.threads() == 1 { one_thread } else { Peak::measure(cpu, cpu.threads()) };
        Peaks { all_threads, one_thread }
    }

    fn lines(&self, threads: usize) -> Vec<String> {
        let mut lines = vec![self.all_threads.line(threads)];
        lines.extend((threads > 1).then(|| self.one_thread.line(1)));
        lines
    }
}

/// One kernel at one shape. Rates are those of the quickest run, as the peaks are; its share is of the peak as it was
/// measured right after it.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub(super) kind: Kind,
    pub(super) name: String,
    pub(super) time: Spread,
    /// Operations and bytes of a call.
    pub(super) operations: f64,
    pub(super) bytes: f64,
    /// Operations per byte.
    pub(super) intensity: f64,
    pub(super) flops: f64,
    pub(super) bytes_per_second: f64,
    /// What holds it back: `f32`, `bf16` or `memory`.
    pub(super) bound: &'static str,
    /// Time by that bound alone, over the time taken.
    pub(super) share: f64,
    /// Whether what the calls touch fits the caches, so that memory is no bound.
    pub(super) cached: bool,
    pub(super) one_thread: bool,
}

impl Row {
    fn new(case: &Case, ready: &Ready, time: Spread, peak: &Peak, cache: Option<u64>) -> Row {
        let (unit, flops) = if case.bf16 { ("bf16", peak.bf16_flops) } else { ("f32", peak.f32_flops) };
        let (read, written) = (ready.read as f64, ready.written as f64);
        let calculated = case.operations / flops;
        // Bytes read beside bytes written move as in a copy.
        let moved = written / peak.copy_bytes + (read - written).max(0.0) / peak.read_bytes;
        Row {
            kind: case.kind,
            name: case.name.clone(),
            time,
            operations: case.operations,
            bytes: read + written,
            intensity: case.operations / (read + written),
            flops: case.operations / time.min,
            bytes_per_second: (read + written) / time.min,
            bound: if calculated > moved { unit } else { "memory" },
            share: calculated.max(moved) / time.min,
            cached: cache.is_none_or(|cache| (ready.span as u64) < 2 * cache),
            one_thread: case.one_thread,
        }
    }

    /// Whether the caches may serve a kernel that is held back by memory, so that the share can be more than all.
    pub(super) fn starred(&self) -> bool {
        self.cached && self.bound == "memory"
    }

    /// The share, marked where it can be more than all.
    pub(super) fn share(&self) -> String {
        format!("{:.0} %{}", 100.0 * self.share, if self.starred() { " *" } else { "" })
    }
}

/// `refrain bench kernels`
pub(crate) fn run(context: &Context, args: &args::Kernels) -> Result<()> {
    let cpu = Cpu::new(context.global.threads)?;
    let free = machine::free_memory().unwrap_or(u64::MAX);
    if free < ROOM / 2 {
        let message = format!("{} of memory are free, and the peaks take {}", bytes(free), bytes(ROOM / 2));
        return Err(Fail::new(message).hint("end other programs, or measure on another machine").into());
    }
    let write = |text: &str| match &args.svg {
        None => Ok(()),
        Some(path) => {
            std::fs::write(path, text).with_context(|| format!("cannot write the picture {}", path.display()))
        }
    };
    // Rather now than after all measurements.
    write("")?;
    let spinner = context.spinner("measuring what the machine reaches");
    let mut peaks = Peaks::measure(&cpu);
    spinner.finish_and_clear();
    let cases: Vec<Case> = cases().into_iter().filter(|case| args.only.contains(&case.group)).collect();
    let (large, small): (Vec<&Case>, Vec<&Case>) =
        cases.iter().partition(|case| free < ROOM && case.size > LARGE);
    let bar = context.bar("measuring", "{pos}/{len}");
    bar.set_length(small.len() as u64);
    let mut rows = Vec::new();
    for case in small {
        let (peak, threads) = if case.one_thread {
            (&mut peaks.one_thread, 1)
        } else {
            (&mut peaks.all_threads, cpu.threads())
        };
        let mut ready = case.make(&cpu, TURNS.min(free / 4) as usize);
        let time = measure(&cpu, &mut ready, args.runs);
        let row = |peak: &Peak| Row::new(case, &ready, time, peak, machine::cache_bytes());
        let now = peak.now(&cpu, threads, row(peak).bound);
        rows.push(row(&now));
        *peak = peak.best(&now);
        bar.inc(1);
    }
    bar.finish_and_clear();
    let about = About::new(&cpu, args.runs);
    write(&roofline::svg(&about, &peaks.all_threads, &rows))?;
    let skipped: Vec<String> =
        large.iter().map(|case| format!("{} {}", case.kind.text(), case.name)).collect();
    if context.json {
        let told = json!({ "about": about, "peaks": peaks, "results": rows, "skipped": skipped });
        return print_json(&told);
    }
    let report = Report { about, peaks, rows, skipped };
    print(&if args.markdown { report.markdown() } else { report.text() })
}

/// Runs of as many calls as it takes; the first, which warms up, finds how many.
fn measure(cpu: &Cpu, ready: &mut Ready, runs: u32) -> Spread {
    let mut run = |calls: u32| {
        let start = Instant::now();
        for _ in 0..calls {
            (ready.call)(cpu);
        }
        start.elapsed().as_secs_f64()
    };
    let mut calls = 1;
    while run(calls) < RUN {
        calls *= 2;
    }
    let (start, mut times) = (Instant::now(), Vec::new());
    while times.len() < runs as usize || start.elapsed().as_secs_f64() < RUNS {
        times.push(run(calls) / f64::from(calls));
    }
    Spread::of(times)
}

/// All that is printed for people.
struct Report {
    about: About,
    peaks: Peaks,
    rows: Vec<Row>,
    skipped: Vec<String>,
}

impl Report {
    fn head(&self) -> Vec<String> {
        let how = format!(
            "kernels, {} or more each, rates and shares of the best, refrain {}",
            count(self.about.runs as usize, "run"),
            self.about.version
        );
        let mut lines = vec![self.about.machine(), how];
        lines.extend(self.peaks.lines(self.about.threads));
        lines
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.rows.iter().any(Row::starred) {
            let cache = machine::cache_bytes().map_or_else(String::new, |size| format!(" ({})", bytes(size)));
            notes.push(format!(
                "* All that the calls touch may lie in the caches{cache}; the share of memory can then pass 100 %."
            ));
        }
        if !self.skipped.is_empty() {
            notes.push(format!(
                "Left out with less than {} of free memory: {}.",
                bytes(ROOM),
                self.skipped.join(", ")
            ));
        }
        notes
    }

    fn text(&self) -> String {
        let notes: String = self.notes().iter().map(|note| format!("\n{note}\n")).collect();
        format!("{}\n\n{}{notes}", self.head().join("\n"), self.table().text())
    }

    fn markdown(&self) -> String {
        // A star would begin emphasis.
        let notes: String =
            self.notes().iter().map(|note| format!("\n{}\n", note.replace("* ", "\\* "))).collect();
        let head = self.head().join("; ");
        format!("{head}:\n\n```sh\n{}\n```\n\n{}{notes}", self.about.command, self.table().markdown())
    }

    fn table(&self) -> Table {
        let header =
            ["<kernel", "<shape", "median", "best", "GFLOP/s", "GB/s", "FLOP/byte", "<bound", "<share"];
        let mut table = Table::new(&header);
        for row in &self.rows {
            table.push(vec![
                row.kind.text().to_owned(),
                row.name.clone(),
                seconds(row.time.median),
                seconds(row.time.min),
                number(row.flops / 1e9),
                number(row.bytes_per_second / 1e9),
                number(row.intensity),
                row.bound.to_owned(),
                row.share(),
            ]);
        }
        table
    }
}
