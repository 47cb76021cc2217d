//! Ranges of cached tokens, read for one layer of a pass over selected tokens.

use std::sync::OnceLock;
use std::time::Instant;

use refrain_kernels::{Device, Slice};
use refrain_kv::Span;
use refrain_store::Layer;

use super::reuse::Segment;
use super::stats::LoadStats;
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
    pub(crate) fn bytes(&self) -> usize {
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

    /// Reads the tokens of `wanted` that are not there yet; none if a segment is broken. The system part is wanted whole.
    pub(crate) fn read(
        &mut self,
        device: &dyn Device,
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
        device.parallel(lacking.len(), &|i| {
            let (segment, spans) = &lacking[i];
            let _ = read[i].set(fetch(segment, layer, spans));
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
