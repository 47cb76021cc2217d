//! The question alone over the reused keys and values, and the scores that it gives to document tokens: the first pass of methods
//! that choose tokens before anything else is computed.

use std::fmt;
use std::ops::Range;
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

/// A probe of the question through the layers below `layers.end`, scored at `layers`. `next` makes the pass that follows from the
/// scores of each layer.
pub(crate) fn question_probe(
    inputs: &Arc<PrefillInputs>,
    layers: Range<usize>,
    score: impl Into<QuestionScore>,
    next: impl FnOnce(&PromptLayout, LayerScores) -> Box<dyn Pass> + Send + 'static,
) -> Box<dyn Pass> {
    let needs = Needs { question_attention: Some(score.into()), ..Needs::default() };
    let plan = PassPlan {
        probe: Some(layers.end),
        checks: layers.map(|layer| (layer, needs)).collect(),
        ..PassPlan::new(inputs.layout.required_tokens())
    };
    Box::new(QuestionProbe { inputs: inputs.clone(), plan, scores: Vec::new(), next })
}

/// A probe after which the `count` tokens of highest score, summed over `layers`, are recomputed at every layer; without a token to
/// recompute, the question alone at once.
pub(crate) fn recompute_best(
    inputs: &Arc<PrefillInputs>,
    layers: Range<usize>,
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

/// The sum of the layers' scores of each document token.
pub(crate) fn sum_of_layers(scores: &[Vec<f32>]) -> Vec<f32> {
    let mut sums = vec![0.0; scores.first().map_or(0, Vec::len)];
    for layer in scores {
        sums.iter_mut().zip(layer).for_each(|(sum, score)| *sum += score);
    }
    sums
}
