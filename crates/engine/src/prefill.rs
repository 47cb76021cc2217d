//! Prefill with fusion: the engine acts on what a method decides.

use refrain_fusion::{CachedSegment, FusionMethod, KeyPositions, LayerView, Mask, Plan, PromptView};
use refrain_kv::{Span, stats};
use refrain_store::Chunk;

use crate::forward::{Rows, State};
use crate::prompt::Prompt;
use crate::{Error, Result};

/// A part of the prompt whose keys and values are at hand.
#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) span: Span,
    pub(crate) chunk: Chunk,
    /// Position of its first token when it was precomputed.
    pub(crate) first_position: u32,
}

/// What prefill really did, measured while it ran.
#[derive(Clone, Debug, Default)]
pub(crate) struct Work {
    /// Document rows whose keys and values were computed, by layer.
    pub(crate) document_rows: Vec<usize>,
    /// Rows of the last layer before it shrinks to the last token, ascending.
    pub(crate) final_rows: Vec<u32>,
    /// Positions that were read from the cache at one layer at least.
    pub(crate) cached_tokens: usize,
    /// Attention of the question to every document token at layer 1, if it was asked for.
    pub(crate) attention: Option<Vec<f32>>,
}

/// A prompt with its cached segments, ready to be computed.
#[derive(Debug)]
pub(crate) struct Prefill<'a> {
    pub(crate) prompt: &'a Prompt,
    pub(crate) view: PromptView<'a>,
    pub(crate) segments: &'a [Segment],
    pub(crate) method: &'a dyn FusionMethod,
    /// Whether to report the question's attention.
    pub(crate) explain: bool,
}

/// The layer whose attention explains a choice (A³'s check layer).
const EXPLAIN_LAYER: usize = 1;

impl Prefill<'_> {
    /// Computes the prompt into `state` and returns the logits of its last token.
    pub(crate) fn run(&self, state: &mut State<'_>) -> Result<(Vec<f32>, Work)> {
        let plan = self.method.plan(&self.view)?;
        self.check(&plan.rows, None)?;
        let ids = self.prompt.ids();
        let layers = state.decoder.config().layers;
        let mut work = Work::default();
        let mut rows = state.embed(&ids, plan.rows.clone())?;
        for layer in 0..layers {
            if rows.positions.len() < ids.len() {
                self.place(state, layer, &plan, &rows.positions);
            }
            state.project(layer, &rows);
            work.document_rows.push(count_within(&rows.positions, self.view.documents()));
            // Rows only shrink, so what the last layer reads from the cache is what any layer does.
            let read = |s: &Segment| s.span.len() - count_within(&rows.positions, s.span);
            work.cached_tokens = self.segments.iter().map(read).sum();
            if self.explain && layer == EXPLAIN_LAYER.min(layers - 1) {
                let view = self.layer_view(state, layer, &rows.positions, &[]);
                work.attention = Some(view.question_attention(stats::Softmax::PerHead));
            }
            if layer + 1 == layers {
                work.final_rows.clone_from(&rows.positions);
                state.narrow(&mut rows, vec![ids.len() as u32 - 1]);
            } else if plan.narrows.contains(&layer) {
                let kept = self.method.narrow(&self.layer_view(
                    state,
                    layer,
                    &rows.positions,
                    &self.cached(layer),
                ))?;
                self.check(&kept, Some(&rows.positions))?;
                state.narrow(&mut rows, kept);
            }
            self.see(state, layer, plan.mask, &mut rows, &work.final_rows);
            state.attend(layer, &mut rows);
        }
        state.len = ids.len();
        state.decoder.logits(&rows.x, &mut state.work);
        Ok((state.work.logits.to_vec(), work))
    }

    /// Rotates and places the cached keys and values of a layer.
    fn place(&self, state: &mut State<'_>, layer: usize, plan: &Plan, rows: &[u32]) {
        let cpu = state.decoder.backend();
        // A segment whose every token is computed would be overwritten whole.
        for segment in self.segments.iter().filter(|s| count_within(rows, s.span) < s.span.len()) {
            let from = match plan.positions {
                KeyPositions::Global => segment.span.start,
                KeyPositions::ChunkLocal => segment.first_position,
            } as usize;
            let rotary = state.table.slice(from, from + segment.span.len());
            let slots: Vec<u32> = segment.span.positions().collect();
            state.cache.place(cpu, layer, segment.chunk.k(layer), segment.chunk.v(layer), rotary, &slots);
        }
    }

    fn layer_view<'a>(
        &'a self,
        state: &'a State<'_>,
        layer: usize,
        rows: &'a [u32],
        cached: &'a [CachedSegment<'a>],
    ) -> LayerView<'a> {
        let config = state.decoder.config();
        let width = rows.len() * config.kv_heads * config.head_dim;
        LayerView {
            cpu: state.decoder.backend(),
            layer,
            prompt: &self.view,
            rows,
            q: &state.work.q,
            k: state.work.k.as_slice().range(0..width),
            v: state.work.v.as_slice().range(0..width),
            keys: state.cache.layer(layer).k.as_slice(),
            cached,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            capacity: state.cache.capacity(),
            window: config.window(layer),
        }
    }

    fn cached(&self, layer: usize) -> Vec<CachedSegment<'_>> {
        let segments = self.segments.iter();
        segments.map(|s| CachedSegment { span: s.span, k: s.chunk.k(layer), v: s.chunk.v(layer) }).collect()
    }

    /// Rows must ascend, hold every token that is not cached, and be a subset of those before.
    fn check(&self, rows: &[u32], of: Option<&[u32]>) -> Result<()> {
        let fail = |why| Err(Error::Rows { method: format!("{:?}", self.method), why });
        if !rows.is_sorted_by(|a, b| a < b)
            || rows.last().is_none_or(|last| *last as usize >= self.view.len())
        {
            return fail("positions are not ascending within the prompt");
        }
        let has = |row: &u32| rows.binary_search(row).is_ok();
        if !self.view.always().iter().all(has) {
            return fail("a token that is not cached is left out");
        }
        if of.is_some_and(|of| !rows.iter().all(|row| of.binary_search(row).is_ok())) {
            return fail("a row is new at this layer");
        }
        Ok(())
    }

    /// Lets each row see its slots at `layer`. `last` holds the rows before the last layer shrank them, or nothing.
    fn see(&self, state: &State<'_>, layer: usize, mask: Mask, rows: &mut Rows, last: &[u32]) {
        match mask {
            Mask::Absolute => state.see_causally(layer, rows),
            Mask::BottomRight => {
                let computed = if last.is_empty() { &rows.positions } else { last };
                let hidden = self.view.len() - computed.len();
                let seen = |row: &u32| (0, (hidden + computed.partition_point(|r| r <= row)) as u32);
                rows.visible = rows.positions.iter().map(seen).collect();
            }
        }
    }
}

/// Number of ascending `positions` within `span`.
fn count_within(positions: &[u32], span: Span) -> usize {
    let before = |bound: u32| positions.partition_point(|p| *p < bound);
    before(span.end) - before(span.start)
}
