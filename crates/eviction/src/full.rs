//! Full attention: nothing is evicted.

use refrain_registry::Options;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Budget, EvictionPolicy, Observation, PromptSpans, Recent, Result, Sizes, Statistics};

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

    fn observes(&self, _: &PromptSpans) -> Observation {
        Observation::Nothing
    }

    fn statistics(&self, _: &PromptSpans, _: Sizes) -> Box<dyn Statistics> {
        Box::new(Recent::default())
    }

    fn is_full(&self) -> bool {
        true
    }
}
