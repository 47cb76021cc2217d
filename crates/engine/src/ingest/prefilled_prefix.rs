//! Tokens that stand before a chunk, with their keys and values.

use std::sync::{Arc, OnceLock};

use refrain_kernels::{Buffer, Slice};
use refrain_store::{Chunk, ChunkId};

use crate::Result;

/// Keys before RoPE and values of a layer, each `tokens × Hkv × d`.
pub(crate) type LayerKv = (Buffer, Buffer);

/// The prefix of an engine, or all that stands before a chunk. It is prefilled when the first chunk is computed behind it, since an
/// engine whose chunks are all stored does not need it.
#[derive(Debug)]
pub(crate) struct PrefilledPrefix {
    pub(crate) tokens: Vec<u32>,
    pub(crate) digest: [u8; 32],
    /// Keys before RoPE and values of each layer, `tokens × Hkv × d` each.
    layers: OnceLock<Vec<LayerKv>>,
}

impl PrefilledPrefix {
    /// Tokens from position 0 on.
    pub(crate) fn new(tokens: Vec<u32>) -> PrefilledPrefix {
        PrefilledPrefix { digest: ChunkId::digest(&tokens), tokens, layers: OnceLock::new() }
    }

    /// Takes the keys and values of its tokens from `prefilled`, unless they are there.
    pub(crate) fn prefill(&self, prefilled: impl FnOnce(&[u32]) -> Result<Vec<LayerKv>>) -> Result<()> {
        if self.layers.get().is_none() {
            // Another thread may be faster: both have the same bits.
            let _ = self.layers.set(prefilled(&self.tokens)?);
        }
        Ok(())
    }

    /// Whether the keys and values are there.
    #[cfg(test)]
    pub(crate) fn is_prefilled(&self) -> bool {
        self.layers.get().is_some()
    }

    /// Keys before RoPE and values of a layer.
    ///
    /// # Panics
    /// Before [`PrefilledPrefix::prefill`].
    pub(crate) fn layer(&self, layer: usize) -> &LayerKv {
        &self.layers.get().expect("the prefix of a run is prefilled when the run starts")[layer]
    }

    /// A prefix, and the chunk that was prefilled right behind it.
    pub(crate) fn with(prefix: Option<&PrefilledPrefix>, chunk: &Chunk) -> PrefilledPrefix {
        let before = prefix.map_or(&[][..], |prefix| prefix.tokens.as_slice());
        let tokens = [before, chunk.tokens()].concat();
        let join = |before: Option<&Buffer>, own: Slice<'_>| {
            let first = before.map_or(0, Buffer::len);
            let mut joined = Buffer::zeros(own.dtype(), first + own.len());
            if let Some(before) = before {
                joined.write(0, before.as_slice());
            }
            joined.write(first, own);
            joined
        };
        let layer = |layer: usize| {
            let (before, own) = (prefix.map(|prefix| prefix.layer(layer)), chunk.layer(layer));
            (join(before.map(|(k, _)| k), own.k()), join(before.map(|(_, v)| v), own.v()))
        };
        let layers: Vec<_> = (0..chunk.layers()).map(layer).collect();
        PrefilledPrefix { layers: OnceLock::from(layers), ..PrefilledPrefix::new(tokens) }
    }
}

/// Prefilled prefixes, and the name of their mean.
#[derive(Debug)]
pub(crate) struct AveragedPrefixes {
    pub(crate) prefixes: Vec<Arc<PrefilledPrefix>>,
    /// Digest of all their tokens, of which no single prefix has the digest.
    pub(crate) digest: [u8; 32],
}

impl AveragedPrefixes {
    /// Tokens of the longest one.
    pub(crate) fn longest(&self) -> usize {
        self.prefixes.iter().map(|prefix| prefix.tokens.len()).max().unwrap_or(0)
    }
}

/// The mean of prefills of the same tokens, in the memory of the first. One alone stays to the bit what it is.
pub(crate) fn mean(mut prefills: Vec<Vec<LayerKv>>) -> Vec<LayerKv> {
    let mut first = prefills.remove(0);
    if !prefills.is_empty() {
        for (layer, (k, v)) in first.iter_mut().enumerate() {
            average(k, prefills.iter().map(|kv| &kv[layer].0));
            average(v, prefills.iter().map(|kv| &kv[layer].1));
        }
    }
    first
}

/// Makes `first` the mean of itself and `others`.
fn average<'a>(first: &mut Buffer, others: impl ExactSizeIterator<Item = &'a Buffer>) {
    let count = (1 + others.len()) as f32;
    let mut sum = first.as_slice().floats();
    for other in others {
        sum.iter_mut().zip(&other.as_slice().floats()).for_each(|(sum, x)| *sum += x);
    }
    sum.iter_mut().for_each(|sum| *sum /= count);
    first.write_f32(0, &sum);
}
