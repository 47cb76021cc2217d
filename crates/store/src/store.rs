//! The store: memory before folder.

mod summaries;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::File;
use std::hash::Hash;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use quick_cache::sync::{Cache, DefaultLifecycle};
use quick_cache::{DefaultHashBuilder, OptionsBuilder, Weighter};
use refrain_kv::Summary;

use self::summaries::Name;
use crate::file::Header;
use crate::folder::{Folder, Found, open_chunk, remove};
use crate::verify::verify;
use crate::{
    Chunk, ChunkDetail, ChunkId, ChunkInfo, ChunkKey, ChunkReader, Listing, Problem, PutOutcome, Repair,
    Result, Stats, StoreError, Unusable, VerifyProgress, VerifyReport,
};

/// Most repairs remembered until somebody asks for them.
const REPAIRS: usize = 256;
/// Summaries in memory take at most this part of what chunks may take.
const SUMMARIES: u64 = 16;

/// Chunks in memory and, if it has one, in a folder. Cheap to clone; clones share everything.
///
/// Several stores, in one process or in several, may use one folder at once.
#[derive(Clone, Debug)]
pub struct Store(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    memory: Cache<ChunkKey, Chunk, ByBytes>,
    summaries: Cache<Name, Arc<Summary>, ByBytes>,
    folder: Option<Folder>,
    counters: Counters,
    repairs: Mutex<VecDeque<Repair>>,
}

#[derive(Debug, Default)]
struct Counters {
    memory_hits: AtomicU64,
    disk_hits: AtomicU64,
    misses: AtomicU64,
    removed: AtomicU64,
    unusable: AtomicU64,
    stored: AtomicU64,
    not_stored: AtomicU64,
    bytes_read: AtomicU64,
    bytes_written: AtomicU64,
}

#[derive(Clone, Debug)]
struct ByBytes;

impl Weighter<ChunkKey, Chunk> for ByBytes {
    fn weight(&self, _: &ChunkKey, chunk: &Chunk) -> u64 {
        chunk.weight()
    }
}

/// A cache of at most `bytes`.
fn bounded<K: Eq + Hash, V: Clone>(bytes: u64) -> Cache<K, V, ByBytes>
where
    ByBytes: Weighter<K, V>,
{
    // Only a guess for the size of tables: chunks take a megabyte and more.
    let items = (bytes >> 20).clamp(16, 1 << 16);
    // One shard: each would have its own share of the capacity, too small for a large chunk.
    let options = OptionsBuilder::new()
        .shards(1)
        .estimated_items_capacity(items as usize)
        .weight_capacity(bytes)
        .build()
        .expect("both capacities are given");
    Cache::with_options(options, ByBytes, DefaultHashBuilder::default(), DefaultLifecycle::default())
}

impl Store {
    /// Opens the store in `folder`, which is created if it is missing. At most `memory_bytes` of chunks are kept in
    /// memory besides those in use, and at most a sixteenth of it of summaries; what is larger than that is read from
    /// the folder every time.
    ///
    /// # Errors
    /// If the folder can be neither created nor read.
    pub fn open(folder: impl AsRef<Path>, memory_bytes: u64) -> Result<Store> {
        Ok(Store::new(Some(Folder::open(folder.as_ref())?), memory_bytes))
    }

    /// A store without a folder, which forgets what exceeds `memory_bytes`, and summaries beyond a sixteenth of it.
    pub fn in_memory(memory_bytes: u64) -> Store {
        Store::new(None, memory_bytes)
    }

    fn new(folder: Option<Folder>, memory_bytes: u64) -> Store {
        Store(Arc::new(Inner {
            memory: bounded(memory_bytes),
            summaries: bounded(memory_bytes / SUMMARIES),
            folder,
            counters: Counters::default(),
            repairs: Mutex::default(),
        }))
    }

    /// The folder, if the store has one.
    pub fn folder(&self) -> Option<&Path> {
        self.0.folder.as_ref().map(Folder::root)
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
        if let Some(chunk) = self.0.memory.get(&key) {
            self.0.counters.memory_hits.fetch_add(1, Relaxed);
            return Ok(Some(chunk.into()));
        }
        let open = |folder: &Folder| {
            let Some((file, header)) = folder.open_known(id, &key)? else { return Ok(None) };
            ChunkReader::open(self.clone(), key, file, header).map(Some)
        };
        let problem = match self.0.folder.as_ref().map_or(Ok(None), open) {
            Ok(Some(reader)) => return Ok(Some(reader)),
            Ok(None) => None,
            Err(problem) => Some(problem),
        };
        self.missed(&key, problem);
        Ok(None)
    }

    /// The chunk's file, if it is there.
    pub(crate) fn open_file(&self, key: &ChunkKey) -> Result<Option<File>, Problem> {
        self.0.folder.as_ref().map_or(Ok(None), |folder| folder.open_file(key))
    }

    /// What is wrong with a file of which a layer could not be read: nothing if it is no longer the file that had
    /// `header`, since another process has removed or replaced it meanwhile.
    pub(crate) fn confirm(&self, header: &Header, key: &ChunkKey, problem: Problem) -> Option<Problem> {
        match self.0.folder.as_ref()?.open_known(&header.id, key) {
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
    pub(crate) fn read_from_disk(&self, kept: Option<Chunk>) {
        self.0.counters.disk_hits.fetch_add(1, Relaxed);
        if let Some(chunk) = kept {
            self.0.memory.insert(chunk.key(), chunk);
        }
    }

    /// Counts a chunk that is not there, or is broken.
    pub(crate) fn missed(&self, key: &ChunkKey, problem: Option<Problem>) {
        self.0.counters.misses.fetch_add(1, Relaxed);
        if let (Some(problem), Some(folder)) = (problem, &self.0.folder) {
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
        self.0.memory.contains_key(&key) || self.on_disk(&key)
    }

    fn on_disk(&self, key: &ChunkKey) -> bool {
        self.0.folder.as_ref().is_some_and(|folder| matches!(folder.open_chunk(key), Ok(Some(_))))
    }

    /// Keeps the chunk in memory, and on disk if it is not there.
    ///
    /// # Errors
    /// None at present: a chunk that cannot be written is told by the outcome, and serves from memory.
    pub fn put(&self, chunk: Chunk) -> Result<PutOutcome> {
        let key = chunk.key();
        let outcome = self
            .write(|folder| if self.on_disk(&key) { Ok(None) } else { folder.write_chunk(&chunk).map(Some) });
        self.0.memory.insert(key, chunk);
        Ok(outcome)
    }

    /// Writes something that says its bytes, or nothing if it was there, and counts it.
    fn write(&self, write: impl FnOnce(&Folder) -> Result<Option<u64>>) -> PutOutcome {
        let counters = &self.0.counters;
        match self.0.folder.as_ref().map(write) {
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
        }
    }

    /// All chunks, of whatever model, from the headers of their files and from memory.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn list(&self) -> Result<Listing> {
        let mut memory: BTreeMap<ChunkKey, Chunk> = self.0.memory.iter().collect();
        let mut listing = Listing::default();
        let found = self.0.folder.as_ref().map_or(Ok(Vec::new()), Folder::scan)?;
        let mut beside = self.beside(&found);
        for found in found {
            let Found::Chunk(key, path) = found else { continue };
            match open_chunk(&path, &key) {
                Ok(Some((_, header))) => {
                    let in_memory = memory.remove(&key).is_some();
                    listing.chunks.push(ChunkInfo::of_header(&header, path, in_memory));
                }
                Ok(None) => {}
                Err(problem) => listing.unusable.push(Unusable { path, problem }),
            }
        }
        listing.chunks.extend(memory.values().map(ChunkInfo::of_chunk));
        listing.chunks.sort_by_key(|info| info.key);
        for info in &mut listing.chunks {
            beside.remove(&info.key).unwrap_or_default().tell(info);
        }
        Ok(listing)
    }

    /// Removes a chunk and its summaries from memory and disk, and says whether the chunk was there. Chunks in use stay
    /// whole.
    ///
    /// # Errors
    /// If a file cannot be removed.
    pub fn remove(&self, key: &ChunkKey) -> Result<bool> {
        self.remove_summaries(key)?;
        let in_memory = self.0.memory.remove(key).is_some();
        let on_disk = self.0.folder.as_ref().map_or(Ok(false), |folder| remove(&folder.path(key)))?;
        Ok(in_memory || on_disk)
    }

    /// The only key that begins with `prefix`, 1 to 64 hexadecimal digits.
    ///
    /// # Errors
    /// If there is none, or several (the error lists them), or the prefix is not hexadecimal.
    pub fn resolve(&self, prefix: &str) -> Result<ChunkKey> {
        if !(1..=64).contains(&prefix.len()) || !prefix.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(StoreError::BadKey { text: prefix.to_owned(), expected: "1 to 64" });
        }
        let wanted = prefix.to_ascii_lowercase();
        let on_disk = self.0.folder.as_ref().map_or(Ok(Vec::new()), Folder::keys)?;
        let in_memory = self.0.memory.iter().map(|(key, _)| key);
        let keys: BTreeSet<ChunkKey> =
            on_disk.into_iter().chain(in_memory).filter(|key| key.to_string().starts_with(&wanted)).collect();
        match keys.first() {
            None => Err(StoreError::NoSuchChunk { prefix: prefix.to_owned() }),
            Some(key) if keys.len() == 1 => Ok(*key),
            Some(_) => Err(StoreError::Ambiguous {
                prefix: prefix.to_owned(),
                candidates: keys.into_iter().collect(),
            }),
        }
    }

    /// What is known about a chunk, with its token ids.
    ///
    /// # Errors
    /// If there is no such chunk, or its header cannot be used.
    pub fn show(&self, key: &ChunkKey) -> Result<ChunkDetail> {
        let mut detail = self.detail(key)?;
        let mut beside = self.beside(&self.summaries_on_disk(key)?);
        beside.remove(key).unwrap_or_default().tell(&mut detail.info);
        Ok(detail)
    }

    fn detail(&self, key: &ChunkKey) -> Result<ChunkDetail> {
        let in_memory = self.0.memory.peek(key);
        if let Some(folder) = &self.0.folder {
            let path = folder.path(key);
            let opened = match folder.open_chunk(key) {
                Err(problem) if in_memory.is_none() => return Err(StoreError::Unusable { path, problem }),
                opened => opened,
            };
            if let Ok(Some((_, header))) = opened {
                let info = ChunkInfo::of_header(&header, path, in_memory.is_some());
                return Ok(ChunkDetail { info, token_ids: header.id.tokens });
            }
        }
        let chunk = in_memory.ok_or_else(|| StoreError::NoSuchChunk { prefix: key.to_string() })?;
        Ok(ChunkDetail { info: ChunkInfo::of_chunk(&chunk), token_ids: chunk.tokens().to_vec() })
    }

    /// Reads every file of the folder and verifies all of it. Removes broken files, summaries whose chunk is not there
    /// and temporary files of writers that died; leaves alone, and reports, files of an unknown version and what is not
    /// the store's.
    ///
    /// # Errors
    /// If the folder cannot be read or a broken file cannot be removed.
    pub fn verify(&self, progress: impl FnMut(VerifyProgress)) -> Result<VerifyReport> {
        let Some(folder) = &self.0.folder else { return Ok(VerifyReport::default()) };
        let report = verify(folder, progress)?;
        report.failed.iter().cloned().for_each(|repair| self.record(repair));
        self.0.counters.bytes_read.fetch_add(report.bytes, Relaxed);
        Ok(report)
    }

    /// Counts since the store was opened.
    pub fn stats(&self) -> Stats {
        let c = &self.0.counters;
        Stats {
            memory_hits: c.memory_hits.load(Relaxed),
            disk_hits: c.disk_hits.load(Relaxed),
            misses: c.misses.load(Relaxed),
            removed: c.removed.load(Relaxed),
            unusable: c.unusable.load(Relaxed),
            stored: c.stored.load(Relaxed),
            not_stored: c.not_stored.load(Relaxed),
            bytes_read: c.bytes_read.load(Relaxed),
            bytes_written: c.bytes_written.load(Relaxed),
            memory_bytes: self.0.memory.weight(),
            memory_chunks: self.0.memory.len() as u64,
        }
    }

    #[cfg(test)]
    pub(crate) fn disk(&self) -> &Folder {
        self.0.folder.as_ref().expect("a store with a folder")
    }
}
