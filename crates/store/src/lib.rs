//! The chunk store: keys and values of chunks that were prefilled alone, in memory and in a folder.
//!
//! A chunk is immutable and named by what it is ([`ChunkId::key`]): model, element type, shape, BOS policy, namespace
//! and token ids. What is read from a folder is never trusted: names, shapes and the checksum of every layer are
//! verified, and a file that fails is removed and reported as if it had never been there. `docs/chunk-file.md`
//! describes the file byte by byte.
//!
//! Several processes may use one folder at once, without a lock: a file appears whole under its final name or not at
//! all, its content follows from its name, and whoever writes it second replaces it by its equal.
//!
//! Beside a chunk lie its summaries ([`refrain_kv::Summary`]): tensors that a method computed of the chunk once.
//!
//! The store does not know what the numbers mean: a layer is two runs of elements, and a summary is named tensors.

mod blocks;
mod chunk;
mod error;
mod file;
mod folder;
mod header;
mod id;
mod info;
mod layer;
mod reader;
mod store;
pub mod summary;
#[cfg(test)]
mod tests;
mod verify;

pub use chunk::{Chunk, ChunkBuilder};
pub use error::{Problem, Result, StoreError};
pub use id::{BosPolicy, ChunkId, ChunkKey, ShortKey, UnknownBosPolicy};
pub use info::{ChunkDetail, ChunkInfo, Listing, PutOutcome, Repair, Stats, Unusable};
pub use layer::Layer;
pub use reader::ChunkReader;
pub use store::Store;
pub use verify::{VerifyProgress, VerifyReport};
