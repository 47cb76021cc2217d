//! The store: memory before disk.

mod aux_tensors;
mod beside;
mod listing;
#[cfg(feature = "remote")]
mod prefetch;
#[cfg(feature = "remote")]
mod receiver;
#[cfg(feature = "remote")]
mod shared;
mod stats;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::disk::{Disk, Origin};
use crate::folder::Folder;
use crate::limits::Limits;
use crate::tiers::{MemoryEntry, Tiers};
use crate::verify::verify;
use crate::{
    Chunk, ChunkCopies, ChunkId, ChunkKey, ChunkReader, GcReport, NewLayers, PutOutcome, Result,
    VerifyProgress, VerifyReport,
};
#[cfg(not(feature = "remote"))]
use crate::{Fetched, LinkSpeed, WantedChunk};

/// Chunks in memory and, if it has one, in a folder. Cheap to clone; clones share everything.
///
/// Several stores, in one process or in several, may use one folder at once.
#[derive(Clone, Debug)]
pub struct Store(Arc<Tiers>);

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

    /// A store without a folder, which forgets what exceeds `memory_bytes`, and aux tensors beyond a sixteenth of it.
    pub fn in_memory(memory_bytes: u64) -> Store {
        Store::new(None, memory_bytes)
    }

    fn new(disk: Option<Arc<Disk>>, memory_bytes: u64) -> Store {
        Store(Arc::new(Tiers::new(
            disk,
            #[cfg(feature = "remote")]
            None,
            memory_bytes,
        )))
    }

    /// The folder, if the store has one.
    pub fn folder(&self) -> Option<&Path> {
        self.0.folder().map(Folder::root)
    }

    /// The chunk from memory, else from disk with everything about it verified.
    ///
    /// A file that fails is removed (see [`Problem::is_permanent`](crate::Problem::is_permanent)), counted in [`Store::stats`] and
    /// told in the log; the caller sees a chunk that is not there, and computes it again.
    ///
    /// # Errors
    /// If no chunk can have this identity: it is empty or too large.
    pub fn get(&self, id: &ChunkId) -> Result<Option<Chunk>> {
        Ok(self.reader(id)?.and_then(|reader| reader.chunk()))
    }

    /// A reader of the chunk, layer by layer: only the header of a file is read and verified before this returns.
    ///
    /// # Errors
    /// If no chunk can have this identity: it is empty or too large.
    pub fn reader(&self, id: &ChunkId) -> Result<Option<ChunkReader>> {
        id.layout()?;
        let key = id.key();
        let found = self.local(id, &key);
        #[cfg(feature = "remote")]
        if found.is_none() && self.prefetch(&[id.into()], &[], false).chunks > 0 {
            return Ok(self.reader_in_flight(&key, true).or_else(|| self.local(id, &key)));
        }
        Ok(found)
    }

    /// [`Store::reader`] of what [`Store::prefetch`] has brought or is bringing: nothing is asked of the object store, and nothing is waited for. A
    /// chunk that is late, or whose header is still to come, is not at hand.
    ///
    /// # Errors
    /// If no chunk can have this identity: it is empty or too large.
    pub fn reader_at_hand(&self, id: &ChunkId) -> Result<Option<ChunkReader>> {
        id.layout()?;
        let key = id.key();
        let found = self.local(id, &key);
        #[cfg(feature = "remote")]
        let found = found.or_else(|| self.reader_in_flight(&key, false));
        Ok(found)
    }

    /// The chunk from memory or disk.
    fn local(&self, id: &ChunkId, key: &ChunkKey) -> Option<ChunkReader> {
        if let Some(held) = self.0.held(key) {
            self.0.counters.memory_hits.fetch_add(1, Relaxed);
            self.0.touch(*key);
            return Some(held.chunk.into());
        }
        let removals = self.0.removals();
        let open = |disk: &Disk| {
            let Some(opened) = disk.open_known(id, key)? else { return Ok(None) };
            ChunkReader::open(self.0.clone(), *key, opened, removals).map(Some)
        };
        let problem = match self.0.disk.as_deref().map_or(Ok(None), open) {
            Ok(Some(reader)) => {
                self.0.touch(*key);
                return Some(reader);
            }
            Ok(None) => None,
            Err(problem) => Some(problem),
        };
        self.0.missed(key, problem);
        None
    }

    /// Files that failed since this was last asked.
    #[cfg(test)]
    pub(crate) fn take_repairs(&self) -> Vec<crate::Repair> {
        std::mem::take(&mut self.0.repairs.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    /// Has copies of chunks told of chunks that are removed, as long as they are there.
    ///
    /// A copy of a chunk that is removed while it is made is told too early. So [`Store::removals`] is asked before the chunk is read; where it
    /// differs after the copy is kept, the copy is to go.
    pub fn tell_of_removals(&self, copies: &Arc<impl ChunkCopies + 'static>) {
        let weak = Arc::downgrade(copies);
        self.0.keepers.add(weak);
    }

    /// Removals of chunks since the store was opened.
    pub fn removals(&self) -> u64 {
        self.0.removals()
    }

    /// Forgets all chunks and aux tensors in memory, copies included; what is in the folder stays. Chunks in use stay whole.
    pub fn forget_memory(&self) {
        self.0.keepers.each(|copies| copies.forget_all());
        self.0.memory.clear();
        self.0.aux_tensors.clear();
    }

    /// Whether the chunk is in memory, or on disk with a header that fits. Its layers are not read, so that a later
    /// [`Store::get`] may still find it broken.
    pub fn contains(&self, id: &ChunkId) -> bool {
        let key = id.key();
        self.0.held(&key).is_some() || self.0.disk.as_ref().is_some_and(|disk| disk.contains(&key))
    }

    /// Keeps the chunk in memory, and on disk if it is not there.
    ///
    /// # Errors
    /// If the chunk was deleted while it was written, and could not be deleted again. A chunk that cannot be written is told by the
    /// outcome, and serves from memory.
    pub fn put(&self, chunk: Chunk) -> Result<PutOutcome> {
        let key = chunk.key();
        if self.0.is_deleted(&key) {
            return Ok(PutOutcome::Deleted);
        }
        let expires = self.0.disk.as_ref().map_or(0, |disk| disk.expiry_now());
        // The chunk serves others while it is written.
        self.0.memory.insert(key, MemoryEntry { chunk: chunk.clone(), expires });
        let outcome = self.0.write(|disk| {
            if disk.contains(&key) {
                disk.renew(&[key]);
                return Ok(None);
            }
            disk.write_chunk(&chunk, Origin::Here).map(Some)
        });
        self.kept_or_deleted(key, outcome)
    }

    /// Room for the layers of a chunk, with `bytes` of keys and values each. Memory of chunks that are gone is taken over.
    pub fn new_layers(&self, bytes: usize, layers: usize) -> NewLayers {
        NewLayers::new(self.0.rooms.take(bytes, layers))
    }

    /// The outcome of keeping something of a chunk, which is deleted once more if the chunk was deleted meanwhile.
    fn kept_or_deleted(&self, key: ChunkKey, outcome: PutOutcome) -> Result<PutOutcome> {
        if !self.0.is_deleted(&key) {
            return Ok(outcome);
        }
        self.delete(&[key])?;
        Ok(PutOutcome::Deleted)
    }

    /// Whether the chunk was [deleted](Store::delete) since it was last [admitted](Store::admit), so that it is not kept.
    pub fn is_deleted(&self, key: &ChunkKey) -> bool {
        self.0.is_deleted(key)
    }

    /// Has deleted chunks stored again when they are put: somebody wants them anew. `keys` is asked only where something was
    /// deleted since the store was opened.
    pub fn admit(&self, keys: impl FnOnce() -> Vec<ChunkKey>) {
        self.0.admit(keys);
    }

    /// Without an object store nothing is fetched from one.
    #[cfg(not(feature = "remote"))]
    pub fn prefetch(&self, _: &[WantedChunk], _: &[&str], _: bool) -> Fetched {
        Fetched::default()
    }

    /// Without an object store nothing is fetched from one.
    #[cfg(not(feature = "remote"))]
    pub fn fetches(&self) -> bool {
        false
    }

    /// Without an object store no chunk is in one.
    ///
    /// # Errors
    /// None.
    #[cfg(not(feature = "remote"))]
    pub fn are_shared(&self, ids: &[&ChunkId], _: &[&str]) -> Result<Vec<bool>> {
        Ok(vec![false; ids.len()])
    }

    /// Without an object store no chunk is brought to one.
    ///
    /// # Errors
    /// None.
    #[cfg(not(feature = "remote"))]
    pub fn are_pending(&self, ids: &[&ChunkId]) -> Result<Vec<bool>> {
        Ok(vec![false; ids.len()])
    }

    /// Without an object store there is no link to one.
    #[cfg(not(feature = "remote"))]
    pub fn link_speed(&self) -> LinkSpeed {
        LinkSpeed::default()
    }

    /// Without an object store nothing comes from one.
    #[cfg(not(feature = "remote"))]
    pub fn is_in_flight(&self, _: &ChunkId) -> bool {
        false
    }

    /// Without an object store nothing is waited for.
    #[cfg(not(feature = "remote"))]
    pub fn awaits_header(&self, _: &ChunkId, _: Option<std::time::Instant>) -> bool {
        false
    }

    /// Without an object store nothing comes late from one.
    #[cfg(not(feature = "remote"))]
    pub fn is_late(&self, _: &ChunkId) -> bool {
        false
    }

    /// Without an object store nothing comes late from one.
    #[cfg(not(feature = "remote"))]
    pub fn count_race(&self, _: bool) {}

    /// Chunks that are there are wanted again, as if they had been put: they were used now, and their time begins anew. Waits for the disk once
    /// for all of them.
    pub fn renew(&self, keys: &[ChunkKey]) {
        if let Some(disk) = &self.0.disk {
            disk.renew(keys);
        }
        #[cfg(feature = "remote")]
        if let Some(remote) = &self.0.remote {
            remote.wake();
        }
    }

    /// Removes a chunk and its aux tensors from memory and disk, and says whether the chunk was there. Chunks in use stay
    /// whole. What is in the object store stays, and is fetched again when it is asked for: [`Store::delete`] deletes it.
    ///
    /// # Errors
    /// If a file cannot be removed.
    pub fn remove(&self, key: &ChunkKey) -> Result<bool> {
        self.0.remove(key)
    }

    /// Deletes chunks and their aux tensors from memory, disk and the object store, and returns when the object store has
    /// confirmed it. A chunk that is being read or fetched is read to its end and not kept; one that is being uploaded is
    /// deleted after its upload; and one that is being computed is not stored until it is [admitted](Store::admit). Must not be called by a thread of an asynchronous runtime, since it waits.
    ///
    /// Other machines that share the object store keep the copies in their own folders.
    ///
    /// # Errors
    /// If a file cannot be removed, or the object store refuses or does not answer. Whatever can be deleted is; deleting again is
    /// safe, and deletes what is left.
    pub fn delete(&self, keys: &[ChunkKey]) -> Result<()> {
        let mut outcome = Ok(());
        self.0.note_deleted(keys);
        for key in keys {
            outcome = outcome.and(self.remove(key).map(drop));
        }
        #[cfg(feature = "remote")]
        if let Some(remote) = self.0.remote.as_ref().filter(|_| !keys.is_empty()) {
            outcome = outcome.and(remote.delete(keys.iter().copied().collect()));
        }
        outcome
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

    /// Removes what is left of writers that died, aux tensors files without their chunk, chunks whose time is over and, where the
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

    /// Reads every file of the folder and verifies all of it. Removes broken files, aux tensors whose chunk is not there
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
        report.failed.iter().cloned().for_each(|repair| self.0.record(repair));
        self.0.counters.bytes_read.fetch_add(report.bytes, Relaxed);
        Ok(report)
    }

    pub(crate) fn folder_on_disk(&self) -> Option<&Folder> {
        self.0.folder()
    }

    /// Takes all places of open files, for tests.
    #[cfg(test)]
    pub(crate) fn other_open_files(&self) -> Vec<Arc<()>> {
        self.0.other_open_files()
    }

    #[cfg(test)]
    pub(crate) fn disk_tier(&self) -> &Arc<Disk> {
        self.0.disk.as_ref().expect("a store with a folder")
    }

    #[cfg(test)]
    pub(crate) fn disk(&self) -> &Folder {
        self.0.folder().expect("a store with a folder")
    }
}
