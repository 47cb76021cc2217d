//! Answers: `/v1/chat/completions` and `/v1/completions`, whole or as a stream of server-sent events.

use axum::extract::State;
use axum::response::sse::Event as ServerSentEvent;
use axum::response::{IntoResponse, Response};
use refrain::engine::Answer;

use super::answer::{Asked, Input, ask, lost};
use super::events::{EventWriter, end_of_stream, json_event, stream_answers};
use super::extract::{HeldBytes, Json};
use super::request::CompletionRequest;
use super::response::{AnswerState, CompletionResponse, ResponseBuilder, Route, Usage};
use crate::api_error::{ApiError, ErrorResponse, Result};
use crate::app::App;
use crate::clock::unix_seconds;
use crate::job::Event;
use crate::random::random_id;
use crate::tenant::Tenant;

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
    Json(request, held): Json<CompletionRequest>,
) -> Result<Response> {
    answer(app, tenant, (request, held), Route::Chat).await
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
    Json(request, held): Json<CompletionRequest>,
) -> Result<Response> {
    let name_prompt = |error: ApiError| match error.param.as_deref() {
        Some("messages") => ApiError { param: Some("prompt".to_owned()), ..error },
        _ => error,
    };
    answer(app, tenant, (request, held), Route::Completion).await.map_err(name_prompt)
}

async fn answer(
    app: App,
    tenant: Tenant,
    (request, held): (CompletionRequest, HeldBytes),
    route: Route,
) -> Result<Response> {
    let (stream, include_usage) = (request.streams(), request.wants_usage());
    let input = if route == Route::Chat { Input::Messages } else { Input::Prompt };
    let Asked { engine, context, logprobs, answers_each, echoed, readers, mut events, .. } =
        ask(&app, tenant, (request, held), input).await?;
    let builder = ResponseBuilder {
        route,
        id: random_id(if route == Route::Chat { "chatcmpl-" } else { "cmpl-" }),
        created: unix_seconds(),
        model: app.state.options.served_model_name.clone(),
        context,
        engine,
        logprobs,
        answers_each,
        echoed,
    };
    let mut answers: Vec<AnswerState> =
        readers.into_iter().enumerate().map(|(index, reader)| AnswerState::new(index, reader)).collect();
    if stream {
        let unfinished = answers.len();
        let writer = ChunkWriter { builder, include_usage, answers, unfinished, usage: None, is_over: false };
        return stream_answers(events, writer).await;
    }
    let mut finished: Vec<Option<Answer>> = answers.iter().map(|_| None).collect();
    while let Some((index, event)) = events.next().await {
        match event {
            Event::Token(token) => answers[index].take(token, builder.logprobs),
            Event::Finished(answer) => finished[index] = Some(*answer),
            Event::Failed(error) => return Err(error),
            Event::Progress(_) | Event::Ingested(_) => {}
        }
    }
    let finished = finished.into_iter().collect::<Option<Vec<Answer>>>().ok_or_else(lost)?;
    Ok(axum::Json(builder.whole(answers.into_iter().zip(finished).collect())).into_response())
}

/// Writes chunks of answers.
struct ChunkWriter {
    builder: ResponseBuilder,
    include_usage: bool,
    answers: Vec<AnswerState>,
    unfinished: usize,
    usage: Option<Usage>,
    is_over: bool,
}

impl EventWriter for ChunkWriter {
    fn begin(&mut self) -> Vec<ServerSentEvent> {
        let chunks = self.answers.iter_mut().filter_map(|state| self.builder.first_chunk(state));
        chunks.map(|chunk| json_event(&chunk)).collect()
    }

    fn write(&mut self, event: Option<(usize, Event)>) -> Vec<ServerSentEvent> {
        let mut events = match event {
            Some((index, Event::Token(token))) => {
                let chunks = self.builder.token_chunks(&mut self.answers[index], &token);
                chunks.iter().map(json_event).collect()
            }
            Some((index, Event::Finished(answer))) => self.finish(index, *answer),
            Some((_, Event::Failed(error))) => {
                self.is_over = true;
                vec![json_event(&error.body())]
            }
            Some((_, Event::Progress(_) | Event::Ingested(_))) => Vec::new(),
            None => {
                self.is_over = true;
                vec![json_event(&lost().body())]
            }
        };
        events.extend(self.is_over.then(end_of_stream));
        events
    }

    fn is_over(&self) -> bool {
        self.is_over
    }
}

impl ChunkWriter {
    /// The events of an answer that is complete, and after the last one that of the usage.
    fn finish(&mut self, index: usize, answer: Answer) -> Vec<ServerSentEvent> {
        let usage = self.builder.usage(index, &answer);
        self.usage = Some(match self.usage.take() {
            Some(before) => before.plus(usage),
            None => usage,
        });
        self.unfinished -= 1;
        self.is_over = self.unfinished == 0;
        let last = self.builder.last_chunks(&mut self.answers[index], answer);
        let usage = self.usage.take_if(|_| self.is_over && self.include_usage);
        let usage = usage.map(|usage| json_event(&self.builder.usage_chunk(usage)));
        last.iter().map(json_event).chain(usage).collect()
    }
}
