//! Responses: `/v1/responses`, another interface to the answers of a chat.

mod events;
mod input;
mod items;
mod object;
mod output;
mod request;

use axum::extract::State;
use axum::response::sse::Event as ServerSentEvent;
use axum::response::{IntoResponse, Response};
use refrain::engine::Answer;

use self::events::{EventBody, ResponseEvent};
use self::object::{ResponseBuilder, ResponseObject, is_complete, status};
use self::output::Output;
use self::request::ResponsesRequest;
use super::answer::{Asked, Input, ask, lost, plan};
use super::events::{EventWriter, stream_answers};
use super::extract::{HeldBytes, Json};
use super::gateway::Signed;
use super::parts::{AnswerReader, Part};
use crate::api_error::{ApiError, ErrorResponse, Result};
use crate::app::App;
use crate::job::Event;
use crate::tenant::Tenant;

/// Answer a conversation, in OpenAI's newer interface.
#[utoipa::path(
    post, path = "/v1/responses", request_body = ResponsesRequest,
    responses(
        (status = 200, description = "The response, or with `stream` server-sent events", content(
            (ResponseObject = "application/json"), (ResponseEvent = "text/event-stream"),
        )),
        (status = "4XX", description = "The request is refused", body = ErrorResponse),
        (status = "5XX", description = "The server failed, is shutting down, or took too long", body = ErrorResponse),
    ),
)]
pub(super) async fn respond(
    State(app): State<App>,
    tenant: Tenant,
    Json(mut request, held): Json<ResponsesRequest>,
) -> Result<Response> {
    let (chat, messages) = request.chat()?;
    let named = |error: ApiError| messages.named(error);
    let Asked { context, readers, mut events, mut held, .. } =
        ask(&app, tenant, (chat, held), Input::Messages).await.map_err(named)?;
    let stream = request.stream.unwrap_or(false);
    held.resize(request.repeated_bytes().min(held.bytes()))?;
    let builder = ResponseBuilder::new(&app.state.options.served_model_name, request, context);
    let reader = readers.into_iter().next().ok_or_else(lost)?;
    let output = Output::default();
    let mut writer = Writer { builder, reader, output, sequence: 0, is_over: false, _held: held };
    if stream {
        return stream_answers(events, writer).await.map_err(named);
    }
    while let Some((_, event)) = events.next().await {
        match event {
            Event::Token(token) => {
                let parts = writer.reader.read(&token);
                writer.add(parts);
            }
            Event::Finished(answer) => {
                let (_, response) = writer.finish(*answer);
                return Ok(axum::Json(response).into_response());
            }
            Event::Failed(error) => return Err(named(error)),
            Event::Progress(_) | Event::Ingested(_) => {}
        }
    }
    Err(lost())
}

/// The chunks of the prompt of a request.
pub(super) async fn plan_response(
    State(app): State<App>,
    Signed(tenant): Signed,
    Json(mut request, held): Json<ResponsesRequest>,
) -> Result<Response> {
    let (chat, _) = request.chat()?;
    Ok(axum::Json(plan(&app, tenant, (chat, held), Input::Messages).await?).into_response())
}

/// Writes the output of a response, and the events that tell of it.
struct Writer {
    builder: ResponseBuilder,
    reader: AnswerReader,
    output: Output,
    sequence: usize,
    is_over: bool,
    /// The bytes of the request that its response repeats.
    _held: HeldBytes,
}

impl Writer {
    fn add(&mut self, parts: Vec<Part>) -> Vec<EventBody> {
        parts.into_iter().flat_map(|part| self.output.push(part)).collect()
    }

    /// The last events of the output, and the response.
    fn finish(&mut self, answer: Answer) -> (Vec<EventBody>, Box<ResponseObject>) {
        let rest = self.reader.finish();
        let mut events = self.add(rest);
        events.extend(self.output.finish(status(&answer)));
        (events, self.builder.finished(&self.output.items, answer))
    }

    fn failed(&mut self, error: &ApiError) -> Vec<EventBody> {
        self.is_over = true;
        vec![EventBody::Failed { response: self.builder.failed(&self.output.items, error) }]
    }

    fn server_sent(&mut self, bodies: Vec<EventBody>) -> Vec<ServerSentEvent> {
        let mut events = Vec::with_capacity(bodies.len());
        for body in bodies {
            events.push(ResponseEvent { sequence_number: self.sequence, body }.server_sent());
            self.sequence += 1;
        }
        events
    }
}

impl EventWriter for Writer {
    fn begin(&mut self) -> Vec<ServerSentEvent> {
        let (created, going) = (self.builder.in_progress(), self.builder.in_progress());
        let bodies =
            vec![EventBody::Created { response: created }, EventBody::InProgress { response: going }];
        self.server_sent(bodies)
    }

    fn write(&mut self, event: Option<(usize, Event)>) -> Vec<ServerSentEvent> {
        let bodies = match event {
            Some((_, Event::Token(token))) => {
                let parts = self.reader.read(&token);
                self.add(parts)
            }
            Some((_, Event::Finished(answer))) => {
                self.is_over = true;
                let complete = is_complete(&answer);
                let (mut bodies, response) = self.finish(*answer);
                bodies.push(match complete {
                    true => EventBody::Completed { response },
                    false => EventBody::Incomplete { response },
                });
                bodies
            }
            Some((_, Event::Failed(error))) => self.failed(&error),
            Some((_, Event::Progress(_) | Event::Ingested(_))) => Vec::new(),
            None => self.failed(&lost()),
        };
        self.server_sent(bodies)
    }

    fn is_over(&self) -> bool {
        self.is_over
    }
}
