//! RelaxKV (arXiv 2609.33503): every layer picks the tokens that the question attends to there, and a token is recomputed only
//! up to the highest layer that picks it.
//!
//! First pass: only the question, over the reused keys and values, through all layers. `a[l,t]` is the mean over question tokens
//! and heads of the softmax over document keys, as in ProphetKV; layer `l` picks the `max(1, round(r·T))` tokens of highest
//! `a[l,t]` of the `T` reusable ones, `S_l`. Second pass: token `t` of `U = ∪ S_l` is computed at layers `0..=h_t`, `h_t` being
//! the highest layer that picks it; above it its cached key and value stand in. Recomputed tokens see, of the documents, those of
//! `U` alone; the question sees all. `r` counts a layer's tokens: layers pick different ones, so that several times as many are
//! computed. The authors' code was not at hand.

use std::sync::Arc;

use refrain_kv::Span;
use refrain_kv::stats::Softmax;
use refrain_registry::Options;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::pass::planned;
use crate::probe::question_probe;
use crate::{CachedTokens, FusionMethod, LayerTokens, Pass, PassPlan, PrefillInputs, PromptLayout, Result};

/// Recompute each token up to the highest layer at which the question attends to it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RelaxKv {
    /// Share of the document tokens that each layer picks.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub ratio: f64,
    /// Share of the documents' rows (tokens × layers) that is computed, the question's first pass included; in place of `ratio` where it is
    /// not 0.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub charge: f64,
}

impl Default for RelaxKv {
    fn default() -> Self {
        RelaxKv { ratio: 0.15, charge: 0.0 }
    }
}

impl Options for RelaxKv {
    const NAME: &'static str = "relax_kv";
}

impl FusionMethod for RelaxKv {
    fn start(&self, inputs: &Arc<PrefillInputs>) -> Result<Box<dyn Pass>> {
        let layout = &inputs.layout;
        layout.check()?;
        if layout.reusable() == 0 {
            return Ok(planned(PassPlan::new(layout.required_tokens())));
        }
        let RelaxKv { ratio, charge } = *self;
        // Each layer chooses for itself, among the tokens that it sees.
        let layers: Vec<usize> = (0..layout.layers).collect();
        Ok(question_probe(inputs, &layers, Softmax::Documents, move |layout, scores| {
            let picks = |count: usize| fresh_tokens(layout, &scores, count);
            let count = match charge {
                0.0 => (ratio * layout.reusable() as f64).round().max(1.0) as usize,
                charge => {
                    // The most tokens a layer of which all layers together stay within the budget.
                    let most = layout.count_for_charge(charge, 0, layout.layers) * layout.layers;
                    let fits = |count: &usize| picks(*count).iter().map(Vec::len).sum::<usize>() <= most;
                    let (mut low, mut high) = (0, layout.reusable() + 1);
                    while low + 1 < high {
                        let middle = low.midpoint(high);
                        if fits(&middle) { low = middle } else { high = middle }
                    }
                    low
                }
            };
            last_pass(layout, picks(count))
        }))
    }

    fn selects(&self) -> bool {
        true
    }
}

/// The tokens that are fresh at each layer, ascending: those that it or a layer above it picks, `count` a layer. Of a part of the tokens a
/// layer picks none that no row of the question sees, as behind a window, where the score is 0.
fn fresh_tokens(layout: &PromptLayout, scores: &[Vec<f32>], count: usize) -> Vec<Vec<u32>> {
    let (mut fresh, mut union) = (Vec::new(), Vec::new());
    let (start, all) = (layout.documents().start, count >= layout.reusable());
    for scores in scores.iter().rev() {
        let picked = layout.top_reusable(scores, count).into_iter();
        union.extend(picked.filter(|token| all || scores[(token - start) as usize] > 0.0));
        union.sort_unstable();
        union.dedup();
        fresh.push(union.clone());
    }
    fresh.reverse();
    fresh
}

/// The pass in which the tokens of `fresh` are computed at their layers.
fn last_pass(layout: &PromptLayout, fresh: Vec<Vec<u32>>) -> Box<dyn Pass> {
    let all: Vec<Span> = layout.chunk_spans().collect();
    let union = fresh.first().cloned().unwrap_or_default();
    let seen: Vec<Span> = union.iter().map(|t| Span { start: *t, end: t + 1 }).collect();
    let layer = |layer: usize| LayerTokens {
        question_sees: all.clone(),
        documents_see: seen.clone(),
        written: fresh[layer].clone(),
        continuing: fresh.get(layer + 1).cloned().unwrap_or_default(),
    };
    let cached = CachedTokens::Selected((0..layout.layers).map(layer).collect());
    planned(PassPlan { cached, ..PassPlan::new(layout.required_and(union)) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ChunkSpan;
    use crate::test_inputs::{inputs, layer_view};

    /// The last pass, where each of three layers looks at tokens of two chunks (4..10, 10..14) as `attention` says.
    fn last(ratio: f64, attention: [[f32; 10]; 3]) -> PassPlan {
        let chunk = |start, end| ChunkSpan { span: Span::new(start, end), ..ChunkSpan::default() };
        let layout = PromptLayout {
            layers: 3,
            system: Span::new(0, 4),
            system_cached: true,
            chunks: vec![chunk(4, 10), chunk(10, 14)],
            question: Span::new(14, 16),
        };
        let inputs = inputs(layout, vec![None; 3]);
        let mut pass = RelaxKv { ratio, charge: 0.0 }.start(&inputs).unwrap();
        let tokens = pass.plan().tokens.clone();
        assert_eq!(tokens, [14, 15], "the question alone");
        for (layer, attention) in attention.iter().enumerate() {
            let view = layer_view(&inputs, layer, &tokens, attention);
            assert_eq!(pass.observe(&view).unwrap(), tokens);
        }
        let last = pass.next().unwrap().unwrap();
        last.plan().clone()
    }

    #[test]
    fn a_token_goes_up_to_the_highest_layer_that_picks_it_and_sees_the_picked_ones() {
        // The first layer picks 5 and 13 of ten tokens. The second layer picks 5 and 6. The third layer picks 12 and 6.
        let at = |a: usize, b: usize| {
            let mut attention = [0.1; 10];
            (attention[a - 4], attention[b - 4]) = (0.8, 0.7);
            attention
        };
        let plan = last(0.2, [at(5, 13), at(5, 6), at(12, 6)]);
        assert_eq!(plan.tokens, [5, 6, 12, 13, 14, 15]);
        assert_eq!(plan.probe, None);
        let CachedTokens::Selected(layers) = plan.cached else { panic!("layers have tokens of their own") };
        let written: Vec<&[u32]> = layers.iter().map(|layer| layer.written.as_slice()).collect();
        assert_eq!(written, [&[5, 6, 12, 13][..], &[5, 6, 12], &[6, 12]]);
        let continuing: Vec<&[u32]> = layers.iter().map(|layer| layer.continuing.as_slice()).collect();
        assert_eq!(continuing, [&[5, 6, 12][..], &[6, 12], &[]]);
        for layer in &layers {
            let seen: Vec<u32> = layer.documents_see.iter().flat_map(|span| span.positions()).collect();
            assert_eq!(seen, [5, 6, 12, 13]);
            assert_eq!(layer.question_sees, [Span::new(4, 10), Span::new(10, 14)]);
        }
    }

    #[test]
    fn every_layer_picks_one_token_at_least() {
        let mut attention = [0.1; 10];
        attention[9] = 0.5;
        assert_eq!(last(0.0, [attention; 3]).tokens, [13, 14, 15]);
    }

    /// Behind a window the question's rows see the last two tokens alone.
    #[test]
    fn a_layer_picks_no_token_that_the_question_does_not_see() {
        let near = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.4, 0.6];
        let written = |plan: PassPlan| match plan.cached {
            CachedTokens::Selected(layers) => layers[2].written.clone(),
            CachedTokens::All => panic!("a part of the documents is read"),
        };
        assert_eq!(written(last(0.5, [[0.1; 10], [0.1; 10], near])), [12, 13]);
        let all: Vec<u32> = (4..14).collect();
        assert_eq!(written(last(1.0, [[0.1; 10], [0.1; 10], near])), all, "all tokens are vanilla's");
    }
}
