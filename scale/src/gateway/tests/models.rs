//! A fleet of two models.

use super::*;

/// A gateway before worker 0 of the model `m`, and the busier worker 1 of the model `n`.
fn two_models(acts: &[Act]) -> (Gateway, Arc<Script>) {
    let (gateway, script) = gateway(1, acts);
    let mut other = report(&[], 100);
    (other.model.name, other.model.fingerprint) = ("n".into(), "g".into());
    gateway.0.fleet.apply(WorkerEvent::Reported(WorkerId(1), other));
    (gateway, script)
}

#[tokio::test]
async fn a_request_goes_to_a_worker_of_its_model() {
    for (model, wanted) in [(json!("m"), 0), (json!("n"), 1), (json!("unknown"), 0), (Value::Null, 0)] {
        for documents in [json!([]), Value::Null] {
            let (gateway, script) = two_models(&[]);
            let body = json!({ "model": model, "messages": [], "documents": documents });
            assert_eq!(ask(&gateway, "POST", "/v1/chat/completions", &body).await.0, StatusCode::OK);
            assert_eq!(asked(&script), [wanted], "{body}");
        }
    }
    let (gateway, script) = two_models(&[Act::Lose]);
    let body = json!({ "model": "n", "messages": [] });
    let (_, text) = ask(&gateway, "POST", "/v1/completions", &body).await;
    assert!(text.contains("no_worker"), "another model is no substitute: {text}");
    assert_eq!(asked(&script), [1]);
    for path in ["/tokenize", "/detokenize", "/v1/documents"] {
        let (gateway, script) = two_models(&[]);
        ask(&gateway, "POST", path, &json!({ "model": "n", "prompt": "x", "tokens": [1], "text": "x" }))
            .await;
        assert_eq!(asked(&script), [1], "{path}");
    }
    for path in ["/v1/models/n", "/v1/models/%6E"] {
        let (gateway, script) = two_models(&[]);
        ask(&gateway, "GET", path, &Value::Null).await;
        assert_eq!(asked(&script), [1], "{path}");
    }
}

#[tokio::test]
async fn the_models_of_all_workers_are_listed() {
    let [m, n] = [r#"{"object":"list","data":[{"id":"m"}]}"#, r#"{"object":"list","data":[{"id":"n"}]}"#];
    let (gateway, script) = two_models(&[Act::Answer(200, m), Act::Answer(200, n)]);
    let (status, text) = ask(&gateway, "GET", "/v1/models", &Value::Null).await;
    assert_eq!(
        (status, text.as_str()),
        (StatusCode::OK, r#"{"object":"list","data":[{"id":"m"},{"id":"n"}]}"#)
    );
    assert_eq!(asked(&script), [0, 1]);
    let (gateway, script) = super::gateway(2, &[Act::Answer(200, m)]);
    assert_eq!(ask(&gateway, "GET", "/v1/models", &Value::Null).await.1, m);
    assert_eq!(asked(&script).len(), 1);
}

/// A stream whose prompt waits for its turn has a beginning after a while, which workers of other numerics give as well.
#[tokio::test]
async fn a_stream_without_text_goes_on_at_any_worker_of_its_model() {
    const TEXT: &str = "data: {\"id\":\"B\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n";
    const ROLE: &str = "data: {\"id\":\"B\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";
    const WHOLE: &[&str] = &[ROLE, TEXT, STREAM[0][2]];
    for (sent, fingerprint, goes_on) in [(1, "f", true), (2, "f", false), (1, "g", false)] {
        let (gateway, script) = gateway(1, &[Act::Break(EVENTS, &WHOLE[..sent]), Act::Stream(WHOLE)]);
        let mut other = report(&[], 100);
        (other.model.fingerprint, other.model.numerics) = (fingerprint.into(), "other".into());
        gateway.0.fleet.apply(WorkerEvent::Reported(WorkerId(7), other));
        let (_, text) = streamed(&gateway, json!({})).await;
        assert_eq!(text == WHOLE.concat(), goes_on, "{sent} {fingerprint}: {text}");
        assert_eq!(asked(&script), if goes_on { vec![0, 7] } else { vec![0] });
    }
}
