//! Tokens after their prefill, for chunks that follow them.

use refrain_kernels::{Buffer, Slice};
use refrain_store::{Chunk, ChunkId};

/// The prefix of an engine, or all that stands before a chunk, prefilled.
#[derive(Debug)]
pub(crate) struct PrefilledPrefix {
    pub(crate) tokens: Vec<u32>,
    pub(crate) digest: [u8; 32],
    /// Keys before RoPE and values of each layer, `tokens × Hkv × d` each.
    pub(crate) layers: Vec<(Buffer, Buffer)>,
}

impl PrefilledPrefix {
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
            let (before, own) = (prefix.map(|prefix| &prefix.layers[layer]), chunk.layer(layer));
            (join(before.map(|(k, _)| k), own.k()), join(before.map(|(_, v)| v), own.v()))
        };
        let layers = (0..chunk.layers()).map(layer).collect();
        PrefilledPrefix { digest: ChunkId::digest(&tokens), tokens, layers }
    }
}
