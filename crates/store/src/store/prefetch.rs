//! Chunks that several machines share.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::Store;
use super::receiver::Receiver;
use crate::disk::{Disk, Origin};
use crate::folder::{name, open_aux_file};
use crate::remote::{Choice, Missing, ObjectSink, Objects, Remote};
use crate::tiers::{InFlightChunk, Tiers};
use crate::{
    ChunkId, ChunkKey, ChunkReader, Fetched, Limits, LinkSpeed, Problem, RemoteOptions, RemoteStats, Result,
    WantedChunk, aux_file,
};

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

    /// Has chunks fetched that neither memory nor the folder has, several at once, with their aux tensors of these kinds, unless they are
    /// expected to be computed in less time. Without `whole` this returns when aux tensors are there, and readers read chunks while they
    /// come; with it, when chunks are there too; in either case when they are late. Where there is no object store, or it does not answer,
    /// none comes.
    ///
    /// # Panics
    /// If one is no kind.
    pub fn prefetch(&self, wanted: &[WantedChunk], kinds: &[&str], whole: bool) -> Fetched {
        let Some(remote) = &self.0.remote else { return Fetched::default() };
        let (missing, mut chunks) = self.missing(wanted, kinds);
        let now = Instant::now();
        let (asked, deadline) = match remote.choose(all_of(&missing), now) {
            Choice::Fetch(deadline) => (missing.len(), deadline),
            // What is fetched to measure is late at once.
            Choice::Compute { measure } => (missing.len().min(measure.into()), Some(now)),
        };
        let mut aux = Vec::new();
        for object in missing[..asked].iter().flat_map(|chunk| &chunk.objects) {
            match object.kind {
                None => chunks.push(self.receive(remote, object.id, deadline)),
                Some(kind) => aux.push(self.receive_kind(remote, object.id, kind, deadline)),
            }
        }
        aux.iter().for_each(|aux| aux.wait(aux.deadline));
        if whole {
            chunks.iter().for_each(|chunk| chunk.wait(chunk.deadline));
            chunks.retain(|chunk| chunk.chunk(chunk.deadline).is_some());
        }
        Fetched { chunks: chunks.len(), passed_over: missing.len() - asked }
    }

    /// Chunks of which something is neither here nor on its way, and chunks that are on their way.
    fn missing<'a>(
        &self,
        wanted: &'a [WantedChunk],
        kinds: &[&'a str],
    ) -> (Vec<MissingChunk<'a>>, Vec<Arc<InFlightChunk>>) {
        let (mut seen, mut missing, mut coming) = (BTreeSet::new(), Vec::new(), Vec::new());
        for WantedChunk { ids, compute } in wanted {
            let is_here =
                |id: &ChunkId| self.contains(id) && kinds.iter().all(|kind| self.has_aux_tensors(id, kind));
            if ids.iter().any(is_here) {
                continue;
            }
            let mut objects = Vec::new();
            for id in ids.iter().filter(|id| id.layout().is_ok()) {
                let key = id.key();
                if !seen.insert(key) {
                    continue;
                }
                let in_flight = self.in_flight().get(&key).cloned();
                let comes = in_flight.is_some();
                coming.extend(in_flight);
                if !comes && !self.contains(id) {
                    objects.push(MissingObject { id, kind: None });
                }
                let lacks = |kind: &&&str| !self.has_aux_tensors(id, kind);
                objects.extend(kinds.iter().filter(lacks).map(|kind| MissingObject { id, kind: Some(kind) }));
            }
            if !objects.is_empty() {
                missing.push(MissingChunk { objects, compute: *compute });
            }
        }
        (missing, coming)
    }

    /// Further objects of the object store, below the prefix of the chunks; none where there is no object store.
    pub fn objects(&self) -> Option<Objects> {
        self.0.remote.as_ref()?.objects()
    }

    /// Whether there is an object store that chunks are fetched from.
    pub fn fetches(&self) -> bool {
        self.0.remote.is_some()
    }

    /// Whether the chunk is on its way, with a header that fits, and not late, so that [`Store::reader_at_hand`] reads it while it comes.
    pub fn is_in_flight(&self, id: &ChunkId) -> bool {
        self.reader_in_flight(&id.key(), false).is_some()
    }

    /// Whether the chunk is on its way and not late, and its header is still to come. Waits for the header until that time at most, or without one
    /// until the chunk is late.
    pub fn awaits_header(&self, id: &ChunkId, until: Option<Instant>) -> bool {
        let Some(in_flight) = self.in_flight().get(&id.key()).cloned() else { return false };
        let header = in_flight.header(until.into_iter().chain(in_flight.deadline).min());
        let is_over = in_flight.state().is_over;
        header.is_none() && !is_over && !in_flight.is_late()
    }

    /// Whether the chunk is on its way and late: computing it may be quicker than waiting for it.
    pub fn is_late(&self, id: &ChunkId) -> bool {
        let in_flight = self.in_flight().get(&id.key()).cloned();
        in_flight.is_some_and(|in_flight| in_flight.is_late())
    }

    /// Counts a late chunk that came before it was computed, if its fetch has `won`, or that was computed before it came.
    pub fn count_race(&self, won: bool) {
        if let Some(remote) = &self.0.remote {
            remote.count_race(won);
        }
    }

    /// The chunk as it comes, fetched for the first to ask.
    fn receive(&self, remote: &Remote, id: &ChunkId, deadline: Option<Instant>) -> Arc<InFlightChunk> {
        let key = id.key();
        let in_flight = match self.in_flight().entry(key) {
            Entry::Occupied(known) => return known.get().clone(),
            Entry::Vacant(new) => new.insert(Arc::new(InFlightChunk::until(deadline))).clone(),
        };
        let sink = Receiver::new(&self.0, id.clone(), in_flight.clone());
        remote.fetch(name(&key, None), id.bytes(), Box::new(sink));
        in_flight
    }

    /// Aux tensors as they come.
    fn receive_kind(
        &self,
        remote: &Remote,
        id: &ChunkId,
        kind: &str,
        deadline: Option<Instant>,
    ) -> Arc<InFlightChunk> {
        let gate = Arc::new(InFlightChunk::until(deadline));
        let (object, removals) = (name(&id.key(), Some(kind)), self.0.removals());
        let (store, id, kind) = (Arc::downgrade(&self.0), id.clone(), kind.to_owned());
        let sink = AuxReceiver { store, id, kind, removals, bytes: Vec::new(), gate: gate.clone() };
        // How many bytes they have is not known here.
        remote.fetch(object, 0, Box::new(sink));
        gate
    }

    fn in_flight(&self) -> MutexGuard<'_, BTreeMap<ChunkKey, Arc<InFlightChunk>>> {
        self.0.in_flight.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A reader of a chunk that is coming. A patient one waits for it even when it is late; else there is one once the chunk's header has come.
    pub(super) fn reader_in_flight(&self, key: &ChunkKey, is_patient: bool) -> Option<ChunkReader> {
        let in_flight = self.in_flight().get(key).cloned()?;
        if is_patient {
            return Some(ChunkReader::in_flight(in_flight.header(None)?, in_flight, None));
        }
        if in_flight.is_late() {
            return None;
        }
        let header = in_flight.state().header.clone()?;
        let until = in_flight.deadline;
        Some(ChunkReader::in_flight(header, in_flight, until))
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

    /// Speed of the link to the object store, by its downloads; nothing where there is none.
    pub fn link_speed(&self) -> LinkSpeed {
        self.0.remote.as_ref().map(Remote::link_speed).unwrap_or_default()
    }
}

#[cfg(test)]
impl Store {
    /// A request to the object store was answered at that time, after this latency.
    pub(crate) fn has_measured(&self, latency: Duration, at: Instant) {
        self.0.remote.as_ref().unwrap().has_measured(latency, at);
    }

    /// Number of chunks that are on their way.
    pub(crate) fn chunks_in_flight(&self) -> usize {
        self.in_flight().len()
    }
}

/// A chunk of which something is neither here nor on its way.
struct MissingChunk<'a> {
    objects: Vec<MissingObject<'a>>,
    /// Time that computing it takes; none where it is not known.
    compute: Option<Duration>,
}

/// The object of a chunk, or of its aux tensors of a kind.
struct MissingObject<'a> {
    id: &'a ChunkId,
    kind: Option<&'a str>,
}

/// The objects and bytes of chunks together. A chunk that is looked for under several names has one of them.
fn all_of(missing: &[MissingChunk<'_>]) -> Missing {
    let bytes = |chunk: &MissingChunk<'_>| {
        let mut chunks = chunk.objects.iter().filter(|object| object.kind.is_none());
        chunks.next().map_or(0, |object| object.id.bytes())
    };
    Missing {
        chunks: missing.len(),
        objects: missing.iter().map(|chunk| chunk.objects.len()).sum(),
        bytes: missing.iter().map(bytes).sum(),
        compute: missing.iter().map(|chunk| chunk.compute).sum(),
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
