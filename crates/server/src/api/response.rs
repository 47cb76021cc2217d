//! Answers in OpenAI's shapes: whole, or as chunks of a stream.

use refrain_engine::{Answer, Engine, Explanation, FinishReason, RequestStats, ShadedChunk, TokenLogprobs};
use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::request::{EveryToken, Explain};
use super::sources::SourceResponse;
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
    /// `stop` or `length`; null before the end of a stream.
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
    content: String,
    /// Always null.
    #[schema(required = true)]
    refusal: Option<String>,
}

#[derive(Debug, Default, Serialize, ToSchema)]
pub(super) struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
}

/// Log probabilities in the shape of a chat or of a completion.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
enum Logprobs {
    Chat(ChatLogprobs),
    Completion(CompletionLogprobs),
}

#[derive(Debug, Serialize, ToSchema)]
struct ChatLogprobs {
    content: Vec<TokenLogprob>,
    /// Always null.
    #[schema(required = true)]
    refusal: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
struct TokenLogprob {
    #[serde(flatten)]
    token: Alternative,
    top_logprobs: Vec<Alternative>,
}

#[derive(Debug, Serialize, ToSchema)]
struct Alternative {
    token: String,
    logprob: f32,
    /// The bytes of the token, which may be a part of a character.
    bytes: Vec<u8>,
}

#[derive(Debug, Serialize, ToSchema)]
struct CompletionLogprobs {
    /// Position of each token in the answer, in characters.
    text_offset: Vec<usize>,
    /// Texts of the tokens; a part of a character is `bytes:\x..`.
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    /// For each token, its alternatives with their log probabilities.
    #[schema(value_type = Vec<Object>)]
    top_logprobs: Vec<Map<String, Value>>,
}

#[derive(Debug, Serialize, ToSchema)]
struct Usage {
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

/// The KV cache after a token of a stream.
#[derive(Debug, Serialize, ToSchema)]
struct CacheState {
    /// Tokens whose keys and values each head holds.
    retained: usize,
    /// Bytes of the cache.
    kv_bytes: usize,
}

/// How an answer was computed, and from which documents.
#[derive(Debug, Serialize, ToSchema)]
struct AnswerDetails {
    /// Fusion method with its options.
    method: String,
    /// Eviction policy with its options.
    evict: String,
    /// The seed of the sampling; absent where the most likely tokens were taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<i64>,
    /// Counts and times: prompt, cached and recomputed tokens, bytes, seconds to the first token, and more.
    #[schema(value_type = Object)]
    stats: RequestStats,
    documents: Vec<SourceResponse>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    explanation: Option<ExplanationResponse>,
}

#[derive(Debug, Serialize)]
struct ExplanationResponse {
    #[serde(flatten)]
    explanation: Explanation,
    #[serde(skip_serializing_if = "Option::is_none")]
    chunks: Option<Vec<ShadedChunk>>,
}

/// Builds the responses of one request.
pub(super) struct ResponseBuilder {
    pub(super) route: Route,
    pub(super) id: String,
    pub(super) created: u64,
    pub(super) model: String,
    pub(super) method: String,
    pub(super) evict: String,
    pub(super) seed: Option<i64>,
    pub(super) sources: Vec<SourceResponse>,
    pub(super) engine: Engine,
    pub(super) logprobs: bool,
    pub(super) explain: Explain,
    /// Characters of the tokens whose log probabilities were sent.
    pub(super) text_offset: usize,
}

impl ResponseBuilder {
    fn response(&self, object: &'static str, choices: Vec<Choice>) -> CompletionResponse {
        let (id, created, model) = (self.id.clone(), self.created, self.model.clone());
        CompletionResponse { id, object, created, model, choices, usage: None, refrain: None }
    }

    /// A whole answer.
    pub(super) fn whole(mut self, answer: Answer, tokens: &[Token]) -> CompletionResponse {
        let (finish_reason, logprobs) = (Some(finish_reason(answer.finish)), self.logprobs(tokens));
        let mut choice = Choice { index: 0, finish_reason, logprobs, message: None, delta: None, text: None };
        let object = match self.route {
            Route::Chat => {
                let (role, content) = ("assistant", answer.text.clone());
                choice.message = Some(AssistantMessage { role, content, refusal: None });
                "chat.completion"
            }
            Route::Completion => {
                choice.text = Some(answer.text.clone());
                "text_completion"
            }
        };
        let mut response = self.response(object, vec![choice]);
        response.usage = Some(usage(&answer));
        response.refrain = Some(self.details(answer));
        response
    }

    fn details(&self, answer: Answer) -> RefrainResponse {
        let every_token = self.explain == Explain::Tokens(EveryToken::Tokens);
        let explanation = answer.explanation.map(|mut explanation| {
            let chunks = every_token.then(|| std::mem::take(&mut explanation.chunks));
            ExplanationResponse { explanation, chunks }
        });
        RefrainResponse::Answer(Box::new(AnswerDetails {
            method: self.method.clone(),
            evict: self.evict.clone(),
            seed: self.seed,
            stats: answer.stats,
            documents: self.sources.clone(),
            explanation,
        }))
    }

    /// A chunk of a stream.
    fn chunk(
        &mut self,
        delta: Delta,
        finish_reason: Option<&'static str>,
        tokens: &[Token],
    ) -> CompletionResponse {
        let logprobs = self.logprobs(tokens);
        let mut choice = Choice { index: 0, finish_reason, logprobs, message: None, delta: None, text: None };
        match self.route {
            Route::Chat => choice.delta = Some(delta),
            Route::Completion => choice.text = Some(delta.content.unwrap_or_default()),
        }
        let object = match self.route {
            Route::Chat => "chat.completion.chunk",
            Route::Completion => "text_completion",
        };
        self.response(object, vec![choice])
    }

    /// The chunk that begins the stream of a chat.
    pub(super) fn role_chunk(&mut self) -> CompletionResponse {
        let delta = Delta { role: Some("assistant"), content: Some(String::new()) };
        self.chunk(delta, None, &[])
    }

    /// The chunk of a token.
    pub(super) fn token_chunk(&mut self, token: &Token) -> CompletionResponse {
        let delta = Delta { content: Some(token.text.clone()), ..Delta::default() };
        let mut chunk = self.chunk(delta, None, std::slice::from_ref(token));
        let state = CacheState { retained: token.retained, kv_bytes: token.kv_bytes };
        chunk.refrain = Some(RefrainResponse::Token(state));
        chunk
    }

    /// The chunk that ends an answer.
    pub(super) fn last_chunk(&mut self, answer: Answer) -> CompletionResponse {
        let mut chunk = self.chunk(Delta::default(), Some(finish_reason(answer.finish)), &[]);
        chunk.refrain = Some(self.details(answer));
        chunk
    }

    /// The chunk that gives the usage of tokens, after the one that ends the answer.
    pub(super) fn usage_chunk(&mut self, answer: &Answer) -> CompletionResponse {
        let mut chunk = self.chunk(Delta::default(), None, &[]);
        (chunk.choices, chunk.usage) = (Vec::new(), Some(usage(answer)));
        chunk
    }

    /// Log probabilities of tokens, where the request asks for them.
    fn logprobs(&mut self, tokens: &[Token]) -> Option<Logprobs> {
        let tokens: Vec<(u32, &TokenLogprobs)> =
            tokens.iter().filter_map(|token| token.id.zip(token.logprobs.as_ref())).collect();
        if !self.logprobs || tokens.is_empty() {
            return None;
        }
        Some(match self.route {
            Route::Chat => Logprobs::Chat(self.chat_logprobs(&tokens)),
            Route::Completion => Logprobs::Completion(self.completion_logprobs(&tokens)),
        })
    }

    fn chat_logprobs(&self, tokens: &[(u32, &TokenLogprobs)]) -> ChatLogprobs {
        let alternative = |id: u32, logprob: f32| {
            let bytes = self.engine.tokenizer().bytes_of(id);
            Alternative { token: String::from_utf8_lossy(&bytes).into_owned(), logprob, bytes }
        };
        let token = |(id, likely): &(u32, &TokenLogprobs)| TokenLogprob {
            token: alternative(*id, likely.logprob),
            top_logprobs: likely.top.iter().map(|(id, logprob)| alternative(*id, *logprob)).collect(),
        };
        ChatLogprobs { content: tokens.iter().map(token).collect(), refusal: None }
    }

    fn completion_logprobs(&mut self, tokens: &[(u32, &TokenLogprobs)]) -> CompletionLogprobs {
        let bytes = |id: u32| self.engine.tokenizer().bytes_of(id);
        // A part of a character is written as OpenAI writes it.
        let text = |id: u32| {
            String::from_utf8(bytes(id)).unwrap_or_else(|part| {
                let hex = part.as_bytes().iter().map(|byte| format!("\\x{byte:02x}"));
                format!("bytes:{}", hex.collect::<String>())
            })
        };
        let top = |likely: &TokenLogprobs| {
            likely.top.iter().map(|(id, logprob)| (text(*id), Value::from(*logprob))).collect()
        };
        let mut text_offset = Vec::with_capacity(tokens.len());
        let mut next = self.text_offset;
        for (id, _) in tokens {
            text_offset.push(next);
            // Each character counts with its first byte.
            next += bytes(*id).iter().filter(|byte| **byte & 0xc0 != 0x80).count();
        }
        let logprobs = CompletionLogprobs {
            text_offset,
            tokens: tokens.iter().map(|(id, _)| text(*id)).collect(),
            token_logprobs: tokens.iter().map(|(_, likely)| likely.logprob).collect(),
            top_logprobs: tokens.iter().map(|(_, likely)| top(likely)).collect(),
        };
        self.text_offset = next;
        logprobs
    }
}

fn finish_reason(finish: FinishReason) -> &'static str {
    match finish {
        FinishReason::Stop => "stop",
        FinishReason::Length | FinishReason::Cancelled => "length",
    }
}

fn usage(answer: &Answer) -> Usage {
    let (prompt_tokens, completion_tokens) = (answer.stats.prompt_tokens, answer.stats.answer_tokens);
    Usage {
        prompt_tokens,
        completion_tokens,
        total_tokens: prompt_tokens + completion_tokens,
        prompt_tokens_details: PromptTokensDetails { cached_tokens: answer.stats.cached_tokens },
    }
}
