//! A³'s extension (arXiv 2511.17560): SnapKV after the first token, with system part and question protected.
//!
//! The question's rows score the documents' tokens; system part, question and the top `C − |S| − |Q|` of them stay.
//! Where `|S| + |Q| ≥ C`, the system part and the question's last `C − |S|` tokens do.

use refrain_registry::{Error, MAX_COUNT, Options, zero_is_none};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::snap_kv::{Pool, PromptScorer, check_kernel};
use crate::{AttentionNeeds, Budget, EvictionPolicy, PromptSpans, Result, Sizes, TokenScorer};

/// Options of A³'s extension: keep system part, question, and the documents' tokens that the question attends to.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct A3Ex {
    /// Tokens of the prompt that stay in the cache.
    #[schemars(range(max = MAX_COUNT))]
    pub capacity: usize,
    /// Tokens of the question's end whose attention scores the others; 0 for all, but at most half the capacity.
    #[serde(with = "zero_is_none")]
    #[schemars(with = "usize", range(max = MAX_COUNT))]
    pub window: Option<usize>,
    /// Neighbours over which scores are pooled: an odd number, 1 for none.
    #[schemars(range(min = 1, max = 1023))]
    pub kernel: usize,
    /// Pool scores by mean or by maximum.
    pub pool: Pool,
}

impl Default for A3Ex {
    fn default() -> Self {
        A3Ex { capacity: 1024, window: None, kernel: 5, pool: Pool::Avg }
    }
}

impl Options for A3Ex {
    const NAME: &'static str = "a3_ex";

    fn validate(&self) -> Result<()> {
        check_kernel(Self::NAME, self.kernel)
    }
}

impl EvictionPolicy for A3Ex {
    fn budget(&self, prompt: &PromptSpans) -> Result<Option<Budget>> {
        let system = prompt.system.len();
        if prompt.len() > self.capacity && system >= self.capacity {
            let conflict = format!(
                "capacity {} does not hold the system part, earlier turns included, of {system} tokens and a token of the question: choose more than {system}",
                self.capacity
            );
            return Err(Error::conflict(Self::NAME, conflict));
        }
        Ok((prompt.len() > self.capacity).then_some(Budget::once(self.capacity)))
    }

    fn needs(&self, prompt: &PromptSpans, _: usize) -> AttentionNeeds {
        let rows = self.window.unwrap_or(self.capacity / 2).min(prompt.question.len()).max(1);
        AttentionNeeds::PromptSums { rows }
    }

    fn scorer(&self, prompt: &PromptSpans, sizes: Sizes) -> Box<dyn TokenScorer> {
        let scored = prompt.system.range().end..prompt.question.range().start;
        let kept = vec![prompt.system, prompt.question];
        Box::new(PromptScorer::new((self.kernel, self.pool), scored, kept, sizes))
    }

    fn side_bytes(&self, _: &PromptSpans, sizes: Sizes) -> usize {
        PromptScorer::bytes_of(sizes)
    }
}
