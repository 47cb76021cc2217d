//! Keys and values of tokens that follow each other, copied out of the cache that they were computed in.

use std::ops::Range;

use refrain_kernels::{Device, KvBuffer};
use refrain_kv::{KvCache, LayerCache, Shape};

/// Rotated keys and values of some tokens, each layer `Hkv × tokens × d`.
#[derive(Debug)]
pub(super) struct CachedRows {
    shape: Shape,
    tokens: usize,
    layers: Vec<LayerCache>,
}

impl CachedRows {
    /// Those in the slots `slots` of a cache.
    pub(super) fn copy_from(device: &dyn Device, cache: &KvCache, slots: Range<usize>) -> CachedRows {
        let (shape, tokens) = (cache.shape(), slots.len());
        let copy = |layer| {
            let mut rows = LayerCache::new(device, shape, cache.dtype(), tokens);
            let from = (cache.layer(layer), cache.capacity(), slots.start);
            copy_rows(device, shape, from, (&mut rows, tokens, 0), tokens);
            rows
        };
        CachedRows { shape, tokens, layers: (0..shape.layers).map(copy).collect() }
    }

    /// Copies the tokens `range` of a layer to a cache of `capacity` slots a head, from `slot` on.
    pub(super) fn copy_to(
        &self,
        device: &dyn Device,
        layer: usize,
        range: Range<usize>,
        cache: &mut LayerCache,
        (capacity, slot): (usize, usize),
    ) {
        let from = (&self.layers[layer], self.tokens, range.start);
        copy_rows(device, self.shape, from, (cache, capacity, slot), range.len());
    }

    pub(super) fn bytes(&self) -> usize {
        self.layers.iter().map(LayerCache::bytes).sum()
    }
}

/// Copies `tokens` slots of every head between layers, each with its slots a head and its first slot.
fn copy_rows(
    device: &dyn Device,
    shape: Shape,
    (from, from_capacity, from_slot): (&LayerCache, usize, usize),
    (to, to_capacity, to_slot): (&mut LayerCache, usize, usize),
    tokens: usize,
) {
    let copy = |from: &KvBuffer, to: &mut KvBuffer| {
        for head in 0..shape.kv_heads {
            let start = (head * from_capacity + from_slot) * shape.head_dim;
            let at = (head * to_capacity + to_slot) * shape.head_dim;
            device.copy_kv(from, start..start + tokens * shape.head_dim, to, at);
        }
    };
    copy(&from.k, &mut to.k);
    copy(&from.v, &mut to.v);
}
