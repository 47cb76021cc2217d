//! The gateway before workers that follow a script.

mod limits;
mod load;
mod models;
mod observed;
mod real;
mod removal;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

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
    /// Begins a stream, and is silent after these pieces of it.
    Stall(&'static [&'static str]),
    /// Answers after a while.
    Late(&'static str),
    /// Never answers.
    Hang,
}

/// Workers that all follow one script, request after request, and note which of them was asked what.
#[derive(Default)]
struct Script {
    acts: Mutex<VecDeque<Act>>,
    plan: Mutex<ChunkPlan>,
    /// Statuses of the next plans; 200 after them.
    plan_statuses: Mutex<VecDeque<u16>>,
    asked: Mutex<Vec<(WorkerId, String, Option<String>)>>,
    bodies: Mutex<Vec<Bytes>>,
    members: Vec<WorkerId>,
    /// Workers that left the cluster.
    departed: Vec<WorkerId>,
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

    fn members(&self) -> Vec<WorkerId> {
        self.members.clone()
    }

    fn has(&self, worker: WorkerId) -> bool {
        !self.departed.contains(&worker)
    }

    async fn dispatch(
        &self,
        worker: WorkerId,
        request: Request<Bytes>,
    ) -> Result<Response<BodyStream>, Lost> {
        let path = request.uri().path().to_owned();
        if path.starts_with("/internal/plan/") {
            let plan = serde_json::to_vec(&*self.plan.lock().unwrap()).unwrap();
            let status = self.plan_statuses.lock().unwrap().pop_front().unwrap_or(200);
            return Ok(response(status, "application/json", body([Ok(plan.into())])));
        }
        let tenant = request.headers().get(TENANT_HEADER).map(|value| value.to_str().unwrap().to_owned());
        self.asked.lock().unwrap().push((worker, path, tenant));
        self.bodies.lock().unwrap().push(request.body().clone());
        let act = self.acts.lock().unwrap().pop_front().unwrap_or(Act::Answer(200, "{}"));
        let bytes = |piece: &&'static str| Ok(Bytes::from_static(piece.as_bytes()));
        match act {
            Act::Answer(status, text) => {
                Ok(response(status, "application/json", body([Ok(Bytes::from_static(text.as_bytes()))])))
            }
            Act::Late(text) => {
                tokio::time::sleep(Duration::from_millis(100)).await;
                Ok(response(200, "application/json", body([Ok(Bytes::from_static(text.as_bytes()))])))
            }
            Act::Lose => Err(Lost("as the script says".to_owned())),
            Act::Break(kind, pieces) => {
                let end = Err(Lost("as the script says".to_owned()));
                Ok(response(200, kind, body(pieces.iter().map(bytes).chain([end]))))
            }
            Act::Stream(pieces) => Ok(response(200, "text/event-stream", body(pieces.iter().map(bytes)))),
            Act::Stall(pieces) => {
                let pieces = stream::iter(pieces.iter().map(bytes).collect::<Vec<_>>());
                Ok(response(200, EVENTS, pieces.chain(stream::pending()).boxed()))
            }
            Act::Hang => std::future::pending().await,
        }
    }
}

fn report(keys: &[u64], waiting: usize) -> Box<Report> {
    let (name, fingerprint, version) = ("m".into(), "f".into(), "0".into());
    let model = ModelCard { name, fingerprint, kv_bytes_per_token: 1, version, numerics: "n".into() };
    Box::new(Report {
        epoch: 1,
        sequence: 1,
        chunks: HeldChunks::All(keys.to_vec()),
        running: 0,
        waiting,
        rates: Rates::default(),
        stopping: false,
        ready: true,
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
async fn a_worker_that_answers_503_is_not_chosen_before_its_next_report() {
    let (gateway, script) = gateway(2, &[Act::Answer(503, "its GPU has failed")]);
    for _ in 0..3 {
        assert_eq!(chat(&gateway).await.0, StatusCode::OK);
    }
    let workers = asked(&script);
    assert_eq!(workers.len(), 4);
    assert!(workers[1..].iter().all(|worker| *worker != workers[0]), "{workers:?}");
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

/// A stream of two words by two workers, the end included.
const STREAM: [&[&str]; 2] = [
    &[
        "data: {\"id\":\"A\",\"created\":1,\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n",
        "data: {\"id\":\"A\",\"created\":1,\"choices\":[{\"index\":0,\"delta\":{\"content\":\"b\"}}]}\n\n",
        "data: [DONE]\n\n",
    ],
    &[
        "data: {\"id\":\"B\",\"created\":2,\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n",
        "data: {\"id\":\"B\",\"created\":2,\"choices\":[{\"index\":0,\"delta\":{\"content\":\"b\"}}]}\n\n",
        "data: [DONE]\n\n",
    ],
];

const EVENTS: &str = "text/event-stream";

/// A chat that asks for a stream.
async fn streamed(gateway: &Gateway, more: Value) -> (StatusCode, String) {
    let mut body = json!({ "messages": [], "stream": true });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    ask(gateway, "POST", "/v1/chat/completions", &body).await
}

fn replays(gateway: &Gateway) -> Vec<String> {
    let text = gateway.0.metrics.text(&gateway.0.fleet);
    let counted = text.lines().filter_map(|line| line.strip_prefix("refrain_gateway_replays_total{outcome="));
    counted.map(|line| line.replace(['"', '}'], "")).collect()
}

#[tokio::test]
async fn another_worker_goes_on_with_a_stream() {
    let whole = STREAM[0].concat();
    let partly = format!("{}data: {{\"id\"", STREAM[0][0]);
    let partly: &'static [&'static str] = Box::leak(Box::new([&*Box::leak(partly.into_boxed_str())]));
    for acts in [
        vec![Act::Break(EVENTS, &STREAM[0][..1]), Act::Stream(STREAM[1])],
        vec![Act::Break(EVENTS, &STREAM[0][..2]), Act::Stream(STREAM[1])],
        // An event that was cut off is not passed on.
        vec![Act::Break(EVENTS, partly), Act::Stream(STREAM[1])],
        vec![Act::Break(EVENTS, &STREAM[0][..1]), Act::Lose, Act::Stream(STREAM[1])],
        vec![Act::Break(EVENTS, &STREAM[0][..1]), Act::Break(EVENTS, &[]), Act::Stream(STREAM[1])],
        vec![Act::Break(EVENTS, &STREAM[0][..1]), Act::Answer(503, "stops"), Act::Stream(STREAM[1])],
        vec![
            Act::Break(EVENTS, &STREAM[0][..2]),
            Act::Break(EVENTS, &STREAM[1][..1]),
            Act::Stream(STREAM[1]),
        ],
    ] {
        let (gateway, script) = gateway(4, &acts);
        assert_eq!(streamed(&gateway, json!({})).await, (StatusCode::OK, whole.clone()), "{acts:?}");
        let mut workers = asked(&script);
        workers.sort_unstable();
        workers.dedup();
        assert_eq!(workers.len(), acts.len(), "no worker is asked twice: {acts:?}");
        assert_eq!(replays(&gateway), ["continued 1"]);
    }
    // A worker that stops by itself says so in its stream.
    for code in ["shutting_down", "device_failed"] {
        let error = format!("data: {{\"error\":{{\"message\":\"m\",\"code\":\"{code}\"}}}}\n\n");
        let error: &'static str = Box::leak(error.into_boxed_str());
        for sent in 0..2 {
            let mut stops = STREAM[0][..sent].to_vec();
            stops.extend([error, STREAM[0][2]]);
            let (gateway, script) = gateway(2, &[Act::Stream(stops.leak()), Act::Stream(STREAM[1])]);
            let wanted = STREAM[if sent == 0 { 1 } else { 0 }].concat();
            assert_eq!(streamed(&gateway, json!({})).await.1, wanted, "{code} {sent}");
            assert_eq!(asked(&script).len(), 2);
        }
    }
    // An error that any worker would tell, and a text with such a word, are passed on.
    for told in
        ["\"error\":{\"code\":\"timeout\"}", "\"choices\":[{\"delta\":{\"content\":\"device_failed\"}}]"]
    {
        let told: &'static str = Box::leak(format!("data: {{{told}}}\n\n").into_boxed_str());
        let (gateway, script) = gateway(2, &[Act::Stream(vec![told, STREAM[0][2]].leak())]);
        assert_eq!(streamed(&gateway, json!({})).await.1, [told, STREAM[0][2]].concat());
        assert_eq!(asked(&script).len(), 1);
    }
    // Nothing is missing of a stream that is lost after its end.
    let (gateway, script) = gateway(4, &[Act::Break(EVENTS, STREAM[0])]);
    assert_eq!(streamed(&gateway, json!({})).await.1, whole);
    assert_eq!(asked(&script).len(), 1);
}

#[tokio::test]
async fn a_stream_that_nobody_goes_on_with_ends_with_an_error() {
    let broken = Act::Break(EVENTS, &STREAM[0][..1]);
    let other: &[&str] = &["data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"x\"}}]}\n\n"];
    for (workers, acts, outcome) in [
        (1, vec![broken.clone()], "no_worker 1"),
        (4, vec![broken.clone(), Act::Lose, Act::Lose], "no_worker 1"),
        (4, vec![broken.clone(), Act::Stream(other)], "differed 1"),
        (4, vec![broken.clone(), Act::Stream(&STREAM[1][2..])], "differed 1"),
        (4, vec![broken.clone(), Act::Stream(&[": comment\n\n"])], "differed 1"),
    ] {
        let (gateway, script) = gateway(workers, &acts);
        let (status, text) = streamed(&gateway, json!({})).await;
        assert_eq!((status, asked(&script).len()), (StatusCode::OK, acts.len()), "{acts:?}");
        let data: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        let [first, error, done] = data[..] else { panic!("{text}") };
        assert_eq!((first, done), (STREAM[0][0].trim().strip_prefix("data: ").unwrap(), "[DONE]"));
        assert_eq!(serde_json::from_str::<Value>(error).unwrap()["error"]["code"], "worker_lost");
        assert_eq!(replays(&gateway), [outcome]);
    }
    let created = Act::Break(EVENTS, &["event: response.created\ndata: {}\n\n"]);
    let (gateway, _) = self::gateway(1, &[created]);
    let (_, text) = ask(&gateway, "POST", "/v1/responses", &json!({ "input": "x", "stream": true })).await;
    let (_, error) = text.split_once("event: error\ndata: ").unwrap();
    assert_eq!(serde_json::from_str::<Value>(error).unwrap()["code"], "worker_lost");
    assert!(!text.contains("[DONE]"), "{text}");
}

#[tokio::test]
async fn a_stream_goes_on_at_workers_of_its_kind_alone() {
    let acts = [Act::Break(EVENTS, &STREAM[0][..1]), Act::Stream(STREAM[1])];
    for (fingerprint, numerics, goes_on) in
        [("f", "n", true), ("f", "other", false), ("other", "n", false), ("f", "", false)]
    {
        let (gateway, script) = gateway(1, &acts);
        let mut other = report(&[], 100);
        (other.model.fingerprint, other.model.numerics) = (fingerprint.into(), numerics.into());
        gateway.0.fleet.apply(WorkerEvent::Reported(WorkerId(7), other));
        let (_, text) = streamed(&gateway, json!({})).await;
        assert_eq!(text == STREAM[0].concat(), goes_on, "{fingerprint} {numerics}: {text}");
        assert_eq!(asked(&script), if goes_on { vec![0, 7] } else { vec![0] });
    }
    // Workers that do not tell their numerics may have any.
    let (gateway, script) = gateway(0, &acts);
    for worker in 0..2 {
        let mut old = report(&[], 0);
        old.model.numerics = String::new();
        gateway.0.fleet.apply(WorkerEvent::Reported(WorkerId(worker), old));
    }
    assert!(streamed(&gateway, json!({})).await.1.contains("worker_lost"));
    assert_eq!(asked(&script).len(), 1);
}

#[tokio::test]
async fn requests_that_sample_have_one_seed_for_all_workers() {
    let acts = [Act::Break(EVENTS, &STREAM[0][..1]), Act::Stream(STREAM[1])];
    for (more, given) in
        [(json!({ "temperature": 0.7 }), None), (json!({ "temperature": 0.7, "seed": 5 }), Some(5))]
    {
        let (gateway, script) = gateway(2, &acts);
        assert_eq!(streamed(&gateway, more).await.1, STREAM[0].concat());
        let bodies = script.bodies.lock().unwrap().clone();
        assert_eq!(bodies.len(), 2);
        assert_eq!(bodies[0], bodies[1]);
        let seed = serde_json::from_slice::<Value>(&bodies[0]).unwrap()["seed"].as_u64().unwrap();
        assert!(given.is_none_or(|given| seed == given));
    }
    // A stream of something else than an answer does not follow from its request alone.
    let (gateway, script) = gateway(2, &acts);
    let (_, text) = ask(&gateway, "POST", "/v1/documents", &json!({ "text": "x", "stream": true })).await;
    assert!(text.contains("worker_lost"), "{text}");
    assert_eq!(asked(&script).len(), 1);
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
async fn a_worker_that_takes_no_more_requests_ends_those_that_it_has() {
    let (gateway, script) = gateway(2, &[Act::Late("late")]);
    let closed = async {
        while asked(&script).is_empty() {
            tokio::task::yield_now().await;
        }
        gateway.0.fleet.apply(WorkerEvent::Closed(WorkerId(asked(&script)[0])));
    };
    let (answer, ()) = tokio::join!(chat(&gateway), closed);
    assert_eq!(answer, (StatusCode::OK, "late".to_owned()));
    let first = asked(&script)[0];
    assert_eq!(gateway.0.fleet.ids(), [WorkerId(1 - first)]);
    assert_eq!(gateway.0.fleet.status().len(), 1);
    chat(&gateway).await;
    assert_eq!(asked(&script), [first, 1 - first]);
    // It comes back, as a worker that was started anew does.
    gateway.0.fleet.apply(WorkerEvent::Reported(WorkerId(first), report(&[], 0)));
    assert_eq!(gateway.0.fleet.ids().len(), 2);
    for worker in 0..2 {
        gateway.0.fleet.apply(WorkerEvent::Closed(WorkerId(worker)));
    }
    assert!(chat(&gateway).await.1.contains("no_worker"));
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
async fn chunks_of_another_model_are_not_asked_for() {
    for holder in [0, 1] {
        let (gateway, script) = gateway(1, &[]);
        *script.plan.lock().unwrap() = ChunkPlan { chunks: vec![(7, 100)], prompt_tokens: 100, charge: 0.0 };
        // Another model's worker has a chunk of the same key, and a worker of the model that planned has nothing.
        let mut other = report(&[7], if holder == 0 { 9 } else { 0 });
        other.model.fingerprint = "g".into();
        gateway.0.fleet.apply(WorkerEvent::Reported(WorkerId(1), other));
        gateway
            .0
            .fleet
            .apply(WorkerEvent::Reported(WorkerId(0), report(&[], if holder == 0 { 0 } else { 9 })));
        chat(&gateway).await;
        assert_eq!(asked(&script), [holder], "the worker that planned is the one that answers");
    }
}
