//! The question alone over the reused keys and values, and the scores that it gives to document tokens: the first pass of methods
//! that choose tokens before anything else is computed.

use std::fmt;
use std::sync::Arc;

use refrain_kv::stats::QuestionScore;

use crate::pass::planned;
use crate::{LayerView, Needs, Pass, PassPlan, PrefillInputs, PromptLayout, Result};

/// Scores of the document tokens, one vector a scored layer.
pub(crate) type LayerScores = Vec<Vec<f32>>;

/// A probe of the question alone.
struct QuestionProbe<F> {
    inputs: Arc<PrefillInputs>,
    plan: PassPlan,
    scores: LayerScores,
    next: F,
}

impl<F> fmt::Debug for QuestionProbe<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuestionProbe").field("plan", &self.plan).finish_non_exhaustive()
    }
}

impl<F: FnOnce(&PromptLayout, LayerScores) -> Box<dyn Pass> + Send> Pass for QuestionProbe<F> {
    fn plan(&self) -> &PassPlan {
        &self.plan
    }

    fn observe(&mut self, layer: &LayerView<'_>) -> Result<Vec<u32>> {
        self.scores.push(layer.question_attention.to_vec());
        Ok(layer.tokens.to_vec())
    }

    fn next(self: Box<Self>) -> Result<Option<Box<dyn Pass>>> {
        let QuestionProbe { inputs, scores, next, .. } = *self;
        Ok(Some(next(&inputs.layout, scores)))
    }
}

/// A probe of the question, scored at `layers`, which ascend, through the last of them. `next` makes the pass that follows from the
/// scores of each layer.
pub(crate) fn question_probe(
    inputs: &Arc<PrefillInputs>,
    layers: &[usize],
    score: impl Into<QuestionScore>,
    next: impl FnOnce(&PromptLayout, LayerScores) -> Box<dyn Pass> + Send + 'static,
) -> Box<dyn Pass> {
    Box::new(QuestionProbe {
        inputs: inputs.clone(),
        plan: probe_plan(inputs, layers, score),
        scores: Vec::new(),
        next,
    })
}

/// The plan of a probe of the question alone.
fn probe_plan(inputs: &PrefillInputs, layers: &[usize], score: impl Into<QuestionScore>) -> PassPlan {
    let needs = Needs { question_attention: Some(score.into()), ..Needs::default() };
    PassPlan {
        probe: layers.last().map(|last| last + 1),
        checks: layers.iter().map(|layer| (*layer, needs)).collect(),
        ..PassPlan::new(inputs.layout.required_tokens())
    }
}

/// A probe after which the `count` tokens of highest score, summed over `layers`, are recomputed at every layer; without a token to
/// recompute, the question alone at once.
pub(crate) fn recompute_best(
    inputs: &Arc<PrefillInputs>,
    layers: &[usize],
    score: impl Into<QuestionScore>,
    count: usize,
) -> Box<dyn Pass> {
    if count == 0 {
        return planned(PassPlan::new(inputs.layout.required_tokens()));
    }
    question_probe(inputs, layers, score, move |layout, scores| {
        let chosen = layout.top_reusable(&sum_of_layers(&scores), count);
        planned(PassPlan::new(layout.required_and(chosen)))
    })
}

/// A probe after which the prompt's chunks stand in ascending order of the share of their tokens that is among the `count` ones of
/// highest score, summed over `layers`. Chunks of which no token may be chosen come first, and equals stay in their order.
pub(crate) fn ordering_probe(
    inputs: &Arc<PrefillInputs>,
    layers: &[usize],
    score: impl Into<QuestionScore>,
    count: usize,
) -> Box<dyn Pass> {
    Box::new(OrderingProbe {
        inputs: inputs.clone(),
        plan: probe_plan(inputs, layers, score),
        scores: Vec::new(),
        count,
    })
}

/// A probe of the question alone that puts the chunks in order.
#[derive(Debug)]
struct OrderingProbe {
    inputs: Arc<PrefillInputs>,
    plan: PassPlan,
    scores: LayerScores,
    count: usize,
}

impl Pass for OrderingProbe {
    fn plan(&self) -> &PassPlan {
        &self.plan
    }

    fn observe(&mut self, layer: &LayerView<'_>) -> Result<Vec<u32>> {
        self.scores.push(layer.question_attention.to_vec());
        Ok(layer.tokens.to_vec())
    }

    fn order(&self) -> Option<Vec<usize>> {
        let layout = &self.inputs.layout;
        let chosen = layout.top_reusable(&sum_of_layers(&self.scores), self.count);
        let density = |chunk: &usize| {
            let span = layout.chunks[*chunk].span;
            let within = chosen.iter().filter(|token| span.contains(**token)).count();
            within as f64 / span.len().max(1) as f64
        };
        let mut order: Vec<usize> = (0..layout.chunks.len()).collect();
        order.sort_by(|a, b| density(a).total_cmp(&density(b)));
        Some(order)
    }
}

/// The sum of the layers' scores of each document token.
pub(crate) fn sum_of_layers(scores: &[Vec<f32>]) -> Vec<f32> {
    let mut sums = vec![0.0; scores.first().map_or(0, Vec::len)];
    for layer in scores {
        sums.iter_mut().zip(layer).for_each(|(sum, score)| *sum += score);
    }
    sums
}
