//! A slice that the tasks of one parallel call write in disjoint parts.

use std::marker::PhantomData;
use std::ops::Range;

/// A mutable slice handed to several tasks at once.
pub(crate) struct DisjointMut<'a, T> {
    ptr: *mut T,
    len: usize,
    _of: PhantomData<&'a mut [T]>,
}

// SAFETY: access goes through `part`, whose caller promises that parts in use at one time are disjoint;
// then each element is reached by one thread, as with `&mut [T]` split by `split_at_mut`.
unsafe impl<T: Send> Sync for DisjointMut<'_, T> {}

impl<'a, T> DisjointMut<'a, T> {
    /// Takes the slice for as long as its parts may be used.
    pub(crate) fn new(slice: &'a mut [T]) -> DisjointMut<'a, T> {
        DisjointMut { ptr: slice.as_mut_ptr(), len: slice.len(), _of: PhantomData }
    }

    /// The elements `r`. Panics if they reach past the end.
    ///
    /// # Safety
    /// No two parts that overlap may be alive at the same time.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn part(&self, r: Range<usize>) -> &mut [T] {
        assert!(r.start <= r.end && r.end <= self.len, "part {r:?} of {} elements", self.len);
        // SAFETY: in bounds by the assertion, unaliased by this function's contract.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(r.start), r.end - r.start) }
    }

    /// Where the elements `r` lie; some of them may belong to other tasks. Panics if they reach past the end.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn as_mut_ptr(&self, r: Range<usize>) -> *mut T {
        assert!(r.start <= r.end && r.end <= self.len, "part {r:?} of {} elements", self.len);
        // SAFETY: in bounds by the assertion.
        unsafe { self.ptr.add(r.start) }
    }
}
