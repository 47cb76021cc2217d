//! Memory of packed weights: large regions of huge pages, from which each matrix takes a piece.
//!
//! A step of decoding reads every weight once. Many a matrix is smaller than a huge page. In an allocation of its own it would lie in
//! pages of 4 KiB, and the translation of their addresses would hold up the reads.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::fmt;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::slice;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::disjoint::DisjointMut;
use crate::pages;

/// Bytes of a region; a larger matrix has a region of its own. Pages that no matrix reaches are never touched, so that a region wastes a
/// huge page at most.
const REGION: usize = if cfg!(test) { 8 << 20 } else { 256 << 20 };
/// Bytes of a huge page.
const HUGE_PAGE: usize = 2 << 20;
/// Bytes that pieces are multiples of: a cache line.
const LINE: usize = 64;

/// Hands out pieces of regions. A region is freed with the last of its pieces.
///
/// A piece comes from the first region that has room for it, so that small matrices fill what large ones left at the ends.
#[derive(Default)]
pub(crate) struct WeightArena(Mutex<Vec<Open>>);

/// A region, and the bytes of it that are taken.
struct Open {
    region: Weak<Region>,
    taken: usize,
}

struct Region {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a region is plain memory; its pieces do not overlap.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    fn new(bytes: usize) -> Region {
        let layout = Layout::from_size_align(bytes.max(LINE), HUGE_PAGE).expect("a matrix fits the memory");
        // SAFETY: the layout is not empty.
        let start = NonNull::new(unsafe { alloc(layout) }).unwrap_or_else(|| handle_alloc_error(layout));
        // SAFETY: the region was just allocated; memory that may not be initialised is advised upon, and not read.
        pages::advise_huge_pages(unsafe {
            slice::from_raw_parts(start.as_ptr().cast::<MaybeUninit<u8>>(), layout.size())
        });
        Region { start, layout }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: it was allocated with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// Words of a matrix, which do not change any more. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct WeightWords {
    /// The region, and the byte at which the piece starts.
    place: Option<(Arc<Region>, usize)>,
    words: usize,
}

impl WeightArena {
    /// A piece of `bytes` bytes, a multiple of [`LINE`]: its region and its first byte.
    fn take(&self, bytes: usize) -> (Arc<Region>, usize) {
        if bytes > REGION {
            return (Arc::new(Region::new(bytes)), 0);
        }
        // No panic under this lock leaves a piece that is taken twice.
        let mut regions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        regions.retain(|open| open.region.strong_count() > 0);
        for open in regions.iter_mut() {
            // The last piece of a region may be freed at any time.
            let Some(region) = open.region.upgrade() else { continue };
            if open.taken + bytes <= region.layout.size() {
                let start = open.taken;
                open.taken += bytes;
                return (region, start);
            }
        }
        let region = Arc::new(Region::new(REGION));
        regions.push(Open { region: Arc::downgrade(&region), taken: bytes });
        (region, 0)
    }

    /// `parts` parts of `words` words, a multiple of 16: each is cleared and given to `write` by one of the tasks that `parallel` runs, so
    /// that all threads share what the system does at the first write to a page.
    ///
    /// # Safety
    /// `parallel`, given a number of tasks, must run each of them to its end, or panic.
    pub(crate) unsafe fn in_parts(
        &self,
        parts: usize,
        words: usize,
        parallel: impl FnOnce(usize, &(dyn Fn(usize) + Sync)),
        write: &(dyn Fn(usize, &mut [u32]) + Sync),
    ) -> WeightWords {
        let bytes = parts * words * size_of::<u32>();
        assert_eq!(words * size_of::<u32>() % LINE, 0, "a part is whole cache lines");
        let (region, start) = self.take(bytes);
        // SAFETY: the piece lies in the region and was handed out just now, to this call alone.
        let room =
            unsafe { slice::from_raw_parts_mut(region.start.add(start).cast().as_ptr(), parts * words) };
        let shared = DisjointMut::new(room);
        parallel(parts, &|part| {
            // SAFETY: part `part` belongs to this task.
            let part_words: &mut [MaybeUninit<u32>] =
                unsafe { shared.part(part * words..(part + 1) * words) };
            part_words.fill(MaybeUninit::new(0));
            // SAFETY: these words were just written.
            write(part, unsafe { slice::from_raw_parts_mut(part_words.as_mut_ptr().cast(), words) });
        });
        WeightWords { place: Some((region, start)), words: parts * words }
    }
}

impl WeightWords {
    /// Bytes of the piece.
    pub(crate) fn bytes(&self) -> usize {
        self.words * size_of::<u32>()
    }

    pub(crate) fn as_u32(&self) -> &[u32] {
        let Some((region, start)) = &self.place else { return &[] };
        // SAFETY: the piece lies in the region, every word of it was written, and nobody writes to it any more.
        unsafe { slice::from_raw_parts(region.start.add(*start).cast().as_ptr(), self.words) }
    }
}

impl fmt::Debug for WeightWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WeightWords").field("words", &self.words).finish_non_exhaustive()
    }
}

impl fmt::Debug for WeightArena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WeightArena").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{REGION, WeightArena, WeightWords};

    /// A piece of two parts, filled with `fill`.
    fn piece(arena: &WeightArena, words: usize, fill: u32) -> WeightWords {
        // SAFETY: the loop runs all tasks.
        unsafe {
            arena.in_parts(2, words / 2, |parts, f| (0..parts).for_each(f), &|part, words| {
                assert!(words.iter().all(|word| *word == 0), "a part is cleared");
                words.fill(fill + part as u32);
            })
        }
    }

    fn region(piece: &WeightWords) -> *const u8 {
        piece.place.as_ref().unwrap().0.start.as_ptr()
    }

    #[test]
    fn pieces_share_regions_and_do_not_overlap() {
        let arena = WeightArena::default();
        let words = REGION / 16 / size_of::<u32>();
        let pieces: Vec<_> = (0..20).map(|i| piece(&arena, words, 2 * i)).collect();
        for (i, piece) in pieces.iter().enumerate() {
            let (first, second) = piece.as_u32().split_at(words / 2);
            assert!(
                first.iter().all(|word| *word == 2 * i as u32)
                    && second.iter().all(|word| *word == 2 * i as u32 + 1)
            );
            assert_eq!((piece.bytes(), region(piece).addr() % super::HUGE_PAGE), (REGION / 16, 0));
        }
        let regions: Vec<_> = pieces.iter().map(region).collect();
        assert_eq!(
            regions.iter().filter(|r| **r == regions[0]).count(),
            16,
            "a region holds sixteen pieces of a sixteenth"
        );
        assert_eq!(regions.iter().filter(|r| **r == regions[16]).count(), 4);
    }

    #[test]
    fn small_pieces_fill_what_large_ones_left() {
        let arena = WeightArena::default();
        let of = |share: usize| piece(&arena, REGION / 4 / 8 * share, 1);
        let (first, second, last) = (of(6), of(6), of(2));
        assert_ne!(region(&first), region(&second));
        assert_eq!(region(&first), region(&last));
    }

    #[test]
    fn a_region_is_freed_with_its_last_piece() {
        let arena = WeightArena::default();
        let (first, second) = (piece(&arena, 32, 0), piece(&arena, 32, 0));
        let freed = Arc::downgrade(&first.place.as_ref().unwrap().0);
        drop(first);
        assert!(freed.upgrade().is_some());
        drop(second);
        assert!(freed.upgrade().is_none());
        let third = piece(&arena, 32, 7);
        assert_eq!(third.as_u32(), [[7; 16], [8; 16]].concat());
    }

    #[test]
    fn a_larger_matrix_has_a_region_of_its_own() {
        let arena = WeightArena::default();
        let small = piece(&arena, 32, 1);
        let large = piece(&arena, REGION / 4 + 32, 2);
        let other = piece(&arena, 32, 3);
        assert_ne!(region(&small), region(&large));
        assert_eq!(region(&small), region(&other));
        assert_eq!(large.as_u32().len(), REGION / 4 + 32);
    }
}
