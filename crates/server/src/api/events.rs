//! Server-sent events.

use axum::response::sse::Event;
use serde::Serialize;

use crate::api_error::ApiError;

/// An event with a value as JSON.
pub(super) fn json_event(value: &impl Serialize) -> Event {
    let event = Event::default().json_data(value);
    event.unwrap_or_else(|error| {
        let error = serde_json::json!(ApiError::internal(&error).body());
        Event::default().data(error.to_string())
    })
}

/// The last event of a stream.
pub(super) fn end_of_stream() -> Event {
    Event::default().data("[DONE]")
}
