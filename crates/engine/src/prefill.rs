//! Prefill with fusion: the engine acts on what a method decides.

use std::time::{Duration, Instant};

use refrain_fusion::{CachedSegment, FusionMethod, LayerView, Mask, Plan, PromptView};
use refrain_kv::{Lender, Span, stats};
use refrain_model::Config;
use refrain_store::Layer;

use crate::closeness::{AttentionMap, question_keys};
use crate::feed::Feed;
use crate::forward::{Rows, State};
use crate::load::Segment;
use crate::prompt::Prompt;
use crate::retrieval::Retrieving;
use crate::{Engine, Error, Result};

/// What prefill really did, measured while it ran.
#[derive(Clone, Debug, Default)]
pub(crate) struct Work {
    /// Document rows whose keys and values were computed, by layer.
    pub(crate) document_rows: Vec<usize>,
    /// Rows of the last layer before it shrinks to the last token, ascending.
    pub(crate) final_rows: Vec<u32>,
    /// Positions that were read from the cache at one layer at least.
    pub(crate) cached_tokens: usize,
    /// Floating point operations of products and attention.
    pub(crate) operations: f64,
    /// Most bytes of keys and values that were allocated at a time.
    pub(crate) kv_bytes_peak: usize,
    /// Time that the method took to choose its rows.
    pub(crate) selecting: Duration,
    /// Tokens of the prompt that attention has before it when the first token is chosen.
    pub(crate) kept_tokens: usize,
    /// Times that the method met a case that its paper leaves open.
    pub(crate) undecided: usize,
    /// Attention of the question to every document token at layer 1, if it was asked for.
    pub(crate) attention: Option<Vec<f32>>,
    /// The question's attention maps by layer, if they were asked for.
    pub(crate) maps: Vec<AttentionMap>,
    /// Time that these took, which is no part of the prefill.
    pub(crate) watching: Duration,
}

/// What of the question's attention is to be reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Watch {
    Nothing,
    /// What the tokens receive at [`EXPLAIN_LAYER`].
    Explain,
    /// Its map at every layer.
    Maps,
}

impl Work {
    /// With what was computed before, to know what to do.
    pub(crate) fn after(mut self, before: &Work) -> Work {
        self.operations += before.operations;
        self.selecting += before.selecting;
        self.undecided += before.undecided;
        self.watching += before.watching;
        self
    }
}

/// A prompt with its cached segments, ready to be computed.
#[derive(Debug)]
pub(crate) struct Prefill<'a> {
    pub(crate) engine: &'a Engine,
    pub(crate) prompt: &'a Prompt,
    pub(crate) view: PromptView<'a>,
    pub(crate) segments: &'a [Segment],
    pub(crate) method: &'a dyn FusionMethod,
    pub(crate) plan: &'a Plan,
    pub(crate) watch: Watch,
}

/// The layer whose attention explains a choice (A³'s check layer).
pub(crate) const EXPLAIN_LAYER: usize = 1;

impl Prefill<'_> {
    /// Computes the prompt into `state`, whose layers come from `feed` where there are segments, else from `lender`. Returns the logits
    /// of the last token, or nothing if a segment turned out broken.
    pub(crate) fn run(
        &self,
        state: &mut State,
        mut feed: Option<&mut Feed<'_>>,
        lender: &Lender<'_>,
    ) -> Result<Option<(Vec<f32>, Work)>> {
        let plan = self.plan;
        self.check(&plan.rows, None)?;
        let ids = self.prompt.ids();
        let layers = state.decoder.config().num_layers();
        let mut work = Work::default();
        let mut rows = state.embed(&ids, plan.rows.clone())?;
        for layer in 0..layers {
            self.engine.pause()?;
            let mut raw = Vec::new();
            let fresh = match &mut feed {
                Some(feed) => {
                    let Some(ready) = feed.take(layer, || self.engine.pause())? else { return Ok(None) };
                    raw = ready.raw;
                    ready.cache
                }
                None => lender.take(state.cache.shape(), state.cache.dtype(), state.cache.capacity()),
            };
            state.cache.install(layer, fresh);
            state.project(layer, &rows);
            let projected = rows.positions.len();
            work.document_rows.push(count_within(&rows.positions, self.view.documents()));
            // Rows only shrink, so what the last layer reads from the cache is what any layer does.
            let read = |s: &Segment| s.span.len() - count_within(&rows.positions, s.span);
            work.cached_tokens = self.segments.iter().map(read).sum();
            self.watch(state, layer, &rows.positions, &mut work);
            if layer + 1 == layers {
                work.final_rows.clone_from(&rows.positions);
                self.see(state, layer, plan.mask, &mut rows, &[]);
                state.bound(&rows, lender);
                if state.retrieving.is_none() {
                    state.narrow(&mut rows, vec![ids.len() as u32 - 1]);
                }
            } else if plan.narrows.contains(&layer) {
                let started = Instant::now();
                let kept = self.method.narrow(&self.layer_view(
                    state,
                    layer,
                    &rows.positions,
                    &self.cached(&raw),
                ))?;
                work.selecting += started.elapsed();
                self.check(&kept, Some(&rows.positions))?;
                state.narrow(&mut rows, kept);
            }
            self.see(state, layer, plan.mask, &mut rows, &work.final_rows);
            if layer + 1 < layers {
                state.bound(&rows, lender);
                state.attend(layer, &mut rows);
            } else {
                state.attend_last(layer, &mut rows);
            }
            let keys = state.retrieving.as_mut().map(Retrieving::take_keys);
            let keys = keys.unwrap_or_else(|| seen(&rows.visible));
            work.operations += operations(state.decoder.config(), projected, rows.positions.len(), keys);
            if state.bounded.is_some() {
                lender.give(state.cache.take(layer));
            }
        }
        work.kv_bytes_peak = lender.peak();
        work.kept_tokens = state.retrieving.as_ref().map_or(ids.len(), |retrieving| retrieving.seen);
        state.len = ids.len();
        state.decoder.logits(&rows.x, &mut state.work);
        state.next = rows;
        Ok(Some((state.work.logits.to_vec(), work)))
    }

    /// Reports the question's attention, as far as it was asked for. Rows that retrieve have no map: they do not see what
    /// others do at its place.
    fn watch(&self, state: &State, layer: usize, rows: &[u32], work: &mut Work) {
        let last = state.decoder.config().num_layers() - 1;
        match self.watch {
            Watch::Explain if layer == EXPLAIN_LAYER.min(last) => {
                let view = self.layer_view(state, layer, rows, &[]);
                work.attention = Some(view.question_attention(stats::Softmax::PerHead));
            }
            Watch::Maps if state.retrieving.is_none() && !self.view.documents().is_empty() => {
                let started = Instant::now();
                let spans = (self.view.documents(), self.view.question);
                let (cache, capacity) = (state.cache.layer(layer), state.cache.capacity());
                let keys = question_keys(state, cache, capacity, (layer, spans.1.len()));
                work.maps.push(AttentionMap::of(state.decoder.backend(), &keys, spans));
                work.watching += started.elapsed();
            }
            _ => {}
        }
    }

    fn layer_view<'a>(
        &'a self,
        state: &'a State,
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
            window: config.layers[layer].window,
            scale: config.layers[layer].attention_scale,
        }
    }

    fn cached<'a>(&self, raw: &'a [Layer]) -> Vec<CachedSegment<'a>> {
        let segments = self.segments.iter().zip(raw);
        segments.map(|(s, layer)| CachedSegment { span: s.span, k: layer.k(), v: layer.v() }).collect()
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
    fn see(&self, state: &State, layer: usize, mask: Mask, rows: &mut Rows, last: &[u32]) {
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

/// Floating point operations of a layer: queries, keys and values of `projected` rows, and all the rest for `rows` that
/// see `keys` keys together (`2P` a row and `4·H·d` a key).
pub(crate) fn operations(config: &Config, projected: usize, rows: usize, keys: usize) -> f64 {
    let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
    let rest = config.hidden * (q + 3 * config.intermediate);
    2.0 * (projected * config.hidden * (q + 2 * kv) + rows * rest + 2 * q * keys) as f64
}

/// Keys that rows see together.
pub(crate) fn seen(visible: &[(u32, u32)]) -> usize {
    visible.iter().map(|(from, to)| (to - from) as usize).sum()
}

/// Number of ascending `positions` within `span`.
pub(crate) fn count_within(positions: &[u32], span: Span) -> usize {
    let before = |bound: u32| positions.partition_point(|p| *p < bound);
    before(span.end) - before(span.start)
}
