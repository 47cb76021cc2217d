//! The store: memory before disk.

#[cfg(feature = "remote")]
mod arriving;
mod counters;
mod listing;
mod memory;
#[cfg(feature = "remote")]
mod remote;
mod summaries;

#[cfg(feature = "remote")]
use std::collections::BTreeMap;
use std::collections::VecDeque;
use std::fs::File;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use quick_cache::sync::Cache;
use refrain_kv::Summary;

#[cfg(feature = "remote")]
pub(crate) use self::arriving::Arriving;
use self::counters::Counters;
pub(crate) use self::memory::MemoryEntry;
use self::memory::{ByBytes, bounded};
use self::summaries::Name;
use crate::chunk::now;
use crate::disk::{Disk, Origin};
use crate::file::Header;
use crate::folder::{Folder, remove};
use crate::limits::Limits;
use crate::verify::verify;
use crate::{
    Chunk, ChunkId, ChunkKey, ChunkReader, GcReport, Problem, PutOutcome, Repair, Result, VerifyProgress,
    VerifyReport,
};

/// Most repairs remembered until somebody asks for them.
const REPAIRS: usize = 256;
/// Most files that readers keep open: a prompt may have more chunks than a process may have files.
const OPEN_FILES: usize = 256;
/// Summaries in memory take at most this part of what chunks may take.
const SUMMARIES: u64 = 16;

/// Chunks in memory and, if it has one, in a folder. Cheap to clone; clones share everything.
///
/// Several stores, in one process or in several, may use one folder at once.
#[derive(Clone, Debug)]
pub struct Store(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    memory: Cache<ChunkKey, MemoryEntry, ByBytes>,
    summaries: Cache<Name, Arc<Summary>, ByBytes>,
    disk: Option<Arc<Disk>>,
    #[cfg(feature = "remote")]
    remote: Option<crate::remote::Remote>,
    /// Chunks that are on their way from there.
    #[cfg(feature = "remote")]
    arriving: Mutex<BTreeMap<ChunkKey, Arc<Arriving>>>,
    counters: Counters,
    repairs: Mutex<VecDeque<Repair>>,
    /// Files that readers have open.
    open_files: Arc<()>,
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

impl Store {
    /// Opens the store in `folder`, which is created if it is missing, within `limits` (a number of bytes bounds memory
    /// alone). What is larger than memory may be is read from the folder every time.
    ///
    /// # Errors
    /// If the folder can be neither created nor read.
    pub fn open(folder: impl AsRef<Path>, limits: impl Into<Limits>) -> Result<Store> {
        let limits = limits.into();
        let memory = limits.memory;
        Ok(Store::new(Some(Arc::new(Disk::open(folder.as_ref(), limits, false)?)), memory))
    }

    /// A store without a folder, which forgets what exceeds `memory_bytes`, and summaries beyond a sixteenth of it.
    pub fn in_memory(memory_bytes: u64) -> Store {
        Store::new(None, memory_bytes)
    }

    fn new(disk: Option<Arc<Disk>>, memory_bytes: u64) -> Store {
        Store::assemble(
            disk,
            #[cfg(feature = "remote")]
            None,
            memory_bytes,
        )
    }

    fn assemble(
        disk: Option<Arc<Disk>>,
        #[cfg(feature = "remote")] remote: Option<crate::remote::Remote>,
        memory_bytes: u64,
    ) -> Store {
        Store(Arc::new(Inner {
            #[cfg(feature = "remote")]
            remote,
            #[cfg(feature = "remote")]
            arriving: Mutex::default(),
            memory: bounded(memory_bytes),
            summaries: bounded(memory_bytes / SUMMARIES),
            disk,
            counters: Counters::default(),
            repairs: Mutex::default(),
            open_files: Arc::default(),
        }))
    }

    /// The folder, if the store has one.
    pub fn folder(&self) -> Option<&Path> {
        self.folder_on_disk().map(Folder::root)
    }

    pub(crate) fn folder_on_disk(&self) -> Option<&Folder> {
        self.0.disk.as_ref().map(|disk| disk.folder())
    }

    /// The chunk from memory, else from disk with everything about it verified.
    ///
    /// A file that fails is removed (see [`Problem::is_permanent`]), counted in [`Store::stats`] and told by
    /// [`Store::take_repairs`]; the caller sees a chunk that is not there, and computes it again.
    ///
    /// # Errors
    /// If no chunk can have this identity: it is empty or too large.
    pub fn get(&self, id: &ChunkId) -> Result<Option<Chunk>> {
        Ok(self.reader(id)?.and_then(|reader| reader.chunk()))
    }

    /// The same layer by layer: only the header of a file is read and verified before this returns.
    ///
    /// # Errors
    /// If no chunk can have this identity: it is empty or too large.
    pub fn reader(&self, id: &ChunkId) -> Result<Option<ChunkReader>> {
        id.layout()?;
        let key = id.key();
        let found = self.local(id, &key);
        #[cfg(feature = "remote")]
        if found.is_none() && self.bring(&[id], &[], false) > 0 {
            return Ok(self.reader_of_arriving(&key).or_else(|| self.local(id, &key)));
        }
        Ok(found)
    }

    /// The chunk from memory or disk.
    fn local(&self, id: &ChunkId, key: &ChunkKey) -> Option<ChunkReader> {
        if let Some(held) = self.held(key) {
            self.0.counters.memory_hits.fetch_add(1, Relaxed);
            self.touch(*key);
            return Some(held.chunk.into());
        }
        let open = |disk: &Disk| {
            let Some(opened) = disk.open_known(id, key)? else { return Ok(None) };
            ChunkReader::open(self.clone(), *key, opened).map(Some)
        };
        let problem = match self.0.disk.as_deref().map_or(Ok(None), open) {
            Ok(Some(reader)) => {
                self.touch(*key);
                return Some(reader);
            }
            Ok(None) => None,
            Err(problem) => Some(problem),
        };
        self.missed(key, problem);
        None
    }

    /// The chunk in memory, unless its time is over.
    fn held(&self, key: &ChunkKey) -> Option<MemoryEntry> {
        let held = self.0.memory.get(key)?;
        if held.expires != 0 && held.expires <= now() {
            self.0.memory.remove(key);
            return None;
        }
        Some(held)
    }

    /// Remembers that a chunk is used now.
    fn touch(&self, key: ChunkKey) {
        if let Some(disk) = &self.0.disk {
            disk.touch(key);
        }
    }

    /// The chunk's file, if it is there.
    pub(crate) fn open_file(&self, key: &ChunkKey) -> Result<Option<File>, Problem> {
        self.folder_on_disk().map_or(Ok(None), |folder| folder.open_file(key))
    }

    /// Keeps a file open, unless too many are.
    pub(crate) fn keep_open(&self, file: File) -> Option<OpenFile> {
        let one = self.0.open_files.clone();
        (Arc::strong_count(&one) <= OPEN_FILES + 1).then(|| OpenFile { file, _one: one })
    }

    /// What is wrong with a file of which a layer could not be read: nothing if it is no longer the file that had
    /// `header`, since another process has removed or replaced it meanwhile.
    pub(crate) fn confirm(&self, header: &Header, key: &ChunkKey, problem: Problem) -> Option<Problem> {
        match self.folder_on_disk()?.open_known(&header.id, key) {
            Ok(Some((_, now))) => (now == *header).then_some(problem),
            Ok(None) => None,
            Err(problem) => Some(problem),
        }
    }

    /// Most bytes of chunks in memory.
    pub(crate) fn memory_capacity(&self) -> u64 {
        self.0.memory.capacity()
    }

    pub(crate) fn count_read(&self, bytes: u64) {
        self.0.counters.bytes_read.fetch_add(bytes, Relaxed);
    }

    /// Counts a chunk that was read from disk, and keeps it in memory.
    pub(crate) fn read_from_disk(&self, kept: Option<MemoryEntry>) {
        self.0.counters.disk_hits.fetch_add(1, Relaxed);
        if let Some(held) = kept {
            self.0.memory.insert(held.chunk.key(), held);
        }
    }

    /// Counts a chunk that is not there, or is broken.
    pub(crate) fn missed(&self, key: &ChunkKey, problem: Option<Problem>) {
        self.0.counters.misses.fetch_add(1, Relaxed);
        if let (Some(problem), Some(folder)) = (problem, self.folder_on_disk()) {
            self.repair(folder.path(key), problem);
        }
    }

    /// Removes a broken file, counts it and remembers why. Never fails: what cannot be removed is left and told.
    fn repair(&self, path: PathBuf, problem: Problem) {
        let removed = problem.is_permanent() && remove(&path).unwrap_or(false);
        self.record(Repair { path, problem, removed });
    }

    fn record(&self, repair: Repair) {
        let counters = &self.0.counters;
        let counter = if repair.removed { &counters.removed } else { &counters.unusable };
        counter.fetch_add(1, Relaxed);
        let mut repairs = self.0.repairs.lock().unwrap_or_else(PoisonError::into_inner);
        if repairs.len() == REPAIRS {
            repairs.pop_front();
        }
        repairs.push_back(repair);
    }

    /// Files that failed since this was last asked, the latest 256 of them.
    pub fn take_repairs(&self) -> Vec<Repair> {
        self.0.repairs.lock().unwrap_or_else(PoisonError::into_inner).drain(..).collect()
    }

    /// Forgets all chunks and summaries in memory; what is in the folder stays. Chunks in use stay whole.
    pub fn forget_memory(&self) {
        self.0.memory.clear();
        self.0.summaries.clear();
    }

    /// Whether the chunk is in memory, or on disk with a header that fits. Its layers are not read, so that a later
    /// [`Store::get`] may still find it broken.
    pub fn contains(&self, id: &ChunkId) -> bool {
        let key = id.key();
        self.held(&key).is_some() || self.0.disk.as_ref().is_some_and(|disk| disk.contains(&key))
    }

    /// Keeps the chunk in memory, and on disk if it is not there.
    ///
    /// # Errors
    /// None at present: a chunk that cannot be written is told by the outcome, and serves from memory.
    pub fn put(&self, chunk: Chunk) -> Result<PutOutcome> {
        let key = chunk.key();
        let expires = self.0.disk.as_ref().map_or(0, |disk| disk.expiry_now());
        let outcome = self.write(|disk| {
            if disk.contains(&key) {
                disk.renew(&key);
                return Ok(None);
            }
            disk.write_chunk(&chunk, Origin::Here).map(Some)
        });
        self.0.memory.insert(key, MemoryEntry { chunk, expires });
        Ok(outcome)
    }

    /// Without an object store nothing is fetched from one.
    #[cfg(not(feature = "remote"))]
    pub fn bring(&self, _: &[&ChunkId], _: &[&str], _: bool) -> usize {
        0
    }

    /// Without an object store nothing is fetched from one.
    #[cfg(not(feature = "remote"))]
    pub fn fetches(&self) -> bool {
        false
    }

    /// Without an object store nothing comes from one.
    #[cfg(not(feature = "remote"))]
    pub fn is_coming(&self, _: &ChunkId) -> bool {
        false
    }

    /// A chunk that is there is wanted again, as if it had been put: it was used now, and its time begins anew.
    pub fn renew(&self, id: &ChunkId) {
        if let Some(disk) = &self.0.disk {
            disk.renew(&id.key());
        }
        #[cfg(feature = "remote")]
        if let Some(remote) = &self.0.remote {
            remote.wake();
        }
    }

    /// Writes something that says its bytes, or nothing if it was there, and counts it.
    fn write(&self, write: impl FnOnce(&Disk) -> Result<Option<u64>>) -> PutOutcome {
        let counters = &self.0.counters;
        let outcome = match self.0.disk.as_deref().map(write) {
            None => PutOutcome::MemoryOnly,
            Some(Ok(None)) => PutOutcome::Known,
            Some(Ok(Some(bytes))) => {
                counters.stored.fetch_add(1, Relaxed);
                counters.bytes_written.fetch_add(bytes, Relaxed);
                PutOutcome::Stored { bytes }
            }
            Some(Err(error)) => {
                counters.not_stored.fetch_add(1, Relaxed);
                PutOutcome::NotStored { error }
            }
        };
        #[cfg(feature = "remote")]
        if let (Some(remote), PutOutcome::Stored { .. } | PutOutcome::Known) = (&self.0.remote, &outcome) {
            remote.wake();
        }
        outcome
    }

    /// Removes a chunk and its summaries from memory and disk, and says whether the chunk was there. Chunks in use stay
    /// whole.
    ///
    /// # Errors
    /// If a file cannot be removed.
    pub fn remove(&self, key: &ChunkKey) -> Result<bool> {
        self.0.summaries.retain(|(chunk, _), _| chunk != key);
        let in_memory = self.0.memory.remove(key).is_some();
        let on_disk = self.0.disk.as_ref().map_or(Ok(false), |disk| disk.remove(key))?;
        Ok(in_memory || on_disk)
    }

    /// Pins the chunks `keys`, so that they stay on disk however much room is needed, or unpins them. Returns how many of
    /// them are on disk. One transaction for all of them.
    ///
    /// # Errors
    /// If the index cannot be written.
    pub fn pin(&self, keys: &[ChunkKey], pinned: bool) -> Result<usize> {
        self.0.disk.as_ref().map_or(Ok(0), |disk| disk.change(keys, |row| row.pinned = pinned))
    }

    /// Has a chunk on disk go at that time, in memory and on disk, or never, and says whether it is there. Other processes
    /// that have it in memory may use it until it leaves there.
    ///
    /// # Errors
    /// If the index cannot be written.
    pub fn expire(&self, key: &ChunkKey, at: Option<SystemTime>) -> Result<bool> {
        let seconds = |at: SystemTime| at.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        // 0 is never, so what was over before 1970 is over one second later.
        let expires = at.map_or(0, |at| seconds(at).max(1));
        if let Some(held) = self.0.memory.peek(key) {
            self.0.memory.insert(*key, MemoryEntry { expires, ..held });
        }
        let there = self.0.disk.as_ref().map(|disk| disk.change(&[*key], |row| row.expires = expires));
        Ok(there.transpose()? == Some(1))
    }

    /// Removes what is left of writers that died, summaries without their chunk, chunks whose time is over and, where the
    /// folder holds more than it may, the least recently used; and has the index agree with the files.
    ///
    /// # Errors
    /// If the folder cannot be read, a file cannot be removed, or the index cannot be written.
    pub fn gc(&self) -> Result<GcReport> {
        self.0.disk.as_ref().map_or_else(|| Ok(GcReport::default()), |disk| disk.gc())
    }

    /// Writes to the index which chunks were used lately, which otherwise happens every few seconds and at the end.
    pub fn flush(&self) {
        if let Some(disk) = &self.0.disk {
            disk.flush();
        }
    }

    /// Why the index had to be made anew from the files, if it had since this was last asked: pins and times to live are
    /// lost then.
    pub fn take_set_aside(&self) -> Option<String> {
        self.0.disk.as_ref().and_then(|disk| disk.take_set_aside())
    }

    /// Reads every file of the folder and verifies all of it. Removes broken files, summaries whose chunk is not there
    /// and temporary files of writers that died; leaves alone, and reports, files of an unknown version and what is not
    /// the store's.
    ///
    /// # Errors
    /// If the folder cannot be read or a broken file cannot be removed.
    pub fn verify(&self, progress: impl FnMut(VerifyProgress)) -> Result<VerifyReport> {
        let Some(disk) = &self.0.disk else { return Ok(VerifyReport::default()) };
        let mut report = verify(disk.folder(), progress)?;
        // The files are the truth: they were read, whatever becomes of the index.
        match disk.reconcile() {
            Ok(settled) => (report.entered, report.forgotten) = (settled.entered, settled.forgotten),
            Err(error) => report.index_problem = Some(error.to_string()),
        }
        report.failed.iter().cloned().for_each(|repair| self.record(repair));
        self.0.counters.bytes_read.fetch_add(report.bytes, Relaxed);
        Ok(report)
    }

    /// As many open files as there may be.
    #[cfg(test)]
    pub(crate) fn other_open_files(&self) -> Vec<Arc<()>> {
        vec![self.0.open_files.clone(); OPEN_FILES]
    }

    #[cfg(test)]
    pub(crate) fn disk(&self) -> &Folder {
        self.folder_on_disk().expect("a store with a folder")
    }
}
