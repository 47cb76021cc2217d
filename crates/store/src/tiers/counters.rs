//! Counts since the store was opened.

use std::sync::atomic::AtomicU64;

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) memory_hits: AtomicU64,
    pub(crate) disk_hits: AtomicU64,
    pub(crate) misses: AtomicU64,
    pub(crate) removed: AtomicU64,
    pub(crate) unusable: AtomicU64,
    pub(crate) stored: AtomicU64,
    pub(crate) not_stored: AtomicU64,
    pub(crate) bytes_read: AtomicU64,
    pub(crate) bytes_written: AtomicU64,
}
