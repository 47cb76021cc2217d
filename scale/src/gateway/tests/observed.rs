//! The gateway's metrics and responses tell the outcome of requests that are not answered.

use futures_util::FutureExt as _;

use super::*;

fn request(path: &str, id: &str) -> Request<Body> {
    let request = Request::post(path).header(header::CONTENT_TYPE, "application/json");
    request.header("x-request-id", id).body(Body::from(json!({ "messages": [] }).to_string())).unwrap()
}

fn has(gateway: &Gateway, line: &str) -> bool {
    gateway.0.metrics.text(&gateway.0.fleet).lines().any(|found| found == line)
}

#[tokio::test]
async fn a_client_that_leaves_before_its_response_is_counted() {
    let (gateway, script) = gateway(1, &[Act::Hang]);
    let mut answer = Box::pin(router(gateway.clone()).oneshot(request("/v1/chat/completions", "left-1")));
    while asked(&script).is_empty() {
        assert!((&mut answer).now_or_never().is_none());
        tokio::task::yield_now().await;
    }
    let count = "refrain_gateway_requests_total{status=\"499\"} 1";
    assert!(!has(&gateway, count));
    drop(answer);
    assert!(has(&gateway, count));
}

#[tokio::test]
async fn responses_of_the_gateway_itself_have_the_requests_id() {
    let (gateway, _) = gateway(0, &[]);
    for (path, status) in [("/v1/chat/completions", 503), ("/internal/report", 404)] {
        let response = router(gateway.clone()).oneshot(request(path, "mine-1")).await.unwrap();
        assert_eq!(response.status().as_u16(), status);
        assert_eq!(response.headers()["x-request-id"], "mine-1");
    }
    assert!(has(&gateway, "refrain_gateway_requests_total{status=\"503\"} 1"));
}

#[tokio::test]
async fn a_lost_stream_that_cannot_be_repeated_counts_once() {
    let (gateway, script) = gateway(2, &[Act::Break(EVENTS, &["data: {\"done\":1,\"total\":2}\n\n"])]);
    let response = router(gateway.clone()).oneshot(request("/v1/documents", "documents-1")).await.unwrap();
    let text = response.into_body().collect().await.unwrap().to_bytes();
    assert!(String::from_utf8_lossy(&text).contains("worker_lost"), "{text:?}");
    assert_eq!(asked(&script).len(), 1);
    assert!(has(&gateway, "refrain_gateway_replays_total{outcome=\"not_repeatable\"} 1"));
}
