//! Keys and values of tokens that follow each other, copied out of the cache that they were computed in.

use std::ops::Range;

use refrain_kernels::{Device, KvBuffer, parallel_each};
use refrain_kv::{KvCache, LayerCache, Shape};

/// Rotated keys and values of some tokens, each layer `Hkv × tokens × d`.
#[derive(Debug)]
pub(super) struct CachedRows {
    shape: Shape,
    tokens: usize,
    layers: Vec<LayerCache>,
}

impl CachedRows {
    /// Rows of the slots `slots` of a cache. All answers wait for the copy, so that threads share its layers.
    pub(super) fn copy_from(device: &dyn Device, cache: &KvCache, slots: Range<usize>) -> CachedRows {
        let (shape, tokens) = (cache.shape(), slots.len());
        let mut layers: Vec<_> = std::iter::repeat_with(|| None).take(shape.layers).collect();
        parallel_each(device, &mut layers, &|layer, copied| {
            let mut rows = LayerCache::new(device, shape, cache.dtype(), tokens);
            let from = (cache.layer(layer), cache.capacity(), slots.start);
            copy_rows(device, shape, from, (&mut rows, tokens, 0), tokens);
            *copied = Some(rows);
        });
        CachedRows { shape, tokens, layers: layers.into_iter().flatten().collect() }
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
    let mut halves: [(&KvBuffer, &mut KvBuffer); 2] = [(&from.k, &mut to.k), (&from.v, &mut to.v)];
    parallel_each(device, &mut halves, &|_, (from, to)| {
        for head in 0..shape.kv_heads {
            let start = (head * from_capacity + from_slot) * shape.head_dim;
            let at = (head * to_capacity + to_slot) * shape.head_dim;
            device.copy_kv(from, start..start + tokens * shape.head_dim, to, at);
        }
    });
}
