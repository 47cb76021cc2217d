//! The events of a response's stream.

use axum::response::sse::Event;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use super::items::{OutputItem, OutputText};
use super::object::ResponseObject;

/// An event of a stream.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ResponseEvent {
    /// Counts the events of a stream from 0.
    pub(super) sequence_number: usize,
    #[serde(flatten)]
    pub(super) body: EventBody,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(tag = "type")]
pub(super) enum EventBody {
    #[serde(rename = "response.created")]
    Created { response: Box<ResponseObject> },
    #[serde(rename = "response.in_progress")]
    InProgress { response: Box<ResponseObject> },
    #[serde(rename = "response.completed")]
    Completed { response: Box<ResponseObject> },
    #[serde(rename = "response.incomplete")]
    Incomplete { response: Box<ResponseObject> },
    #[serde(rename = "response.failed")]
    Failed { response: Box<ResponseObject> },
    #[serde(rename = "response.output_item.added")]
    ItemAdded { output_index: usize, item: OutputItem },
    #[serde(rename = "response.output_item.done")]
    ItemDone { output_index: usize, item: OutputItem },
    #[serde(rename = "response.content_part.added")]
    PartAdded { item_id: String, output_index: usize, content_index: usize, part: OutputText },
    #[serde(rename = "response.content_part.done")]
    PartDone { item_id: String, output_index: usize, content_index: usize, part: OutputText },
    #[serde(rename = "response.output_text.delta")]
    TextDelta {
        item_id: String,
        output_index: usize,
        content_index: usize,
        delta: String,
        /// Always empty.
        #[schema(value_type = Vec<Object>)]
        logprobs: Vec<Value>,
    },
    #[serde(rename = "response.output_text.done")]
    TextDone {
        item_id: String,
        output_index: usize,
        content_index: usize,
        text: String,
        /// Always empty.
        #[schema(value_type = Vec<Object>)]
        logprobs: Vec<Value>,
    },
    #[serde(rename = "response.function_call_arguments.delta")]
    ArgumentsDelta { item_id: String, output_index: usize, delta: String },
    #[serde(rename = "response.function_call_arguments.done")]
    ArgumentsDone { item_id: String, output_index: usize, name: String, arguments: String },
}

impl ResponseEvent {
    pub(super) fn server_sent(&self) -> Event {
        /// The field that names the variant.
        #[derive(Deserialize)]
        struct Named<'a> {
            r#type: &'a str,
        }

        // A response repeats the tools of its request, which take many times their text as a value.
        let event = serde_json::to_string(self).unwrap_or_default();
        let name = serde_json::from_str(&event).map_or("", |Named { r#type }| r#type);
        Event::default().event(name).data(&event)
    }
}
