//! Streams of the real server with the tiny model, broken off at many places.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use clap::Parser as _;

use super::*;
use crate::args::{Cli, Command};
use crate::gateway::events::Events;
use crate::gateway::transcript::Transcript;

/// Servers in this process, of which the first that answers is lost after some bytes of its answer.
struct Breaking {
    servers: Vec<axum::Router>,
    /// Bytes of the next stream that come; the others are whole.
    bytes: AtomicUsize,
    answers: AtomicUsize,
}

#[async_trait]
impl Cluster for Breaking {
    fn state_events(&self) -> BoxStream<'static, WorkerEvent> {
        stream::pending().boxed()
    }

    async fn dispatch(
        &self,
        worker: WorkerId,
        request: Request<Bytes>,
    ) -> Result<Response<BodyStream>, Lost> {
        let is_answer = !request.uri().path().starts_with("/internal/");
        let server = self.servers[worker.0 as usize].clone();
        let response = server.oneshot(request.map(Body::from)).await.unwrap();
        let lost = |error: axum::Error| Lost(error.to_string());
        let (head, body) = response.into_parts();
        let pieces = body.into_data_stream().map(move |piece| piece.map_err(lost)).boxed();
        let bytes = if is_answer { self.bytes.swap(usize::MAX, Relaxed) } else { usize::MAX };
        self.answers.fetch_add(usize::from(is_answer), Relaxed);
        Ok(Response::from_parts(head, broken_off(pieces, bytes)))
    }
}

/// A stream that is lost after so many bytes.
fn broken_off(pieces: BodyStream, bytes: usize) -> BodyStream {
    let rest = stream::unfold((pieces, Some(bytes)), |(mut pieces, left)| async move {
        let left = left?;
        if left == 0 {
            return Some((Err(Lost("as the test says".to_owned())), (pieces, None)));
        }
        let mut piece = pieces.next().await?.unwrap();
        piece.truncate(left);
        let left = if left == usize::MAX { left } else { left - piece.len() };
        Some((Ok(piece), (pieces, Some(left))))
    });
    rest.boxed()
}

/// A gateway before two servers with the tiny model.
fn real_gateway(folder: &std::path::Path) -> (Gateway, Arc<Breaking>) {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/tiny/llama");
    let server = |store: &str| {
        let key = "ab".repeat(32);
        let store = folder.join(store);
        // Products of other types may round by the number of rows, of which a prompt has fewer where its beginning was kept.
        let words = [
            "refrain-scale",
            "worker",
            "--namespace-key",
            &key,
            "--threads=1",
            "--chunk-tokens=64",
            "--compute=f32",
        ];
        let store = ["--store", store.to_str().unwrap(), "--model", model, "--served-model-name=tiny"];
        let Command::Worker(args) = Cli::parse_from(words.into_iter().chain(store)).command else { panic!() };
        crate::worker::open(&args).unwrap().router()
    };
    let servers = vec![server("a"), server("b")];
    let (bytes, answers) = (AtomicUsize::new(usize::MAX), AtomicUsize::new(0));
    let cluster = Arc::new(Breaking { servers, bytes, answers });
    let key = "ab".repeat(32).parse().unwrap();
    let gateway = Gateway::new(cluster.clone(), Options::new(""), key, Rule::Cost);
    for worker in 0..2 {
        gateway.0.fleet.apply(WorkerEvent::Reported(WorkerId(worker), report(&[], 0)));
    }
    (gateway, cluster)
}

/// Digests of a stream's events.
async fn digests(text: &str) -> Vec<(u64, [u8; 32])> {
    let mut events = Events::new(body([Ok(Bytes::copy_from_slice(text.as_bytes()))]));
    let mut transcript = Transcript::default();
    while let Some(event) = events.next().await.unwrap() {
        transcript.take(event).unwrap();
    }
    assert!(transcript.is_over, "{text}");
    transcript.digests()
}

#[tokio::test]
async fn a_real_stream_goes_on_wherever_it_breaks_off() {
    let folder = tempfile::tempdir().unwrap();
    let (gateway, cluster) = real_gateway(folder.path());
    let documents = json!([{ "title": "Torque", "text": "A stem bolt is tightened to 5 Nm, and greased." }]);
    let messages = json!([{ "role": "user", "content": "How tight is the bolt?" }]);
    let function = json!({ "name": "torque", "parameters": { "type": "object", "properties": { "bolt": { "enum": ["a", "b"] } } } });
    let tool = json!({ "type": "function", "function": function });
    for (path, body) in [
        ("chat/completions", json!({ "messages": messages, "documents": documents, "max_tokens": 12 })),
        (
            "chat/completions",
            json!({ "messages": messages, "documents": documents, "refrain": { "method": "pie" },
            "temperature": 0.9, "seed": 3, "n": 2, "max_tokens": 8, "stream_options": { "include_usage": true } }),
        ),
        (
            "chat/completions",
            json!({ "messages": messages, "tools": [tool], "tool_choice": "required", "max_tokens": 40,
            "parallel_tool_calls": false }),
        ),
        (
            "completions",
            json!({ "prompt": "A bolt", "logprobs": 2, "max_tokens": 6, "temperature": 0.5, "seed": 1 }),
        ),
        ("responses", json!({ "input": "How tight?", "documents": documents, "max_output_tokens": 10 })),
    ] {
        let (path, mut body) = (format!("/v1/{path}"), body);
        body["stream"] = json!(true);
        let (status, whole) = ask(&gateway, "POST", &path, &body).await;
        assert_eq!(status, StatusCode::OK, "{whole}");
        let wanted = digests(&whole).await;
        let answers = cluster.answers.load(Relaxed);
        let cuts: Vec<usize> = (1..14).map(|part| whole.len() * part / 14).collect();
        for cut in &cuts {
            cluster.bytes.store(*cut, Relaxed);
            let (_, text) = ask(&gateway, "POST", &path, &body).await;
            assert_eq!(digests(&text).await, wanted, "{path} cut after {cut} bytes: {text}\n\n{whole}");
        }
        assert_eq!(cluster.answers.load(Relaxed), answers + 2 * cuts.len(), "each was answered twice");
    }
}
