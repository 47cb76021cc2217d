//! Activations of the CPU.

use std::ops::{Deref, DerefMut};

use crate::scratch::AlignedVec;

/// A run of `f32` at a cache line's boundary, whose memory is kept when it shrinks.
#[derive(Clone, Default)]
pub(crate) struct CpuFloats {
    words: AlignedVec,
    len: usize,
}

impl CpuFloats {
    /// An empty run.
    pub(crate) const fn new() -> CpuFloats {
        CpuFloats { words: AlignedVec::new(), len: 0 }
    }

    /// Sets the length. Elements are left open unless it has been the length already.
    pub(crate) fn resize(&mut self, len: usize) {
        self.words.reserve(len);
        self.len = len;
    }
}

impl Deref for CpuFloats {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &bytemuck::cast_slice(self.words.as_u32())[..self.len]
    }
}

impl DerefMut for CpuFloats {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.words.as_f32_mut()[..self.len]
    }
}

impl std::fmt::Debug for CpuFloats {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} floats", self.len)
    }
}
