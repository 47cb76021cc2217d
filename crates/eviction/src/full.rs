//! Full attention: nothing is evicted.

use refrain_registry::Options;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{AttentionNeeds, Budget, EvictionPolicy, PromptSpans, RecencyScorer, Result, Sizes, TokenScorer};

/// Keep every token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Full;

impl Options for Full {
    const NAME: &'static str = "full";
}

impl EvictionPolicy for Full {
    fn budget(&self, _: &PromptSpans) -> Result<Option<Budget>> {
        Ok(None)
    }

    fn needs(&self, _: &PromptSpans, _: usize) -> AttentionNeeds {
        AttentionNeeds::Nothing
    }

    fn scorer(&self, _: &PromptSpans, _: Sizes) -> Box<dyn TokenScorer> {
        Box::new(RecencyScorer::default())
    }

    fn side_bytes(&self, _: &PromptSpans, _: Sizes) -> usize {
        0
    }

    fn is_full(&self) -> bool {
        true
    }
}
