//! Names of the store's own files in its folder.

/// The index.
pub(crate) const INDEX: &str = "index.redb";
/// Locked while a broken index is set aside.
pub(crate) const INDEX_LOCK: &str = "index.lock";
/// A broken index that was set aside.
pub(crate) const BROKEN_INDEX: &str = "index.redb.broken";
/// The key that namespaces are derived with.
pub(crate) const NAMESPACE_KEY: &str = "namespace.key";
/// How the names of files that are being written begin.
pub(crate) const TEMPORARY: &str = ".tmp-";
