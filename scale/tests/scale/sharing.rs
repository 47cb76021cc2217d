//! Workers share chunks and work: each chunk is stored once, requests go where their chunks are, and all gateways know the same.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::Value;

use crate::harness::{Client, PATIENCE, Plane, Workers, simulated_chat};

/// Files under a folder whose names end so.
pub(crate) fn files(folder: &Path, end: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(files(&path, end));
        } else if path.to_str().is_some_and(|name| name.ends_with(end)) {
            found.insert(path.file_name().unwrap().to_str().unwrap().to_owned());
        }
    }
    found
}

/// Sends requests, at most so many at a time, and gives their answers.
pub(crate) async fn send_all(client: &Client, requests: Vec<Value>, at_once: usize) -> Vec<(u16, Value)> {
    let mut answers = Vec::with_capacity(requests.len());
    for batch in requests.chunks(at_once) {
        answers.extend(join_all(batch.iter().map(|request| client.chat(request))).await);
    }
    answers
}

pub(crate) async fn each_chunk_is_stored_once(plane: &Plane) {
    const DOCUMENTS: usize = 40;
    let workers =
        Workers::start(plane, 4, &["--simulate", "prefill=3000,decode=2000,bytes=64,latency=0.001"]);
    let gateway = plane.gateway(&workers.refs(), &[]);
    let client = Client::of(&gateway.url);
    client.workers(4).await;
    // Each document is asked for five times, by questions that are spread over the whole time.
    let requests =
        (0..5 * DOCUMENTS).map(|question| simulated_chat(question, question * 7 % DOCUMENTS, 30)).collect();
    let answers = send_all(&client, requests, 8).await;
    let prefilled = answers.iter().map(|(status, answer)| {
        assert_eq!(*status, 200, "{answer}");
        answer["refrain"]["stats"]["prefilled_chunks"].as_u64().unwrap()
    });
    let prefilled = prefilled.sum::<u64>() as usize;
    assert!(prefilled <= DOCUMENTS * 12 / 10, "{DOCUMENTS} chunks were prefilled {prefilled} times");
    let deadline = Instant::now() + PATIENCE;
    while files(&workers.library(), ".safetensors").len() < DOCUMENTS {
        assert!(
            Instant::now() < deadline,
            "{} chunks were sent",
            files(&workers.library(), ".safetensors").len()
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(files(&workers.library(), ".safetensors").len(), DOCUMENTS);
}

pub(crate) async fn a_late_gateway_knows_what_the_first_knows(plane: &Plane) {
    let workers = Workers::start(plane, 4, &["--simulate", "prefill=3000,decode=2000,bytes=64"]);
    let first = plane.gateway(&workers.refs(), &[]);
    let client = Client::of(&first.url);
    client.workers(4).await;
    let requests =
        |from: usize| (from..from + 60).map(|index| simulated_chat(index, index, 20)).collect::<Vec<_>>();
    send_all(&client, requests(0), 8).await;
    // The second one starts under load.
    let load = tokio::spawn({
        let (client, requests) = (client.clone(), requests(60));
        async move { send_all(&client, requests, 8).await }
    });
    let second = plane.gateway(&workers.refs(), &[]);
    let late = Client::of(&second.url);
    for (status, answer) in load.await.unwrap() {
        assert_eq!(status, 200, "{answer}");
    }
    let ended = Instant::now();
    loop {
        let (known, late_known) = (client.workers(4).await, late.workers(4).await);
        let digests = |workers: &Value| {
            workers
                .as_object()
                .unwrap()
                .values()
                .map(|worker| worker["digest"].to_string())
                .collect::<BTreeSet<_>>()
        };
        let chunks: u64 =
            known.as_object().unwrap().values().map(|worker| worker["chunks"].as_u64().unwrap()).sum();
        if digests(&known) == digests(&late_known) && chunks >= 120 {
            eprintln!(
                "the late gateway knew the same {:.1} s after the last request",
                ended.elapsed().as_secs_f64()
            );
            return;
        }
        assert!(ended.elapsed() < PATIENCE, "{known} {late_known}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Requests a second of so many workers with twice as many clients, each request 250 ms of a worker's time.
async fn throughput(plane: &Plane, number: usize, time: Duration) -> f64 {
    let workers = Workers::start(plane, number, &["--simulate", "prefill=200,decode=100000,bytes=8"]);
    let gateway = plane.gateway(&workers.refs(), &[]);
    let client = Client::of(&gateway.url);
    client.workers(number).await;
    // Requests without documents, so that the choice is by load alone: 50 words of question are 250 ms.
    let question: Vec<String> = (0..50).map(|word| format!("w{word}")).collect();
    let body = serde_json::json!({ "messages": [{ "role": "user", "content": question.join(" ") }], "max_tokens": 1 });
    let started = Instant::now();
    let asks = (0..2 * number).map(|_| async {
        let mut answered = 0;
        while started.elapsed() < time {
            let (status, answer) = client.chat(&body).await;
            assert_eq!(status, 200, "{answer}");
            answered += 1;
        }
        answered
    });
    let answered: usize = join_all(asks).await.into_iter().sum();
    answered as f64 / started.elapsed().as_secs_f64()
}

pub(crate) async fn throughput_grows_with_workers(plane: &Plane) {
    let alone = throughput(plane, 1, Duration::from_secs(5)).await;
    for number in [2, 4, 8, 16] {
        let together = throughput(plane, number, Duration::from_secs(8)).await;
        let share = together / (number as f64 * alone);
        eprintln!(
            "{number} workers: {together:.1} requests/s, {share:.3} of {number} times one worker's {alone:.2}"
        );
        assert!(share >= 0.95, "{number} workers give {share:.3} of what they could");
    }
}
