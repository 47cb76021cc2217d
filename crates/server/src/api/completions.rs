//! Answers: `/v1/chat/completions` and `/v1/completions`, whole or as a stream of server-sent events.

use std::convert::Infallible;

use axum::extract::State;
use axum::response::sse::{Event as ServerSentEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream};
use refrain_engine::{Instructions, Parts, Prompt, PromptChunk, Sampling};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::events::{end_of_stream, json_event};
use super::extract::Json;
use super::request::CompletionRequest;
use super::response::{CompletionResponse, ResponseBuilder, Route};
use super::sources::{Source, SourceFinder};
use crate::TEXT_LOG;
use crate::api_error::{ApiError, ErrorResponse, Result};
use crate::app::App;
use crate::clock::unix_seconds;
use crate::job::{Event, GenerateJob, Job};
use crate::random::{random_id, random_seed};
use crate::tenant::Tenant;

/// Most tokens of an answer for which the request gives no number.
const MAX_TOKENS: usize = 512;

/// Answer a conversation.
#[utoipa::path(
    post, path = "/v1/chat/completions", request_body = CompletionRequest,
    responses(
        (status = 200, description = "The answer, or with `stream` server-sent events of chunks, of which the last is `[DONE]`", content(
            (CompletionResponse = "application/json"), (String = "text/event-stream"),
        )),
        (status = "4XX", description = "The request is refused", body = ErrorResponse),
        (status = "5XX", description = "The server failed, is shutting down, or took too long", body = ErrorResponse),
    ),
)]
pub(super) async fn chat(
    State(app): State<App>,
    tenant: Tenant,
    Json(request): Json<CompletionRequest>,
) -> Result<Response> {
    answer(app, tenant, request, Route::Chat).await
}

/// Continue a text.
#[utoipa::path(
    post, path = "/v1/completions", request_body = CompletionRequest,
    responses(
        (status = 200, description = "The answer, or with `stream` server-sent events of chunks, of which the last is `[DONE]`", content(
            (CompletionResponse = "application/json"), (String = "text/event-stream"),
        )),
        (status = "4XX", description = "The request is refused", body = ErrorResponse),
        (status = "5XX", description = "The server failed, is shutting down, or took too long", body = ErrorResponse),
    ),
)]
pub(super) async fn completions(
    State(app): State<App>,
    tenant: Tenant,
    Json(request): Json<CompletionRequest>,
) -> Result<Response> {
    let name_prompt = |error: ApiError| match error.param.as_deref() {
        Some("messages") => ApiError { param: Some("prompt".to_owned()), ..error },
        _ => error,
    };
    answer(app, tenant, request, Route::Completion).await.map_err(name_prompt)
}

/// A request after tokenising.
struct Prepared {
    tenant: Tenant,
    prompt: Prompt,
    sampling: Sampling,
    sources: Vec<Source>,
}

async fn answer(app: App, tenant: Tenant, request: CompletionRequest, route: Route) -> Result<Response> {
    request.check(&app.state.options.served_model_name)?;
    let options = &request.refrain;
    let method = app.method("refrain.method", options.method.as_ref())?;
    let policy = app.policy("refrain.evict", options.evict.as_ref())?;
    app.state.scheduler.check_queue()?;
    let (stream, include_usage, explain) = (request.streams(), request.wants_usage(), options.explain);
    let whole_documents = !method.built.statistics().is_empty();
    let work = {
        let app = app.clone();
        move || prepare(&app, tenant, &request, route, whole_documents)
    };
    let Prepared { tenant, prompt, sampling, sources } = app.preprocess(work).await?;
    let builder = ResponseBuilder {
        route,
        id: random_id(if route == Route::Chat { "chatcmpl" } else { "cmpl" }),
        created: unix_seconds(),
        model: app.state.options.served_model_name.clone(),
        method: method.spec,
        evict: policy.spec,
        seed: (sampling.temperature > 0.0).then_some(sampling.seed as i64),
        sources: sources.iter().map(Source::response).collect(),
        engine: tenant.engine.clone(),
        logprobs: sampling.logprobs.is_some(),
        explain,
        text_offset: 0,
    };
    let (method_spec, policy_spec) = (&builder.method, &builder.evict);
    let tokens = prompt.len();
    tracing::info!(method = method_spec, evict = policy_spec, documents = sources.len(), tokens, "asked");
    tracing::trace!(target: TEXT_LOG, prompt = app.state.engine.tokenizer().decode(&prompt.ids(), false));
    let (method, eviction) = (method.built, policy.built);
    let job = GenerateJob { prompt, method, eviction, sampling, explain: explain.is_wanted() };
    let (sender, mut events) = unbounded_channel();
    app.state.scheduler.submit(tenant.engine, Job::Generate(Box::new(job)), sender, None)?;
    if stream {
        // An error before the first token is the response's own status.
        let first = events.recv().await.ok_or_else(lost)?;
        if let Event::Failed(error) = first {
            return Err(error);
        }
        let stream = EventStream::new(builder, include_usage, first).events(events);
        return Ok(Sse::new(stream).keep_alive(KeepAlive::default()).into_response());
    }
    let mut tokens = Vec::new();
    while let Some(event) = events.recv().await {
        match event {
            Event::Token(token) => tokens.extend(builder.logprobs.then_some(token)),
            Event::Finished(answer) => {
                return Ok(axum::Json(builder.whole(*answer, &tokens)).into_response());
            }
            Event::Failed(error) => return Err(error),
            Event::Progress(_) | Event::Ingested(_) => {}
        }
    }
    Err(lost())
}

fn lost() -> ApiError {
    ApiError::internal(&"a job ended without an answer")
}

/// Tokenises a request, and finds the documents that its answer draws on.
fn prepare(
    app: &App,
    tenant: Tenant,
    request: &CompletionRequest,
    route: Route,
    whole_documents: bool,
) -> Result<Prepared> {
    let conversation = (route == Route::Chat).then(|| request.conversation()).transpose()?;
    let question = match &conversation {
        Some(conversation) => conversation.question.clone(),
        None => request.prompt()?.to_owned(),
    };
    let finder = SourceFinder { app, tenant: &tenant, whole_documents };
    let mut sources = finder.find(request.documents.as_ref(), &question, request.refrain.search)?;
    let chunks = sources.iter().enumerate().flat_map(|(index, source)| source.prompt_chunks(index));
    let chunks: Vec<PromptChunk> = chunks.collect();
    let engine = &tenant.engine;
    let mut prompt = match conversation {
        Some(conversation) => {
            let instructions = Instructions {
                system: conversation.system,
                history: conversation.history,
                ..app.state.options.instructions.clone()
            };
            engine.prompt_of_chunks(chunks, &question, &instructions)?
        }
        None => {
            let ends = engine.compose(&Parts { question: &question, ..Parts::default() })?;
            Prompt { chunks, ..ends }
        }
    };
    let context = engine.decoder().config().context;
    if whole_documents && request.searches() {
        // The last documents are those that match the question least.
        let answer = request.max_tokens().unwrap_or(1);
        while sources.len() > 1 && prompt.len().saturating_add(answer) > context {
            sources.pop();
            prompt.chunks.retain(|chunk| chunk.document < sources.len());
        }
    }
    let max_tokens = context.saturating_sub(prompt.len()).clamp(1, MAX_TOKENS);
    let sampling = request.sampling(max_tokens, random_seed)?;
    Ok(Prepared { tenant, prompt, sampling, sources })
}

/// An answer on its way to a client that reads server-sent events.
struct EventStream {
    builder: ResponseBuilder,
    include_usage: bool,
    /// Events to send, the next one last.
    queue: Vec<ServerSentEvent>,
    /// Whether the queue holds all that is left.
    is_over: bool,
}

impl EventStream {
    /// A stream whose job sent `first`.
    fn new(mut builder: ResponseBuilder, include_usage: bool, first: Event) -> EventStream {
        let role = (builder.route == Route::Chat).then(|| json_event(&builder.role_chunk()));
        let mut stream = EventStream { builder, include_usage, queue: Vec::new(), is_over: false };
        stream.push(Some(first));
        stream.queue.extend(role);
        stream
    }

    /// Puts the events of the job's next event into the empty queue; `None` is a job that was lost.
    fn push(&mut self, event: Option<Event>) {
        let builder = &mut self.builder;
        let mut events = match event {
            Some(Event::Token(token)) => vec![json_event(&builder.token_chunk(&token))],
            Some(Event::Finished(answer)) => {
                self.is_over = true;
                let usage = self.include_usage.then(|| json_event(&builder.usage_chunk(&answer)));
                let last = json_event(&builder.last_chunk(*answer));
                [last].into_iter().chain(usage).collect()
            }
            Some(Event::Failed(error)) => {
                self.is_over = true;
                vec![json_event(&error.body())]
            }
            Some(Event::Progress(_) | Event::Ingested(_)) => Vec::new(),
            None => {
                self.is_over = true;
                vec![json_event(&lost().body())]
            }
        };
        events.extend(self.is_over.then(end_of_stream));
        events.reverse();
        self.queue = events;
    }

    fn events(
        self,
        received: UnboundedReceiver<Event>,
    ) -> impl Stream<Item = std::result::Result<ServerSentEvent, Infallible>> {
        stream::unfold((self, received), |(mut stream, mut received)| async move {
            loop {
                if let Some(next) = stream.queue.pop() {
                    return Some((Ok(next), (stream, received)));
                }
                if stream.is_over {
                    return None;
                }
                let event = received.recv().await;
                stream.push(event);
            }
        })
    }
}
