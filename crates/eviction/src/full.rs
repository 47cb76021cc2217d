//! Full attention: nothing is evicted.

use crate::{Budget, EvictionPolicy, Observation, PromptSpans, Recent, Result, Sizes, Statistics};

/// Keep every token.
#[derive(Clone, Copy, Debug, Default)]
pub struct Full;

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
