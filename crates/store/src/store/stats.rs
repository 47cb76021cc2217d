//! Counts since the store was opened, and what it holds now.

use std::sync::atomic::Ordering::Relaxed;

use super::Store;
use crate::Stats;

impl Store {
    /// Broken files removed since the store was opened.
    pub fn removed(&self) -> u64 {
        self.0.counters.removed.load(Relaxed)
    }

    /// Chunks that went to make room, or because their time was over, since the store was opened.
    pub fn evicted(&self) -> u64 {
        self.0.disk.as_ref().map_or(0, |disk| disk.evicted())
    }

    /// Most bytes of memory that the store takes for chunks and their aux tensors.
    pub fn memory_bound(&self) -> u64 {
        self.0.memory_bound()
    }

    /// Counts since the store was opened, and what it holds now.
    pub fn stats(&self) -> Stats {
        let c = &self.0.counters;
        // Where the index cannot be used, what is on disk is not known.
        let on_disk = self.0.disk.as_ref().and_then(|disk| disk.totals().ok()).unwrap_or_default();
        Stats {
            disk_bytes: on_disk.bytes,
            disk_chunks: on_disk.chunks,
            evicted: self.evicted(),
            memory_hits: c.memory_hits.load(Relaxed),
            disk_hits: c.disk_hits.load(Relaxed),
            misses: c.misses.load(Relaxed),
            removed: self.removed(),
            unusable: c.unusable.load(Relaxed),
            stored: c.stored.load(Relaxed),
            not_stored: c.not_stored.load(Relaxed),
            bytes_read: c.bytes_read.load(Relaxed),
            bytes_written: c.bytes_written.load(Relaxed),
            memory_bytes: self.0.memory.weight(),
            memory_chunks: self.0.memory.len() as u64,
        }
    }
}
