//! StreamingLLM (arXiv 2309.17453): the first tokens, which attention uses as sinks, and the most recent ones.

use refrain_registry::Error;

use crate::{Budget, EvictionPolicy, Observation, PromptSpans, Recent, Result, Sizes, Statistics};

/// Keep the first `sinks` and the most recent tokens.
#[derive(Clone, Copy, Debug)]
pub struct StreamingLlm {
    /// Tokens that stay, `C`: `sinks` and the last `C − sinks`.
    pub capacity: usize,
    /// Tokens at the start.
    pub sinks: usize,
    /// Rotate keys by their places in the cache (the paper's), or leave them at their positions (kvpress's).
    pub reindex: bool,
}

impl Default for StreamingLlm {
    fn default() -> Self {
        StreamingLlm { capacity: 1024, sinks: 4, reindex: true }
    }
}

impl EvictionPolicy for StreamingLlm {
    fn budget(&self, _: &PromptSpans) -> Result<Option<Budget>> {
        let StreamingLlm { capacity, sinks, .. } = *self;
        if sinks >= capacity {
            let clash = format!(
                "capacity {capacity} leaves no room beside {sinks} sinks: choose a capacity above the sinks"
            );
            return Err(Error::Clash { owner: "streaming_llm", clash });
        }
        Ok(Some(Budget::constant(capacity)))
    }

    fn observes(&self, _: &PromptSpans) -> Observation {
        Observation::Nothing
    }

    fn statistics(&self, _: &PromptSpans, _: Sizes) -> Box<dyn Statistics> {
        Box::new(Recent { sinks: self.sinks })
    }

    fn sinks(&self) -> Option<usize> {
        self.reindex.then_some(self.sinks)
    }
}
