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
    /// Document tokens that are recomputed after a probe of so many layers.
    fn count(&self, layout: &PromptLayout, probed: usize) -> usize {
        match self.charge {
            0.0 => top_count(self.ratio, layout.reusable(), layout.reusable()),
            charge => layout.count_for_charge(charge, 0, probed),
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
        let probed = layers.last().map_or(layout.layers, |last| last + 1);
        Ok(recompute_best(inputs, &layers, Softmax::Documents, self.count(layout, probed)))
    }

    fn max_rows(&self, layout: &PromptLayout) -> usize {
        // The layers that can choose are known to the pass alone: the fewest leave the most tokens.
        layout.required_tokens().len() + self.count(layout, 1)
    }
}

#[cfg(test)]
mod tests {
    use refrain_kv::Span;

    use super::*;
    use crate::ChunkSpan;
    use crate::test_inputs::{inputs, layer_view};

    /// The last two layers have a window shorter than the documents, so that the probe ends before them.
    #[test]
    fn a_charge_buys_what_the_probe_does_not_take() {
        let layout = PromptLayout {
            layers: 10,
            system: Span::new(0, 2),
            system_cached: true,
            chunks: vec![ChunkSpan { span: Span::new(2, 102), ..ChunkSpan::default() }],
            question: Span::new(102, 112),
        };
        let windows = [vec![None; 8], vec![Some(4); 2]].concat();
        let (prophet, inputs) = (ProphetKv { charge: 0.3, ..ProphetKv::default() }, inputs(layout, windows));
        let mut pass = prophet.start(&inputs).unwrap();
        assert_eq!(pass.plan().probe, Some(8));
        let (tokens, scores) = (pass.plan().tokens.clone(), vec![0.5; 100]);
        for layer in 0..8 {
            pass.observe(&layer_view(&inputs, layer, &tokens, &scores)).unwrap();
        }
        // 30 % of 100 tokens at 10 layers are 300 rows; the probe takes 8 · 10 of them, which leaves 22 at each layer.
        let next = pass.next().unwrap().unwrap();
        assert_eq!(next.plan().tokens.len(), 10 + 22);
        assert!(next.plan().tokens.len() <= prophet.max_rows(&inputs.layout));
    }
}
