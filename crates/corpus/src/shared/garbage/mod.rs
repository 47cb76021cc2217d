//! Chunks in the object store that no document names and that nobody has written for long.
//!
//! A collector reads what all documents of all namespaces name, and notes the other chunks that are old enough. The next one, after
//! a time of grace, deletes those that were noted before and are named by no document still. It looks for new documents before each
//! batch that it deletes. Nothing else is deleted, so that a collector may be stopped at any moment, and begun again.
//!
//! A chunk counts as used when it is written: object stores do not tell when an object was last read.
//!
//! | object | content |
//! |---|---|
//! | `garbage/lease.N` | says which collector is at work |
//! | `garbage/candidates.json` | keys of chunks that may be deleted, and when each was noted |

mod lease;
mod named;

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use refrain_store::{ChunkKey, Objects};
use serde::{Deserialize, Serialize};

use self::lease::{GARBAGE, Lease};
use self::named::Named;
use super::objects::{CHANGES, DOCUMENTS, decode, encode};
use super::parallel::in_parallel;
use crate::error::{Error, Result};

/// The object of the candidates.
const CANDIDATES: &str = "garbage/candidates.json";
/// Most bytes of the candidates.
const MOST_CANDIDATES: u64 = 1 << 30;
/// Chunks that are deleted between two looks for new documents.
const BATCH: usize = 256;
/// Age at which what a killed process has left of an object in a folder is deleted.
const LEFT_AFTER: Duration = Duration::from_secs(86400);

/// What a collector deletes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GarbageOptions {
    /// Time since a chunk was written before which it is kept in any case. It must be far longer than the time between the writing of a
    /// chunk and that of its document.
    pub unused: Duration,
    /// Time between the noting of a chunk and its deletion.
    pub grace: Duration,
    /// Time without a sign of life after which another collector counts as dead.
    pub lease: Duration,
}

impl Default for GarbageOptions {
    fn default() -> Self {
        let day = Duration::from_secs(24 * 3600);
        GarbageOptions { unused: 30 * day, grace: day, lease: Duration::from_secs(300) }
    }
}

/// What a collector has found and done.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct GarbageReport {
    /// Documents, of all namespaces.
    pub documents: usize,
    /// Chunks in the object store.
    pub chunks: usize,
    /// Bytes of them and of what methods keep beside them.
    pub bytes: u64,
    /// Of the chunks, those that no document names and that are old enough: the garbage.
    pub unused: usize,
    /// Bytes of those.
    pub unused_bytes: u64,
    /// Of the garbage, what was noted long enough ago to be deleted.
    pub due: usize,
    /// Bytes of that.
    pub due_bytes: u64,
    /// Chunks that were deleted.
    pub deleted: usize,
    /// Bytes of those.
    pub deleted_bytes: u64,
}

/// `candidates.json`: when each chunk was noted, in seconds since 1970 by the object store's clock.
#[derive(Default, Serialize, Deserialize)]
struct Candidates {
    noted: BTreeMap<String, u64>,
}

/// The objects of a chunk.
#[derive(Debug)]
struct Stored {
    key: ChunkKey,
    names: Vec<String>,
    bytes: u64,
    /// When the last of them was written.
    written: SystemTime,
}

/// A collector that has noted what is unused, and may delete what is due.
#[derive(Debug)]
pub struct Collector<'a> {
    objects: &'a Objects,
    lease: Lease<'a>,
    named: Named,
    due: Vec<Stored>,
    noted: BTreeMap<String, u64>,
    report: GarbageReport,
}

impl<'a> Collector<'a> {
    /// Looks through the object store, and notes what is unused.
    ///
    /// # Errors
    /// If another collector is at work, the object store does not answer, a document's object cannot be read, so that it is not known
    /// what it names, or there is no document at all.
    pub fn begin(objects: &'a Objects, options: &GarbageOptions) -> Result<Collector<'a>> {
        let mut lease = Lease::acquire(objects, options.lease)?;
        let now = lease.now()?;
        let mut named = Named::default();
        named.look(objects, || lease.renew())?;
        if named.documents() == 0 {
            return Err(Error::Garbage(format!(
                "{} holds no document, so that every old chunk would be garbage; nothing is noted or deleted",
                objects.url()
            )));
        }
        let before = read_candidates(objects)?;
        let mut report = GarbageReport { documents: named.documents(), ..GarbageReport::default() };
        let (mut due, mut noted) = (Vec::new(), BTreeMap::new());
        for shard in 0..=u8::MAX {
            lease.renew()?;
            for stored in chunks(objects, shard)? {
                report.chunks += 1;
                report.bytes += stored.bytes;
                let age = now.duration_since(stored.written).unwrap_or_default();
                if named.has(&stored.key) || age < options.unused {
                    continue;
                }
                report.unused += 1;
                report.unused_bytes += stored.bytes;
                let key = stored.key.to_string();
                let since = before.noted.get(&key).copied();
                noted.insert(key, since.unwrap_or_else(|| seconds(now)));
                let waited = since.map(|since| Duration::from_secs(seconds(now).saturating_sub(since)));
                if waited.is_some_and(|waited| waited >= options.grace) {
                    report.due += 1;
                    report.due_bytes += stored.bytes;
                    due.push(stored);
                }
            }
        }
        let collector = Collector { objects, lease, named, due, noted, report };
        collector.note()?;
        Ok(collector)
    }

    /// What was found.
    pub fn report(&self) -> &GarbageReport {
        &self.report
    }

    /// Deletes what is due and still named by no document.
    ///
    /// # Errors
    /// If the object store does not answer or refuses, or another collector took this one for dead. What is left is deleted by the next
    /// one.
    pub fn delete(mut self) -> Result<GarbageReport> {
        let due = std::mem::take(&mut self.due);
        for batch in due.chunks(BATCH) {
            self.lease.renew()?;
            self.named.look(self.objects, || self.lease.renew())?;
            let unnamed: Vec<&Stored> = batch.iter().filter(|stored| !self.named.has(&stored.key)).collect();
            let delete =
                |stored: &&Stored| stored.names.iter().try_for_each(|name| self.objects.delete(name));
            for outcome in in_parallel(&unnamed, delete) {
                outcome?;
            }
            self.report.deleted += unnamed.len();
            self.report.deleted_bytes += unnamed.iter().map(|stored| stored.bytes).sum::<u64>();
            for stored in batch {
                self.noted.remove(&stored.key.to_string());
            }
        }
        self.note()?;
        self.remove_leftovers();
        Ok(self.report)
    }

    /// Removes what killed processes have left in the folders that hold chunks and documents, and in no other: a folder that machines share may
    /// be the root of a mount, with folders of the system's own. Best effort: the next collector removes what stays.
    fn remove_leftovers(&self) {
        let shards = (0..=u8::MAX).map(|shard| format!("{shard:02x}"));
        let folders = shards.chain([DOCUMENTS, CHANGES, GARBAGE].map(str::to_owned));
        let remove = |folder: String| self.objects.remove_leftovers(&folder, LEFT_AFTER).err();
        let failures: Vec<_> = folders.filter_map(remove).collect();
        if let Some(error) = failures.first() {
            let folders = failures.len();
            tracing::warn!(%error, folders, "what killed processes have left is not removed");
        }
    }

    fn note(&self) -> Result<()> {
        let noted = self.noted.clone();
        self.objects.put(CANDIDATES, encode(Candidates { noted }))?;
        Ok(())
    }
}

/// What was noted before. What cannot be read is noted anew, which takes the time of grace once more.
fn read_candidates(objects: &Objects) -> Result<Candidates> {
    let bytes = objects.get(CANDIDATES, MOST_CANDIDATES)?;
    Ok(bytes.and_then(|bytes| decode(&bytes).ok()).unwrap_or_default())
}

/// The chunks whose keys begin with a byte, with what lies beside them.
fn chunks(objects: &Objects, shard: u8) -> Result<Vec<Stored>> {
    let mut chunks: BTreeMap<ChunkKey, Stored> = BTreeMap::new();
    for object in objects.list(&format!("{shard:02x}"), None)? {
        let file = object.name.rsplit('/').next().unwrap_or_default();
        let Some(key) = file.split('.').next().and_then(|key| key.parse::<ChunkKey>().ok()) else { continue };
        let new = || Stored { key, names: Vec::new(), bytes: 0, written: object.written };
        let stored = chunks.entry(key).or_insert_with(new);
        stored.written = stored.written.max(object.written);
        stored.bytes += object.size;
        stored.names.push(object.name);
    }
    Ok(chunks.into_values().collect())
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
