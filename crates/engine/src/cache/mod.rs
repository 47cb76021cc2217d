//! The KV cache that an answer is decoded in.

mod block_sparse;
mod decode_cache;
mod evicting;
mod full;
mod sequence_cache;
mod slots;

pub(crate) use block_sparse::{BlockRetrieval, BlockSparseCache, RetrievingTokens};
pub(crate) use decode_cache::{DecodeCache, DecodeToken, PromptLayer, PromptReport};
pub(crate) use evicting::EvictingCache;
#[cfg(test)]
pub(crate) use evicting::KeptToken;
pub(crate) use full::FullCache;
pub(crate) use sequence_cache::SequenceCache;
pub(crate) use slots::SlotMap;
