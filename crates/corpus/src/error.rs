//! Errors of documents that are kept.

use std::path::PathBuf;

/// The reason for which documents cannot be kept or found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The documents' file cannot be opened.
    #[error("cannot open {path}: {reason}")]
    Open {
        /// The file.
        path: PathBuf,
        /// The fault.
        reason: String,
    },
    /// The documents' file is damaged.
    #[error(
        "{path} is damaged: {reason}; put a copy of it in its place, or move it away and ingest the documents again, whose chunks are \
         still there"
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The fault.
        reason: String,
    },
    /// The documents' file is open in another program, or by another engine of this one.
    #[error(
        "cannot open {path}: another program, probably `refrain serve`, or another engine of this one, has it open: bring documents to the \
         server with POST /v1/documents and ask it, or stop it, or choose another store"
    )]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// The documents' file does not have its name any more.
    #[error(
        "{path} was moved away or removed while this program has it open, so that changes would be lost: put it back, or start the program \
         again"
    )]
    Moved {
        /// The file.
        path: PathBuf,
    },
    /// A document that is not in the namespace.
    #[error("there is no document {0:?}")]
    NotFound(String),
    /// A part that a document does not have.
    #[error("document {id} has no part {part}: it has {parts}")]
    NoPart {
        /// The document.
        id: String,
        /// The index that was asked for.
        part: u32,
        /// Number of the document's chunks.
        parts: u32,
    },
    /// An empty list of a document's parts.
    #[error("parts of document {0} is empty")]
    NoParts(String),
    /// A namespace without room for documents.
    #[error(
        "the stored documents have {stored} bytes of a quota of {quota}, and the new ones have {new}: remove some of the stored ones first"
    )]
    QuotaExceeded {
        /// Bytes of the namespace's titles and texts.
        stored: u64,
        /// Most bytes of them.
        quota: u64,
        /// Bytes of the new documents.
        new: u64,
    },
    /// A document with more text than can be shared.
    #[error(
        "a document that machines share may have {most} bytes of text, and this one has {bytes}: divide it"
    )]
    TooLarge {
        /// Bytes of title and text.
        bytes: u64,
        /// Most bytes.
        most: u64,
    },
    /// An object store that documents are shared through does not do what it is asked.
    #[error("documents cannot be shared now: {0}")]
    ObjectStore(#[from] refrain_store::StoreError),
    /// Shared documents of which an object is in the way.
    #[error("documents cannot be shared now: {0}")]
    Sharing(String),
    /// Garbage of an object store that cannot be collected.
    #[error("{0}")]
    Garbage(String),
    /// Documents that exceed the model's context.
    #[error("the documents have more tokens than the model's context of {context}")]
    ContextExceeded {
        /// Positions of the model's context.
        context: usize,
    },
    /// A removed document that has left bytes somewhere.
    #[error(
        "the document is removed from answers and searches, and could not be deleted from {tier}: remove it again, which deletes what is \
         left: {reason}"
    )]
    RemovalIncomplete {
        /// The place that still has bytes of it.
        tier: &'static str,
        /// The fault.
        reason: String,
    },
    /// Chunks that cannot be pinned or unpinned.
    #[error("the chunks cannot be pinned or unpinned: {0}")]
    Pins(refrain_store::StoreError),
    /// A text that cannot be tokenised.
    #[error(transparent)]
    Engine(#[from] refrain_engine::Error),
    /// The disk of the documents' file is full, also after chunks that are not pinned have gone.
    #[error(
        "cannot write {path}: {source}; make room there, or remove documents or unpin some, whose chunks then make room"
    )]
    DiskFull {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The documents' file cannot be read or written.
    #[error("the stored documents cannot be read or written: {0}")]
    Database(Box<dyn std::error::Error + Send + Sync>),
    /// The search index fails.
    #[error("the stored documents cannot be searched: {0}")]
    Index(Box<dyn std::error::Error + Send + Sync>),
}

/// The result of keeping or finding documents.
pub type Result<T, E = Error> = std::result::Result<T, E>;
