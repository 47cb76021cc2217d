//! The tier in memory: bounded by bytes.

use std::hash::Hash;
use std::sync::Arc;

use quick_cache::sync::{Cache, DefaultLifecycle};
use quick_cache::{DefaultHashBuilder, OptionsBuilder, Weighter};
use refrain_kv::AuxTensors;

use crate::chunk::Chunk;
use crate::key::ChunkKey;

/// A chunk in memory.
#[derive(Clone, Debug)]
pub(crate) struct MemoryEntry {
    pub(crate) chunk: Chunk,
    /// When its time is over, in seconds since 1970; 0 is never.
    pub(crate) expires: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct ByBytes;

impl Weighter<ChunkKey, MemoryEntry> for ByBytes {
    fn weight(&self, _: &ChunkKey, held: &MemoryEntry) -> u64 {
        held.chunk.weight()
    }
}

/// Chunk and kind.
pub(crate) type AuxName = (ChunkKey, String);

impl Weighter<AuxName, Arc<AuxTensors>> for ByBytes {
    fn weight(&self, (_, kind): &AuxName, aux: &Arc<AuxTensors>) -> u64 {
        let tensors = aux.tensors().iter();
        let names: usize = tensors.map(|tensor| tensor.name.len() + 8 * tensor.shape.len() + 128).sum();
        (aux.bytes() + names + kind.len() + 256) as u64
    }
}

/// A cache of at most `bytes`.
pub(crate) fn bounded<K: Eq + Hash, V: Clone>(bytes: u64) -> Cache<K, V, ByBytes>
where
    ByBytes: Weighter<K, V>,
{
    // Only a guess for the size of tables: chunks take a megabyte and more.
    let items = (bytes >> 20).clamp(16, 1 << 16);
    // One shard: each would have its own share of the capacity, too small for a large chunk.
    let options = OptionsBuilder::new()
        .shards(1)
        .estimated_items_capacity(items as usize)
        .weight_capacity(bytes)
        .build()
        .expect("both capacities are given");
    Cache::with_options(options, ByBytes, DefaultHashBuilder::default(), DefaultLifecycle::default())
}
