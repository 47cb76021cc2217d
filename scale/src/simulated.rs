//! A worker that sleeps instead of computing. Its queue, its chunk files, its reports and its streams are real, so that many workers run
//! on one small machine.

mod chunks;
mod simulation;

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Query, Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures_util::stream::{StreamExt as _, unfold};
use refrain::store::{ChunkId, NamespaceKey, Store};
use refrain_server::{
    ApiError, ChunkPlan, HeldLog, ModelCard, Rates, Report, TENANT_HEADER, short_key, signed_tenant,
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep, sleep_until};

use self::chunks::Sources;
pub(crate) use self::simulation::Simulation;

/// A simulated worker. A clone is cheap and shares everything.
#[derive(Clone)]
pub(crate) struct Simulated(Arc<Inner>);

struct Inner {
    simulation: Simulation,
    store: Store,
    model: String,
    key: NamespaceKey,
    held: HeldLog,
    /// Held by the request that is prefilled.
    turn: Mutex<()>,
    seconds: Mutex<Mean>,
    waiting: AtomicUsize,
    running: AtomicUsize,
    is_stopping: AtomicBool,
}

#[derive(Debug, Deserialize)]
struct ChatRequest {
    messages: Vec<Message>,
    #[serde(default)]
    documents: Vec<Document>,
    max_tokens: Option<usize>,
    #[serde(default)]
    stream: bool,
}

#[derive(Debug, Deserialize)]
struct Message {
    content: String,
}

#[derive(Debug, Deserialize)]
struct Document {
    text: String,
}

impl ChatRequest {
    /// Tokens of the messages: one a word.
    fn question(&self) -> usize {
        self.messages.iter().map(|message| message.content.split_whitespace().count()).sum()
    }
}

/// Counts a request until it is dropped.
struct Counted(Arc<Inner>, fn(&Inner) -> &AtomicUsize);

impl Counted {
    fn new(inner: &Arc<Inner>, of: fn(&Inner) -> &AtomicUsize) -> Counted {
        of(inner).fetch_add(1, Relaxed);
        Counted(inner.clone(), of)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        (self.1)(&self.0).fetch_sub(1, Relaxed);
    }
}

impl Simulated {
    pub(crate) fn new(simulation: Simulation, store: Store, model: String, key: NamespaceKey) -> Simulated {
        Simulated(Arc::new(Inner {
            simulation,
            store,
            model,
            key,
            held: HeldLog::new(),
            turn: Mutex::new(()),
            seconds: Mutex::default(),
            waiting: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            is_stopping: AtomicBool::new(false),
        }))
    }

    pub(crate) fn router(&self) -> Router {
        Router::new()
            .route("/v1/chat/completions", post(chat))
            .route("/v1/models", get(models))
            .route("/internal/plan/chat", post(plan))
            .route("/internal/report", get(report))
            .route("/health", get(async || Json(json!({ "status": "ok" }))))
            .route("/ready", get(async || Json(json!({ "status": "ready" }))))
            .with_state(self.clone())
    }

    /// Waits for running requests; no more are taken.
    pub(crate) async fn drain(self) {
        self.0.is_stopping.store(true, Relaxed);
        let deadline = Instant::now() + Duration::from_secs(30);
        while self.0.running.load(Relaxed) + self.0.waiting.load(Relaxed) > 0 && Instant::now() < deadline {
            sleep(Duration::from_millis(20)).await;
        }
        self.0.store.flush();
    }

    /// The namespace of a request.
    fn namespace(&self, headers: &HeaderMap) -> Result<String, ApiError> {
        let Some(signed) = headers.get(TENANT_HEADER) else { return Ok(String::new()) };
        let tenant = signed.to_str().ok().and_then(|signed| signed_tenant(&self.0.key, signed));
        let (_, namespace) =
            tenant.ok_or_else(|| ApiError::new(StatusCode::UNAUTHORIZED, "the signature is wrong"))?;
        Ok(namespace.to_owned())
    }

    /// Waits for its turn, and has every chunk of the request from the store or by sleeping.
    async fn prefill(&self, ids: Vec<ChunkId>, question: usize) -> Result<Sources, ApiError> {
        let waiting = Counted::new(&self.0, |inner| &inner.waiting);
        let _turn = self.0.turn.lock().await;
        let started = Instant::now();
        let (store, simulation) = (self.0.store.clone(), self.0.simulation.clone());
        let brought = tokio::task::spawn_blocking(move || chunks::bring(&store, &simulation, ids, question));
        let work = brought.await.map_err(|error| failed(&error))?.map_err(|error| failed(&error))?;
        sleep_until(started + work.time).await;
        let (store, prefilled) = (self.0.store.clone(), work.prefilled);
        let stored = tokio::task::spawn_blocking(move || chunks::store(&store, prefilled));
        stored.await.map_err(|error| failed(&error))?.map_err(|error| failed(&error))?;
        self.0.seconds.lock().await.add(work.time.as_secs_f64());
        drop(waiting);
        Ok(work.sources)
    }
}

/// The mean seconds of the latest requests, of which the last has a tenth; 0 before the first.
#[derive(Debug, Default)]
struct Mean(f64);

impl Mean {
    fn add(&mut self, seconds: f64) {
        self.0 = if self.0 == 0.0 { seconds } else { self.0 + (seconds - self.0) / 10.0 };
    }
}

fn failed(error: &dyn std::fmt::Display) -> ApiError {
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
}

/// The words of an answer, which follow from the request, the model and its numerics alone.
fn words(simulation: &Simulation, request: &ChatRequest) -> Vec<String> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&[simulation.model]).update(simulation.numerics.as_bytes());
    request.documents.iter().for_each(|document| _ = hasher.update(document.text.as_bytes()).update(b"\0"));
    request.messages.iter().for_each(|message| _ = hasher.update(message.content.as_bytes()).update(b"\0"));
    let mut bytes = hasher.finalize_xof();
    let word = |_| {
        let mut word = [0; 3];
        bytes.fill(&mut word);
        format!("{:02x}{:02x}{:02x} ", word[0], word[1], word[2])
    };
    (0..request.max_tokens.unwrap_or(8)).map(word).collect()
}

async fn chat(State(simulated): State<Simulated>, headers: HeaderMap, request: Request) -> Response<Body> {
    answer(&simulated, &headers, request).await.unwrap_or_else(|error| error.into_response())
}

async fn read(request: Request) -> Result<ChatRequest, ApiError> {
    let bytes = axum::body::to_bytes(request.into_body(), 64 << 20).await;
    let bytes = bytes.map_err(|error| ApiError::new(StatusCode::BAD_REQUEST, error.to_string()))?;
    serde_json::from_slice(&bytes).map_err(|error| ApiError::new(StatusCode::BAD_REQUEST, error.to_string()))
}

async fn answer(
    simulated: &Simulated,
    headers: &HeaderMap,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    if simulated.0.is_stopping.load(Relaxed) {
        return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the worker is shutting down"));
    }
    let namespace = simulated.namespace(headers)?;
    let request = read(request).await?;
    let id = |document: &Document| chunks::id(&simulated.0.simulation, &namespace, &document.text);
    let ids: Vec<ChunkId> = request.documents.iter().map(id).collect();
    let chunks = ids.len();
    let sources = simulated.prefill(ids, request.question()).await?;
    let running = Counted::new(&simulated.0, |inner| &inner.running);
    let simulation = &simulated.0.simulation;
    let (words, pause) = (words(simulation, &request), Duration::from_secs_f64(1.0 / simulation.decode));
    let Sources { prefilled, fetched, fetched_bytes } = sources;
    let stats = json!({ "stats": {
        "document_chunks": chunks, "prefilled_chunks": prefilled, "fetched_chunks": fetched, "fetched_bytes": fetched_bytes,
    } });
    let chunk = |object: &str, choice: Value| json!({ "id": "chatcmpl-simulated", "object": object, "created": 0, "model": simulated.0.model, "choices": [choice] });
    if !request.stream {
        sleep(pause * words.len() as u32).await;
        let message = json!({ "role": "assistant", "content": words.concat() });
        let mut whole =
            chunk("chat.completion", json!({ "index": 0, "message": message, "finish_reason": "stop" }));
        whole["refrain"] = stats;
        return Ok(Json(whole).into_response());
    }
    let mut events: Vec<String> = words
        .iter()
        .map(|word| json!({ "index": 0, "delta": { "content": word }, "finish_reason": null }))
        .map(|choice| chunk("chat.completion.chunk", choice).to_string())
        .collect();
    let mut last =
        chunk("chat.completion.chunk", json!({ "index": 0, "delta": {}, "finish_reason": "stop" }));
    last["refrain"] = stats;
    events.extend([last.to_string(), "[DONE]".to_owned()]);
    let stream = unfold((events.into_iter(), running), move |(mut events, running)| async move {
        let event = events.next()?;
        sleep(pause).await;
        Some((Ok::<_, Infallible>(Event::default().data(event)), (events, running)))
    });
    Ok(Sse::new(stream.boxed()).keep_alive(KeepAlive::default()).into_response())
}

async fn models(State(simulated): State<Simulated>) -> Json<Value> {
    Json(
        json!({ "object": "list", "data": [{ "id": simulated.0.model, "object": "model", "owned_by": "refrain" }] }),
    )
}

async fn plan(State(simulated): State<Simulated>, headers: HeaderMap, request: Request) -> Response<Body> {
    let planned = async {
        let (namespace, request) = (simulated.namespace(&headers)?, read(request).await?);
        let chunk = |document: &Document| {
            let id = chunks::id(&simulated.0.simulation, &namespace, &document.text);
            (short_key(&id.key()), id.tokens.len())
        };
        let chunks: Vec<(u64, usize)> = request.documents.iter().map(chunk).collect();
        let prompt_tokens = request.question() + chunks.iter().map(|(_, tokens)| tokens).sum::<usize>();
        Ok(Json(ChunkPlan { chunks, prompt_tokens, charge: 0.0 }))
    };
    planned.await.map_or_else(|error: ApiError| error.into_response(), |plan| plan.into_response())
}

#[derive(Debug, Deserialize)]
struct Seen {
    epoch: Option<u64>,
    sequence: Option<u64>,
}

async fn report(
    State(simulated): State<Simulated>,
    Query(seen): Query<Seen>,
    headers: HeaderMap,
) -> Response<Body> {
    let reported = async {
        if !headers.contains_key(TENANT_HEADER) {
            return Err(ApiError::new(StatusCode::UNAUTHORIZED, "reports are for gateways"));
        }
        simulated.namespace(&headers)?;
        let inner = simulated.0.clone();
        let listed = move || {
            let held = || {
                Ok::<_, ApiError>(
                    inner.store.held().map_err(|error| failed(&error))?.iter().map(short_key).collect(),
                )
            };
            inner.held.report(seen.epoch.zip(seen.sequence), held)
        };
        let listed = tokio::task::spawn_blocking(listed).await.map_err(|error| failed(&error))?;
        let (epoch, sequence, chunks) = listed?;
        let (inner, seconds) = (&simulated.0, simulated.0.seconds.lock().await.0);
        let model = ModelCard {
            name: inner.model.clone(),
            fingerprint: format!("{:02x}", inner.simulation.model).repeat(32),
            kv_bytes_per_token: inner.simulation.bytes,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            numerics: inner.simulation.numerics.clone(),
        };
        Ok(Json(Report {
            epoch,
            sequence,
            chunks,
            running: inner.running.load(Relaxed),
            waiting: inner.waiting.load(Relaxed),
            rates: Rates { seconds, tokens_per_second: inner.simulation.prefill, ..Rates::default() },
            stopping: inner.is_stopping.load(Relaxed),
            ready: true,
            model,
        }))
    };
    reported.await.map_or_else(|error: ApiError| error.into_response(), |report| report.into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_follows_from_its_request_and_the_model() {
        let request = |question: &str, text: &str| ChatRequest {
            messages: vec![Message { content: question.to_owned() }],
            documents: vec![Document { text: text.to_owned() }],
            max_tokens: Some(4),
            stream: false,
        };
        let words =
            |simulation: &str, question, text| words(&simulation.parse().unwrap(), &request(question, text));
        assert_eq!(words("decode=1", "a", "b"), words("decode=2", "a", "b"));
        assert_ne!(words("decode=1", "a", "b"), words("decode=1", "ab", ""));
        assert_ne!(words("model=1", "a", "b"), words("model=2", "a", "b"));
        assert_ne!(words("numerics=a", "a", "b"), words("numerics=b", "a", "b"));
    }
}
