//! Answers in OpenAI's shapes: whole, or as chunks of a stream.

use refrain::engine::{Answer, Engine, FinishReason};
use serde::Serialize;
use utoipa::ToSchema;

use super::details::{AnswerContext, AnswerDetails, CacheState};
use super::logprobs::Logprobs;
use super::parts::{AnswerReader, Part};
use crate::job::Token;

/// The two routes that answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    Chat,
    Completion,
}

/// An answer, or a chunk of its stream.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct CompletionResponse {
    id: String,
    /// `chat.completion`, `chat.completion.chunk` or `text_completion`.
    object: &'static str,
    /// Seconds since 1970.
    created: u64,
    model: String,
    choices: Vec<Choice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    refrain: Option<RefrainResponse>,
}

#[derive(Debug, Serialize, ToSchema)]
struct Choice {
    index: usize,
    /// `stop`, `length` or `tool_calls`; null before the end of a stream.
    #[schema(required = true)]
    finish_reason: Option<&'static str>,
    #[schema(required = true)]
    logprobs: Option<Logprobs>,
    /// The answer of a chat.
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<AssistantMessage>,
    /// The part of a message that a chunk of a chat's stream adds.
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<Delta>,
    /// The answer of a completion, or what a chunk adds to it.
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
struct AssistantMessage {
    role: &'static str,
    /// The text; null where the answer is calls alone.
    #[schema(required = true)]
    content: Option<String>,
    /// Always null.
    #[schema(required = true)]
    refusal: Option<String>,
    /// The tools that the answer calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    tool_calls: Vec<ToolCallResponse>,
}

/// A call of a tool.
#[derive(Clone, Debug, Serialize, ToSchema)]
struct ToolCallResponse {
    id: String,
    /// `function`
    r#type: &'static str,
    function: FunctionCall,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
struct FunctionCall {
    name: String,
    /// The arguments as the text of a JSON object.
    arguments: String,
}

#[derive(Debug, Default, Serialize, ToSchema)]
pub(super) struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    /// Text; null in the first chunk where the answer may be calls alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    content: Option<Option<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[CallDelta; 1]>,
}

/// A part of a call: its beginning, with id and name, or a part of its arguments.
#[derive(Debug, Serialize, ToSchema)]
struct CallDelta {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    /// `function`
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<&'static str>,
    function: FunctionDelta,
}

#[derive(Debug, Serialize, ToSchema)]
struct FunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

impl From<Part> for Delta {
    fn from(part: Part) -> Delta {
        let call = |call| Delta { tool_calls: Some([call]), ..Delta::default() };
        match part {
            Part::Text(text) => Delta { content: Some(Some(text)), ..Delta::default() },
            Part::Call { index, id, name } => call(CallDelta {
                index,
                id: Some(id),
                r#type: Some("function"),
                function: FunctionDelta { name: Some(name), arguments: String::new() },
            }),
            Part::Arguments { index, json } => {
                let function = FunctionDelta { name: None, arguments: json };
                call(CallDelta { index, id: None, r#type: None, function })
            }
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptTokensDetails,
}

#[derive(Debug, Serialize, ToSchema)]
struct PromptTokensDetails {
    cached_tokens: usize,
}

/// Fields of an answer that only this server has.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
enum RefrainResponse {
    Token(CacheState),
    Answer(Box<AnswerDetails>),
}

/// Builds the responses of one request.
pub(super) struct ResponseBuilder {
    pub(super) route: Route,
    pub(super) id: String,
    pub(super) created: u64,
    pub(super) model: String,
    pub(super) context: AnswerContext,
    pub(super) engine: Engine,
    pub(super) logprobs: bool,
    /// The number of answers to each prompt.
    pub(super) answers_each: usize,
    /// The text that the answers to each prompt begin with; none where they begin with no other text than their own.
    pub(super) echoed: Vec<String>,
}

/// One of the answers of a request, as far as it came.
#[derive(Debug)]
pub(super) struct AnswerState {
    index: usize,
    reader: AnswerReader,
    /// Characters of the tokens whose log probabilities were sent.
    text_offset: usize,
    /// Of an answer that is given whole: its text, its calls, and the tokens whose log probabilities are asked for.
    text: String,
    calls: Vec<ToolCallResponse>,
    tokens: Vec<Token>,
}

impl AnswerState {
    pub(super) fn new(index: usize, reader: AnswerReader) -> AnswerState {
        let (text, calls, tokens) = (String::new(), Vec::new(), Vec::new());
        AnswerState { index, reader, text_offset: 0, text, calls, tokens }
    }

    /// Takes the next token of an answer that is given whole; `keep` keeps it for its log probabilities.
    pub(super) fn take(&mut self, token: Token, keep: bool) {
        let parts = self.reader.read(&token);
        self.collect(parts);
        self.tokens.extend(keep.then_some(token));
    }

    fn collect(&mut self, parts: Vec<Part>) {
        for part in parts {
            match part {
                Part::Text(text) => self.text.push_str(&text),
                Part::Call { id, name, .. } => {
                    let function = FunctionCall { name, arguments: String::new() };
                    self.calls.push(ToolCallResponse { id, r#type: "function", function });
                }
                Part::Arguments { json, .. } => {
                    if let Some(call) = self.calls.last_mut() {
                        call.function.arguments.push_str(&json);
                    }
                }
            }
        }
    }

    /// The message of a chat's answer at its end.
    fn message(&mut self) -> AssistantMessage {
        let rest = self.reader.finish();
        self.collect(rest);
        let (text, tool_calls) = (std::mem::take(&mut self.text), std::mem::take(&mut self.calls));
        let content = (!text.is_empty() || tool_calls.is_empty()).then_some(text);
        AssistantMessage { role: "assistant", content, refusal: None, tool_calls }
    }

    fn finish_reason(&self, answer: &Answer) -> &'static str {
        match answer.finish {
            FinishReason::Stop if self.reader.has_calls() => "tool_calls",
            FinishReason::Stop => "stop",
            FinishReason::Length | FinishReason::Cancelled | FinishReason::Failed => "length",
        }
    }
}

impl ResponseBuilder {
    fn response(&self, object: &'static str, choices: Vec<Choice>) -> CompletionResponse {
        let (id, created, model) = (self.id.clone(), self.created, self.model.clone());
        CompletionResponse { id, object, created, model, choices, usage: None, refrain: None }
    }

    /// All answers, whole. `refrain` tells of the first.
    pub(super) fn whole(&self, mut answers: Vec<(AnswerState, Answer)>) -> CompletionResponse {
        let object = match self.route {
            Route::Chat => "chat.completion",
            Route::Completion => "text_completion",
        };
        let choices = answers.iter_mut().map(|(state, answer)| {
            let message = state.message();
            let (finish, tokens) = (state.finish_reason(answer), std::mem::take(&mut state.tokens));
            let mut choice = self.choice(state, Some(finish), &tokens);
            match self.route {
                Route::Chat => choice.message = Some(message),
                Route::Completion => {
                    let echoed = self.echoed(state.index);
                    choice.text = Some(echoed.into_iter().chain([answer.text.as_str()]).collect());
                }
            }
            choice
        });
        let mut response = self.response(object, choices.collect());
        let usages = answers.iter().map(|(state, answer)| self.usage(state.index, answer));
        response.usage = usages.reduce(Usage::plus);
        response.refrain = answers.into_iter().next().map(|(_, answer)| self.details(answer));
        response
    }

    /// The text that an answer begins with.
    fn echoed(&self, index: usize) -> Option<&str> {
        self.echoed.get(index / self.answers_each).map(String::as_str)
    }

    /// Usage of one answer. The tokens of a prompt count with the first of its answers.
    pub(super) fn usage(&self, index: usize, answer: &Answer) -> Usage {
        let is_first = index.is_multiple_of(self.answers_each);
        let prompt = |tokens: usize| if is_first { tokens } else { 0 };
        let (prompt_tokens, completion_tokens) =
            (prompt(answer.stats.prompt_tokens), answer.stats.answer_tokens);
        Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptTokensDetails { cached_tokens: prompt(answer.stats.found_tokens()) },
        }
    }

    fn choice(
        &self,
        state: &mut AnswerState,
        finish_reason: Option<&'static str>,
        tokens: &[Token],
    ) -> Choice {
        let logprobs = self.logprobs(state, tokens);
        Choice { index: state.index, finish_reason, logprobs, message: None, delta: None, text: None }
    }

    fn details(&self, answer: Answer) -> RefrainResponse {
        RefrainResponse::Answer(Box::new(self.context.details(answer)))
    }

    /// A chunk of a stream.
    fn chunk(
        &self,
        state: &mut AnswerState,
        delta: Delta,
        finish_reason: Option<&'static str>,
        tokens: &[Token],
    ) -> CompletionResponse {
        let mut choice = self.choice(state, finish_reason, tokens);
        match self.route {
            Route::Chat => choice.delta = Some(delta),
            Route::Completion => choice.text = Some(delta.content.flatten().unwrap_or_default()),
        }
        self.response(self.chunk_object(), vec![choice])
    }

    fn chunk_object(&self) -> &'static str {
        match self.route {
            Route::Chat => "chat.completion.chunk",
            Route::Completion => "text_completion",
        }
    }

    /// The chunk that begins the stream of an answer: the role of a chat's author, or the text that a completion begins with.
    pub(super) fn first_chunk(&self, state: &mut AnswerState) -> Option<CompletionResponse> {
        let text = |text: String| Some(Some(text).filter(|_| !state.reader.has_tools()));
        let delta = match self.route {
            Route::Chat => {
                Delta { role: Some("assistant"), content: text(String::new()), ..Delta::default() }
            }
            Route::Completion => {
                Delta { content: text(self.echoed(state.index)?.to_owned()), ..Delta::default() }
            }
        };
        Some(self.chunk(state, delta, None, &[]))
    }

    /// The chunks of a token: one for each part of the answer that it makes known. The first one has what belongs to the token.
    pub(super) fn token_chunks(&self, state: &mut AnswerState, token: &Token) -> Vec<CompletionResponse> {
        let mut deltas: Vec<Delta> = state.reader.read(token).into_iter().map(Delta::from).collect();
        if deltas.is_empty() && self.logprobs {
            deltas.push(Delta::default());
        }
        let mut chunks = Vec::with_capacity(deltas.len());
        for (at, delta) in deltas.into_iter().enumerate() {
            let tokens = if at == 0 { std::slice::from_ref(token) } else { &[] };
            let mut chunk = self.chunk(state, delta, None, tokens);
            chunk.refrain = (at == 0).then(|| RefrainResponse::Token(CacheState::after(token)));
            chunks.push(chunk);
        }
        chunks
    }

    /// The chunks that end an answer: those of what was held back, and one with the reason for the end.
    pub(super) fn last_chunks(&self, state: &mut AnswerState, answer: Answer) -> Vec<CompletionResponse> {
        let rest = state.reader.finish().into_iter();
        let mut chunks: Vec<CompletionResponse> =
            rest.map(|part| self.chunk(state, Delta::from(part), None, &[])).collect();
        // The text of an answer without calls is no null, as the first chunk has it, though it be empty.
        let is_text = state.reader.has_tools() && !state.reader.has_calls();
        let delta = Delta { content: is_text.then(|| Some(String::new())), ..Delta::default() };
        let mut last = self.chunk(state, delta, Some(state.finish_reason(&answer)), &[]);
        last.refrain = Some(self.details(answer));
        chunks.push(last);
        chunks
    }

    /// The chunk that gives the usage of tokens, after those that end the answers.
    pub(super) fn usage_chunk(&self, usage: Usage) -> CompletionResponse {
        let mut chunk = self.response(self.chunk_object(), Vec::new());
        chunk.usage = Some(usage);
        chunk
    }

    /// Log probabilities of tokens, where the request asks for them.
    fn logprobs(&self, state: &mut AnswerState, tokens: &[Token]) -> Option<Logprobs> {
        let tokenizer = self.engine.tokenizer();
        match self.route {
            _ if !self.logprobs => None,
            Route::Chat => Logprobs::of_chat(tokenizer, tokens),
            Route::Completion => Logprobs::of_completion(tokenizer, tokens, &mut state.text_offset),
        }
    }
}

impl Usage {
    /// Usage of several answers together.
    pub(super) fn plus(mut self, other: Usage) -> Usage {
        self.prompt_tokens += other.prompt_tokens;
        self.completion_tokens += other.completion_tokens;
        self.total_tokens += other.total_tokens;
        self.prompt_tokens_details.cached_tokens += other.prompt_tokens_details.cached_tokens;
        self
    }
}
