//! A chunk layer by layer, so that a layer can be used while later ones are still on disk.

use std::fs::File;
use std::io::Seek;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::chunk::weight;
use crate::file::{Header, check_layer, read_layer};
use crate::layer::Layer;
use crate::{Chunk, ChunkId, ChunkKey, Problem, Store};

/// A chunk whose layers are read as they are asked for, in any order and by any number of threads at once.
///
/// When the last of them has been read, the chunk is kept in the store's memory as if [`Store::get`] had read it.
#[derive(Debug)]
pub struct ChunkReader(Source);

#[derive(Debug)]
enum Source {
    Memory(Chunk),
    Disk(Box<Disk>),
}

#[derive(Debug)]
struct Disk {
    store: Store,
    key: ChunkKey,
    header: Header,
    /// Offset of the first layer. The file is opened again for every layer: a prompt may have more chunks than a
    /// process may have open files.
    start: u64,
    /// What was read; without the data if the chunk is too large for the store's memory anyway.
    layers: Vec<OnceLock<Option<Layer>>>,
    keep: bool,
    missing: AtomicUsize,
    broken: AtomicBool,
}

impl From<Chunk> for ChunkReader {
    fn from(chunk: Chunk) -> ChunkReader {
        ChunkReader(Source::Memory(chunk))
    }
}

impl ChunkReader {
    /// `file` stands at the first layer.
    pub(crate) fn open(
        store: Store,
        key: ChunkKey,
        mut file: File,
        header: Header,
    ) -> Result<ChunkReader, Problem> {
        let layout = header.id.layout().map_err(|error| Problem::Header(error.to_string()))?;
        let start = file.stream_position().map_err(|error| Problem::Io(error.to_string()))?;
        let layers = header.id.layers;
        Ok(ChunkReader(Source::Disk(Box::new(Disk {
            key,
            start,
            layers: (0..layers).map(|_| OnceLock::new()).collect(),
            keep: weight(&header.id, &header.label, layout) <= store.memory_capacity(),
            missing: AtomicUsize::new(layers),
            broken: AtomicBool::new(false),
            store,
            header,
        }))))
    }

    /// What the chunk is.
    pub fn id(&self) -> &ChunkId {
        match &self.0 {
            Source::Memory(chunk) => chunk.id(),
            Source::Disk(disk) => &disk.header.id,
        }
    }

    /// Whether all of the chunk is in memory: nothing can fail any more.
    pub fn in_memory(&self) -> bool {
        match &self.0 {
            Source::Memory(_) => true,
            Source::Disk(disk) => disk.layers.iter().all(|layer| matches!(layer.get(), Some(Some(_)))),
        }
    }

    /// A layer, its checksum verified; none if the file is broken. It is then removed, counted and told as by
    /// [`Store::get`], once, and the caller computes the chunk again.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn layer(&self, layer: usize) -> Option<Layer> {
        match &self.0 {
            Source::Memory(chunk) => Some(chunk.data()[layer].clone()),
            Source::Disk(disk) => disk.layer(layer),
        }
    }

    /// The whole chunk, with what is left of it read now; none if the file is broken.
    pub fn chunk(&self) -> Option<Chunk> {
        match &self.0 {
            Source::Memory(chunk) => Some(chunk.clone()),
            Source::Disk(disk) => disk.chunk(),
        }
    }
}

impl Disk {
    fn layer(&self, layer: usize) -> Option<Layer> {
        if let Some(Some(read)) = self.layers[layer].get() {
            return Some(read.clone());
        }
        if self.broken.load(Ordering::Relaxed) {
            return None;
        }
        match self.read(layer) {
            Ok(Some(data)) => {
                self.arrived(layer, &data);
                Some(data)
            }
            // A file that has been removed meanwhile is not there, and not broken.
            Ok(None) => self.gone(None),
            Err(problem) => self.gone(Some(problem)),
        }
    }

    fn read(&self, layer: usize) -> Result<Option<Layer>, Problem> {
        let offset = self.start + self.header.layer_bytes() as u64 * layer as u64;
        let Some(mut file) = self.store.open_at(&self.key, offset)? else { return Ok(None) };
        let data = read_layer(&self.header, &mut file, layer)?;
        check_layer(&self.header, layer, &data)?;
        Ok(Some(data))
    }

    /// Counts the chunk as missing, once, and tells what is wrong with its file.
    fn gone(&self, problem: Option<Problem>) -> Option<Layer> {
        if !self.broken.swap(true, Ordering::Relaxed) {
            let problem = problem.and_then(|problem| self.store.confirm(&self.header, &self.key, problem));
            self.store.missed(&self.key, problem);
        }
        None
    }

    /// Counts a layer, and with the last one puts the chunk into the store's memory.
    fn arrived(&self, layer: usize, data: &Layer) {
        self.store.count_read(data.bytes() as u64);
        let first = self.layers[layer].set(self.keep.then(|| data.clone())).is_ok();
        // Acquire and release: whoever counts the last layer sees all of them.
        if first && self.missing.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.store.read_from_disk(self.keep.then(|| self.chunk()).flatten());
        }
    }

    fn chunk(&self) -> Option<Chunk> {
        let layers = (0..self.header.id.layers).map(|layer| self.layer(layer));
        let Header { id, label, created, .. } = &self.header;
        Chunk::from_parts(id.clone(), label.clone(), *created, layers.collect::<Option<_>>()?).ok()
    }
}
