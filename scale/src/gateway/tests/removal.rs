//! Requests that concern the chunks of every worker.

use super::*;

#[tokio::test]
async fn a_removal_concerns_every_worker_or_fails() {
    let removal = ("DELETE", "/v1/documents/doc-1");
    let (gateway, script) =
        gateway(3, &[Act::Answer(404, ""), Act::Answer(200, "removed"), Act::Answer(404, "")]);
    let (status, text) = ask(&gateway, removal.0, removal.1, &Value::Null).await;
    assert_eq!((status, text.as_str()), (StatusCode::OK, "removed"));
    assert_eq!(asked(&script), [0, 1, 2]);
    let (gateway, _) = super::gateway(2, &[Act::Answer(200, "removed"), Act::Lose]);
    let (status, text) = ask(&gateway, removal.0, removal.1, &Value::Null).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{text}");
    assert!(text.contains("worker_lost"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn a_removal_asks_all_workers_at_once_and_waits_for_none_for_ever() {
    let (gateway, script) =
        gateway(3, &[Act::Hang, Act::Answer(200, "removed"), Act::Answer(200, "removed")]);
    let (status, text) = ask(&gateway, "DELETE", "/v1/documents/doc-1", &Value::Null).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{text}");
    assert!(text.contains("worker_lost"), "{text}");
    assert_eq!(asked(&script), [0, 1, 2]);
}

#[tokio::test]
async fn a_removal_concerns_workers_that_take_no_requests_now() {
    let script = Arc::new(Script { members: vec![WorkerId(0), WorkerId(5)], ..Script::default() });
    let gateway =
        Gateway::new(script.clone(), Options::new(""), "ab".repeat(32).parse().unwrap(), Rule::Cost);
    for worker in [0, 1] {
        gateway.0.fleet.apply(WorkerEvent::Reported(WorkerId(worker), report(&[], 0)));
    }
    gateway.0.fleet.apply(WorkerEvent::Closed(WorkerId(1)));
    *script.acts.lock().unwrap() =
        [Act::Answer(200, "removed"), Act::Answer(200, "removed"), Act::Lose].into();
    let (status, text) = ask(&gateway, "DELETE", "/v1/documents/doc-1", &Value::Null).await;
    assert_eq!(asked(&script), [0, 1, 5]);
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "a listed worker is away: {text}");
}

#[tokio::test]
async fn a_removal_passes_over_workers_that_left_the_cluster() {
    let script = Arc::new(Script { departed: vec![WorkerId(1)], ..Script::default() });
    let gateway =
        Gateway::new(script.clone(), Options::new(""), "ab".repeat(32).parse().unwrap(), Rule::Cost);
    for worker in [0, 1] {
        gateway.0.fleet.apply(WorkerEvent::Reported(WorkerId(worker), report(&[], 0)));
    }
    gateway.0.fleet.apply(WorkerEvent::Closed(WorkerId(1)));
    let (status, text) = ask(&gateway, "DELETE", "/v1/documents/doc-1", &Value::Null).await;
    assert_eq!((status, asked(&script)), (StatusCode::OK, vec![0]), "{text}");
}
