//! Keyformer (arXiv 2403.09054): H2O with Gumbel noise on the logits before the softmax that scores, and a temperature
//! that rises while decoding. Attention itself stays clean.
//!
//! `acc[t] += Σ softmax((logit + g) / τ)`, `g = −ln(−ln U)`.

use refrain_registry::{Error, MAX_COUNT, Options, zero_is_none};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::accumulated_attention::AccumulatedAttention;
use crate::{AttentionNeeds, Budget, EvictionPolicy, PromptSpans, Result, Sizes, Tau, TokenScorer};

/// Options of Keyformer: keep key tokens by noisy attention, and recent tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Keyformer {
    /// Share of the prompt's tokens that stay in the cache.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub keep: f64,
    /// Tokens that stay in the cache, instead of a share; 0 for the share.
    #[serde(with = "zero_is_none")]
    #[schemars(with = "usize", range(max = MAX_COUNT))]
    pub capacity: Option<usize>,
    /// Share of the tokens that stay for the most recent, at least one.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub recent_share: f64,
    /// Temperature of the scoring softmax for the prompt.
    #[schemars(range(min = 0.0, max = 1e9))]
    pub tau: f64,
    /// Increase of the temperature at each step; 0 for one that reaches `tau_end` with the last token that the answer may have.
    #[schemars(range(min = 0.0, max = 1e9))]
    pub tau_step: f64,
    /// The highest temperature.
    #[schemars(range(min = 0.0, max = 1e9))]
    pub tau_end: f64,
    /// Add Gumbel noise to logits.
    pub noise: bool,
    /// Seed of the noise.
    #[schemars(range(max = MAX_COUNT))]
    pub noise_seed: u64,
}

impl Default for Keyformer {
    fn default() -> Self {
        Keyformer {
            keep: 0.6,
            capacity: None,
            recent_share: 0.3,
            tau: 1.0,
            tau_step: 0.0,
            tau_end: 2.0,
            noise: true,
            noise_seed: 0,
        }
    }
}

impl Options for Keyformer {
    const NAME: &'static str = "keyformer";

    fn validate(&self) -> Result<()> {
        let Keyformer { tau, tau_step, tau_end, .. } = *self;
        if !(tau > 0.0 && tau_step >= 0.0 && tau_end >= tau) {
            let conflict = format!(
                "temperatures go from {tau} to {tau_end} by {tau_step}: choose a start above 0, a step not below 0 and an end not below the start"
            );
            return Err(Error::conflict(Self::NAME, conflict));
        }
        Ok(())
    }
}

impl Keyformer {
    /// The temperature of an answer of at most `answer` tokens. The authors' runs let it rise over the whole answer.
    fn temperature(&self, answer: usize) -> Tau {
        let step = match self.tau_step {
            0.0 => (self.tau_end - self.tau) / answer.max(1) as f64,
            step => step,
        };
        Tau { start: self.tau as f32, step: step as f32, end: self.tau_end as f32 }
    }

    fn parts(&self, prompt: &PromptSpans) -> (usize, usize) {
        let share = refrain_kv::top_count(self.keep, prompt.len(), prompt.len());
        let kept = self.capacity.unwrap_or(share).max(1);
        (kept, refrain_kv::top_count(self.recent_share, kept, kept).max(1))
    }
}

impl EvictionPolicy for Keyformer {
    fn budget(&self, prompt: &PromptSpans) -> Result<Option<Budget>> {
        self.validate()?;
        Ok(Some(Budget::constant(self.parts(prompt).0)))
    }

    fn needs(&self, _: &PromptSpans, answer: usize) -> AttentionNeeds {
        AttentionNeeds::NoisySums {
            seed: self.noise.then_some(self.noise_seed),
            tau: self.temperature(answer),
        }
    }

    fn scorer(&self, prompt: &PromptSpans, sizes: Sizes) -> Box<dyn TokenScorer> {
        Box::new(AccumulatedAttention::new(sizes.heads, sizes.capacity, self.parts(prompt).1, false))
    }

    fn side_bytes(&self, _: &PromptSpans, sizes: Sizes) -> usize {
        AccumulatedAttention::bytes_of(sizes, false)
    }
}
