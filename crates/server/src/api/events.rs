//! Server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream};
use serde::Serialize;
use tokio::time::timeout;

use super::answer::{AnswerEvents, lost};
use crate::api_error::{ApiError, Result};
use crate::job::Event as JobEvent;

/// Most time that a stream waits for its first event before its head is sent: proxies give up on a response without a head after a minute or so.
const FIRST_EVENT: Duration = Duration::from_secs(15);

/// The response of a stream of events. Comments keep it alive, and proxies are told not to hold it back.
pub(super) fn event_stream(
    events: impl Stream<Item = std::result::Result<Event, Infallible>> + Send + 'static,
) -> Response {
    ([("x-accel-buffering", "no")], Sse::new(events).keep_alive(KeepAlive::default())).into_response()
}

/// An event with a value as JSON.
pub(super) fn json_event(value: &impl Serialize) -> Event {
    Event::default().json_data(value).unwrap_or_else(|error| {
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
/// If a job fails before the first token, and within [`FIRST_EVENT`]: the error is then the response's own status.
pub(super) async fn stream_answers(received: AnswerEvents, writer: impl EventWriter) -> Result<Response> {
    stream_within(FIRST_EVENT, received, writer).await
}

/// [`stream_answers`] whose head is sent after `patience` at the latest.
async fn stream_within(
    patience: Duration,
    mut received: AnswerEvents,
    mut writer: impl EventWriter,
) -> Result<Response> {
    let first = match timeout(patience, received.next()).await {
        Ok(first) => match first.ok_or_else(lost)? {
            (_, JobEvent::Failed(error)) => return Err(error),
            first => Some(first),
        },
        Err(_) => None,
    };
    let mut queue = VecDeque::from(writer.begin());
    if let Some(first) = first {
        queue.extend(writer.write(Some(first)));
    }
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
    Ok(event_stream(events))
}

#[cfg(test)]
mod tests {
    use axum::http::StatusCode;
    use axum::http::header::CACHE_CONTROL;
    use http_body_util::BodyExt as _;
    use tokio::sync::mpsc::unbounded_channel;

    use super::*;

    /// Writes whether an answer failed.
    struct Outcome(bool);

    impl EventWriter for Outcome {
        fn begin(&mut self) -> Vec<Event> {
            vec![Event::default().data("begun")]
        }

        fn write(&mut self, event: Option<(usize, JobEvent)>) -> Vec<Event> {
            self.0 = true;
            let failed = matches!(event, Some((_, JobEvent::Failed(_))));
            vec![Event::default().data(if failed { "failed" } else { "lost" })]
        }

        fn is_over(&self) -> bool {
            self.0
        }
    }

    #[tokio::test]
    async fn a_stream_has_a_head_before_its_first_token() {
        let (sender, events) = unbounded_channel();
        let events = AnswerEvents::of(vec![events]);
        let response = stream_within(Duration::from_millis(10), events, Outcome(false)).await.unwrap();
        let head = |name| response.headers()[name].to_str().unwrap();
        assert_eq!((head("x-accel-buffering"), head(CACHE_CONTROL.as_str())), ("no", "no-cache"));
        let mut body = response.into_body();
        let begun = body.frame().await.unwrap().unwrap().into_data().unwrap();
        assert_eq!(begun, "data: begun\n\n");
        sender.send(JobEvent::Failed(ApiError::timeout())).unwrap();
        assert_eq!(body.collect().await.unwrap().to_bytes(), "data: failed\n\n");
    }

    #[tokio::test]
    async fn an_early_failure_is_the_status_of_the_response() {
        let (sender, events) = unbounded_channel();
        sender.send(JobEvent::Failed(ApiError::timeout())).unwrap();
        let events = AnswerEvents::of(vec![events]);
        let error = stream_within(Duration::from_secs(60), events, Outcome(false)).await.unwrap_err();
        assert_eq!(error.status, StatusCode::GATEWAY_TIMEOUT);
    }
}
