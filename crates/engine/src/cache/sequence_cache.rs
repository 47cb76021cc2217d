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
    /// The tokens that are computed, and room of earlier ones.
    pub(crate) rows: Vec<DecodeRow>,
    /// The pool that gets the memory in the end.
    pool: Option<Arc<KvBufferPool>>,
}

/// A token while it is computed.
#[derive(Debug)]
pub(crate) struct DecodeRow {
    /// Cosines and sines of its position.
    pub(crate) rotary: RopeTables,
    /// Its queries, and its attention's output, `H·d` each.
    pub(crate) q: Floats,
    pub(crate) attended: Floats,
}

impl SequenceCache {
    /// A cache that holds `len` tokens, and leaves its memory to `pool`.
    pub(crate) fn new(
        decoder: &Arc<Decoder>,
        cache: Box<dyn DecodeCache>,
        len: usize,
        pool: Arc<KvBufferPool>,
    ) -> SequenceCache {
        SequenceCache { decoder: decoder.clone(), cache, len, rows: Vec::new(), pool: Some(pool) }
    }

    /// A copy that goes on from the same tokens.
    pub(crate) fn fork(&self) -> SequenceCache {
        SequenceCache {
            decoder: self.decoder.clone(),
            cache: self.cache.fork(),
            len: self.len,
            rows: Vec::new(),
            pool: None,
        }
    }

    /// Prepares for the next `count` tokens.
    pub(crate) fn prepare(&mut self, count: usize) {
        let device = self.decoder.device();
        while self.rows.len() < count {
            let rotary = RopeTables::default();
            self.rows.push(DecodeRow { rotary, q: device.floats(0), attended: device.floats(0) });
        }
        for (position, row) in (self.len as u32..).zip(&mut self.rows[..count]) {
            self.cache.rotary(position, &mut row.rotary);
        }
    }

    /// Takes the last `count` tokens back, which [`DecodeCache::takes_back`] allows.
    pub(crate) fn take_back(&mut self, count: usize) {
        if count > 0 {
            self.len -= count;
            self.cache.take_back(self.len);
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
