//! InfoFlow KV (arXiv 2603.05353; the authors' code is MIT): the question is computed over the reused keys and values, at their true
//! positions, up to the last of some middle layers, and the tokens to which those send the most attention are recomputed.
//!
//! `a[l,j,t]` is the mean over heads of the attention that question row `j` gives to token `t` at layer `l`, with one softmax over all
//! keys that the row sees; `s[l,t] = √(Σ_j a[l,j,t]²)`, and a token's score is the mean over the scored layers. The best
//! `floor(r·T)` of the `T` document tokens and the question go through all layers. The scripts score layers 22 to 25 of models with
//! 40; the share of depth, 0.55 to 0.65, is this project's translation. With `reorder` a first probe puts chunks in ascending order of
//! the density of tokens that it would choose, so that the densest stands nearest the question, and the method begins anew. That
//! changes the prompt: another order is another prompt for vanilla as well. Here that probe sees keys at their true
//! positions; in the scripts, at those of their chunks.

use std::sync::Arc;

use refrain_kv::stats::{Aggregation, QuestionScore, Rows, Softmax};
use refrain_kv::top_count;
use refrain_registry::Options;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::pass::planned;
use crate::probe::{ordering_probe, recompute_best};
use crate::scout::{check_depth, layers_between};
use crate::{FusionMethod, Pass, PassPlan, PrefillInputs, PromptLayout, Result};

/// Recompute the tokens to which the question's rows send the most attention in middle layers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct InfoFlow {
    /// Share of the document tokens that is recomputed.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub ratio: f64,
    /// Share of the documents' rows (tokens × layers) that is computed, the question's first pass included; in place of `ratio`
    /// where it is not 0.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub charge: f64,
    /// The first scored layer, as a share of the model's depth.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub from: f64,
    /// The end of the scored layers, as a share of the model's depth.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub to: f64,
    /// Whether the chunks in which most tokens would be chosen are put nearest the question first.
    pub reorder: bool,
}

impl Default for InfoFlow {
    fn default() -> Self {
        InfoFlow { ratio: 0.15, charge: 0.0, from: 0.55, to: 0.65, reorder: false }
    }
}

impl Options for InfoFlow {
    const NAME: &'static str = "info_flow";

    fn validate(&self) -> refrain_registry::Result<()> {
        check_depth(Self::NAME, self.from, self.to)
    }
}

impl InfoFlow {
    /// Document tokens that are recomputed, where probes of the question go through `probed` layers together.
    fn count(&self, layout: &PromptLayout, probed: usize) -> usize {
        match self.charge {
            0.0 => top_count(self.ratio, layout.documents().len(), layout.reusable()),
            charge => layout.count_for_charge(charge, 0, probed),
        }
    }
}

impl FusionMethod for InfoFlow {
    fn start(&self, inputs: &Arc<PrefillInputs>) -> Result<Box<dyn Pass>> {
        let layout = &inputs.layout;
        layout.check()?;
        if layout.reusable() == 0 {
            return Ok(planned(PassPlan::new(layout.required_tokens())));
        }
        let layers = inputs
            .layers_of_choice(layers_between(self.from, self.to, layout.layers), layout.question.start)?;
        let orders = self.reorder && !inputs.reordered && layout.inexact_chunks().count() > 1;
        let probes = if self.reorder && (orders || inputs.reordered) { 2 } else { 1 };
        let count = self.count(layout, probes * (layers[layers.len() - 1] + 1));
        let (rows, aggregation) = (Rows::Question, Aggregation::L2);
        let score = QuestionScore { softmax: Softmax::Prompt, rows, aggregation };
        if orders && count > 0 {
            return Ok(ordering_probe(inputs, &layers, score, count));
        }
        Ok(recompute_best(inputs, &layers, score, count))
    }

    fn max_rows(&self, layout: &PromptLayout) -> usize {
        let probed = layers_between(self.from, self.to, layout.layers).start + 1;
        layout.required_tokens().len() + self.count(layout, probed)
    }

    fn reorders(&self) -> bool {
        self.reorder
    }
}
