//! Figures of a fleet of simulated workers beside those of `refrain-sim` for the same requests: `make scale-figures`.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};

use crate::harness::{Client, PATIENCE, Plane, Process, Workers};
use crate::sharing::files;

/// What `refrain-sim` prints for the scenario of the figures, with the values of `REFRAIN_SIM_ARGS` before the scenario's own.
fn simulator(words: &[&str]) -> String {
    let program =
        std::env::var("REFRAIN_SIM").expect("REFRAIN_SIM names the program refrain-sim: make scale-figures");
    let more = std::env::var("REFRAIN_SIM_ARGS").unwrap_or_default();
    let scenario = concat!(env!("CARGO_MANIFEST_DIR"), "/figures.toml");
    let output = Command::new(program)
        .arg(scenario)
        .arg("--quiet")
        .args(words)
        .args(more.split_whitespace())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The scenario's values, and the row of the simulation with so many workers by a rule.
fn simulated(workers: usize, rule: &str) -> (Value, Value) {
    let json = simulator(&["--json", &format!("--workers={workers}"), &format!("--rules={rule}")]);
    let mut json: Value = serde_json::from_str(&json).unwrap();
    (json[0]["values"].take(), json[0]["rows"][0].take())
}

/// A request as it comes.
struct Arrival {
    time: Duration,
    chunks: Vec<u64>,
}

fn arrivals(workers: usize) -> Vec<Arrival> {
    let read = |line: &str| {
        let json: Value = serde_json::from_str(line).unwrap();
        let time = Duration::from_secs_f64(json["time"].as_f64().unwrap());
        Arrival { time, chunks: serde_json::from_value(json["chunks"].clone()).unwrap() }
    };
    simulator(&["--arrivals", &format!("--workers={workers}")]).lines().map(read).collect()
}

/// A chat about chunks, each a document, whose answer is a stream of so many tokens.
fn chat(values: &Value, chunks: &[u64], tokens: usize) -> Value {
    let words = |name: String, number: &Value| -> String {
        (0..number.as_u64().unwrap()).map(|word| format!("{name}{word} ")).collect()
    };
    let document = |chunk: &u64| json!({ "text": words(format!("c{chunk}w"), &values["tokens"]) });
    let message = json!({ "role": "user", "content": words("q".to_owned(), &values["question"]) });
    let documents: Vec<Value> = chunks.iter().map(document).collect();
    json!({ "messages": [message], "documents": documents, "max_tokens": tokens, "stream": true })
}

/// What became of a request.
struct Answered {
    /// Seconds from its arrival to its first token.
    ttft: f64,
    /// Seconds since the beginning of the load.
    end: f64,
    stats: Value,
}

/// Asks for a stream that is due at `due` of a load that began at `began`.
async fn ask(client: &Client, began: Instant, due: Duration, body: &Value) -> Answered {
    tokio::time::sleep_until((began + due).into()).await;
    let response = client.send("POST", "/v1/chat/completions", body).await;
    assert_eq!(response.status(), 200);
    let mut body = response.into_body();
    let mut text = body.frame().await.unwrap().unwrap().into_data().unwrap().to_vec();
    let ttft = (began.elapsed() - due).as_secs_f64();
    text.extend_from_slice(&body.collect().await.unwrap().to_bytes());
    let text = String::from_utf8(text).unwrap();
    let mut data = text.lines().filter_map(|line| line.strip_prefix("data: ")).rev().skip(1);
    let mut last: Value = serde_json::from_str(data.next().unwrap_or(&text)).unwrap();
    Answered { ttft, end: began.elapsed().as_secs_f64(), stats: last["refrain"]["stats"].take() }
}

/// A folder that stands for an object store with all chunks of the corpus, and the bytes of one.
async fn library(values: &Value, folder: &Path) -> u64 {
    let chunks: u64 = values["corpus"].as_str().unwrap().parse().unwrap();
    let simulation = format!("prefill=1e9,decode=1e9,latency=1,bytes={}", values["bytes_per_token"]);
    let remote = (format!("file://{}", folder.display()), Vec::new());
    let own = tempfile::tempdir().unwrap();
    let worker = Workers::on(&Plane::List, 1, &["--simulate", &simulation], own, remote);
    let client = Client::of(&worker.running[0].url);
    for chunk in 0..chunks {
        ask(&client, Instant::now(), Duration::ZERO, &chat(values, &[chunk], 1)).await;
    }
    let deadline = Instant::now() + PATIENCE;
    while files(folder, ".safetensors").len() < chunks as usize {
        assert!(Instant::now() < deadline, "{} of {chunks} chunks", files(folder, ".safetensors").len());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    longest(folder)
}

/// Bytes of the longest file under a folder.
fn longest(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).unwrap().map(Result::unwrap);
    let bytes = |entry: std::fs::DirEntry| match entry.metadata().unwrap() {
        metadata if metadata.is_dir() => longest(&entry.path()),
        metadata => metadata.len(),
    };
    entries.map(bytes).max().unwrap_or(0)
}

/// The figures of a fleet's measured requests.
struct Figures {
    requests_a_second: f64,
    /// Seconds, ascending.
    ttft: Vec<f64>,
    local_share: f64,
    gets: f64,
    bytes: f64,
    /// Seconds of the gateway's processor time a request.
    gateway: f64,
}

/// Runs the scenario's requests through a gateway and so many workers.
async fn run(plane: &Plane, workers: usize, rule: &str, values: &Value, library: (&Path, u64)) -> Figures {
    let number = |name: &str| values[name].as_f64().unwrap();
    let simulation = format!(
        "prefill={},decode=1e9,bytes={},remote={},latency={}",
        values["prefill"],
        values["bytes_per_token"],
        number("remote_rate") * 1e9,
        values["remote_latency"]
    );
    let room = |chunks: f64| format!("{:.0}B", (chunks + 0.5) * library.1 as f64);
    let (disk, memory) = (room(number("disk")), room(number("memory")));
    let options = ["--simulate", &simulation, "--disk", &disk, "--memory", &memory];
    let remote = (format!("file://{}", library.0.display()), Vec::new());
    let fleet = Workers::on(plane, workers, &options, tempfile::tempdir().unwrap(), remote);
    let gateway = plane.gateway(&fleet.refs(), &["--rule", rule]);
    let client = Client::of(&gateway.url);
    client.workers(workers).await;
    let arrivals = arrivals(workers);
    let warm_up = (arrivals.len() as f64 * number("warmup")) as usize;
    let (began, before) = (Instant::now(), gateway.cpu_seconds());
    let asks = arrivals.iter().map(|arrival| {
        let (client, due, body) = (client.clone(), arrival.time, chat(values, &arrival.chunks, 1));
        tokio::spawn(async move { ask(&client, began, due, &body).await })
    });
    let answered: Vec<Answered> = join_all(asks).await.into_iter().map(Result::unwrap).collect();
    let gateway = (gateway.cpu_seconds() - before) / answered.len() as f64;
    let measured = &answered[warm_up..];
    let sum = |name: &str| measured.iter().map(|answer| answer.stats[name].as_f64().unwrap()).sum::<f64>();
    let last = measured.iter().map(|answer| answer.end).fold(0.0, f64::max);
    let mut ttft: Vec<f64> = measured.iter().map(|answer| answer.ttft).collect();
    ttft.sort_by(f64::total_cmp);
    let (requests, chunks) = (measured.len() as f64, sum("document_chunks"));
    Figures {
        requests_a_second: requests / (last - arrivals[warm_up].time.as_secs_f64()),
        ttft,
        local_share: (chunks - sum("prefilled_chunks") - sum("fetched_chunks")) / chunks,
        gets: sum("fetched_chunks") / requests,
        bytes: sum("fetched_bytes") / requests,
        gateway,
    }
}

/// Seconds of the gateway's processor time for a token of a stream.
async fn cpu_a_token(values: &Value) -> f64 {
    const TOKENS: usize = 2000;
    let workers = Workers::start(&Plane::List, 1, &["--simulate", "prefill=1e9,decode=500"]);
    let gateway: Process = Plane::List.gateway(&workers.refs(), &[]);
    let client = Client::of(&gateway.url);
    client.workers(1).await;
    let (before, body) = (gateway.cpu_seconds(), chat(values, &[0], TOKENS));
    let (began, streams) = (Instant::now(), 8);
    join_all((0..streams).map(|_| ask(&client, began, Duration::ZERO, &body))).await;
    (gateway.cpu_seconds() - before) / (streams * TOKENS) as f64
}

/// Numbers of workers with their rules and planes.
fn fleets(discovery: &Path) -> Vec<(usize, &'static str, &'static str, Plane)> {
    let listed = [(1, "cost"), (2, "cost"), (4, "cost"), (8, "cost"), (8, "tessera")];
    let listed = listed.map(|(workers, rule)| (workers, rule, "list", Plane::List)).into_iter();
    #[cfg(feature = "dynamo")]
    let discovered = ["cost", "tessera"].map(|rule| (8, rule, "Dynamo", crate::harness::by_file(discovery)));
    #[cfg(not(feature = "dynamo"))]
    let (discovered, _) = ([], discovery);
    listed.chain(discovered).collect()
}

/// Prints a Markdown table of what was measured and, in brackets, simulated.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "measures for some minutes: make scale-figures runs it"]
async fn a_fleet_is_as_it_is_simulated() {
    let (folder, discovery) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (values, _) = simulated(1, "cost");
    let chunk_bytes = library(&values, folder.path()).await;
    println!(
        "| workers | rule | requests/s | TTFT p50, ms | p95 | p99 | local share | gets a request | MB a request | gateway CPU, ms a request |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    let mut off = Vec::new();
    for (workers, rule, name, plane) in fleets(discovery.path()) {
        let (values, simulated) = simulated(workers, rule);
        let figures = run(&plane, workers, rule, &values, (folder.path(), chunk_bytes)).await;
        let of = |name: &str| simulated[name].as_f64().unwrap();
        let percentile =
            |share: f64| figures.ttft[((share * figures.ttft.len() as f64).ceil() as usize).max(1) - 1];
        let ttft = |share: f64, name: &str| format!("{:.0} ({:.0})", percentile(share) * 1e3, of(name) * 1e3);
        let local_share = of("memory_share") + of("disk_share");
        println!(
            "| {workers}, {name} | {rule} | {:.1} | {} | {} | {} | {:.3} ({local_share:.3}) | {:.2} ({:.2}) | {:.2} ({:.2}) | {:.2} |",
            figures.requests_a_second,
            ttft(0.5, "ttft_p50"),
            ttft(0.95, "ttft_p95"),
            ttft(0.99, "ttft_p99"),
            figures.local_share,
            figures.gets,
            of("gets"),
            figures.bytes / 1e6,
            of("remote_bytes") / 1e6,
            figures.gateway * 1e3,
        );
        if !(0.95..1.05).contains(&(figures.local_share / local_share)) {
            off.push(format!("{workers}, {name}, {rule}: {:.3} ({local_share:.3})", figures.local_share));
        }
    }
    println!("\nGateway CPU a token of a stream: {:.0} us", cpu_a_token(&values).await * 1e6);
    assert!(off.is_empty(), "local shares more than 5 % off the simulator's: {off:?}");
}
