//! A policy's needs from attention, and the reports of attention to its scorers.

/// The reports that a policy's scorers need of attention. A policy states them once for a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AttentionNeeds {
    /// No report: attention stays fused.
    Nothing,
    /// The weights that each token receives, summed over the last `rows` rows of the prompt; no report while decoding.
    PromptSums {
        /// Rows at the prompt's end.
        rows: usize,
    },
    /// The weights that each token receives, summed over all rows of the prompt; then the weights of each step.
    Sums,
    /// Sums as in [`AttentionNeeds::Sums`] of `softmax((logit + g) / τ)`, `g` Gumbel noise.
    NoisySums {
        /// Seed of the noise; none for no noise.
        seed: Option<u64>,
        /// Temperature.
        tau: Tau,
    },
    /// The weights of each of the prompt's last `rows` rows; then those of each step.
    RowWeights {
        /// Rows at the prompt's end.
        rows: usize,
    },
    /// The rotated queries of the prompt's last `rows` rows; then those of each step.
    Queries {
        /// Rows at the prompt's end.
        rows: usize,
    },
}

impl AttentionNeeds {
    /// The seed of noise, if there is some, where the sums over the prompt's rows are of weights that attention itself has, or that noise
    /// multiplies: at temperature 1.
    pub fn sums_beside_attention(&self) -> Option<Option<u64>> {
        match self {
            AttentionNeeds::Sums => Some(None),
            AttentionNeeds::NoisySums { seed, tau } if tau.at(0) == 1.0 => Some(*seed),
            _ => None,
        }
    }
}

/// A temperature that rises with every step of decoding: `min(start + step·i, end)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tau {
    /// The temperature of the prompt.
    pub start: f32,
    /// The increase at every step.
    pub step: f32,
    /// The highest temperature.
    pub end: f32,
}

impl Tau {
    /// The temperature at step `i` of decoding, from 1; 0 is the prompt.
    pub fn at(&self, i: usize) -> f32 {
        (self.start + self.step * i as f32).min(self.end)
    }
}

/// Attention's report on some rows at one layer. Fields that the policy did not ask for are empty.
#[derive(Clone, Copy, Debug)]
pub struct AttentionReport<'a> {
    /// Positions of the rows, ascending.
    pub rows: &'a [u32],
    /// Number of tokens that each row sees.
    pub seen: &'a [u32],
    /// Weights summed over the query heads of a head: `heads × rows × len`, or `heads × 1 × len` of needs that are sums over
    /// rows.
    pub weights: &'a [f32],
    /// Rotated queries, `rows × query heads × d`.
    pub queries: &'a [f32],
}
