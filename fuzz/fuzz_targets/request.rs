//! Bodies of requests, as a stranger may send them, through the server's own routes on a tiny model with tiny limits: the first byte is
//! the route (from `0` on), the rest the body. The server never fails, and refuses in OpenAI's form.
#![no_main]

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{Request, StatusCode, header};
use http_body_util::BodyExt;
use libfuzzer_sys::fuzz_target;
use refrain_engine::{Engine, Settings};
use refrain_server::{App, Options, router};
use refrain_store::Store;
use serde_json::Value;
use tokio::runtime::{Builder, Runtime};
use tower::ServiceExt;

const ROUTES: [(&str, &str); 10] = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/documents"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/documents/doc-1/pin"),
    ("POST", "/v1/embeddings"),
    ("DELETE", "/v1/documents/"),
    ("GET", "/v1/documents?"),
];

fn server() -> &'static (Runtime, Router) {
    static SERVER: OnceLock<(Runtime, Router)> = OnceLock::new();
    SERVER.get_or_init(|| {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tiny/llama");
        let settings = Settings { threads: 1, chunk_tokens: 64, ..Settings::default() };
        let engine = Engine::open(&path, Store::in_memory(1 << 20), settings, |_, _| ());
        let mut options = Options::new("tiny");
        options.max_body = 1 << 16;
        options.max_documents_per_request = 4;
        options.document_quota = 1 << 14;
        options.limits.max_tokens_per_request = 24;
        options.limits.kv_cache_memory_bytes = 1 << 20;
        options.limits.request_timeout = Duration::from_secs(4);
        let app = App::new(engine.expect("the tiny model is there"), options).expect("the options are right");
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        (runtime.expect("a thread can be started"), router(app))
    })
}

/// The status, and the whole body, streamed ones to their end.
async fn ask(router: &Router, route: u8, body: &[u8]) -> (StatusCode, Bytes) {
    let (method, path) = ROUTES[usize::from(route.wrapping_sub(b'0')) % ROUTES.len()];
    let request = Request::builder().method(method).header(header::CONTENT_TYPE, "application/json");
    // What follows a path that ends so is a part of it.
    let request = match path.strip_suffix(['/', '?']) {
        Some(_) => {
            let rest = body.iter().map(|byte| format!("%{byte:02x}"));
            let rest = rest.take(64).collect::<String>();
            request.uri(format!("{path}{}", if path.ends_with('?') { format!("after={rest}") } else { rest }))
        }
        None => request.uri(path),
    };
    let request = request.body(Body::from(body.to_vec())).expect("the request is well formed");
    let response = router.clone().oneshot(request).await.expect("a router never fails");
    let status = response.status();
    (status, response.into_body().collect().await.expect("an answer is whole").to_bytes())
}

fuzz_target!(|bytes: &[u8]| {
    let [route, body @ ..] = bytes else { return };
    let (runtime, router) = server();
    let (status, answer) = runtime.block_on(ask(router, *route, body));
    // What the server has no room for, it says: the quota of documents is small.
    if status.is_success() || status == StatusCode::INSUFFICIENT_STORAGE {
        return;
    }
    assert!(!status.is_server_error(), "{status}: {}", String::from_utf8_lossy(&answer));
    let answer: Value = serde_json::from_slice(&answer).expect("a refusal is JSON");
    assert!(answer["error"]["message"].is_string() && answer["error"]["type"].is_string(), "{answer}");
});
