//! Chunks that several machines share.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::Path;
use std::sync::{Arc, MutexGuard, PoisonError, Weak};

use super::Store;
use super::receiver::Receiver;
use crate::disk::{Disk, Origin};
use crate::folder::{name, open_aux_file};
use crate::remote::{ObjectSink, Objects, Remote};
use crate::tiers::{InFlightChunk, Tiers};
use crate::{ChunkId, ChunkKey, ChunkReader, Limits, Problem, RemoteOptions, RemoteStats, Result, aux_file};

/// Most bytes of an aux tensors file that are fetched.
const MAX_AUX_BYTES: u64 = 1 << 30;

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
        Ok(Store(Arc::new(Tiers::new(Some(disk), Some(remote), memory))))
    }

    /// The same through `objects`, with the URL and timeout of the options.
    #[cfg(test)]
    pub(crate) fn open_shared_through(
        folder: &Path,
        objects: Arc<dyn object_store::ObjectStore>,
        options: &RemoteOptions,
    ) -> Store {
        let disk = Arc::new(Disk::open(folder, Limits::memory(64 << 20), true).unwrap());
        let remote = Remote::with(objects, "library".into(), options, &disk).unwrap();
        Store(Arc::new(Tiers::new(Some(disk), Some(remote), 64 << 20)))
    }

    /// Has the chunks that neither memory nor the folder has fetched, several at once, with their aux tensors of these kinds, and
    /// says how many chunks are asked for, or, if it is to wait until they are `whole`, have come. Without that
    /// [`Store::reader`] reads a chunk while it comes. Where there is no object store, or it does not answer, none does.
    ///
    /// # Panics
    /// If one is no kind.
    pub fn prefetch(&self, ids: &[&ChunkId], kinds: &[&str], whole: bool) -> usize {
        let Some(remote) = &self.0.remote else { return 0 };
        let (mut chunks, mut aux) = (BTreeMap::new(), Vec::new());
        for id in ids.iter().filter(|id| id.layout().is_ok()) {
            let key = id.key();
            if chunks.contains_key(&key) {
                continue;
            }
            if !self.contains(id) {
                chunks.insert(key, self.receive(remote, id, key));
            }
            for kind in kinds.iter().filter(|kind| !self.has_aux_tensors(id, kind)) {
                let gate = Arc::new(InFlightChunk::default());
                let (store, id, kind) = (Arc::downgrade(&self.0), (*id).clone(), (*kind).to_owned());
                let object = name(&key, Some(&kind));
                let removals = self.0.removals();
                let sink = AuxReceiver { store, id, kind, removals, bytes: Vec::new(), gate: gate.clone() };
                remote.fetch(object, Box::new(sink));
                aux.push(gate);
            }
        }
        aux.iter().for_each(|aux| aux.wait());
        let came = |chunk: &&Arc<InFlightChunk>| {
            chunk.wait();
            chunk.chunk().is_some()
        };
        if whole { chunks.values().filter(came).count() } else { chunks.len() }
    }

    /// Further objects of the object store, below the prefix of the chunks; none where there is no object store.
    pub fn objects(&self) -> Option<Objects> {
        self.0.remote.as_ref()?.objects()
    }

    /// Whether there is an object store that chunks are fetched from.
    pub fn fetches(&self) -> bool {
        self.0.remote.is_some()
    }

    /// Whether the chunk is on its way, with a header that fits, so that [`Store::reader`] reads it while it comes.
    pub fn is_in_flight(&self, id: &ChunkId) -> bool {
        self.reader_in_flight(&id.key()).is_some()
    }

    /// The chunk as it comes, fetched for the first to ask.
    fn receive(&self, remote: &Remote, id: &ChunkId, key: ChunkKey) -> Arc<InFlightChunk> {
        let in_flight = match self.in_flight().entry(key) {
            Entry::Occupied(known) => return known.get().clone(),
            Entry::Vacant(new) => new.insert(Arc::default()).clone(),
        };
        remote.fetch(name(&key, None), Box::new(Receiver::new(&self.0, id.clone(), in_flight.clone())));
        in_flight
    }

    fn in_flight(&self) -> MutexGuard<'_, BTreeMap<ChunkKey, Arc<InFlightChunk>>> {
        self.0.in_flight.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A reader of a chunk that is coming.
    pub(super) fn reader_in_flight(&self, key: &ChunkKey) -> Option<ChunkReader> {
        let in_flight = self.in_flight().get(key).cloned()?;
        Some(ChunkReader::in_flight(in_flight.header()?, in_flight))
    }

    /// Keeps aux tensors that came, unless a chunk was removed since there were `removals`.
    fn receive_aux(&self, id: &ChunkId, kind: &str, bytes: &[u8], removals: u64) -> Result<(), Problem> {
        let key = id.key();
        let aux = aux_file::decode(bytes, &key, kind)?;
        if self.0.removals() != removals {
            return Ok(());
        }
        let _ = self.0.write(|disk| match open_aux_file(&disk.folder().aux_path(&key, kind), &key, kind) {
            Err(problem) if !problem.is_permanent() => Ok(None),
            _ => disk.write_aux(id, kind, &aux, Origin::Remote).map(Some),
        });
        self.0.aux_tensors.insert((key, kind.to_owned()), Arc::new(aux));
        if self.0.removals() != removals {
            let _ = self.0.remove(&key);
        }
        Ok(())
    }

    /// Counts of the object store; none where there is none.
    pub fn remote_stats(&self) -> Option<RemoteStats> {
        let remote = self.0.remote.as_ref()?;
        let pending = self.0.disk.as_ref().and_then(|disk| disk.pending().ok());
        let pending = pending.map_or(0, |pending| pending.len() as u64);
        Some(RemoteStats { pending, ..remote.stats() })
    }
}

/// Takes the bytes of an aux tensors file as they come.
struct AuxReceiver {
    store: Weak<Tiers>,
    id: ChunkId,
    kind: String,
    /// Removals when they were asked for.
    removals: u64,
    bytes: Vec<u8>,
    /// Opens when nothing comes any more.
    gate: Arc<InFlightChunk>,
}

impl ObjectSink for AuxReceiver {
    fn most(&self) -> u64 {
        MAX_AUX_BYTES
    }

    fn take(&mut self, size: u64, bytes: &[u8]) -> Result<(), Problem> {
        self.bytes.extend_from_slice(bytes);
        let found = self.bytes.len() as u64;
        if found > size.min(MAX_AUX_BYTES) {
            return Err(Problem::Length { expected: size.min(MAX_AUX_BYTES), found });
        }
        Ok(())
    }

    fn end(&mut self) -> Result<(), Problem> {
        let store = self.store.upgrade().map(Store);
        store.map_or(Ok(()), |store| store.receive_aux(&self.id, &self.kind, &self.bytes, self.removals))
    }
}

impl Drop for AuxReceiver {
    fn drop(&mut self) {
        self.gate.end();
    }
}
