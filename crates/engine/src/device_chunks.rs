//! Chunks in the memory of a device: layers that many prompts use are copied there once.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use refrain_kernels::{Device, DeviceFailure, KvBuffer, KvRows};
use refrain_store::{ChunkCopies, ChunkKey, Layer, Store};

/// The cache takes at most one part in so many of the memory that is free when it is made.
const SHARE: u64 = 8;

/// Keys before RoPE and values of a chunk at a layer.
#[derive(Debug)]
pub(crate) struct DeviceLayer {
    k: KvBuffer,
    v: KvBuffer,
}

impl DeviceLayer {
    /// Copies a layer.
    fn new(device: &dyn Device, layer: &Layer) -> DeviceLayer {
        let pinned = layer.pinned().map(|[k, v]| [k, v].map(|part| device.upload_pinned_kv(&[part])));
        match pinned {
            Some([Some(k), Some(v)]) => DeviceLayer { k, v },
            _ => DeviceLayer { k: device.upload_kv(layer.k()), v: device.upload_kv(layer.v()) },
        }
    }

    /// Keys and values, to be placed.
    pub(crate) fn rows(&self) -> (KvRows<'_>, KvRows<'_>) {
        (KvRows::Device(&self.k, 0), KvRows::Device(&self.v, 0))
    }

    /// Bytes of keys and values.
    pub(crate) fn bytes(&self) -> u64 {
        (self.k.bytes() + self.v.bytes()) as u64
    }
}

/// A chunk and a layer.
type Name = (ChunkKey, usize);

#[derive(Debug, Default)]
struct State {
    /// Layers, each with its last use.
    layers: BTreeMap<Name, (Arc<DeviceLayer>, u64)>,
    by_use: BTreeMap<u64, Name>,
    bytes: u64,
    uses: u64,
}

impl State {
    /// The layers of a chunk.
    fn names(&self, key: &ChunkKey) -> Vec<Name> {
        self.layers.range((*key, 0)..=(*key, usize::MAX)).map(|(name, _)| *name).collect()
    }

    /// Notes that a layer is used now.
    fn touch(&mut self, name: Name) -> Option<Arc<DeviceLayer>> {
        let (layer, used) = self.layers.get_mut(&name)?;
        self.by_use.remove(used);
        self.uses += 1;
        *used = self.uses;
        self.by_use.insert(self.uses, name);
        Some(layer.clone())
    }

    /// Drops layers that were used at `since` or before, the least recently used first, until there is room within `bound` for so many bytes
    /// more. False if they are not enough.
    fn make_room(&mut self, bytes: u64, bound: u64, since: u64) -> bool {
        while self.bytes + bytes > bound {
            let Some(oldest) = self.by_use.first_entry().filter(|oldest| *oldest.key() <= since) else {
                return false;
            };
            let name = *oldest.get();
            self.remove(&name);
        }
        true
    }

    fn remove(&mut self, name: &Name) {
        if let Some((layer, used)) = self.layers.remove(name) {
            self.by_use.remove(&used);
            self.bytes -= layer.bytes();
        }
    }
}

/// Layers of chunks in a device's memory, within a bound of bytes. The least recently used go first, but none for another layer of the same
/// prompt: of a prompt whose layers exceed the bound, those that came first stay, and the next prompt over the same chunks finds them.
///
/// Layers come in as the store has read and verified them. A caller has a reader of the chunk: a chunk that the store does not
/// have is not used. One that the store removes goes here as well.
#[derive(Debug)]
pub(crate) struct DeviceChunks {
    store: Store,
    /// Whether the device has memory of its own.
    is_apart: bool,
    bound: u64,
    /// How many values keep layers from being added.
    closed: AtomicUsize,
    state: Mutex<State>,
    hits: AtomicU64,
    misses: AtomicU64,
}

impl DeviceChunks {
    /// A cache of `bound` bytes at most, and an eighth of the memory that is free, of a store's chunks in `device`; of none where that computes
    /// in the host's memory.
    pub(crate) fn new(store: &Store, device: &dyn Device, bound: u64) -> Arc<DeviceChunks> {
        let memory = device.memory();
        let bound = memory.map_or(0, |memory| bound.min(memory.free / SHARE));
        let (hits, misses) = (AtomicU64::new(0), AtomicU64::new(0));
        let (store, is_apart, state) = (store.clone(), memory.is_some(), Mutex::default());
        let closed = AtomicUsize::new(0);
        let chunks = Arc::new(DeviceChunks { store, is_apart, bound, closed, state, hits, misses });
        if chunks.is_on() {
            chunks.store.tell_of_removals(&chunks);
        }
        chunks
    }

    /// An empty cache of the same size for another store.
    pub(crate) fn of_store(&self, store: &Store, device: &dyn Device) -> Arc<DeviceChunks> {
        DeviceChunks::new(store, device, self.bound)
    }

    pub(crate) fn is_on(&self) -> bool {
        self.bound > 0
    }

    /// Whether what is loaded is copied to memory of the device's own.
    pub(crate) fn is_apart(&self) -> bool {
        self.is_apart
    }

    /// Bytes that it may hold.
    pub(crate) fn bound(&self) -> u64 {
        self.bound
    }

    /// Bytes that it may come to hold beside those that it holds.
    pub(crate) fn room(&self) -> u64 {
        self.bound.saturating_sub(self.state().bytes)
    }

    /// Has no layers be added while the value that is returned lives, since their memory was promised to a prompt.
    pub(crate) fn close(self: &Arc<Self>) -> ClosedChunks {
        self.closed.fetch_add(1, Relaxed);
        ClosedChunks(self.clone())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A layer of a chunk, if it is here.
    pub(crate) fn get(&self, key: ChunkKey, layer: usize) -> Option<Arc<DeviceLayer>> {
        let found = self.state().touch((key, layer));
        if found.is_some() { &self.hits } else { &self.misses }.fetch_add(1, Relaxed);
        found
    }

    /// The layers of a prompt's chunks count as used. Returns the last use before that: what was used later makes no room for the prompt.
    pub(crate) fn begin(&self, keys: impl IntoIterator<Item = ChunkKey>) -> u64 {
        let mut state = self.state();
        let since = state.uses;
        for key in keys {
            state.names(&key).into_iter().for_each(|name| _ = state.touch(name));
        }
        since
    }

    /// Copies a layer of a chunk to the device and keeps it, if there is room, or layers make room that were used at `since` or before. There
    /// were so many `removals` from the store before the chunk was opened.
    pub(crate) fn keep(
        &self,
        device: &dyn Device,
        (key, layer): Name,
        data: &Layer,
        (since, removals): (u64, u64),
    ) -> Option<Arc<DeviceLayer>> {
        let is_closed = self.closed.load(Relaxed) > 0;
        if is_closed || !self.state().make_room(data.bytes() as u64, self.bound, since) {
            return None;
        }
        let copied = match DeviceFailure::catch(|| DeviceLayer::new(device, data)) {
            Ok(copied) => Arc::new(copied),
            // Memory that requests need is not kept from them.
            Err(DeviceFailure::OutOfMemory { .. }) => {
                self.clear();
                return None;
            }
            Err(broken) => broken.unwind(),
        };
        let mut state = self.state();
        state.remove(&(key, layer));
        // Another loader may have taken the room meanwhile.
        if !state.make_room(copied.bytes(), self.bound, since) {
            return Some(copied);
        }
        state.bytes += copied.bytes();
        state.layers.insert((key, layer), (copied.clone(), 0));
        state.touch((key, layer));
        drop(state);
        if self.store.removals() != removals {
            self.forget(&key);
        }
        Some(copied)
    }

    /// Drops all layers.
    pub(crate) fn clear(&self) {
        let mut state = self.state();
        state.layers.clear();
        state.by_use.clear();
        state.bytes = 0;
    }

    /// Bytes that the cache holds, and how many layers were found and not found here.
    pub(crate) fn stats(&self) -> DeviceChunkStats {
        DeviceChunkStats {
            bytes: self.state().bytes,
            hits: self.hits.load(Relaxed),
            misses: self.misses.load(Relaxed),
        }
    }
}

impl ChunkCopies for DeviceChunks {
    fn forget(&self, key: &ChunkKey) {
        let mut state = self.state();
        state.names(key).iter().for_each(|name| state.remove(name));
    }

    fn forget_all(&self) {
        self.clear();
    }
}

/// Keeps layers from being added to the cache of chunks in a device's memory.
#[derive(Debug)]
pub(crate) struct ClosedChunks(Arc<DeviceChunks>);

impl Drop for ClosedChunks {
    fn drop(&mut self) {
        self.0.closed.fetch_sub(1, Relaxed);
    }
}

/// Contents and counts of an engine's cache of chunks in its device's memory, since the engine was opened; all 0 on the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceChunkStats {
    /// Bytes of keys and values.
    pub bytes: u64,
    /// Layers of chunks that were found there.
    pub hits: u64,
    /// Layers of chunks that were not.
    pub misses: u64,
}
