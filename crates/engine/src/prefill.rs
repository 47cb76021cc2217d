//! Prefill with fusion: the engine acts on what a method decides.

use std::time::{Duration, Instant};

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
    /// Rows of the last layer before it shrinks to the answer's, ascending.
    pub(crate) final_rows: Vec<u32>,
    /// Positions that were read from the cache at one layer at least.
    pub(crate) cached_tokens: usize,
    /// Time from the first embedding to the logits.
    pub(crate) time: Duration,
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
        let started = Instant::now();
        let plan = self.method.plan(&self.view)?;
        self.check(&plan.rows, None)?;
        let ids = self.prompt.ids();
        let layers = state.decoder.config().layers;
        let mut work = Work::default();
        let mut rows = state.embed(&ids, plan.rows.clone())?;
        for layer in 0..layers {
            if rows.positions.len() < ids.len() {
                self.place(state, layer, &plan);
            }
            state.project(layer, &rows);
            work.document_rows.push(count_within(&rows.positions, self.view.documents()));
            // Rows only shrink, so what the last layer reads from the cache is what any layer does.
            let read = |s: &Segment| s.span.len() - count_within(&rows.positions, s.span);
            work.cached_tokens = self.segments.iter().map(read).sum();
            if self.explain && layer == EXPLAIN_LAYER.min(layers - 1) {
                work.attention = Some(self.question_attention(state));
            }
            if plan.narrows.contains(&layer) {
                let kept = self.ask(state, layer, &rows)?;
                state.narrow(&mut rows, kept);
            }
            if layer + 1 == layers {
                work.final_rows.clone_from(&rows.positions);
                state.narrow(&mut rows, vec![ids.len() as u32 - 1]);
            }
            let visible = self.visible(state, layer, plan.mask, &rows.positions, &work.final_rows);
            state.attend(layer, &mut rows, &visible);
        }
        state.len = ids.len();
        let logits = state.decoder.logits(&rows.x);
        work.time = started.elapsed();
        Ok((logits, work))
    }

    /// Rotates and places the cached keys and values of a layer.
    fn place(&self, state: &mut State<'_>, layer: usize, plan: &Plan) {
        let cpu = state.decoder.cpu();
        for segment in self.segments {
            let from = match plan.positions {
                KeyPositions::Global => segment.span.start,
                KeyPositions::ChunkLocal => segment.first_position,
            } as usize;
            let rotary = state.table.slice(from, from + segment.span.len());
            let slots: Vec<u32> = segment.span.positions().collect();
            state.cache.place(cpu, layer, segment.chunk.k(layer), segment.chunk.v(layer), rotary, &slots);
        }
    }

    fn ask(&self, state: &State<'_>, layer: usize, rows: &Rows) -> Result<Vec<u32>> {
        let config = state.decoder.config();
        let width = rows.positions.len() * config.kv_heads * config.head_dim;
        let cached: Vec<CachedSegment<'_>> = self.cached(layer);
        let view = LayerView {
            cpu: state.decoder.cpu(),
            layer,
            prompt: &self.view,
            rows: &rows.positions,
            q: &state.work.q,
            k: state.work.k.as_slice().range(0..width),
            v: state.work.v.as_slice().range(0..width),
            keys: state.cache.layer(layer).k.as_slice(),
            cached: &cached,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            capacity: state.cache.capacity(),
        };
        let kept = self.method.narrow(&view)?;
        self.check(&kept, Some(&rows.positions))?;
        Ok(kept)
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

    fn question_attention(&self, state: &State<'_>) -> Vec<f32> {
        let config = state.decoder.config();
        let width = config.heads * config.head_dim;
        let question = self.view.question;
        let keys = stats::QuestionKeys {
            q: &state.work.q[state.work.q.len() - question.len() * width..],
            k: state.cache.layer(EXPLAIN_LAYER.min(config.layers - 1)).k.as_slice(),
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            capacity: state.cache.capacity(),
        };
        let (documents, softmax) = (self.view.documents(), stats::Softmax::PerHead);
        stats::question_attention(state.decoder.cpu(), &keys, documents, question, softmax)
    }

    /// Slots that each row sees at `layer`. `last` holds the rows before the last layer shrank them, or nothing.
    fn visible(
        &self,
        state: &State<'_>,
        layer: usize,
        mask: Mask,
        rows: &[u32],
        last: &[u32],
    ) -> Vec<(u32, u32)> {
        match mask {
            Mask::Absolute => state.causal(layer, rows),
            Mask::BottomRight => {
                let computed = if last.is_empty() { rows } else { last };
                let hidden = self.view.len() - computed.len();
                let seen = |row: &u32| (hidden + computed.partition_point(|r| r <= row)) as u32;
                rows.iter().map(|row| (0, seen(row))).collect()
            }
        }
    }
}

/// Number of ascending `positions` within `span`.
fn count_within(positions: &[u32], span: Span) -> usize {
    let before = |bound: u32| positions.partition_point(|p| *p < bound);
    before(span.end) - before(span.start)
}
