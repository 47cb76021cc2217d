//! A worker that sleeps instead of computing. Its queue, its chunk files, its reports and its streams are real, so that many workers run
//! on one small machine.

use std::convert::Infallible;
use std::str::FromStr;
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
use refrain::kernels::{Buffer, Dtype};
use refrain::store::{BosPolicy, Chunk, ChunkId, KvQuantization, NamespaceKey, Store};
use refrain_server::{
    ApiError, ChunkPlan, HeldLog, ModelCard, Rates, Report, TENANT_HEADER, short_key, signed_tenant,
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep};

/// Rates of a simulated worker, and what it is taken for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Simulation {
    /// Tokens a second of prefill, one request at a time.
    prefill: f64,
    /// Tokens a second of an answer; all answers are decoded together.
    decode: f64,
    /// Bytes of a token's keys and values in a chunk file.
    bytes: usize,
    /// Number of the model. Models of other numbers share no chunk, and give other answers.
    model: u8,
    /// Numerics of the answers: others give other answers.
    numerics: String,
}

impl FromStr for Simulation {
    type Err = String;

    fn from_str(text: &str) -> Result<Simulation, String> {
        let numerics = "simulated".to_owned();
        let mut simulation = Simulation { prefill: 3000.0, decode: 200.0, bytes: 1024, model: 0, numerics };
        for part in text.split(',') {
            let wrong = || {
                format!(
                    "{part:?} is none of prefill=N, decode=N and bytes=N with N above 0, model=N with N up to 255, and numerics=TEXT"
                )
            };
            let (name, value) = part.split_once('=').ok_or_else(wrong)?;
            let number = || value.parse().ok().filter(|number: &f64| *number > 0.0 && number.is_finite());
            match name {
                "prefill" => simulation.prefill = number().ok_or_else(wrong)?,
                "decode" => simulation.decode = number().ok_or_else(wrong)?,
                "bytes" => simulation.bytes = number().ok_or_else(wrong)? as usize,
                "model" => simulation.model = value.parse().map_err(|_| wrong())?,
                "numerics" => simulation.numerics = value.to_owned(),
                _ => return Err(wrong()),
            }
        }
        Ok(simulation)
    }
}

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

    /// The identity of a document's chunk: one token a word.
    fn chunk_id(&self, namespace: &str, document: &Document) -> ChunkId {
        let token = |word: &str| {
            let hash = blake3::hash(word.as_bytes());
            u32::from_le_bytes([hash.as_bytes()[0], hash.as_bytes()[1], hash.as_bytes()[2], 0])
        };
        ChunkId {
            model: [self.0.simulation.model; 32],
            dtype: Dtype::F16,
            quantization: KvQuantization::Exact,
            layers: 1,
            kv_heads: 1,
            // Keys and values, two bytes an element.
            head_dim: (self.0.simulation.bytes / 4).max(1),
            bos: BosPolicy::None,
            prefix: None,
            numerics: None,
            namespace: namespace.to_owned(),
            tokens: document.text.split_whitespace().map(token).collect(),
        }
    }

    /// Waits for its turn, has every chunk of the request from the store or by sleeping, and says how many were prefilled.
    async fn prefill(&self, ids: Vec<ChunkId>, question: usize) -> Result<usize, ApiError> {
        let waiting = Counted::new(&self.0, |inner| &inner.waiting);
        let _turn = self.0.turn.lock().await;
        let mut prefilled = 0;
        for id in ids {
            let (store, wanted) = (self.0.store.clone(), id.clone());
            let found = tokio::task::spawn_blocking(move || store.get(&wanted)).await;
            let found = found.map_err(|error| failed(&error))?.map_err(|error| failed(&error))?;
            if found.is_some() {
                continue;
            }
            prefilled += 1;
            sleep(Duration::from_secs_f64(id.tokens.len() as f64 / self.0.simulation.prefill)).await;
            let store = self.0.store.clone();
            let put = move || {
                let elements = id.tokens.len() * id.head_dim;
                let empty = || Buffer::zeros(Dtype::F16, elements);
                store.put(Chunk::new(id, "simulated", vec![(empty(), empty())])?)
            };
            let put = tokio::task::spawn_blocking(put).await;
            put.map_err(|error| failed(&error))?.map_err(|error| failed(&error))?;
        }
        sleep(Duration::from_secs_f64(question as f64 / self.0.simulation.prefill)).await;
        drop(waiting);
        Ok(prefilled)
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
    let ids: Vec<ChunkId> =
        request.documents.iter().map(|document| simulated.chunk_id(&namespace, document)).collect();
    let question = request.messages.iter().map(|message| message.content.split_whitespace().count()).sum();
    let chunks = ids.len();
    let prefilled = simulated.prefill(ids, question).await?;
    let running = Counted::new(&simulated.0, |inner| &inner.running);
    let simulation = &simulated.0.simulation;
    let (words, pause) = (words(simulation, &request), Duration::from_secs_f64(1.0 / simulation.decode));
    let stats = json!({ "stats": { "prefilled_chunks": prefilled, "document_chunks": chunks } });
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
            let id = simulated.chunk_id(&namespace, document);
            (short_key(&id.key()), id.tokens.len())
        };
        let chunks: Vec<(u64, usize)> = request.documents.iter().map(chunk).collect();
        let prompt_tokens = chunks.iter().map(|(_, tokens)| tokens).sum();
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
        let inner = &simulated.0;
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
            rates: Rates { tokens_per_second: inner.simulation.prefill, ..Rates::default() },
            stopping: inner.is_stopping.load(Relaxed),
            model,
        }))
    };
    reported.await.map_or_else(|error: ApiError| error.into_response(), |report| report.into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simulations_are_read() {
        let simulation: Simulation = "prefill=100,decode=50.5,bytes=64,model=7,numerics=q8".parse().unwrap();
        let wanted =
            Simulation { prefill: 100.0, decode: 50.5, bytes: 64, model: 7, numerics: "q8".to_owned() };
        assert_eq!(simulation, wanted);
        for wrong in [
            "",
            "prefill",
            "prefill=0",
            "prefill=-1",
            "decode=inf",
            "speed=3",
            "prefill=1;decode=2",
            "model=256",
        ] {
            assert!(wrong.parse::<Simulation>().is_err(), "{wrong}");
        }
    }

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
