//! Bounds of the gateway's own memory and time.

use std::sync::atomic::Ordering::Relaxed;

use super::*;

#[tokio::test]
async fn bodies_count_until_their_answers_end() {
    let held = |gateway: &Gateway| gateway.0.bytes_in_flight.load(Relaxed);
    for act in [Act::Late("late"), Act::Stream(STREAM[0])] {
        let (gateway, _) = gateway(1, &[act]);
        let body = json!({ "messages": [], "stream": true }).to_string();
        let request = Request::post("/v1/chat/completions").header(header::CONTENT_TYPE, "application/json");
        let request = request.body(Body::from(body.clone())).unwrap();
        let (answer, ()) = tokio::join!(router(gateway.clone()).oneshot(request), async {
            while held(&gateway) == 0 {
                tokio::task::yield_now().await;
            }
            assert_eq!(held(&gateway), body.len());
        });
        answer.unwrap().into_body().collect().await.unwrap();
        assert_eq!(held(&gateway), 0);
    }
}

#[tokio::test]
async fn more_bodies_than_there_is_room_for_are_refused() {
    let (gateway, script) = gateway(1, &[]);
    let others = 256 << 20;
    gateway.0.bytes_in_flight.fetch_add(others, Relaxed);
    let (status, text) = chat(&gateway).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{text}");
    assert!(asked(&script).is_empty());
    assert_eq!(gateway.0.bytes_in_flight.load(Relaxed), others, "what is refused is not held");
}
