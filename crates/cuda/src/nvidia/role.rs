//! The work of a stream, and what follows from it.

use std::ffi::c_int;

use cudarc::driver::sys;

use super::call::Describe;
use crate::driver::DriverError;

/// The work of a stream.
#[derive(Clone, Copy, Debug)]
pub(super) enum Role {
    /// That of the thread that computes.
    Computing,
    /// That of a thread that loads beside others.
    Loading,
}

impl Role {
    /// Bytes of a segment of the pinned memory through which the stream copies from the host.
    ///
    /// Loaders fill theirs each with one thread. The rings of twelve of them, of four segments each, take 24 MiB: they stay in the caches of a
    /// CPU, where the GPU reads them. Larger ones are written to memory and read from it once more, at half the speed.
    pub(super) fn segment(self) -> usize {
        match self {
            Role::Computing => 2 << 20,
            Role::Loading => 512 << 10,
        }
    }

    /// The stream's priority in the current context.
    ///
    /// Kernels of loaders are short, and the copies behind them wait for them. Without a priority they would wait for each kernel that computes,
    /// from its first block of threads to its last, and the bus with them.
    pub(super) fn priority(self) -> Result<c_int, DriverError> {
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: both are written where they may be.
        unsafe { sys::cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest) }
            .describe("asking for the priorities of streams")?;
        Ok(match self {
            Role::Computing => least,
            Role::Loading => greatest,
        })
    }
}
