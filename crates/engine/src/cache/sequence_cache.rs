//! The cache of one sequence and the place where it stands in it.

use std::sync::Arc;

use refrain_kernels::Floats;
use refrain_kv::{KvBufferPool, RopeTables};
use refrain_model::Decoder;

use super::decode_cache::DecodeCache;

/// Keys and values of a sequence's tokens so far.
#[derive(Debug)]
pub(crate) struct SequenceCache {
    pub(crate) decoder: Arc<Decoder>,
    pub(crate) cache: Box<dyn DecodeCache>,
    /// Tokens so far: the position of the next one.
    pub(crate) len: usize,
    /// Cosines and sines of the token that is computed.
    pub(crate) rotary: RopeTables,
    /// Queries of the token that is computed, and its attention's output, `H·d` each.
    pub(crate) q: Floats,
    pub(crate) attended: Floats,
    /// The pool that gets the memory in the end.
    pool: Option<Arc<KvBufferPool>>,
}

impl SequenceCache {
    /// A cache that holds `len` tokens, and leaves its memory to `pool`.
    pub(crate) fn new(
        decoder: &Arc<Decoder>,
        cache: Box<dyn DecodeCache>,
        len: usize,
        pool: Arc<KvBufferPool>,
    ) -> SequenceCache {
        SequenceCache {
            decoder: decoder.clone(),
            cache,
            len,
            rotary: RopeTables::default(),
            q: decoder.device().floats(0),
            attended: decoder.device().floats(0),
            pool: Some(pool),
        }
    }

    /// A copy that goes on from the same tokens.
    pub(crate) fn fork(&self) -> SequenceCache {
        SequenceCache {
            decoder: self.decoder.clone(),
            cache: self.cache.fork(),
            len: self.len,
            rotary: RopeTables::default(),
            q: self.decoder.device().floats(0),
            attended: self.decoder.device().floats(0),
            pool: None,
        }
    }
}

impl Drop for SequenceCache {
    fn drop(&mut self) {
        if let Some(pool) = &self.pool {
            self.cache.release(pool);
        }
    }
}
