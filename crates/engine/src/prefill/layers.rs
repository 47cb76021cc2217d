//! The layers of one pass: where their keys and values come from, and where they go.

use std::sync::Arc;
use std::time::Duration;

use refrain_fusion::{Pass, PassPlan};
use refrain_kernels::Floats;
use refrain_kv::LayerCache;

use super::context::PassContext;
use super::prefetch::{LayerPrefetcher, PrefetchSizes, Prefetched, PrefetchedLayer, loaders};
use super::selected::SelectedLayers;
use super::stats::{LoadStats, PrefillStats};
use crate::Result;
use crate::cache::{BlockRetrieval, DecodeCache, EvictingCache, FullCache, PromptReport};
use crate::prefix_cache::CachedPrefix;

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

impl Carried {
    /// Gives the memory back.
    pub(super) fn release(self, context: &PassContext) {
        match self {
            Carried::Layers(layers) => layers.into_iter().for_each(|layer| context.allocator.release(layer)),
            Carried::Spans(mut spans) => spans.free_all(context),
            Carried::Nothing => {}
        }
    }
}

/// The cache of a last pass.
#[derive(Debug)]
pub(super) enum AnswerCache {
    Full(FullCache),
    Evicting(Box<EvictingCache>),
}

impl AnswerCache {
    pub(super) fn as_cache(&mut self) -> &mut dyn DecodeCache {
        match self {
            AnswerCache::Full(cache) => cache,
            AnswerCache::Evicting(cache) => cache.as_mut(),
        }
    }
}

/// Origin of a pass's layers.
#[derive(Debug)]
pub(super) enum Source {
    /// Nothing is reused: layers are empty.
    Empty,
    /// The first tokens come out of the prefix cache.
    TakenOver(Arc<CachedPrefix>),
    /// Loaded beside the computation.
    Prefetched(LayerPrefetcher),
    /// A part of the tokens, read a layer ahead of the computation.
    Selected(Box<SelectedLayers>),
}

/// A layer's cache while rows attend over it.
#[derive(Debug)]
pub(super) struct AttendingLayer {
    pub(super) cache: LayerCache,
    /// The report of the rows' attention. With one, the answer's cache looks at the layer once the rows have attended.
    pub(super) report: PromptReport,
    /// Tokens that were projected.
    pub(super) projected: usize,
}

/// A pass but for its active tokens.
#[derive(Debug)]
pub(crate) struct PassLayers {
    pub(crate) context: Arc<PassContext>,
    pub(crate) pass: Box<dyn Pass>,
    pub(crate) plan: PassPlan,
    /// The cache that the answer is decoded in; a probe has none.
    pub(super) answer: Option<AnswerCache>,
    pub(super) source: Source,
    /// The first layers as the probe before has left them, in ascending order; they come before those of `source`.
    pub(super) left: std::vec::IntoIter<LayerCache>,
    /// Layers of a probe, for the next pass.
    pub(super) carried: Vec<LayerCache>,
    pub(super) retrieval: Option<BlockRetrieval>,
    pub(super) q_pre_rope: Floats,
    /// Log-sum-exps of the rows of `attending`, if the answer's cache wants them.
    pub(super) lse: Floats,
    /// Attention mass of the slots of `attending`, `Hkv × slots`, if the answer's cache wants it; else empty.
    pub(super) mass: Vec<f32>,
    /// The layer whose rows attend part by part.
    pub(super) attending: Option<AttendingLayer>,
    /// The layer to be computed next.
    pub(super) ready: Option<PrefetchedLayer>,
    pub(crate) stats: PrefillStats,
}

impl PassLayers {
    /// Layers that the pass goes through.
    pub(super) fn depth(&self) -> usize {
        let layers = self.context.inputs.layout.layers;
        self.plan.probe.map_or(layers, |depth| depth.min(layers))
    }

    /// Slots of a head in the cache that a layer of the prompt is computed in.
    pub(super) fn prompt_capacity(&self) -> usize {
        self.answer.as_ref().map_or(0, |answer| match answer {
            AnswerCache::Full(cache) => cache.prompt_capacity(),
            AnswerCache::Evicting(cache) => cache.prompt_capacity(),
        })
    }

    /// Prepares a pass over all tokens of the prompt: the layers that the probe before has left, or a prefetcher.
    pub(super) fn read_all(&mut self, mut answer: AnswerCache, carried: Carried) {
        let context = self.context.clone();
        let (engine, decoder) = (&context.engine, context.engine.decoder_arc());
        let (shape, dtype) = (decoder.shape(), engine.settings().kv);
        let capacity = answer.as_cache().prompt_capacity();
        // A layer that waits is the request's own cache, or, where that is bounded, more than it.
        let bounded = matches!(answer, AnswerCache::Evicting(_));
        let is_apart = engine.device_chunks().is_apart();
        let ahead = if bounded { loaders(decoder.device().threads(), is_apart) } else { shape.layers };
        if bounded {
            engine.buffers().kv.trim(ahead + 1);
        }
        let compares = self.plan.checks.values().any(|needs| needs.deviation.is_some());
        let fits = |layers: &Vec<LayerCache>| {
            !compares
                && self.plan.key_positions == refrain_fusion::KeyPositions::Global
                && layers.iter().all(|layer| layer.k.len() == shape.width() * capacity)
        };
        match carried {
            Carried::Layers(layers) if fits(&layers) => self.left = layers.into_iter(),
            carried => carried.release(&context),
        }
        let (first, layers) = (self.left.len(), self.depth());
        if let Some(taken) = &context.taken {
            self.source = Source::TakenOver(taken.clone());
        } else if !context.segments.is_empty() && first < layers {
            let sizes = PrefetchSizes { shape, dtype, capacity, first, layers, ahead };
            self.source = Source::Prefetched(LayerPrefetcher::start(
                context.segments.clone(),
                &self.plan,
                context.tables.clone(),
                sizes,
                &context.allocator,
                (decoder.device(), engine.device_chunks()),
            ));
        }
        self.answer = Some(answer);
    }

    /// The layer's cache with reused keys and values, if they come within `patience`; without a slot where it is made to measure.
    ///
    /// # Errors
    /// If no thread that reads can be started.
    pub(super) fn poll(&mut self, layer: usize, patience: Duration) -> Result<Prefetched> {
        let context = &self.context;
        let empty = |cache| Prefetched::Ready(PrefetchedLayer { cache, cached: Vec::new() });
        if let Some(cache) = self.left.next() {
            return Ok(empty(cache));
        }
        Ok(match &mut self.source {
            Source::Prefetched(prefetcher) => prefetcher.poll(layer, patience),
            Source::Empty | Source::TakenOver(_) => {
                let decoder = context.engine.decoder();
                let dtype = context.engine.settings().kv;
                let capacity = self.prompt_capacity();
                let mut cache = self.context.allocator.acquire(decoder.shape(), dtype, capacity);
                if let Source::TakenOver(taken) = &self.source {
                    taken.place(&**decoder.device(), layer, &mut cache, capacity);
                }
                empty(cache)
            }
            Source::Selected(selected) => selected.poll(context, layer, patience)?,
        })
    }

    /// The loading since the last call.
    pub(crate) fn count_load(&mut self) -> LoadStats {
        match &mut self.source {
            Source::Prefetched(prefetcher) => prefetcher.count(),
            Source::Selected(selected) => selected.load(),
            Source::Empty | Source::TakenOver(_) => LoadStats::default(),
        }
    }

    /// Time that the computing thread waited for loading so far.
    pub(crate) fn total_waited(&self) -> Duration {
        match &self.source {
            Source::Prefetched(prefetcher) => prefetcher.waited(),
            Source::Selected(selected) => selected.waited(),
            Source::Empty | Source::TakenOver(_) => Duration::ZERO,
        }
    }
}
