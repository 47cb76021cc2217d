//! Keys and values of a chunk on their way into a layer of the cache: from the host's memory, or from the device's own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use refrain_fusion::KeyPositions;
use refrain_kernels::{Device, KvRows};
use refrain_kv::{KvAllocator, LayerCache};
use refrain_store::{ChunkKey, Layer};

use super::{PrefetchJob, Segment};
use crate::device_chunks::{DeviceChunks, free_memory};

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

/// Bytes that came to a device with a memory of its own, and bytes that were there.
#[derive(Debug)]
pub(super) struct Copies {
    /// Whether the device has a memory of its own.
    counts: bool,
    copied: AtomicU64,
    reused: AtomicU64,
}

impl Copies {
    pub(super) fn to(device: &dyn Device) -> Copies {
        let (copied, reused) = (AtomicU64::new(0), AtomicU64::new(0));
        Copies { counts: free_memory(device).is_some(), copied, reused }
    }

    fn count(&self, bytes: u64) {
        self.copied.fetch_add(if self.counts { bytes } else { 0 }, Relaxed);
    }

    pub(super) fn copied(&self) -> u64 {
        self.copied.load(Relaxed)
    }

    pub(super) fn reused(&self) -> u64 {
        self.reused.load(Relaxed)
    }
}

/// The segments as the cache of chunks in the device's memory knows them.
#[derive(Debug)]
pub(super) struct OnDevice {
    chunks: Arc<DeviceChunks>,
    /// Each segment's key, and whether the cache had a layer of it.
    segments: Vec<(ChunkKey, AtomicBool)>,
}

impl OnDevice {
    pub(super) fn new(chunks: &Arc<DeviceChunks>, segments: &[Segment]) -> OnDevice {
        let known = |segment: &Segment| (segment.reader.id().key(), AtomicBool::new(false));
        OnDevice { chunks: chunks.clone(), segments: segments.iter().map(known).collect() }
    }

    /// Whether the cache had a layer of a segment.
    pub(super) fn had(&self, segment: usize) -> bool {
        self.segments[segment].1.load(Relaxed)
    }
}

impl PrefetchJob {
    /// Reads and places the segment of an index at `layer`, unless the device's memory has it; none if it is broken.
    pub(super) fn bring(
        &self,
        means: &Means,
        layer: usize,
        index: usize,
        cache: &mut LayerCache,
    ) -> Option<()> {
        let segment = &self.segments[index];
        let known = self.on_device.as_ref().map(|on_device| (&on_device.chunks, &on_device.segments[index]));
        if let Some((chunks, (key, had))) = known
            && let Some(held) = chunks.get(*key, layer)
        {
            had.store(true, Relaxed);
            self.copies.reused.fetch_add(held.bytes(), Relaxed);
            self.place(means, layer, segment, held.rows(), cache);
            return Some(());
        }
        let data = self.read(layer, segment)?;
        let keep = |(chunks, (key, _)): (&Arc<DeviceChunks>, &(ChunkKey, AtomicBool))| {
            chunks.keep(&*means.device, (*key, layer), &data, segment.removals)
        };
        match known.and_then(keep) {
            Some(held) => {
                self.copies.count(held.bytes());
                self.place(means, layer, segment, held.rows(), cache);
            }
            None => self.place_from_host(means, layer, segment, &data, cache),
        }
        Some(())
    }

    /// [`PrefetchJob::place`] of what was read.
    pub(super) fn place_from_host(
        &self,
        means: &Means,
        layer: usize,
        segment: &Segment,
        data: &Layer,
        cache: &mut LayerCache,
    ) {
        self.copies.count(data.bytes() as u64);
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
        cache.place(&*means.device, self.sizes.shape, rows, rotary, &slots);
    }
}
