//! Errors of the store, each with its remedy.

use std::fmt::Write as _;
use std::io::ErrorKind;
use std::path::PathBuf;

use refrain_kernels::Dtype;

use crate::key::{ChunkKey, InvalidKey};

/// The result of everything fallible in this crate.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;

/// An error of the store: what, where and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The system refused something.
    #[error("cannot {action} {}: {source}{}", path.display(), remedy(source.kind()))]
    Io {
        /// The operation that failed: "create the folder", "write", …
        action: &'static str,
        /// On which file or folder.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A chunk without tokens, layers, heads or elements, or with more than memory can address.
    #[error(
        "a chunk of {layers} layers, {tokens} tokens, {kv_heads} KV heads of {head_dim} elements cannot be kept: \
         each must be at least 1, layers at most 1000, and all of it must fit into the address space"
    )]
    Shape {
        /// Layers.
        layers: usize,
        /// Tokens.
        tokens: usize,
        /// KV heads.
        kv_heads: usize,
        /// Elements of a head.
        head_dim: usize,
    },
    /// Keys or values that are not what the chunk's identity says.
    #[error(
        "keys and values of layer {layer} are {found} elements of {found_dtype} each; the chunk needs {expected} of {dtype}"
    )]
    Layer {
        /// The layer, from 0.
        layer: usize,
        /// Elements given of each.
        found: usize,
        /// Type of the elements given.
        found_dtype: Dtype,
        /// Elements that the identity asks for: tokens × KV heads × head size.
        expected: usize,
        /// Type that the identity asks for.
        dtype: Dtype,
    },
    /// More or fewer layers than the chunk's identity says.
    #[error("{found} layers were given for a chunk of {expected}")]
    Layers {
        /// Layers given.
        found: usize,
        /// Layers of the identity.
        expected: usize,
    },
    /// A chunk or aux tensors file that cannot be used.
    #[error(
        "{} cannot be used: {problem}; `verify` removes broken files, and they are computed again when needed",
        path.display()
    )]
    Unusable {
        /// The file.
        path: PathBuf,
        /// The fault.
        problem: Problem,
    },
    /// No chunk has this key, or a key that begins so.
    #[error("no chunk's key begins with '{prefix}'; `ls` shows the keys there are")]
    NoSuchChunk {
        /// The beginning that was asked for.
        prefix: String,
    },
    /// Several chunks' keys begin so.
    #[error("'{prefix}' is the beginning of {} keys: give more digits{}", candidates.len(), list(candidates))]
    Ambiguous {
        /// The beginning that was asked for.
        prefix: String,
        /// The keys that begin so, ascending.
        candidates: Vec<ChunkKey>,
    },
    /// The index of the folder refused something.
    #[error("cannot {action} the index {}: {why}", path.display())]
    Index {
        /// The operation that failed: "open", "read", "write".
        action: &'static str,
        /// Its file.
        path: PathBuf,
        /// The database's error, and the remedy where there is one.
        why: String,
    },
    /// An object store that cannot be used.
    #[error(
        "{url} is no URL of an object store that can be used: {why}; a folder is file:///FOLDER, others are s3://, gs:// and az:// \
         with what they need"
    )]
    Remote {
        /// Where it was to be.
        url: String,
        /// The fault.
        why: String,
    },
    /// An object that could not be read, written, deleted or listed.
    #[error("{url} did not do what it was asked: {why}")]
    Objects {
        /// The object store.
        url: String,
        /// The fault.
        why: String,
    },
    /// An object with more bytes than its reader takes.
    #[error("the object {name} of {url} has more than {most} bytes")]
    ObjectTooLarge {
        /// The object store.
        url: String,
        /// Its name.
        name: String,
        /// Most bytes.
        most: u64,
    },
    /// Chunks that could not be deleted from the object store.
    #[error(
        "chunks cannot be deleted from {url}: {why}; they are gone here, and deleting them again is safe and deletes what is left"
    )]
    NotDeleted {
        /// Where they are.
        url: String,
        /// The fault.
        why: String,
    },
    /// An archive that cannot be read, or holds nothing.
    #[error("the archive cannot be read: {why}; give one that `export` wrote, whole and not compressed")]
    Archive {
        /// The fault.
        why: String,
    },
    /// No room within the limits of the folder, or of the chunk's namespace.
    #[error(
        "{bytes} bytes of a chunk do not fit into the {limit} bytes that {} may take{}: raise the limit{}",
        if namespace.is_some() { "its namespace" } else { "the store" },
        if *pinned > 0 { format!(", of which pinned chunks take {pinned}") } else { String::new() },
        if *pinned > 0 { " or unpin some" } else { "" }
    )]
    NoRoom {
        /// Bytes of the chunk's files.
        bytes: u64,
        /// Most bytes.
        limit: u64,
        /// Bytes of pinned chunks, which do not go.
        pinned: u64,
        /// The namespace whose quota it is; none is the whole folder.
        namespace: Option<String>,
    },
    /// Text that is not a key, nor the beginning of one.
    #[error(transparent)]
    Key(#[from] InvalidKey),
}

impl StoreError {
    /// Whether the file system, or what this user may have of it, is full.
    pub(crate) fn is_full_disk(&self) -> bool {
        let StoreError::Io { source, .. } = self else { return false };
        matches!(source.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
    }
}

/// The remedy for a refusal of the system, as the end of a message; empty where none is known.
fn remedy(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::PermissionDenied => "; the user of this program needs the right to read and write there",
        ErrorKind::AlreadyExists => "; a file of this name is there",
        ErrorKind::ReadOnlyFilesystem => "; it must lie where this program can write",
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "; make room there",
        _ => "",
    }
}

/// A few of the candidates, one a line.
fn list(candidates: &[ChunkKey]) -> String {
    const SHOWN: usize = 8;
    let mut out = String::new();
    for key in candidates.iter().take(SHOWN) {
        let _ = write!(out, "\n  {key}");
    }
    if candidates.len() > SHOWN {
        let _ = write!(out, "\n  and {} more", candidates.len() - SHOWN);
    }
    out
}

/// Why a chunk or aux tensors file cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The file ends too early, or goes on after its end.
    #[error("it has {found} bytes where its header asks for {expected}")]
    Length {
        /// Bytes that the header asks for.
        expected: u64,
        /// Bytes there are.
        found: u64,
    },
    /// The header is no safetensors header of a chunk or aux tensors.
    #[error("its header is malformed: {0}")]
    Header(String),
    /// Another version of the format: left alone.
    #[error("it has format version '{0}', which this program does not know; it is left alone")]
    UnknownVersion(String),
    /// The header's values do not match their checksum.
    #[error("the checksum of its header does not match")]
    HeaderChecksum,
    /// It is a whole file, but of something else than its name says.
    #[error("it is of another {0}")]
    Identity(&'static str),
    /// The keys and values of a layer, or of some tokens of it, do not match their checksum.
    #[error("the checksum of layer {0} does not match")]
    Checksum(usize),
    /// The tensors of an aux tensors file do not match their checksum.
    #[error("the checksum of its tensors does not match")]
    DataChecksum,
    /// The system cannot read it. It is left alone: reading may succeed another time.
    #[error("it cannot be read: {0}")]
    Io(String),
}

impl Problem {
    /// Whether a file with this problem can never be of use, so that it is removed.
    pub fn is_permanent(&self) -> bool {
        !matches!(self, Problem::UnknownVersion(_) | Problem::Io(_))
    }
}
