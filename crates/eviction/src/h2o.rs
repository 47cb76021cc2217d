//! H2O, heavy-hitter oracle (arXiv 2306.14048): the tokens that received most attention over all rows so far, and the
//! most recent ones. The score of an evicted token is lost.

use refrain_registry::Error;

use crate::sums::Sums;
use crate::{Budget, EvictionPolicy, Observation, PromptSpans, Result, Sizes, Statistics};

/// Keep heavy hitters and recent tokens.
#[derive(Clone, Copy, Debug)]
pub struct H2o {
    /// Tokens that stay: `recent` and `capacity − recent` heavy hitters.
    pub capacity: usize,
    /// The most recent tokens, which always stay; half of the capacity if not given.
    pub recent: Option<usize>,
    /// Shares of the prompt's tokens for heavy hitters and recent tokens, instead of the numbers above (the published
    /// code's `hf` mode).
    pub ratios: Option<(f64, f64)>,
    /// Divide a token's sum by the rows that could see it, as kvpress does.
    pub normalise: bool,
}

impl Default for H2o {
    fn default() -> Self {
        H2o { capacity: 1024, recent: None, ratios: None, normalise: false }
    }
}

impl H2o {
    /// Heavy hitters and recent tokens after this prompt.
    fn parts(&self, prompt: &PromptSpans) -> Result<(usize, usize)> {
        if let Some((heavy, recent)) = self.ratios {
            let share = |ratio| refrain_kv::top_count(ratio, prompt.len(), prompt.len());
            return Ok((share(heavy), share(recent).max(1)));
        }
        let recent = self.recent.unwrap_or((self.capacity / 2).max(1));
        if recent > self.capacity || self.capacity == 0 {
            let clash = format!(
                "capacity {} is below the {recent} recent tokens: choose at least as many",
                self.capacity
            );
            return Err(Error::Clash { owner: "h2o", clash });
        }
        Ok((self.capacity - recent, recent))
    }
}

impl EvictionPolicy for H2o {
    fn budget(&self, prompt: &PromptSpans) -> Result<Option<Budget>> {
        let (heavy, recent) = self.parts(prompt)?;
        Ok(Some(Budget::constant(heavy + recent)))
    }

    fn observes(&self, _: &PromptSpans) -> Observation {
        Observation::Sums
    }

    fn statistics(&self, prompt: &PromptSpans, sizes: Sizes) -> Box<dyn Statistics> {
        let recent = self.parts(prompt).map_or(0, |(_, recent)| recent);
        Box::new(Sums::new(sizes.heads, sizes.capacity, recent, self.normalise))
    }
}
