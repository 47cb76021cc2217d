//! Names of the store's own files in its folder, and of the documents' that lie with them.

/// The index.
pub(crate) const INDEX: &str = "index.redb";
/// Locked while a broken index is set aside.
pub(crate) const INDEX_LOCK: &str = "index.lock";
/// A broken index that was set aside.
pub(crate) const BROKEN_INDEX: &str = "index.redb.broken";
/// The key that namespaces are derived with.
pub(crate) const NAMESPACE_KEY: &str = "namespace.key";
/// The database of documents, which is another crate's.
pub const DOCUMENTS: &str = "documents.redb";
/// The database of documents while it is made anew.
pub const NEW_DOCUMENTS: &str = "documents.redb.new";
/// How the names of files that are being written begin.
pub const TEMPORARY: &str = ".tmp-";
