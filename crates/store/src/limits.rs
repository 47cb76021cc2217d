//! How much the store may keep, and what goes when it is more.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::{ChunkKey, Result, StoreError};

/// How much a store may keep.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Bytes of chunks in memory, besides those in use; summaries may take a sixteenth of it on top.
    pub memory: u64,
    /// Bytes of chunk and summary files in the folder. The least recently used chunks go first, and pinned ones never.
    pub disk: u64,
    /// The same for the files of one namespace, where `quotas` has no other.
    pub quota: u64,
    /// The same for single namespaces.
    pub quotas: BTreeMap<String, u64>,
    /// How long a chunk stays after it was stored, if nobody says otherwise.
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
}

impl From<u64> for Limits {
    fn from(bytes: u64) -> Limits {
        Limits::memory(bytes)
    }
}

/// What the index knows of a chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    /// Bytes of its file and its summaries'.
    pub(crate) bytes: u64,
    /// When it was last used, in milliseconds since 1970.
    pub(crate) used: u64,
    /// When its row was entered, in seconds since 1970.
    pub(crate) written: u64,
    /// When its time is over, in seconds since 1970; 0 is never.
    pub(crate) expires: u64,
    /// Whether it never goes to make room.
    pub(crate) pinned: bool,
    pub(crate) namespace: String,
}

impl Row {
    /// Whether its time is over.
    pub(crate) fn is_over(&self, now: u64) -> bool {
        self.expires != 0 && self.expires <= now
    }
}

/// Which of `rows` have to go, with their bytes, for the `new` one to stay within the limits: those whose time is over, and
/// then the least recently used, first of its namespace and then of all, without the pinned.
///
/// # Errors
/// If there is no room for it without pinned chunks going: then nothing has to go.
pub(crate) fn victims(
    rows: &BTreeMap<ChunkKey, Row>,
    new: Option<&Row>,
    limits: &Limits,
) -> Result<Vec<(ChunkKey, u64)>> {
    let now = crate::chunk::now();
    let (over, mut left): (Vec<_>, Vec<_>) = rows.iter().partition(|(_, row)| row.is_over(now));
    let mut gone = over;
    left.sort_by_key(|(key, row)| (row.used, **key));
    let mut namespaces: Vec<&str> = left.iter().map(|(_, row)| row.namespace.as_str()).collect();
    namespaces.extend(new.map(|row| row.namespace.as_str()));
    namespaces.sort_unstable();
    namespaces.dedup();
    let scopes = namespaces.into_iter().map(|namespace| (Some(namespace), limits.quota_of(namespace)));
    for (namespace, limit) in scopes.chain([(None, limits.disk)]) {
        let is_within = |row: &Row| namespace.is_none_or(|namespace| namespace == row.namespace);
        let own = new.filter(|row| is_within(row)).map_or(0, |row| row.bytes);
        let taken = left.iter().filter(|(_, row)| is_within(row)).map(|(_, row)| row.bytes);
        let mut bytes = taken.fold(own, u64::saturating_add);
        left.retain(|(key, row)| {
            let goes = bytes > limit && is_within(row) && !row.pinned;
            if goes {
                bytes = bytes.saturating_sub(row.bytes);
                gone.push((*key, *row));
            }
            !goes
        });
        if own > 0 && bytes > limit {
            return Err(StoreError::NoRoom {
                bytes: own,
                limit,
                pinned: bytes - own,
                namespace: namespace.map(str::to_owned),
            });
        }
    }
    Ok(gone.into_iter().map(|(key, row)| (*key, row.bytes)).collect())
}
