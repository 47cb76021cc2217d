//! Memory for layers, which later chunks take over from chunks that are gone.
//!
//! The system clears memory that it gives, and finds pages for it: together that takes longer than copying a file out of
//! its cache into memory that is there.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use bytes::{Bytes, BytesMut};
use refrain_kernels::advise_huge_pages;

/// Every element type can be read where it lies, and no two layers share a cache line.
const ALIGN: usize = 64;
/// A layer of so many bytes has pages of its own, since a device may pin it. A page more is little beside it.
const PAGED: usize = 64 * PAGE;
const PAGE: usize = 4096;

/// Memory of chunks that are gone, up to a number of bytes.
#[derive(Debug, Default)]
pub(crate) struct Rooms {
    /// Memory for a chunk each, the one that came first in front.
    free: Mutex<VecDeque<BytesMut>>,
    most: usize,
}

/// Memory for one layer, empty at first.
#[derive(Debug)]
pub(crate) struct Room {
    bytes: BytesMut,
    len: usize,
    origin: Origin,
}

/// The rooms that get the memory of a layer back once nobody uses the layer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Origin {
    rooms: Weak<Rooms>,
    /// Bytes of the piece that all layers of a chunk lie in.
    piece: usize,
}

impl Rooms {
    /// Keeps at most so many bytes.
    pub(crate) fn new(most: u64) -> Arc<Rooms> {
        Arc::new(Rooms { free: Mutex::default(), most: most.try_into().unwrap_or(usize::MAX) })
    }

    /// Memory for `layers` layers of `len` bytes each, in one piece: the smallest of those at hand that is large enough, and
    /// less than an eighth larger; or new memory.
    pub(crate) fn take(self: &Arc<Rooms>, len: usize, layers: usize) -> Vec<Room> {
        let least = bytes_of(len, layers);
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |piece: &BytesMut| (least..=least + least / 8).contains(&piece.capacity());
        let found = (0..free.len()).filter(|&i| fits(&free[i])).min_by_key(|&i| free[i].capacity());
        let found = found.and_then(|i| free.remove(i));
        drop(free);
        split(found.unwrap_or_else(|| new_piece(least)), len, layers, Arc::downgrade(self))
    }

    /// Keeps the memory of a chunk if the chunk's last layer gives it back; the pieces that came first go for it.
    fn put(&self, bytes: Bytes, piece: usize) {
        let Ok(mut bytes) = bytes.try_into_mut() else { return };
        bytes.clear();
        if bytes.try_reclaim(piece) {
            let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
            free.push_back(bytes);
            while free.iter().map(BytesMut::capacity).sum::<usize>() > self.most {
                drop(free.pop_front());
            }
        }
    }
}

/// Memory for `layers` layers of `len` bytes each, in one piece, which goes back to the system.
pub(crate) fn new_rooms(len: usize, layers: usize) -> Vec<Room> {
    split(new_piece(bytes_of(len, layers)), len, layers, Weak::new())
}

/// A layer of `len` bytes begins at a multiple of this.
fn alignment(len: usize) -> usize {
    if len < PAGED { ALIGN } else { PAGE }
}

fn bytes_of(len: usize, layers: usize) -> usize {
    let align = alignment(len);
    len.next_multiple_of(align) * layers + align
}

/// Memory in huge pages where it is large: taken page by page, it costs several times as much as filling it.
fn new_piece(bytes: usize) -> BytesMut {
    let mut piece = BytesMut::with_capacity(bytes);
    advise_huge_pages(piece.spare_capacity_mut());
    piece
}

fn split(mut piece: BytesMut, len: usize, layers: usize, rooms: Weak<Rooms>) -> Vec<Room> {
    let (origin, align) = (Origin { rooms, piece: piece.capacity() }, alignment(len));
    let mut rest = piece.split_off(piece.as_ptr().addr().wrapping_neg() % align);
    let mut next = || {
        let later = rest.split_off(len.next_multiple_of(align));
        Room { bytes: std::mem::replace(&mut rest, later), len, origin: origin.clone() }
    };
    (0..layers).map(|_| next()).collect()
}

impl Room {
    /// Memory for one layer, which goes back to the system.
    pub(crate) fn new(len: usize) -> Room {
        new_rooms(len, 1).pop().expect("one was asked for")
    }

    /// Bytes of the layer.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Bytes that are missing.
    pub(crate) fn left(&self) -> usize {
        self.len - self.bytes.len()
    }

    /// Appends bytes, at most those that are missing.
    pub(crate) fn extend(&mut self, bytes: &[u8]) {
        assert!(bytes.len() <= self.left(), "{} bytes more than the layer has", bytes.len() - self.left());
        self.bytes.extend_from_slice(bytes);
    }

    /// The next `bytes` bytes of those that are missing, to be written: zeros, which are in the cache by then.
    pub(crate) fn next(&mut self, bytes: usize) -> &mut [u8] {
        assert!(bytes <= self.left(), "{} bytes more than the layer has", bytes - self.left());
        let from = self.bytes.len();
        self.bytes.resize(from + bytes, 0);
        &mut self.bytes[from..]
    }

    /// The bytes, and where their memory comes from.
    pub(crate) fn finish(self) -> (Bytes, Origin) {
        (self.bytes.freeze(), self.origin)
    }
}

impl Origin {
    /// Gives the memory of a layer back.
    pub(crate) fn put(&self, bytes: Bytes) {
        if let Some(rooms) = self.rooms.upgrade() {
            rooms.put(bytes, self.piece);
        }
    }
}

#[cfg(test)]
mod tests {
    use refrain_kernels::Dtype;

    use super::*;
    use crate::Layer;

    fn layers(rooms: &Arc<Rooms>, len: usize, layers: usize) -> Vec<Layer> {
        let fill = |(layer, mut room): (usize, Room)| {
            room.next(len).fill(layer as u8);
            Layer::new(Dtype::F16, room)
        };
        rooms.take(len, layers).into_iter().enumerate().map(fill).collect()
    }

    fn free(rooms: &Rooms) -> Vec<usize> {
        rooms.free.lock().unwrap().iter().map(BytesMut::capacity).collect()
    }

    fn place(layers: &[Layer]) -> usize {
        layers[0].as_bytes().as_ptr().addr()
    }

    #[test]
    fn memory_is_taken_over_once_its_last_layer_is_gone() {
        let rooms = Rooms::new(1 << 20);
        let first = layers(&rooms, 1000, 3);
        assert!(first.iter().all(|layer| layer.as_bytes().as_ptr().addr() % ALIGN == 0));
        let (place_of_first, in_use) = (place(&first), first[1].clone());
        drop(first);
        assert!(free(&rooms).is_empty(), "a layer of it is in use");
        let second = layers(&rooms, 1000, 3);
        assert_ne!(place(&second), place_of_first);
        assert!(in_use.as_bytes().iter().all(|byte| *byte == 1));
        drop(in_use);
        assert_eq!(free(&rooms), [bytes_of(1000, 3)]);
        // Fewer tokens, by less than an eighth, fit as well; many fewer do not.
        let third = layers(&rooms, 960, 3);
        assert_eq!(place(&third), place_of_first);
        assert!(third[2].as_bytes().iter().all(|byte| *byte == 2));
        drop(third);
        assert_ne!(place(&layers(&rooms, 500, 3)), place_of_first);
    }

    #[test]
    fn a_large_layer_has_pages_of_its_own() {
        for (len, align) in [(PAGED - 2, ALIGN), (PAGED, PAGE), (PAGED + 2, PAGE)] {
            let rooms = Rooms::new(1 << 24);
            let first = layers(&rooms, len, 3);
            let begins: Vec<usize> = (0..3).map(|layer| place(&first[layer..])).collect();
            assert!(begins.iter().all(|begin| begin % align == 0), "{begins:?}");
            assert!(begins.windows(2).all(|pair| pair[1] - pair[0] == len.next_multiple_of(align)));
            let place_of_first = place(&first);
            drop(first);
            assert_eq!(place(&layers(&rooms, len, 3)), place_of_first);
        }
    }

    #[test]
    fn memory_that_lies_free_is_bounded_and_the_oldest_goes() {
        let rooms = Rooms::new(2 * bytes_of(640, 2) as u64);
        let three = [640, 576, 640].map(|len| layers(&rooms, len, 2));
        three.into_iter().for_each(drop);
        assert_eq!(free(&rooms), [bytes_of(576, 2), bytes_of(640, 2)]);
        let none = Rooms::new(0);
        drop(layers(&none, 640, 2));
        assert!(free(&none).is_empty());
        let last = layers(&rooms, 640, 2);
        drop(rooms);
        drop(last);
    }

    #[test]
    #[should_panic(expected = "1 bytes more than the layer has")]
    fn a_layer_does_not_grow() {
        Room::new(7).extend(&[0; 8]);
    }
}
