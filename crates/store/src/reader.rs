//! A chunk layer by layer, so that a layer can be used while later ones are still on disk.

use std::fs::File;
use std::io::Seek;
use std::ops::Range;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, Once, OnceLock, PoisonError};
#[cfg(feature = "remote")]
use std::time::Instant;

use refrain_kernels::Device;

use crate::block_digests::within;
use crate::chunk::weight;
use crate::chunk_file::{Header, check_quickly, read_runs};
use crate::kv_quant::{GROUP, Layout};
use crate::layer::Layer;
use crate::rooms::Room;
#[cfg(feature = "remote")]
use crate::tiers::InFlightChunk;
use crate::tiers::{MemoryEntry, OpenFile, Tiers};
use crate::{Chunk, ChunkId, ChunkKey, Problem};

/// A chunk whose layers are read as they are asked for, in any order and by any number of threads at once.
///
/// When the last of them has been read, the chunk is kept in the store's memory as if [`Store::get`](crate::Store::get) had read it.
#[derive(Debug)]
pub struct ChunkReader(Source);

#[derive(Debug)]
enum Source {
    Memory(Chunk),
    Disk(Box<Disk>),
    /// On its way from the object store, and waited for until a time.
    #[cfg(feature = "remote")]
    InFlightChunk(Arc<Header>, Arc<InFlightChunk>, Option<Instant>),
}

#[derive(Debug)]
struct Disk {
    store: Arc<Tiers>,
    key: ChunkKey,
    header: Header,
    /// When its time is over, in seconds since 1970; 0 is never.
    expires: u64,
    /// Removals when the file was opened.
    removals: u64,
    /// Offset of the first layer.
    start: u64,
    /// None where as many files are open as may be: it is opened again for every layer.
    file: Option<OpenFile>,
    /// The chunk as it was read; without the data if the chunk is too large for the store's memory anyway.
    layers: Vec<OnceLock<Option<Layer>>>,
    /// Memory for the layers that are kept, from when the first is read until each is.
    rooms: OnceLock<Mutex<Vec<Option<Room>>>>,
    keep: bool,
    missing: AtomicUsize,
    /// Completed once the file was found broken or gone, and has been removed and told.
    gone: Once,
    /// Bytes of keys and values read.
    read: AtomicU64,
}

impl From<Chunk> for ChunkReader {
    fn from(chunk: Chunk) -> ChunkReader {
        ChunkReader(Source::Memory(chunk))
    }
}

impl ChunkReader {
    /// `file` stands at the first layer. There were so many `removals` before it was opened.
    pub(crate) fn open(
        store: Arc<Tiers>,
        key: ChunkKey,
        (mut file, header, expires): (File, Header, u64),
        removals: u64,
    ) -> Result<ChunkReader, Problem> {
        let start = file.stream_position().map_err(|error| Problem::Io(error.to_string()))?;
        let layers = header.id.layers;
        Ok(ChunkReader(Source::Disk(Box::new(Disk {
            file: store.keep_open(file),
            rooms: OnceLock::new(),
            key,
            expires,
            removals,
            start,
            layers: (0..layers).map(|_| OnceLock::new()).collect(),
            keep: weight(&header.id, &header.provenance.label, header.bytes()) <= store.memory_capacity(),
            missing: AtomicUsize::new(layers),
            gone: Once::new(),
            read: AtomicU64::new(0),
            store,
            header,
        }))))
    }

    #[cfg(feature = "remote")]
    pub(crate) fn in_flight(
        header: Arc<Header>,
        in_flight: Arc<InFlightChunk>,
        until: Option<Instant>,
    ) -> ChunkReader {
        ChunkReader(Source::InFlightChunk(header, in_flight, until))
    }

    /// Identity of the chunk.
    pub fn id(&self) -> &ChunkId {
        match &self.0 {
            Source::Memory(chunk) => chunk.id(),
            Source::Disk(disk) => &disk.header.id,
            #[cfg(feature = "remote")]
            Source::InFlightChunk(header, ..) => &header.id,
        }
    }

    /// Whether the store keeps the chunk in memory once the layers that are left have been read.
    pub fn would_be_kept(&self) -> bool {
        match &self.0 {
            Source::Disk(disk) => disk.keep && disk.missing.load(Ordering::Relaxed) > 0,
            // It is there, or comes there by itself.
            _ => false,
        }
    }

    /// A layer, its checksum verified; none if the file is broken. It is then removed, counted and told as by
    /// [`Store::get`](crate::Store::get), once, and the caller computes the chunk again. One that is still on its way is waited for, and
    /// none if it is late.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn layer(&self, layer: usize) -> Option<Layer> {
        match &self.0 {
            Source::Memory(chunk) => Some(chunk.layer(layer)),
            Source::Disk(disk) => Some(disk.layer(layer)?.decode(&disk.header.layout)),
            #[cfg(feature = "remote")]
            Source::InFlightChunk(header, in_flight, until) => {
                Some(in_flight.layer(layer, *until)?.decode(&header.layout))
            }
        }
    }

    /// The keys and values of the tokens in `ranges` of a layer, one range after the other; none if the file is broken,
    /// which is then treated as by [`ChunkReader::layer`].
    ///
    /// From disk only the blocks of tokens that the ranges touch are read and verified (all of the layer where the
    /// file was written by an earlier build), and nothing of them is kept.
    ///
    /// # Panics
    /// If there is no such layer, or the ranges are not ascending, disjoint and within the chunk.
    pub fn tokens(&self, layer: usize, ranges: &[Range<usize>]) -> Option<Layer> {
        let tokens = self.id().tokens.len();
        let end = ranges.iter().try_fold(0, |end, range| {
            (end <= range.start && range.start <= range.end && range.end <= tokens).then_some(range.end)
        });
        assert!(end.is_some(), "{ranges:?} are not ascending, disjoint and within {tokens} tokens");
        match &self.0 {
            Source::Memory(chunk) => Some(select(chunk.layout(), &chunk.data()[layer], ranges)),
            Source::Disk(disk) => disk.tokens(layer, ranges),
            #[cfg(feature = "remote")]
            Source::InFlightChunk(header, in_flight, until) => {
                Some(select(&header.layout, &in_flight.layer(layer, *until)?, ranges))
            }
        }
    }

    /// Has a device copy all layers by itself from now on, where it can, of a chunk that was found in memory as it is computed with.
    pub fn pin(&self, device: &dyn Device) {
        if let Source::Memory(chunk) = &self.0
            && chunk.layout().is_exact()
        {
            chunk.data().iter().for_each(|layer| layer.pin(device));
        }
    }

    /// Whether a device copies all layers by itself.
    pub fn is_pinned(&self) -> bool {
        matches!(&self.0, Source::Memory(chunk) if chunk.data().iter().all(|layer| layer.pinned().is_some()))
    }

    /// Bytes of keys and values that this reader has read from disk so far; none for a chunk in memory or from elsewhere.
    pub fn bytes_read(&self) -> u64 {
        match &self.0 {
            Source::Disk(disk) => disk.read.load(Ordering::Relaxed),
            _ => 0,
        }
    }

    /// The whole chunk, with what is left of it read now; none if the file is broken.
    pub fn chunk(&self) -> Option<Chunk> {
        match &self.0 {
            Source::Memory(chunk) => Some(chunk.clone()),
            Source::Disk(disk) => disk.chunk(),
            #[cfg(feature = "remote")]
            Source::InFlightChunk(_, in_flight, until) => in_flight.chunk(*until),
        }
    }
}

/// Some tokens of a layer that lies at rest.
fn select(layout: &Layout, layer: &Layer, ranges: &[Range<usize>]) -> Layer {
    if layout.is_exact() {
        return layer.select(layout.row(), ranges);
    }
    let tokens = ranges.iter().map(|range| range.start / GROUP * GROUP..range.end);
    let mut runs: Vec<Range<usize>> = Vec::new();
    for run in tokens.filter(|run| !run.is_empty()) {
        match runs.last_mut() {
            Some(last) if run.start <= last.end.next_multiple_of(GROUP) => last.end = run.end,
            _ => runs.push(run),
        }
    }
    // All but the last end where a group does, as they begin.
    let count = runs.len();
    runs.iter_mut().take(count.saturating_sub(1)).for_each(|run| run.end = run.end.next_multiple_of(GROUP));
    let here = layout.only(&runs);
    let parts = layout.places(&runs).map(|place| &layer.as_bytes()[place]);
    let some = Layer::gathered(layer, here.layer, parts);
    some.decode(&here).select(layout.row(), &within(ranges, &runs))
}

impl Disk {
    fn layer(&self, layer: usize) -> Option<Layer> {
        if let Some(Some(read)) = self.layers[layer].get() {
            return Some(read.clone());
        }
        let data = self.whole(layer)?;
        self.arrived(layer, &data);
        Some(data)
    }

    fn tokens(&self, layer: usize, ranges: &[Range<usize>]) -> Option<Layer> {
        let layout = &self.header.layout;
        if let Some(Some(whole)) = self.layers[layer].get() {
            return Some(select(layout, whole, ranges));
        }
        let Some(blocks) = &self.header.blocks else {
            return Some(select(layout, &self.whole(layer)?, ranges));
        };
        let runs = blocks.around(ranges);
        let data = self.read(layer, &runs, None, |data| blocks.check(layer, &runs, data))?;
        Some(data.decode(&layout.only(&runs)).select(layout.row(), &within(ranges, &runs)))
    }

    /// Reads and verifies a layer.
    fn whole(&self, layer: usize) -> Option<Layer> {
        let tokens = 0..self.header.id.tokens.len();
        let room = self.room(layer);
        self.read(layer, slice::from_ref(&tokens), room, |data| check_quickly(&self.header, layer, data))
    }

    /// Memory for a layer; none if somebody else has it.
    fn room(&self, layer: usize) -> Option<Room> {
        let (bytes, layers) = (self.header.layout.layer, self.header.id.layers);
        if !self.keep {
            return self.store.rooms.take(bytes, 1).pop();
        }
        let all = || Mutex::new(self.store.rooms.take(bytes, layers).into_iter().map(Some).collect());
        self.rooms.get_or_init(all).lock().unwrap_or_else(PoisonError::into_inner)[layer].take()
    }

    /// Reads and verifies the tokens `runs` of a layer, and sees to a file that is broken.
    fn read(
        &self,
        layer: usize,
        runs: &[Range<usize>],
        room: Option<Room>,
        check: impl FnOnce(&Layer) -> Result<(), Problem>,
    ) -> Option<Layer> {
        if self.gone.is_completed() {
            return None;
        }
        let read = || {
            let again;
            let file = match &self.file {
                Some(open) => &**open,
                None => {
                    let Some(file) = self.store.open_file(&self.key)? else { return Ok(None) };
                    again = file;
                    &again
                }
            };
            let data = read_runs(&self.header, (file, self.start), layer, runs, room)?;
            check(&data)?;
            Ok(Some(data))
        };
        match read() {
            Ok(Some(data)) => {
                self.read.fetch_add(data.bytes() as u64, Ordering::Relaxed);
                self.store.count_read(data.bytes() as u64);
                Some(data)
            }
            // A file that has been removed meanwhile is not there, and not broken.
            Ok(None) => self.gone(None),
            Err(problem) => self.gone(Some(problem)),
        }
    }

    /// Counts the chunk as missing, once, and tells what is wrong with its file. Every thread returns after the file has
    /// been removed: one that opens the chunk again does not find the broken file a second time.
    fn gone(&self, problem: Option<Problem>) -> Option<Layer> {
        self.gone.call_once(|| {
            let problem = problem.and_then(|problem| self.store.confirm(&self.header, &self.key, problem));
            self.store.missed(&self.key, problem);
        });
        None
    }

    /// Keeps a layer, and with the last one puts the chunk into the store's memory.
    fn arrived(&self, layer: usize, data: &Layer) {
        let first = self.layers[layer].set(self.keep.then(|| data.clone())).is_ok();
        // Acquire and release: the thread that counts the last layer sees all of them.
        if first && self.missing.fetch_sub(1, Ordering::AcqRel) == 1 {
            let kept = self.keep.then(|| self.chunk()).flatten();
            let kept = kept.map(|chunk| MemoryEntry { chunk, expires: self.expires });
            self.store.read_from_disk(kept, self.removals);
        }
    }

    fn chunk(&self) -> Option<Chunk> {
        let layers = (0..self.header.id.layers).map(|layer| self.layer(layer));
        let Header { id, provenance, .. } = &self.header;
        Chunk::from_parts(id.clone(), provenance.clone(), layers.collect::<Option<_>>()?).ok()
    }
}
