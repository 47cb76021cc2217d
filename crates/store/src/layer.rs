//! One layer of a chunk in memory, as computed or as it lies at rest.

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use refrain_kernels::{Buffer, Device, Dtype, HostBytes, HostSlice, Slice};

use crate::kv_quant::Layout;
use crate::rooms::{Origin, Room};

/// Keys before RoPE and values of one layer of a chunk. Immutable; clones share the memory.
#[derive(Clone)]
pub struct Layer(Arc<Inner>);

struct Inner {
    dtype: Dtype,
    data: Data,
    /// Bytes that it took at rest.
    stored_bytes: usize,
}

enum Data {
    /// Keys, then values, equally many, aligned for every element type; or what lies at rest.
    Bytes(HostBytes, Origin),
    /// Keys, then values, that were decoded.
    Decoded(Buffer),
}

/// Layers that are filled one after the other, in one piece of memory.
#[derive(Debug)]
pub struct NewLayers {
    rooms: std::vec::IntoIter<Room>,
    layers: Vec<Layer>,
}

impl NewLayers {
    pub(crate) fn new(rooms: Vec<Room>) -> NewLayers {
        NewLayers { layers: Vec::with_capacity(rooms.len()), rooms: rooms.into_iter() }
    }

    /// Copies the next layer's keys before RoPE and values, each tokens × KV heads × head size.
    ///
    /// # Panics
    /// If keys and values have different types or lengths.
    pub fn push(&mut self, k: Slice<'_>, v: Slice<'_>) {
        let bytes = k.as_bytes().len() + v.as_bytes().len();
        let room = self.rooms.next().filter(|room| room.len() == bytes);
        self.layers.push(Layer::in_room(room.unwrap_or_else(|| Room::new(bytes)), k, v));
    }

    /// All layers.
    pub fn finish(self) -> Vec<Layer> {
        self.layers
    }
}

impl Layer {
    /// Copies keys before RoPE and values, each tokens × KV heads × head size.
    ///
    /// # Panics
    /// If keys and values have different types or lengths.
    pub fn exact(k: Slice<'_>, v: Slice<'_>) -> Layer {
        Layer::in_room(Room::new(k.as_bytes().len() + v.as_bytes().len()), k, v)
    }

    /// Copies keys and values into a room of their bytes.
    fn in_room(mut room: Room, k: Slice<'_>, v: Slice<'_>) -> Layer {
        assert_eq!((k.len(), k.dtype()), (v.len(), v.dtype()), "as many keys as values, of one type");
        [k, v].iter().for_each(|x| room.extend(x.as_bytes()));
        Layer::new(k.dtype(), room)
    }

    /// Type of the elements.
    pub fn dtype(&self) -> Dtype {
        self.0.dtype
    }

    /// Copies keys and values, each tokens × heads × head size, as they are to lie at rest.
    pub(crate) fn encoded(layout: &Layout, k: Slice<'_>, v: Slice<'_>) -> Layer {
        debug_assert_eq!((k.len(), k.dtype()), (v.len(), v.dtype()));
        Layer::join(k.dtype(), layout.layer, layout.encode(k, v).iter().map(|part| &**part))
    }

    /// Keys and values of what lies at rest.
    pub(crate) fn decode(&self, layout: &Layout) -> Layer {
        if layout.is_exact() {
            return self.clone();
        }
        let (dtype, stored_bytes) = (self.0.dtype, self.0.stored_bytes);
        Layer(Arc::new(Inner { dtype, data: Data::Decoded(layout.decode(self.as_bytes())), stored_bytes }))
    }

    /// Copies the given tokens, with `row` bytes of keys each, one after the other.
    pub(crate) fn select(&self, row: usize, ranges: &[Range<usize>]) -> Layer {
        let (k, v) = self.as_bytes().split_at(self.bytes() / 2);
        let len = 2 * row * ranges.iter().map(Range::len).sum::<usize>();
        let tokens = |half| ranges.iter().map(move |range| (half, row * range.start..row * range.end));
        Layer::join(self.0.dtype, len, [k, v].into_iter().flat_map(tokens).map(|(half, place)| &half[place]))
    }

    /// Parts of a layer that lies at rest, `len` bytes in all.
    pub(crate) fn gathered<'a>(of: &Layer, len: usize, parts: impl Iterator<Item = &'a [u8]>) -> Layer {
        Layer::join(of.0.dtype, len, parts)
    }

    /// Copies parts of `len` bytes in all.
    fn join<'a>(dtype: Dtype, len: usize, parts: impl Iterator<Item = &'a [u8]>) -> Layer {
        let mut room = Room::new(len);
        parts.for_each(|part| room.extend(part));
        Layer::new(dtype, room)
    }

    /// A layer of what was written into `room`, which is full.
    pub(crate) fn new(dtype: Dtype, room: Room) -> Layer {
        debug_assert_eq!(room.left(), 0);
        let (bytes, origin) = room.finish();
        let stored_bytes = bytes.len();
        Layer(Arc::new(Inner { dtype, stored_bytes, data: Data::Bytes(HostBytes::new(bytes), origin) }))
    }

    /// Reads parts of a file, each an offset and a number of bytes, one after the other; into `room`, if it is given.
    pub(crate) fn gather(
        file: &File,
        dtype: Dtype,
        parts: &[(u64, usize)],
        room: Option<Room>,
    ) -> io::Result<Layer> {
        let len = parts.iter().map(|(_, len)| len).sum();
        let mut room = room.filter(|room| room.len() == len).unwrap_or_else(|| Room::new(len));
        for (offset, len) in parts {
            read_at(file, room.next(*len), *offset)?;
        }
        Ok(Layer::new(dtype, room))
    }

    /// Keys before RoPE: tokens × KV heads × head size.
    pub fn k(&self) -> Slice<'_> {
        self.slice(&self.as_bytes()[..self.bytes() / 2])
    }

    /// Values: tokens × KV heads × head size.
    pub fn v(&self) -> Slice<'_> {
        self.slice(&self.as_bytes()[self.bytes() / 2..])
    }

    /// Keys and values where a device copies them by itself; none if it does not.
    pub fn pinned(&self) -> Option<[HostSlice<'_>; 2]> {
        let Data::Bytes(bytes, _) = &self.0.data else { return None };
        let half = self.bytes() / 2;
        let [k, v] = [0..half, half..2 * half].map(|range| HostSlice::new(bytes, self.0.dtype, range));
        bytes.is_pinned().then_some([k?, v?])
    }

    /// Has a device copy the layer by itself from now on, where it can, for as long as the layer is in memory.
    pub(crate) fn pin(&self, device: &dyn Device) {
        if let Data::Bytes(bytes, _) = &self.0.data {
            device.pin(bytes);
        }
    }

    /// Bytes of keys and values.
    pub fn bytes(&self) -> usize {
        self.as_bytes().len()
    }

    /// Bytes of what they were made of: fewer where they were encoded at rest.
    pub fn stored_bytes(&self) -> usize {
        self.0.stored_bytes
    }

    /// Keys, then values; or what lies at rest.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        match &self.0.data {
            Data::Bytes(bytes, _) => bytes.as_slice(),
            Data::Decoded(buffer) => buffer.as_slice().as_bytes(),
        }
    }

    fn slice<'a>(&self, bytes: &'a [u8]) -> Slice<'a> {
        // The middle of a layer is a whole number of elements away from its aligned start.
        Slice::from_bytes(self.0.dtype, bytes).expect("aligned, whole elements")
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // A device that still copies holds a clone of the bytes: the system then gets their memory back when the copy is done.
        if let Data::Bytes(bytes, origin) = &mut self.data
            && let Some(bytes) = std::mem::take(bytes).into_bytes()
        {
            origin.put(bytes);
        }
    }
}

impl fmt::Debug for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of {}", self.bytes(), self.0.dtype)
    }
}

/// Fills `bytes` from `offset` of a file on, which several threads may read at once.
#[cfg(unix)]
fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, offset)
}

#[cfg(windows)]
fn read_at(file: &File, mut bytes: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, bytes, offset)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => (bytes, offset) = (&mut bytes[read..], offset + read as u64),
        }
    }
    Ok(())
}
