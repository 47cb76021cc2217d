//! The items of a response's output.

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

/// A message or a call of a function.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum OutputItem {
    Message {
        id: String,
        /// `in_progress`, `completed` or `incomplete`.
        status: &'static str,
        role: &'static str,
        content: Vec<OutputText>,
    },
    FunctionCall {
        id: String,
        /// Names the call in its `function_call_output`.
        call_id: String,
        name: String,
        /// The arguments as the text of a JSON object.
        arguments: String,
        /// `in_progress`, `completed` or `incomplete`.
        status: &'static str,
    },
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub(super) struct OutputText {
    /// `output_text`
    r#type: &'static str,
    pub(super) text: String,
    /// Always empty.
    #[schema(value_type = Vec<Object>)]
    annotations: Vec<Value>,
    /// Always empty.
    #[schema(value_type = Vec<Object>)]
    logprobs: Vec<Value>,
}

impl OutputText {
    pub(super) fn new(text: String) -> OutputText {
        OutputText { r#type: "output_text", text, annotations: Vec::new(), logprobs: Vec::new() }
    }
}
