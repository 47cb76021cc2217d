//! A response: its request's fields, its output, and how it was computed.

use refrain::engine::{Answer, FinishReason};
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::items::OutputItem;
use super::request::{FunctionTool, ResponsesRequest, TextOptions};
use crate::api::details::{AnswerContext, AnswerDetails};
use crate::api::request::tool_choice_schema;
use crate::api_error::ApiError;
use crate::clock::unix_seconds;
use crate::random::random_id;

/// A response.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ResponseObject {
    id: String,
    /// `response`
    object: &'static str,
    /// Seconds since 1970.
    created_at: u64,
    /// `in_progress`, `completed`, `incomplete` or `failed`.
    status: &'static str,
    /// Always false.
    background: bool,
    /// Why a response failed.
    #[schema(required = true)]
    error: Option<ResponseError>,
    /// Why a response is incomplete.
    #[schema(required = true)]
    incomplete_details: Option<IncompleteDetails>,
    #[schema(required = true)]
    instructions: Option<String>,
    #[schema(required = true)]
    max_output_tokens: Option<i64>,
    #[schema(value_type = Object)]
    metadata: Value,
    model: String,
    output: Vec<OutputItem>,
    parallel_tool_calls: bool,
    /// Always null.
    #[schema(required = true)]
    previous_response_id: Option<String>,
    /// Always false: no response is stored.
    store: bool,
    temperature: f32,
    text: TextOptions,
    /// As in the request.
    #[schema(schema_with = tool_choice_schema)]
    tool_choice: Value,
    tools: Vec<FunctionTool>,
    top_p: f32,
    /// `disabled`
    truncation: &'static str,
    /// Null until the end.
    #[schema(required = true)]
    usage: Option<ResponseUsage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    refrain: Option<AnswerDetails>,
}

#[derive(Debug, Serialize, ToSchema)]
struct ResponseError {
    /// `server_error`, or a word as in the errors of requests, such as `timeout`.
    code: &'static str,
    message: String,
}

#[derive(Debug, Serialize, ToSchema)]
struct IncompleteDetails {
    /// `max_output_tokens`
    reason: &'static str,
}

#[derive(Debug, Serialize, ToSchema)]
struct ResponseUsage {
    input_tokens: usize,
    input_tokens_details: InputTokensDetails,
    output_tokens: usize,
    output_tokens_details: OutputTokensDetails,
    total_tokens: usize,
}

#[derive(Debug, Serialize, ToSchema)]
struct InputTokensDetails {
    /// Always 0: they are not counted.
    cache_write_tokens: usize,
    cached_tokens: usize,
}

#[derive(Debug, Serialize, ToSchema)]
struct OutputTokensDetails {
    /// Always 0.
    reasoning_tokens: usize,
}

impl ResponseUsage {
    fn of(answer: &Answer) -> ResponseUsage {
        let (input_tokens, output_tokens) = (answer.stats.prompt_tokens, answer.stats.answer_tokens);
        ResponseUsage {
            input_tokens,
            input_tokens_details: InputTokensDetails {
                cache_write_tokens: 0,
                cached_tokens: answer.stats.found_tokens(),
            },
            output_tokens,
            output_tokens_details: OutputTokensDetails { reasoning_tokens: 0 },
            total_tokens: input_tokens + output_tokens,
        }
    }
}

/// Builds the states of one response.
pub(super) struct ResponseBuilder {
    id: String,
    created_at: u64,
    model: String,
    request: ResponsesRequest,
    context: AnswerContext,
}

impl ResponseBuilder {
    /// A builder for the answer of a request to `model`.
    pub(super) fn new(model: &str, request: ResponsesRequest, context: AnswerContext) -> ResponseBuilder {
        let (id, created_at) = (random_id("resp_"), unix_seconds());
        ResponseBuilder { id, created_at, model: model.to_owned(), request, context }
    }

    fn object(&self, status: &'static str, output: Vec<OutputItem>) -> ResponseObject {
        let request = &self.request;
        ResponseObject {
            id: self.id.clone(),
            object: "response",
            created_at: self.created_at,
            status,
            background: false,
            error: None,
            incomplete_details: None,
            instructions: request.instructions.clone(),
            max_output_tokens: request.max_output_tokens,
            metadata: request.metadata.clone().unwrap_or_else(|| json!({})),
            model: self.model.clone(),
            output,
            parallel_tool_calls: request.parallel_tool_calls.unwrap_or(true),
            previous_response_id: None,
            store: false,
            temperature: request.temperature.unwrap_or(0.0),
            text: request.text.clone().unwrap_or_default(),
            tool_choice: request.tool_choice.clone().unwrap_or_else(|| json!("auto")),
            tools: request.tools.clone().unwrap_or_default(),
            top_p: request.top_p.unwrap_or(1.0),
            truncation: "disabled",
            usage: None,
            refrain: None,
        }
    }

    /// The response before its first token.
    pub(super) fn in_progress(&self) -> Box<ResponseObject> {
        Box::new(self.object("in_progress", Vec::new()))
    }

    /// The response at its end.
    pub(super) fn finished(&self, output: &[OutputItem], answer: Answer) -> Box<ResponseObject> {
        let mut object = self.object(status(&answer), output.to_vec());
        if !is_complete(&answer) {
            object.incomplete_details = Some(IncompleteDetails { reason: "max_output_tokens" });
        }
        object.usage = Some(ResponseUsage::of(&answer));
        object.refrain = Some(self.context.details(answer));
        Box::new(object)
    }

    /// The response whose answer failed.
    pub(super) fn failed(&self, output: &[OutputItem], error: &ApiError) -> Box<ResponseObject> {
        let mut object = self.object("failed", output.to_vec());
        let code = error.code.unwrap_or("server_error");
        object.error = Some(ResponseError { code, message: error.message.clone() });
        Box::new(object)
    }
}

/// Whether an answer came to its own end.
pub(super) fn is_complete(answer: &Answer) -> bool {
    answer.finish == FinishReason::Stop
}

/// The status of a response with this answer, and of its last item.
pub(super) fn status(answer: &Answer) -> &'static str {
    if is_complete(answer) { "completed" } else { "incomplete" }
}
