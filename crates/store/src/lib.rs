//! The chunk store: keys and values of chunks that were prefilled alone, in memory and in a folder.
//!
//! A chunk is immutable and named by what it is ([`ChunkId::key`]): model, element type, shape, BOS policy, namespace
//! and token ids. What is read from a folder is never trusted: names, shapes and the checksum of every layer are
//! verified, and a file that fails is removed and reported as if it had never been there. `docs/chunk-file.md`
//! describes the file byte by byte.
//!
//! Several processes may use one folder at once. Reading takes no lock: a file appears whole under its final name or not
//! at all, its content follows from its name, and the second to write it replaces it by its equal. What the folder may
//! take, and what was used last, stands in an index that they share ([`Limits`]); one process at a time writes there.
//!
//! Beside a chunk lie its aux tensors ([`refrain_kv::AuxTensors`]): tensors that a method computed of the chunk once.
//!
//! The store does not know what the numbers mean: a layer is two runs of elements, and an aux tensors file is named tensors.

pub mod archive;
pub mod aux_file;
mod block_digests;
mod chunk;
mod chunk_file;
mod clock;
mod damage;
mod disk;
mod error;
mod file_identity;
mod file_names;
mod folder;
mod header;
pub mod hex;
mod id;
mod index;
mod info;
mod key;
mod kv_quant;
mod layer;
mod limits;
mod namespace;
mod open_files;
mod private;
mod reader;
#[cfg(feature = "remote")]
mod remote;
mod rooms;
mod store;
#[cfg(test)]
mod tests;
mod tiers;
mod verify;

pub use chunk::Chunk;
pub use damage::{damage, unless_it_panics};
pub use error::{Problem, Result, StoreError};
pub use file_identity::file_identity;
pub use file_names::{DOCUMENTS, NEW_DOCUMENTS, TEMPORARY};
pub use folder::holds_store;
pub use id::{BosPolicy, ChunkId, UnknownBosPolicy};
pub use info::{
    ChunkDetail, ChunkInfo, Fetched, GcReport, LinkSpeed, Listing, PutOutcome, Repair, Scope, Stats,
    Unusable, WantedChunk,
};
pub use key::{ChunkKey, InvalidKey, ShortKey};
pub use kv_quant::{KvQuantization, UnknownKvQuantization};
pub use layer::{Layer, NewLayers};
pub use limits::Limits;
pub use namespace::{NamespaceKey, SHARED};
pub use open_files::{max_open_files, max_reader_files, raise_open_files};
pub use private::{make_private_file, make_private_folder};
pub use reader::ChunkReader;
#[cfg(feature = "remote")]
pub use remote::{
    FetchPolicy, ListedObject, Objects, RemoteOptions, RemoteStats, UnknownFetchPolicy, WrittenObject,
};
pub use store::Store;
pub use tiers::ChunkCopies;
pub use verify::{VerifyProgress, VerifyReport};
