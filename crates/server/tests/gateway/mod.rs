//! What a gateway before several servers asks of one: reports, plans, and requests of tenants whom it signs.

use axum::http::HeaderValue;
use refrain::store::hex;
use refrain_server::{ChunkPlan, HeldChunks, Report, TENANT_HEADER, sign_tenant};

use super::*;

fn key(byte: u8) -> NamespaceKey {
    hex::encode(&[byte; 32]).parse().unwrap()
}

/// A request with this value of the gateway's header.
async fn signed(router: &Router, method: &str, path: &str, tenant: &str, body: Value) -> Response {
    let request =
        Request::builder().method(method).uri(path).header(header::CONTENT_TYPE, "application/json");
    let request = request.header(TENANT_HEADER, HeaderValue::from_str(tenant).unwrap());
    let body = if body.is_null() { Body::empty() } else { Body::from(body.to_string()) };
    router.clone().oneshot(request.body(body).unwrap()).await.unwrap()
}

async fn report(router: &Router, seen: Option<&Report>) -> Report {
    let query =
        seen.map_or_else(String::new, |seen| format!("?epoch={}&sequence={}", seen.epoch, seen.sequence));
    // A report compares the store with the last one a few times a second at most.
    tokio::time::sleep(Duration::from_millis(250)).await;
    let path = format!("/internal/report{query}");
    let response = signed(router, "GET", &path, &sign_tenant(&key(1), "", ""), Value::Null).await;
    serde_json::from_value(value(response).await).unwrap()
}

#[tokio::test]
async fn the_planned_chunks_of_a_request_are_those_that_are_held_after_it() {
    let router = router(app(|options| options.namespace_key = Some(key(1))));
    let before = report(&router, None).await;
    assert_eq!(before.chunks, HeldChunks::All(Vec::new()));
    assert_eq!((before.running, before.waiting, before.stopping), (0, 0, false));
    assert!(before.takes_requests());
    let anna = sign_tenant(&key(1), "anna", "a1");
    let plan = |tenant: String| {
        let router = router.clone();
        async move {
            let response = signed(&router, "POST", "/internal/plan/chat", &tenant, chat(json!({}))).await;
            serde_json::from_value::<ChunkPlan>(value(response).await).unwrap()
        }
    };
    let planned = plan(anna.clone()).await;
    let whole = value(signed(&router, "POST", "/v1/chat/completions", &anna, chat(json!({}))).await).await;
    assert_eq!(planned.prompt_tokens, whole["usage"]["prompt_tokens"]);
    assert_eq!(planned.chunks.len(), 2);
    let after = report(&router, Some(&before)).await;
    let HeldChunks::Changed { added, removed } = &after.chunks else { panic!("{after:?}") };
    assert_eq!(removed, &Vec::<u64>::new());
    assert!(planned.chunks.iter().all(|(key, _)| added.contains(key)), "{planned:?} {added:?}");
    assert!(after.rates.seconds > 0.0, "{after:?}");
    let same = report(&router, Some(&after)).await;
    assert_eq!(same.chunks, HeldChunks::Changed { added: Vec::new(), removed: Vec::new() });
    // The same documents of another tenant are other chunks.
    let bob = plan(sign_tenant(&key(1), "bob", "b2")).await;
    assert!(bob.chunks.iter().all(|(key, _)| !added.contains(key)), "{bob:?} {added:?}");
}

#[tokio::test]
async fn a_plan_of_more_tokens_than_the_context_is_refused() {
    let router = router(app(|options| options.namespace_key = Some(key(1))));
    let anna = sign_tenant(&key(1), "anna", "a1");
    let context =
        post(&router, "/tokenize", json!({ "prompt": "a" })).await["max_model_len"].as_u64().unwrap();
    for (tokens, expected) in [(context - 20, 200), (context, 400)] {
        let prompts = json!([vec![5; tokens as usize], [5]]);
        let body = json!({ "prompt": prompts, "documents": [{ "text": "A bolt." }] });
        let response = signed(&router, "POST", "/internal/plan/completion", &anna, body).await;
        assert_eq!(response.status(), expected, "{tokens}");
    }
}

#[tokio::test]
async fn a_forged_tenant_gets_nothing() {
    let document = json!({ "title": "Torque", "text": "A stem bolt is tightened to 5 Nm." });
    let router = router(app(|options| options.namespace_key = Some(key(1))));
    let anna = sign_tenant(&key(1), "anna", "a1");
    let added = value(signed(&router, "POST", "/v1/documents", &anna, document).await).await;
    let id = added["data"][0]["id"].as_str().unwrap().to_owned();
    let path = format!("/v1/documents/{id}");
    assert_eq!(signed(&router, "GET", &path, &anna, Value::Null).await.status(), StatusCode::OK);
    let signature = anna.split(':').next().unwrap();
    for forged in [
        sign_tenant(&key(2), "anna", "a1"),
        sign_tenant(&key(1), "bob", "b2").replace(":b2:", ":a1:"),
        format!("{signature}:a1:bob"),
        "a1:anna".to_owned(),
        String::new(),
    ] {
        let (status, error) = refused(signed(&router, "GET", &path, &forged, Value::Null).await).await;
        assert_eq!((status, &error["code"]), (401, &json!("invalid_gateway")), "{forged}");
        for (method, path) in [("GET", "/internal/report"), ("POST", "/internal/plan/chat")] {
            let (status, _) = refused(signed(&router, method, path, &forged, chat(json!({}))).await).await;
            assert_eq!(status, 401, "{forged}");
        }
    }
    // Requests without a signature are those of the namespace without a name, which does not have the document.
    assert_eq!(ask(&router, "GET", &path, None, Value::Null).await.status(), StatusCode::NOT_FOUND);
    let (status, _) = refused(ask(&router, "GET", "/internal/report", None, Value::Null).await).await;
    assert_eq!(status, 401);
}

#[tokio::test]
async fn a_server_without_the_key_knows_no_gateway() {
    let signed =
        signed(&server(), "GET", "/internal/report", &sign_tenant(&key(1), "", ""), Value::Null).await;
    let (status, error) = refused(signed).await;
    assert_eq!(status, 401);
    assert!(error["message"].as_str().unwrap().contains("--namespace-key"), "{error}");
}
