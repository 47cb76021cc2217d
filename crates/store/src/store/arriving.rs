//! A chunk on its way from the object store: a layer can be used while later ones still travel.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use bytes::BytesMut;

use super::{Inner, Store};
use crate::disk::Origin;
use crate::file::{Header, MAX_HEADER, check_all};
use crate::header::length;
use crate::layer::{Layer, room};
use crate::remote::Taker;
use crate::store::MemoryEntry;
use crate::{Chunk, ChunkId, ChunkKey, Problem};

/// What of a chunk is there. Whoever wants more waits for it: the request behind it has its time limits.
#[derive(Debug, Default)]
pub(crate) struct Arriving {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    header: Option<Arc<Header>>,
    /// The first layers, verified.
    layers: Vec<Layer>,
    /// Nothing comes any more; the chunk is in the store if all of it came.
    is_over: bool,
}

impl Arriving {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.changed.notify_all();
    }

    /// Waits for something, or for the end.
    fn wait_for<T>(&self, what: impl Fn(&State) -> Option<T>) -> Option<T> {
        let wait = |state: &mut State| !state.is_over && what(state).is_none();
        what(&self.changed.wait_while(self.state(), wait).unwrap_or_else(PoisonError::into_inner))
    }

    /// What the chunk is; none if it does not come.
    pub(crate) fn header(&self) -> Option<Arc<Header>> {
        self.wait_for(|state| state.header.clone())
    }

    /// A layer as it lies at rest, verified; none if it does not come.
    pub(crate) fn layer(&self, layer: usize) -> Option<Layer> {
        self.wait_for(|state| state.layers.get(layer).cloned())
    }

    /// Waits until nothing comes any more.
    pub(super) fn wait(&self) {
        self.wait_for(|_| None::<()>);
    }

    /// Says so.
    pub(super) fn end(&self) {
        self.change(|state| state.is_over = true);
    }

    /// The chunk, once all of it is there.
    pub(crate) fn chunk(&self) -> Option<Chunk> {
        let header = self.header()?;
        let layers = (0..header.id.layers).map(|layer| self.layer(layer)).collect::<Option<_>>()?;
        Chunk::from_parts(header.id.clone(), header.label.clone(), header.created, layers).ok()
    }
}

/// What takes a chunk's bytes as they come.
pub(super) struct Receiver {
    store: Weak<Inner>,
    id: ChunkId,
    key: ChunkKey,
    arriving: Arc<Arriving>,
    /// Bytes before the first layer, until the header is whole.
    head: Vec<u8>,
    /// Memory for the layers to come, the last first, and how much of the next one is filled.
    rooms: Vec<BytesMut>,
    filled: usize,
}

impl Receiver {
    pub(super) fn new(store: &Store, id: ChunkId, arriving: Arc<Arriving>) -> Receiver {
        let (store, key) = (Arc::downgrade(&store.0), id.key());
        Receiver { store, id, key, arriving, head: Vec::new(), rooms: Vec::new(), filled: 0 }
    }

    /// Reads the header, if it is whole, of an object of `size` bytes, and gives what follows it.
    fn header(&mut self, size: u64) -> Result<Option<Vec<u8>>, Problem> {
        let Some(end) = length(&self.head, MAX_HEADER)?.filter(|end| *end <= self.head.len()) else {
            return Ok(None);
        };
        let rest = self.head.split_off(end);
        let header = Header::read(&mut self.head.as_slice(), size)?;
        if let Some(field) = header.id.difference(&self.id) {
            return Err(Problem::Identity(field));
        }
        self.rooms = room(header.layout.layer, header.id.layers);
        self.rooms.reverse();
        self.arriving.change(|state| state.header = Some(Arc::new(header)));
        Ok(Some(rest))
    }

    fn layers(&mut self, header: &Header, mut bytes: &[u8]) -> Result<(), Problem> {
        while !bytes.is_empty() {
            let layer = header.id.layers - self.rooms.len();
            let Some(next) = self.rooms.last_mut() else {
                let expected = header.bytes() as u64;
                return Err(Problem::Length { expected, found: expected + bytes.len() as u64 });
            };
            let (now, later) = bytes.split_at(bytes.len().min(next.len() - self.filled));
            next[self.filled..self.filled + now.len()].copy_from_slice(now);
            (self.filled, bytes) = (self.filled + now.len(), later);
            if self.filled == next.len() {
                self.filled = 0;
                let data = self.rooms.pop().unwrap_or_default();
                let data = check_all(header, layer, Layer::new(header.id.dtype, data))?;
                self.arriving.change(|state| state.layers.push(data));
            }
        }
        Ok(())
    }
}

impl Taker for Receiver {
    fn most(&self) -> u64 {
        8 + MAX_HEADER + self.id.bytes()
    }

    fn take(&mut self, size: u64, bytes: &[u8]) -> Result<(), Problem> {
        let header = self.arriving.state().header.clone();
        if let Some(header) = header {
            return self.layers(&header, bytes);
        }
        self.head.extend_from_slice(bytes);
        let Some(rest) = self.header(size)? else { return Ok(()) };
        let header = self.arriving.state().header.clone();
        header.map_or(Ok(()), |header| self.layers(&header, &rest))
    }

    fn end(&mut self) -> Result<(), Problem> {
        let header = self.arriving.state().header.clone().filter(|_| self.rooms.is_empty());
        if header.is_none() {
            return Err(Problem::Header("it ends before its last layer".to_owned()));
        }
        let Some(store) = self.store.upgrade().map(Store) else { return Ok(()) };
        if let Some(chunk) = self.arriving.chunk() {
            let expires = store.0.disk.as_ref().map_or(0, |disk| disk.expiry_now());
            // Where it cannot be written it serves from memory.
            let _ = store.write(|disk| disk.write_chunk(&chunk, Origin::Remote).map(Some));
            store.0.memory.insert(self.key, MemoryEntry { chunk, expires });
        }
        Ok(())
    }
}

impl Drop for Receiver {
    /// However it ends, nobody waits any longer, and whoever comes next asks anew.
    fn drop(&mut self) {
        if let Some(store) = self.store.upgrade() {
            store.arriving.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.key);
        }
        self.arriving.end();
    }
}
