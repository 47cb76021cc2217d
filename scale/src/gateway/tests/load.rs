//! The work and the tokens of requests, as the gateway books and counts them.

use std::collections::BTreeSet;

use super::*;

/// A gateway before two workers, of which the first that is asked does not end a request without documents; and that worker.
async fn with_long_request(path: &'static str, act: Act, body: &Value) -> (Gateway, Arc<Script>, u64) {
    let (gateway, script) = gateway(2, &[act]);
    let (sender, body) = (gateway.clone(), body.clone());
    tokio::spawn(async move { ask(&sender, "POST", path, &body).await });
    while asked(&script).is_empty() {
        tokio::task::yield_now().await;
    }
    let busy = asked(&script)[0];
    (gateway, script, busy)
}

#[tokio::test]
async fn a_long_request_without_documents_is_work() {
    let chat_of = |words| json!({ "messages": [{ "role": "user", "content": "word ".repeat(words) }] });
    let ingest = json!({ "text": "word ".repeat(20_000), "stream": true });
    let (chats, documents) = ("/v1/chat/completions", "/v1/documents");
    // The first event of an ingest's stream ends no work.
    let progress = Act::Stall(&["data: {\"object\":\"document.progress\",\"done\":1,\"total\":90}\n\n"]);
    for (path, act, body, stays) in [
        (chats, Act::Hang, chat_of(1), true),
        (chats, Act::Hang, chat_of(20_000), false),
        (documents, Act::Hang, ingest.clone(), false),
        (documents, progress, ingest, false),
    ] {
        let (gateway, script, busy) = with_long_request(path, act, &body).await;
        *script.plan.lock().unwrap() = ChunkPlan { chunks: vec![(7, 900)], prompt_tokens: 910, charge: 0.0 };
        gateway.0.fleet.apply(WorkerEvent::Reported(WorkerId(busy), report(&[7], 0)));
        chat(&gateway).await;
        let wanted = if stays { busy } else { 1 - busy };
        assert_eq!(asked(&script), [busy, wanted], "behind {} bytes to {path}", body.to_string().len());
    }
}

#[tokio::test]
async fn a_plan_is_asked_of_a_second_worker_where_the_first_has_no_room() {
    for (status, is_planned) in [(429, true), (503, true), (400, false)] {
        let (gateway, script) = gateway(2, &[]);
        *script.plan.lock().unwrap() = ChunkPlan { chunks: vec![(7, 100)], prompt_tokens: 100, charge: 0.0 };
        script.plan_statuses.lock().unwrap().push_back(status);
        chat(&gateway).await;
        let tokens = if is_planned { 100 } else { 0 };
        assert_eq!(counted(&gateway, "chunk_tokens"), tokens, "status {status}");
    }
}

#[tokio::test]
async fn the_turns_of_a_chat_meet_at_one_of_the_workers_that_are_equally_busy() {
    let (gateway, script) = gateway(4, &[]);
    for chat in 0..40 {
        let mut messages = vec![json!({ "role": "system", "content": "Be brief." })];
        for turn in 0..3 {
            messages.push(json!({ "role": "user", "content": format!("question {chat}, {turn}") }));
            let body = json!({ "messages": messages, "max_tokens": turn + 1 });
            ask(&gateway, "POST", "/v1/chat/completions", &body).await;
            messages.push(json!({ "role": "assistant", "content": "yes" }));
        }
        let workers = asked(&script).split_off(chat * 3);
        assert!(workers.iter().all(|worker| *worker == workers[0]), "chat {chat}: {workers:?}");
    }
    let used: BTreeSet<u64> = asked(&script).into_iter().collect();
    assert_eq!(used.len(), 4, "chats go to all workers");
}

/// The value of a counter.
fn counted(gateway: &Gateway, name: &str) -> u64 {
    let text = gateway.0.metrics.text(&gateway.0.fleet);
    let line = format!("refrain_gateway_{name}_total ");
    text.lines().find_map(|at| at.strip_prefix(&line)).unwrap().parse().unwrap()
}

#[tokio::test]
async fn the_chunks_of_a_request_are_counted_once() {
    for acts in [
        vec![Act::Lose, Act::Answer(429, "full"), Act::Answer(200, "fine")],
        vec![Act::Break(EVENTS, &STREAM[0][..1]), Act::Stream(STREAM[1])],
    ] {
        let (gateway, script) = gateway(4, &acts);
        *script.plan.lock().unwrap() = ChunkPlan { chunks: vec![(7, 100)], prompt_tokens: 100, charge: 0.0 };
        for worker in 0..4 {
            gateway.0.fleet.apply(WorkerEvent::Reported(WorkerId(worker), report(&[7], 0)));
        }
        let (status, text) = streamed(&gateway, json!({ "documents": [] })).await;
        assert_eq!(status, StatusCode::OK, "{text}");
        assert_eq!(asked(&script).len(), acts.len());
        for name in ["chunk_tokens", "local_chunk_tokens"] {
            assert_eq!(counted(&gateway, name), 100, "{name} of {acts:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn streams_that_outlast_the_drain_end_with_an_error() {
    let (gateway, script) = gateway(1, &[Act::Stall(&STREAM[0][..1])]);
    let stops = async {
        while asked(&script).is_empty() {
            tokio::task::yield_now().await;
        }
        gateway.drain(Duration::from_secs(30)).await;
    };
    let (answer, ()) = tokio::join!(streamed(&gateway, json!({})), stops);
    let (_, error) = answer.1.split_once(STREAM[0][0]).unwrap();
    assert!(error.contains("\"code\":\"shutting_down\"") && error.ends_with("data: [DONE]\n\n"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn whole_answers_that_outlast_the_drain_are_refused() {
    let (gateway, script) = gateway(1, &[Act::Hang]);
    let stops = async {
        while asked(&script).is_empty() {
            tokio::task::yield_now().await;
        }
        gateway.drain(Duration::from_secs(30)).await;
    };
    let ((status, text), ()) = tokio::join!(chat(&gateway), stops);
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{text}");
    assert!(text.contains("\"code\":\"shutting_down\""), "{text}");
    assert_eq!(gateway.0.bytes_in_flight.all(), 0);
}

#[tokio::test]
async fn the_object_store_is_costed_as_each_worker_has_measured_it() {
    for quick in 0..2 {
        let (gateway, script) = gateway(0, &[]);
        *script.plan.lock().unwrap() =
            ChunkPlan { chunks: vec![(7, 1000)], prompt_tokens: 1000, charge: 0.0 };
        let told = |worker, rates| {
            let mut report = report(&[], 0);
            (report.model.kv_bytes_per_token, report.rates) = (1 << 20, rates);
            gateway.0.fleet.apply(WorkerEvent::Reported(WorkerId(worker), report));
        };
        told(0, Rates::default());
        told(1, Rates::default());
        told(quick, Rates { remote_bytes_per_second: 1e11, remote_latency: 0.001, ..Rates::default() });
        chat(&gateway).await;
        assert_eq!(asked(&script), [quick], "nobody holds the chunk");
    }
}
