//! H2O, heavy-hitter oracle (arXiv 2306.14048): the tokens that received most attention over all rows so far, and the
//! most recent ones. The score of an evicted token is lost.

use refrain_kv::Span;
use refrain_registry::{Error, MAX_COUNT, Options, zero_is_none};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::accumulated_attention::AccumulatedAttention;
use crate::{AttentionNeeds, Budget, EvictionPolicy, PromptSpans, Result, Sizes, TokenScorer};

/// The unit of the budget for heavy hitters and recent tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum H2oBudget {
    /// Numbers of tokens, for any prompt.
    RealDrop,
    /// Shares of the prompt's tokens, as in the published code.
    Hf,
}

/// Options of H2O: keep heavy hitters and recent tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct H2o {
    /// Tokens that stay in the cache: the recent ones, and heavy hitters.
    #[schemars(range(max = MAX_COUNT))]
    pub capacity: usize,
    /// Most recent tokens among those that stay; 0 for half of the capacity.
    #[serde(with = "zero_is_none")]
    #[schemars(with = "usize", range(max = MAX_COUNT))]
    pub recent: Option<usize>,
    /// Numbers of tokens (real_drop), or shares of the prompt as in the published code (hf).
    pub budget: H2oBudget,
    /// Share of the prompt's tokens that stay for their attention, with budget=hf.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub heavy_ratio: f64,
    /// Share of the prompt's tokens that stay as recent, with budget=hf.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub recent_ratio: f64,
    /// Divide a token's sum by the computed rows that could see it, as kvpress does.
    pub normalise: bool,
}

impl Default for H2o {
    fn default() -> Self {
        H2o {
            capacity: 1024,
            recent: None,
            budget: H2oBudget::RealDrop,
            heavy_ratio: 0.1,
            recent_ratio: 0.1,
            normalise: false,
        }
    }
}

impl Options for H2o {
    const NAME: &'static str = "h2o";

    fn validate(&self) -> Result<()> {
        // Shares of a prompt do not contradict one another.
        self.parts(&PromptSpans { system: Span::new(0, 0), question: Span::new(0, 1) }).map(drop)
    }
}

impl H2o {
    /// Heavy hitters and recent tokens after this prompt.
    fn parts(&self, prompt: &PromptSpans) -> Result<(usize, usize)> {
        if self.budget == H2oBudget::Hf {
            let share = |ratio| refrain_kv::top_count(ratio, prompt.len(), prompt.len());
            return Ok((share(self.heavy_ratio), share(self.recent_ratio).max(1)));
        }
        let recent = self.recent.unwrap_or((self.capacity / 2).max(1));
        if recent > self.capacity || self.capacity == 0 {
            let conflict = format!(
                "capacity {} is below the {recent} recent tokens: choose at least as many",
                self.capacity
            );
            return Err(Error::conflict(Self::NAME, conflict));
        }
        Ok((self.capacity - recent, recent))
    }
}

impl EvictionPolicy for H2o {
    fn budget(&self, prompt: &PromptSpans) -> Result<Option<Budget>> {
        let (heavy, recent) = self.parts(prompt)?;
        Ok(Some(Budget::constant(heavy + recent)))
    }

    fn needs(&self, _: &PromptSpans, _: usize) -> AttentionNeeds {
        AttentionNeeds::Sums
    }

    fn scorer(&self, prompt: &PromptSpans, sizes: Sizes) -> Box<dyn TokenScorer> {
        let recent = self.parts(prompt).map_or(0, |(_, recent)| recent);
        Box::new(AccumulatedAttention::new(sizes.heads, sizes.capacity, recent, self.normalise))
    }

    fn side_bytes(&self, _: &PromptSpans, sizes: Sizes) -> usize {
        AccumulatedAttention::bytes_of(sizes, self.normalise)
    }
}
