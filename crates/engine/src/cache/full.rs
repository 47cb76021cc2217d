//! A cache that holds every token; slot = position.

use std::sync::Arc;

use refrain_kernels::{Device, Dtype};
use refrain_kv::{KvBufferPool, KvCache, LayerCache, RopeTables, Shape};

use super::decode_cache::{DecodeCache, DecodeToken};
use crate::forward::attention;

/// Keys and values of prompt and answer, allocated once.
#[derive(Clone, Debug)]
pub(crate) struct FullCache {
    pub(crate) kv: KvCache,
    tables: Arc<RopeTables>,
    /// Tokens in place.
    len: usize,
}

impl FullCache {
    /// A cache for `capacity` tokens, whose layers come with the prompt. `tables` have an entry for each of its slots; `prompt` is
    /// the number of tokens of the prompt.
    pub(crate) fn new(
        device: &dyn Device,
        shape: Shape,
        dtype: Dtype,
        capacity: usize,
        tables: Arc<RopeTables>,
        prompt: usize,
    ) -> FullCache {
        FullCache { kv: KvCache::vacant(device, shape, dtype, capacity), tables, len: prompt }
    }

    /// A cache for `capacity` tokens of an answer without a prompt.
    pub(crate) fn empty(
        device: &dyn Device,
        shape: Shape,
        dtype: Dtype,
        capacity: usize,
        tables: Arc<RopeTables>,
    ) -> FullCache {
        FullCache { kv: KvCache::new(device, shape, dtype, capacity), tables, len: 0 }
    }

    /// Rotates a token's queries and key, and writes the key and the value into their slot.
    pub(crate) fn append(&mut self, layer: usize, token: &mut DecodeToken<'_>) {
        let DecodeToken { decoder, position, rotary, ref mut q, kv, .. } = *token;
        let (device, shape, heads) = (&**decoder.device(), decoder.shape(), decoder.config().heads);
        self.kv.layer_mut(layer).place_with_queries(device, shape, (q, heads), kv, rotary, &[position]);
        self.len = token.position as usize + 1;
    }
}

impl DecodeCache for FullCache {
    fn prompt_capacity(&self) -> usize {
        self.kv.capacity()
    }

    fn store_prompt(&mut self, layer: usize, whole: LayerCache) -> Option<LayerCache> {
        self.kv.install(layer, whole);
        None
    }

    fn rotary(&self, position: u32, tables: &mut RopeTables) {
        self.tables.gather(&[position], tables);
    }

    fn append_and_attend(&mut self, layer: usize, mut token: DecodeToken<'_>) {
        self.append(layer, &mut token);
        let window = token.decoder.config().layers[layer].window.map_or(u32::MAX, |window| window as u32);
        let visible = [((token.position + 1).saturating_sub(window), token.position + 1)];
        let (cached, capacity) = (self.kv.layer(layer), self.kv.capacity());
        let attention = attention(token.decoder, layer, (cached, capacity), (token.q, 0), &visible);
        token.decoder.device().attention(&attention, token.out, None);
    }

    fn dtype(&self) -> Dtype {
        self.kv.dtype()
    }

    fn retained(&self) -> usize {
        self.len
    }

    fn kv_bytes(&self) -> usize {
        self.kv.bytes()
    }

    fn kv_bytes_held(&self) -> usize {
        self.len * self.kv.shape().token_bytes(self.kv.dtype())
    }

    fn whole(&self) -> Option<&KvCache> {
        Some(&self.kv)
    }

    fn takes_back(&self) -> bool {
        true
    }

    fn take_back(&mut self, len: usize) {
        self.len = len;
    }

    fn fork(&self) -> Box<dyn DecodeCache> {
        Box::new(self.clone())
    }

    fn release(&mut self, pool: &KvBufferPool) {
        pool.replace(&mut self.kv);
    }

    #[cfg(test)]
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}
