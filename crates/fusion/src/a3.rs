//! A³, attention-aware accurate KV cache fusion (arXiv 2511.17560): tokens that the question attends to at layer 1
//! are recomputed.
//!
//! Layer 0 runs in full; at layer 1 all rows are projected, and eq. 3 scores every document token:
//! `z[j,t] = Σ_h q[j,h]·k[t,h/G] / √(H·d)`, `a = softmax_t(z)` over documents and question, `s[t] = Σ_j a[j,t]`,
//! smoothed over 5 tokens. The `p = floor(r·(n−|Q|))` best go on with the question.

use std::sync::Arc;

use refrain_kv::stats::{Softmax, smooth};
use refrain_registry::{MAX_COUNT, Options};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::pass::{planned, selecting};
use crate::{Error, FusionMethod, Needs, Pass, PassPlan, PrefillInputs, Result};

/// Recompute the tokens that the question attends to.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct A3 {
    /// Share of the tokens before the question that is recomputed.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub ratio: f64,
    /// Share of the documents' rows (tokens × layers) that is computed, the layers in full included; in place of `ratio` where it is
    /// not 0.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub charge: f64,
    /// Tokens of the moving average over scores: an odd number, 1 for none.
    #[schemars(range(min = 1, max = 1023))]
    pub smoothing: usize,
    /// One softmax over concatenated heads (concatenated, the paper's), or one a head: over documents and question (per_head), over
    /// the documents alone (documents), or over all that a row sees, the system part included (prompt).
    pub softmax: Softmax,
    /// The layer whose attention is scored, from 0; if its window is shorter than the documents, the next one that sees all.
    #[schemars(range(max = MAX_COUNT))]
    pub check_layer: usize,
}

impl Default for A3 {
    fn default() -> Self {
        A3 { ratio: 0.15, charge: 0.0, smoothing: 5, softmax: Softmax::Concatenated, check_layer: 1 }
    }
}

impl Options for A3 {
    const NAME: &'static str = "a3";

    fn validate(&self) -> refrain_registry::Result<()> {
        if self.smoothing.is_multiple_of(2) {
            let expected = "an odd number of tokens, 1023 at most";
            return Err(refrain_registry::Error::bad_value(
                Self::NAME,
                "smoothing",
                self.smoothing,
                expected,
            ));
        }
        Ok(())
    }
}

impl FusionMethod for A3 {
    fn start(&self, inputs: &Arc<PrefillInputs>) -> Result<Box<dyn Pass>> {
        let layout = &inputs.layout;
        layout.check()?;
        if self.check_layer >= layout.layers {
            return Err(Error::CheckLayer { layer: self.check_layer, layers: layout.layers });
        }
        if layout.reusable() == 0 {
            return Ok(planned(PassPlan::new(layout.required_tokens())));
        }
        // A layer whose window hides documents cannot choose among their tokens: the next one that sees them all does.
        let check_layer =
            inputs.layers_of_choice(self.check_layer..self.check_layer + 1, layout.question.start)?[0];
        let mut plan = PassPlan::new(layout.full_tokens());
        let needs = Needs { question_attention: Some(self.softmax.into()), ..Needs::default() };
        plan.checks.insert(check_layer, needs);
        let smoothing = self.smoothing;
        let count = match self.charge {
            0.0 => layout.count(self.ratio),
            charge => layout.count_for_charge(charge, check_layer + 1, 0),
        };
        Ok(selecting(plan, move |layer| {
            let smoothed = smooth(layer.question_attention, smoothing);
            let start = layer.layout.documents().start;
            let candidates = layer.candidates();
            let scores: Vec<f32> = candidates.iter().map(|t| smoothed[(t - start) as usize]).collect();
            layer.best(&candidates, &scores, count)
        }))
    }
}
