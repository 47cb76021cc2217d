//! Layers that hold a part of the prompt's tokens: tokens that are not selected are neither read nor computed.

use std::ops::Range;
use std::time::Duration;

use refrain_eviction::PromptSpans;
use refrain_fusion::{LayerTokens, Pass, PromptLayout};
use refrain_kernels::KvRows;
use refrain_kv::{LayerCache, RopeTables, Span};

use super::context::PassContext;
use super::prefetch::Prefetched;
use super::spans::{LoadedSpans, SpanReader};
use super::stats::{LoadStats, PrefillStats};
use crate::cache::{DecodeCache, EvictingCache, PromptLayer, SlotMap};
use crate::forward::{ActiveTokens, attend_rows, visible_keys};
use crate::{Error, Result};

/// Slots of one layer.
#[derive(Clone, Debug, Default)]
struct LayerSlots {
    /// Tokens that the question sees; the answer is decoded over them.
    question: SlotMap,
    /// Tokens that active tokens before the question see.
    documents: SlotMap,
    /// Both.
    all: SlotMap,
}

/// The layers of a pass over selected tokens.
#[derive(Debug)]
pub(crate) struct SelectedLayers {
    tokens: Vec<LayerTokens>,
    slots: Vec<LayerSlots>,
    spans: SpanReader,
    /// Bytes copied to the device's own memory.
    copied: u64,
    /// Positions that were needed at one layer at least.
    needed: SlotMap,
}

/// A layer's cache of the tokens that the question sees.
#[derive(Debug)]
pub(crate) struct QuestionCache {
    pub(crate) cache: LayerCache,
    /// Slots of a head.
    pub(crate) slots: usize,
    /// Active tokens whose attention is computed already: those before the question, where they see other tokens than it.
    pub(crate) attended: usize,
    /// Bytes that were copied for it; none if it is the layer's own cache.
    copied: Option<usize>,
}

impl QuestionCache {
    /// Gives the memory back.
    pub(crate) fn release(self, context: &PassContext) {
        match self.copied {
            None => context.allocator.release(self.cache),
            Some(copied) => context.allocator.meter().subtract(copied),
        }
    }
}

impl SelectedLayers {
    /// Layers of `tokens`, one entry a layer, for a pass or for a probe of so many layers. `before` are those of a probe whose spans are used
    /// again.
    pub(crate) fn new(
        context: &PassContext,
        tokens: &[LayerTokens],
        probe: Option<usize>,
        before: Option<SelectedLayers>,
    ) -> Result<SelectedLayers> {
        check(context, tokens, probe.is_some())?;
        let layout = &context.inputs.layout;
        // Every layer holds the system part and the question whole.
        let with_whole =
            |spans: &[Span]| SlotMap::new(spans.iter().copied().chain([layout.system, layout.question]));
        let slots = |layer: &LayerTokens| LayerSlots {
            question: with_whole(&layer.question_sees),
            documents: with_whole(&layer.documents_see),
            all: with_whole(&[layer.question_sees.as_slice(), &layer.documents_see].concat()),
        };
        let slots: Vec<LayerSlots> = tokens.iter().map(slots).collect();
        // A probe ends before the attention of its last layer.
        let depth = probe.map_or(layout.layers, |depth| depth.min(layout.layers).saturating_sub(1));
        let wanted = slots[..depth].iter().map(|slots| slots.all.clone()).collect();
        let spans = match before {
            Some(before) => before.spans.into_layers(),
            None => vec![LoadedSpans::default(); layout.layers],
        };
        Ok(SelectedLayers {
            tokens: tokens.to_vec(),
            slots,
            spans: SpanReader::new(spans, wanted),
            copied: 0,
            needed: SlotMap::default(),
        })
    }

    /// Tokens of the prompt that the answer is decoded over.
    pub(crate) fn kept_tokens(&self) -> usize {
        self.slots.first().map_or(0, |slots| slots.question.len())
    }

    /// The cache that decoding goes on in: the kept tokens, and room for the answer.
    pub(crate) fn answer_cache(&self, context: &PassContext) -> Result<EvictingCache> {
        let (layout, kept) = (&context.inputs.layout, self.kept_tokens());
        let left_out = layout.len() - kept;
        let question = Span::new(kept - layout.question.len(), kept);
        let spans = PromptSpans { system: layout.system, question };
        let decoder = context.engine.decoder();
        let ropes = decoder.ropes(context.max_rope_position);
        let (dtype, room) = (context.engine.settings().kv, context.max_seq_len - left_out);
        let cache = EvictingCache::new(
            decoder.device(),
            decoder.config(),
            ropes,
            &context.eviction,
            spans,
            (dtype, room),
            Some(left_out),
        )?;
        Ok(cache.unwrap_or_else(|| unreachable!("a cache of a part of the prompt is always made")))
    }

    /// Bytes that this pass read, and the time that it took.
    pub(crate) fn load(&self) -> LoadStats {
        LoadStats { copied: self.copied, ..self.spans.load() }
    }

    /// Time that the computing thread waited for spans.
    pub(crate) fn waited(&self) -> Duration {
        self.spans.waited()
    }

    /// A layer without a slot, if the layer's spans come within `patience`.
    pub(crate) fn poll(
        &mut self,
        context: &PassContext,
        layer: usize,
        patience: Duration,
    ) -> Result<Prefetched> {
        self.spans.poll(context, layer, patience)
    }

    /// Positions that were read from the cache at one layer at least.
    pub(crate) fn cached_tokens(&self, context: &PassContext) -> usize {
        let system_cached = context.segments.iter().any(|segment| segment.chunk.is_none());
        let layout = &context.inputs.layout;
        let system = if system_cached { 0 } else { layout.system.len() };
        self.needed.len() - system - layout.question.len()
    }

    /// Positions that were needed and are not among `computed`, the rows of the last layer.
    pub(crate) fn reused_tokens(&self, computed: &[u32]) -> usize {
        self.needed.len() - computed.iter().filter(|position| self.needed.holds(**position)).count()
    }

    /// Positions that no layer needed.
    pub(crate) fn left_out_tokens(&self, layout: &PromptLayout) -> usize {
        layout.len() - self.needed.len()
    }

    /// Cached positions of parts that were prefilled for this request.
    pub(crate) fn prefilled_tokens(&self, context: &PassContext) -> usize {
        let prefilled = context.segments.iter().filter(|segment| segment.computed);
        let needed = |span: Span| (self.needed.before(span.end) - self.needed.before(span.start)) as usize;
        prefilled.map(|segment| needed(segment.span)).sum()
    }

    /// Tokens that go on from a layer.
    pub(crate) fn continuing(&self, context: &PassContext, layer: usize) -> Vec<u32> {
        let mut tokens = context.inputs.layout.required_tokens();
        tokens.extend(&self.tokens[layer].continuing);
        tokens.sort_unstable();
        tokens
    }

    /// The cache of a layer whose spans are there: cached tokens are placed, fresh ones written over them. `merge` says how a fresh and a cached
    /// row become one.
    pub(crate) fn layer_cache(
        &mut self,
        context: &PassContext,
        layer: usize,
        tokens: &ActiveTokens,
        merge: Option<&dyn Pass>,
    ) -> LayerCache {
        let decoder = &tokens.decoder;
        let (device, shape) = (&**decoder.device(), decoder.shape());
        let slots = &self.slots[layer].all;
        self.needed = SlotMap::new(self.needed.spans().iter().chain(slots.spans()).copied());
        let dtype = context.engine.settings().kv;
        let mut cache = context.allocator.acquire(shape, dtype, slots.len());
        let copies = context.engine.device_chunks().is_apart();
        for loaded in self.spans.layer(layer).iter() {
            let rotary =
                context.tables.layer(layer).slice(loaded.span.range().start, loaded.span.range().end);
            let first = slots.before(loaded.span.start);
            let slots: Vec<u32> = (first..first + loaded.span.len() as u32).collect();
            let (k, v) = loaded.kv(shape.width());
            self.copied += if copies { (k.as_bytes().len() + v.as_bytes().len()) as u64 } else { 0 };
            cache.place(device, shape, (KvRows::Host(k), KvRows::Host(v)), rotary, &slots);
        }
        self.write(context, layer, tokens, merge, &mut cache);
        cache
    }

    /// Writes the fresh keys and values of a layer. Those of active tokens that are not written here stay as they were cached.
    fn write(
        &self,
        context: &PassContext,
        layer: usize,
        tokens: &ActiveTokens,
        merge: Option<&dyn Pass>,
        cache: &mut LayerCache,
    ) {
        let (device, shape) = (tokens.device(), tokens.decoder.shape());
        let (required, written) = (context.inputs.layout.required_tokens(), &self.tokens[layer].written);
        let is_fresh = |p: &u32| required.binary_search(p).is_ok() || written.binary_search(p).is_ok();
        let cached =
            |p: u32| merge.and_then(|pass| Some((pass, self.spans.layer(layer).at(p, shape.width())?)));
        let (mut fresh, mut merged) = (Vec::new(), Vec::new());
        for (row, position) in tokens.positions.iter().enumerate().filter(|(_, p)| is_fresh(p)) {
            match cached(*position) {
                None => fresh.push(row as u32),
                Some((pass, cached)) => merged.push((row as u32, pass, cached)),
            }
        }
        let mut place = |rows: &[u32], kv: (KvRows<'_>, KvRows<'_>)| {
            let positions: Vec<u32> = rows.iter().map(|row| tokens.positions[*row as usize]).collect();
            let mut rotary = RopeTables::default();
            context.tables.gather(&positions, &mut rotary);
            let slots: Vec<u32> = positions.iter().map(|p| self.slots[layer].all.before(*p)).collect();
            cache.place(device, shape, kv, rotary.layer(layer).all(), &slots);
        };
        let gather = |kv, rows: &[u32]| device.gather_kv_rows(kv, shape.width(), rows);
        let (k, v) = (gather(&tokens.work.k, &fresh), gather(&tokens.work.v, &fresh));
        place(&fresh, (KvRows::Device(&k, 0), KvRows::Device(&v, 0)));
        if merged.is_empty() {
            return;
        }
        // A method merges rows in the host's memory.
        let rows: Vec<u32> = merged.iter().map(|(row, ..)| *row).collect();
        let download = |kv| {
            let rows = gather(kv, &rows);
            device.download_kv(&rows, 0..rows.len()).into_buffer()
        };
        let (mut k, mut v) = (download(&tokens.work.k), download(&tokens.work.v));
        let width = shape.width();
        let (mut new, mut old) = (vec![0.0; width], vec![0.0; width]);
        for (i, (_, pass, cached)) in merged.iter().enumerate() {
            for (rows, cached) in [(&mut k, cached.0), (&mut v, cached.1)] {
                rows.as_slice().range(i * width..(i + 1) * width).to_f32(&mut new);
                cached.to_f32(&mut old);
                pass.merge(&mut new, &old, shape.head_dim);
                rows.write_f32(i * width, &new);
            }
        }
        place(&rows, (KvRows::Host(k.as_slice()), KvRows::Host(v.as_slice())));
    }

    /// Gives up the spans that were read of a layer.
    pub(crate) fn free(&mut self, context: &PassContext, layer: usize) {
        self.spans.free(context, layer);
    }

    /// Gives up all spans.
    pub(crate) fn free_all(&mut self, context: &PassContext) {
        (0..self.slots.len()).for_each(|layer| self.free(context, layer));
    }

    /// Attention of the active tokens before the question, where they see other tokens than the question does. Returns the
    /// cache of the tokens that the question sees.
    pub(crate) fn attend_documents(
        &self,
        context: &PassContext,
        layer: usize,
        tokens: &mut ActiveTokens,
        cache: LayerCache,
        stats: &mut PrefillStats,
    ) -> QuestionCache {
        let LayerSlots { question, documents, all } = &self.slots[layer];
        let mut attended = 0;
        if question.spans() != documents.spans() {
            attended = tokens.positions.partition_point(|p| *p < context.inputs.layout.question.start);
            set_mask(tokens, documents, tokens.decoder.config().layers[layer].window);
            let part = (documents.len() < all.len()).then(|| gather(tokens, &cache, all, documents));
            let _held = context.allocator.meter().hold(part.as_ref().map_or(0, LayerCache::bytes));
            attend(tokens, layer, part.as_ref().unwrap_or(&cache), documents.len(), 0..attended);
            stats.count_layer(tokens.decoder.config(), 0, 0, visible_keys(&tokens.visible[..attended]));
        }
        if question.len() == all.len() {
            return QuestionCache { cache, slots: all.len(), attended, copied: None };
        }
        let part = gather(tokens, &cache, all, question);
        let copied = part.bytes();
        context.allocator.meter().add(copied);
        context.allocator.release(cache);
        QuestionCache { cache: part, slots: question.len(), attended, copied: Some(copied) }
    }

    /// Lets each token see the slots that the question sees, up to its own position.
    pub(crate) fn set_question_mask(&self, layer: usize, tokens: &mut ActiveTokens) {
        let window = tokens.decoder.config().layers[layer].window;
        set_mask(tokens, &self.slots[layer].question, window);
    }

    /// Attention of the active tokens from number `first` on over the tokens that the question sees.
    pub(crate) fn attend_question(
        &self,
        layer: usize,
        tokens: &mut ActiveTokens,
        kept: &QuestionCache,
        first: usize,
        stats: &mut PrefillStats,
    ) {
        let all = tokens.positions.len();
        attend(tokens, layer, &kept.cache, kept.slots, first..all);
        stats.count_layer(tokens.decoder.config(), 0, 0, visible_keys(&tokens.visible[first..]));
    }

    /// The tokens that the question sees, the slots of documents and question among them, and the kept document tokens, counted from the
    /// first document token.
    pub(crate) fn capture_spans(
        &self,
        layout: &PromptLayout,
        layer: usize,
    ) -> (&SlotMap, (Span, Span), Vec<usize>) {
        let (slots, system) = (&self.slots[layer].question, layout.system.len());
        let question = slots.len() - layout.question.len();
        let spans = (Span::new(system, question), Span::new(question, slots.len()));
        let positions = slots.spans().iter().flat_map(|span| span.positions()).skip(system);
        let kept = positions.take(spans.0.len()).map(|p| (p - layout.system.end) as usize).collect();
        (slots, spans, kept)
    }

    /// Shows the kept tokens of a layer to the cache that decoding goes on in.
    pub(crate) fn show_answer_cache(
        &self,
        context: &PassContext,
        layer: usize,
        tokens: &ActiveTokens,
        kept: &QuestionCache,
        answer: &mut dyn DecodeCache,
    ) {
        let (slots, first) = (&self.slots[layer].question, kept.attended);
        let rows: Vec<u32> = tokens.positions[first..].iter().map(|p| slots.before(*p)).collect();
        let window = tokens.decoder.config().layers[layer].window;
        let origins: Option<Vec<u32>> =
            window.map(|_| slots.spans().iter().flat_map(|span| span.positions()).collect());
        let prompt = PromptLayer {
            whole: &kept.cache,
            q: &tokens.work.q,
            first_row: first,
            rows: &rows,
            visible: &tokens.visible[first..],
            origins: origins.as_deref(),
            precision: tokens.decoder.precision(),
            lse: None,
            mass: None,
        };
        answer.observe_prompt(layer, &prompt, context.allocator.meter());
    }
}

/// A copy of the slots of `part`.
fn gather(tokens: &ActiveTokens, cache: &LayerCache, all: &SlotMap, part: &SlotMap) -> LayerCache {
    let shape = tokens.decoder.shape();
    let slots: Vec<u32> = part.spans().iter().flat_map(|s| all.before(s.start)..all.before(s.end)).collect();
    cache.gather(tokens.device(), shape.head_dim, all.len(), &slots.repeat(shape.kv_heads), 1, part.len())
}

/// Lets each active token see the slots of `slots` up to its own position, within the window.
fn set_mask(tokens: &mut ActiveTokens, slots: &SlotMap, window: Option<usize>) {
    tokens.visible.clear();
    tokens.visible.extend(tokens.positions.iter().map(|p| slots.visible(*p, window)));
}

/// Attention of some of the active tokens, or of none. `work.attended` has the length of `work.q`.
fn attend(tokens: &mut ActiveTokens, layer: usize, cache: &LayerCache, slots: usize, rows: Range<usize>) {
    if !rows.is_empty() {
        attend_rows(layer, tokens, (cache, slots), rows, None);
    }
}

/// Selected tokens must lie within documents; those of an answer's cache must be equally many at every layer.
fn check(context: &PassContext, tokens: &[LayerTokens], probe: bool) -> Result<()> {
    let fail = |why| Err(Error::Selection { method: context.method.clone(), why });
    let layout = &context.inputs.layout;
    if tokens.len() != layout.layers {
        return fail("it has not one entry a layer");
    }
    let within = |span: &Span| layout.chunk_spans().any(|c| c.start <= span.start && span.end <= c.end);
    let count = |layer: &LayerTokens| layer.question_sees.iter().map(|span| span.len()).sum::<usize>();
    for layer in tokens {
        for spans in [&layer.question_sees, &layer.documents_see] {
            if !spans.is_sorted_by(|a, b| a.end <= b.start) || !spans.iter().all(within) {
                return fail("its spans are not ascending, each within a document");
            }
        }
        let seen = SlotMap::new(layer.question_sees.iter().chain(&layer.documents_see).copied());
        for positions in [&layer.written, &layer.continuing] {
            if !positions.is_sorted_by(|a, b| a < b) {
                return fail("recomputed tokens are not ascending");
            }
        }
        if !layer.written.iter().all(|position| seen.holds(*position)) {
            return fail("a recomputed token is not among those kept");
        }
        if !probe && count(layer) != count(&tokens[0]) {
            return fail("layers keep different numbers of tokens");
        }
    }
    Ok(())
}
