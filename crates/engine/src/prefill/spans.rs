//! Ranges of cached tokens, read for the layers of a pass over selected tokens.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use refrain_kernels::Slice;
use refrain_kv::{LayerCache, Span};
use refrain_store::Layer;

use super::context::PassContext;
use super::prefetch::{Prefetched, PrefetchedLayer, loaders};
use super::reuse::Segment;
use super::stats::LoadStats;
use crate::Result;
use crate::background::Background;
use crate::cache::SlotMap;

/// Cached keys and values of a run of positions at one layer.
#[derive(Clone, Debug)]
pub(crate) struct LoadedSpan {
    pub(crate) span: Span,
    data: Layer,
    /// Row of its first token in `data`.
    from: usize,
}

impl LoadedSpan {
    /// Keys before RoPE and values, `tokens × width` each.
    pub(crate) fn kv(&self, width: usize) -> (Slice<'_>, Slice<'_>) {
        let range = self.from * width..(self.from + self.span.len()) * width;
        (self.data.k().range(range.clone()), self.data.v().range(range))
    }
}

/// All spans that were read at one layer, ascending.
#[derive(Clone, Debug, Default)]
pub(crate) struct LoadedSpans {
    all: Vec<LoadedSpan>,
    /// Bytes that were allocated for them.
    bytes: usize,
}

impl LoadedSpans {
    pub(crate) fn iter(&self) -> impl Iterator<Item = &LoadedSpan> {
        self.all.iter()
    }

    /// Bytes held for the spans; the system part is shared with the store.
    fn bytes(&self) -> usize {
        self.bytes
    }

    /// The cached key (before RoPE) and value of a position, `width` elements each.
    pub(crate) fn at(&self, position: u32, width: usize) -> Option<(Slice<'_>, Slice<'_>)> {
        let after = self.all.partition_point(|loaded| loaded.span.start <= position);
        let loaded = self.all[..after].last().filter(|loaded| loaded.span.contains(position))?;
        let (k, v) = loaded.kv(width);
        let at = (position - loaded.span.start) as usize * width;
        Some((k.range(at..at + width), v.range(at..at + width)))
    }

    /// Reads the tokens of `wanted` that are not there yet, on at most `threads` threads, this one among them; none if a segment is broken. The
    /// system part is wanted whole. The calling thread waits for the disk and the object store.
    fn read(
        &mut self,
        threads: usize,
        segments: &[Segment],
        layer: usize,
        wanted: &SlotMap,
        load: &mut LoadStats,
    ) -> Option<()> {
        let started = Instant::now();
        let held = SlotMap::new(self.all.iter().map(|loaded| loaded.span));
        let lacking: Vec<(&Segment, Vec<Span>)> = segments
            .iter()
            .map(|segment| {
                let within = |span: &Span| Span {
                    start: span.start.clamp(segment.span.start, segment.span.end),
                    end: span.end.clamp(segment.span.start, segment.span.end),
                };
                let parts = wanted.spans().iter().map(within).filter(|span| !span.is_empty());
                (segment, parts.flat_map(|span| held.lacks(span)).collect::<Vec<_>>())
            })
            .filter(|(_, spans)| !spans.is_empty())
            .collect();
        let read: Vec<OnceLock<Option<Layer>>> = lacking.iter().map(|_| OnceLock::new()).collect();
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some((of, (segment, spans))) = read.iter().zip(&lacking).nth(next.fetch_add(1, Relaxed))
            {
                let _ = of.set(fetch(segment, layer, spans));
            }
        };
        thread::scope(|scope| {
            for _ in 1..threads.min(lacking.len()) {
                // Without further threads this one reads all.
                let _ = thread::Builder::new().name("read".to_owned()).spawn_scoped(scope, work);
            }
            work();
        });
        for ((segment, spans), data) in lacking.into_iter().zip(read) {
            let data = data.into_inner().flatten()?;
            load.bytes += if segment.computed { 0 } else { data.bytes() as u64 };
            self.bytes += if segment.chunk.is_some() { data.bytes() } else { 0 };
            let mut from = 0;
            for span in spans {
                self.all.push(LoadedSpan { span, data: data.clone(), from });
                from += span.len();
            }
        }
        self.all.sort_unstable_by_key(|loaded| loaded.span.start);
        load.busy += started.elapsed();
        Some(())
    }
}

/// The spans of a pass's layers: those of one layer are read on threads of their own while the layer before is computed.
#[derive(Debug)]
pub(crate) struct SpanReader {
    /// Spans that were read of each layer.
    layers: Vec<LoadedSpans>,
    /// Tokens that the first layers want; further ones want none.
    wanted: Vec<SlotMap>,
    /// Layers whose spans are there.
    there: usize,
    /// The spans of the layer behind these.
    reading: Option<Background<ReadSpans>>,
    load: LoadStats,
    waited: Duration,
}

/// The spans of a layer, none if a segment is broken, and their loading.
type ReadSpans = (Option<LoadedSpans>, LoadStats);

impl SpanReader {
    /// `layers` has the spans that are there already, of all layers.
    pub(crate) fn new(layers: Vec<LoadedSpans>, wanted: Vec<SlotMap>) -> SpanReader {
        let (load, waited) = (LoadStats::default(), Duration::ZERO);
        SpanReader { layers, wanted, there: 0, reading: None, load, waited }
    }

    /// The spans of all layers.
    pub(crate) fn into_layers(self) -> Vec<LoadedSpans> {
        self.layers
    }

    /// The spans of a layer.
    pub(crate) fn layer(&self, layer: usize) -> &LoadedSpans {
        &self.layers[layer]
    }

    /// Bytes that were read, and the time that it took.
    pub(crate) fn load(&self) -> LoadStats {
        LoadStats { hidden: self.load.busy.saturating_sub(self.waited), ..self.load }
    }

    /// Time that the computing thread waited for spans.
    pub(crate) fn waited(&self) -> Duration {
        self.waited
    }

    /// A layer without a slot, if the layer's spans come within `patience`. The next layer's spans are read from then on.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(crate) fn poll(
        &mut self,
        context: &PassContext,
        layer: usize,
        patience: Duration,
    ) -> Result<Prefetched> {
        if self.there == layer && layer < self.wanted.len() {
            let started = Instant::now();
            let mut reading = match self.reading.take() {
                Some(reading) => reading,
                None => self.read(context, layer)?,
            };
            let read = reading.poll(patience);
            self.waited += started.elapsed();
            let Some((spans, load)) = read else {
                self.reading = Some(reading);
                return Ok(Prefetched::Waiting);
            };
            self.load = self.load + load;
            let Some(spans) = spans else { return Ok(Prefetched::Broken) };
            self.layers[layer] = spans;
            self.there += 1;
            if self.there < self.wanted.len() {
                self.reading = Some(self.read(context, self.there)?);
            }
        }
        let (decoder, dtype) = (context.engine.decoder(), context.engine.settings().kv);
        let cache = LayerCache::new(&**decoder.device(), decoder.shape(), dtype, 0);
        Ok(Prefetched::Ready(PrefetchedLayer { cache, cached: Vec::new() }))
    }

    /// Begins to read the spans of a layer.
    fn read(&mut self, context: &PassContext, layer: usize) -> Result<Background<ReadSpans>> {
        let (mut spans, wanted) = (std::mem::take(&mut self.layers[layer]), self.wanted[layer].clone());
        let (segments, allocator) = (context.segments.clone(), context.allocator.clone());
        let (engine, before) = (&context.engine, spans.bytes());
        let threads = loaders(engine.decoder().device().threads(), engine.device_chunks().is_apart());
        let read = move || {
            let mut load = LoadStats::default();
            let read = spans.read(threads, &segments, layer, &wanted, &mut load);
            allocator.meter().add(spans.bytes() - before);
            (read.map(|()| spans), load)
        };
        Ok(Background::spawn("read", read)?)
    }

    /// Gives up the spans of a layer.
    pub(crate) fn free(&mut self, context: &PassContext, layer: usize) {
        context.allocator.meter().subtract(std::mem::take(&mut self.layers[layer]).bytes());
    }
}

/// Keys and values of some of a segment's positions.
fn fetch(segment: &Segment, layer: usize, spans: &[Span]) -> Option<Layer> {
    if segment.chunk.is_none() {
        return segment.reader.layer(layer);
    }
    let relative = |span: &Span| {
        let start = segment.span.start;
        (span.start - start) as usize..(span.end - start) as usize
    };
    segment.reader.tokens(layer, &spans.iter().map(relative).collect::<Vec<_>>())
}
