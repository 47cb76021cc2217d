//! StreamingLLM (arXiv 2309.17453): the first tokens, which attention uses as sinks, and the most recent ones.

use refrain_registry::{Error, MAX_COUNT, Options};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{AttentionNeeds, Budget, EvictionPolicy, PromptSpans, RecencyScorer, Result, Sizes, TokenScorer};

/// The positions by which cached keys are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SinkPositions {
    /// Their places in the cache (the paper's).
    Reindex,
    /// Their positions in the text (kvpress's).
    Original,
}

/// Options of StreamingLLM: keep the first `sinks` and the most recent tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct StreamingLlm {
    /// Tokens that stay in the cache: the sinks, and the most recent ones.
    #[schemars(range(max = MAX_COUNT))]
    pub capacity: usize,
    /// Tokens at the start that stay.
    #[schemars(range(max = MAX_COUNT))]
    pub sinks: usize,
    /// Rotate keys by their places in the cache (the paper's), or by their original positions.
    pub positions: SinkPositions,
}

impl Default for StreamingLlm {
    fn default() -> Self {
        StreamingLlm { capacity: 1024, sinks: 4, positions: SinkPositions::Reindex }
    }
}

impl Options for StreamingLlm {
    const NAME: &'static str = "streaming_llm";

    fn validate(&self) -> Result<()> {
        let StreamingLlm { capacity, sinks, .. } = *self;
        if sinks >= capacity {
            let conflict = format!(
                "capacity {capacity} leaves no room beside {sinks} sinks: choose a capacity above the sinks"
            );
            return Err(Error::conflict(Self::NAME, conflict));
        }
        Ok(())
    }
}

impl EvictionPolicy for StreamingLlm {
    fn budget(&self, _: &PromptSpans) -> Result<Option<Budget>> {
        self.validate()?;
        Ok(Some(Budget::constant(self.capacity)))
    }

    fn needs(&self, _: &PromptSpans, _: usize) -> AttentionNeeds {
        AttentionNeeds::Nothing
    }

    fn scorer(&self, _: &PromptSpans, _: Sizes) -> Box<dyn TokenScorer> {
        Box::new(RecencyScorer { sinks: self.sinks })
    }

    fn side_bytes(&self, _: &PromptSpans, _: Sizes) -> usize {
        0
    }

    fn sinks(&self) -> Option<usize> {
        (self.positions == SinkPositions::Reindex).then_some(self.sinks)
    }
}
