//! ProphetKV (arXiv 2602.02579): the question is computed over the reused keys and values first, and the document tokens that it
//! attends to most, over all layers, are recomputed.
//!
//! First pass: only the question, through all layers. At layer `l` token `t` gets
//! `α[l,t] = mean over question tokens and heads of the softmax over document keys alone`, so that the keys of the system part
//! cannot take the attention away. `s[t] = mean_l α[l,t]`. Second pass: the best `floor(r·T)` of the `T` reusable document tokens
//! and the question go through all layers, from layer 0. The paper's default is `r = 0.2`. The authors' code was
//! not at hand.

use std::sync::Arc;

use refrain_kv::stats::Softmax;
use refrain_kv::top_count;
use refrain_registry::Options;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::pass::planned;
use crate::probe::recompute_best;
use crate::{FusionMethod, Pass, PassPlan, PrefillInputs, PromptLayout, Result};

/// Recompute the tokens that the question attends to over all layers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ProphetKv {
    /// Share of the document tokens that is recomputed.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub ratio: f64,
    /// Share of the documents' rows (tokens × layers) that is computed, the question's first pass included; in place of `ratio` where it is
    /// not 0.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub charge: f64,
}

impl Default for ProphetKv {
    fn default() -> Self {
        ProphetKv { ratio: 0.2, charge: 0.0 }
    }
}

impl Options for ProphetKv {
    const NAME: &'static str = "prophet_kv";
}

impl ProphetKv {
    /// Document tokens that are recomputed.
    fn count(&self, layout: &PromptLayout) -> usize {
        match self.charge {
            0.0 => top_count(self.ratio, layout.reusable(), layout.reusable()),
            charge => layout.count_for_charge(charge, 0, layout.layers),
        }
    }
}

impl FusionMethod for ProphetKv {
    fn start(&self, inputs: &Arc<PrefillInputs>) -> Result<Box<dyn Pass>> {
        let layout = &inputs.layout;
        layout.check()?;
        if layout.reusable() == 0 {
            return Ok(planned(PassPlan::new(layout.required_tokens())));
        }
        let layers = inputs.layers_of_choice(0..layout.layers, layout.question.start)?;
        Ok(recompute_best(inputs, &layers, Softmax::Documents, self.count(layout)))
    }

    fn max_rows(&self, layout: &PromptLayout) -> usize {
        layout.required_tokens().len() + self.count(layout)
    }
}
