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
    /// Calls of the driver by threads that load hold each other up, so that few large copies are faster than many: a segment takes keys and values of
    /// 512 tokens of a layer of Llama 3 8B. All threads of the host fill a segment of the stream that computes, and each has enough to do
    /// for the time that waking it takes.
    pub(super) fn segment(self) -> usize {
        match self {
            Role::Computing => 8 << 20,
            Role::Loading => 2 << 20,
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
