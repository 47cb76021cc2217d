//! Workers that are killed, hang or stop, under load.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::harness::{Client, Plane, Workers, content, simulated_chat};

/// Distinct requests of a load.
const REQUESTS: usize = 24;
const SIMULATION: &str = "prefill=400,decode=200,bytes=64";

fn request(index: usize, stream: bool) -> Value {
    let mut request = simulated_chat(index, index % 12, 20);
    request["stream"] = json!(stream);
    request["max_tokens"] = json!(10);
    request
}

/// The right answers, from a worker that nobody disturbs.
async fn right_answers() -> HashMap<usize, String> {
    let alone = Workers::start(&Plane::List, 1, &["--simulate", "prefill=100000,decode=100000,bytes=64"]);
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
struct Outcome {
    whole: AtomicUsize,
    streams: AtomicUsize,
    /// Streams that ended with an error after their first token.
    broken: AtomicUsize,
}

/// The text of a stream, and whether an error ended it.
fn streamed(text: &str) -> (String, bool) {
    let (mut content, mut failed) = (String::new(), false);
    for data in text.lines().filter_map(|line| line.strip_prefix("data: ")) {
        // A piece of an event that was cut off is no JSON.
        let Ok(event) = serde_json::from_str::<Value>(data) else { continue };
        failed |= event["error"]["code"] == "worker_lost";
        content.push_str(event["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
    }
    (content, failed)
}

/// Sends requests by so many clients until `over`, every second one as a stream, and checks every answer.
async fn load(client: &Client, clients: usize, over: &AtomicBool, right: &HashMap<usize, String>) -> Outcome {
    let (outcome, next) = (Outcome::default(), AtomicUsize::new(0));
    let ask = async |_: usize| {
        while !over.load(Relaxed) {
            let number = next.fetch_add(1, Relaxed);
            let (index, stream) = (number % REQUESTS, number % 2 == 1);
            if !stream {
                let (status, answer) = client.chat(&request(index, false)).await;
                assert_eq!(status, 200, "a request that is answered whole never fails: {answer}");
                assert_eq!(content(&answer), right[&index]);
                outcome.whole.fetch_add(1, Relaxed);
                continue;
            }
            let (status, text) = client.text("POST", "/v1/chat/completions", &request(index, true)).await;
            assert_eq!(status, 200, "no error is seen before the first token: {text}");
            let (content, failed) = streamed(&text);
            if failed {
                assert!(!content.is_empty() && right[&index].starts_with(&content), "{text}");
                outcome.broken.fetch_add(1, Relaxed);
            } else {
                assert_eq!(content, right[&index], "{text}");
                outcome.streams.fetch_add(1, Relaxed);
            }
        }
    };
    join_all((0..clients).map(ask)).await;
    outcome
}

pub(crate) async fn killed_workers_lose_no_answer(plane: &Plane) {
    let right = Arc::new(right_answers().await);
    let mut workers = Workers::start(plane, 4, &["--simulate", SIMULATION]);
    let gateway = plane.gateway(&workers.refs(), &[]);
    let client = Client::of(&gateway.url);
    client.workers(4).await;
    let over = Arc::new(AtomicBool::new(false));
    let loaded = tokio::spawn({
        let (client, over, right) = (client.clone(), over.clone(), right.clone());
        async move { load(&client, 8, &over, &right).await }
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
    eprintln!("{kills} workers killed: {outcome:?}");
    assert!(outcome.whole.load(Relaxed) > 50 && outcome.streams.load(Relaxed) > 50, "{outcome:?}");
    // All workers are back.
    client.workers(4).await;
}

pub(crate) async fn a_worker_that_hangs_holds_up_no_request(plane: &Plane) {
    let right = right_answers().await;
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
    let (outcome, ()) = futures_util::join!(load(&client, 6, &over, &right), timer);
    eprintln!("one of three workers stopped for {:.0} s: {outcome:?}", started.elapsed().as_secs_f64());
    assert_eq!(outcome.broken.load(Relaxed), 0, "{outcome:?}");
    assert!(outcome.whole.load(Relaxed) > 20 && outcome.streams.load(Relaxed) > 20, "{outcome:?}");
    client.workers(2).await;
    workers.running[0].signal("CONT");
    client.workers(3).await;
}

pub(crate) async fn workers_that_stop_finish_what_they_have(plane: &Plane) {
    let right = right_answers().await;
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
    let (outcome, ()) = futures_util::join!(load(&client, 6, &over, &right), stops);
    eprintln!("two of three workers drained: {outcome:?}");
    assert_eq!(outcome.broken.load(Relaxed), 0, "{outcome:?}");
    for worker in &mut workers.running[..2] {
        assert!(worker.wait().success());
    }
    client.workers(1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_listed_workers_lose_no_answer() {
    killed_workers_lose_no_answer(&Plane::List).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listed_worker_that_hangs_holds_up_no_request() {
    a_worker_that_hangs_holds_up_no_request(&Plane::List).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn listed_workers_that_stop_finish_what_they_have() {
    workers_that_stop_finish_what_they_have(&Plane::List).await;
}

#[tokio::test]
async fn a_gateway_without_workers_says_so() {
    let workers = Workers::start(&Plane::List, 1, &["--simulate", SIMULATION]);
    let gateway = Plane::List.gateway(&workers.refs(), &[]);
    let client = Client::of(&gateway.url);
    client.workers(1).await;
    assert_eq!(client.text("GET", "/ready", &Value::Null).await.0, 200);
    drop(workers);
    client.workers(0).await;
    let (status, answer) = client.chat(&request(0, false)).await;
    assert_eq!((status, &answer["error"]["code"]), (503, &json!("no_worker")), "{answer}");
    assert_eq!(client.text("GET", "/ready", &Value::Null).await.0, 503);
}
