//! `refrain bench decode`: time a token while an answer grows, for eviction policies in turn.

use anyhow::Result;
use refrain::eviction::Eviction;
use serde::Serialize;
use serde_json::json;

use super::curves::{Chart, Curve};
use super::measurement::Spread;
use super::policies::{PolicySetup, check_csv, prompts, title, write_csv};
use super::prompts::engine;
use crate::args;
use crate::methods::{self, Policy};
use crate::output::{Fail, bytes, number, print, print_result, seconds};
use crate::settings::Context;
use crate::table::Table;

/// Points of a curve.
const PARTS: usize = 20;
/// Tokens at the beginning of an answer that comparisons with its end leave out: a tenth of the answer at most.
const SETTLED: usize = 1000;

/// One policy.
#[derive(Debug, Serialize)]
struct PolicyTiming {
    policy: String,
    /// Seconds to the first token.
    ttft: Spread,
    /// `(tokens of the answer, seconds a token)`: the median of each part of the answer, and over the runs.
    curve: Vec<(usize, f64)>,
    short: Vec<ShortAnswer>,
    /// `(tokens of the answer, seconds from the request on)`.
    total: Vec<(usize, f64)>,
    /// Time a token in the last part of the answer over that in the first part behind its first thousand tokens, or behind the first tenth of
    /// an answer below 10,000.
    growth: f64,
    kv_bytes: usize,
    side_bytes: usize,
    retained_tokens: usize,
    /// Chunks that were prefilled within the last request: none, since all are stored before.
    prefilled_chunks: usize,
    /// Owner of each cache: `kv_head` or `query_head`.
    accounting: &'static str,
}

/// A short answer, in seconds.
#[derive(Clone, Copy, Debug, Serialize)]
struct ShortAnswer {
    tokens: usize,
    /// To the first token.
    ttft: f64,
    /// A token after the first.
    tpot: f64,
    /// Of the whole answer divided by its tokens, as A³'s code reports TPOT.
    whole_per_token: f64,
}

/// `refrain bench decode`
pub(crate) fn run(context: &Context, args: &args::Decode) -> Result<()> {
    let method = methods::method(&args.policies.method)?;
    let policies = methods::policies(&args.policies.policies)?;
    if args.policies.tokens < 2 {
        return Err(Fail::usage("an answer of fewer than 2 tokens has no time a token").into());
    }
    check_csv(&args.policies)?;
    let (engine, _folder) = engine(context)?;
    let prompt = prompts(&engine, &args.policies, &[args.policies.prompt], args.policies.tokens)?.remove(0);
    let bar = context.bar("measuring", "{pos}/{len} tokens");
    bar.set_length(args.runs as u64 * policies.len() as u64 * args.policies.tokens as u64);
    // Times from the request to each token; by policy and run.
    let mut times: Vec<Vec<Vec<f64>>> = vec![Vec::new(); policies.len()];
    let mut accounts = Vec::new();
    let evictions: Vec<&Eviction> = policies.iter().map(|policy| &policy.built).collect();
    if let Some(first) = evictions.first() {
        // The first request prefills the missing chunks and first touches the weights, which is no policy's time.
        engine.measure(&prompt, &method.built, first)?;
    }
    for _ in 0..args.runs {
        let method = &method.built;
        let answers = engine.time_policies(&prompt, method, &evictions, args.policies.tokens, |tokens| {
            bar.inc(tokens as u64)
        })?;
        accounts.clear();
        for (answer, times) in answers.into_iter().zip(&mut times) {
            let ttft = answer.stats.ttft;
            let mut at = ttft;
            let steps = answer.steps.into_iter().map(|step| {
                at += step;
                at
            });
            times.push(std::iter::once(ttft).chain(steps).collect());
            accounts.push(answer.stats);
        }
    }
    bar.finish_and_clear();
    let rows: Vec<PolicyTiming> = policies
        .iter()
        .zip(times.iter().zip(&accounts))
        .map(|(policy, (times, stats))| row(policy, times, stats, &args.short))
        .collect();
    let about =
        PolicySetup::new(context, &engine, &method.spec, (prompt.len(), args.policies.tokens), args.runs);
    // The measurements are printed even if the file cannot be written.
    let written = write_csv(&args.policies, &charts(&rows));
    if context.json {
        return print_result(json!({ "about": about, "results": rows }), written);
    }
    let crossing = about.weight_bytes / about.token_bytes;
    let note = format!(
        "Bytes are of one cache a KV head, but with `per_query_head` a query head.\nKeys and values of full attention take more bytes than the weights ({}) from {crossing} tokens on.\n",
        bytes(about.weight_bytes as u64)
    );
    print(&about.page(&table(&rows), &note, args.policies.markdown))?;
    written
}

fn row(
    policy: &Policy,
    times: &[Vec<f64>],
    stats: &refrain::engine::RequestStats,
    short: &[usize],
) -> PolicyTiming {
    let tokens = times[0].len();
    let over_runs = |of: &dyn Fn(&Vec<f64>) -> f64| Spread::of(times.iter().map(of).collect());
    let step = |part: usize| 1 + part * (tokens - 1) / PARTS;
    let curve: Vec<(usize, f64)> = (0..PARTS)
        .filter(|part| step(*part) < step(part + 1))
        .map(|part| {
            let range = step(part)..step(part + 1);
            let median = |times: &Vec<f64>| {
                Spread::of(range.clone().map(|t| times[t] - times[t - 1]).collect()).median
            };
            (range.end, over_runs(&median).median)
        })
        .collect();
    let short = short
        .iter()
        .filter(|length| **length > 1 && **length <= tokens)
        .map(|length| {
            let tpot = |times: &Vec<f64>| (times[length - 1] - times[0]) / (length - 1) as f64;
            ShortAnswer {
                tokens: *length,
                ttft: over_runs(&|times| times[0]).median,
                tpot: over_runs(&tpot).median,
                whole_per_token: over_runs(&|times| times[length - 1] / *length as f64).median,
            }
        })
        .collect();
    let starts = std::iter::once(1).chain(curve.iter().map(|(end, _)| *end));
    let is_settled = |start: &usize| *start >= SETTLED.min(tokens / 10);
    let settled =
        starts.zip(&curve).find(|(start, _)| is_settled(start)).map_or(curve[0].1, |(_, part)| part.1);
    PolicyTiming {
        policy: title(policy),
        ttft: over_runs(&|times| times[0]),
        total: curve.iter().map(|(at, _)| (*at, over_runs(&|times| times[at - 1]).median)).collect(),
        growth: curve[curve.len() - 1].1 / settled,
        curve,
        short,
        kv_bytes: stats.kv_bytes,
        side_bytes: stats.side_bytes,
        retained_tokens: stats.retained_tokens,
        prefilled_chunks: stats.prefilled_chunks,
        accounting: stats.kv_accounting,
    }
}

fn charts(rows: &[PolicyTiming]) -> Vec<Chart> {
    let chart = |title, y, of: &dyn Fn(&PolicyTiming) -> Vec<(f64, f64)>| Chart {
        title,
        x: "answer (tokens)",
        y,
        curves: rows.iter().map(|row| Curve { name: row.policy.clone(), points: of(row) }).collect(),
    };
    let floats = |points: &[(usize, f64)]| points.iter().map(|(at, y)| (*at as f64, *y)).collect();
    let rates = |row: &PolicyTiming| row.curve.iter().map(|(at, y)| (*at as f64, 1.0 / y)).collect();
    let short = |row: &PolicyTiming| row.short.iter().map(|s| (s.tokens as f64, s.whole_per_token)).collect();
    vec![
        chart("Time a token while the answer grows", "time a token (s)", &|row| floats(&row.curve)),
        chart("Time from the request on", "time (s)", &|row| floats(&row.total)),
        chart("Throughput while the answer grows", "tokens (per second)", &rates),
        chart("Short answers, prefill included", "whole time / tokens (s)", &short),
    ]
}

fn table(rows: &[PolicyTiming]) -> Table {
    let mut table = Table::new(&[
        "<policy",
        "TTFT",
        "short answers: TPOT",
        "TPOT early",
        "at the end",
        "end/early",
        "whole answer",
        "retained",
        "KV",
        "beside",
    ]);
    for row in rows {
        let end = row.curve[row.curve.len() - 1].1;
        let short = row.short.iter().map(|short| format!("{}: {}", short.tokens, seconds(short.tpot)));
        let (last, whole) = row.total[row.total.len() - 1];
        table.push(vec![
            row.policy.clone(),
            seconds(row.ttft.median),
            short.collect::<Vec<_>>().join(", "),
            seconds(end / row.growth),
            seconds(end),
            format!("{:.2}", row.growth),
            format!("{} ({} tokens/s)", seconds(whole), number(last as f64 / whole)),
            row.retained_tokens.to_string(),
            bytes(row.kv_bytes as u64),
            bytes(row.side_bytes as u64),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The times of one answer whose tokens take 2 seconds each up to a token, and 1 second from there on.
    fn growth(tokens: usize, slow: usize) -> f64 {
        let mut at = 0.0;
        let time = |token: usize| {
            at += if token < slow { 2.0 } else { 1.0 };
            at
        };
        let times: Vec<f64> = (0..tokens).map(time).collect();
        row(&methods::policy("full").unwrap(), &[times], &Default::default(), &[]).growth
    }

    #[test]
    fn the_end_is_set_against_a_part_behind_the_first_thousand_tokens() {
        // Parts have 600 tokens: the one from 600 to 1200 is in great part slow.
        assert_eq!([growth(12_000, 1000), growth(12_000, 1700)], [1.0, 0.5]);
        // The tenth of a shorter answer comes before its thousandth token.
        assert_eq!([growth(7600, 760), growth(7600, 1100)], [1.0, 0.5]);
        assert_eq!(growth(2, 0), 1.0);
    }
}
