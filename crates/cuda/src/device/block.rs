//! Memory of tensors.

use super::alloc::alloc;
use crate::driver::{Arg, Driver};

/// Memory of a tensor, which may be none.
pub(super) struct Block<D: Driver> {
    /// The computing thread's queue, on which the memory is cloned.
    pub(super) home: D,
    pub(super) memory: Option<D::Memory>,
    pub(super) bytes: usize,
}

impl<D: Driver> Block<D> {
    /// The address of a byte.
    pub(super) fn arg(&self, at: usize) -> Arg<'_, D::Memory> {
        assert!(at <= self.bytes, "a tensor of {} bytes has no byte {at}", self.bytes);
        self.memory.as_ref().map_or(Arg::Null, |memory| Arg::Memory(memory, at))
    }

    /// The address of a byte, for kernels that only read from there on.
    pub(super) fn read_arg(&self, at: usize) -> Arg<'_, D::Memory> {
        match self.arg(at) {
            Arg::Memory(memory, at) => Arg::Read(memory, at),
            none => none,
        }
    }

    /// The address of its first byte, if it was waited for since it was written last.
    pub(super) fn constant_arg(&self) -> Arg<'_, D::Memory> {
        self.memory.as_ref().map_or(Arg::Null, |memory| Arg::Constant(memory, 0))
    }

    /// Bytes allocated.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl<D: Driver> Clone for Block<D> {
    fn clone(&self) -> Block<D> {
        let memory = self.memory.as_ref().map(|memory| {
            let copy = alloc(&self.home, self.bytes);
            self.home.copy(memory, 0, &copy, 0, self.bytes);
            copy
        });
        Block { home: self.home.clone(), memory, bytes: self.bytes }
    }
}
