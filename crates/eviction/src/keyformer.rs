//! Keyformer (arXiv 2403.09054): H2O with Gumbel noise on the logits before the softmax that scores, and a temperature
//! that rises while decoding. Attention itself stays clean.
//!
//! `acc[t] += Σ softmax((logit + g) / τ)`, `g = −ln(−ln U)`.

use refrain_registry::Error;

use crate::sums::Sums;
use crate::{Budget, EvictionPolicy, Observation, PromptSpans, Result, Sizes, Statistics, Tau};

/// Keep key tokens by noisy attention, and recent tokens.
#[derive(Clone, Copy, Debug)]
pub struct Keyformer {
    /// Share of the prompt's tokens that stay, `B = floor(n·ratio)`; fixed with the prompt.
    pub ratio: f64,
    /// Tokens that stay, instead of a share.
    pub capacity: Option<usize>,
    /// Share of them that are the most recent, `floor(recent·B)`, one at least.
    pub recent: f64,
    /// Temperature.
    pub tau: Tau,
    /// Seed of the noise; none for no noise.
    pub seed: Option<u64>,
}

impl Default for Keyformer {
    fn default() -> Self {
        let tau = Tau { start: 1.0, step: 0.01, end: 2.0 };
        Keyformer { ratio: 0.6, capacity: None, recent: 0.3, tau, seed: Some(0) }
    }
}

impl Keyformer {
    fn parts(&self, prompt: &PromptSpans) -> (usize, usize) {
        let share = refrain_kv::top_count(self.ratio, prompt.len(), prompt.len());
        let kept = self.capacity.unwrap_or(share).max(1);
        (kept, refrain_kv::top_count(self.recent, kept, kept).max(1))
    }
}

impl EvictionPolicy for Keyformer {
    fn budget(&self, prompt: &PromptSpans) -> Result<Option<Budget>> {
        let Tau { start, step, end } = self.tau;
        if !(start > 0.0 && step >= 0.0 && end >= start) {
            let clash = format!(
                "temperatures go from {start} to {end} by {step}: choose a start above 0, a step not below 0 and an end not below the start"
            );
            return Err(Error::Clash { owner: "keyformer", clash });
        }
        Ok(Some(Budget::constant(self.parts(prompt).0)))
    }

    fn observes(&self, _: &PromptSpans) -> Observation {
        Observation::NoisySums { seed: self.seed, tau: self.tau }
    }

    fn statistics(&self, prompt: &PromptSpans, sizes: Sizes) -> Box<dyn Statistics> {
        Box::new(Sums::new(sizes.heads, sizes.capacity, self.parts(prompt).1, false))
    }
}
