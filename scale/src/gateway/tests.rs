//! The gateway before workers that follow a script.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use axum::body::Body;
use axum::http::{Request, Response, StatusCode, header};
use bytes::Bytes;
use futures_util::stream::{self, BoxStream, StreamExt as _};
use http_body_util::BodyExt as _;
use refrain_route::Rule;
use refrain_server::{ChunkPlan, HeldChunks, ModelCard, Options, Rates, Report, TENANT_HEADER};
use serde_json::{Value, json};
use tower::ServiceExt as _;

use super::{Gateway, router};
use crate::cluster::{BodyStream, Cluster, Lost, WorkerEvent, WorkerId};

/// What a worker does with a request.
#[derive(Clone, Debug)]
enum Act {
    Answer(u16, &'static str),
    /// Is lost before its response.
    Lose,
    /// Begins a response of this type, and is lost after these pieces of it.
    Break(&'static str, &'static [&'static str]),
    Stream(&'static [&'static str]),
    /// Never answers.
    Hang,
}

/// Workers that all follow one script, request after request, and note which of them was asked what.
#[derive(Default)]
struct Script {
    acts: Mutex<VecDeque<Act>>,
    plan: Mutex<ChunkPlan>,
    asked: Mutex<Vec<(WorkerId, String, Option<String>)>>,
}

fn body(pieces: impl IntoIterator<Item = Result<Bytes, Lost>>) -> BodyStream {
    stream::iter(pieces.into_iter().collect::<Vec<_>>()).boxed()
}

fn response(status: u16, kind: &str, pieces: BodyStream) -> Response<BodyStream> {
    Response::builder().status(status).header(header::CONTENT_TYPE, kind).body(pieces).unwrap()
}

#[async_trait]
impl Cluster for Script {
    fn state_events(&self) -> BoxStream<'static, WorkerEvent> {
        stream::pending().boxed()
    }

    async fn dispatch(
        &self,
        worker: WorkerId,
        request: Request<Bytes>,
    ) -> Result<Response<BodyStream>, Lost> {
        let path = request.uri().path().to_owned();
        if path.starts_with("/internal/plan/") {
            let plan = serde_json::to_vec(&*self.plan.lock().unwrap()).unwrap();
            return Ok(response(200, "application/json", body([Ok(plan.into())])));
        }
        let tenant = request.headers().get(TENANT_HEADER).map(|value| value.to_str().unwrap().to_owned());
        self.asked.lock().unwrap().push((worker, path, tenant));
        let act = self.acts.lock().unwrap().pop_front().unwrap_or(Act::Answer(200, "{}"));
        let bytes = |piece: &&'static str| Ok(Bytes::from_static(piece.as_bytes()));
        match act {
            Act::Answer(status, text) => {
                Ok(response(status, "application/json", body([Ok(Bytes::from_static(text.as_bytes()))])))
            }
            Act::Lose => Err(Lost("as the script says".to_owned())),
            Act::Break(kind, pieces) => {
                let end = Err(Lost("as the script says".to_owned()));
                Ok(response(200, kind, body(pieces.iter().map(bytes).chain([end]))))
            }
            Act::Stream(pieces) => Ok(response(200, "text/event-stream", body(pieces.iter().map(bytes)))),
            Act::Hang => std::future::pending().await,
        }
    }
}

fn report(keys: &[u64], waiting: usize) -> Box<Report> {
    let model =
        ModelCard { name: "m".into(), fingerprint: "f".into(), kv_bytes_per_token: 1, version: "0".into() };
    Box::new(Report {
        epoch: 1,
        sequence: 1,
        chunks: HeldChunks::All(keys.to_vec()),
        running: 0,
        waiting,
        rates: Rates::default(),
        stopping: false,
        model,
    })
}

/// A gateway before so many workers without chunks.
fn gateway(workers: u64, acts: &[Act]) -> (Gateway, Arc<Script>) {
    let script = Arc::new(Script { acts: Mutex::new(acts.iter().cloned().collect()), ..Script::default() });
    let gateway =
        Gateway::new(script.clone(), Options::new(""), "ab".repeat(32).parse().unwrap(), Rule::Cost);
    for worker in 0..workers {
        gateway.0.fleet.apply(WorkerEvent::Reported(WorkerId(worker), report(&[], 0)));
    }
    (gateway, script)
}

async fn ask(gateway: &Gateway, method: &str, path: &str, body: &Value) -> (StatusCode, String) {
    let request =
        Request::builder().method(method).uri(path).header(header::CONTENT_TYPE, "application/json");
    let request = request.body(Body::from(body.to_string())).unwrap();
    let response = router(gateway.clone()).oneshot(request).await.unwrap();
    let status = response.status();
    let text = response.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(text.to_vec()).unwrap())
}

async fn chat(gateway: &Gateway) -> (StatusCode, String) {
    ask(gateway, "POST", "/v1/chat/completions", &json!({ "messages": [], "documents": [] })).await
}

fn asked(script: &Script) -> Vec<u64> {
    script.asked.lock().unwrap().iter().map(|(worker, ..)| worker.0).collect()
}

#[tokio::test]
async fn a_request_goes_to_two_other_workers_before_it_fails() {
    let fine = Act::Answer(200, "fine");
    let partly = Act::Break("application/json", &["{\"half\": "]);
    for acts in [
        vec![fine.clone()],
        vec![Act::Lose, fine.clone()],
        vec![Act::Lose, partly.clone(), fine.clone()],
        vec![Act::Answer(503, "stops"), Act::Answer(429, "full"), fine.clone()],
        vec![Act::Break("text/event-stream", &[]), fine.clone()],
    ] {
        let (gateway, script) = gateway(4, &acts);
        assert_eq!(chat(&gateway).await, (StatusCode::OK, "fine".to_owned()), "{acts:?}");
        let mut workers = asked(&script);
        assert_eq!(workers.len(), acts.len(), "{acts:?}");
        workers.sort_unstable();
        workers.dedup();
        assert_eq!(workers.len(), acts.len(), "no worker is asked twice: {acts:?}");
    }
    let (gateway, script) = gateway(4, &[Act::Lose, Act::Lose, Act::Lose]);
    let (status, text) = chat(&gateway).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{text}");
    assert!(text.contains("no_worker"), "{text}");
    assert_eq!(asked(&script).len(), 3);
}

#[tokio::test]
async fn a_refusal_of_all_workers_is_passed_on() {
    let (gateway, _) = gateway(2, &[Act::Answer(429, "full"), Act::Answer(429, "full as well")]);
    assert_eq!(chat(&gateway).await, (StatusCode::TOO_MANY_REQUESTS, "full as well".to_owned()));
}

#[tokio::test]
async fn a_wrong_request_is_asked_once() {
    for status in [400, 404, 413, 500] {
        let (gateway, script) = gateway(3, &[Act::Answer(status, "wrong")]);
        assert_eq!(chat(&gateway).await.0.as_u16(), status);
        assert_eq!(asked(&script).len(), 1);
    }
}

#[tokio::test]
async fn a_stream_that_breaks_off_ends_with_an_error() {
    let pieces: &[&str] = &["data: {\"a\": 1}\n\n", "data: {\"a\":"];
    let (gateway, script) = gateway(3, &[Act::Break("text/event-stream", pieces)]);
    let (status, text) = chat(&gateway).await;
    assert_eq!((status, asked(&script).len()), (StatusCode::OK, 1));
    let data: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    let [first, cut, error, done] = data[..] else { panic!("{text}") };
    assert_eq!((first, cut, done), ("{\"a\": 1}", "{\"a\":", "[DONE]"));
    assert_eq!(serde_json::from_str::<Value>(error).unwrap()["error"]["code"], "worker_lost");
    let (gateway, _) =
        self::gateway(1, &[Act::Break("text/event-stream", &["event: response.created\ndata: {}\n\n"])]);
    let (_, text) = ask(&gateway, "POST", "/v1/responses", &json!({ "input": "x" })).await;
    let (_, error) = text.split_once("event: error\ndata: ").unwrap();
    assert_eq!(serde_json::from_str::<Value>(error).unwrap()["code"], "worker_lost");
    assert!(!text.contains("[DONE]"), "{text}");
    let (gateway, _) = self::gateway(1, &[Act::Stream(&["data: 1\n\n", "data: [DONE]\n\n"])]);
    assert_eq!(chat(&gateway).await.1, "data: 1\n\ndata: [DONE]\n\n");
}

#[tokio::test]
async fn a_request_leaves_a_worker_that_hangs_when_it_is_given_up() {
    let (gateway, script) = gateway(2, &[Act::Hang, Act::Answer(200, "fine")]);
    let given_up = async {
        while asked(&script).is_empty() {
            tokio::task::yield_now().await;
        }
        gateway.0.fleet.apply(WorkerEvent::Left(WorkerId(asked(&script)[0])));
    };
    let (answer, ()) = tokio::join!(chat(&gateway), given_up);
    assert_eq!(answer, (StatusCode::OK, "fine".to_owned()));
}

#[tokio::test]
async fn a_request_goes_where_its_chunks_are() {
    for holder in 0..4 {
        let (gateway, script) = gateway(4, &[]);
        *script.plan.lock().unwrap() =
            ChunkPlan { chunks: vec![(7, 100), (8, 50)], prompt_tokens: 200, charge: 0.0 };
        gateway.0.fleet.apply(WorkerEvent::Reported(WorkerId(holder), report(&[8, 7], 0)));
        chat(&gateway).await;
        assert_eq!(asked(&script), [holder]);
    }
}

#[tokio::test]
async fn a_removal_concerns_every_worker_or_fails() {
    let removal = ("DELETE", "/v1/documents/doc-1");
    let (gateway, script) =
        gateway(3, &[Act::Answer(404, ""), Act::Answer(200, "removed"), Act::Answer(404, "")]);
    let (status, text) = ask(&gateway, removal.0, removal.1, &Value::Null).await;
    assert_eq!((status, text.as_str()), (StatusCode::OK, "removed"));
    assert_eq!(asked(&script), [0, 1, 2]);
    let (gateway, _) = self::gateway(2, &[Act::Answer(200, "removed"), Act::Lose]);
    let (status, text) = ask(&gateway, removal.0, removal.1, &Value::Null).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{text}");
    assert!(text.contains("worker_lost"), "{text}");
}
