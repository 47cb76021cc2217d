//! The part of an answer that only this server has: how it was computed, and from which documents.

use refrain::engine::{Answer, Explanation, RequestStats, ShadedChunk};
use serde::Serialize;
use utoipa::ToSchema;

use super::request::{EveryToken, Explain};
use super::sources::SourceResponse;
use crate::job::Token;

/// The KV cache after a token of a stream.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct CacheState {
    /// Tokens whose keys and values each head holds.
    retained: usize,
    /// Bytes of the cache.
    kv_bytes: usize,
}

impl CacheState {
    pub(super) fn after(token: &Token) -> CacheState {
        CacheState { retained: token.retained, kv_bytes: token.kv_bytes }
    }
}

/// How an answer was computed, and from which documents.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct AnswerDetails {
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

/// What is known of an answer before it comes.
#[derive(Clone, Debug)]
pub(super) struct AnswerContext {
    pub(super) method: String,
    pub(super) evict: String,
    pub(super) seed: Option<i64>,
    pub(super) sources: Vec<SourceResponse>,
    pub(super) explain: Explain,
}

impl AnswerContext {
    pub(super) fn details(&self, answer: Answer) -> AnswerDetails {
        let every_token = self.explain == Explain::Tokens(EveryToken::Tokens);
        let explanation = answer.explanation.map(|mut explanation| {
            let chunks = every_token.then(|| std::mem::take(&mut explanation.chunks));
            ExplanationResponse { explanation, chunks }
        });
        AnswerDetails {
            method: self.method.clone(),
            evict: self.evict.clone(),
            seed: self.seed,
            stats: answer.stats,
            documents: self.sources.clone(),
            explanation,
        }
    }
}
