//! Inputs for tests of what methods plan.

use std::sync::Arc;

use refrain_kv::{Rope, Ropes};

use crate::{LayerView, ModelFacts, PrefillInputs, PromptLayout};

/// Inputs of a model of one head, whose layers have these windows; no chunk has statistics.
pub(crate) fn inputs(layout: PromptLayout, windows: Vec<Option<usize>>) -> Arc<PrefillInputs> {
    let ropes = Ropes::shared(Rope::new(vec![1.0], 1.0), layout.layers);
    let model = ModelFacts { heads: 1, kv_heads: 1, head_dim: 2, ropes, windows, stable_layers: None };
    let statistics = vec![Vec::new(); layout.chunks.len()];
    Arc::new(PrefillInputs { layout, model, max_tokens: 1000, statistics, reordered: false })
}

/// A layer that computes these tokens, with the question's attention and nothing else.
pub(crate) fn layer_view<'a>(
    inputs: &'a PrefillInputs,
    layer: usize,
    tokens: &'a [u32],
    question_attention: &'a [f32],
) -> LayerView<'a> {
    LayerView { layer, layout: &inputs.layout, tokens, question_attention, deviation: &[], mean_query: &[] }
}
