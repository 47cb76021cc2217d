//! The chunk store: keys and values of chunks that were prefilled alone, in memory and in a folder.
//!
//! A chunk is immutable and named by what it is ([`ChunkId::key`]): model, element type, shape, BOS policy, namespace
//! and token ids. What is read from a folder is never trusted: names, shapes and the checksum of every layer are
//! verified, and a file that fails is removed and reported as if it had never been there. `docs/chunk-file.md`
//! describes the file byte by byte.
//!
//! Several processes may use one folder at once. Reading takes no lock: a file appears whole under its final name or not
//! at all, its content follows from its name, and whoever writes it second replaces it by its equal. What the folder may
//! take, and what was used last, stands in an index that they share ([`Limits`]); one process at a time writes there.
//!
//! Beside a chunk lie its summaries ([`refrain_kv::Summary`]): tensors that a method computed of the chunk once.
//!
//! The store does not know what the numbers mean: a layer is two runs of elements, and a summary is named tensors.

mod blocks;
mod chunk;
mod disk;
mod error;
mod file;
mod folder;
mod header;
mod id;
mod index;
mod info;
mod layer;
mod limits;
mod namespace;
pub mod pack;
mod reader;
#[cfg(feature = "remote")]
mod remote;
mod rest;
mod store;
pub mod summary;
#[cfg(test)]
mod tests;
mod verify;

pub use chunk::{Chunk, ChunkBuilder};
pub use disk::GcReport;
pub use error::{Problem, Result, StoreError};
pub use id::{BosPolicy, ChunkId, ChunkKey, ShortKey, UnknownBosPolicy};
pub use info::{ChunkDetail, ChunkInfo, Listing, PutOutcome, Repair, Scope, Stats, Unusable};
pub use layer::Layer;
pub use limits::Limits;
pub use namespace::{NamespaceKey, SHARED};
pub use reader::ChunkReader;
#[cfg(feature = "remote")]
pub use remote::{RemoteOptions, RemoteStats};
pub use rest::{Encoding, UnknownEncoding};
pub use store::Store;
pub use verify::{VerifyProgress, VerifyReport};
