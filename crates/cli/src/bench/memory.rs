//! `refrain bench memory`: bytes while an answer grows and over the length of the prompt, for eviction policies. Each policy
//! is measured in a process of its own, so that none finds memory that another one has touched.

use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::curves::{Chart, Curve};
use super::policies::{PolicySetup, answer, check_csv, prompts, title, write_csv};
use super::prompts::engine;
use crate::args;
use crate::machine::resident_memory;
use crate::methods::{self, Method, Policy};
use crate::output::{Fail, bytes, print, print_json, print_result};
use crate::settings::Context;
use crate::table::Table;

/// Points of a curve.
const PARTS: usize = 100;

/// One policy.
#[derive(Debug, Serialize, Deserialize)]
struct PolicyMemory {
    policy: String,
    /// Owner of each cache: `kv_head` or `query_head`.
    accounting: String,
    /// While the answer grows.
    answer: Vec<MemoryPoint>,
    /// Bytes allocated for keys and values at the end, and beside them.
    kv_bytes: usize,
    side_bytes: usize,
    /// Bytes that full attention would hold at the end.
    kv_bytes_full: usize,
    /// `(tokens of the prompt, bytes allocated after it, most bytes allocated during it)`.
    prompts: Vec<(usize, usize, usize)>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct MemoryPoint {
    /// Tokens of the answer.
    tokens: usize,
    /// Tokens that each head holds, of the layer that holds most.
    retained: usize,
    /// Bytes of the tokens held, over all layers.
    held_bytes: usize,
    /// Growth of the process's resident memory since before the request; none where the system does not tell.
    resident_bytes: Option<u64>,
}

/// `refrain bench memory`
pub(crate) fn run(context: &Context, args: &args::Memory) -> Result<()> {
    if let Some(policy) = &args.alone {
        let (method, policy) = (methods::method(&args.policies.method)?, methods::policy(policy)?);
        return print_json(&measure(context, args, &method, &policy)?);
    }
    let method = methods::method(&args.policies.method)?;
    let policies = methods::policies(&args.policies.policies)?;
    check_csv(&args.policies)?;
    let (engine, folder) = engine(context)?;
    let prompt = prompts(&engine, &args.policies, &[args.policies.prompt], args.policies.tokens)?.remove(0);
    prompts(&engine, &args.policies, &args.lengths, 1)?;
    let about = PolicySetup::new(context, &engine, &method.spec, (prompt.len(), args.policies.tokens), 1);
    drop((engine, folder));
    let bar = context.bar("measuring", "{pos}/{len} policies");
    bar.set_length(policies.len() as u64);
    let mut rows = Vec::new();
    for policy in &policies {
        rows.push(apart(policy)?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    // The measurements are printed even if the file cannot be written.
    let written = write_csv(&args.policies, &charts(&rows));
    if context.json {
        return print_result(json!({ "about": about, "results": rows }), written);
    }
    print(&about.page(&table(&rows), "", args.policies.markdown))?;
    written
}

/// Starts this program with its own arguments for one policy, and reads the result.
fn apart(policy: &Policy) -> Result<PolicyMemory> {
    let program = std::env::current_exe().context("this program cannot be found to be started again")?;
    let output = Command::new(program)
        .args(std::env::args_os().skip(1))
        .env("REFRAIN_ALONE", &policy.spec)
        .env("REFRAIN_QUIET", "true")
        .stdin(Stdio::null())
        .output()
        .context("this program cannot be started again")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(Fail::new(format!("{} could not be measured: {}", policy.spec, said.trim())).into());
    }
    serde_json::from_slice(&output.stdout)
        .with_context(|| format!("what {} measured cannot be read", policy.spec))
}

fn measure(context: &Context, args: &args::Memory, method: &Method, policy: &Policy) -> Result<PolicyMemory> {
    let (engine, _folder) = engine(context)?;
    let prompt = prompts(&engine, &args.policies, &[args.policies.prompt], args.policies.tokens)?.remove(0);
    // A short answer first touches the memory that every request needs.
    answer(&engine, &prompt, (method, policy), args.policies.tokens.min(8), |_| ())?;
    let before = resident_memory();
    let mut points = Vec::new();
    let stats = answer(&engine, &prompt, (method, policy), args.policies.tokens, |progress| {
        let tokens = progress.tokens;
        if tokens % args.policies.tokens.div_ceil(PARTS) == 0 || tokens == 1 || tokens == args.policies.tokens
        {
            points.push(MemoryPoint {
                tokens,
                retained: progress.retained,
                held_bytes: progress.kv_bytes_held,
                resident_bytes: resident_memory().zip(before).map(|(now, before)| now.saturating_sub(before)),
            });
        }
    })?;
    let mut lengths = Vec::new();
    for (length, prompt) in args.lengths.iter().zip(prompts(&engine, &args.policies, &args.lengths, 1)?) {
        let stats = engine.measure(&prompt, &method.built, &policy.built)?;
        lengths.push((*length, stats.kv_bytes, stats.kv_bytes_peak));
    }
    Ok(PolicyMemory {
        policy: title(policy),
        accounting: stats.kv_accounting.to_owned(),
        answer: points,
        kv_bytes: stats.kv_bytes,
        side_bytes: stats.side_bytes,
        kv_bytes_full: stats.kv_bytes_full,
        prompts: lengths,
    })
}

/// Points of one policy's curve; those without a value are left out.
type Points = Vec<(usize, Option<u64>)>;

fn charts(rows: &[PolicyMemory]) -> Vec<Chart> {
    let chart = |title, x, y, of: &dyn Fn(&PolicyMemory) -> Points| Chart {
        title,
        x,
        y,
        curves: rows
            .iter()
            .map(|row| {
                let points = of(row).into_iter().filter_map(|(x, y)| Some((x as f64, y? as f64))).collect();
                Curve { name: row.policy.clone(), points }
            })
            .collect(),
    };
    let held =
        |row: &PolicyMemory| row.answer.iter().map(|p| (p.tokens, Some(p.held_bytes as u64))).collect();
    let resident = |row: &PolicyMemory| row.answer.iter().map(|p| (p.tokens, p.resident_bytes)).collect();
    let after =
        |row: &PolicyMemory| row.prompts.iter().map(|(n, after, _)| (*n, Some(*after as u64))).collect();
    let peak = |row: &PolicyMemory| row.prompts.iter().map(|(n, _, peak)| (*n, Some(*peak as u64))).collect();
    let (answer, prompt) = ("answer (tokens)", "prompt (tokens)");
    vec![
        chart("Keys and values while the answer grows", answer, "held (bytes)", &held),
        chart("Resident memory while the answer grows", answer, "above that before (bytes)", &resident),
        chart("Keys and values after the first token", prompt, "allocated (bytes)", &after),
        chart("Keys and values at the peak of prefill", prompt, "allocated (bytes)", &peak),
    ]
}

fn table(rows: &[PolicyMemory]) -> Table {
    let mut table = Table::new(&[
        "<policy",
        "<a cache for each",
        "retained",
        "KV",
        "of full",
        "beside",
        "resident, growth since half",
        "prompts: KV after / at peak",
    ]);
    for row in rows {
        let half = &row.answer[row.answer.len() / 2];
        let last = &row.answer[row.answer.len() - 1];
        let grown = last
            .resident_bytes
            .zip(half.resident_bytes)
            .map(|(last, half)| format!("{}, {}", bytes(last), bytes(last.saturating_sub(half))));
        let prompts = row
            .prompts
            .iter()
            .map(|(n, after, peak)| format!("{n}: {} / {}", bytes(*after as u64), bytes(*peak as u64)));
        table.push(vec![
            row.policy.clone(),
            row.accounting.replace('_', " "),
            last.retained.to_string(),
            bytes(row.kv_bytes as u64),
            format!("{:.2}x", row.kv_bytes as f64 / row.kv_bytes_full as f64),
            bytes(row.side_bytes as u64),
            grown.unwrap_or_else(|| "–".to_owned()),
            prompts.collect::<Vec<_>>().join(", "),
        ]);
    }
    table
}
