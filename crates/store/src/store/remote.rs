//! Chunks that several machines share.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::Path;
use std::sync::{Arc, MutexGuard, PoisonError, Weak};

use super::arriving::{Arriving, Receiver};
use super::{Inner, Store};
use crate::disk::{Disk, Origin};
use crate::folder::{name, open_summary};
use crate::remote::{Remote, Taker};
use crate::{ChunkId, ChunkKey, ChunkReader, Limits, Problem, RemoteOptions, RemoteStats, Result, summary};

/// Most bytes of a summary that are fetched.
const LARGEST_SUMMARY: u64 = 1 << 30;

impl Store {
    /// Opens the store in `folder` as [`Store::open`] does, and shares its chunks through an object store: what neither memory
    /// nor the folder has is fetched from there, and what is stored here is brought there in the background.
    ///
    /// # Errors
    /// If the folder can be neither created nor read, or the options name no object store. Whether it answers is not
    /// asked: one that does not is left alone, and asked again later.
    pub fn open_shared(
        folder: impl AsRef<Path>,
        limits: impl Into<Limits>,
        options: &RemoteOptions,
    ) -> Result<Store> {
        let limits = limits.into();
        let memory = limits.memory;
        let disk = Arc::new(Disk::open(folder.as_ref(), limits, true)?);
        let remote = Remote::open(options, &disk)?;
        Ok(Store::assemble(Some(disk), Some(remote), memory))
    }

    /// Has the chunks that neither memory nor the folder has fetched, several at once, with their summaries of these kinds, and
    /// says how many chunks are asked for, or, if it is to wait until they are `whole`, have come. Without that
    /// [`Store::reader`] reads a chunk while it comes. Where there is no object store, or it does not answer, none does.
    ///
    /// # Panics
    /// If one is no kind.
    pub fn bring(&self, ids: &[&ChunkId], kinds: &[&str], whole: bool) -> usize {
        let Some(remote) = &self.0.remote else { return 0 };
        let (mut chunks, mut summaries) = (BTreeMap::new(), Vec::new());
        for id in ids.iter().filter(|id| id.layout().is_ok()) {
            let key = id.key();
            if chunks.contains_key(&key) {
                continue;
            }
            if !self.contains(id) {
                chunks.insert(key, self.receive(remote, id, key));
            }
            for kind in kinds.iter().filter(|kind| !self.has_summary(id, kind)) {
                let gate = Arc::new(Arriving::default());
                let (store, id, kind) = (Arc::downgrade(&self.0), (*id).clone(), (*kind).to_owned());
                let object = name(&key, Some(&kind));
                let taker = SummaryReceiver { store, id, kind, bytes: Vec::new(), gate: gate.clone() };
                remote.fetch(object, Box::new(taker));
                summaries.push(gate);
            }
        }
        summaries.iter().for_each(|summary| summary.wait());
        let came = |chunk: &&Arc<Arriving>| {
            chunk.wait();
            chunk.chunk().is_some()
        };
        if whole { chunks.values().filter(came).count() } else { chunks.len() }
    }

    /// Whether there is an object store that chunks are fetched from.
    pub fn fetches(&self) -> bool {
        self.0.remote.is_some()
    }

    /// Whether the chunk is on its way, with a header that fits, so that [`Store::reader`] reads it while it comes.
    pub fn is_coming(&self, id: &ChunkId) -> bool {
        self.reader_of_arriving(&id.key()).is_some()
    }

    /// The chunk as it comes, fetched for whoever asked first.
    fn receive(&self, remote: &Remote, id: &ChunkId, key: ChunkKey) -> Arc<Arriving> {
        let arriving = match self.arriving().entry(key) {
            Entry::Occupied(known) => return known.get().clone(),
            Entry::Vacant(new) => new.insert(Arc::default()).clone(),
        };
        remote.fetch(name(&key, None), Box::new(Receiver::new(self, id.clone(), arriving.clone())));
        arriving
    }

    fn arriving(&self) -> MutexGuard<'_, BTreeMap<ChunkKey, Arc<Arriving>>> {
        self.0.arriving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A reader of a chunk that is coming.
    pub(super) fn reader_of_arriving(&self, key: &ChunkKey) -> Option<ChunkReader> {
        let arriving = self.arriving().get(key).cloned()?;
        Some(ChunkReader::arriving(arriving.header()?, arriving))
    }

    fn take_summary(&self, id: &ChunkId, kind: &str, bytes: &[u8]) -> Result<(), Problem> {
        let key = id.key();
        let summary = summary::decode(bytes, &key, kind)?;
        let _ = self.write(|disk| match open_summary(&disk.folder().summary_path(&key, kind), &key, kind) {
            Err(problem) if !problem.is_permanent() => Ok(None),
            _ => disk.write_summary(id, kind, &summary, Origin::Remote).map(Some),
        });
        self.0.summaries.insert((key, kind.to_owned()), Arc::new(summary));
        Ok(())
    }

    /// What the object store has done; none where there is none.
    pub fn remote_stats(&self) -> Option<RemoteStats> {
        let remote = self.0.remote.as_ref()?;
        let pending = self.0.disk.as_ref().and_then(|disk| disk.pending().ok());
        let pending = pending.map_or(0, |pending| pending.len() as u64);
        Some(RemoteStats { pending, ..remote.stats() })
    }
}

/// What takes a summary's bytes as they come.
struct SummaryReceiver {
    store: Weak<Inner>,
    id: ChunkId,
    kind: String,
    bytes: Vec<u8>,
    /// Opens when nothing comes any more.
    gate: Arc<Arriving>,
}

impl Taker for SummaryReceiver {
    fn most(&self) -> u64 {
        LARGEST_SUMMARY
    }

    fn take(&mut self, size: u64, bytes: &[u8]) -> Result<(), Problem> {
        self.bytes.extend_from_slice(bytes);
        let found = self.bytes.len() as u64;
        if found > size.min(LARGEST_SUMMARY) {
            return Err(Problem::Length { expected: size.min(LARGEST_SUMMARY), found });
        }
        Ok(())
    }

    fn end(&mut self) -> Result<(), Problem> {
        let store = self.store.upgrade().map(Store);
        store.map_or(Ok(()), |store| store.take_summary(&self.id, &self.kind, &self.bytes))
    }
}

impl Drop for SummaryReceiver {
    fn drop(&mut self) {
        self.gate.end();
    }
}
