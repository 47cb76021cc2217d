//! Requests of `/v1/responses`, as requests of a chat.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::input::{InputItem, Messages, ResponseInput};
use crate::api::request::{
    CompletionRequest, Documents, FunctionDefinition, NamedSchema, RefrainOptions, ResponseFormat,
    ToolDefinition, null_is_default, read_from_objects, tool_choice_schema, whole_number, write_as_derived,
};
use crate::api_error::{ApiError, Result};
use crate::body::parsed_bytes;

/// A request for a response. Unknown fields are ignored. OpenAI's fields that are not supported are refused by name. Nothing is stored,
/// so that a conversation goes on with all of its items in `input`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(remote = "Self")]
pub(in crate::api) struct ResponsesRequest {
    /// The model's name as in `/v1/models`.
    pub(super) model: Option<String>,
    /// The question, or the items of the conversation; the last one is the user's message or the output of a function.
    #[schema(required = true)]
    input: Option<ResponseInput>,
    /// The system message.
    pub(super) instructions: Option<String>,
    /// The functions that the model may call, 128 at most.
    pub(super) tools: Option<Vec<FunctionTool>>,
    /// `none`, `auto`, `required`, `{"type": "function", "name"}`, or `{"type": "allowed_tools", "mode", "tools"}`.
    #[schema(schema_with = tool_choice_schema)]
    pub(super) tool_choice: Option<Value>,
    /// Whether an answer may have several calls.
    #[schema(default = true)]
    pub(super) parallel_tool_calls: Option<bool>,
    pub(super) text: Option<TextOptions>,
    reasoning: Option<ReasoningOptions>,
    /// Most tokens of the answer; by default, and where it is -1, what the context and the server's memory leave.
    #[serde(default, deserialize_with = "whole_number")]
    #[schema(minimum = -1)]
    pub(super) max_output_tokens: Option<i64>,
    /// 0 takes the most likely token.
    #[schema(minimum = 0, maximum = 100, default = 0)]
    pub(super) temperature: Option<f32>,
    /// 0 takes the most likely token.
    #[schema(minimum = 0, maximum = 1, default = 1)]
    pub(super) top_p: Option<f32>,
    /// As in a chat.
    #[serde(default, deserialize_with = "whole_number")]
    seed: Option<i64>,
    /// Whether the response is sent as server-sent events.
    pub(super) stream: Option<bool>,
    /// Is given back in the response: at most 16 texts of up to 512 characters, with names of up to 64.
    #[schema(value_type = Option<Object>)]
    pub(super) metadata: Option<Value>,
    /// Has no effect: no response is stored.
    #[serde(rename = "store")]
    _store: Option<bool>,
    /// The documents to answer from.
    documents: Option<Documents>,
    refrain: Option<RefrainOptions>,
    // Fields of OpenAI's interface that are refused, unless their value asks for nothing.
    #[schema(ignore)]
    background: Option<Value>,
    #[schema(ignore)]
    conversation: Option<Value>,
    #[schema(ignore)]
    include: Option<Value>,
    #[schema(ignore)]
    previous_response_id: Option<Value>,
    #[schema(ignore)]
    prompt: Option<Value>,
    #[schema(ignore)]
    top_logprobs: Option<Value>,
    #[schema(ignore)]
    truncation: Option<Value>,
}

/// A function that the model may call.
#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
#[serde(remote = "Self")]
pub(super) struct FunctionTool {
    /// `function`
    #[serde(default)]
    #[schema(required = true)]
    r#type: String,
    #[serde(default)]
    #[schema(required = true)]
    name: String,
    #[serde(default)]
    description: Option<String>,
    /// The JSON Schema of the arguments, which are an object; without it they are empty.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    parameters: Option<Value>,
    /// Has no effect. Where the answer must call a function, the arguments are always of their schema.
    #[serde(default)]
    strict: Option<bool>,
}

/// How much a model thinks before it answers.
#[derive(Debug, Deserialize, ToSchema)]
struct ReasoningOptions {
    /// Turns thinking on or off, with the values of a chat's `reasoning_effort`.
    #[serde(default)]
    effort: Option<String>,
    /// Further options, which are refused unless they are null.
    #[serde(flatten)]
    #[schema(ignore)]
    unknown: BTreeMap<String, Value>,
}

/// What the text of a response looks like.
#[derive(Clone, Debug, Default, Deserialize, Serialize, ToSchema)]
#[serde(remote = "Self")]
pub(super) struct TextOptions {
    #[serde(default, deserialize_with = "null_is_default")]
    #[schema(default = json!({ "type": "text" }))]
    pub(super) format: TextFormat,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize, ToSchema)]
#[serde(remote = "Self", tag = "type", rename_all = "snake_case")]
pub(super) enum TextFormat {
    /// Any text.
    #[default]
    Text,
    /// A JSON object.
    JsonObject,
    /// A JSON value of a schema.
    JsonSchema(SchemaFormat),
}

/// A JSON schema with a name. The text is always of the schema, `strict` or not.
#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
pub(super) struct SchemaFormat {
    #[serde(default)]
    name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    #[schema(value_type = Object)]
    schema: Value,
    /// Whether objects that name their `properties`, and do not say whether there may be others, have no others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    strict: Option<bool>,
}

read_from_objects!(ResponsesRequest, FunctionTool, TextOptions, TextFormat);
write_as_derived!(FunctionTool, TextOptions, TextFormat);

impl ResponsesRequest {
    /// The request as one of a chat, with where its messages stand in `input`.
    ///
    /// # Errors
    /// If a field is wrong or not supported.
    pub(super) fn chat(&mut self) -> Result<(CompletionRequest, Messages)> {
        self.check()?;
        let items = match self.input.take() {
            Some(ResponseInput::Text(text)) => vec![InputItem::user(text)],
            Some(ResponseInput::Items(items)) if !items.is_empty() => items,
            None | Some(ResponseInput::Items(_)) => return Err(ApiError::field("input", "input is missing")),
        };
        let mut messages = Messages::of(self.instructions.as_deref(), items)?;
        let mut request = CompletionRequest::default();
        request.model = self.model.clone();
        request.messages = std::mem::take(&mut messages.messages);
        request.documents = self.documents.take();
        request.refrain = self.refrain.take().unwrap_or_default();
        request.max_completion_tokens = self.max_output_tokens;
        request.temperature = self.temperature;
        request.top_p = self.top_p;
        request.seed = self.seed;
        request.reasoning_effort = self.reasoning.as_mut().and_then(|reasoning| reasoning.effort.take());
        request.response_format = self.text.as_ref().map(|text| text.format.response_format());
        request.tools = self.tools.as_ref().map(|tools| tools.iter().map(FunctionTool::definition).collect());
        request.tool_choice = self.tool_choice.as_ref().map(tool_choice);
        request.parallel_tool_calls = self.parallel_tool_calls;
        Ok((request, messages))
    }

    /// Bytes of the fields that the response repeats.
    pub(super) fn repeated_bytes(&self) -> usize {
        let ResponsesRequest { instructions, tools, tool_choice, text, metadata, .. } = self;
        let repeated = serde_json::to_vec(&(instructions, tools, tool_choice, text, metadata));
        repeated.map_or(0, |repeated| parsed_bytes(&repeated))
    }

    /// Refuses fields that are not supported, unless their value asks for nothing.
    fn check(&self) -> Result<()> {
        let unsupported: [(&str, &Option<Value>, &[&str]); 7] = [
            ("background", &self.background, &["false"]),
            ("conversation", &self.conversation, &[]),
            // An answer without reasoning has none to include.
            ("include", &self.include, &["[]", r#"["reasoning.encrypted_content"]"#]),
            ("previous_response_id", &self.previous_response_id, &[]),
            ("prompt", &self.prompt, &[]),
            ("top_logprobs", &self.top_logprobs, &["0"]),
            ("truncation", &self.truncation, &[r#""disabled""#]),
        ];
        let refused = |field: &str, name: &str| {
            Err(ApiError::field(field, format!("{name} is not supported")).with_code("unsupported_parameter"))
        };
        for (name, value, harmless) in unsupported {
            let given = value.clone().map(without_nulls).filter(|value| !value.is_null());
            let given = given.as_ref().map(Value::to_string);
            if given.is_some_and(|given| !harmless.contains(&given.as_str())) {
                return refused(name, name);
            }
        }
        let mut unknown = self.reasoning.iter().flat_map(|reasoning| &reasoning.unknown);
        if let Some((name, _)) = unknown.find(|(_, value)| !value.is_null()) {
            return refused("reasoning", &format!("reasoning.{name}"));
        }
        check_metadata(self.metadata.as_ref())
    }
}

/// A value without fields of null, which clients write where they have nothing to say.
fn without_nulls(mut value: Value) -> Value {
    if let Some(fields) = value.as_object_mut() {
        fields.retain(|_, value| !value.is_null());
    }
    value
}

/// OpenAI's bounds on metadata.
fn check_metadata(metadata: Option<&Value>) -> Result<()> {
    let fits = |(name, value): (&String, &Value)| {
        let is_short = |text: &str, most: usize| text.chars().nth(most).is_none();
        is_short(name, 64) && value.as_str().is_some_and(|value| is_short(value, 512))
    };
    match metadata {
        None | Some(Value::Null) => Ok(()),
        Some(Value::Object(pairs)) if pairs.len() <= 16 && pairs.iter().all(fits) => Ok(()),
        Some(_) => {
            let bounds = "16 texts of up to 512 characters, with names of up to 64";
            Err(ApiError::field("metadata", format!("metadata is an object of at most {bounds}")))
        }
    }
}

impl FunctionTool {
    fn definition(&self) -> ToolDefinition {
        let FunctionTool { r#type, name, description, parameters, strict } = self.clone();
        ToolDefinition {
            kind: r#type,
            function: FunctionDefinition { name, description, parameters, _strict: strict },
        }
    }
}

impl TextFormat {
    fn response_format(&self) -> ResponseFormat {
        match self {
            TextFormat::Text => ResponseFormat::Text,
            TextFormat::JsonObject => ResponseFormat::JsonObject { schema: None },
            TextFormat::JsonSchema(SchemaFormat { schema, strict, .. }) => ResponseFormat::JsonSchema {
                json_schema: Some(NamedSchema::of(schema.clone(), *strict)),
                schema: None,
            },
        }
    }
}

/// A choice of tools as a chat writes it.
fn tool_choice(choice: &Value) -> Value {
    match (choice["type"].as_str(), choice["name"].as_str(), choice["tools"].as_array()) {
        (Some("function"), Some(name), _) => json!({ "type": "function", "function": { "name": name } }),
        (Some("allowed_tools"), _, Some(tools)) => {
            let tools: Vec<Value> = tools.iter().map(tool_choice).collect();
            json!({ "type": "allowed_tools", "allowed_tools": { "mode": choice["mode"], "tools": tools } })
        }
        _ => choice.clone(),
    }
}
