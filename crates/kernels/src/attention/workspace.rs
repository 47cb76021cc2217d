//! Scratch of attention kernels.

use std::cell::Cell;

use crate::scratch::AlignedVec;

thread_local! {
    /// Buffers of a task.
    pub(super) static BUFFERS: Cell<AlignedVec> = const { Cell::new(AlignedVec::new()) };
    /// Results that a call hands from one round of tasks to the next.
    pub(super) static ROUNDS: Cell<AlignedVec> = const { Cell::new(AlignedVec::new()) };
    /// Keys of a call, packed for its tasks.
    pub(super) static PACKED_KEYS: Cell<AlignedVec> = const { Cell::new(AlignedVec::new()) };
}

/// Splits the first `n` floats off `rest`.
pub(super) fn split_off_front<'a>(rest: &mut &'a mut [f32], n: usize) -> &'a mut [f32] {
    let (first, others) = std::mem::take(rest).split_at_mut(n);
    *rest = others;
    first
}
