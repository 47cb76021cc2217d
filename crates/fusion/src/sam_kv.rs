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
mod options;

use std::sync::Arc;

use refrain_kv::{AuxTensors, Span};

use crate::pass::planned;
use crate::{
    CachedTokens, ChunkStatistics, ContextLayer, FusionMethod, LayerSelection, LayerTokens, LayerView, Needs,
    Pass, PassPlan, PrefillInputs, PromptLayout, Result, Selection,
};

pub use calibration::Calibration;
use online::Contexts;
pub use options::{Below, Cosine, Extremes, Quota, Recompute, Rotation, Rounding, SamKv, Theta, Update};

/// Of the definitions in `offline.rs`: summaries of another one are not used.
const VERSION: u32 = 1;

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
        layout.chunk_spans().flat_map(|context| self.kept(context)).collect()
    }

    /// Whether the question is computed over the base first, so that [`select`](SamKv::select) knows its queries.
    pub fn asks(&self, layout: &PromptLayout) -> bool {
        self.selection && layout.chunk_spans().any(|context| !self.middle(self.blocks(context)).is_empty())
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
}
