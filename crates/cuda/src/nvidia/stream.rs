//! Streams: queues of work of a GPU.

use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::result::stream;
use cudarc::driver::sys;

use super::call::Describe;
use super::context::Context;
use super::order::{Awaited, Pieces};
use super::role::Role;
use super::staging::Staging;
use crate::driver::DriverError;

/// A stream of a GPU's context. Its calls need that context to be current.
#[derive(Debug)]
pub(super) struct Stream {
    context: Arc<Context>,
    raw: sys::CUstream,
    pub(super) pieces: Pieces,
    awaited: Awaited,
    staging: Mutex<Staging>,
}

// SAFETY: a stream may be used by any thread.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver locks what it must.
unsafe impl Sync for Stream {}

impl Stream {
    pub(super) fn new(context: &Arc<Context>, role: Role) -> Result<Stream, DriverError> {
        context.bind()?;
        let (mut raw, flags) = (ptr::null_mut(), sys::CUstream_flags::CU_STREAM_NON_BLOCKING);
        // SAFETY: the stream is written where it may be.
        unsafe { sys::cuStreamCreateWithPriority(&raw mut raw, flags as u32, role.priority()?) }
            .describe("making a stream")?;
        Ok(Stream {
            context: context.clone(),
            raw,
            pieces: Pieces::default(),
            awaited: Awaited::default(),
            staging: Mutex::new(Staging::new(role.segment())),
        })
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Has all that is queued from now on wait for a piece of work of another stream.
    pub(super) fn wait_for(&self, other: &Stream, piece: u64) -> Result<(), DriverError> {
        self.awaited.wait_for((other.raw, &other.pieces), piece, self.raw)
    }

    /// Queues a copy of `bytes` bytes from the host, which `fill` writes ([`Staging::write`]).
    pub(super) fn write(
        &self,
        to: sys::CUdeviceptr,
        bytes: usize,
        unit: usize,
        fill: &mut dyn FnMut(usize, &mut [u8]),
    ) -> Result<(), DriverError> {
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        staging.write(self.raw, (to, bytes), unit, fill)
    }

    /// Waits for all that is queued.
    pub(super) fn synchronize(&self) -> Result<(), DriverError> {
        // SAFETY: the stream is alive.
        unsafe { stream::synchronize(self.raw) }.describe("waiting for the GPU")
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // An error has no receiver: the last user is gone.
        let _ = self.context.bind();
        let _ = self.synchronize();
        self.staging.get_mut().unwrap_or_else(PoisonError::into_inner).free();
        self.pieces.free();
        // SAFETY: the stream is alive.
        let _ = unsafe { stream::destroy(self.raw) };
    }
}
