//! The report of a benchmark of the server: rows, medians of rounds, tables.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use super::client::{Counts, Kind, Outcome};
use super::host::{Memory, Variant};
use crate::args::Scenario;
use crate::bench::measurement::Spread;
use crate::output::{bytes, percent, seconds};
use crate::table::Table;

/// The requests that a row is about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Part {
    All,
    FirstTurns,
    LaterTurns,
    Kind(Kind),
    /// Requests of one key, by its number from 1.
    Key(usize),
}

impl Part {
    fn has(&self, outcome: &Outcome) -> bool {
        match self {
            Part::All => true,
            Part::FirstTurns => !outcome.later,
            Part::LaterTurns => outcome.later,
            Part::Kind(kind) => outcome.kind == *kind,
            Part::Key(key) => outcome.key + 1 == *key,
        }
    }

    fn name(&self) -> String {
        match self {
            Part::All => "all".to_owned(),
            Part::FirstTurns => "first turns".to_owned(),
            Part::LaterTurns => "later turns".to_owned(),
            Part::Kind(Kind::Chat) => "chats".to_owned(),
            Part::Kind(Kind::Tools) => "tools".to_owned(),
            Part::Kind(Kind::Ingest) => "ingests".to_owned(),
            Part::Key(key) => format!("key {key}"),
        }
    }
}

/// A measurement: a server and a method under some clients.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Cell {
    /// The features that the server lacks; none for its defaults.
    #[serde(rename = "without")]
    pub(super) variant: Variant,
    pub(super) method: String,
    /// Clients at once; none where requests come at a rate.
    pub(super) clients: Option<usize>,
}

/// Requests of a measurement.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    #[serde(flatten)]
    pub(super) cell: Cell,
    pub(super) part: Part,
    /// Requests a second that came.
    pub(super) rate: f64,
    pub(super) requests: usize,
    /// Whole answers, and those whose clients went away on purpose.
    pub(super) answered: usize,
    pub(super) left: usize,
    /// Answers with another status than 200, by status; 0 where there was none.
    pub(super) failed: BTreeMap<u16, usize>,
    /// The message of the first failure of each status.
    pub(super) errors: BTreeMap<u16, String>,
    /// Seconds: median, 95th and 99th percentile.
    pub(super) ttft: [f64; 3],
    pub(super) between_tokens: [f64; 3],
    /// Seconds a token after the first, of each answer.
    pub(super) tpot: [f64; 3],
    /// Seconds to the end of whole answers.
    pub(super) latency: [f64; 3],
    pub(super) tokens_per_second: f64,
    /// Share of the prompts' tokens that were cached, and that came out of the prefix cache.
    pub(super) cached_share: f64,
    pub(super) prefix_share: f64,
    /// Tokens that were proposed, a token of the answers, and the share of them that were right.
    pub(super) drafted_share: f64,
    pub(super) accepted_share: f64,
    /// The server's memory a while after it, when nothing is under way.
    pub(super) memory: Option<Memory>,
}

/// The 50th, 95th and 99th percentile; NaN where there is nothing.
fn percentiles(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [0.5, 0.95, 0.99].map(|share: f64| {
        let at = (share * values.len() as f64).ceil() as usize;
        values.get(at.saturating_sub(1)).copied().unwrap_or(f64::NAN)
    })
}

/// The median of some values; NaN where one is.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let values: Vec<f64> = values.collect();
    if values.iter().any(|value| value.is_nan()) { f64::NAN } else { Spread::of(values).median }
}

impl Row {
    pub(super) fn of(cell: &Cell, part: Part, outcomes: &[Outcome], time: Duration) -> Row {
        let some: Vec<&Outcome> = outcomes.iter().filter(|outcome| part.has(outcome)).collect();
        let (mut failed, mut errors) = (BTreeMap::new(), BTreeMap::new());
        // An answer that is cut off without a status is a failure as well.
        for outcome in some.iter().filter(|outcome| !outcome.whole && !outcome.left) {
            let status = if outcome.status == 200 { 0 } else { outcome.status };
            *failed.entry(status).or_insert(0) += 1;
            errors.entry(status).or_insert_with(|| outcome.text.clone());
        }
        let share = |part: usize, whole: usize| part as f64 / whole as f64;
        let of = |value: &dyn Fn(&Outcome) -> Option<f64>| {
            percentiles(some.iter().filter_map(|outcome| value(outcome)).collect())
        };
        let counts = Counts::sum(some.iter().map(|outcome| &outcome.counts));
        let tokens: usize = some.iter().map(|outcome| outcome.tokens).sum();
        Row {
            cell: cell.clone(),
            part,
            rate: share(some.len(), 1) / time.as_secs_f64(),
            requests: some.len(),
            answered: some.iter().filter(|outcome| outcome.whole).count(),
            left: some.iter().filter(|outcome| outcome.left).count(),
            failed,
            errors,
            ttft: of(&|outcome| outcome.ttft),
            between_tokens: percentiles(some.iter().flat_map(|outcome| outcome.gaps.clone()).collect()),
            tpot: of(&|outcome| outcome.tpot),
            latency: of(&|outcome| outcome.latency),
            tokens_per_second: tokens as f64 / time.as_secs_f64(),
            cached_share: share(counts.cached, counts.prompt),
            prefix_share: share(counts.prefix, counts.prompt),
            drafted_share: share(counts.drafted, counts.answer),
            accepted_share: share(counts.accepted, counts.drafted),
            memory: None,
        }
    }

    /// The median of each number over rounds of the same measurement; counts are those of all rounds.
    pub(super) fn median(rounds: &[&Row]) -> Row {
        let over = |of: &dyn Fn(&Row) -> f64| median(rounds.iter().map(|row| of(row)));
        let each = |of: &dyn Fn(&Row) -> [f64; 3]| [0, 1, 2].map(|i| over(&|row| of(row)[i]));
        let count = |of: &dyn Fn(&Row) -> usize| rounds.iter().map(|row| of(row)).sum();
        let mut failed = BTreeMap::new();
        for (status, n) in rounds.iter().flat_map(|row| &row.failed) {
            *failed.entry(*status).or_insert(0) += n;
        }
        let errors = rounds.iter().rev().flat_map(|row| row.errors.clone()).collect();
        let last = rounds[rounds.len() - 1];
        Row {
            cell: last.cell.clone(),
            part: last.part.clone(),
            rate: over(&|row| row.rate),
            requests: count(&|row| row.requests),
            answered: count(&|row| row.answered),
            left: count(&|row| row.left),
            failed,
            errors,
            ttft: each(&|row| row.ttft),
            between_tokens: each(&|row| row.between_tokens),
            tpot: each(&|row| row.tpot),
            latency: each(&|row| row.latency),
            tokens_per_second: over(&|row| row.tokens_per_second),
            cached_share: over(&|row| row.cached_share),
            prefix_share: over(&|row| row.prefix_share),
            drafted_share: over(&|row| row.drafted_share),
            accepted_share: over(&|row| row.accepted_share),
            memory: last.memory,
        }
    }

    /// Requests that the server failed: answers that broke off, and statuses of 500 and above.
    pub(super) fn server_errors(&self) -> usize {
        self.failed.iter().filter(|(status, _)| **status == 0 || **status >= 500).map(|(_, n)| n).sum()
    }

    /// The cells of how requests ended: answered, left, failed.
    fn ends(&self) -> [String; 3] {
        [self.answered.to_string(), self.left.to_string(), self.failures()]
    }

    fn failures(&self) -> String {
        let failed: Vec<String> = self.failed.iter().map(|(status, n)| format!("{n} × {status}")).collect();
        if failed.is_empty() { "0".to_owned() } else { failed.join(", ") }
    }

    /// The cells with which every table begins.
    fn head(&self, compares: bool) -> Vec<String> {
        let clients = self.cell.clients.map_or("by rate".to_owned(), |clients| clients.to_string());
        let server = compares.then(|| self.cell.variant.name().to_owned());
        server.into_iter().chain([self.cell.method.clone(), clients]).collect()
    }
}

/// Seconds, or a dash where there are none.
fn time(value: f64) -> String {
    if value.is_nan() { "–".to_owned() } else { seconds(value) }
}

/// A share in per cent, or a dash where there is nothing to share.
fn share(value: f64) -> String {
    if value.is_nan() { "–".to_owned() } else { percent((value * 1e4).round() as usize, 10_000) }
}

fn heading(compares: bool, columns: &[&'static str]) -> Table {
    let server: &[&str] = if compares { &["<server"] } else { &[] };
    Table::new(&[server, &["<method", "clients"], columns].concat())
}

/// The table of a scenario.
pub(super) fn table(scenario: Scenario, compares: bool, rows: &[Row]) -> Table {
    match scenario {
        Scenario::Mixed => mixed(compares, rows),
        Scenario::MultiTurn => turns(compares, rows),
        Scenario::Extractive => extractive(compares, rows),
    }
}

fn mixed(compares: bool, rows: &[Row]) -> Table {
    let columns = [
        "requests/s",
        "answered",
        "left",
        "failed",
        "TTFT p50",
        "p95",
        "p99",
        "between tokens p50",
        "p99",
        "tokens/s",
        "prompts from prefix cache",
        "memory",
        "of it prefix cache",
    ];
    let mut table = heading(compares, &columns);
    for row in rows.iter().filter(|row| row.part == Part::All) {
        let mut cells = row.head(compares);
        cells.push(format!("{:.2}", row.rate));
        cells.extend(row.ends());
        cells.extend(row.ttft.map(time));
        cells.extend([row.between_tokens[0], row.between_tokens[2]].map(time));
        cells.push(format!("{:.1}", row.tokens_per_second));
        cells.push(share(row.prefix_share));
        cells.push(row.memory.map_or(String::new(), |memory| bytes(memory.process)));
        cells.push(row.memory.map_or(String::new(), |memory| bytes(memory.prefix_cache)));
        table.push(cells);
    }
    table
}

fn turns(compares: bool, rows: &[Row]) -> Table {
    let columns = [
        "<turns",
        "requests/s",
        "answered",
        "left",
        "failed",
        "TTFT p50",
        "p95",
        "p99",
        "cached",
        "of it prefix",
    ];
    let mut table = heading(compares, &columns);
    for row in rows.iter().filter(|row| row.part != Part::All) {
        let mut cells = row.head(compares);
        cells.extend([row.part.name().trim_end_matches(" turns").to_owned(), format!("{:.2}", row.rate)]);
        cells.extend(row.ends());
        cells.extend(row.ttft.map(time));
        cells.extend([row.cached_share, row.prefix_share / row.cached_share].map(share));
        table.push(cells);
    }
    table
}

fn extractive(compares: bool, rows: &[Row]) -> Table {
    let columns = [
        "requests/s",
        "answered",
        "left",
        "failed",
        "TTFT p50",
        "TPOT p50",
        "p95",
        "p99",
        "tokens/s",
        "drafted/token",
        "accepted",
    ];
    let mut table = heading(compares, &columns);
    for row in rows.iter().filter(|row| row.part == Part::All) {
        let mut cells = row.head(compares);
        cells.push(format!("{:.2}", row.rate));
        cells.extend(row.ends());
        cells.push(time(row.ttft[0]));
        cells.extend(row.tpot.map(time));
        cells.extend([format!("{:.1}", row.tokens_per_second), format!("{:.2}", row.drafted_share)]);
        cells.push(share(row.accepted_share));
        table.push(cells);
    }
    table
}

/// How requests of several keys, or of several kinds, fared beside each other; none where there is one of them.
pub(super) fn fairness(compares: bool, rows: &[Row]) -> Option<Table> {
    let parts: Vec<&Row> =
        rows.iter().filter(|row| matches!(row.part, Part::Kind(_) | Part::Key(_))).collect();
    let columns = [
        "<of",
        "requests",
        "answered",
        "left",
        "failed",
        "TTFT p50",
        "p95",
        "p99",
        "whole p50",
        "p95",
        "p99",
        "tokens/s",
    ];
    let mut table = heading(compares, &columns);
    for row in &parts {
        let mut cells = row.head(compares);
        cells.extend([row.part.name(), row.requests.to_string()]);
        cells.extend(row.ends());
        cells.extend(row.ttft.map(time));
        cells.extend(row.latency.map(time));
        cells.push(format!("{:.1}", row.tokens_per_second));
        table.push(cells);
    }
    (!parts.is_empty()).then_some(table)
}

/// The messages of failures, one line a status.
pub(super) fn errors(rows: &[Row]) -> String {
    let all: BTreeMap<&u16, &String> = rows.iter().rev().flat_map(|row| &row.errors).collect();
    let lines = all.into_iter().filter(|(_, said)| !said.is_empty());
    lines.map(|(status, said)| format!("{status}: {said}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_count_their_part_and_medians_those_of_rounds() {
        let cell = Cell { variant: Variant::default(), method: "pie".to_owned(), clients: Some(2) };
        let counts = Counts { prompt: 100, cached: 80, prefix: 60, answer: 10, drafted: 8, accepted: 6 };
        let first = Outcome { status: 200, ttft: Some(1.0), whole: true, counts, ..Outcome::default() };
        let later = Outcome { later: true, ttft: Some(0.5), ..first.clone() };
        let broken = Outcome { status: 503, later: true, ..Outcome::default() };
        let outcomes = [first, later, broken];
        let row = |part| Row::of(&cell, part, &outcomes, Duration::from_secs(2));
        let (all, later) = (row(Part::All), row(Part::LaterTurns));
        assert_eq!((all.requests, all.answered, all.server_errors()), (3, 2, 1));
        assert_eq!((later.requests, later.ttft[0], later.rate), (2, 0.5, 1.0));
        assert!((all.cached_share - 0.8).abs() < 1e-9 && (all.accepted_share - 0.75).abs() < 1e-9);
        let slow = Row { ttft: [3.0; 3], ..all.clone() };
        let between = Row::median(&[&all, &slow, &Row { ttft: [2.0; 3], ..all.clone() }]);
        assert_eq!((between.ttft, between.requests), ([2.0; 3], 9));
        assert!(row(Part::Key(2)).cached_share.is_nan());
    }
}
