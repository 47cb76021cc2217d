//! Keys and values of a chunk on their way into a layer of the cache: from the host's memory, or from the device's own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use refrain_fusion::KeyPositions;
use refrain_kernels::{Device, KvRows};
use refrain_kv::{KvAllocator, LayerCache, RopeTables, Shape};
use refrain_store::{ChunkKey, Layer};

use crate::device_chunks::DeviceChunks;
use crate::prefill::reuse::Segment;

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
    /// Whether the device has a memory of its own.
    copies: bool,
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
            copies: chunks.is_apart(),
            copied: AtomicU64::new(0),
            reused: AtomicU64::new(0),
        }
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
        self.copied.fetch_add(if self.copies { bytes } else { 0 }, Relaxed);
    }

    /// Places the segment of an index at `layer`, and has it read unless the device's memory has it; none if it cannot be read.
    pub(super) fn bring(
        &self,
        means: &Means,
        layer: usize,
        (index, segment): (usize, &Segment),
        read: impl FnOnce() -> Option<Layer>,
        cache: &mut LayerCache,
    ) -> Option<()> {
        let chunks = &self.chunks;
        let Some(Cached { key, had }) = self.cached.get(index) else {
            self.place_from_host(means, layer, segment, &read()?, cache);
            return Some(());
        };
        if let Some(held) = chunks.get(*key, layer) {
            had.store(true, Relaxed);
            self.reused.fetch_add(held.bytes(), Relaxed);
            self.place(means, layer, segment, held.rows(), cache);
            return Some(());
        }
        let data = read()?;
        match chunks.keep(&*means.device, (*key, layer), &data, (self.since, segment.removals)) {
            Some(held) => {
                self.count(held.bytes());
                self.place(means, layer, segment, held.rows(), cache);
            }
            None => self.place_from_host(means, layer, segment, &data, cache),
        }
        Some(())
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
        self.place(means, layer, segment, (KvRows::Host(data.k()), KvRows::Host(data.v())), cache);
    }

    /// Rotates and places the keys and values of a segment at `layer`.
    fn place(
        &self,
        means: &Means,
        layer: usize,
        segment: &Segment,
        rows: (KvRows<'_>, KvRows<'_>),
        cache: &mut LayerCache,
    ) {
        let from = match self.key_positions {
            KeyPositions::Global => segment.span.start,
            KeyPositions::ChunkLocal => segment.first_position,
        } as usize;
        let rotary = self.tables.layer(layer).slice(from, from + segment.span.len());
        let slots: Vec<u32> = segment.span.positions().collect();
        cache.place(&*means.device, self.shape, rows, rotary, &slots);
    }
}
