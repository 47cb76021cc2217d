//! Log probabilities of tokens in the shapes of a chat and of a completion.

use refrain::engine::TokenLogprobs;
use refrain::model::Tokenizer;
use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::job::Token;

/// Log probabilities in the shape of a chat or of a completion.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum Logprobs {
    Chat(ChatLogprobs),
    Completion(CompletionLogprobs),
}

#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ChatLogprobs {
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
pub(super) struct CompletionLogprobs {
    /// Position of each token in the answer, in characters.
    text_offset: Vec<usize>,
    /// Texts of the tokens; a part of a character is `bytes:\x..`.
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    /// For each token, its alternatives with their log probabilities; null where none are asked for.
    #[schema(value_type = Option<Vec<Object>>, required = true)]
    top_logprobs: Option<Vec<Map<String, Value>>>,
}

/// The tokens that have log probabilities.
fn likely(tokens: &[Token]) -> Vec<(u32, &TokenLogprobs)> {
    tokens.iter().filter_map(|token| token.id.zip(token.logprobs.as_ref())).collect()
}

impl Logprobs {
    /// Log probabilities of a chat's tokens; none if no token has any.
    pub(super) fn of_chat(tokenizer: &Tokenizer, tokens: &[Token]) -> Option<Logprobs> {
        let alternative = |id: u32, logprob: f32| {
            let bytes = tokenizer.bytes_of(id);
            Alternative { token: String::from_utf8_lossy(&bytes).into_owned(), logprob, bytes }
        };
        let token = |(id, likely): &(u32, &TokenLogprobs)| TokenLogprob {
            token: alternative(*id, likely.logprob),
            top_logprobs: likely.top.iter().map(|(id, logprob)| alternative(*id, *logprob)).collect(),
        };
        let content: Vec<TokenLogprob> = likely(tokens).iter().map(token).collect();
        (!content.is_empty()).then_some(Logprobs::Chat(ChatLogprobs { content, refusal: None }))
    }

    /// Log probabilities of a completion's tokens, of which the first stands at the character `next`; none if no token has any.
    pub(super) fn of_completion(
        tokenizer: &Tokenizer,
        tokens: &[Token],
        next: &mut usize,
    ) -> Option<Logprobs> {
        let tokens = likely(tokens);
        let bytes = |id: u32| tokenizer.bytes_of(id);
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
        for (id, _) in &tokens {
            text_offset.push(*next);
            // Each character counts with its first byte.
            *next += bytes(*id).iter().filter(|byte| **byte & 0xc0 != 0x80).count();
        }
        let has_top = tokens.iter().any(|(_, likely)| !likely.top.is_empty());
        let logprobs = CompletionLogprobs {
            text_offset,
            tokens: tokens.iter().map(|(id, _)| text(*id)).collect(),
            token_logprobs: tokens.iter().map(|(_, likely)| likely.logprob).collect(),
            top_logprobs: has_top.then(|| tokens.iter().map(|(_, likely)| top(likely)).collect()),
        };
        (!tokens.is_empty()).then_some(Logprobs::Completion(logprobs))
    }
}
