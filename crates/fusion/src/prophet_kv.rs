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
use refrain_kv::{top_count, top_k};
use refrain_registry::Options;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::pass::planned;
use crate::{FusionMethod, LayerView, Needs, Pass, PassPlan, PrefillInputs, Result};

/// Recompute the tokens that the question attends to over all layers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ProphetKv {
    /// Share of the document tokens that is recomputed.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub ratio: f64,
}

impl Default for ProphetKv {
    fn default() -> Self {
        ProphetKv { ratio: 0.2 }
    }
}

impl Options for ProphetKv {
    const NAME: &'static str = "prophet_kv";
}

impl FusionMethod for ProphetKv {
    fn start(&self, inputs: &Arc<PrefillInputs>) -> Result<Box<dyn Pass>> {
        let layout = &inputs.layout;
        layout.check()?;
        let required = PassPlan::new(layout.required_tokens());
        if top_count(self.ratio, layout.reusable(), layout.reusable()) == 0 {
            return Ok(planned(required));
        }
        let needs = Needs { question_attention: Some(Softmax::Documents), ..Needs::default() };
        let plan = PassPlan {
            probe: Some(layout.layers),
            checks: (0..layout.layers).map(|layer| (layer, needs)).collect(),
            ..required
        };
        let sums = vec![0.0; layout.documents().len()];
        Ok(Box::new(QuestionPass { ratio: self.ratio, inputs: inputs.clone(), plan, sums }))
    }
}

/// The question over the reused keys and values.
#[derive(Debug)]
struct QuestionPass {
    ratio: f64,
    inputs: Arc<PrefillInputs>,
    plan: PassPlan,
    /// Attention of each document token, summed over layers.
    sums: Vec<f32>,
}

impl Pass for QuestionPass {
    fn plan(&self) -> &PassPlan {
        &self.plan
    }

    fn observe(&mut self, layer: &LayerView<'_>) -> Result<Vec<u32>> {
        self.sums.iter_mut().zip(layer.question_attention).for_each(|(sum, weight)| *sum += weight);
        Ok(layer.tokens.to_vec())
    }

    fn next(self: Box<Self>) -> Result<Option<Box<dyn Pass>>> {
        let layout = &self.inputs.layout;
        let candidates: Vec<u32> = layout.cached_chunks().flat_map(|chunk| chunk.positions()).collect();
        let start = layout.documents().start;
        let scores: Vec<f32> = candidates.iter().map(|t| self.sums[(t - start) as usize]).collect();
        let count = top_count(self.ratio, candidates.len(), candidates.len());
        let mut tokens = layout.required_tokens();
        tokens.extend(top_k(&scores, count).into_iter().map(|i| candidates[i as usize]));
        tokens.sort_unstable();
        Ok(Some(planned(PassPlan::new(tokens))))
    }
}
