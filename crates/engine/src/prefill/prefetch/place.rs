//! Keys and values of a chunk on their way into a layer of the cache: from the host's memory, or from the device's own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use refrain_fusion::KeyPositions;
use refrain_kernels::{Device, KvRows};
use refrain_kv::{KvAllocator, LayerCache, RopeTables, Shape, Span};
use refrain_store::{ChunkKey, Layer};

use crate::device_chunks::DeviceChunks;
use crate::prefill::reuse::Segment;

/// Bytes of keys and values that a device copies by itself in one piece of work, or those of one segment: they bound the memory that a loader takes beside
/// the cache.
pub(super) const RUN_BYTES: usize = 32 << 20;

/// A loading thread's device, with an allocator on it.
#[derive(Debug)]
pub(super) struct Means {
    pub(super) device: Arc<dyn Device>,
    pub(super) allocator: KvAllocator,
}

impl Means {
    pub(super) fn new(device: Arc<dyn Device>, allocator: &KvAllocator) -> Means {
        Means { allocator: allocator.on(&device), device }
    }
}

/// A segment that the cache of chunks in the device's memory may have.
#[derive(Debug)]
struct Cached {
    key: ChunkKey,
    /// Whether a layer of it came from there.
    had: AtomicBool,
}

/// How the segments of a pass are placed.
#[derive(Debug)]
pub(super) struct Placement {
    shape: Shape,
    key_positions: KeyPositions,
    tables: Arc<RopeTables>,
    chunks: Arc<DeviceChunks>,
    /// Each segment; empty where the device keeps no chunks in its memory.
    cached: Vec<Cached>,
    /// The last use of chunks in the device's memory before the pass.
    since: u64,
    copied: AtomicU64,
    reused: AtomicU64,
}

impl Placement {
    /// `tables` have an entry for each position of the prompt.
    pub(super) fn new(
        segments: &[Segment],
        (shape, key_positions): (Shape, KeyPositions),
        tables: Arc<RopeTables>,
        chunks: &Arc<DeviceChunks>,
    ) -> Placement {
        let cached =
            |segment: &Segment| Cached { key: segment.reader.id().key(), had: AtomicBool::new(false) };
        Placement {
            shape,
            key_positions,
            tables,
            chunks: chunks.clone(),
            since: chunks.begin(segments.iter().map(|segment| segment.reader.id().key())),
            cached: segments.iter().filter(|_| chunks.is_on()).map(cached).collect(),
            copied: AtomicU64::new(0),
            reused: AtomicU64::new(0),
        }
    }

    /// Whether the device has a memory of its own.
    pub(super) fn is_apart(&self) -> bool {
        self.chunks.is_apart()
    }

    /// Drops all chunks from the device's memory.
    pub(super) fn clear_chunks(&self) {
        self.chunks.clear();
    }

    /// Whether a layer of the segment of this index came from the device's memory.
    pub(super) fn had(&self, index: usize) -> bool {
        self.cached.get(index).is_some_and(|cached| cached.had.load(Relaxed))
    }

    /// Bytes that were copied to a device's own memory.
    pub(super) fn copied(&self) -> u64 {
        self.copied.load(Relaxed)
    }

    /// Bytes that the device's own memory had.
    pub(super) fn reused(&self) -> u64 {
        self.reused.load(Relaxed)
    }

    fn count(&self, bytes: u64) {
        self.copied.fetch_add(if self.is_apart() { bytes } else { 0 }, Relaxed);
    }

    /// Places the segment of an index at `layer` from the device's memory; false if that does not have it.
    pub(super) fn place_from_device(
        &self,
        means: &Means,
        layer: usize,
        (index, segment): (usize, &Segment),
        cache: &mut LayerCache,
    ) -> bool {
        let Some(Cached { key, had }) = self.cached.get(index) else { return false };
        let Some(held) = self.chunks.get(*key, layer) else { return false };
        had.store(true, Relaxed);
        self.reused.fetch_add(held.bytes(), Relaxed);
        self.place(means, layer, segment.span, self.first_position(segment), held.rows(), cache);
        true
    }

    /// Keeps what was read of the segment of an index in the device's memory, and places it from there; false if there is no room.
    pub(super) fn keep(
        &self,
        means: &Means,
        layer: usize,
        (index, segment): (usize, &Segment),
        data: &Layer,
        cache: &mut LayerCache,
    ) -> bool {
        let Some(Cached { key, .. }) = self.cached.get(index) else { return false };
        let kept = self.chunks.keep(&*means.device, (*key, layer), data, (self.since, segment.removals));
        let Some(held) = kept else { return false };
        self.count(held.bytes());
        self.place(means, layer, segment.span, self.first_position(segment), held.rows(), cache);
        true
    }

    /// Places what was read of a segment at `layer`.
    pub(super) fn place_from_host(
        &self,
        means: &Means,
        layer: usize,
        segment: &Segment,
        data: &Layer,
        cache: &mut LayerCache,
    ) {
        self.count(data.bytes() as u64);
        let rows = (KvRows::Host(data.k()), KvRows::Host(data.v()));
        self.place(means, layer, segment.span, self.first_position(segment), rows, cache);
    }

    /// Places segments that are pinned, in their order, at `layer`. The device copies as many as adjoin at a time, so that few calls keep its bus busy.
    pub(super) fn place_pinned(
        &self,
        means: &Means,
        layer: usize,
        pinned: &[(&Segment, Layer)],
        cache: &mut LayerCache,
    ) {
        let mut rest = pinned;
        while let Some((first, _)) = rest.first() {
            let parts = rest.iter().map(|(segment, data)| (segment.span, data.bytes()));
            let (run, later) = rest.split_at(adjoining(parts));
            rest = later;
            let side = |i: usize| {
                let parts: Vec<_> = run.iter().filter_map(|(_, data)| Some(data.pinned()?[i])).collect();
                means.device.upload_pinned_kv(&parts)
            };
            // A store may have two engines: what one has pinned is of no use to the other if that computes in the host's memory.
            let Some((k, v)) = side(0).zip(side(1)) else {
                for (segment, data) in run {
                    self.place_from_host(means, layer, segment, data, cache);
                }
                continue;
            };
            self.count(run.iter().map(|(_, data)| data.bytes() as u64).sum());
            let mut place = |span: Span, from| {
                let token = (span.start - first.span.start) as usize;
                let rows = (KvRows::Device(&k, token), KvRows::Device(&v, token));
                self.place(means, layer, span, from, rows, cache);
            };
            match self.key_positions {
                KeyPositions::Global => {
                    let end = run.last().map_or(first.span.end, |(last, _)| last.span.end);
                    place(Span { end, ..first.span }, self.first_position(first));
                }
                KeyPositions::ChunkLocal => {
                    run.iter().for_each(|(segment, _)| place(segment.span, self.first_position(segment)));
                }
            }
        }
    }

    /// The position of a segment's first key.
    fn first_position(&self, segment: &Segment) -> u32 {
        match self.key_positions {
            KeyPositions::Global => segment.span.start,
            KeyPositions::ChunkLocal => segment.first_position,
        }
    }

    /// Rotates and places the keys and values of a span, whose first key has position `from`, at `layer`.
    fn place(
        &self,
        means: &Means,
        layer: usize,
        span: Span,
        from: u32,
        rows: (KvRows<'_>, KvRows<'_>),
        cache: &mut LayerCache,
    ) {
        let from = from as usize;
        let rotary = self.tables.layer(layer).slice(from, from + span.len());
        let slots: Vec<u32> = span.positions().collect();
        cache.place(&*means.device, self.shape, rows, rotary, &slots);
    }
}

/// How many of the first parts, each of a span and so many bytes, adjoin and take [`RUN_BYTES`] together; one if it alone takes more.
fn adjoining(parts: impl Iterator<Item = (Span, usize)>) -> usize {
    let (mut end, mut all) = (None, 0);
    let is_in = |(span, bytes): &(Span, usize)| {
        all += bytes;
        end.replace(span.end).is_none_or(|end| end == span.start && all <= RUN_BYTES)
    };
    parts.take_while(is_in).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_that_adjoin_are_copied_together_up_to_a_bound() {
        let parts = |parts: &[(u32, u32, usize)]| {
            adjoining(parts.iter().map(|(start, end, bytes)| (Span { start: *start, end: *end }, *bytes)))
        };
        let half = RUN_BYTES / 2;
        assert_eq!(parts(&[(0, 4, half), (4, 9, half), (9, 10, 1)]), 2);
        assert_eq!(parts(&[(0, 4, 1), (5, 9, 1), (9, 10, 1)]), 1);
        assert_eq!(parts(&[(0, 4, 3 * half), (4, 9, 1)]), 1);
        assert_eq!(parts(&[(7, 8, 1), (8, 9, 1), (9, 12, 1)]), 3);
        assert_eq!(parts(&[]), 0);
    }
}
