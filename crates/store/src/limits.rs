//! Bounds on what a store keeps.

use std::collections::BTreeMap;
use std::time::Duration;

/// Bounds on what a store keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Bytes of chunks in memory, besides those in use. Aux tensors may take a sixteenth of it on top, and memory that
    /// chunks have left, for those that are read next, an eighth.
    pub memory: u64,
    /// Bytes of chunk and aux tensors files in the folder. The least recently used chunks go first, and pinned ones never.
    pub disk: u64,
    /// Bytes of the files of one namespace that has no entry in `quotas`.
    pub quota: u64,
    /// Bytes of the files of single namespaces.
    pub quotas: BTreeMap<String, u64>,
    /// How long a chunk stays after it was stored, unless its own expiry says otherwise.
    pub time_to_live: Option<Duration>,
}

impl Limits {
    /// A bound on memory alone.
    pub fn memory(bytes: u64) -> Limits {
        Limits { memory: bytes, disk: u64::MAX, quota: u64::MAX, quotas: BTreeMap::new(), time_to_live: None }
    }

    /// Bytes that the files of a namespace may take.
    pub fn quota_of(&self, namespace: &str) -> u64 {
        self.quotas.get(namespace).copied().unwrap_or(self.quota)
    }

    /// Whether any namespace has a quota.
    pub(crate) fn has_quotas(&self) -> bool {
        self.quota < u64::MAX || !self.quotas.is_empty()
    }
}

impl From<u64> for Limits {
    fn from(bytes: u64) -> Limits {
        Limits::memory(bytes)
    }
}
