//! Activations where the engine has them.

use std::ops::{Deref, DerefMut};

use refrain_kernels::advise_huge_pages;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Floats from a cache line's boundary on, in huge pages, as those of the CPU device lie. Vectors that reach from one line into the next, and
/// small pages, would cost attention a hundredth of its time.
pub(crate) struct Activations {
    memory: Vec<f32>,
    first: usize,
}

impl Activations {
    pub(crate) fn new(values: &[f32]) -> Activations {
        let mut memory = Vec::<f32>::with_capacity(values.len() + LINE);
        advise_huge_pages(memory.spare_capacity_mut());
        let first = memory.as_ptr().align_offset(LINE);
        memory.resize(first, 0.0);
        memory.extend_from_slice(values);
        Activations { memory, first }
    }
}

impl Deref for Activations {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.memory[self.first..]
    }
}

impl DerefMut for Activations {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.memory[self.first..]
    }
}
