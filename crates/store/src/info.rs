//! Descriptions of the store and of its chunks.

use std::path::{Path, PathBuf};
use std::time::Duration;

use refrain_kernels::Dtype;
use serde::{Serialize, Serializer};

use crate::chunk::Provenance;
use crate::chunk_file::Header;
use crate::hex;
use crate::index::IndexRow;
use crate::{BosPolicy, Chunk, ChunkId, ChunkKey, KvQuantization, Problem, StoreError};

/// Whose chunks are meant. Chunks of one namespace are invisible to another, in content and in listings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Scope<'a> {
    /// Everybody's: for the owner of the folder.
    All,
    /// Chunks of one namespace.
    Namespace(&'a str),
}

impl Scope<'_> {
    pub(crate) fn has(&self, namespace: &str) -> bool {
        match self {
            Scope::All => true,
            Scope::Namespace(own) => *own == namespace,
        }
    }
}

/// A description of a chunk without its keys and values.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ChunkInfo {
    /// Its name.
    pub key: ChunkKey,
    /// Its file, if it is on disk.
    #[serde(serialize_with = "as_path_if")]
    pub path: Option<PathBuf>,
    /// Whether it is in memory.
    pub in_memory: bool,
    /// Fingerprint of the model that computed it.
    #[serde(serialize_with = "as_hex")]
    pub model: [u8; 32],
    /// Type of its elements as computed.
    #[serde(serialize_with = "as_text")]
    pub dtype: Dtype,
    /// How they lie at rest.
    #[serde(serialize_with = "as_text")]
    pub quantization: KvQuantization,
    /// The treatment of the token that begins every text.
    #[serde(serialize_with = "as_text")]
    pub bos: BosPolicy,
    /// Digest of the tokens that stood before it while it was prefilled, where they were others than BOS.
    #[serde(serialize_with = "as_optional_hex", skip_serializing_if = "Option::is_none")]
    pub prefix: Option<[u8; 32]>,
    /// Its namespace.
    pub namespace: String,
    /// Number of tokens.
    pub tokens: usize,
    /// Number of layers.
    pub layers: usize,
    /// KV heads of a layer.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Where its text comes from, for people.
    pub label: String,
    /// Precision and kernels of the engine that computed it, such as `bf16-avx512`; files of earlier builds do not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numerics: Option<String>,
    /// When it was computed, in seconds since 1970.
    pub created: u64,
    /// Bytes of its keys and values at rest.
    pub bytes: u64,
    /// Kinds of its aux tensors on disk or in memory, ascending.
    pub aux_kinds: Vec<String>,
    /// Bytes of the aux tensors files.
    pub aux_bytes: u64,
    /// When it was last used, in seconds since 1970, as far as the index knows yet.
    pub used: Option<u64>,
    /// When its time is over, in seconds since 1970.
    pub expires: Option<u64>,
    /// Whether it stays whatever room is needed.
    pub pinned: bool,
}

impl ChunkInfo {
    pub(crate) fn of_memory(chunk: &Chunk, expires: u64) -> ChunkInfo {
        let expires = Some(expires).filter(|expires| *expires != 0);
        ChunkInfo { expires, ..ChunkInfo::new(chunk.id(), chunk.provenance(), None, true) }
    }

    pub(crate) fn of_header(
        header: &Header,
        path: PathBuf,
        in_memory: bool,
        row: Option<&IndexRow>,
    ) -> ChunkInfo {
        ChunkInfo {
            used: row.map(|row| row.last_used / 1000),
            expires: row.map(|row| row.expires).filter(|expires| *expires != 0),
            pinned: row.is_some_and(|row| row.pinned),
            ..ChunkInfo::new(&header.id, &header.provenance, Some(path), in_memory)
        }
    }

    fn new(id: &ChunkId, provenance: &Provenance, path: Option<PathBuf>, in_memory: bool) -> ChunkInfo {
        let Provenance { label, numerics, created } = provenance.clone();
        ChunkInfo {
            key: id.key(),
            path,
            in_memory,
            model: id.model,
            dtype: id.dtype,
            quantization: id.quantization,
            bos: id.bos,
            prefix: id.prefix,
            namespace: id.namespace.clone(),
            tokens: id.tokens.len(),
            layers: id.layers,
            kv_heads: id.kv_heads,
            head_dim: id.head_dim,
            label,
            numerics,
            created,
            bytes: id.layout().map_or(0, |layout| (layout.layer * id.layers) as u64),
            aux_kinds: Vec::new(),
            aux_bytes: 0,
            used: None,
            expires: None,
            pinned: false,
        }
    }

    /// The model's fingerprint in hexadecimal digits.
    pub fn model_hex(&self) -> String {
        hex::encode(&self.model)
    }
}

fn as_hex<S: Serializer>(bytes: &[u8; 32], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&hex::encode(bytes))
}

fn as_optional_hex<S: Serializer>(bytes: &Option<[u8; 32]>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&bytes.map(|bytes| hex::encode(&bytes)).unwrap_or_default())
}

/// A path as text, whose bytes that are no Unicode are replaced: serde refuses those.
pub(crate) fn as_path<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&path.display())
}

fn as_path_if<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
    path.as_ref().map(|path| path.to_string_lossy()).serialize(serializer)
}

/// [`as_path`] of each.
pub(crate) fn as_paths<S: Serializer>(paths: &[PathBuf], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(paths.iter().map(|path| path.to_string_lossy()))
}

fn as_text<T: std::fmt::Display, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

/// A chunk in full, without its keys and values.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ChunkDetail {
    /// Its identity.
    #[serde(flatten)]
    pub info: ChunkInfo,
    /// Its token ids.
    pub token_ids: Vec<u32>,
}

/// All chunks that a store has.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Listing {
    /// Chunks with a whole header, ascending by key.
    pub chunks: Vec<ChunkInfo>,
    /// Chunk files whose header cannot be used, ascending by path.
    pub unusable: Vec<Unusable>,
}

/// A chunk file that is there and cannot be used.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Unusable {
    /// The file.
    #[serde(serialize_with = "as_path")]
    pub path: PathBuf,
    /// The fault.
    #[serde(serialize_with = "as_text")]
    pub problem: Problem,
}

/// A chunk or aux tensors file that failed when it was to be used or verified.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Repair {
    /// The file.
    #[serde(serialize_with = "as_path")]
    pub path: PathBuf,
    /// The fault.
    #[serde(serialize_with = "as_text")]
    pub problem: Problem,
    /// Whether it has been removed. Files of an unknown version and files that the system cannot read stay.
    pub removed: bool,
}

/// The outcome of putting a chunk or aux tensors into the store.
#[derive(Debug)]
#[non_exhaustive]
pub enum PutOutcome {
    /// It is on disk, and stays there through a loss of power.
    Stored {
        /// Bytes written.
        bytes: u64,
    },
    /// It was on disk already.
    Known,
    /// The store has no folder.
    MemoryOnly,
    /// It was deleted since it was last [admitted](crate::Store::admit), and is not kept.
    Deleted,
    /// The chunk could not be written (a full disk on which all chunks are pinned, say). It serves from memory while there is room; nothing of it is on
    /// disk under its name unless the very last step, syncing the folder, failed.
    NotStored {
        /// Why.
        error: StoreError,
    },
}

/// A chunk that may be fetched from an object store.
#[derive(Clone, Debug)]
pub struct WantedChunk {
    /// Its identities: in the namespace of the request, and in the shared one.
    pub ids: Vec<ChunkId>,
    /// Time that computing it takes; none where it is not known.
    pub compute: Option<Duration>,
}

impl From<&ChunkId> for WantedChunk {
    fn from(id: &ChunkId) -> WantedChunk {
        WantedChunk { ids: vec![id.clone()], compute: None }
    }
}

/// Counts of chunks that were to be fetched from an object store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fetched {
    /// Chunks that are on their way; where they were waited for, chunks that have come.
    pub chunks: usize,
    /// Chunks that were not asked for: computing them is expected to take less time.
    pub passed_over: usize,
}

/// Speed of the link to an object store, by its downloads: weighted means, of which the latest measurements have most.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct LinkSpeed {
    /// Seconds until an object's first byte; none before the first measurement.
    pub latency: Option<f64>,
    /// Bytes a second of all objects that arrive at the same time; none before the first measurement.
    pub bytes_per_second: Option<f64>,
}

/// Counts since the store was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Stats {
    /// Chunks found in memory.
    pub memory_hits: u64,
    /// Chunks read from disk.
    pub disk_hits: u64,
    /// Chunks that were nowhere, or broken.
    pub misses: u64,
    /// Broken chunk and aux tensors files removed.
    pub removed: u64,
    /// Chunk and aux tensors files that could not be used and were left alone.
    pub unusable: u64,
    /// Chunks and aux tensors written to disk.
    pub stored: u64,
    /// Chunks and aux tensors that could not be written to disk.
    pub not_stored: u64,
    /// Bytes of keys, values and aux tensors read from disk.
    pub bytes_read: u64,
    /// Bytes of chunk and aux tensors files written.
    pub bytes_written: u64,
    /// Chunks that went to make room on disk, or because their time was over.
    pub evicted: u64,
    /// Bytes of chunk and aux tensors files on disk now, of all processes.
    pub disk_bytes: u64,
    /// Chunks on disk now.
    pub disk_chunks: u64,
    /// Bytes of chunks in memory now, and what is kept about them.
    pub memory_bytes: u64,
    /// Chunks in memory now.
    pub memory_chunks: u64,
}

/// The files that `gc` removed, and the folder's contents afterwards.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct GcReport {
    /// Chunks that are on disk now.
    pub chunks: u64,
    /// Bytes of their files and their aux tensors files'.
    pub bytes: u64,
    /// Chunks removed because they had expired.
    pub expired: u64,
    /// Least recently used chunks removed to stay within the limits.
    pub evicted: u64,
    /// Bytes of all files removed.
    pub freed: u64,
    /// Chunk files that had no row in the index, and have one now.
    pub entered: u64,
    /// Rows of the index whose files were gone, and that were taken out.
    pub forgotten: u64,
    /// Aux tensors whose chunk is not there, removed.
    #[serde(serialize_with = "as_paths")]
    pub orphans: Vec<PathBuf>,
    /// Temporary files of writers that died, removed.
    #[serde(serialize_with = "as_paths")]
    pub stale: Vec<PathBuf>,
}
