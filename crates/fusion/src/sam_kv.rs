//! SamKV, sparse attention across several contexts' KV caches (arXiv 2508.11661): of every document the first and the last
//! blocks are kept, and those few in between that the question and the other documents point at; what is kept is
//! computed anew where the documents' independent caches lack one another.
//!
//! Once a document (`offline.rs`): block means `K̄[b]`, the mean query `Qloc` of its last tokens, and what tells blocks
//! apart. Once a question (`online.rs`), with `Qque` its mean query over the kept blocks:
//! eq. 1 `Q̂_i = Qque + 1/(D−1) · Σ_{j≠i} |cos(Qque, Qloc_j)| · Qloc_j`,
//! eq. 2 `P = (s_max − s_anc) / (s_max − s_min)` if `s_min < s_anc ≤ s_max`, else 0, with `s = ⟨Q̂_i, K⟩`,
//! eq. 3 `P_i` its mean over the stable layers; `floor(P_i · M_i)` blocks of each document, filtered across all.
//! eq. 4 `θ = cos(new, old)`, `new ← θ · new + (1 − θ) · old`.

mod calibration;
mod offline;
mod online;

use std::sync::Arc;

use refrain_kv::{AuxTensors, Span};
use refrain_registry::{MAX_COUNT, Options};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::pass::planned;
use crate::{
    CachedTokens, ChunkStatistics, ContextLayer, FusionMethod, LayerSelection, LayerTokens, LayerView, Needs,
    Pass, PassPlan, PrefillInputs, PromptLayout, Result, Selection,
};

pub use calibration::Calibration;
use online::Contexts;

/// Of the definitions in `offline.rs`: summaries of another one are not used.
const VERSION: u32 = 1;

/// What becomes of cached keys and values where new ones are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Update {
    /// They are merged (eq. 4).
    Fusion,
    /// They are overwritten.
    Overwrite,
}

/// What eq. 4's θ is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Theta {
    /// The cosine over a token's whole key (or value).
    Token,
    /// One cosine a KV head.
    Head,
    /// 0.9, as in an independent implementation.
    Constant,
}

/// What is recomputed of what is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Initial and local blocks, and the marked tokens of the others.
    Marked,
    /// Everything.
    Kept,
    /// Nothing.
    None,
}

/// Whether queries and keys are compared as they are before rotation, or at the centres of question and block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Rotation {
    /// Before rotation.
    None,
    /// Rotated to their centres.
    Centre,
}

/// What one cosine of eq. 1 is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Cosine {
    /// A query head.
    Head,
    /// All heads.
    Layer,
}

/// How a fraction of blocks becomes a number of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Rounding {
    /// Down.
    Floor,
    /// To the nearest.
    Nearest,
    /// Up.
    Ceil,
}

/// What the filter across documents divides by their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Quota {
    /// The blocks retrieved.
    Retrieved,
    /// All blocks.
    All,
}

/// Where the block of highest and that of lowest score come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Extremes {
    /// From the document's own attention, once.
    Offline,
    /// From the scores themselves.
    Online,
}

/// What eq. 2 gives where the kept blocks' score is not above the lowest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Below {
    /// No blocks.
    Zero,
    /// All blocks.
    One,
}

impl Below {
    /// The value of eq. 2.
    pub fn value(self) -> f64 {
        match self {
            Below::Zero => 0.0,
            Below::One => 1.0,
        }
    }
}

/// Keep what question and documents point at, and recompute it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SamKv {
    /// Tokens of a block.
    #[schemars(range(min = 1, max = MAX_COUNT))]
    pub block: usize,
    /// Blocks kept at a document's beginning.
    #[serde(rename = "initial_blocks")]
    #[schemars(range(max = MAX_COUNT))]
    pub initial: usize,
    /// Blocks kept at a document's end.
    #[serde(rename = "local_blocks")]
    #[schemars(range(min = 1, max = MAX_COUNT))]
    pub local: usize,
    /// Select blocks between a document's beginning and end.
    pub selection: bool,
    /// Let queries lean towards the other documents (eq. 1).
    pub bias: bool,
    /// What is recomputed: ends and marked tokens, all that is kept, or nothing.
    pub recompute: Recompute,
    /// Filter the selected blocks across documents.
    pub filter: bool,
    /// The blocks that the filter divides by the number of documents: those retrieved, or all.
    pub quota: Quota,
    /// Share of a document's blocks that is selected, instead of eq. 2; 0 for eq. 2.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub share: f64,
    /// The value of eq. 2 where the kept blocks' score is not above the lowest.
    pub below: Below,
    /// How fractions of blocks are rounded.
    pub rounding: Rounding,
    /// Highest and lowest block: by the document's own attention (offline), or by score (online).
    pub extremes: Extremes,
    /// Compare queries and keys unrotated, or rotated to the centres of question and block.
    pub rotation: Rotation,
    /// One cosine of eq. 1 over each query head, or over all heads of a layer.
    pub cosine: Cosine,
    /// Divide scores by the lengths of query and key before the filter.
    pub normalise: bool,
    /// Merge recomputed with cached keys and values (eq. 4), or overwrite them.
    pub update: Update,
    /// One weight of eq. 4 a token, one a head, or 0.9.
    pub theta: Theta,
    /// Layers at the end that eq. 3 averages over; 0 for calibrated ones, else the last max(4, L/8).
    #[schemars(range(max = MAX_COUNT))]
    pub stable_layers: usize,
}

impl Default for SamKv {
    fn default() -> Self {
        SamKv {
            block: 64,
            initial: 1,
            local: 2,
            selection: true,
            bias: true,
            recompute: Recompute::Marked,
            filter: true,
            quota: Quota::Retrieved,
            share: 0.0,
            below: Below::Zero,
            rounding: Rounding::Floor,
            extremes: Extremes::Offline,
            rotation: Rotation::None,
            cosine: Cosine::Head,
            normalise: true,
            update: Update::Fusion,
            theta: Theta::Token,
            stable_layers: 0,
        }
    }
}

impl Options for SamKv {
    const NAME: &'static str = "sam_kv";
}

impl FusionMethod for SamKv {
    fn start(&self, inputs: &Arc<PrefillInputs>) -> Result<Box<dyn Pass>> {
        self.start_at(inputs, 0)
    }

    fn keeps_all_tokens(&self) -> bool {
        false
    }

    fn statistics(&self) -> Vec<&dyn ChunkStatistics> {
        vec![self]
    }
}

impl ChunkStatistics for SamKv {
    fn kind(&self) -> String {
        format!("sam_kv-{VERSION}-{}-{}-{}", self.block, self.initial, self.local)
    }

    fn last_queries(&self) -> usize {
        self.local.max(1) * self.block
    }

    fn observe(&self, layer: &ContextLayer<'_>, summary: &mut AuxTensors) {
        self.observe_layer(layer, summary);
    }
}

/// The question over the blocks that are kept in any case: its mean query at every layer.
#[derive(Debug)]
struct QuestionPass {
    method: SamKv,
    inputs: Arc<PrefillInputs>,
    kind: usize,
    plan: PassPlan,
    queries: Vec<f32>,
}

impl Pass for QuestionPass {
    fn plan(&self) -> &PassPlan {
        &self.plan
    }

    fn observe(&mut self, layer: &LayerView<'_>) -> Result<Vec<u32>> {
        self.queries.extend_from_slice(layer.mean_query);
        Ok(layer.tokens.to_vec())
    }

    fn next(self: Box<Self>) -> Result<Option<Box<dyn Pass>>> {
        self.method.last(&self.inputs, self.kind, &self.queries).map(Some)
    }
}

/// Kept tokens with the recomputed ones among them: the pass that the answer is decoded from.
#[derive(Debug)]
struct KeptPass {
    method: SamKv,
    plan: PassPlan,
}

impl Pass for KeptPass {
    fn plan(&self) -> &PassPlan {
        &self.plan
    }

    fn merge(&self, fresh: &mut [f32], cached: &[f32], head_dim: usize) {
        self.method.merge(fresh, cached, head_dim);
    }
}

impl SamKv {
    /// The first pass, with SamKV's statistics at place `kind` among the method's.
    pub(crate) fn start_at(&self, inputs: &Arc<PrefillInputs>, kind: usize) -> Result<Box<dyn Pass>> {
        let layout = &inputs.layout;
        layout.check()?;
        let required = PassPlan::new(layout.required_tokens());
        if layout.reusable() == 0 {
            return Ok(planned(required));
        }
        if !self.asks(layout) {
            return self.last(inputs, kind, &[]);
        }
        let base = self.base(layout);
        let base = LayerTokens { question_sees: base.clone(), documents_see: base, ..LayerTokens::default() };
        let needs = Needs { mean_query: true, ..Needs::default() };
        let plan = PassPlan {
            probe: Some(layout.layers),
            checks: (0..layout.layers).map(|layer| (layer, needs)).collect(),
            cached: CachedTokens::Selected(vec![base; layout.layers]),
            ..required
        };
        Ok(Box::new(QuestionPass { method: *self, inputs: inputs.clone(), kind, plan, queries: Vec::new() }))
    }

    /// The pass over what is selected.
    fn last(&self, inputs: &PrefillInputs, kind: usize, queries: &[f32]) -> Result<Box<dyn Pass>> {
        let selection = self.select(inputs, kind, queries)?;
        let selected = selection.plan();
        let mut tokens = [inputs.layout.required_tokens(), selected.tokens].concat();
        tokens.sort_unstable();
        let plan = PassPlan {
            cached: CachedTokens::Selected(selected.layers),
            merges: self.update == Update::Fusion,
            ambiguous_cases: selection.ambiguous_cases,
            ..PassPlan::new(tokens)
        };
        Ok(Box::new(KeptPass { method: *self, plan }))
    }

    /// Positions of documents that are kept at every layer of any question, ascending and apart.
    pub fn base(&self, layout: &PromptLayout) -> Vec<Span> {
        layout.cached_chunks().flat_map(|context| self.kept(context)).collect()
    }

    /// Whether the question is computed over the base first, so that [`select`](SamKv::select) knows its queries.
    pub fn asks(&self, layout: &PromptLayout) -> bool {
        self.selection && layout.cached_chunks().any(|context| !self.middle(self.blocks(context)).is_empty())
    }

    /// Tokens that are kept of each layer, and those of them that are computed anew. `kind` is the place of SamKV's statistics
    /// among the method's. `queries` holds the question's mean query before RoPE at each layer, `layers × H × d`; it is empty
    /// where the question was not [asked](SamKv::asks).
    ///
    /// # Errors
    /// If a document's statistics are not SamKV's.
    pub fn select(&self, inputs: &PrefillInputs, kind: usize, queries: &[f32]) -> Result<Selection> {
        let base = self.base(&inputs.layout);
        let (retrieved, ambiguous_cases) = match queries {
            [] => (vec![Vec::new(); inputs.layout.layers], 0),
            _ => Contexts::new(self, inputs, kind, queries)?.retrieve(),
        };
        let layer = |retrieved: Vec<online::Block>| {
            let mut spans = base.clone();
            spans.extend(retrieved.iter().map(|block| block.span));
            spans.sort_unstable_by_key(|span| span.start);
            let mut recomputed: Vec<u32> = match self.recompute {
                Recompute::None => Vec::new(),
                Recompute::Kept => spans.iter().flat_map(|span| span.positions()).collect(),
                Recompute::Marked => {
                    let marked = retrieved.iter().filter_map(|block| block.marked);
                    base.iter().flat_map(|span| span.positions()).chain(marked).collect()
                }
            };
            recomputed.sort_unstable();
            LayerSelection { spans, recomputed }
        };
        Ok(Selection { layers: retrieved.into_iter().map(layer).collect(), ambiguous_cases })
    }

    /// A key (before RoPE) or value of one token, `Hkv × d`, computed anew, becomes the one that is kept (eq. 4).
    pub fn merge(&self, fresh: &mut [f32], cached: &[f32], head_dim: usize) {
        let part = if self.theta == Theta::Head { head_dim } else { fresh.len() };
        for (fresh, cached) in fresh.chunks_exact_mut(part).zip(cached.chunks_exact(part)) {
            let theta = match self.theta {
                Theta::Constant => 0.9,
                Theta::Token | Theta::Head => cosine(fresh, cached).clamp(0.0, 1.0),
            };
            fresh.iter_mut().zip(cached).for_each(|(new, old)| *new = theta * *new + (1.0 - theta) * old);
        }
    }

    /// Blocks of a context.
    fn blocks(&self, context: Span) -> usize {
        context.len().div_ceil(self.block)
    }

    /// Those of `blocks` that are neither initial nor local.
    fn middle(&self, blocks: usize) -> std::ops::Range<usize> {
        self.initial.min(blocks)..blocks.saturating_sub(self.local).max(self.initial.min(blocks))
    }

    /// Positions of a block.
    fn span(&self, context: Span, block: usize) -> Span {
        let start = context.start as usize + block * self.block;
        Span::new(start, (start + self.block).min(context.end as usize))
    }

    /// What is kept of a context whatever is asked: one span where nothing lies between beginning and end.
    fn kept(&self, context: Span) -> Vec<Span> {
        let middle = self.middle(self.blocks(context));
        let (start, end) = (context.start as usize, context.end as usize);
        if middle.is_empty() {
            return vec![context];
        }
        let (first, last) = (start + middle.start * self.block, start + middle.end * self.block);
        let both = [Span::new(start, first), Span::new(last, end)];
        both.into_iter().filter(|span| !span.is_empty()).collect()
    }
}

/// `⟨a, b⟩`
fn dot(a: &[f32], b: &[f32]) -> f32 {
    // Sixteen sums, so that they can be made side by side.
    let mut sums = [0.0f32; 16];
    let (whole, parts) = (a.chunks_exact(16), b.chunks_exact(16));
    let rest: f32 = whole.remainder().iter().zip(parts.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in whole.zip(parts) {
        for i in 0..16 {
            sums[i] += a[i] * b[i];
        }
    }
    sums.iter().sum::<f32>() + rest
}

/// `⟨a, b⟩ / (|a|·|b|)`; 1 of equal vectors, 0 where one of different ones has no length.
fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let length = (dot(a, a) * dot(b, b)).sqrt();
    if length > 0.0 { dot(a, b) / length } else { f32::from(a == b) }
}
