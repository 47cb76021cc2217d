//! Server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;

use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde::Serialize;

use super::answer::{AnswerEvents, lost};
use crate::api_error::{ApiError, Result};
use crate::job::Event as JobEvent;

/// An event with a value as JSON.
pub(super) fn json_event(value: &impl Serialize) -> Event {
    with_json(Event::default(), value)
}

/// An event with a name, and a value as JSON.
pub(super) fn named_event(name: &str, value: &impl Serialize) -> Event {
    with_json(Event::default().event(name), value)
}

fn with_json(event: Event, value: &impl Serialize) -> Event {
    event.json_data(value).unwrap_or_else(|error| {
        let error = serde_json::json!(ApiError::internal(&error).body());
        Event::default().data(error.to_string())
    })
}

/// The last event of a stream.
pub(super) fn end_of_stream() -> Event {
    Event::default().data("[DONE]")
}

/// Writes what happens to a request's answers for its client.
pub(super) trait EventWriter: Send + 'static {
    /// The events with which the stream begins.
    fn begin(&mut self) -> Vec<Event>;
    /// The events for the next event of a job; `None` is a job that was lost.
    fn write(&mut self, event: Option<(usize, JobEvent)>) -> Vec<Event>;
    /// Whether nothing follows.
    fn is_over(&self) -> bool;
}

/// A stream of answers.
///
/// # Errors
/// If a job fails before the first token: the error is then the response's own status.
pub(super) async fn stream_answers(
    mut received: AnswerEvents,
    mut writer: impl EventWriter,
) -> Result<Response> {
    let first = match received.next().await.ok_or_else(lost)? {
        (_, JobEvent::Failed(error)) => return Err(error),
        first => first,
    };
    let mut queue = VecDeque::from(writer.begin());
    queue.extend(writer.write(Some(first)));
    let events =
        stream::unfold((received, writer, queue), |(mut received, mut writer, mut queue)| async move {
            loop {
                if let Some(next) = queue.pop_front() {
                    return Some((Ok::<_, Infallible>(next), (received, writer, queue)));
                }
                if writer.is_over() {
                    return None;
                }
                let event = received.next().await;
                queue.extend(writer.write(event));
            }
        });
    Ok(Sse::new(events).keep_alive(KeepAlive::default()).into_response())
}
