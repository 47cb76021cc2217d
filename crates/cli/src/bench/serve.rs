//! `refrain bench serve`: many clients of a server at once.

mod client;
mod host;
mod report;
mod traffic;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use anyhow::Result;
use indicatif::ProgressBar;
use refrain::engine::{Document, Instructions};
use serde_json::json;

use self::client::{Kind, Outcome};
use self::host::{Host, Memory, Variant};
use self::report::{Cell, Part, Row};
use self::traffic::{FEW, HOT, Traffic, shares};
use super::measurement::Setup;
use super::prompts::{documents, folder, questions};
use crate::args::{self, Scenario};
use crate::methods;
use crate::output::{Fail, bytes, count, print, print_result, seconds, warn};
use crate::settings::Context;
use crate::table::Table;

/// Steps between a rate that is too high and one that is not.
const HALVINGS: usize = 3;
/// Tokens of each answer, unless they are given; those of extracts are the most that they may have.
const TOKENS: usize = 32;
const EXTRACT_TOKENS: usize = 128;

/// A benchmark that is set up.
struct Bench<'a> {
    args: &'a args::ServeBench,
    host: Host,
    traffic: Traffic,
    methods: Vec<String>,
    /// The documents that are brought to each server.
    documents: Vec<Document>,
    bar: ProgressBar,
}

/// The results of a benchmark.
#[derive(Default)]
struct Results {
    rows: Vec<Row>,
    /// The highest rate of each method within the limit.
    limits: Vec<(String, f64)>,
    /// Memory of a server that nobody has asked anything yet, at the beginning and at the end: what the others left behind shows.
    memory_before: Option<Memory>,
    memory_after: Option<Memory>,
}

/// `refrain bench serve`
pub(crate) fn run(context: &Context, args: &args::ServeBench) -> Result<()> {
    check(args)?;
    let (methods, policy) = (methods::methods(&args.methods)?, methods::policy(&args.evict)?);
    let (questions, documents) = (questions(args.questions.as_deref())?, documents(&args.docs)?);
    let (host, about) = match &args.url {
        Some(url) => {
            let url = url.trim_end_matches('/').to_owned();
            (Host::Running { url, keys: args.api_key.clone() }, None)
        }
        None => {
            let folder = folder()?;
            let mut own = context.clone();
            own.store = folder.path().to_owned();
            // Documents of a benchmark are for no other machine, and chunks of others would be fetched in place of computed.
            #[cfg(feature = "remote")]
            {
                own.global.remote = None;
            }
            let engine = own.open_engine(&Instructions::default())?;
            let about = Setup::new(&**engine.decoder().device(), args.rounds());
            (Host::own(engine, folder, args)?, Some(about))
        }
    };
    let brought = if *args.per_request.end() > 0 { documents.clone() } else { Vec::new() };
    let tokens = if args.scenario == Scenario::Extractive { EXTRACT_TOKENS } else { TOKENS };
    let traffic = Traffic {
        scenario: args.scenario,
        shares: shares(brought.len(), FEW, HOT),
        documents,
        questions,
        per_request: args.per_request.clone(),
        tokens: args.tokens.unwrap_or(tokens),
        turns: args.turns as usize,
        leave: args.leave,
        ingest: args.ingest,
        tools: args.tools,
        evict: policy.spec,
        seed: args.seed,
        drawn: AtomicU64::new(args.seed),
        shares_server: args.url.is_some(),
    };
    let methods = methods.into_iter().map(|method| method.spec).collect();
    let bar = context.spinner("bringing the documents");
    let bench = Bench { args, host, traffic, methods, documents: brought, bar };
    let results = bench.measure()?;
    bench.bar.finish_and_clear();
    let failed: usize = results.rows.iter().filter(|row| row.part == Part::All).map(Row::server_errors).sum();
    // The status tells of failures where nobody reads the output, too.
    let outcome = match failed {
        0 => Ok(()),
        _ => Err(Fail::new(format!("the server failed {}", count(failed, "request")))
            .hint("its log says why")
            .into()),
    };
    bench.tell(context, about.as_ref(), results, outcome)
}

/// # Errors
/// If options do not go together.
fn check(args: &args::ServeBench) -> Result<()> {
    let shares = [("--leave", args.leave), ("--ingest", args.ingest), ("--tools", args.tools)];
    if let Some((name, share)) = shares.iter().find(|(_, share)| !(0.0..=1.0).contains(share)) {
        return Err(Fail::usage(format!("{name} {share} is no share")).hint("choose from 0 to 1").into());
    }
    if args.ingest + args.tools > 1.0 {
        let message = "--ingest and --tools are more than all requests together";
        return Err(Fail::usage(message).hint("their sum is at most 1; the others are chats").into());
    }
    let is_mixed = args.scenario == Scenario::Mixed;
    if !is_mixed && (args.ingest + args.tools > 0.0 || args.limit.is_some()) {
        let message = "--ingest, --tools and --limit are for requests that stand alone";
        return Err(Fail::usage(message).hint("leave them out, or choose --scenario mixed").into());
    }
    if args.limit.is_some() && !args.compare.is_empty() {
        let message = "--limit and --compare measure different things";
        return Err(Fail::usage(message).hint("run the benchmark once with each").into());
    }
    Ok(())
}

impl Bench<'_> {
    fn measure(&self) -> Result<Results> {
        let mut results = Results::default();
        let (rounds, variants) = (self.args.rounds(), Variant::of(&self.args.compare));
        let mut measured: Vec<Vec<Row>> = Vec::new();
        // The chunks are computed once, and not while the first server is measured.
        let methods: Vec<&str> = self.methods.iter().map(String::as_str).collect();
        let idle = || -> Result<Option<Memory>> {
            let server = self.host.serve(Variant::default(), &methods, &self.documents)?;
            let memory = server.memory();
            server.stop();
            Ok(memory)
        };
        self.host.prepare(&methods, &self.documents)?;
        results.memory_before = idle()?;
        for round in 0..rounds as usize {
            let mut place = 0;
            for clients in &self.args.clients {
                for method in &self.methods {
                    for at in 0..variants.len() {
                        // Servers take turns at being first.
                        let at = (at + round) % variants.len();
                        let cell =
                            Cell { variant: variants[at], method: method.clone(), clients: Some(*clients) };
                        let rows = self.closed(&cell, *clients)?;
                        let place = place + at;
                        measured.resize_with(measured.len().max(place + 1), Vec::new);
                        measured[place].extend(rows);
                    }
                    place += variants.len();
                }
            }
        }
        for rows in measured {
            let mut parts: Vec<&Part> = Vec::new();
            rows.iter().for_each(|row| {
                if !parts.contains(&&row.part) {
                    parts.push(&row.part)
                }
            });
            for part in parts {
                let same: Vec<&Row> = rows.iter().filter(|row| row.part == *part).collect();
                results.rows.push(Row::median(&same));
            }
        }
        if let Some(limit) = self.args.limit {
            for method in &self.methods {
                let best = self.highest(method, limit, &mut results.rows)?;
                results.limits.push((method.clone(), best));
            }
        }
        results.memory_after = idle()?;
        Ok(results)
    }

    /// Rows of clients that ask again as soon as they are answered, of a server that has just begun, or of the one that runs already.
    fn closed(&self, cell: &Cell, clients: usize) -> Result<Vec<Row>> {
        let target = self.host.serve(cell.variant, &[&cell.method], &self.documents)?;
        self.bar.set_message(format!(
            "{}, {}, {}",
            cell.variant.name(),
            cell.method,
            count(clients, "client")
        ));
        let began = Instant::now();
        let outcomes = self.traffic.closed(&target, &cell.method, clients, self.args.seconds);
        // Answers go on past the end, and count.
        let time = began.elapsed();
        let memory = target.memory();
        let parts = parts(&self.traffic, &outcomes, target.keys.len());
        target.stop();
        let row = |part| Row { memory, ..Row::of(cell, part, &outcomes, time) };
        Ok(parts.into_iter().map(row).collect())
    }

    /// The highest rate that was tried at which 95 % of first tokens come in time; all that was tried joins the rows.
    fn highest(&self, method: &str, limit: Duration, rows: &mut Vec<Row>) -> Result<f64> {
        let cell = Cell { variant: Variant::default(), method: method.to_owned(), clients: None };
        let mut holds = |rate: f64| -> Result<bool> {
            self.bar.set_message(format!("{method}, {rate:.2} requests a second"));
            let target = self.host.serve(cell.variant, &[method], &self.documents)?;
            let began = Instant::now();
            let outcomes = self.traffic.open(&target, method, rate, self.args.requests);
            let row = Row::of(&cell, Part::All, &outcomes, began.elapsed());
            target.stop();
            let holds = row.ttft[1] <= limit.as_secs_f64() && row.failed.is_empty();
            rows.push(Row { rate, ..row });
            Ok(holds)
        };
        let (mut low, mut high) = (0.0, 0.5);
        while holds(high)? {
            // A higher rate would send the same burst.
            let all_in = self.args.requests as f64 / high;
            if all_in < limit.as_secs_f64() {
                warn(&format!(
                    "{method} answers {high:.2} requests a second or more: all {} came within {}; give more --requests, or a shorter --limit",
                    self.args.requests,
                    seconds(all_in)
                ));
                return Ok(high);
            }
            (low, high) = (high, 2.0 * high);
        }
        for _ in 0..HALVINGS {
            let middle = (low + high) / 2.0;
            if holds(middle)? { low = middle } else { high = middle }
        }
        Ok(low)
    }

    /// Prints the results, with the error that came with them, if there is one.
    fn tell(
        &self,
        context: &Context,
        about: Option<&Setup>,
        results: Results,
        outcome: Result<()>,
    ) -> Result<()> {
        let Results { rows, limits, memory_before, memory_after } = results;
        let (args, compares) = (self.args, !self.args.compare.is_empty());
        if context.json {
            let limits: BTreeMap<&str, f64> =
                limits.iter().map(|(method, rate)| (method.as_str(), *rate)).collect();
            let result = json!({
                "about": about, "scenario": args.scenario, "rounds": args.rounds(), "memory_before": memory_before,
                "memory_after": memory_after,
                "results": rows, "ttft_limit": args.limit.map(|l| l.as_secs_f64()), "highest_rate": limits,
            });
            return print_result(result, outcome);
        }
        let whose = match (about, &self.host) {
            (None, Host::Running { url, .. }) => url.clone(),
            (about, _) => {
                let machine = about.map_or(String::new(), Setup::machine);
                format!("{machine}\n{}", context.global.model)
            }
        };
        let rounds = match args.rounds() {
            1 => String::new(),
            rounds => format!(", medians of {rounds} rounds"),
        };
        let tokens = count(self.traffic.tokens, "token");
        let [before, after] = [memory_before, memory_after]
            .map(|memory| memory.map_or("?".to_owned(), |memory| bytes(memory.process)));
        let mut text = format!(
            "{whose}, {}, up to {tokens}{rounds}; {before} of memory before, {after} after\n\n{}",
            self.asked_for(),
            report::table(args.scenario, compares, &rows).text()
        );
        if let Some(table) = report::fairness(compares, &rows) {
            text += &format!("\n{}", table.text());
        }
        let errors = report::errors(&rows);
        if !errors.is_empty() {
            text += &format!("\nFailures, the first of each:\n{errors}");
        }
        let printed = print(&(text + &limits_text(args.limit, &limits)));
        outcome.and(printed)
    }

    /// The documents of requests, in words.
    fn asked_for(&self) -> String {
        let pool = self.documents.len();
        let (least, most) =
            (self.args.per_request.start().min(&pool), self.args.per_request.end().min(&pool));
        if *most == 0 {
            return "no documents".to_owned();
        }
        let many = if least == most { most.to_string() } else { format!("{least} to {most}") };
        let (few, hot) = (100.0 * FEW, 100.0 * HOT);
        format!("{many} of {pool} documents, {few} % of them asked for in {hot} % of requests")
    }
}

/// The parts of a measurement that get a row each.
fn parts(traffic: &Traffic, outcomes: &[Outcome], keys: usize) -> Vec<Part> {
    let mut parts = vec![Part::All];
    if traffic.scenario == Scenario::MultiTurn {
        parts.extend([Part::FirstTurns, Part::LaterTurns]);
    } else if keys > 1 {
        parts.extend((1..=keys).map(Part::Key));
    } else {
        let kinds: BTreeSet<Kind> = outcomes.iter().map(|outcome| outcome.kind).collect();
        if kinds.len() > 1 {
            parts.extend(kinds.into_iter().map(Part::Kind));
        }
    }
    parts
}

/// The highest rate of each method within a limit; nothing without one.
fn limits_text(limit: Option<Duration>, limits: &[(String, f64)]) -> String {
    let Some(limit) = limit else { return String::new() };
    let mut table = Table::new(&["<method", "requests a second", "against the first"]);
    for (method, rate) in limits {
        let ratio = rate / limits[0].1;
        // The first method may hold no rate.
        let ratio = if ratio.is_finite() { format!("{ratio:.2}×") } else { "–".to_owned() };
        table.push(vec![method.clone(), format!("{rate:.2}"), ratio]);
    }
    format!("\nHighest rate at which 95 % of first tokens come within {limit:?}:\n\n{}", table.text())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_method_without_a_rate_has_no_ratio_and_gives_none() {
        let text = |rates: [f64; 2]| {
            let limits = ["vanilla", "drift"].into_iter().zip(rates);
            let limits: Vec<(String, f64)> = limits.map(|(name, rate)| (name.to_owned(), rate)).collect();
            limits_text(Some(Duration::from_secs(1)), &limits)
        };
        let none = text([0.0, 2.0]);
        assert!(!none.contains("NaN") && !none.contains("inf") && none.matches('–').count() == 2, "{none}");
        assert!(text([0.5, 2.0]).contains("4.00×"));
    }
}
