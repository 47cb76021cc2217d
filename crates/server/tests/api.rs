//! The routes without a socket, on a tiny model.

#[cfg(feature = "remote")]
mod deletion;
mod files;
mod gateway;
mod generation;
#[cfg(feature = "emulate")]
mod gpu;
mod observed;
#[cfg(feature = "remote")]
mod replicas;
mod responses;
mod schema;
#[cfg(feature = "remote")]
mod sharing;
mod tools;
mod turns;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use axum::response::Response;
use futures_util::FutureExt as _;
use http_body_util::BodyExt;
use refrain::engine::{Engine, Settings};
use refrain::store::{NamespaceKey, Scope, Store};
use refrain_server::{ApiKeys, App, Options, router};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::task::unconstrained;
use tower::ServiceExt;

const MODEL: &str = "tiny";

fn engine(store: Store) -> Engine {
    engine_with_left(store, 0)
}

/// An engine whose chunks are prefilled behind so much of what stands left of them.
fn engine_with_left(store: Store, left_tokens: usize) -> Engine {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    let settings = Settings { chunk_tokens: 64, left_tokens, ..Settings::default() };
    Engine::open(&path, store, settings, |_, _| ()).unwrap()
}

fn app(change: impl FnOnce(&mut Options)) -> App {
    let mut options = Options::new(MODEL);
    change(&mut options);
    App::new(engine(Store::in_memory(1 << 28)), options).unwrap()
}

fn server() -> Router {
    router(app(|_| ()))
}

async fn ask(router: &Router, method: &str, path: &str, key: Option<&str>, body: Value) -> Response {
    let mut request =
        Request::builder().method(method).uri(path).header(header::CONTENT_TYPE, "application/json");
    if let Some(key) = key {
        request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
    }
    let body = if body.is_null() { Body::empty() } else { Body::from(body.to_string()) };
    router.clone().oneshot(request.body(body).unwrap()).await.unwrap()
}

async fn text(response: Response) -> String {
    String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
}

async fn value(response: Response) -> Value {
    let status = response.status();
    let text = text(response).await;
    assert_eq!(status, StatusCode::OK, "{text}");
    serde_json::from_str(&text).unwrap()
}

async fn post(router: &Router, path: &str, body: Value) -> Value {
    value(ask(router, "POST", path, None, body).await).await
}

/// The status and the error of a request that is refused.
async fn refused(response: Response) -> (u16, Value) {
    let status = response.status().as_u16();
    let error: Value = serde_json::from_str(&text(response).await).unwrap();
    (status, error["error"].clone())
}

fn chat(more: Value) -> Value {
    let mut body = json!({
        "model": MODEL,
        "messages": [{ "role": "user", "content": "How tight is a stem bolt?" }],
        "documents": [{ "title": "Torque", "text": "A stem bolt is tightened to 5 Nm." }, { "text": "Other things." }],
        "max_tokens": 8,
    });
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

/// The data of a stream's events, `[DONE]` left out.
async fn events(response: Response) -> Vec<Value> {
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(response.headers()[header::CONTENT_TYPE], "text/event-stream");
    let text = text(response).await;
    let lines: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    let (last, events) = lines.split_last().unwrap();
    assert_eq!(*last, "[DONE]");
    events.iter().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[tokio::test]
async fn a_chat_is_answered_whole_and_as_a_stream_alike() {
    let router = server();
    let whole = post(&router, "/v1/chat/completions", chat(json!({ "refrain": { "method": "pie" } }))).await;
    let choice = &whole["choices"][0];
    assert_eq!(
        (&whole["object"], &choice["message"]["role"]),
        (&json!("chat.completion"), &json!("assistant"))
    );
    assert_eq!(choice["finish_reason"], "length");
    let (usage, stats) = (&whole["usage"], &whole["refrain"]["stats"]);
    assert_eq!((&usage["completion_tokens"], &stats["answer_tokens"]), (&json!(8), &json!(8)));
    let cached = |usage: &Value| usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    let [read, fresh] = ["cached_tokens", "prefilled_tokens"].map(|name| stats[name].as_u64().unwrap());
    assert_eq!((cached(usage), read), (0, fresh), "nothing was there before");
    assert_eq!(whole["refrain"]["documents"][0]["title"], "Torque");
    // The first request has prefilled the documents, the second finds them.
    assert_eq!(stats["prefilled_chunks"], 3);
    let body = chat(
        json!({ "refrain": { "method": "pie" }, "stream": true, "stream_options": { "include_usage": true } }),
    );
    let events = events(ask(&router, "POST", "/v1/chat/completions", None, body).await).await;
    let of = |event: &Value, name: &str| {
        event["choices"][0]["delta"][name].as_str().unwrap_or_default().to_owned()
    };
    assert_eq!(of(&events[0], "role"), "assistant");
    let content: String = events.iter().map(|event| of(event, "content")).collect();
    assert_eq!(json!(content), choice["message"]["content"]);
    let [.., last, used] = events.as_slice() else { panic!() };
    assert_eq!(last["choices"][0]["finish_reason"], "length");
    assert_eq!((&last["refrain"]["stats"]["prefilled_chunks"], &used["choices"]), (&json!(0), &json!([])));
    assert_eq!(cached(&used["usage"]), read, "all of it was left by the first request");
    let mut warm = used["usage"].clone();
    warm["prompt_tokens_details"] = whole["usage"]["prompt_tokens_details"].clone();
    assert_eq!(warm, whole["usage"]);
    let ids: std::collections::BTreeSet<_> = events.iter().map(|event| event["id"].to_string()).collect();
    assert_eq!(ids.len(), 1);
}

#[tokio::test]
async fn text_is_gone_on_with_and_tokens_say_how_likely_they_were() {
    let router = server();
    let body = json!({ "prompt": "The bolt", "max_tokens": 3, "logprobs": 2 });
    let answer = post(&router, "/v1/completions", body).await;
    let choice = &answer["choices"][0];
    assert_eq!(
        (&answer["object"], choice["logprobs"]["tokens"].as_array().unwrap().len()),
        (&json!("text_completion"), 3)
    );
    // Each token stands in the text, or is a part of a character; where it begins is the same whole and streamed.
    let (text, mut at) = (choice["text"].as_str().unwrap(), 0);
    let offsets = choice["logprobs"]["text_offset"].as_array().unwrap().clone();
    for (offset, token) in offsets.iter().zip(choice["logprobs"]["tokens"].as_array().unwrap()) {
        let token = token.as_str().unwrap();
        assert!(text.contains(token) || token.starts_with("bytes:\\x"), "{token:?} of {text:?}");
        assert_eq!(*offset, at);
        at += if token.starts_with("bytes:") { 0 } else { token.chars().count() };
    }
    let body = json!({ "prompt": "The bolt", "max_tokens": 3, "logprobs": 2, "stream": true });
    let events = events(ask(&router, "POST", "/v1/completions", None, body).await).await;
    let streamed =
        events.iter().filter_map(|event| event["choices"][0]["logprobs"]["text_offset"][0].as_u64());
    assert_eq!(streamed.map(|offset| json!(offset)).collect::<Vec<_>>(), offsets);
    let body = json!({ "prompt": "The bolt", "max_tokens": 3, "logprobs": 0 });
    let without = &post(&router, "/v1/completions", body).await["choices"][0]["logprobs"];
    assert_eq!((&without["tokens"], &without["top_logprobs"]), (&choice["logprobs"]["tokens"], &Value::Null));
    let body = chat(json!({ "logprobs": true, "top_logprobs": 2, "max_tokens": 2 }));
    let answer = post(&router, "/v1/chat/completions", body).await;
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!((content.len(), content[0]["top_logprobs"].as_array().unwrap().len()), (2, 2));
    // Greedy: the token is the likeliest.
    assert_eq!(content[0]["top_logprobs"][0]["logprob"], content[0]["logprob"]);
    assert!(content[0]["logprob"].as_f64().unwrap() < 0.0);
    let seeds = |seed: u64| chat(json!({ "temperature": 1.5, "seed": seed, "max_tokens": 12 }));
    let mut said = Vec::new();
    for seed in [1, 1, 2] {
        said.push(
            post(&router, "/v1/chat/completions", seeds(seed)).await["choices"][0]["message"]["content"]
                .clone(),
        );
    }
    assert!(said[0] == said[1] && said[0] != said[2], "{said:?}");
}

#[tokio::test]
async fn documents_are_brought_listed_searched_pinned_and_removed() {
    let router = server();
    let spokes: String =
        (1..7).map(|of| format!("The rear wheel has 28 spokes, {of} of them new. ")).collect();
    let body = json!({ "documents": [
        { "title": "Torque", "text": "A stem bolt is tightened to 5 Nm." },
        { "title": "Wheels", "text": spokes },
    ]});
    let added = post(&router, "/v1/documents", body.clone()).await;
    assert_eq!((added["data"].as_array().unwrap().len(), &added["ingest"]["documents"]), (2, &json!(2)));
    let wheels = added["data"][1].clone();
    assert!(wheels["chunks"].as_u64().unwrap() > 1);
    // Again: nothing is computed, and progress can be followed.
    let mut again = body;
    again["stream"] = json!(true);
    let events = events(ask(&router, "POST", "/v1/documents", None, again).await).await;
    assert_eq!(events[0]["object"], "document.progress");
    assert_eq!(events.last().unwrap()["ingest"]["computed"], 0);
    let id = wheels["id"].as_str().unwrap().to_owned();
    let body = chat(json!({ "documents": "search", "refrain": { "search": 2 }, "messages": [
        { "role": "user", "content": "How many spokes has the rear wheel?" }] }));
    let found = post(&router, "/v1/chat/completions", body).await;
    let cited = &found["refrain"]["documents"];
    assert_eq!((&cited[0]["id"], cited[0]["chunks"].as_array().unwrap().len()), (&json!(id), 2));
    assert!(cited[0]["chunks"][0]["score"].as_f64().unwrap() > 0.0);
    assert_eq!(found["refrain"]["stats"]["prefilled_chunks"], 1, "the system part alone");
    let by_id = chat(json!({ "documents": [{ "id": id }] }));
    let answer = post(&router, "/v1/chat/completions", by_id).await;
    assert_eq!(
        (&answer["refrain"]["documents"][0]["title"], &answer["refrain"]["stats"]["prefilled_chunks"]),
        (&json!("Wheels"), &json!(0))
    );
    // A further turn over what the search found, named as the answer told it.
    let parts: Vec<&Value> =
        cited[0]["chunks"].as_array().unwrap().iter().map(|chunk| &chunk["part"]).collect();
    let named = json!([{ "id": id, "parts": parts }]);
    let said = json!([{ "role": "user", "content": "How many spokes has the rear wheel?" },
        { "role": "assistant", "content": found["choices"][0]["message"]["content"] },
        { "role": "user", "content": "And the front wheel?" }]);
    let further = chat(json!({ "documents": named, "messages": said }));
    let further = post(&router, "/v1/chat/completions", further).await;
    let tokens = |answer: &Value, name: &str| answer["refrain"]["stats"][name].as_u64().unwrap();
    assert_eq!(tokens(&further, "document_tokens"), tokens(&found, "document_tokens"));
    let told = &further["refrain"]["documents"][0]["chunks"];
    assert!(told.as_array().unwrap().iter().map(|chunk| &chunk["part"]).eq(parts), "{told}");
    for (parts, why) in [(json!([]), "is empty"), (json!([0, 99]), "has no part 99: it has")] {
        let body = chat(json!({ "documents": [{ "id": id, "parts": parts }] }));
        let (status, error) = refused(ask(&router, "POST", "/v1/chat/completions", None, body).await).await;
        assert!(status == 400 && error["message"].as_str().unwrap().contains(why), "{error}");
    }
    let listed = value(ask(&router, "GET", "/v1/documents?limit=1", None, Value::Null).await).await;
    assert_eq!((listed["data"].as_array().unwrap().len(), &listed["has_more"]), (1, &json!(true)));
    for limit in [0, 1001] {
        let path = format!("/v1/documents?limit={limit}");
        let (status, error) = refused(ask(&router, "GET", &path, None, Value::Null).await).await;
        assert_eq!((status, &error["param"]), (400, &json!("limit")), "{error}");
    }
    let path = format!("/v1/documents?after={}", listed["last_id"].as_str().unwrap());
    let rest = value(ask(&router, "GET", &path, None, Value::Null).await).await;
    assert_eq!((rest["data"].as_array().unwrap().len(), &rest["has_more"]), (1, &json!(false)));
    let path = format!("/v1/documents/{id}");
    let shown = value(ask(&router, "GET", &path, None, Value::Null).await).await;
    assert!(shown["text"].as_str().unwrap().starts_with("The rear wheel"));
    for (body, pinned) in [
        (json!({}), true),
        (json!({ "pinned": false }), false),
        (json!({ "pinned": null }), true),
        (json!({ "pinned": false }), false),
    ] {
        assert_eq!(post(&router, &format!("{path}/pin"), body).await["pinned"], pinned);
    }
    assert_eq!(value(ask(&router, "DELETE", &path, None, Value::Null).await).await["deleted"], true);
    assert_eq!(refused(ask(&router, "GET", &path, None, Value::Null).await).await.0, 404);
    let body = chat(json!({ "documents": "search", "messages": [{ "role": "user", "content": "spokes" }] }));
    assert_eq!(post(&router, "/v1/chat/completions", body).await["refrain"]["documents"], json!([]));
}

#[tokio::test]
async fn what_is_wrong_is_refused_in_openais_shape_with_the_field() {
    let router = router(app(|options| options.max_documents_per_request = 2));
    for (body, status, param) in [
        (chat(json!({ "tools": [{}] })), 400, "tools[0].type"),
        (chat(json!({ "model": "gpt-4o" })), 404, "model"),
        (chat(json!({ "messages": [] })), 400, "messages"),
        (chat(json!({ "messages": [{ "role": "user", "content": "  " }] })), 400, "messages"),
        (chat(json!({ "max_tokens": 4000 })), 400, "max_tokens"),
        (chat(json!({ "max_completion_tokens": 4000 })), 400, "max_completion_tokens"),
        (chat(json!({ "temperature": "hot" })), 400, "temperature"),
        (chat(json!({ "temperature": -1 })), 400, "temperature"),
        (chat(json!({ "documents": "everything" })), 400, "documents"),
        (chat(json!({ "documents": [{ "text": "a" }, { "text": "b" }, { "text": "c" }] })), 400, "documents"),
        (chat(json!({ "documents": [{ "text": " " }] })), 400, "documents"),
        (chat(json!({ "refrain": { "method": "magic" } })), 400, "refrain.method"),
        (chat(json!({ "refrain": { "method": "pie", "ratio": 0.1 } })), 400, "refrain.ratio"),
        (chat(json!({ "refrain": { "method": { "name": "pie", "ratio": 0.1 } } })), 400, "refrain.method"),
        (chat(json!({ "refrain": { "method": { "ratio": 0.1 } } })), 400, "refrain.method"),
        (chat(json!({ "refrain": { "method": { "name": "a3", "ratio": 7 } } })), 400, "refrain.method"),
        (chat(json!({ "refrain": { "evict": "morph_kv:capacity=0" } })), 400, "refrain.evict"),
    ] {
        let (found, error) =
            refused(ask(&router, "POST", "/v1/chat/completions", None, body.clone()).await).await;
        assert_eq!((found, error["param"].as_str().unwrap_or_default()), (status, param), "{body} {error}");
        assert!(!error["message"].as_str().unwrap().is_empty() && error["type"] == "invalid_request_error");
    }
    for (method, path, body, status) in [
        ("GET", "/nothing", Value::Null, 404),
        ("GET", "/v1/chat/completions", Value::Null, 405),
        ("GET", "/v1/models/other", Value::Null, 404),
        // Bytes of a path that are no UTF-8.
        ("GET", "/v1/models/%d2%ce", Value::Null, 400),
        ("DELETE", "/v1/documents/%d2%ce", Value::Null, 400),
        ("POST", "/v1/chat/completions", json!("text"), 400),
        ("POST", "/v1/chat/completions", Value::Null, 400),
        ("POST", "/v1/documents", json!({}), 400),
        ("POST", "/v1/documents", json!({ "documents": [] }), 400),
        ("POST", "/v1/completions", json!({ "prompt": ["a", ""] }), 400),
        ("POST", "/v1/documents/doc-0/pin", json!({}), 404),
    ] {
        let (found, error) = refused(ask(&router, method, path, None, body).await).await;
        assert_eq!(found, status, "{method} {path} {error}");
    }
    let (_, error) = refused(ask(&router, "GET", "/v1/models/other", None, Value::Null).await).await;
    assert_eq!((&error["param"], &error["code"]), (&json!("model"), &json!("model_not_found")));
}

/// Clients that write every field of a type write `null` where there is nothing.
#[tokio::test]
async fn null_is_a_field_that_is_not_there() {
    let router = server();
    let documents = json!([{ "title": null, "text": "A stem bolt is tightened to 5 Nm." }]);
    let options = json!({ "explain": null, "search": null });
    let body = chat(json!({ "documents": documents, "refrain": options, "stream": null,
        "chat_template_kwargs": { "enable_thinking": null } }));
    post(&router, "/v1/chat/completions", body).await;
    let usage = json!({ "include_usage": null });
    let body = chat(json!({ "documents": documents, "stream": true, "stream_options": usage }));
    assert!(!events(ask(&router, "POST", "/v1/chat/completions", None, body).await).await.is_empty());
    for body in [
        json!({ "title": null, "text": "A bolt.", "stream": null }),
        json!({ "documents": documents, "method": null }),
    ] {
        assert_eq!(post(&router, "/v1/documents", body).await["data"].as_array().unwrap().len(), 1);
    }
    let tokens = async |body: Value| post(&router, "/tokenize", body).await["tokens"].clone();
    let without =
        tokens(json!({ "prompt": "A bolt", "return_token_strs": null, "add_special_tokens": null }));
    assert_eq!(without.await, tokens(json!({ "prompt": "A bolt" })).await);
    let call = json!({ "id": null, "type": "function", "function": { "name": "f", "arguments": null } });
    let messages = json!([{ "role": "user", "content": "x" }, { "role": "assistant", "tool_calls": [call] },
        { "role": "tool", "tool_call_id": "a", "content": "y" },
        { "role": "assistant", "content": null, "tool_calls": null }, { "role": "user", "content": "z" }]);
    post(&router, "/v1/chat/completions", json!({ "messages": messages, "max_tokens": 1 })).await;
    let body = json!({ "prompt": "A bolt", "messages": null, "max_tokens": 1 });
    post(&router, "/v1/completions", body).await;
    let body = json!({ "input": "How tight?", "max_output_tokens": 1, "text": { "format": null },
        "reasoning": { "effort": null, "summary": null } });
    assert_eq!(post(&router, "/v1/responses", body).await["text"]["format"]["type"], "text");
}

#[tokio::test]
async fn fields_of_several_forms_name_them_where_none_is_given() {
    let router = server();
    for (body, forms) in [
        (
            chat(json!({ "documents": [{ "content": "x" }] })),
            ["\"search\"", "{\"title\", \"text\"}", "{\"id\", \"parts\"}"],
        ),
        (chat(json!({ "stop": 3 })), ["stop", "a text", "a list of texts"]),
        (chat(json!({ "refrain": { "explain": "yes" } })), ["explain", "true, false", "\"tokens\""]),
        (
            chat(json!({ "messages": [{ "role": "user", "content": 3 }] })),
            ["content", "a text", "a list of parts"],
        ),
    ] {
        let (status, error) =
            refused(ask(&router, "POST", "/v1/chat/completions", None, body.clone()).await).await;
        let message = error["message"].as_str().unwrap();
        assert_eq!(status, 400, "{body} {error}");
        assert!(forms.iter().all(|form| message.contains(form)), "{body} {error}");
    }
}

#[tokio::test]
async fn documents_beyond_the_quota_are_refused_before_they_are_prefilled() {
    let store = Store::in_memory(1 << 28);
    let mut options = Options::new(MODEL);
    options.document_quota = 40;
    let router = router(App::new(engine(store.clone()), options).unwrap());
    let chunks = || store.list(Scope::All).unwrap().chunks.len();
    let fits = json!({ "text": "A stem bolt is tightened to 5 Nm." });
    let large = json!({ "documents": [fits, { "text": "A seat post clamp takes 7 Nm." }] });
    let (_, error) = refused(ask(&router, "POST", "/v1/documents", None, large).await).await;
    assert_eq!((&error["code"], chunks()), (&json!("document_quota_exceeded"), 0), "{error}");
    post(&router, "/v1/documents", fits.clone()).await;
    let before = chunks();
    assert!(before > 0);
    // Documents that are stored already take no further room.
    post(&router, "/v1/documents", json!({ "documents": [fits, fits] })).await;
    assert_eq!(chunks(), before);
}

/// A page of another origin may send text without asking first: it is not taken.
#[tokio::test]
async fn bodies_must_say_that_they_are_json() {
    let router = server();
    for kind in ["text/plain", "application/x-www-form-urlencoded", ""] {
        let request = Request::post("/v1/documents").header(header::CONTENT_TYPE, kind);
        let body = Body::from(json!({ "text": "planted" }).to_string());
        assert_eq!(refused(router.clone().oneshot(request.body(body).unwrap()).await.unwrap()).await.0, 415);
    }
}

/// An answer whose first token ends it is a whole stream.
#[tokio::test]
async fn an_answer_of_no_text_is_streamed_to_its_end() {
    let router = server();
    // Each text that may come first is a stop text.
    let first = post(&router, "/v1/completions", json!({ "prompt": "The bolt", "max_tokens": 1 })).await;
    let stop = first["choices"][0]["text"].clone();
    let body = json!({ "prompt": "The bolt", "max_tokens": 9, "stop": stop, "stream": true });
    let events = events(ask(&router, "POST", "/v1/completions", None, body).await).await;
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "stop");
    assert!(events.iter().all(|event| event.get("error").is_none()), "{events:?}");
}

#[tokio::test]
async fn bodies_are_bounded() {
    let router = router(app(|options| options.max_body = 1000));
    let large = chat(json!({ "user": "x".repeat(2000) }));
    let response = ask(&router, "POST", "/v1/chat/completions", None, large.clone()).await;
    assert_eq!(refused(response).await.0, 413);
    // Of unknown length, in pieces.
    let pieces: Vec<Result<String, std::io::Error>> = (0..30).map(|_| Ok("x".repeat(100))).collect();
    let body = Body::from_stream(futures_util::stream::iter(pieces));
    let request = Request::post("/v1/chat/completions")
        .header(header::CONTENT_TYPE, "application/json")
        .body(body)
        .unwrap();
    assert_eq!(refused(router.clone().oneshot(request).await.unwrap()).await.0, 413);
    // JSON that is nested without end is refused, and the server goes on.
    let request = Request::post("/v1/chat/completions")
        .header(header::CONTENT_TYPE, "application/json")
        .body(Body::from("[".repeat(900)))
        .unwrap();
    assert_eq!(refused(router.clone().oneshot(request).await.unwrap()).await.0, 400);
}

/// A server with keys, the folder that its chunks are in, and the keys of two callers.
fn guarded() -> (Router, TempDir, [String; 2]) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys");
    let keys = ["anna", "bob"].map(|name| ApiKeys::add(&path, name).unwrap());
    let mut options = Options::new(MODEL);
    options.api_keys = ApiKeys::read(&path).unwrap();
    options.namespace_key = Some(NamespaceKey::of_folder(folder.path()).unwrap());
    options.folder = Some(folder.path().to_owned());
    options.metrics_auth = true;
    let store = Store::open(folder.path().join("chunks"), 1 << 28).unwrap();
    (router(App::new(engine(store), options).unwrap()), folder, keys)
}

#[tokio::test]
async fn who_has_no_key_is_kept_out_and_who_has_one_sees_only_their_own() {
    let (router, _folder, [anna, bob]) = guarded();
    for key in [None, Some("sk-refrain-0"), Some("")] {
        for (method, path) in [
            ("POST", "/v1/chat/completions"),
            ("GET", "/v1/documents"),
            ("GET", "/v1/models"),
            ("GET", "/metrics"),
        ] {
            let response = ask(&router, method, path, key, Value::Null).await;
            assert_eq!(response.headers()[header::WWW_AUTHENTICATE], "Bearer");
            assert_eq!(refused(response).await.1["type"], "authentication_error");
        }
    }
    assert_eq!(ask(&router, "GET", "/health", None, Value::Null).await.status(), 200);
    assert_eq!(ask(&router, "GET", "/metrics", Some(&bob), Value::Null).await.status(), 200);
    let secret = json!({ "title": "Secret", "text": "The treasure lies under the old oak." });
    let added = value(ask(&router, "POST", "/v1/documents", Some(&anna), secret.clone()).await).await;
    let path = format!("/v1/documents/{}", added["data"][0]["id"].as_str().unwrap());
    assert_eq!(ask(&router, "GET", &path, Some(&anna), Value::Null).await.status(), 200);
    for method in ["GET", "DELETE"] {
        assert_eq!(refused(ask(&router, method, &path, Some(&bob), Value::Null).await).await.0, 404);
    }
    let listed = value(ask(&router, "GET", "/v1/documents", Some(&bob), Value::Null).await).await;
    assert_eq!(listed["data"], json!([]));
    let search =
        chat(json!({ "documents": "search", "messages": [{ "role": "user", "content": "treasure" }] }));
    for (key, found) in [(&anna, 1), (&bob, 0)] {
        let answer =
            value(ask(&router, "POST", "/v1/chat/completions", Some(key), search.clone()).await).await;
        assert_eq!(answer["refrain"]["documents"].as_array().unwrap().len(), found);
    }
    // Not even that it is there can be told: the same text has to be prefilled again.
    let again = value(ask(&router, "POST", "/v1/documents", Some(&bob), secret).await).await;
    assert_eq!(again["ingest"]["computed"], 1);
}

#[tokio::test]
async fn documents_are_there_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let start = || {
        let mut options = Options::new(MODEL);
        options.folder = Some(folder.path().to_owned());
        router(App::new(engine(Store::open(folder.path(), 1 << 28).unwrap()), options).unwrap())
    };
    let router = start();
    let text = json!({ "title": "Torque", "text": "A stem bolt is tightened to 5 Nm." });
    post(&router, "/v1/documents", text.clone()).await;
    drop(router);
    // Threads of its own end first.
    tokio::time::sleep(Duration::from_millis(600)).await;
    let router = start();
    let body = chat(json!({ "documents": "search" }));
    let answer = post(&router, "/v1/chat/completions", body).await;
    assert_eq!(answer["refrain"]["documents"][0]["title"], "Torque");
    assert_eq!(post(&router, "/v1/documents", text).await["ingest"]["computed"], 0);
}

/// Answers asked for at once are those asked for one by one.
#[tokio::test(flavor = "multi_thread")]
async fn many_at_once_get_what_each_would_alone() {
    let app = app(|options| options.limits.max_num_seqs = 5);
    let router = router(app);
    let body = |i: usize| {
        let method = ["vanilla", "pie", "a3", "cache_blend"][i % 4];
        chat(json!({
            "messages": [{ "role": "user", "content": format!("Question {i}: how tight?") }],
            "max_tokens": 4 + i, "temperature": if i.is_multiple_of(3) { 0.9 } else { 0.0 }, "seed": i,
            "refrain": { "method": method, "evict": if i % 5 == 4 { "morph_kv:capacity=40,window=8" } else { "full" } },
        }))
    };
    let (mut alone, mut tokens) = (Vec::new(), 0.0);
    for i in 0..16 {
        let answer = post(&router, "/v1/chat/completions", body(i)).await;
        tokens += 2.0 * answer["usage"]["completion_tokens"].as_f64().unwrap();
        alone.push(answer["choices"][0]["message"]["content"].clone());
    }
    let started: Vec<_> = (0..16)
        .map(|i| {
            let (router, body) = (router.clone(), body(i));
            tokio::spawn(async move { post(&router, "/v1/chat/completions", body).await })
        })
        .collect();
    for (i, task) in started.into_iter().enumerate() {
        assert_eq!(task.await.unwrap()["choices"][0]["message"]["content"], alone[i], "{i}");
    }
    let metrics = metrics_of(&router).await;
    let number = |name: &str| -> f64 {
        let line = metrics.lines().find(|line| line.starts_with(&format!("refrain_{name} "))).unwrap();
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    assert_eq!((number("request_success_total"), number("time_to_first_token_seconds_count")), (32.0, 32.0));
    assert_eq!((number("generation_tokens_total"), number("num_requests_waiting")), (tokens, 0.0));
    assert!(number("cached_tokens_total") > 0.0);
    // A CPU has no memory of its own that anything is copied to.
    assert!(
        number("load_hidden_seconds_total") > 0.0 && number("load_wait_seconds_total") > 0.0,
        "{metrics}"
    );
    assert_eq!((number("device_copied_bytes_total"), number("device_chunk_cache_bytes")), (0.0, 0.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_and_a_stop_are_told() {
    let app = app(|options| {
        (options.limits.max_num_seqs, options.limits.max_queued_requests) = (1, 1);
        options.shutdown_timeout = Duration::from_millis(300);
    });
    let router = router(app.clone());
    let long = json!({ "prompt": "x", "max_tokens": 480, "min_tokens": 480 });
    let started = crowd(&router, 12, &long);
    let (mut answered, mut turned_away) = (0, 0);
    for task in started {
        let response = task.await.unwrap();
        if response.status() == 200 {
            answered += 1;
            continue;
        }
        let headers = response.headers();
        assert!(headers.contains_key(header::RETRY_AFTER) && !headers.contains_key("x-should-retry"));
        let (status, error) = refused(response).await;
        assert_eq!((status, &error["type"]), (429, &json!("rate_limit_error")));
        turned_away += 1;
    }
    assert!(answered >= 1 && turned_away >= 1, "{answered} {turned_away}");
    let began = Instant::now();
    tokio::task::spawn_blocking(move || app.drain()).await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(3));
    let (status, _) =
        refused(ask(&router, "POST", "/v1/chat/completions", None, chat(json!({}))).await).await;
    assert_eq!(status, 503);
    assert_eq!(ask(&router, "GET", "/ready", None, Value::Null).await.status(), 503);
    assert_eq!(ask(&router, "GET", "/health", None, Value::Null).await.status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_takes_too_long_or_too_much_is_refused() {
    let late = router(app(|options| options.limits.request_timeout = Duration::from_micros(1)));
    let response = ask(&late, "POST", "/v1/chat/completions", None, chat(json!({}))).await;
    assert_eq!(response.headers()["x-should-retry"], "false");
    assert_eq!(refused(response).await.0, 504);
    let small = router(app(|options| options.limits.kv_cache_memory_bytes = 20_000));
    let body = chat(json!({ "documents": [], "max_tokens": 300 }));
    let (status, error) = refused(ask(&small, "POST", "/v1/chat/completions", None, body).await).await;
    assert!(status == 413 && error["message"].as_str().unwrap().contains("20000"), "{error}");
    let bounded = chat(json!({
        "documents": [], "max_tokens": 300, "refrain": { "evict": { "name": "streaming_llm", "capacity": 16, "sinks": 2 } }
    }));
    assert_eq!(ask(&small, "POST", "/v1/chat/completions", None, bounded).await.status(), 200);
}

/// A policy's memory beside keys and values counts at admission: with a long window it is many times the cache of the same
/// capacity.
#[tokio::test]
async fn memory_beside_the_cache_counts_at_admission() {
    let router = router(app(|options| options.limits.kv_cache_memory_bytes = 150_000));
    let body =
        |evict: &str| chat(json!({ "documents": [], "max_tokens": 300, "refrain": { "evict": evict } }));
    let short = body("morph_kv:capacity=200,window=10");
    assert_eq!(ask(&router, "POST", "/v1/chat/completions", None, short).await.status(), 200);
    for evict in ["morph_kv:capacity=200,window=190", "morph_kv:capacity=200,window=190,profile=code_llama"] {
        let response = ask(&router, "POST", "/v1/chat/completions", None, body(evict)).await;
        let (status, error) = refused(response).await;
        assert_eq!(status, 413, "{evict}: {error}");
    }
}

/// An ingest takes turns with questions: one that comes while documents are prefilled is answered before they are done.
#[tokio::test(flavor = "multi_thread")]
async fn a_question_is_answered_while_documents_are_prefilled() {
    let router = server();
    let document = |name: usize| json!({ "text": format!("Bolt {name} is tightened to 5 Nm. ").repeat(80) });
    let documents: Vec<Value> = (0..64).map(document).collect();
    let body = json!({ "documents": documents, "stream": true });
    let mut ingest = ask(&router, "POST", "/v1/documents", None, body).await.into_body();
    let mut done = async |at_once: bool| -> Option<(u64, u64)> {
        let frame = ingest.frame();
        // The runtime would end a task's turn before all that waits is read.
        let frame = if at_once { unconstrained(frame).now_or_never()? } else { frame.await };
        let data = frame?.unwrap().into_data().unwrap();
        let event: Value =
            serde_json::from_str(str::from_utf8(&data).unwrap().strip_prefix("data: ")?).unwrap();
        Some((event["done"].as_u64()?, event["total"].as_u64()?))
    };
    let mut last = done(false).await.unwrap();
    post(&router, "/v1/completions", json!({ "prompt": "The bolt", "max_tokens": 2 })).await;
    while let Some(progress) = done(true).await {
        last = progress;
    }
    let (done, total) = last;
    assert!(done < total, "{done} of {total} tokens were prefilled before the answer");
}

/// A client that disconnects frees its place at once.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_goes_away_frees_its_place() {
    let router = router(app(|options| options.limits.max_num_seqs = 1));
    let long = json!({ "prompt": "x", "max_tokens": 500, "min_tokens": 500, "stream": true });
    for _ in 0..20 {
        // It has had its first token, and is dropped.
        let response = ask(&router, "POST", "/v1/completions", None, long.clone()).await;
        assert_eq!(response.status(), 200);
    }
    let metrics = metrics_of(&router).await;
    let cancelled = metrics.lines().find(|line| line.starts_with("refrain_request_cancelled_total")).unwrap();
    let cancelled: u32 = cancelled.rsplit(' ').next().unwrap().parse().unwrap();
    assert!(cancelled >= 15, "{cancelled}");
}

#[tokio::test]
async fn pages_of_other_origins_may_ask_only_where_that_is_set() {
    let preflight = |router: Router| async move {
        let request = Request::options("/v1/models")
            .header(header::ORIGIN, "https://a.example")
            .header(header::ACCESS_CONTROL_REQUEST_METHOD, "GET");
        router.oneshot(request.body(Body::empty()).unwrap()).await.unwrap()
    };
    let closed = preflight(server()).await;
    assert!(!closed.headers().contains_key(header::ACCESS_CONTROL_ALLOW_ORIGIN));
    let open =
        preflight(router(app(|options| options.allowed_origins = vec!["https://a.example".to_owned()])))
            .await;
    assert_eq!(open.headers()[header::ACCESS_CONTROL_ALLOW_ORIGIN], "https://a.example");
}

#[tokio::test]
async fn every_request_has_a_name() {
    let router = server();
    let named = |name: &'static str| {
        Request::get("/health").header("x-request-id", name).body(Body::empty()).unwrap()
    };
    let kept = router.clone().oneshot(named("mine-1")).await.unwrap();
    assert_eq!(kept.headers()["x-request-id"], "mine-1");
    let new = router.clone().oneshot(named("not mine\"")).await.unwrap();
    assert!(new.headers()["x-request-id"].to_str().unwrap().starts_with("req-"));
}

/// The OpenAPI document describes exactly the routes that exist.
#[tokio::test]
async fn the_description_names_every_route() {
    let described = value(ask(&server(), "GET", "/openapi.json", None, Value::Null).await).await;
    let paths: Vec<&String> = described["paths"].as_object().unwrap().keys().collect();
    for path in [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/models",
        "/v1/models/{model}",
        "/v1/documents",
        "/v1/documents/{id}",
        "/v1/documents/{id}/pin",
        "/v1/methods",
        "/tokenize",
        "/detokenize",
        "/health",
        "/ready",
        "/metrics",
    ] {
        assert!(paths.iter().any(|known| *known == path), "{path}");
    }
    // And all that it describes are there. Those that compute, read the store or may be unready can fail.
    let router = server();
    for (path, methods) in described["paths"].as_object().unwrap() {
        let is_constant = path.starts_with("/v1/models") || path == "/v1/methods" || path == "/openapi.json";
        for (method, operation) in methods.as_object().unwrap().iter().filter(|(key, _)| *key != "parameters")
        {
            let fails = operation["responses"].as_object().unwrap().keys().any(|code| code.starts_with('5'));
            assert_eq!(fails, !is_constant, "{method} {path}");
            let path = path.replace("{model}", MODEL).replace("{id}", "doc-0");
            let response = ask(&router, &method.to_uppercase(), &path, None, Value::Null).await;
            let (status, said) = (response.status(), text(response).await);
            assert!(status != 405 && !said.contains("there is no path"), "{method} {path}: {status} {said}");
        }
    }
}

/// Requests that are answered, and their answers, are as the description says.
#[tokio::test]
async fn requests_and_answers_fit_their_description() {
    let router = tools::server_with(None, "<|im_start|>");
    let described = value(ask(&router, "GET", "/openapi.json", None, Value::Null).await).await;
    let check = |schema: &Value, value: &Value, of: &str| {
        assert!(!schema.is_null(), "{of} is not described");
        let faults = schema::faults(&described, schema, value, of);
        assert!(faults.is_empty(), "{faults:#?}");
    };
    let operation = |method: &str, path: &str| described["paths"][path][method.to_lowercase()].clone();
    let documents =
        json!({ "documents": [{ "title": "Torque", "text": "A stem bolt is tightened to 5 Nm." }] });
    let added = post(&router, "/v1/documents", documents.clone()).await;
    let id = added["data"][0]["id"].as_str().unwrap();
    let given = json!({
        "documents": [{ "id": id }, { "text": "a" }], "stop": ["x"], "temperature": 0.5, "top_k": -1, "seed": null,
        "logprobs": true, "top_logprobs": 2, "max_tokens": 2, "min_tokens": 2,
        "refrain": { "method": { "name": "a3", "ratio": 0.2 }, "evict": "h2o:capacity=40", "explain": "tokens", "search": 3 },
    });
    let (document, pin) = (format!("/v1/documents/{id}"), format!("/v1/documents/{id}/pin"));
    let completion = json!({ "prompt": "The bolt", "max_tokens": 2, "logprobs": 2, "documents": "search" });
    for (method, path, template, body) in [
        ("POST", "/v1/chat/completions", "", chat(given.clone())),
        ("POST", "/v1/chat/completions", "", chat(json!({ "refrain": { "explain": true } }))),
        (
            "POST",
            "/v1/chat/completions",
            "",
            chat(json!({
                "n": 2, "frequency_penalty": 0.5, "presence_penalty": -1, "logit_bias": { "5": 1.5 },
                "response_format": { "type": "json_schema", "json_schema": { "name": "x", "schema": { "type": "boolean" } } },
            })),
        ),
        (
            "POST",
            "/v1/chat/completions",
            "",
            chat(json!({
                "tools": tools::tools(), "tool_choice": "required", "parallel_tool_calls": false, "max_tokens": 100,
                "response_format": { "type": "text" },
            })),
        ),
        (
            "POST",
            "/v1/completions",
            "",
            json!({ "prompt": "x", "echo": true, "max_tokens": 2, "structured_outputs": { "choice": ["a", "b"] } }),
        ),
        (
            "POST",
            "/v1/completions",
            "",
            json!({ "prompt": "x", "max_tokens": 2, "structured_outputs": { "json": "{\"type\": \"boolean\"}" } }),
        ),
        ("POST", "/v1/completions", "", completion.clone()),
        (
            "POST",
            "/v1/responses",
            "",
            json!({ "input": "x", "max_output_tokens": 2, "metadata": {}, "store": false }),
        ),
        (
            "POST",
            "/v1/responses",
            "",
            json!({
                "input": [
                    { "role": "user", "content": [{ "type": "input_text", "text": "x" }] },
                    { "type": "function_call", "call_id": "a", "name": "f", "arguments": "{}" },
                    { "type": "function_call_output", "call_id": "a", "output": "y" },
                ],
                "tools": [{ "type": "function", "name": "f", "parameters": { "type": "object" } }], "tool_choice": "required",
                "max_output_tokens": 40, "documents": [{ "text": "a" }], "refrain": { "method": "pie" },
            }),
        ),
        ("POST", "/v1/documents", "", documents.clone()),
        ("GET", "/v1/documents", "", Value::Null),
        ("GET", &document, "/v1/documents/{id}", Value::Null),
        ("POST", &pin, "/v1/documents/{id}/pin", json!({ "pinned": true })),
        ("DELETE", &document, "/v1/documents/{id}", Value::Null),
        ("GET", "/v1/models", "", Value::Null),
        ("GET", "/v1/models/tiny", "/v1/models/{model}", Value::Null),
        ("GET", "/v1/methods", "", Value::Null),
        ("POST", "/tokenize", "", json!({ "prompt": "The bolt", "return_token_strs": true })),
        ("POST", "/tokenize", "", json!({ "messages": [{ "role": "user", "content": "x" }] })),
        (
            "POST",
            "/tokenize",
            "",
            json!({ "messages": [{ "role": "user", "content": "x" }], "tools": tools::tools() }),
        ),
        ("POST", "/detokenize", "", json!({ "tokens": [5, 6] })),
        ("GET", "/health", "", Value::Null),
        ("GET", "/ready", "", Value::Null),
        ("GET", "/openapi.json", "", Value::Null),
    ] {
        let operation = operation(method, if template.is_empty() { path } else { template });
        if !body.is_null() {
            check(&operation["requestBody"]["content"]["application/json"]["schema"], &body, path);
        }
        let answer = value(ask(&router, method, path, None, body).await).await;
        check(&operation["responses"]["200"]["content"]["application/json"]["schema"], &answer, path);
    }
    // The chunks of streams, and errors.
    for (path, mut body) in [
        (
            "/v1/chat/completions",
            chat(json!({ "logprobs": true, "stream_options": { "include_usage": true } })),
        ),
        ("/v1/completions", completion),
    ] {
        body["stream"] = json!(true);
        let responses = &operation("POST", path)["responses"];
        check(&operation("POST", path)["requestBody"]["content"]["application/json"]["schema"], &body, path);
        for event in events(ask(&router, "POST", path, None, body).await).await {
            check(&responses["200"]["content"]["application/json"]["schema"], &event, path);
        }
        let (_, error) = refused(ask(&router, "POST", path, None, json!({ "best_of": 2 })).await).await;
        let schema = &responses["4XX"]["content"]["application/json"]["schema"];
        check(schema, &json!({ "error": error }), path);
    }
    // Fields of a tool that the server refuses to do without are required.
    for (path, tool, missing) in [
        ("/v1/chat/completions", json!({ "function": { "name": "f" } }), "type"),
        ("/v1/chat/completions", json!({ "type": "function" }), "function"),
        ("/v1/chat/completions", json!({ "type": "function", "function": {} }), "function.name"),
        ("/v1/responses", json!({ "name": "f" }), "type"),
        ("/v1/responses", json!({ "type": "function" }), "name"),
    ] {
        let mut body = if path == "/v1/responses" { json!({ "input": "x" }) } else { chat(json!({})) };
        body["tools"] = json!([tool]);
        let schema = &operation("POST", path)["requestBody"]["content"]["application/json"]["schema"];
        let faults = schema::faults(&described, schema, &body, path);
        assert_eq!(faults, [format!("{path}.tools[0].{missing} is missing")]);
        let (status, _) = refused(ask(&router, "POST", path, None, body).await).await;
        assert_eq!(status, 400, "{path} without {missing}");
    }
    let responses = &operation("POST", "/v1/documents")["responses"];
    let mut body = documents;
    body["stream"] = json!(true);
    let events = events(ask(&router, "POST", "/v1/documents", None, body).await).await;
    let (last, progress) = events.split_last().unwrap();
    check(&responses["200"]["content"]["application/json"]["schema"], last, "the last event");
    for event in progress {
        check(&responses["200"]["content"]["text/event-stream"]["schema"], event, "progress");
    }
}

/// The page loads nothing from elsewhere, and what it asks for is there.
#[tokio::test]
async fn the_page_needs_nothing_but_this_server() {
    let router = server();
    let response = ask(&router, "GET", "/", None, Value::Null).await;
    assert!(
        response.headers()[header::CONTENT_SECURITY_POLICY]
            .to_str()
            .unwrap()
            .starts_with("default-src 'none'")
    );
    let page = text(response).await;
    // What the page names, and what its scripts import from one another.
    let (mut wanted, mut parts) = (vec!["/page/page.css".to_owned(), "/page/page.js".to_owned()], vec![page]);
    while let Some(path) = wanted.pop() {
        let part = text(ask(&router, "GET", &path, None, Value::Null).await).await;
        let imports = part.split(" from \"./").skip(1).filter_map(|rest| rest.split('"').next());
        wanted.extend(imports.map(|name| format!("/page/{name}")));
        assert!(part.len() > 500 && !part.starts_with('{'), "{path}: {part}");
        parts.push(part);
    }
    assert!(parts.len() > 6, "{} parts", parts.len());
    for part in &parts {
        assert!(!part.contains("//cdn") && !part.contains("https://") && !part.contains("http://"));
    }
    let page = &parts[0];
    for place in
        page.split("src=\"").chain(page.split("href=\"")).skip(1).filter_map(|rest| rest.split('"').next())
    {
        let there = place.starts_with("data:")
            || place.starts_with('#')
            || ["page/page.js", "page/page.css"].contains(&place)
            || place.starts_with('<');
        assert!(there, "{place}");
    }
    let model = &value(ask(&router, "GET", "/v1/models", None, Value::Null).await).await["data"][0];
    assert_eq!((&model["refrain"]["evict"], &model["refrain"]["prefix"]), (&json!("full"), &json!("none")));
    let methods = value(ask(&router, "GET", "/v1/methods", None, Value::Null).await).await;
    assert!(methods["methods"].as_array().unwrap().iter().any(|method| method["name"] == "a3"));
    let body = chat(json!({ "refrain": { "method": "a3", "explain": "tokens" } }));
    let answer = post(&router, "/v1/chat/completions", body).await;
    let chunks = answer["refrain"]["explanation"]["chunks"].as_array().unwrap();
    let text: String =
        chunks[0]["tokens"].as_array().unwrap().iter().map(|token| token.as_str().unwrap()).collect();
    assert!(text.starts_with("Torque\nA stem bolt is tightened"), "{text}");
    let all = |name: &str| {
        chunks.iter().flat_map(|chunk| chunk[name].as_array().unwrap()).cloned().collect::<Vec<_>>()
    };
    let total: f64 = all("shares").iter().map(|share| share.as_f64().unwrap()).sum();
    assert!((total - 1.0).abs() < 1e-3 && all("recomputed").contains(&json!(true)), "{total}");
}

#[tokio::test]
async fn requests_have_a_bound_of_tokens() {
    let router = router(app(|options| options.limits.max_tokens_per_request = 60));
    let long = json!({ "text": "A stem bolt is tightened to 5 Nm. ".repeat(20) });
    let (status, error) = refused(ask(&router, "POST", "/v1/documents", None, long).await).await;
    assert_eq!((status, &error["code"]), (413, &json!("too_large")), "{error}");
    assert!(error["message"].as_str().unwrap().contains("60"), "{error}");
    let body = json!({ "prompt": "The bolt", "max_tokens": 60 });
    assert_eq!(refused(ask(&router, "POST", "/v1/completions", None, body).await).await.0, 413);
    let body = json!({ "prompt": "The bolt", "max_tokens": 5 });
    assert_eq!(ask(&router, "POST", "/v1/completions", None, body).await.status(), 200);
    let words = "a stem bolt ".repeat(30);
    let messages = |text: &str| json!([{ "role": "user", "content": text }]);
    for (path, fits, exceeds) in [
        ("/tokenize", json!({ "prompt": "A bolt" }), json!({ "prompt": words })),
        ("/tokenize", json!({ "messages": messages("x") }), json!({ "messages": messages(&words) })),
        ("/detokenize", json!({ "tokens": vec![5; 60] }), json!({ "tokens": vec![5; 61] })),
    ] {
        assert_eq!(ask(&router, "POST", path, None, fits).await.status(), 200, "{path}");
        let (status, error) = refused(ask(&router, "POST", path, None, exceeds).await).await;
        assert_eq!((status, &error["code"]), (413, &json!("too_large")), "{path}: {error}");
    }
    // Texts beyond all doubt are not tokenised.
    let text = "x".repeat(481);
    let tool = |more: Value| json!([{ "type": "function", "function": more }]);
    let described = tool(json!({ "name": "f", "description": text }));
    let with_parameters = tool(json!({ "name": "f", "parameters": { "description": text } }));
    let called = |function: Value| {
        let call = json!({ "id": "a", "function": function });
        json!([{ "role": "user", "content": "x" }, { "role": "assistant", "tool_calls": [call] },
            { "role": "tool", "tool_call_id": "a", "name": "f", "content": "y" }])
    };
    for (path, body) in [
        ("/tokenize", json!({ "messages": messages("x"), "tools": described })),
        ("/tokenize", json!({ "messages": called(json!({ "name": "f", "arguments": text })) })),
        ("/v1/chat/completions", json!({ "messages": messages("x"), "tools": described })),
        ("/v1/chat/completions", json!({ "messages": messages("x"), "tools": with_parameters })),
        ("/v1/chat/completions", json!({ "messages": called(json!({ "name": "f", "arguments": text })) })),
        (
            "/v1/responses",
            json!({ "input": "x", "tools": [{ "type": "function", "name": "f", "description": text }] }),
        ),
        ("/tokenize", json!({ "prompt": text })),
        ("/tokenize", json!({ "messages": messages(&text) })),
        ("/v1/completions", json!({ "prompt": text })),
        ("/v1/chat/completions", json!({ "messages": messages(&text) })),
        ("/v1/chat/completions", json!({ "messages": messages("x"), "documents": [{ "text": text }] })),
        ("/v1/responses", json!({ "input": text })),
        ("/v1/documents", json!({ "text": text })),
    ] {
        let (status, error) = refused(ask(&router, "POST", path, None, body).await).await;
        let message = error["message"].as_str().unwrap();
        assert!(status == 413 && message.contains("480 bytes"), "{path}: {error}");
    }
    // Tools that the model is not told of do not count.
    let body =
        json!({ "messages": messages("x"), "tools": described, "tool_choice": "none", "max_tokens": 1 });
    assert_eq!(ask(&router, "POST", "/v1/chat/completions", None, body).await.status(), 200);
}

/// Without a number, or with -1, an answer has as many tokens as the server says, and otherwise as the context leaves.
#[tokio::test]
async fn answers_without_a_number_have_the_servers() {
    let bounded = router(app(|options| options.limits.default_max_tokens = Some(5)));
    let asked = json!({ "prompt": "The bolt", "min_tokens": 500 });
    for more in [json!({}), json!({ "max_tokens": null }), json!({ "max_tokens": -1 })] {
        let mut body = asked.clone();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let answer = post(&bounded, "/v1/completions", body).await;
        assert_eq!(answer["usage"]["completion_tokens"], 5);
        assert_eq!(answer["choices"][0]["finish_reason"], "length");
    }
    let context = post(&bounded, "/tokenize", json!({ "prompt": "" })).await["max_model_len"].clone();
    let mut body = asked;
    body["min_tokens"] = context.clone();
    let answer = post(&server(), "/v1/completions", body).await;
    assert_eq!(answer["usage"]["total_tokens"], context);
}

#[tokio::test]
async fn a_body_that_breaks_off_is_not_called_too_large() {
    let router = server();
    let pieces = [Ok("{\"prompt\": "), Err(std::io::Error::other("gone"))];
    let body = Body::from_stream(futures_util::stream::iter(pieces));
    let request = Request::builder().method("POST").uri("/v1/completions");
    let request = request.header(header::CONTENT_TYPE, "application/json").body(body).unwrap();
    let (status, error) = refused(router.clone().oneshot(request).await.unwrap()).await;
    assert_eq!(status, 400, "{error}");
    assert!(error["message"].as_str().unwrap().contains("broke off"), "{error}");
}

/// At the end of the shutdown time, waiting and running requests both get an error.
#[tokio::test(flavor = "multi_thread")]
async fn nobody_who_waits_is_forgotten_at_the_end() {
    let app = app(|options| {
        options.limits.max_num_seqs = 1;
        options.shutdown_timeout = Duration::from_millis(50);
    });
    let router = router(app.clone());
    let long = json!({ "prompt": "x", "max_tokens": 500, "min_tokens": 500 });
    let asked = crowd(&router, 6, &long);
    tokio::time::sleep(Duration::from_millis(30)).await;
    tokio::task::spawn_blocking(move || app.drain()).await.unwrap();
    let mut told = Vec::new();
    for task in asked {
        let response = tokio::time::timeout(Duration::from_secs(20), task).await.unwrap().unwrap();
        told.push(response.status().as_u16());
    }
    assert!(told.iter().all(|status| [200, 503].contains(status)) && told.contains(&503), "{told:?}");
}

#[tokio::test]
async fn names_that_others_lead_here_are_refused_where_no_key_is_needed() {
    let get = |host: &str| {
        Request::builder().uri("/v1/documents").header(header::HOST, host).body(Body::empty()).unwrap()
    };
    let open = router(app(|options| options.allowed_hosts = vec!["box.lan".to_owned()]));
    for (host, status) in [
        ("127.0.0.1:8080", 200),
        ("[::1]:8080", 200),
        ("localhost", 200),
        ("Box.LAN:80", 200),
        ("host.docker.internal:8080", 200),
        ("docker.internal.example", 403),
        ("evil.example:8080", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
    ] {
        assert_eq!(open.clone().oneshot(get(host)).await.unwrap().status(), status, "{host}");
    }
    let reached = router(app(|options| options.is_local = false));
    assert_eq!(reached.oneshot(get("server.example")).await.unwrap().status(), 200);
}

#[tokio::test]
async fn pages_of_origins_that_are_named_may_ask_with_headers_of_their_clients() {
    let router = router(app(|options| options.allowed_origins = vec!["https://app.example".to_owned()]));
    let asks = Request::builder()
        .method("OPTIONS")
        .uri("/v1/chat/completions")
        .header(header::ORIGIN, "https://app.example")
        .header(header::ACCESS_CONTROL_REQUEST_METHOD, "POST")
        .header(header::ACCESS_CONTROL_REQUEST_HEADERS, "authorization,content-type,x-stainless-os");
    let response = router.clone().oneshot(asks.body(Body::empty()).unwrap()).await.unwrap();
    let allowed = response.headers()[header::ACCESS_CONTROL_ALLOW_HEADERS].to_str().unwrap();
    assert!(allowed.contains("x-stainless-os"), "{allowed}");
    assert_eq!(response.headers()[header::ACCESS_CONTROL_ALLOW_ORIGIN], "https://app.example");
    // Headers of a response that these clients act on.
    let asks = Request::get("/health").header(header::ORIGIN, "https://app.example");
    let response = router.oneshot(asks.body(Body::empty()).unwrap()).await.unwrap();
    let exposed = response.headers()[header::ACCESS_CONTROL_EXPOSE_HEADERS].to_str().unwrap();
    for name in ["x-request-id", "retry-after", "x-should-retry"] {
        assert!(exposed.contains(name), "{exposed}");
    }
}

#[tokio::test]
async fn a_document_that_comes_with_its_text_may_have_an_id_of_its_own() {
    let router = server();
    let body = chat(json!({ "documents": [{ "id": "7", "text": "A stem bolt is tightened to 5 Nm." }] }));
    let answer = post(&router, "/v1/chat/completions", body).await;
    assert_eq!(answer["refrain"]["documents"][0]["title"], "A stem bolt is tightened to 5 Nm.");
    let told = post(&router, "/v1/documents", json!({ "text": "Something else." })).await;
    assert!(told["ingest"]["evicted"].is_null() && told["ingest"]["not_stored"] == false, "{told}");
}

/// A document that is brought for another method has chunks by other names as well, and takes all of them along.
#[tokio::test]
async fn what_is_removed_leaves_no_chunk_behind() {
    let app = app(|_| ());
    let router = router(app);
    let keys = async |id: &str| -> usize {
        let shown = value(ask(&router, "GET", &format!("/v1/documents/{id}"), None, Value::Null).await).await;
        shown["chunk_keys"].as_array().unwrap().len()
    };
    let text = "Spokes are laced. ".repeat(30);
    let first = post(&router, "/v1/documents", json!({ "text": text, "method": "a3" })).await;
    let id = first["data"][0]["id"].as_str().unwrap().to_owned();
    let before = keys(&id).await;
    post(&router, "/v1/documents", json!({ "text": text, "method": "sam_kv:block=16" })).await;
    assert!(keys(&id).await > before);
    post(&router, "/v1/documents", json!({ "text": text, "method": "a3" })).await;
    assert!(keys(&id).await > before, "it was brought for both");
    ask(&router, "DELETE", &format!("/v1/documents/{id}"), None, Value::Null).await;
    let metrics = metrics_of(&router).await;
    let held = metrics.lines().find_map(|line| line.strip_prefix("refrain_store_memory_bytes "));
    assert_eq!(held, Some("0"), "{metrics}");
}

/// Files under a folder.
fn files(folder: &std::path::Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

/// A search for a method that needs whole documents finds these, so that it computes nothing anew, and all that it leaves in
/// the store goes with the documents.
#[tokio::test]
async fn a_search_leaves_no_chunk_that_removal_misses() {
    for (method, left) in
        [("sam_kv:block=16", 0), ("multi_inf_llm:block=16", 0), ("pie", 0), ("pie", 40), ("pie", usize::MAX)]
    {
        let folder = tempfile::tempdir().unwrap();
        let chunks = folder.path().join("chunks");
        let engine = engine_with_left(Store::open(&chunks, 1 << 28).unwrap(), left);
        let app = App::new(engine, Options::new(MODEL)).unwrap();
        let router = router(app);
        // The words of the question stand in chunks that are not neighbours.
        let text = |name: &str| {
            let bolt = format!("The {name} stem bolt is tight. ");
            format!("{bolt}{}{bolt}", "Nothing is said of it here at all, nothing. ".repeat(4))
        };
        let documents = json!([{ "text": text("front") }, { "text": text("rear") }]);
        let added = post(&router, "/v1/documents", json!({ "documents": documents, "method": method })).await;
        let messages = json!([{ "role": "user", "content": "How tight is the stem bolt?" }]);
        let body = chat(json!({
            "messages": messages, "documents": "search", "max_tokens": 2,
            "refrain": { "method": method, "search": 3 },
        }));
        let answer = post(&router, "/v1/chat/completions", body).await;
        // The system part is all that is new.
        assert_eq!(answer["refrain"]["stats"]["prefilled_chunks"], 1, "{method}: {answer}");
        let sources = answer["refrain"]["documents"].as_array().unwrap();
        assert!(!sources.is_empty() && !sources[0]["chunks"].as_array().unwrap().is_empty(), "{answer}");
        for document in added["data"].as_array().unwrap() {
            let path = format!("/v1/documents/{}", document["id"].as_str().unwrap());
            value(ask(&router, "DELETE", &path, None, Value::Null).await).await;
        }
        let left: Vec<PathBuf> = files(&chunks)
            .into_iter()
            .filter(|path| path.extension().is_some_and(|extension| extension != "redb"))
            .collect();
        assert_eq!(left.len(), 1, "{method}: {left:?}");
    }
}

/// A search for a method that needs whole documents takes as many of them as the context has room for.
#[tokio::test]
async fn a_search_takes_the_whole_documents_that_fit() {
    let router = server();
    let document = |name: &str| json!({ "text": format!("The {name} stem bolt is tight. ").repeat(5) });
    let documents: Vec<Value> = ["front", "rear", "left", "right"].into_iter().map(document).collect();
    let body = json!({ "documents": documents, "method": "sam_kv:block=16" });
    post(&router, "/v1/documents", body).await;
    let ask_for = async |method: &str| {
        let body = chat(json!({
            "documents": "search", "refrain": { "method": method, "search": 4 }, "max_tokens": 2,
            "messages": [{ "role": "user", "content": "How tight is the stem bolt?" }],
        }));
        post(&router, "/v1/chat/completions", body).await
    };
    let answer = ask_for("sam_kv:block=16").await;
    let taken = answer["refrain"]["documents"].as_array().unwrap();
    assert!((1..4).contains(&taken.len()), "{answer}");
    assert_eq!(
        taken[0]["chunks"].as_array().unwrap().len(),
        taken[0]["chunks"][0]["of"].as_u64().unwrap() as usize
    );
    // Not one of them fits.
    let long = json!({ "text": "Spokes are laced. ".repeat(60), "method": "a3" });
    post(&router, "/v1/documents", long).await;
    let body = chat(json!({
        "documents": "search", "refrain": { "method": "sam_kv:block=16" },
        "messages": [{ "role": "user", "content": "How are spokes laced?" }],
    }));
    let (status, error) = refused(ask(&router, "POST", "/v1/chat/completions", None, body).await).await;
    assert_eq!((status, &error["code"]), (400, &json!("context_length_exceeded")), "{error}");
    // Clients know the error by these words.
    let known = ["prompt is too long", "this model's maximum context length is"];
    assert!(known.iter().all(|words| error["message"].as_str().unwrap().contains(words)), "{error}");
}

/// Each prompt of a request gets a copy of its documents, which therefore count before.
#[tokio::test]
async fn given_documents_of_more_tokens_than_the_context_are_refused() {
    let document = json!({ "text": "A stem bolt is tightened to 5 Nm. ".repeat(100) });
    let body = json!({ "prompt": ["a", "b"], "documents": [document], "max_tokens": 1 });
    let (status, error) = refused(ask(&server(), "POST", "/v1/completions", None, body).await).await;
    assert_eq!((status, &error["param"]), (400, &json!("documents")), "{error}");
    assert_eq!(error["code"], "context_length_exceeded");
    // The page knows the remedy, and says it in its own words.
    let (_, remedy) = error["message"].as_str().unwrap().split_once("the documents have more: ").unwrap();
    assert!(include_str!("../src/page/common.js").contains(&format!("['{remedy}', ")), "{remedy}");
}

#[tokio::test]
async fn a_search_for_more_tokens_than_the_context_is_refused() {
    let router = server();
    let text = "A stem bolt is tightened to 5 Nm. ".repeat(30);
    post(&router, "/v1/documents", json!({ "text": text })).await;
    let body = chat(json!({ "documents": "search", "refrain": { "search": 64 } }));
    let (status, error) = refused(ask(&router, "POST", "/v1/chat/completions", None, body).await).await;
    assert_eq!((status, &error["param"]), (400, &json!("documents")), "{error}");
    assert_eq!(error["code"], "context_length_exceeded");
    let message = error["message"].as_str().unwrap();
    assert!(message.starts_with("prompt is too long: this model's maximum context length is"), "{error}");
}

/// Without a seed every answer is sampled anew, and the seed that the answer tells repeats it.
#[tokio::test]
async fn answers_without_a_seed_vary_and_can_be_repeated() {
    let router = server();
    let mut answers = Vec::new();
    for _ in 0..4 {
        let body = chat(json!({ "temperature": 1.5, "max_tokens": 16, "min_tokens": 16 }));
        answers.push(post(&router, "/v1/chat/completions", body).await);
    }
    let content = |answer: &Value| answer["choices"][0]["message"]["content"].clone();
    assert!(answers[1..].iter().any(|answer| content(answer) != content(&answers[0])), "{answers:?}");
    let seed = answers[0]["refrain"]["seed"].clone();
    let body = chat(json!({ "temperature": 1.5, "max_tokens": 16, "min_tokens": 16, "seed": seed }));
    let again = post(&router, "/v1/chat/completions", body).await;
    assert_eq!((content(&again), &again["refrain"]["seed"]), (content(&answers[0]), &seed));
    let greedy = post(&router, "/v1/chat/completions", chat(json!({}))).await;
    assert!(greedy["refrain"].get("seed").is_none(), "{greedy}");
}

/// The same text gone on with by so many at once.
fn crowd(router: &Router, many: usize, body: &Value) -> Vec<tokio::task::JoinHandle<Response>> {
    let one = |_| {
        let (router, body) = (router.clone(), body.clone());
        tokio::spawn(async move { ask(&router, "POST", "/v1/completions", None, body).await })
    };
    (0..many).map(one).collect()
}

async fn metrics_of(router: &Router) -> String {
    text(ask(router, "GET", "/metrics", None, Value::Null).await).await
}
