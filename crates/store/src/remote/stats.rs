//! Counts of an object store since the store was opened.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::Serialize;

/// Counts of an object store since the store was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct RemoteStats {
    /// Objects brought from there, and their bytes.
    pub fetched: u64,
    /// Bytes of them.
    pub fetched_bytes: u64,
    /// Objects that were not there.
    pub absent: u64,
    /// Objects brought there.
    pub sent: u64,
    /// Bytes of them.
    pub sent_bytes: u64,
    /// Objects that were to be brought there and were there: another machine, or this one, had brought them before.
    pub already_there: u64,
    /// Requests that failed or took too long.
    pub failures: u64,
    /// Objects that were not asked for because it had just failed.
    pub skipped: u64,
    /// Objects that were broken. They are not used, and are replaced once their chunk was computed here.
    pub broken: u64,
    /// Broken objects that were replaced by whole ones.
    pub replaced: u64,
    /// Chunks that were not asked for because computing them was expected to take less time.
    pub passed_over: u64,
    /// Chunks that came later than expected, and before they were computed beside that.
    pub races_won: u64,
    /// Chunks that came later than expected, and were computed first.
    pub races_lost: u64,
    /// Chunks that are still to be brought there.
    pub pending: u64,
    /// Why it last failed, if it has not answered since.
    pub down: Option<String>,
    /// Why something could not be brought there, if nothing has been since: it may answer and refuse.
    pub stuck: Option<String>,
}

/// The counts of [`RemoteStats`].
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) fetched: AtomicU64,
    pub(super) fetched_bytes: AtomicU64,
    pub(super) absent: AtomicU64,
    pub(super) sent: AtomicU64,
    pub(super) sent_bytes: AtomicU64,
    pub(super) already_there: AtomicU64,
    pub(super) failures: AtomicU64,
    pub(super) skipped: AtomicU64,
    pub(super) broken: AtomicU64,
    pub(super) replaced: AtomicU64,
    pub(super) passed_over: AtomicU64,
    pub(super) races_won: AtomicU64,
    pub(super) races_lost: AtomicU64,
}

impl Counters {
    pub(super) fn stats(&self) -> RemoteStats {
        RemoteStats {
            fetched: self.fetched.load(Relaxed),
            fetched_bytes: self.fetched_bytes.load(Relaxed),
            absent: self.absent.load(Relaxed),
            sent: self.sent.load(Relaxed),
            sent_bytes: self.sent_bytes.load(Relaxed),
            already_there: self.already_there.load(Relaxed),
            failures: self.failures.load(Relaxed),
            skipped: self.skipped.load(Relaxed),
            broken: self.broken.load(Relaxed),
            replaced: self.replaced.load(Relaxed),
            passed_over: self.passed_over.load(Relaxed),
            races_won: self.races_won.load(Relaxed),
            races_lost: self.races_lost.load(Relaxed),
            pending: 0,
            down: None,
            stuck: None,
        }
    }
}
