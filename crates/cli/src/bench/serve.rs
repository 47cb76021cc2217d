//! `refrain bench serve`: many clients of a server at once, with documents of which a few are asked for most.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use refrain_engine::{Document, Engine};
use refrain_server::{App, Listener, Options};
use serde::Serialize;
use serde_json::{Value, json};

use super::About;
use super::precision::{documents, questions};
use crate::args;
use crate::machine;
use crate::output::{bytes, count, print, print_json, seconds};
use crate::settings::Context;
use crate::table::Table;

/// Share of the documents that gets [`HOT`] of the requests (RAGCache, arXiv 2404.12457, figure 5).
const FEW: f64 = 0.03;
const HOT: f64 = 0.6;
/// Steps between a rate that is too high and one that is not.
const HALVINGS: usize = 3;

/// A method under a number of clients.
#[derive(Debug, Serialize)]
struct Row {
    method: String,
    /// Clients at once; none where requests come at a rate.
    clients: Option<usize>,
    /// Requests a second that came.
    rate: f64,
    requests: usize,
    /// Whole answers, and those whose clients went away on purpose.
    answered: usize,
    left: usize,
    /// Answers with another status than 200, by status; 0 where there was none.
    failed: BTreeMap<u16, usize>,
    /// Seconds: median, 95th and 99th percentile.
    ttft: [f64; 3],
    between_tokens: [f64; 3],
    tokens_per_second: f64,
    /// Bytes of the process's memory after it.
    memory: Option<u64>,
}

/// What became of a request.
#[derive(Clone, Debug, Default)]
struct Outcome {
    status: u16,
    ttft: Option<f64>,
    gaps: Vec<f64>,
    tokens: usize,
    whole: bool,
    left: bool,
}

/// What requests are made of.
struct Traffic {
    url: String,
    ids: Vec<String>,
    /// Up to each document, the share of requests that want it or one before.
    shares: Vec<f64>,
    questions: Vec<String>,
    per_request: usize,
    tokens: usize,
    leave: f64,
    drawn: AtomicU64,
}

/// `refrain bench serve`
pub(crate) fn run(context: &Context, args: &args::ServeBench) -> Result<()> {
    let (methods, policies) = context.flags.apply(&args.methods, std::slice::from_ref(&args.evict))?;
    let (questions, documents) = (questions(args.questions.as_deref())?, documents(&args.docs)?);
    let folder = tempfile::Builder::new().prefix("refrain-bench-").tempdir()?;
    let mut own = context.clone();
    own.store = folder.path().to_owned();
    let engine = own.open_engine()?;
    let about = About::new(engine.decoder().backend(), 1);
    let mut rows = Vec::new();
    let mut limits = Vec::new();
    let pool = documents.len();
    let (server, url) = start(engine, args)?;
    let spinner = context.spinner("bringing the documents");
    let ids = bring(&url, &documents)?;
    spinner.finish_and_clear();
    let shares = shares(ids.len(), FEW, HOT);
    let traffic = Traffic {
        url,
        ids,
        shares,
        questions,
        per_request: args.per_request,
        tokens: args.tokens,
        leave: args.leave,
        drawn: AtomicU64::new(args.seed),
    };
    let bar = context.spinner("asking");
    for clients in &args.clients {
        for method in &methods {
            bar.set_message(format!("{}, {}", method.spec, count(*clients, "client")));
            let body = |index| traffic.body(&method.spec, &policies[0].spec, index);
            let time = args.seconds;
            let began = Instant::now();
            let outcomes = traffic.closed(*clients, time, &body);
            // Answers go on past the end, and count.
            rows.push(Row::of(&method.spec, Some(*clients), outcomes, began.elapsed()));
        }
    }
    if let Some(limit) = args.limit {
        for method in &methods {
            let body = |index| traffic.body(&method.spec, &policies[0].spec, index);
            let (best, tried) = traffic.highest(&method.spec, limit, args.seconds, &body, |rate| {
                bar.set_message(format!("{}, {rate:.2} requests a second", method.spec));
            });
            limits.push((method.spec.clone(), best));
            rows.extend(tried);
        }
    }
    bar.finish_and_clear();
    server.stop();
    if context.json {
        let limits: BTreeMap<&str, f64> =
            limits.iter().map(|(method, rate)| (method.as_str(), *rate)).collect();
        return print_json(
            &json!({ "about": about, "results": rows, "ttft_limit": args.limit.map(|l| l.as_secs_f64()), "highest_rate": limits }),
        );
    }
    let what = format!(
        "{}, {} of {}, {} % of them asked for in {} % of requests, up to {}",
        context.global.model,
        count(args.per_request, "document"),
        pool,
        100.0 * FEW,
        100.0 * HOT,
        count(args.tokens, "token")
    );
    print(&format!("{}\n{what}\n\n{}{}", about.machine(), table(&rows).text(), highest(args, &limits)))
}

fn highest(args: &args::ServeBench, limits: &[(String, f64)]) -> String {
    let Some(limit) = args.limit else { return String::new() };
    let mut table = Table::new(&["<method", "requests a second", "against the first"]);
    for (method, rate) in limits {
        table.push(vec![method.clone(), format!("{rate:.2}"), format!("{:.2}×", rate / limits[0].1)]);
    }
    format!("\nHighest rate at which 95 % of first tokens come within {limit:?}:\n\n{}", table.text())
}

/// A server in this process.
struct Running {
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Running {
    fn stop(mut self) {
        self.stop.take().map(|stop| stop.send(()));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn start(engine: Engine, args: &args::ServeBench) -> Result<(Running, String)> {
    let mut options = Options::new("bench");
    options.limits.answers = args.answers;
    options.drain = Duration::from_secs(2);
    options.limits.deadline = Duration::from_secs(24 * 3600);
    options.documents = usize::MAX;
    options.body = 1 << 30;
    let app = App::new(engine, options)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let listener = runtime.block_on(Listener::bind(address, None))?;
    let url = format!("http://{}", listener.address()?);
    let (stop, stopped) = tokio::sync::oneshot::channel();
    let thread = thread::spawn(move || {
        runtime.block_on(listener.serve(app, async {
            let _ = stopped.await;
        }));
    });
    Ok((Running { stop: Some(stop), thread: Some(thread) }, url))
}

/// Has the server keep the documents; their ids.
fn bring(url: &str, documents: &[Document]) -> Result<Vec<String>> {
    let body = json!({ "documents": documents }).to_string();
    let agent = ureq::Agent::config_builder().timeout_global(None).build().new_agent();
    let response = agent.post(format!("{url}/v1/documents")).content_type("application/json").send(&body);
    let text = response.context("the documents cannot be brought")?.into_body().read_to_string()?;
    let kept: Value = serde_json::from_str(&text)?;
    let ids = kept["data"].as_array().into_iter().flatten().filter_map(|kept| kept["id"].as_str());
    Ok(ids.map(str::to_owned).collect())
}

/// How often each of `n` documents, and those before it, are asked for: by Zipf's law, with the exponent that gives the
/// first `few` of them `hot` of all requests.
fn shares(n: usize, few: f64, hot: f64) -> Vec<f64> {
    let cumulative = |exponent: f64| {
        let mut sum = 0.0;
        let sums: Vec<f64> = (1..=n)
            .map(|rank| {
                sum += (rank as f64).powf(-exponent);
                sum
            })
            .collect();
        sums.into_iter().map(|up_to| up_to / sum).collect::<Vec<f64>>()
    };
    let first = ((few * n as f64).round() as usize).max(1);
    let (mut low, mut high) = (0.0, 8.0);
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        let share = cumulative(middle).get(first - 1).copied().unwrap_or(1.0);
        if share < hot { low = middle } else { high = middle }
    }
    cumulative(low)
}

impl Traffic {
    /// A number from 0 to 1, the next of a sequence.
    fn random(&self) -> f64 {
        let mut x = self.drawn.fetch_add(0x9e37_79b9_7f4a_7c15, Relaxed);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn body(&self, method: &str, evict: &str, index: usize) -> String {
        let mut chosen: Vec<usize> = Vec::new();
        while chosen.len() < self.per_request.min(self.ids.len()) {
            let at = self.random();
            let document = self.shares.partition_point(|share| *share < at).min(self.ids.len() - 1);
            if !chosen.contains(&document) {
                chosen.push(document);
            }
        }
        let documents: Vec<Value> =
            chosen.iter().map(|document| json!({ "id": self.ids[*document] })).collect();
        let question = &self.questions[index % self.questions.len()];
        json!({
            "messages": [{ "role": "user", "content": question }], "documents": documents, "stream": true,
            "max_tokens": self.tokens, "min_tokens": self.tokens, "refrain": { "method": method, "evict": evict },
        })
        .to_string()
    }

    /// So many clients, each asking again as soon as it is answered, for so long.
    fn closed(
        &self,
        clients: usize,
        time: Duration,
        body: &(dyn Fn(usize) -> String + Sync),
    ) -> Vec<Outcome> {
        let outcomes = Mutex::new(Vec::new());
        let (until, next) = (Instant::now() + time, AtomicU64::new(0));
        thread::scope(|scope| {
            for _ in 0..clients {
                scope.spawn(|| {
                    while Instant::now() < until {
                        let outcome = self.ask(&body(next.fetch_add(1, Relaxed) as usize));
                        outcomes.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(outcome);
                    }
                });
            }
        });
        outcomes.into_inner().unwrap_or_default()
    }

    /// Requests that come by chance, so many a second, for so long, whether others are answered or not.
    fn open(&self, rate: f64, time: Duration, body: &(dyn Fn(usize) -> String + Sync)) -> Vec<Outcome> {
        let outcomes = Mutex::new(Vec::new());
        thread::scope(|scope| {
            let (began, mut at, mut index) = (Instant::now(), 0.0, 0);
            loop {
                at += -(1.0 - self.random()).ln() / rate;
                if at >= time.as_secs_f64() {
                    break;
                }
                thread::sleep(
                    (began + Duration::from_secs_f64(at)).saturating_duration_since(Instant::now()),
                );
                let (text, outcomes) = (body(index), &outcomes);
                index += 1;
                scope.spawn(move || {
                    let outcome = self.ask(&text);
                    outcomes.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(outcome);
                });
            }
        });
        outcomes.into_inner().unwrap_or_default()
    }

    /// The highest rate at which 95 % of first tokens come in time, and all that was tried.
    fn highest(
        &self,
        method: &str,
        limit: Duration,
        time: Duration,
        body: &(dyn Fn(usize) -> String + Sync),
        mut told: impl FnMut(f64),
    ) -> (f64, Vec<Row>) {
        let mut rows: Vec<Row> = Vec::new();
        let mut holds = |rate: f64| {
            told(rate);
            let began = Instant::now();
            let outcomes = self.open(rate, time, body);
            let row = Row::of(method, None, outcomes, began.elapsed());
            let holds = row.ttft[1] <= limit.as_secs_f64() && row.failed.is_empty();
            rows.push(Row { rate, ..row });
            holds
        };
        let (mut low, mut high) = (0.0, 0.25);
        while holds(high) {
            (low, high) = (high, 2.0 * high);
        }
        for _ in 0..HALVINGS {
            let middle = (low + high) / 2.0;
            if holds(middle) { low = middle } else { high = middle }
        }
        (low, rows)
    }

    fn ask(&self, body: &str) -> Outcome {
        let leaves = self.random() < self.leave;
        let most = if leaves { 1 + (self.random() * self.tokens as f64) as usize } else { usize::MAX };
        let started = Instant::now();
        let agent = ureq::Agent::config_builder()
            .timeout_global(None)
            .http_status_as_error(false)
            .build()
            .new_agent();
        let url = format!("{}/v1/chat/completions", self.url);
        let Ok(response) = agent.post(url).content_type("application/json").send(body) else {
            return Outcome::default();
        };
        let mut outcome = Outcome { status: response.status().as_u16(), ..Outcome::default() };
        if outcome.status != 200 {
            return outcome;
        }
        let mut last = started;
        for line in BufReader::new(response.into_body().into_reader()).lines().map_while(std::io::Result::ok)
        {
            let Some(data) = line.strip_prefix("data: ") else { continue };
            outcome.whole |= data == "[DONE]";
            // Every token has an event of its own but where a character takes several.
            if data.contains("\"retained\"") && !data.contains("\"account\"") {
                let now = Instant::now();
                match outcome.ttft {
                    None => outcome.ttft = Some((now - started).as_secs_f64()),
                    Some(_) => outcome.gaps.push((now - last).as_secs_f64()),
                }
                last = now;
                outcome.tokens += 1;
                if outcome.tokens >= most {
                    outcome.left = true;
                    return outcome;
                }
            }
        }
        outcome
    }
}

impl Row {
    fn of(method: &str, clients: Option<usize>, outcomes: Vec<Outcome>, time: Duration) -> Row {
        let percentiles = |mut values: Vec<f64>| {
            values.sort_by(f64::total_cmp);
            [0.5, 0.95, 0.99].map(|share: f64| {
                let at = (share * values.len() as f64).ceil() as usize;
                values.get(at.saturating_sub(1)).copied().unwrap_or(f64::NAN)
            })
        };
        let mut failed = BTreeMap::new();
        // What is broken off without a reason is a failure as well.
        for outcome in outcomes.iter().filter(|outcome| !outcome.whole && !outcome.left) {
            *failed.entry(if outcome.status == 200 { 0 } else { outcome.status }).or_insert(0) += 1;
        }
        Row {
            method: method.to_owned(),
            clients,
            rate: outcomes.len() as f64 / time.as_secs_f64(),
            requests: outcomes.len(),
            answered: outcomes.iter().filter(|outcome| outcome.whole).count(),
            left: outcomes.iter().filter(|outcome| outcome.left).count(),
            failed,
            ttft: percentiles(outcomes.iter().filter_map(|outcome| outcome.ttft).collect()),
            between_tokens: percentiles(outcomes.iter().flat_map(|outcome| outcome.gaps.clone()).collect()),
            tokens_per_second: outcomes.iter().map(|outcome| outcome.tokens).sum::<usize>() as f64
                / time.as_secs_f64(),
            memory: machine::own_memory(),
        }
    }
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new(&[
        "<method",
        "clients",
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
        "memory",
    ]);
    for row in rows {
        let failed: Vec<String> = row.failed.iter().map(|(status, n)| format!("{n} × {status}")).collect();
        let mut cells = vec![
            row.method.clone(),
            row.clients.map_or("by rate".to_owned(), |clients| clients.to_string()),
            format!("{:.2}", row.rate),
            row.answered.to_string(),
            row.left.to_string(),
            if failed.is_empty() { "0".to_owned() } else { failed.join(", ") },
        ];
        cells.extend(row.ttft.map(seconds));
        cells.extend([row.between_tokens[0], row.between_tokens[2]].map(seconds));
        cells.push(format!("{:.1}", row.tokens_per_second));
        cells.push(row.memory.map_or("?".to_owned(), bytes));
        table.push(cells);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_documents_get_most_requests() {
        for n in [100, 300, 1000] {
            let shares = shares(n, FEW, HOT);
            let few = (FEW * n as f64) as usize;
            assert!((shares[few - 1] - HOT).abs() < 0.01, "{n}: {}", shares[few - 1]);
            assert!(shares.is_sorted() && (shares[n - 1] - 1.0).abs() < 1e-9);
        }
        assert_eq!(shares(1, FEW, HOT), [1.0]);
    }
}
