//! The facts that all passes of one prefill share.

use std::sync::Arc;

use refrain_eviction::Eviction;
use refrain_fusion::PrefillInputs;
use refrain_kv::{KvAllocator, RopeTables};

use super::capture::AttentionCapture;
use super::reuse::Segment;
use crate::engine::Engine;
use crate::prefix_cache::CachedPrefix;
use crate::{Error, Result};

/// Everything that the passes of one prefill share.
#[derive(Debug)]
pub(crate) struct PassContext {
    pub(crate) engine: Engine,
    pub(crate) inputs: Arc<PrefillInputs>,
    /// Name of the method, for errors.
    pub(crate) method: String,
    pub(crate) ids: Vec<u32>,
    pub(crate) segments: Arc<[Segment]>,
    /// The beginning of the prompt that comes out of the prefix cache.
    pub(crate) taken: Option<Arc<CachedPrefix>>,
    pub(crate) eviction: Eviction,
    pub(crate) capture: AttentionCapture,
    pub(crate) allocator: KvAllocator,
    /// Tokens of prompt and answer at most.
    pub(crate) max_seq_len: usize,
    /// The farthest that a key is from a query, plus one.
    pub(crate) max_rope_position: usize,
    /// Cosines and sines of the prompt's positions, and of the answer's where its cache holds every token.
    pub(crate) tables: Arc<RopeTables>,
}

impl PassContext {
    /// Tokens must ascend, hold every [required](PromptLayout::required_tokens) one, and be a subset of those before.
    pub(crate) fn check_tokens(&self, tokens: &[u32], of: Option<&[u32]>) -> Result<()> {
        let fail = |why| Err(Error::Tokens { method: self.method.clone(), why });
        let layout = &self.inputs.layout;
        if !tokens.is_sorted_by(|a, b| a < b)
            || tokens.last().is_none_or(|last| *last as usize >= layout.len())
        {
            return fail("positions are not ascending within the prompt");
        }
        if !has_all(tokens, &layout.required_tokens()) {
            return fail("a token of the question, or of a system part that is not cached, is left out");
        }
        if of.is_some_and(|of| !has_all(of, tokens)) {
            return fail("a token is new at this layer");
        }
        Ok(())
    }
}

/// Whether `all` has each of `some`; both ascend.
fn has_all(all: &[u32], some: &[u32]) -> bool {
    let mut rest = all.iter();
    some.iter().all(|token| rest.by_ref().any(|other| other == token))
}
