//! Drift: what the recomputed tokens show of how far their chunk has drifted corrects its other tokens.
//!
//! Tokens are chosen as [`Scout`] chooses them, but for a share `spread` that stands evenly over the documents: what the question
//! looks at most is of its own kind in texts that repeat themselves, and says little of the rest. At each layer from 1 on, before
//! attention, `d_t = fresh − cached` of the recomputed tokens `R` (keys before RoPE, and values); `g = mean_R d`, and for every
//! chunk `c` `m_c = (Σ_{t∈R∩c} d_t + λ·g) / (|R∩c| + λ)`. Every reused token `t` of a chunk gets `K_t += RoPE_t(α·m_c)` and
//! `V_t += α·m_c`; the recomputed ones have their own, exact rows. The answer is decoded over the corrected cache. Layer 0 needs no
//! correction: its keys and values depend on the token alone.
//!
//! The first tokens of a chunk that was prefilled behind nothing are left out of `d_t`: they drew the attention that the first tokens
//! of any prompt draw, and change as no other token does.
//!
//! Reading the oracles says why: true keys and values at the chosen tokens are no better than recomputing them, so that what is
//! left of the error lies in the rows that are not chosen, and a good part of it is one direction a chunk.

use std::sync::Arc;

use refrain_kv::stats::{Aggregation, Rows};
use refrain_registry::{MAX_COUNT, Options};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::scout::check_depth;
use crate::{
    ChunkChange, Correction, FusionMethod, Pass, PassPlan, PrefillInputs, PromptLayout, Result, Scout,
};

/// First tokens of a chunk that may be attention sinks of their own.
const SINKS: usize = 4;

/// Recompute the tokens that the prompt's last row attends to, and correct the others by what those show.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Drift {
    /// Share of the documents' rows (tokens × layers) that is computed, the question's first pass included.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub charge: f64,
    /// Rows of the question whose attention counts: the last one, or all.
    pub rows: Rows,
    /// The first scored layer, as a share of the model's depth.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub from: f64,
    /// The end of the scored layers, as a share of the model's depth.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub to: f64,
    /// The way from the weights of rows and heads to one score.
    pub aggregation: Aggregation,
    /// First tokens of each chunk that are recomputed in any case, within the budget.
    #[schemars(range(max = MAX_COUNT))]
    pub seam: usize,
    /// Share of the recomputed tokens that stand evenly over the documents, whatever the question looks at.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub spread: f64,
    /// Share of the estimated change that is added, α.
    #[schemars(range(min = 0.0, max = 2.0))]
    pub alpha: f64,
    /// Tokens that the mean change of all chunks counts as beside a chunk's own, λ.
    #[schemars(range(min = 0.0, max = 1_048_576.0))]
    pub lambda: f64,
}

impl Default for Drift {
    fn default() -> Self {
        let Scout { charge, rows, from, to, aggregation, seam } = Scout::default();
        Drift { charge, rows, from, to, aggregation, seam, spread: 0.1, alpha: 0.5, lambda: 4.0 }
    }
}

impl Options for Drift {
    const NAME: &'static str = "drift";

    fn validate(&self) -> refrain_registry::Result<()> {
        check_depth(Self::NAME, self.from, self.to)
    }
}

impl Drift {
    /// The choice of the recomputed tokens, but for [`Drift::spread`].
    fn scout(&self) -> Scout {
        let Drift { charge, rows, from, to, aggregation, seam, .. } = *self;
        Scout { charge, rows, from, to, aggregation, seam }
    }
}

impl FusionMethod for Drift {
    fn start(&self, inputs: &Arc<PrefillInputs>) -> Result<Box<dyn Pass>> {
        let Drift { spread, alpha, lambda, .. } = *self;
        self.scout().start_with(inputs, spread, move |plan| {
            Box::new(CorrectingPass {
                plan: PassPlan { corrects: Some(Correction { skip: SINKS }), ..plan },
                alpha,
                lambda,
            })
        })
    }

    fn max_rows(&self, layout: &PromptLayout) -> usize {
        self.scout().max_rows(layout)
    }
}

/// The last pass.
#[derive(Debug)]
struct CorrectingPass {
    plan: PassPlan,
    alpha: f64,
    lambda: f64,
}

impl Pass for CorrectingPass {
    fn plan(&self) -> &PassPlan {
        &self.plan
    }

    fn correct(&self, _layer: usize, changes: &mut [ChunkChange]) {
        let tokens = changes.iter().map(|change| change.tokens).sum();
        correct(changes, tokens, (self.alpha as f32, self.lambda as f32), |change| &mut change.keys);
        correct(changes, tokens, (self.alpha as f32, self.lambda as f32), |change| &mut change.values);
    }
}

/// The sums of one side become what each chunk gets.
fn correct(
    changes: &mut [ChunkChange],
    tokens: usize,
    (alpha, lambda): (f32, f32),
    side: impl Fn(&mut ChunkChange) -> &mut Vec<f32>,
) {
    let width = changes.first_mut().map_or(0, |change| side(change).len());
    let mut mean = vec![0.0; width];
    for change in changes.iter_mut() {
        mean.iter_mut().zip(side(change).iter()).for_each(|(sum, x)| *sum += x);
    }
    let of_all = 1.0 / tokens.max(1) as f32;
    for change in changes {
        // Without λ a chunk of which no token is recomputed has no estimate.
        let weight = change.tokens as f32 + lambda;
        let scale = if weight > 0.0 { alpha / weight } else { 0.0 };
        for (x, mean) in side(change).iter_mut().zip(&mean) {
            *x = (*x + lambda * mean * of_all) * scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_gets_its_own_mean_change_drawn_towards_that_of_all() {
        let change = |tokens, keys: [f32; 2]| ChunkChange {
            tokens,
            keys: keys.to_vec(),
            values: keys.map(|x| 10.0 * x).to_vec(),
        };
        let pass = |lambda| CorrectingPass { plan: PassPlan::default(), alpha: 0.5, lambda };
        // Sums over 2, 1 and 0 tokens; the mean of all three tokens is (3, 1).
        let all = [change(2, [6.0, 0.0]), change(1, [3.0, 3.0]), change(0, [0.0, 0.0])];
        let mut changes = all.clone();
        pass(4.0).correct(1, &mut changes);
        let expected = [[1.5, 0.5 * 4.0 / 6.0], [1.5, 0.5 * 7.0 / 5.0], [1.5, 0.5]];
        for (change, expected) in changes.iter().zip(expected) {
            for (i, expected) in expected.into_iter().enumerate() {
                assert!((change.keys[i] - expected).abs() < 1e-6, "{changes:?}");
                assert!((change.values[i] - 10.0 * expected).abs() < 1e-5, "{changes:?}");
            }
        }
        let mut alone = all;
        pass(0.0).correct(1, &mut alone);
        assert_eq!(alone.map(|change| change.keys), [[1.5, 0.0], [1.5, 1.5], [0.0, 0.0]].map(Vec::from));
    }
}
