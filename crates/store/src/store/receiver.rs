//! The receiver verifies a chunk's bytes as they come from the object store, and stores the chunk when all have come.

use std::sync::{Arc, PoisonError, Weak};

use crate::chunk_file::{Header, MAX_HEADER, check_all};
use crate::disk::Origin;
use crate::header::length;
use crate::layer::Layer;
use crate::remote::ObjectSink;
use crate::rooms::{Room, new_rooms};
use crate::tiers::{InFlightChunk, MemoryEntry, Tiers};
use crate::{ChunkId, ChunkKey, Problem};

/// Takes a chunk's bytes as they come.
pub(super) struct Receiver {
    store: Weak<Tiers>,
    id: ChunkId,
    key: ChunkKey,
    in_flight: Arc<InFlightChunk>,
    /// Removals when the chunk was asked for.
    removals: u64,
    /// Bytes before the first layer, until the header is whole.
    head: Vec<u8>,
    /// Memory for the layers to come, the last first.
    rooms: Vec<Room>,
}

impl Receiver {
    pub(super) fn new(tiers: &Arc<Tiers>, id: ChunkId, in_flight: Arc<InFlightChunk>) -> Receiver {
        let (store, key, removals) = (Arc::downgrade(tiers), id.key(), tiers.removals());
        Receiver { store, id, key, in_flight, removals, head: Vec::new(), rooms: Vec::new() }
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
        let (bytes, layers) = (header.layout.layer, header.id.layers);
        let rooms = self.store.upgrade().map(|store| store.rooms.clone());
        self.rooms = rooms.map_or_else(|| new_rooms(bytes, layers), |rooms| rooms.take(bytes, layers));
        self.rooms.reverse();
        self.in_flight.change(|state| state.header = Some(Arc::new(header)));
        Ok(Some(rest))
    }

    fn layers(&mut self, header: &Header, mut bytes: &[u8]) -> Result<(), Problem> {
        while !bytes.is_empty() {
            let layer = header.id.layers - self.rooms.len();
            let Some(next) = self.rooms.last_mut() else {
                let expected = header.bytes() as u64;
                return Err(Problem::Length { expected, found: expected + bytes.len() as u64 });
            };
            let (now, later) = bytes.split_at(bytes.len().min(next.left()));
            next.extend(now);
            bytes = later;
            if next.left() == 0
                && let Some(room) = self.rooms.pop()
            {
                let data = Layer::new(header.id.dtype, room);
                let data = check_all(header, layer, data)?;
                self.in_flight.change(|state| state.layers.push(data));
            }
        }
        Ok(())
    }
}

impl ObjectSink for Receiver {
    fn most(&self) -> u64 {
        8 + MAX_HEADER + self.id.bytes()
    }

    fn take(&mut self, size: u64, bytes: &[u8]) -> Result<(), Problem> {
        let header = self.in_flight.state().header.clone();
        if let Some(header) = header {
            return self.layers(&header, bytes);
        }
        self.head.extend_from_slice(bytes);
        let Some(rest) = self.header(size)? else { return Ok(()) };
        let header = self.in_flight.state().header.clone();
        header.map_or(Ok(()), |header| self.layers(&header, &rest))
    }

    fn end(&mut self) -> Result<(), Problem> {
        let header = self.in_flight.state().header.clone().filter(|_| self.rooms.is_empty());
        if header.is_none() {
            return Err(Problem::Header("it ends before its last layer".to_owned()));
        }
        let Some(store) = self.store.upgrade() else { return Ok(()) };
        // It may have been deleted meanwhile: it is read from here, and not kept.
        if let Some(chunk) = self.in_flight.chunk(None).filter(|_| store.removals() == self.removals) {
            let expires = store.disk.as_ref().map_or(0, |disk| disk.expiry_now());
            // Where it cannot be written it serves from memory.
            let _ = store.write(|disk| disk.write_chunk(&chunk, Origin::Remote).map(Some));
            store.memory.insert(self.key, MemoryEntry { chunk, expires });
            if store.removals() != self.removals {
                let _ = store.remove(&self.key);
            }
        }
        Ok(())
    }
}

impl Drop for Receiver {
    /// Ends the transfer, whole or not. Requests that wait for it go on, and the next request asks anew.
    fn drop(&mut self) {
        if let Some(store) = self.store.upgrade() {
            store.in_flight.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.key);
        }
        self.in_flight.end();
    }
}
