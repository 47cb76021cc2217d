//! One pass of a fusion method: its active tokens go through the layers, and the engine acts on what the method decides.

use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_eviction::PromptSpans;
use refrain_fusion::{
    CachedTensor, CachedTokens, LayerView, Mask, Needs, Pass, PassAttention, PassPlan, PromptLayout,
};
use refrain_kernels::Slice;
use refrain_kv::{LayerCache, Span, stats};
use refrain_store::Layer;

use super::capture::{AttentionCapture, AttentionMap, EXPLAIN_LAYER, question_keys};
use super::context::PassContext;
use super::prefetch::{LayerPrefetcher, PrefetchSizes, Prefetched, PrefetchedLayer};
use super::reuse::Segment;
use super::selected::SelectedLayers;
use super::stats::{LoadStats, PrefillStats, count_within};
use crate::Result;
use crate::cache::{
    BlockRetrieval, BlockSparseCache, DecodeCache, EvictingCache, FullCache, PromptLayer, RetrievingTokens,
};
use crate::forward::{ActiveTokens, Flow, LayerAttention, attention, forward, visible_keys};

/// Keys and values that a probe leaves to the next pass.
#[derive(Debug, Default)]
pub(crate) enum Carried {
    #[default]
    Nothing,
    /// Layers with all reused keys and values in place. Slots of tokens that the next pass computes again are overwritten by it.
    Layers(Vec<LayerCache>),
    /// Spans that were read of each layer.
    Spans(Box<SelectedLayers>),
}

/// The cache of a last pass.
#[derive(Debug)]
enum AnswerCache {
    Full(FullCache),
    Evicting(EvictingCache),
}

impl AnswerCache {
    fn as_cache(&mut self) -> &mut dyn DecodeCache {
        match self {
            AnswerCache::Full(cache) => cache,
            AnswerCache::Evicting(cache) => cache,
        }
    }
}

/// Origin of a pass's layers.
#[derive(Debug)]
enum Source {
    /// Nothing is reused: layers are empty.
    Empty,
    /// Loaded beside the computation.
    Prefetched(LayerPrefetcher),
    /// Left by the probe before, in ascending order of layers.
    Carried(std::vec::IntoIter<LayerCache>),
    /// A part of the tokens, read when a layer's turn comes.
    Selected(Box<SelectedLayers>),
}

/// A pass under way.
#[derive(Debug)]
pub(crate) struct PassRun {
    tokens: ActiveTokens,
    layer: usize,
    pub(crate) layers: PassLayers,
}

/// A pass but for its active tokens.
#[derive(Debug)]
pub(crate) struct PassLayers {
    pub(crate) context: Arc<PassContext>,
    pub(crate) pass: Box<dyn Pass>,
    pub(crate) plan: PassPlan,
    /// The cache that the answer is decoded in; a probe has none.
    answer: Option<AnswerCache>,
    source: Source,
    /// Layers of a probe, for the next pass.
    carried: Vec<LayerCache>,
    retrieval: Option<BlockRetrieval>,
    q_pre_rope: Vec<f32>,
    /// The layer to be computed next.
    ready: Option<PrefetchedLayer>,
    pub(crate) stats: PrefillStats,
}

/// The end of one call of [`PassRun::advance`].
#[derive(Debug)]
pub(crate) enum Step {
    /// A layer was computed.
    Layer,
    /// The layer's keys and values have not come yet.
    Waiting,
    /// A segment turned out broken.
    Broken,
    /// The pass has gone through its layers.
    Done,
}

/// A last pass at its end.
pub(crate) struct Finished {
    pub(crate) cache: Box<dyn DecodeCache>,
    pub(crate) logits: Vec<f32>,
    pub(crate) stats: PrefillStats,
    pub(crate) prefetcher: Option<LayerPrefetcher>,
    pub(crate) tokens: ActiveTokens,
    /// Whether an eviction policy bounds the cache.
    pub(crate) evicting: bool,
}

impl PassRun {
    /// Begins a pass. `before` holds the statistics of the probes before it.
    pub(crate) fn start(
        context: &Arc<PassContext>,
        pass: Box<dyn Pass>,
        carried: Carried,
        before: PrefillStats,
    ) -> Result<PassRun> {
        let plan = pass.plan().clone();
        context.check_tokens(&plan.tokens, None)?;
        let (engine, layout) = (&context.engine, &context.inputs.layout);
        let decoder = engine.decoder_arc();
        let (shape, dtype) = (decoder.shape(), engine.settings().kv);
        let mut layers = PassLayers {
            context: context.clone(),
            pass,
            answer: None,
            source: Source::Empty,
            carried: Vec::new(),
            retrieval: None,
            q_pre_rope: Vec::new(),
            ready: None,
            stats: PrefillStats {
                ambiguous_cases: plan.ambiguous_cases,
                ..PrefillStats::after_probe(before)
            },
            plan,
        };
        match &layers.plan.cached {
            CachedTokens::All => {
                let spans = PromptSpans { system: layout.system, question: layout.question };
                let ropes = decoder.ropes(context.max_rope_position);
                let room = context.max_seq_len;
                let evicting =
                    EvictingCache::new(decoder.config(), ropes, &context.eviction, spans, dtype, room, None)?;
                let answer = match evicting {
                    Some(evicting) => AnswerCache::Evicting(evicting),
                    None => AnswerCache::Full(FullCache::new(
                        shape,
                        dtype,
                        room,
                        context.tables.clone(),
                        layout.len(),
                    )),
                };
                layers.read_all(answer, carried);
            }
            CachedTokens::Selected(tokens) => {
                let before = match carried {
                    Carried::Spans(before) => Some(*before),
                    _ => None,
                };
                let selected = SelectedLayers::new(context, tokens, layers.plan.probe.is_some(), before)?;
                if layers.plan.probe.is_none() {
                    layers.answer = Some(AnswerCache::Evicting(selected.answer_cache(context)?));
                    layers.stats.kept_tokens = selected.kept_tokens();
                }
                // Layers are made to measure, a few at a time.
                engine.buffers().kv.trim(2);
                layers.source = Source::Selected(Box::new(selected));
            }
        }
        if let PassAttention::BlockRetrieval(plan) = &layers.plan.attention {
            let ropes = decoder.ropes(context.max_rope_position);
            // A bounded cache's layers hold the prompt alone while it is computed.
            let room = layers.prompt_capacity();
            layers.retrieval = Some(BlockRetrieval::new(plan, ropes, shape, room));
        }
        let mut tokens = engine.buffers().acquire(decoder, dtype);
        tokens.embed(&context.ids, layers.plan.tokens.clone(), &context.tables)?;
        Ok(PassRun { tokens, layer: 0, layers })
    }

    /// Computes the next layer, if its keys and values are there.
    pub(crate) fn advance(&mut self) -> Result<Step> {
        let depth = self.layers.depth();
        if self.layer == depth {
            return Ok(Step::Done);
        }
        match self.layers.poll(self.layer) {
            Prefetched::Ready(ready) => self.layers.ready = Some(ready),
            Prefetched::Waiting => return Ok(Step::Waiting),
            Prefetched::Broken => return Ok(Step::Broken),
        }
        let started = Instant::now();
        let (waited, capturing) = (self.layers.total_waited(), self.layers.stats.capturing);
        forward(self.layer, &mut self.tokens, &mut self.layers)?;
        if self.layers.is_broken() {
            return Ok(Step::Broken);
        }
        if self.layers.plan.probe.is_some() {
            let other = self.layers.total_waited() - waited + self.layers.stats.capturing - capturing;
            self.layers.stats.selecting += started.elapsed().saturating_sub(other);
        }
        self.layer += 1;
        Ok(if self.layer == depth { Step::Done } else { Step::Layer })
    }

    /// The pass after this probe.
    pub(crate) fn next(self) -> Result<(Option<Box<dyn Pass>>, Carried, PrefillStats)> {
        let PassRun { tokens, layers, .. } = self;
        layers.context.engine.buffers().release(tokens);
        let PassLayers { pass, source, carried, mut stats, .. } = layers;
        let started = Instant::now();
        let next = pass.next()?;
        stats.selecting += started.elapsed();
        let carried = match source {
            Source::Selected(selected) => Carried::Spans(selected),
            _ => Carried::Layers(carried),
        };
        Ok((next, carried, stats))
    }

    /// The cache to decode in and the logits of the prompt's last token, at the end of the last pass.
    pub(crate) fn finish(self) -> Finished {
        let PassRun { mut tokens, layers, .. } = self;
        let logits = tokens.logits().to_vec();
        let PassLayers { context, answer, source, retrieval, mut stats, .. } = layers;
        stats.kv_bytes_peak = context.allocator.meter().peak();
        if stats.kept_tokens == 0 {
            stats.kept_tokens = retrieval.as_ref().map_or(context.ids.len(), |retrieval| retrieval.seen);
        }
        let evicting = matches!(answer, Some(AnswerCache::Evicting(_)));
        let cache: Box<dyn DecodeCache> = match (answer, retrieval) {
            (Some(AnswerCache::Full(full)), Some(retrieval)) => {
                Box::new(BlockSparseCache::new(full, retrieval))
            }
            (Some(AnswerCache::Full(full)), None) => Box::new(full),
            // From now on the policy decides what is seen.
            (Some(AnswerCache::Evicting(evicting)), _) => Box::new(evicting),
            (None, _) => unreachable!("the last pass has a cache"),
        };
        let prefetcher = match source {
            Source::Prefetched(prefetcher) => Some(prefetcher),
            _ => None,
        };
        Finished { cache, logits, stats, prefetcher, tokens, evicting }
    }
}

impl PassLayers {
    /// Layers that the pass goes through.
    fn depth(&self) -> usize {
        let layers = self.context.inputs.layout.layers;
        self.plan.probe.map_or(layers, |depth| depth.min(layers))
    }

    /// Slots of a head in the cache that a layer of the prompt is computed in.
    fn prompt_capacity(&self) -> usize {
        self.answer.as_ref().map_or(0, |answer| match answer {
            AnswerCache::Full(cache) => cache.prompt_capacity(),
            AnswerCache::Evicting(cache) => cache.prompt_capacity(),
        })
    }

    /// Prepares a pass over all tokens of the prompt: the layers that the probe before has left, or a prefetcher.
    fn read_all(&mut self, mut answer: AnswerCache, carried: Carried) {
        let context = self.context.clone();
        let (engine, decoder) = (&context.engine, context.engine.decoder_arc());
        let (shape, dtype) = (decoder.shape(), engine.settings().kv);
        let capacity = answer.as_cache().prompt_capacity();
        // A layer that waits is the request's own cache, or, where that is bounded, more than it.
        let bounded = matches!(answer, AnswerCache::Evicting(_));
        let ahead = if bounded { decoder.backend().threads() } else { shape.layers };
        if bounded {
            engine.buffers().kv.trim(ahead + 1);
        }
        let compares = self.plan.checks.values().any(|needs| needs.deviation.is_some());
        let fits = |layers: &Vec<LayerCache>| {
            layers.len() == shape.layers
                && !compares
                && self.plan.key_positions == refrain_fusion::KeyPositions::Global
                && layers.iter().all(|layer| layer.k.len() == shape.width() * capacity)
        };
        self.source = match carried {
            Carried::Layers(layers) if fits(&layers) => Source::Carried(layers.into_iter()),
            carried => {
                match carried {
                    Carried::Layers(layers) => {
                        layers.into_iter().for_each(|layer| context.allocator.release(layer));
                    }
                    Carried::Spans(mut spans) => spans.free_all(&context),
                    Carried::Nothing => {}
                }
                if context.segments.is_empty() {
                    Source::Empty
                } else {
                    let sizes = PrefetchSizes { shape, dtype, capacity, layers: self.depth(), ahead };
                    Source::Prefetched(LayerPrefetcher::start(
                        context.segments.clone(),
                        &self.plan,
                        context.tables.clone(),
                        sizes,
                        context.allocator.clone(),
                        decoder.backend(),
                    ))
                }
            }
        };
        self.answer = Some(answer);
    }

    /// The layer's cache with reused keys and values.
    fn poll(&mut self, layer: usize) -> Prefetched {
        let context = &self.context;
        let empty = |cache| Prefetched::Ready(PrefetchedLayer { cache, cached: Vec::new() });
        match &mut self.source {
            Source::Prefetched(prefetcher) => prefetcher.poll(layer),
            Source::Carried(layers) => match layers.next() {
                Some(cache) => empty(cache),
                None => Prefetched::Broken,
            },
            Source::Empty => {
                let decoder = context.engine.decoder();
                let dtype = context.engine.settings().kv;
                let capacity = self.prompt_capacity();
                empty(self.context.allocator.acquire(decoder.shape(), dtype, capacity))
            }
            Source::Selected(_) => {
                empty(LayerCache::new(context.engine.decoder().shape(), context.engine.settings().kv, 0))
            }
        }
    }

    fn is_broken(&self) -> bool {
        matches!(&self.source, Source::Selected(selected) if selected.is_broken())
    }

    /// Bytes and time of loading so far.
    pub(crate) fn count_load(&mut self) -> LoadStats {
        match &mut self.source {
            Source::Prefetched(prefetcher) => prefetcher.count(),
            Source::Selected(selected) => selected.load(),
            Source::Empty | Source::Carried(_) => LoadStats::default(),
        }
    }

    /// Time that the computing thread waited for loading so far.
    pub(crate) fn total_waited(&self) -> Duration {
        match &self.source {
            Source::Prefetched(prefetcher) => prefetcher.waited(),
            Source::Selected(selected) => selected.load().busy,
            Source::Empty | Source::Carried(_) => Duration::ZERO,
        }
    }

    /// Asks the method which tokens go on. `mean_query` is the question's mean query before RoPE, if it is needed.
    fn observe(
        &mut self,
        layer: usize,
        needs: Needs,
        tokens: &ActiveTokens,
        (cache, cached): (Option<&LayerCache>, &[Layer]),
        mean_query: &[f32],
    ) -> Result<Vec<u32>> {
        let started = Instant::now();
        let layout = &self.context.inputs.layout;
        let question_attention = match (needs.question_attention, cache) {
            (Some(softmax), Some(cache)) => {
                let keys =
                    question_keys(tokens, cache, self.prompt_capacity(), (layer, layout.question.len()));
                let cpu = tokens.decoder.backend();
                stats::question_attention(cpu, &keys, layout.documents(), layout.question, softmax)
            }
            _ => Vec::new(),
        };
        let deviation = match needs.deviation {
            Some(needed) => self.deviation(tokens, cached, needed),
            None => Vec::new(),
        };
        let view = LayerView {
            layer,
            layout,
            tokens: &tokens.positions,
            question_attention: &question_attention,
            deviation: &deviation,
            mean_query,
        };
        let continuing = self.pass.observe(&view)?;
        if self.plan.probe.is_none() {
            self.stats.selecting += started.elapsed();
        }
        self.context.check_tokens(&continuing, Some(&tokens.positions))?;
        Ok(continuing)
    }

    /// Distance of each active cached token's fresh row from its cached one, in the order of positions.
    fn deviation(
        &self,
        tokens: &ActiveTokens,
        cached: &[Layer],
        (tensor, distance): (CachedTensor, stats::Distance),
    ) -> Vec<f32> {
        let width = tokens.decoder.shape().width();
        let fresh = match tensor {
            CachedTensor::Keys => tokens.work.k.as_slice(),
            CachedTensor::Values => tokens.work.v.as_slice(),
        };
        fn row(slice: Slice<'_>, i: usize, width: usize) -> Slice<'_> {
            slice.range(i * width..(i + 1) * width)
        }
        let mut distances = Vec::new();
        let chunks = self.context.segments.iter().zip(cached).filter(|(segment, _)| segment.chunk.is_some());
        for (segment, layer) in chunks {
            let cached = match tensor {
                CachedTensor::Keys => layer.k(),
                CachedTensor::Values => layer.v(),
            };
            let span = segment.span;
            let from = tokens.positions.partition_point(|token| *token < span.start);
            let own = tokens.positions[from..].iter().take_while(|token| **token < span.end);
            for (i, position) in own.enumerate() {
                let cached = row(cached, (position - span.start) as usize, width);
                distances.extend(stats::deviation(row(fresh, from + i, width), cached, width, distance));
            }
        }
        distances
    }

    /// The question's mean query before RoPE, if `needs` asks for it.
    fn mean_query(&self, needs: Option<&Needs>, tokens: &ActiveTokens) -> Vec<f32> {
        if !needs.is_some_and(|needs| needs.mean_query) {
            return Vec::new();
        }
        let (question, width) = (self.context.inputs.layout.question.len(), tokens.q_width());
        stats::mean(&tokens.work.q[(tokens.positions.len() - question) * width..], width)
    }

    /// Reports the question's attention to the tokens of `kept`, as far as it was asked for. `spans` are the documents' and the
    /// question's slots in `cache`.
    fn capture(
        &mut self,
        layer: usize,
        tokens: &ActiveTokens,
        (cache, capacity): (&LayerCache, usize),
        (documents, question): (Span, Span),
        kept: Option<&[usize]>,
    ) {
        let layout = &self.context.inputs.layout;
        let started = Instant::now();
        let cpu = tokens.decoder.backend();
        let all = layout.documents().len();
        match self.context.capture {
            AttentionCapture::Explain if layer == EXPLAIN_LAYER.min(layout.layers - 1) => {
                let keys = question_keys(tokens, cache, capacity, (layer, question.len()));
                let found =
                    stats::question_attention(cpu, &keys, documents, question, stats::Softmax::PerHead);
                let spread = |kept: &[usize]| {
                    let mut attention = vec![0.0; all];
                    kept.iter().zip(&found).for_each(|(token, weight)| attention[*token] = *weight);
                    attention
                };
                self.stats.attention = Some(kept.map(spread).unwrap_or(found));
            }
            AttentionCapture::Maps if all > 0 => {
                let keys = question_keys(tokens, cache, capacity, (layer, question.len()));
                let map = AttentionMap::of(cpu, &keys, (documents, question));
                self.stats.maps.push(kept.map_or(map.clone(), |kept| map.spread(kept, all)));
                self.stats.capturing += started.elapsed();
            }
            _ => {}
        }
    }

    /// Lets each token see its slots at `layer`. `before` holds the tokens before the last layer shrank them, or nothing.
    fn set_mask(&self, layer: usize, tokens: &mut ActiveTokens, before: &[u32]) {
        match self.plan.mask {
            Mask::Absolute => tokens.set_causal_mask(layer),
            Mask::BottomRight => {
                let computed = if before.is_empty() { &tokens.positions } else { before };
                let hidden = self.context.inputs.layout.len() - computed.len();
                let seen = |token: &u32| (0, (hidden + computed.partition_point(|t| t <= token)) as u32);
                tokens.visible = tokens.positions.iter().map(seen).collect();
            }
        }
    }

    /// A layer at which every token of the prompt has its slot.
    fn attend_all(&mut self, layer: usize, tokens: &mut ActiveTokens) -> Result<Flow> {
        let PrefetchedLayer { mut cache, cached } = match self.ready.take() {
            Some(ready) => ready,
            None => unreachable!("a layer is computed when its keys and values are there"),
        };
        let context = self.context.clone();
        let layout: &PromptLayout = &context.inputs.layout;
        let last = layer + 1 == self.depth();
        let needs = self.plan.checks.get(&layer).copied();
        let mean_query = self.mean_query(needs.as_ref(), tokens);
        if self.retrieval.is_some() {
            self.q_pre_rope.clear();
            self.q_pre_rope.extend_from_slice(&tokens.work.q);
        }
        tokens.apply_rope(layer);
        tokens.write_kv(layer, &mut cache, &tokens.positions);
        let projected = tokens.positions.len();
        let final_pass = self.plan.probe.is_none();
        if final_pass {
            self.stats.document_rows.push(count_within(&tokens.positions, layout.documents()));
            // Active tokens only shrink, so what the last layer reads from the cache is what any layer does.
            let read = |s: &Segment| s.span.len() - count_within(&tokens.positions, s.span);
            self.stats.cached_tokens = context.segments.iter().map(read).sum();
            let maps = self.retrieval.is_none() || context.capture != AttentionCapture::Maps;
            if maps && context.capture != AttentionCapture::Nothing {
                let spans = (layout.documents(), layout.question);
                self.capture(layer, tokens, (&cache, self.prompt_capacity()), spans, None);
            }
        }
        if let Some(needs) = needs.filter(|_| !(final_pass && last)) {
            let continuing = self.observe(layer, needs, tokens, (Some(&cache), &cached), &mean_query)?;
            tokens.keep(continuing, &context.tables);
        }
        if last && !final_pass {
            self.stats.count_layer(tokens.decoder.config(), projected, 0, 0);
            self.carried.push(cache);
            return Ok(Flow::Stop);
        }
        let capacity = self.prompt_capacity();
        if final_pass && last {
            self.stats.final_rows.clone_from(&tokens.positions);
            self.set_mask(layer, tokens, &[]);
            self.observe_prompt(layer, tokens, &cache);
            if self.retrieval.is_none() {
                tokens.keep(vec![layout.len() as u32 - 1], &context.tables);
            }
        }
        let before = std::mem::take(&mut self.stats.final_rows);
        self.set_mask(layer, tokens, &before);
        self.stats.final_rows = before;
        if final_pass && !last {
            self.observe_prompt(layer, tokens, &cache);
        }
        let (visible, elements) = (&tokens.visible, tokens.work.q.len());
        tokens.work.attended.resize(elements);
        let keys = match &mut self.retrieval {
            None => {
                let attention =
                    attention(&tokens.decoder, layer, (&cache, capacity), &tokens.work.q, visible);
                tokens.decoder.backend().attention(&attention, &mut tokens.work.attended);
                visible_keys(visible)
            }
            Some(retrieval) => {
                let retrieving = RetrievingTokens {
                    decoder: &tokens.decoder,
                    cache: &cache,
                    capacity,
                    positions: &tokens.positions,
                    visible,
                    q: &tokens.work.q,
                    q_pre_rope: &self.q_pre_rope,
                };
                retrieval.attend(layer, &retrieving, &mut tokens.work.attended);
                if last {
                    // Blocks are weighed by the attention of all tokens; the output of the last one is all that is needed.
                    let width = elements / tokens.positions.len();
                    tokens.work.attended.copy_within(elements - width..elements, 0);
                    tokens.keep(vec![layout.len() as u32 - 1], &context.tables);
                    tokens.work.attended.resize(width);
                }
                retrieval.take_keys()
            }
        };
        self.stats.count_layer(tokens.decoder.config(), projected, tokens.positions.len(), keys);
        match &mut self.answer {
            Some(answer) if final_pass => {
                if let Some(unused) = answer.as_cache().store_prompt(layer, cache) {
                    context.allocator.release(unused);
                }
            }
            Some(AnswerCache::Full(_)) => self.carried.push(cache),
            _ => context.allocator.release(cache),
        }
        Ok(Flow::Continue)
    }

    /// Shows the answer's cache the prompt's keys and values of a layer, and the tokens that were computed there.
    fn observe_prompt(&mut self, layer: usize, tokens: &ActiveTokens, cache: &LayerCache) {
        let prompt = PromptLayer {
            cpu: tokens.decoder.backend(),
            whole: cache,
            q: &tokens.work.q,
            rows: &tokens.positions,
            visible: &tokens.visible,
            origins: None,
        };
        if let Some(answer) = &mut self.answer {
            answer.as_cache().observe_prompt(layer, &prompt, self.context.allocator.meter());
        }
    }

    /// A layer that holds a part of the prompt's tokens.
    fn attend_selected(
        &mut self,
        selected: &mut SelectedLayers,
        layer: usize,
        tokens: &mut ActiveTokens,
    ) -> Result<Flow> {
        let context = self.context.clone();
        let layout: &PromptLayout = &context.inputs.layout;
        let decoder = tokens.decoder.clone();
        let (config, projected) = (decoder.config(), tokens.positions.len());
        let last = layer + 1 == self.depth();
        let final_pass = self.plan.probe.is_none();
        if let Some(needs) = self.plan.checks.get(&layer).copied() {
            let mean_query = self.mean_query(Some(&needs), tokens);
            self.observe(layer, needs, tokens, (None, &[]), &mean_query)?;
        }
        if last && !final_pass {
            self.stats.count_layer(config, projected, 0, 0);
            return Ok(Flow::Stop);
        }
        tokens.apply_rope(layer);
        let merge = self.plan.merges.then_some(self.pass.as_ref());
        let Some(cache) = selected.layer_cache(&context, layer, tokens, merge) else {
            return Ok(Flow::Stop);
        };
        if final_pass {
            self.stats.document_rows.push(count_within(&tokens.positions, layout.documents()));
            selected.free(&context, layer);
            if last {
                self.stats.final_rows.clone_from(&tokens.positions);
            }
        }
        tokens.keep(selected.continuing(&context, layer), &context.tables);
        let kept = selected.attend_documents(&context, layer, tokens, cache, &mut self.stats);
        selected.set_question_mask(layer, tokens);
        if final_pass {
            if context.capture != AttentionCapture::Nothing {
                let (spans, positions) = selected.capture_spans(layout, layer);
                self.capture(layer, tokens, (&kept.cache, kept.slots), spans, Some(&positions));
            }
            if let Some(answer) = &mut self.answer {
                selected.show_answer_cache(&context, layer, tokens, &kept, answer.as_cache());
            }
        }
        let mut first = kept.attended;
        if last {
            tokens.keep(vec![layout.len() as u32 - 1], &context.tables);
            selected.set_question_mask(layer, tokens);
            first = 0;
        }
        selected.attend_question(layer, tokens, &kept, first, &mut self.stats);
        self.stats.count_layer(config, projected, tokens.positions.len(), 0);
        if last {
            self.stats.cached_tokens = selected.cached_tokens(&context);
        }
        kept.release(&context);
        Ok(Flow::Continue)
    }
}

impl LayerAttention for PassLayers {
    fn attend(&mut self, layer: usize, tokens: &mut ActiveTokens) -> Result<Flow> {
        match std::mem::replace(&mut self.source, Source::Empty) {
            Source::Selected(mut selected) => {
                let flow = self.attend_selected(&mut selected, layer, tokens);
                self.source = Source::Selected(selected);
                flow
            }
            source => {
                self.source = source;
                self.attend_all(layer, tokens)
            }
        }
    }
}
