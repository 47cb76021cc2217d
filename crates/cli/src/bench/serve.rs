//! `refrain bench serve`: many clients of a server at once.

mod traffic;

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::AtomicU64;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use refrain_engine::{Document, Engine, Instructions};
use refrain_server::{App, Listener, Options};
use serde::Serialize;
use serde_json::{Value, json};

use self::traffic::{FEW, HOT, Outcome, Traffic, shares};
use super::measurement::Setup;
use super::prompts::{documents, questions};
use crate::args;
use crate::methods;
use crate::output::{bytes, count, print, print_json, seconds};
use crate::settings::Context;
use crate::table::Table;

/// Documents brought in one request.
const AT_ONCE: usize = 64;
/// Steps between a rate that is too high and one that is not.
const HALVINGS: usize = 3;

/// A method under a number of clients.
#[derive(Debug, Serialize)]
struct LoadResult {
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
    /// Bytes of the server's memory a while after it, when nothing is under way.
    memory: Option<u64>,
}

/// `refrain bench serve`
pub(crate) fn run(context: &Context, args: &args::ServeBench) -> Result<()> {
    let (methods, policy) = (methods::methods(&args.methods)?, methods::policy(&args.evict)?);
    let (questions, documents) = (questions(args.questions.as_deref())?, documents(&args.docs)?);
    let folder = tempfile::Builder::new().prefix("refrain-bench-").tempdir()?;
    let (server, url, about) = match &args.url {
        Some(url) => (None, url.trim_end_matches('/').to_owned(), None),
        None => {
            let mut own = context.clone();
            own.store = folder.path().to_owned();
            let engine = own.open_engine(&Instructions::default())?;
            let about = Setup::new(&**engine.decoder().device(), 1);
            let (server, url) = start(engine, args)?;
            (Some(server), url, Some(about))
        }
    };
    let pool = documents.len();
    let mut ids = Vec::new();
    if *args.per_request.end() > 0 {
        let spinner = context.spinner("bringing the documents");
        for method in &methods {
            ids = bring(&url, &method.spec, &documents)?;
        }
        spinner.finish_and_clear();
    }
    let traffic = Traffic {
        url,
        shares: shares(ids.len(), FEW, HOT),
        ids,
        questions,
        per_request: args.per_request.clone(),
        tokens: args.tokens,
        leave: args.leave,
        seed: args.seed,
        drawn: AtomicU64::new(args.seed),
    };
    let before = traffic.memory();
    let (mut rows, mut limits) = (Vec::new(), Vec::new());
    let bar = context.spinner("asking");
    for clients in &args.clients {
        for method in &methods {
            bar.set_message(format!("{}, {}", method.spec, count(*clients, "client")));
            traffic.begin_again();
            let body = |index| traffic.body(&method.spec, &policy.spec, index);
            let began = Instant::now();
            let outcomes = traffic.closed(*clients, args.seconds, &body);
            // Answers go on past the end, and count.
            let row = LoadResult::of(&method.spec, Some(*clients), outcomes, began.elapsed());
            rows.push(LoadResult { memory: traffic.memory(), ..row });
        }
    }
    if let Some(limit) = args.limit {
        for method in &methods {
            let body = |index| traffic.body(&method.spec, &policy.spec, index);
            let (best, tried) = highest(&traffic, &method.spec, limit, args.requests, &body, |rate| {
                bar.set_message(format!("{}, {rate:.2} requests a second", method.spec));
            });
            limits.push((method.spec.clone(), best));
            rows.extend(tried);
        }
    }
    bar.finish_and_clear();
    if let Some(server) = server {
        server.stop();
    }
    if context.json {
        let limits: BTreeMap<&str, f64> =
            limits.iter().map(|(method, rate)| (method.as_str(), *rate)).collect();
        return print_json(
            &json!({ "about": about, "memory_before": before, "results": rows, "ttft_limit": args.limit.map(|l| l.as_secs_f64()), "highest_rate": limits }),
        );
    }
    let whose = match &about {
        Some(about) => format!("{}\n{}", about.machine(), context.global.model),
        None => traffic.url.clone(),
    };
    let of = match (traffic.per_request.start(), traffic.per_request.end()) {
        (_, 0) => "no documents".to_owned(),
        (least, most) => {
            let (many, few, hot) = (
                if least == most { most.to_string() } else { format!("{least} to {most}") },
                100.0 * FEW,
                100.0 * HOT,
            );
            format!("{many} of {pool} documents, {few} % of them asked for in {hot} % of requests")
        }
    };
    let (tokens, held) = (count(args.tokens, "token"), before.map_or("?".to_owned(), bytes));
    let text = (table(&rows).text(), limits_text(args, &limits));
    print(&format!("{whose}, {of}, up to {tokens}; {held} of memory before\n\n{}{}", text.0, text.1))
}

fn limits_text(args: &args::ServeBench, limits: &[(String, f64)]) -> String {
    let Some(limit) = args.limit else { return String::new() };
    let mut table = Table::new(&["<method", "requests a second", "against the first"]);
    for (method, rate) in limits {
        table.push(vec![method.clone(), format!("{rate:.2}"), format!("{:.2}×", rate / limits[0].1)]);
    }
    format!("\nHighest rate at which 95 % of first tokens come within {limit:?}:\n\n{}", table.text())
}

/// A server in this process.
struct LocalServer {
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl LocalServer {
    fn stop(mut self) {
        self.stop.take().map(|stop| stop.send(()));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn start(engine: Engine, args: &args::ServeBench) -> Result<(LocalServer, String)> {
    let mut options = Options::new("bench");
    options.limits.max_num_seqs = args.max_num_seqs;
    options.shutdown_timeout = Duration::from_secs(2);
    options.limits.request_timeout = Duration::from_secs(24 * 3600);
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
    Ok((LocalServer { stop: Some(stop), thread: Some(thread) }, url))
}

/// Has the server keep the documents, ready for a method; their ids.
fn bring(url: &str, method: &str, documents: &[Document]) -> Result<Vec<String>> {
    let agent = ureq::Agent::config_builder().timeout_global(None).http_status_as_error(false).build();
    let agent = agent.new_agent();
    let mut ids = Vec::new();
    for some in documents.chunks(AT_ONCE) {
        let body = json!({ "documents": some, "method": method }).to_string();
        let response = agent.post(format!("{url}/v1/documents")).content_type("application/json").send(&body);
        let text = response.context("the documents cannot be brought")?.into_body().read_to_string()?;
        let kept: Value = serde_json::from_str(&text)?;
        if let Some(why) = kept["error"]["message"].as_str() {
            anyhow::bail!("the documents cannot be brought: {why}");
        }
        let some = kept["data"].as_array().into_iter().flatten().filter_map(|kept| kept["id"].as_str());
        ids.extend(some.map(str::to_owned));
    }
    Ok(ids)
}

/// The highest rate at which 95 % of first tokens come in time, and all that was tried.
fn highest(
    traffic: &Traffic,
    method: &str,
    limit: Duration,
    requests: usize,
    body: &(dyn Fn(usize) -> String + Sync),
    mut told: impl FnMut(f64),
) -> (f64, Vec<LoadResult>) {
    let mut rows: Vec<LoadResult> = Vec::new();
    let mut holds = |rate: f64| {
        told(rate);
        let began = Instant::now();
        let outcomes = traffic.open(rate, requests, body);
        let row = LoadResult::of(method, None, outcomes, began.elapsed());
        let holds = row.ttft[1] <= limit.as_secs_f64() && row.failed.is_empty();
        rows.push(LoadResult { rate, ..row });
        holds
    };
    let (mut low, mut high) = (0.0, 0.5);
    while holds(high) {
        (low, high) = (high, 2.0 * high);
    }
    for _ in 0..HALVINGS {
        let middle = (low + high) / 2.0;
        if holds(middle) { low = middle } else { high = middle }
    }
    (low, rows)
}

impl LoadResult {
    fn of(method: &str, clients: Option<usize>, outcomes: Vec<Outcome>, time: Duration) -> LoadResult {
        let percentiles = |mut values: Vec<f64>| {
            values.sort_by(f64::total_cmp);
            [0.5, 0.95, 0.99].map(|share: f64| {
                let at = (share * values.len() as f64).ceil() as usize;
                values.get(at.saturating_sub(1)).copied().unwrap_or(f64::NAN)
            })
        };
        let mut failed = BTreeMap::new();
        // An answer that is cut off without a status is a failure as well.
        for outcome in outcomes.iter().filter(|outcome| !outcome.whole && !outcome.left) {
            *failed.entry(if outcome.status == 200 { 0 } else { outcome.status }).or_insert(0) += 1;
        }
        LoadResult {
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
            memory: None,
        }
    }
}

fn table(rows: &[LoadResult]) -> Table {
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
        cells.push(row.memory.map_or(String::new(), bytes));
        table.push(cells);
    }
    table
}
