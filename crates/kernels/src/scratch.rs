//! Aligned memory, and scratch that a thread keeps between calls.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::thread::LocalKey;

use crate::pages;

/// One cache line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Line([u32; 16]);

/// 32-bit words (`u32` or `f32`) from a 64-byte boundary on.
#[derive(Clone, Debug, Default)]
pub(crate) struct AlignedVec(Vec<Line>);

impl AlignedVec {
    /// No words.
    pub(crate) const fn new() -> AlignedVec {
        AlignedVec(Vec::new())
    }

    /// At least `words` zeros.
    pub(crate) fn zeros(words: usize) -> AlignedVec {
        let count = words.div_ceil(16);
        let mut lines = Vec::with_capacity(count);
        pages::advise_huge_pages(lines.spare_capacity_mut());
        lines.resize(count, Line([0; 16]));
        AlignedVec(lines)
    }

    /// Grows to at least `words`; their contents are unspecified then.
    pub(crate) fn reserve(&mut self, words: usize) {
        if self.0.len() < words.div_ceil(16) {
            *self = AlignedVec::zeros(words);
        }
    }

    pub(crate) fn as_u32(&self) -> &[u32] {
        // SAFETY: a line is sixteen words without padding.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * 16) }
    }

    pub(crate) fn as_u32_mut(&mut self) -> &mut [u32] {
        // SAFETY: a line is sixteen words without padding, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * 16) }
    }

    pub(crate) fn as_f32_mut(&mut self) -> &mut [f32] {
        bytemuck::cast_slice_mut(self.as_u32_mut())
    }
}

/// Scratch of one thread for one purpose.
pub(crate) type ScratchKey = LocalKey<Cell<AlignedVec>>;

/// Scratch that goes back to its thread when dropped.
///
/// A guard, since a function that takes a closure may be compiled apart from the kernel around it, without the
/// kernel's instruction set.
pub(crate) struct ScratchGuard {
    key: &'static ScratchKey,
    words: AlignedVec,
}

/// Borrows the thread's scratch, grown to `words`. A nested borrow of the same scratch gets fresh memory.
#[inline]
pub(crate) fn borrow(key: &'static ScratchKey, words: usize) -> ScratchGuard {
    let mut guard = ScratchGuard { key, words: key.take() };
    guard.words.reserve(words);
    guard
}

impl Deref for ScratchGuard {
    type Target = AlignedVec;

    fn deref(&self) -> &AlignedVec {
        &self.words
    }
}

impl DerefMut for ScratchGuard {
    fn deref_mut(&mut self) -> &mut AlignedVec {
        &mut self.words
    }
}

impl Drop for ScratchGuard {
    fn drop(&mut self) {
        self.key.set(std::mem::take(&mut self.words));
    }
}
