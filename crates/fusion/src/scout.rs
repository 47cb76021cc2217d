//! Scout: the question is computed over the reused keys and values first, and the document tokens that its last row attends to in
//! the middle and upper layers are recomputed.
//!
//! First pass: the question alone, through the layers below `to·L`. A token's score is the attention that it receives from the
//! prompt's last row, mean over heads and over the layers from `from·L` on, with one softmax a head over all that the row sees.
//! Second pass: the tokens of highest score and the question go through all layers, from layer 0. No layer runs in full, so that
//! the whole budget goes to chosen tokens; `charge` counts the first pass as well.
//!
//! The last row is the one that the answer's first token is chosen from. What it reads in the middle layers is what the answer is
//! made of; the first layers read neighbours, and the last ones the end of the prompt.
//!
//! With `rows=question,aggregation=max,from=0.41,to=0.65` the score is QCFuse's (arXiv 2606.05875) over all keys in place of the
//! anchors that it keeps of each chunk.

use std::ops::Range;
use std::sync::Arc;

use refrain_kv::stats::{Aggregation, QuestionScore, Rows, Softmax};
use refrain_kv::{Span, top_count, top_k};
use refrain_registry::{MAX_COUNT, Options};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::pass::planned;
use crate::probe::{question_probe, sum_of_layers};
use crate::{FusionMethod, Pass, PassPlan, PrefillInputs, PromptLayout, Result};

/// Recompute the tokens that the prompt's last row attends to.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Scout {
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
}

impl Default for Scout {
    fn default() -> Self {
        let (rows, aggregation) = (Rows::Last, Aggregation::Mean);
        Scout { charge: 0.15, rows, from: 0.4, to: 0.95, aggregation, seam: 0 }
    }
}

impl Options for Scout {
    const NAME: &'static str = "scout";

    fn validate(&self) -> refrain_registry::Result<()> {
        check_depth(Self::NAME, self.from, self.to)
    }
}

/// Refuses scored layers that end before they begin.
pub(crate) fn check_depth(owner: &'static str, from: f64, to: f64) -> refrain_registry::Result<()> {
    if from < to {
        return Ok(());
    }
    let conflict = format!("from={from} is not below to={to}; the scored layers lie between them");
    Err(refrain_registry::Error::conflict(owner, conflict))
}

/// The layers from the share `from` to the share `to` of the depth; one at least.
pub(crate) fn layers_between(from: f64, to: f64, layers: usize) -> Range<usize> {
    let last = layers.saturating_sub(1);
    let first = ((from * layers as f64 + 1e-9).floor() as usize).min(last);
    first..((to * layers as f64).round() as usize).clamp(first + 1, layers.max(1))
}

impl Scout {
    /// The first pass, and the last one as `finish` plans it. The share `spread` of the chosen tokens stands evenly over the documents.
    /// Without a token to recompute the question is computed at once.
    pub(crate) fn start_with(
        &self,
        inputs: &Arc<PrefillInputs>,
        spread: f64,
        finish: impl FnOnce(PassPlan) -> Box<dyn Pass> + Send + 'static,
    ) -> Result<Box<dyn Pass>> {
        let layout = &inputs.layout;
        layout.check()?;
        let layers = layers_between(self.from, self.to, layout.layers);
        if layout.count_for_charge(self.charge, 0, layers.start + 1) == 0 {
            return Ok(planned(PassPlan::new(layout.required_tokens())));
        }
        let row = if self.rows == Rows::Last { layout.question.end - 1 } else { layout.question.start };
        let layers = inputs.layers_of_choice(layers, row)?;
        let probed = layers[layers.len() - 1] + 1;
        let count = layout.count_for_charge(self.charge, 0, probed);
        if layout.probe_is_dearer(probed, count) {
            return Ok(planned(PassPlan::new(layout.full_tokens())));
        }
        if count == 0 {
            return Ok(planned(PassPlan::new(layout.required_tokens())));
        }
        let Scout { rows, aggregation, seam, .. } = *self;
        let score = QuestionScore { softmax: Softmax::Prompt, rows, aggregation };
        Ok(question_probe(inputs, &layers, score, move |layout, scores| {
            let chosen = choose(layout, sum_of_layers(&scores), (seam, spread), count);
            finish(PassPlan::new(layout.required_and(chosen)))
        }))
    }
}

/// `count` tokens: the first `seam` of each chunk, of the others the share `spread` evenly over the documents, and those of highest
/// score.
fn choose(
    layout: &PromptLayout,
    mut scores: Vec<f32>,
    (seam, spread): (usize, f64),
    count: usize,
) -> Vec<u32> {
    let start = layout.documents().start;
    let heads: Vec<u32> = layout.inexact_chunks().flat_map(|chunk| chunk.positions().take(seam)).collect();
    let own: Vec<f32> = heads.iter().map(|t| scores[(t - start) as usize]).collect();
    // A budget too small for all of them takes the most attended ones.
    let first = top_k(&own, count);
    let candidates: Vec<u32> = layout.inexact_chunks().flat_map(Span::positions).collect();
    let even = top_count(spread, count - first.len(), candidates.len());
    let even = (0..even).map(|i| candidates[(2 * i + 1) * candidates.len() / (2 * even)]);
    for token in first.iter().map(|i| heads[*i as usize]).chain(even) {
        scores[(token - start) as usize] = f32::INFINITY;
    }
    layout.top_reusable(&scores, count)
}

impl FusionMethod for Scout {
    fn start(&self, inputs: &Arc<PrefillInputs>) -> Result<Box<dyn Pass>> {
        self.start_with(inputs, 0.0, planned)
    }

    fn max_rows(&self, layout: &PromptLayout) -> usize {
        let required = layout.required_tokens().len();
        // The layers that can choose are known to the pass alone: the fewest leave the most tokens.
        let probed = layers_between(self.from, self.to, layout.layers).start + 1;
        match layout.count_for_charge(self.charge, 0, probed) {
            0 => required,
            // A probe is dearer than all reusable tokens where these are at most as many as it computes and are then recomputed: exact
            // chunks leave fewer of them.
            most => required + layout.reusable().min(most + required),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ChunkSpan, test_inputs};

    #[test]
    fn scored_layers_are_shares_of_the_depth() {
        assert_eq!(layers_between(0.4, 0.95, 30), 12..29);
        assert_eq!(layers_between(0.4, 0.95, 24), 9..23);
        assert_eq!(layers_between(0.0, 1.0, 24), 0..24);
        assert_eq!(layers_between(0.9, 0.95, 2), 1..2);
        assert_eq!(layers_between(0.99, 1.0, 1), 0..1);
        let error = Scout { from: 0.5, to: 0.5, ..Scout::default() }.validate().unwrap_err().to_string();
        assert!(error.contains("from=0.5"), "{error}");
    }

    #[test]
    fn seams_and_spread_tokens_come_first_and_an_exact_chunk_has_none() {
        let chunk =
            |start, end, exact| ChunkSpan { span: Span::new(start, end), exact, ..ChunkSpan::default() };
        let layout = PromptLayout {
            layers: 10,
            system: Span::new(0, 2),
            system_cached: true,
            chunks: vec![chunk(2, 6, true), chunk(6, 10, false), chunk(10, 14, false)],
            question: Span::new(14, 16),
        };
        let scores: Vec<f32> = (0..12).map(|i| 1.0 - 0.01 * i as f32).collect();
        assert_eq!(choose(&layout, scores.clone(), (0, 0.0), 3), [6, 7, 8]);
        assert_eq!(choose(&layout, scores.clone(), (1, 0.0), 3), [6, 7, 10]);
        assert_eq!(choose(&layout, scores.clone(), (2, 0.0), 1), [6]);
        // Two of four stand in the middle of each half.
        assert_eq!(choose(&layout, scores.clone(), (0, 0.5), 4), [6, 7, 8, 12]);
        assert_eq!(choose(&layout, scores, (0, 1.0), 8), [6, 7, 8, 9, 10, 11, 12, 13]);
    }

    #[test]
    fn the_charge_pays_for_the_first_pass() {
        let layout = PromptLayout {
            layers: 10,
            system: Span::new(0, 2),
            system_cached: true,
            chunks: vec![ChunkSpan { span: Span::new(2, 102), ..ChunkSpan::default() }],
            question: Span::new(102, 112),
        };
        // 20 % of 100 × 10 rows are 200; the first pass takes 9 × 10 of them, which leaves 11 a layer.
        assert_eq!(layout.count_for_charge(0.2, 0, 9), 11);
        // Two full layers take all of it.
        assert_eq!(layout.count_for_charge(0.2, 2, 0), 0);
        assert_eq!(layout.count_for_charge(0.36, 2, 0), 20);
        assert_eq!(layout.count_for_charge(1.0, 0, 0), 100);
        assert_eq!(layout.count_for_charge(0.01, 0, 9), 0);
        // A quarter of the charge is left to tokens.
        assert_eq!(layout.count_for_charge(0.1, 0, 9), 2);
    }

    #[test]
    fn a_long_question_leaves_tokens_to_recompute_and_one_longer_than_the_documents_has_all_of_them_computed()
    {
        let inputs = |question: u32| {
            let chunk = |span, exact| ChunkSpan { span, exact, ..ChunkSpan::default() };
            let layout = PromptLayout {
                layers: 10,
                system: Span::new(0, 2),
                system_cached: true,
                chunks: vec![chunk(Span::new(2, 22), true), chunk(Span::new(22, 122), false)],
                question: Span::new(122, 122 + question as usize),
            };
            test_inputs::inputs(layout, vec![None; 10])
        };
        let scout = Scout { charge: 0.3, ..Scout::default() };
        let computed = |question| {
            let pass = scout.start(&inputs(question)).unwrap();
            (pass.plan().probe, pass.plan().tokens.clone())
        };
        // 0.3 · 120 tokens · 10 layers are 360 rows; a question of 60 would take all of them by its first pass of 10 layers.
        assert_eq!(inputs(60).layout.count_for_charge(0.3, 0, 10), 9);
        assert_eq!(computed(60).0, Some(10));
        // 10 · 110 rows and 9 tokens at 10 layers are more than 100 tokens at 10 layers.
        let (probe, tokens) = computed(110);
        assert_eq!((probe, tokens), (None, (22..232).collect()), "the exact chunk stays as it is");
        for question in [1, 30, 60, 101, 102, 110, 200] {
            let mut layout = inputs(question).layout.clone();
            let plan = computed(question);
            let most = if plan.0.is_some() {
                question as usize + layout.count_for_charge(0.3, 0, 10)
            } else {
                plan.1.len()
            };
            assert!(most <= scout.max_rows(&layout), "{question}");
            layout.chunks[0].exact = false;
            assert!(most <= scout.max_rows(&layout), "{question}, where no chunk is known to be exact");
        }
        // A system part that is not at hand goes through the first pass with the question: 2 more rows at 3 layers.
        let mut layout = inputs(30).layout.clone();
        assert_eq!(layout.count_for_charge(0.3, 0, 3), 27);
        layout.system_cached = false;
        assert_eq!(layout.count_for_charge(0.3, 0, 3), 26);
    }
}
