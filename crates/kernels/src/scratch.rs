//! Aligned memory, and scratch that a thread keeps between calls.

use std::cell::Cell;
use std::thread::LocalKey;

use crate::pages;

/// One cache line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Line([u32; 16]);

/// 32-bit words (`u32` or `f32`) from a 64-byte boundary on.
#[derive(Clone, Debug, Default)]
pub(crate) struct Words(Vec<Line>);

impl Words {
    pub(crate) const fn new() -> Words {
        Words(Vec::new())
    }

    pub(crate) fn zeros(words: usize) -> Words {
        let mut lines = Vec::with_capacity(words.div_ceil(16));
        pages::advise(lines.spare_capacity_mut());
        lines.resize(words.div_ceil(16), Line([0; 16]));
        Words(lines)
    }

    /// Grows to at least `words`; what the words hold is left open.
    pub(crate) fn reserve(&mut self, words: usize) {
        if self.0.len() < words.div_ceil(16) {
            *self = Words::zeros(words);
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.0.len() * 64
    }

    pub(crate) fn words(&self) -> &[u32] {
        // SAFETY: a line is sixteen words without padding.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * 16) }
    }

    pub(crate) fn words_mut(&mut self) -> &mut [u32] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * 16) }
    }

    pub(crate) fn floats_mut(&mut self) -> &mut [f32] {
        bytemuck::cast_slice_mut(self.words_mut())
    }
}

/// Scratch of one thread for one purpose.
pub(crate) type Kept = LocalKey<Cell<Words>>;

/// Scratch that goes back to its thread when dropped.
///
/// Not a function that takes a closure: a closure may be compiled apart from the kernel around it, and then
/// without its instruction set.
pub(crate) struct Lent {
    kept: &'static Kept,
    pub(crate) words: Words,
}

/// Lends the thread's scratch, grown to `words`. A nested use of the same scratch gets fresh memory.
#[inline]
pub(crate) fn lend(kept: &'static Kept, words: usize) -> Lent {
    let mut lent = Lent { kept, words: kept.take() };
    lent.words.reserve(words);
    lent
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.kept.set(std::mem::take(&mut self.words));
    }
}
