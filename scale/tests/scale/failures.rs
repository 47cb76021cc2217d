//! Workers that are killed, hang or stop, under load.

use std::collections::HashMap;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::harness::{Client, PATIENCE, Plane, Workers, content, simulated_chat};

/// Distinct requests of a load.
pub(crate) const REQUESTS: usize = 24;
/// Distinct documents of a load.
pub(crate) const DOCUMENTS: usize = 12;
pub(crate) const SIMULATION: &str = "prefill=400,decode=200,bytes=64";

pub(crate) fn request(index: usize, stream: bool) -> Value {
    let mut request = simulated_chat(index, index % DOCUMENTS, 20);
    request["stream"] = json!(stream);
    request["max_tokens"] = json!(40);
    request
}

/// The right answers of a model, from a worker that nobody disturbs.
pub(crate) async fn right_answers(model: u8) -> HashMap<usize, String> {
    let simulation = format!("prefill=100000,decode=100000,bytes=64,model={model}");
    let alone = Workers::start(&Plane::List, 1, &["--simulate", &simulation]);
    let client = Client::of(&alone.running[0].url);
    let mut answers = HashMap::new();
    for index in 0..REQUESTS {
        let (status, answer) = client.chat(&request(index, false)).await;
        assert_eq!(status, 200, "{answer}");
        answers.insert(index, content(&answer).to_owned());
    }
    answers
}

/// What became of a load.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) whole: AtomicUsize,
    pub(crate) streams: AtomicUsize,
}

/// The text of a stream.
///
/// # Errors
/// The stream, if an error ended it.
fn streamed(text: &str) -> Result<String, &str> {
    let mut content = String::new();
    for data in text.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]") {
        let event: Value = serde_json::from_str(data).map_err(|_| text)?;
        if !event["error"].is_null() {
            return Err(text);
        }
        content.push_str(event["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
    }
    Ok(content)
}

/// Sends requests by so many clients until `over`, every second one as a stream, and checks every answer: it is one of `right`.
pub(crate) async fn load(
    client: &Client,
    clients: usize,
    over: &AtomicBool,
    right: &[&HashMap<usize, String>],
) -> Outcome {
    let (outcome, next) = (Outcome::default(), AtomicUsize::new(0));
    let check = |index: usize, text: &str| {
        assert!(right.iter().any(|right| right[&index] == text), "no right answer to {index}: {text}");
    };
    let ask = async |_: usize| {
        while !over.load(Relaxed) {
            let number = next.fetch_add(1, Relaxed);
            let (index, stream) = (number % REQUESTS, number % 2 == 1);
            if !stream {
                let (status, answer) = client.chat(&request(index, false)).await;
                assert_eq!(status, 200, "a request that is answered whole never fails: {answer}");
                check(index, content(&answer));
                outcome.whole.fetch_add(1, Relaxed);
                continue;
            }
            let (status, text) = client.text("POST", "/v1/chat/completions", &request(index, true)).await;
            assert_eq!(status, 200, "no error is seen before the first token: {text}");
            check(index, &streamed(&text).expect("a stream goes on at another worker"));
            outcome.streams.fetch_add(1, Relaxed);
        }
    };
    join_all((0..clients).map(ask)).await;
    outcome
}

/// Streams of a gateway that went on at another worker, or with `outcome` did not.
async fn replays(client: &Client, outcome: &str) -> u64 {
    let (_, metrics) = client.text("GET", "/metrics", &Value::Null).await;
    let name = format!("refrain_gateway_replays_total{{outcome=\"{outcome}\"}} ");
    metrics.lines().find_map(|line| line.strip_prefix(&name)).map_or(0, |number| number.parse().unwrap())
}

pub(crate) async fn killed_workers_lose_no_answer(plane: &Plane) {
    let right = Arc::new(right_answers(0).await);
    let mut workers = Workers::start(plane, 4, &["--simulate", SIMULATION]);
    let gateway = plane.gateway(&workers.refs(), &[]);
    let client = Client::of(&gateway.url);
    client.workers(4).await;
    let over = Arc::new(AtomicBool::new(false));
    let loaded = tokio::spawn({
        let (client, over, right) = (client.clone(), over.clone(), right.clone());
        async move { load(&client, 8, &over, &[&right]).await }
    });
    let kills = 6;
    for kill in 0..kills {
        tokio::time::sleep(Duration::from_millis(1500)).await;
        // The runtime's threads go on while a worker starts.
        workers = tokio::task::spawn_blocking(move || {
            workers.restart(kill % 4);
            workers
        })
        .await
        .unwrap();
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    over.store(true, Relaxed);
    let outcome = loaded.await.unwrap();
    let replays = replays(&client, "continued").await;
    eprintln!("{kills} workers killed: {outcome:?}, {replays} streams went on at another worker");
    assert!(outcome.whole.load(Relaxed) > 50 && outcome.streams.load(Relaxed) > 50, "{outcome:?}");
    assert!(replays > 0, "no stream was killed");
    // All workers are back.
    client.workers(4).await;
}

pub(crate) async fn no_worker_of_other_numerics_goes_on_with_a_stream(plane: &Plane) {
    let mut workers = Workers::start(plane, 1, &["--simulate", "decode=20,numerics=a"]);
    workers.add(&["--simulate", "decode=20,numerics=b"]);
    let gateway = plane.gateway(&workers.refs(), &[]);
    let client = Client::of(&gateway.url);
    client.workers(2).await;
    let stream = tokio::spawn({
        let client = client.clone();
        async move { client.text("POST", "/v1/chat/completions", &request(0, true)).await }
    });
    // Some of its two seconds of tokens have come then, and the worker that streams is the one that has a request.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let (deadline, busy) = (Instant::now() + PATIENCE, |worker: &Value| worker["requests"] == json!(1));
    let numerics = loop {
        let known = client.workers(2).await;
        if let Some(worker) = known.as_object().unwrap().values().find(|worker| busy(worker)) {
            break worker["model"]["numerics"].as_str().unwrap().to_owned();
        }
        assert!(Instant::now() < deadline, "{known}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    workers.running[usize::from(numerics == "b")].kill();
    let (status, text) = stream.await.unwrap();
    assert_eq!(status, 200);
    assert!(text.contains("worker_lost") && text.contains("delta"), "{text}");
    assert_eq!((replays(&client, "no_worker").await, replays(&client, "continued").await), (1, 0));
}

pub(crate) async fn a_worker_that_hangs_holds_up_no_request(plane: &Plane) {
    let right = right_answers(0).await;
    let answers = [&right];
    let workers = Workers::start(plane, 3, &["--simulate", SIMULATION]);
    let gateway = plane.gateway(&workers.refs(), &[]);
    let client = Client::of(&gateway.url);
    client.workers(3).await;
    workers.running[0].signal("STOP");
    let (over, started) = (AtomicBool::new(false), Instant::now());
    let timer = async {
        tokio::time::sleep(Duration::from_secs(10)).await;
        over.store(true, Relaxed);
    };
    let (outcome, ()) = futures_util::join!(load(&client, 6, &over, &answers), timer);
    eprintln!("one of three workers stopped for {:.0} s: {outcome:?}", started.elapsed().as_secs_f64());
    assert!(outcome.whole.load(Relaxed) > 20 && outcome.streams.load(Relaxed) > 20, "{outcome:?}");
    client.workers(2).await;
    workers.running[0].signal("CONT");
    client.workers(3).await;
}

pub(crate) async fn workers_that_stop_finish_what_they_have(plane: &Plane) {
    let right = right_answers(0).await;
    let answers = [&right];
    let mut workers = Workers::start(plane, 3, &["--simulate", SIMULATION]);
    let gateway = plane.gateway(&workers.refs(), &[]);
    let client = Client::of(&gateway.url);
    client.workers(3).await;
    let over = AtomicBool::new(false);
    let stops = async {
        for index in 0..2 {
            tokio::time::sleep(Duration::from_secs(2)).await;
            workers.running[index].signal("TERM");
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
        over.store(true, Relaxed);
    };
    let (outcome, ()) = futures_util::join!(load(&client, 6, &over, &answers), stops);
    eprintln!("two of three workers drained: {outcome:?}");
    for worker in &mut workers.running[..2] {
        assert!(worker.wait().success());
    }
    client.workers(1).await;
    if plane.discovery() != "none" {
        let (status, answer) = client.value("DELETE", "/v1/documents/doc-1", &Value::Null).await;
        assert_ne!(status, 503, "a removal asks workers that have left the discovery: {answer}");
    }
}

#[tokio::test]
async fn a_gateway_without_workers_says_so() {
    let workers = Workers::start(&Plane::List, 1, &["--simulate", SIMULATION]);
    let gateway = Plane::List.gateway(&workers.refs(), &[]);
    let client = Client::of(&gateway.url);
    client.workers(1).await;
    assert_eq!(client.text("GET", "/ready", &Value::Null).await.0, 200);
    let probe = || {
        let mut probe = Command::new(env!("CARGO_BIN_EXE_refrain-scale"));
        probe.arg("probe").env("REFRAIN_PORT", gateway.port()).output().unwrap().status.success()
    };
    assert!(probe());
    drop(workers);
    client.workers(0).await;
    let (status, answer) = client.chat(&request(0, false)).await;
    assert_eq!((status, &answer["error"]["code"]), (503, &json!("no_worker")), "{answer}");
    assert_eq!(client.text("GET", "/ready", &Value::Null).await.0, 503);
    assert!(!probe());
}
