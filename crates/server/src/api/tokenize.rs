//! Texts to tokens and back, and the routes that are refused by name.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use refrain::engine::Instructions;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::extract::Json;
use super::messages::{ChatMessage, Conversation};
use super::request::{
    ChatTemplateKwargs, ToolDefinition, ToolUse, check_model, null_is_default, read_from_objects, text_ids,
};
use crate::api_error::{ApiError, ErrorResponse, Result};
use crate::app::App;
use crate::tenant::Tenant;

/// A text to take apart into tokens, or a conversation, which the model's chat template writes first.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(remote = "Self")]
pub(super) struct TokenizeRequest {
    /// The model's name as in `/v1/models`.
    model: Option<String>,
    /// The text, in which special tokens are recognised as in the prompt of a completion.
    #[serde(default)]
    prompt: Option<String>,
    #[serde(default)]
    messages: Option<Vec<ChatMessage>>,
    /// The tools that a conversation's prompt tells the model of.
    #[serde(default)]
    tools: Option<Vec<ToolDefinition>>,
    #[serde(default)]
    chat_template_kwargs: Option<ChatTemplateKwargs>,
    /// Whether the token that the model's prompts begin with is put before a text that does not begin with it.
    #[serde(default)]
    #[schema(default = true)]
    add_special_tokens: Option<bool>,
    /// Whether the tokens' texts are returned too.
    #[serde(default, deserialize_with = "null_is_default")]
    return_token_strs: bool,
}

/// Tokens of a text.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct TokenizeResponse {
    count: usize,
    /// The model's context in tokens.
    max_model_len: usize,
    tokens: Vec<u32>,
    /// The tokens as the vocabulary writes them, where they were asked for.
    #[schema(required = true)]
    token_strs: Option<Vec<String>>,
}

/// Tokens to put together.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(remote = "Self")]
pub(super) struct DetokenizeRequest {
    /// The model's name as in `/v1/models`.
    model: Option<String>,
    tokens: Vec<u32>,
}

read_from_objects!(TokenizeRequest, DetokenizeRequest);

/// The text of tokens.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct DetokenizeResponse {
    prompt: String,
}

/// Take a text or a conversation apart into tokens.
#[utoipa::path(
    post, path = "/tokenize", request_body = TokenizeRequest,
    responses(
        (status = 200, description = "The tokens", body = TokenizeResponse),
        (status = "4XX", description = "The request is refused", body = ErrorResponse),
        (status = "5XX", description = "The server failed, is shutting down, or took too long", body = ErrorResponse),
    ),
)]
pub(super) async fn tokenize(
    State(app): State<App>,
    tenant: Tenant,
    Json(request, held): Json<TokenizeRequest>,
) -> Result<Response> {
    check_model(request.model.as_deref(), &app.state.options.served_model_name)?;
    let (namespace, scheduler) = (tenant.namespace().to_owned(), app.state.scheduler.clone());
    let deadline = app.deadline(held.since());
    let work = move || {
        let _held = held;
        let engine = &tenant.engine;
        let tokenizer = engine.tokenizer();
        let tokens: Vec<u32> = match (&request.prompt, &request.messages) {
            (Some(text), None) => {
                scheduler.check_text(text.len())?;
                text_ids(tokenizer, text, request.add_special_tokens.unwrap_or(true))?
            }
            (None, Some(messages)) => {
                let conversation = Conversation::of(messages)?;
                let tools = ToolUse::of(request.tools.as_deref().unwrap_or_default(), None, None)?;
                let bytes = conversation.bytes() + tools.as_ref().map_or(0, ToolUse::bytes);
                scheduler.check_text(bytes)?;
                let Conversation { system, turns } = conversation;
                let tools = tools.map(|tools| tools.tools).unwrap_or_default();
                let variables = request.chat_template_kwargs.as_ref();
                let thinking = variables.map(ChatTemplateKwargs::thinking).transpose()?.flatten();
                let thinking = thinking.unwrap_or(false);
                let around = Instructions { system, tools, thinking, ..Instructions::default() };
                engine.prompt_of_turns(Vec::new(), &turns, &around)?.ids()
            }
            _ => return Err(ApiError::field("prompt", "either prompt or messages is needed")),
        };
        scheduler.check_tokens(tokens.len())?;
        let text = |id: &u32| tokenizer.token_text(*id).unwrap_or_default();
        let token_strs = request.return_token_strs.then(|| tokens.iter().map(text).collect());
        let max_model_len = engine.decoder().config().context;
        Ok(TokenizeResponse { count: tokens.len(), max_model_len, tokens, token_strs })
    };
    Ok(axum::Json(app.preprocess(&namespace, deadline, work).await?).into_response())
}

/// Put tokens together to a text.
#[utoipa::path(
    post, path = "/detokenize", request_body = DetokenizeRequest,
    responses(
        (status = 200, description = "The text", body = DetokenizeResponse),
        (status = "4XX", description = "The request is refused", body = ErrorResponse),
        (status = "5XX", description = "The server failed, is shutting down, or took too long", body = ErrorResponse),
    ),
)]
pub(super) async fn detokenize(
    State(app): State<App>,
    tenant: Tenant,
    Json(request, held): Json<DetokenizeRequest>,
) -> Result<Response> {
    check_model(request.model.as_deref(), &app.state.options.served_model_name)?;
    app.state.scheduler.check_tokens(request.tokens.len())?;
    let (namespace, deadline) = (tenant.namespace().to_owned(), app.deadline(held.since()));
    let work = move || {
        let _held = held;
        let tokenizer = tenant.engine.tokenizer();
        let vocab = tokenizer.vocab_size();
        if let Some(token) = request.tokens.iter().find(|token| **token as usize >= vocab) {
            let message = format!("the tokenizer has {vocab} tokens, and none of id {token}");
            return Err(ApiError::field("tokens", message));
        }
        Ok(DetokenizeResponse { prompt: tokenizer.decode(&request.tokens, false) })
    };
    Ok(axum::Json(app.preprocess(&namespace, deadline, work).await?).into_response())
}

/// Refuses embeddings.
pub(super) async fn embeddings(_: Tenant) -> ApiError {
    let message = "this server has no embeddings: its model writes answers. Give documents in the request, or let it search \
                   with \"documents\": \"search\"";
    ApiError { code: Some("unsupported_endpoint"), ..ApiError::new(StatusCode::BAD_REQUEST, message) }
}
