//! The tiers of a store: memory, the folder, and the chunks that are on their way from the object store.
//!
//! Readers of chunks, and the receivers of chunks that are fetched, work on the tiers; [`Store`](crate::Store) is the
//! interface above.

mod copies;
mod counters;
#[cfg(feature = "remote")]
mod in_flight;
mod memory;

#[cfg(feature = "remote")]
use std::collections::BTreeMap;
use std::collections::HashSet;
use std::fs::File;
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use quick_cache::sync::Cache;
use refrain_kv::AuxTensors;

pub use self::copies::ChunkCopies;
use self::copies::Keepers;
use self::counters::Counters;
#[cfg(feature = "remote")]
pub(crate) use self::in_flight::InFlightChunk;
pub(crate) use self::memory::{AuxName, MemoryEntry};
use self::memory::{ByBytes, bounded};
use crate::chunk_file::Header;
use crate::clock::now;
use crate::disk::{Disk, Phantom};
use crate::error::{Problem, Result};
use crate::folder::{Folder, remove};
use crate::info::{PutOutcome, Repair};
use crate::key::ChunkKey;
use crate::open_files::max_reader_files;
use crate::rooms::Rooms;

/// Most deleted chunks that are remembered.
const MAX_DELETED: usize = 1 << 20;
/// Aux tensors in memory take at most this part of what chunks may take.
const AUX_SHARE: u64 = 16;
/// Memory of chunks that are gone takes at most this part of what chunks may take.
const ROOMS_SHARE: u64 = 8;

#[derive(Debug)]
pub(crate) struct Tiers {
    pub(crate) memory: Cache<ChunkKey, MemoryEntry, ByBytes>,
    pub(crate) aux_tensors: Cache<AuxName, Arc<AuxTensors>, ByBytes>,
    /// Memory that chunks in `memory` have left.
    pub(crate) rooms: Arc<Rooms>,
    pub(crate) disk: Option<Arc<Disk>>,
    #[cfg(feature = "remote")]
    pub(crate) remote: Option<crate::remote::Remote>,
    /// Chunks that are on their way from there.
    #[cfg(feature = "remote")]
    pub(crate) in_flight: Mutex<BTreeMap<ChunkKey, Arc<InFlightChunk>>>,
    /// Keepers of copies of chunks, such as devices.
    pub(crate) keepers: Keepers,
    pub(crate) counters: Counters,
    /// Whether the last file could not be written, which the log tells once.
    cannot_store: AtomicBool,
    /// All repairs, for tests to see.
    #[cfg(test)]
    pub(crate) repairs: Mutex<Vec<Repair>>,
    /// Files that readers have open.
    pub(crate) open_files: Arc<()>,
    /// Most of them.
    max_open_files: usize,
    /// Removals of chunks so far: what was opened or asked for before one of them is not kept after it.
    removals: AtomicU64,
    /// Chunks that were deleted. Who began to compute one before that may not put it hereafter.
    deleted: Mutex<HashSet<ChunkKey>>,
}

/// A file that a reader keeps open.
#[derive(Debug)]
pub(crate) struct OpenFile {
    file: File,
    /// Counts it.
    _one: Arc<()>,
}

impl Deref for OpenFile {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

impl Tiers {
    pub(crate) fn new(
        disk: Option<Arc<Disk>>,
        #[cfg(feature = "remote")] remote: Option<crate::remote::Remote>,
        memory_bytes: u64,
    ) -> Tiers {
        Tiers {
            #[cfg(feature = "remote")]
            remote,
            #[cfg(feature = "remote")]
            in_flight: Mutex::default(),
            memory: bounded(memory_bytes),
            aux_tensors: bounded(memory_bytes / AUX_SHARE),
            rooms: Rooms::new(memory_bytes / ROOMS_SHARE),
            disk,
            keepers: Keepers::default(),
            counters: Counters::default(),
            cannot_store: AtomicBool::new(false),
            #[cfg(test)]
            repairs: Mutex::default(),
            open_files: Arc::default(),
            max_open_files: max_reader_files(),
            removals: AtomicU64::new(0),
            deleted: Mutex::default(),
        }
    }

    /// The folder, if there is one.
    pub(crate) fn folder(&self) -> Option<&Folder> {
        self.disk.as_ref().map(|disk| disk.folder())
    }

    /// The chunk in memory, unless its time is over.
    pub(crate) fn held(&self, key: &ChunkKey) -> Option<MemoryEntry> {
        let held = self.memory.get(key)?;
        if held.expires != 0 && held.expires <= now() {
            self.memory.remove(key);
            return None;
        }
        Some(held)
    }

    /// Remembers that a chunk is used now.
    pub(crate) fn touch(&self, key: ChunkKey) {
        if let Some(disk) = &self.disk {
            disk.touch(key);
        }
    }

    /// The chunk's file, if it is there.
    pub(crate) fn open_file(&self, key: &ChunkKey) -> Result<Option<File>, Problem> {
        self.folder().map_or(Ok(None), |folder| folder.open_file(key))
    }

    /// Keeps a file open, unless too many are.
    pub(crate) fn keep_open(&self, file: File) -> Option<OpenFile> {
        let one = self.open_files.clone();
        (Arc::strong_count(&one) <= self.max_open_files + 1).then(|| OpenFile { file, _one: one })
    }

    /// The fault of a file of which a layer could not be read: nothing if it is no longer the file that had
    /// `header`, since another process has removed or replaced it meanwhile.
    pub(crate) fn confirm(&self, header: &Header, key: &ChunkKey, problem: Problem) -> Option<Problem> {
        match self.folder()?.open_known(&header.id, key) {
            Ok(Some((_, now))) => (now == *header).then_some(problem),
            Ok(None) => None,
            Err(problem) => Some(problem),
        }
    }

    /// Most bytes of chunks in memory.
    pub(crate) fn memory_capacity(&self) -> u64 {
        self.memory.capacity()
    }

    /// Most bytes of memory that chunks, aux tensors and the memory of chunks that are gone take together.
    pub(crate) fn memory_bound(&self) -> u64 {
        let chunks = self.memory_capacity();
        chunks.saturating_add(chunks / AUX_SHARE).saturating_add(chunks / ROOMS_SHARE)
    }

    pub(crate) fn count_read(&self, bytes: u64) {
        self.counters.bytes_read.fetch_add(bytes, Relaxed);
    }

    /// Removals so far.
    pub(crate) fn removals(&self) -> u64 {
        self.removals.load(SeqCst)
    }

    /// Removes a chunk and its aux tensors from memory and disk, and says whether the chunk was there.
    pub(crate) fn remove(&self, key: &ChunkKey) -> Result<bool> {
        // Counted first: who keeps the chunk hereafter sees it, and who kept it before is seen here.
        self.removals.fetch_add(1, SeqCst);
        self.keepers.each(|copies| copies.forget(key));
        self.aux_tensors.retain(|(chunk, _), _| chunk != key);
        let in_memory = self.memory.remove(key).is_some();
        let on_disk = self.disk.as_ref().map_or(Ok(false), |disk| disk.remove(key))?;
        Ok(in_memory || on_disk)
    }

    fn deleted(&self) -> MutexGuard<'_, HashSet<ChunkKey>> {
        self.deleted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_deleted(&self, key: &ChunkKey) -> bool {
        self.deleted().contains(key)
    }

    /// Notes that these chunks are not kept until they are admitted.
    pub(crate) fn note_deleted(&self, keys: &[ChunkKey]) {
        let mut deleted = self.deleted();
        if deleted.len() + keys.len() > MAX_DELETED {
            deleted.clear();
        }
        deleted.extend(keys);
    }

    pub(crate) fn admit(&self, keys: impl FnOnce() -> Vec<ChunkKey>) {
        if !self.deleted().is_empty() {
            let keys = keys();
            let mut deleted = self.deleted();
            keys.iter().for_each(|key| _ = deleted.remove(key));
        }
    }

    /// Counts a chunk that was read from disk, and keeps it in memory unless a chunk was removed since there were `removals`.
    pub(crate) fn read_from_disk(&self, kept: Option<MemoryEntry>, removals: u64) {
        self.counters.disk_hits.fetch_add(1, Relaxed);
        let Some(held) = kept else { return };
        let key = held.chunk.key();
        self.memory.insert(key, held);
        if self.removals() != removals {
            self.memory.remove(&key);
        }
    }

    /// Counts a chunk that is not there, or is broken.
    pub(crate) fn missed(&self, key: &ChunkKey, problem: Option<Problem>) {
        self.counters.misses.fetch_add(1, Relaxed);
        if let (Some(problem), Some(folder)) = (problem, self.folder()) {
            self.repair(key, folder.path(key), problem);
        }
    }

    /// Removes a broken file of a chunk and counts it. Never fails: a file that cannot be removed is left and counted.
    pub(crate) fn repair(&self, key: &ChunkKey, path: PathBuf, problem: Problem) {
        let bytes = path.metadata().map_or(0, |metadata| metadata.len());
        let disk = self.disk.as_ref().filter(|_| problem.is_permanent());
        let counted = disk.and_then(|disk| disk.row(key).ok().flatten());
        let removed = problem.is_permanent() && remove(&path).unwrap_or(false);
        if removed && let (Some(disk), Some(row)) = (disk, counted) {
            disk.uncount(Phantom { key: *key, row, removed: Some(bytes) });
        }
        self.record(Repair { path, problem, removed });
    }

    /// Counts a file that failed. One that was removed is told in the log; one that stays would be told at every use.
    pub(crate) fn record(&self, repair: Repair) {
        let Repair { path, problem, removed } = &repair;
        let counters = &self.counters;
        let counter = if *removed { &counters.removed } else { &counters.unusable };
        counter.fetch_add(1, Relaxed);
        if *removed {
            tracing::warn!(path = %path.display(), %problem, "a broken file was removed from the store");
        }
        #[cfg(test)]
        self.repairs.lock().unwrap_or_else(PoisonError::into_inner).push(repair);
    }

    /// Writes something that says its bytes, or nothing if it was there, and counts it.
    pub(crate) fn write(&self, write: impl FnOnce(&Disk) -> Result<Option<u64>>) -> PutOutcome {
        let counters = &self.counters;
        let outcome = match self.disk.as_deref().map(write) {
            None => PutOutcome::MemoryOnly,
            Some(Ok(None)) => PutOutcome::Known,
            Some(Ok(Some(bytes))) => {
                self.cannot_store.store(false, Relaxed);
                counters.stored.fetch_add(1, Relaxed);
                counters.bytes_written.fetch_add(bytes, Relaxed);
                PutOutcome::Stored { bytes }
            }
            Some(Err(error)) => {
                if !self.cannot_store.swap(true, Relaxed) {
                    tracing::warn!(%error, "chunks cannot be stored: they serve from memory while there is room, and are then computed again");
                }
                counters.not_stored.fetch_add(1, Relaxed);
                PutOutcome::NotStored { error }
            }
        };
        #[cfg(feature = "remote")]
        if let (Some(remote), PutOutcome::Stored { .. } | PutOutcome::Known) = (&self.remote, &outcome) {
            remote.wake();
        }
        outcome
    }

    /// Takes all places of open files, for tests.
    #[cfg(test)]
    pub(crate) fn other_open_files(&self) -> Vec<Arc<()>> {
        vec![self.open_files.clone(); self.max_open_files]
    }
}
