//! One pass of a fusion method: its active tokens go through the layers, and the engine acts on what the method decides.

use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_eviction::PromptSpans;
use refrain_fusion::{CachedTokens, Pass, PassAttention};

use super::context::PassContext;
use super::layers::{AnswerCache, Carried, PassLayers, Source};
use super::prefetch::{LayerPrefetcher, Prefetched};
use super::selected::SelectedLayers;
use super::stats::PrefillStats;
use crate::Result;
use crate::cache::{BlockRetrieval, BlockSparseCache, DecodeCache, EvictingCache, FullCache};
use crate::forward::{ActiveTokens, LayerRun};

/// A pass under way.
#[derive(Debug)]
pub(crate) struct PassRun {
    tokens: ActiveTokens,
    layer: usize,
    /// Progress of the layer.
    run: LayerRun,
    pub(crate) layers: PassLayers,
}

/// The end of one call of [`PassRun::advance`].
#[derive(Debug)]
pub(crate) enum Step {
    /// A layer was computed, or a part of a long one.
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

/// A probe at its end.
pub(crate) struct AfterProbe {
    pub(crate) next: Option<Box<dyn Pass>>,
    pub(crate) carried: Carried,
    pub(crate) stats: PrefillStats,
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
            left: Vec::new().into_iter(),
            carried: Vec::new(),
            retrieval: None,
            attending: None,
            q_pre_rope: decoder.device().floats(0),
            lse: decoder.device().floats(0),
            mass: Vec::new(),
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
                let sizes = (dtype, room);
                let (device, config) = (decoder.device(), decoder.config());
                let evicting =
                    EvictingCache::new(device, config, ropes, &context.eviction, spans, sizes, None)?;
                let answer = match evicting {
                    Some(evicting) => AnswerCache::Evicting(Box::new(evicting)),
                    None => AnswerCache::Full(FullCache::new(
                        &**device,
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
                    carried => {
                        carried.release(context);
                        None
                    }
                };
                let selected = SelectedLayers::new(context, tokens, layers.plan.probe, before)?;
                if layers.plan.probe.is_none() {
                    layers.answer = Some(AnswerCache::Evicting(Box::new(selected.answer_cache(context)?)));
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
        Ok(PassRun { tokens, layer: 0, run: LayerRun::default(), layers })
    }

    /// Computes the next layer, or a part of it, if its keys and values come within `patience`.
    pub(crate) fn advance(&mut self, patience: Duration) -> Result<Step> {
        let depth = self.layers.depth();
        if self.layer == depth {
            return Ok(Step::Done);
        }
        if self.run == LayerRun::Project {
            match self.layers.poll(self.layer, patience)? {
                Prefetched::Ready(ready) => self.layers.ready = Some(ready),
                Prefetched::Waiting => return Ok(Step::Waiting),
                Prefetched::Broken => return Ok(Step::Broken),
                Prefetched::Failed(failure) => return Err(failure.into()),
            }
        }
        let started = Instant::now();
        let capturing = self.layers.stats.capturing;
        let most = self.layers.context.engine.settings().ubatch;
        let done = self.run.advance(self.layer, &mut self.tokens, &mut self.layers, most)?;
        if self.layers.plan.probe.is_some() {
            let other = self.layers.stats.capturing - capturing;
            self.layers.stats.selecting += started.elapsed().saturating_sub(other);
        }
        self.layer += usize::from(done);
        Ok(if self.layer == depth { Step::Done } else { Step::Layer })
    }

    /// The pass after this probe.
    pub(crate) fn next(self) -> Result<AfterProbe> {
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
        Ok(AfterProbe { next, carried, stats })
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
                let device = context.engine.decoder().device();
                Box::new(BlockSparseCache::new(&**device, full, retrieval))
            }
            (Some(AnswerCache::Full(full)), None) => Box::new(full),
            // From now on the policy decides what is seen.
            (Some(AnswerCache::Evicting(evicting)), _) => evicting,
            (None, _) => unreachable!("the last pass has a cache"),
        };
        let prefetcher = match source {
            Source::Prefetched(prefetcher) => Some(prefetcher),
            _ => None,
        };
        Finished { cache, logits, stats, prefetcher, tokens, evicting }
    }
}
