//! Streams: queues of work of a GPU.

use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::result::{memcpy_htod_async, stream};
use cudarc::driver::sys;
use refrain_kernels::{HostBytes, HostSlice};

use super::call::Describe;
use super::context::Context;
use super::kernels::Kernels;
use super::order::{Awaited, Pieces, lock};
use super::role::Role;
use super::staging::Staging;
use crate::driver::{DriverError, Grid};

/// Bytes that the stream that computes has a kernel copy from the host at most.
const COPIED_BY_KERNEL: usize = 4 << 20;

/// A stream of a GPU's context. Its calls need that context to be current.
#[derive(Debug)]
pub(super) struct Stream {
    context: Arc<Context>,
    raw: sys::CUstream,
    role: Role,
    pub(super) pieces: Pieces,
    awaited: Awaited,
    staging: Mutex<Staging>,
    /// Bytes of the host that copies may still read.
    copied: Mutex<Vec<HostBytes>>,
}

// SAFETY: a stream may be used by any thread.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver locks what it must.
unsafe impl Sync for Stream {}

impl Stream {
    pub(super) fn new(context: &Arc<Context>, role: Role) -> Result<Stream, DriverError> {
        let _bound = context.bind()?;
        let (mut raw, flags) = (ptr::null_mut(), sys::CUstream_flags::CU_STREAM_NON_BLOCKING);
        // SAFETY: the stream is written where it may be.
        unsafe { sys::cuStreamCreateWithPriority(&raw mut raw, flags as u32, role.priority()?) }
            .describe("making a stream")?;
        Ok(Stream {
            context: context.clone(),
            raw,
            role,
            pieces: Pieces::default(),
            awaited: Awaited::default(),
            staging: Mutex::new(Staging::new(role.segment())),
            copied: Mutex::default(),
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
    ///
    /// A short copy of the stream that computes is made by a kernel. The GPU's copy engine would begin it behind copies of loaders, each of which takes a
    /// third of a millisecond.
    pub(super) fn write(
        &self,
        kernels: &Kernels,
        to: sys::CUdeviceptr,
        bytes: usize,
        unit: usize,
        fill: &mut dyn FnMut(usize, &mut [u8]),
    ) -> Result<(), DriverError> {
        let copy = |to: sys::CUdeviceptr, from: &[u8]| match self.role {
            Role::Computing if from.len() <= COPIED_BY_KERNEL && to.is_multiple_of(16) => {
                let grid =
                    Grid { blocks: [from.len().div_ceil(16 * 256) as u32, 1, 1], threads: 256, shared: 0 };
                let mut arguments = [from.as_ptr().addr() as u64, to, from.len() as u64];
                kernels.launch("copy_from_host", grid, self.raw, &mut arguments)
            }
            // SAFETY: the bytes are pinned, and change no more until an event behind the copy is reached.
            _ => unsafe { memcpy_htod_async(to, from, self.raw) }.describe("copying to the GPU"),
        };
        lock(&self.staging).write(self.raw, (to, bytes), unit, fill, copy)
    }

    /// Queues copies of parts of pinned bytes to an address, one behind the other, in one call. The bytes are held until the stream has been waited for.
    pub(super) fn write_pinned(
        &self,
        to: sys::CUdeviceptr,
        parts: &[HostSlice<'_>],
    ) -> Result<(), DriverError> {
        let (mut targets, mut sources, mut sizes) = (Vec::new(), Vec::new(), Vec::new());
        let mut end = to;
        for part in parts.iter().filter(|part| !part.slice().is_empty()) {
            let bytes = part.slice().as_bytes();
            targets.push(end);
            sources.push(bytes.as_ptr().addr() as sys::CUdeviceptr);
            sizes.push(bytes.len());
            end += bytes.len() as u64;
        }
        // The lock is held until the copy is queued: a thread that waits for the stream meanwhile would let the bytes go before it.
        let mut copied = lock(&self.copied);
        copied.extend(parts.iter().map(|part| part.bytes().clone()));
        // SAFETY: a value of integers alone may be all zeros.
        let mut attributes: sys::CUmemcpyAttributes = unsafe { std::mem::zeroed() };
        attributes.srcAccessOrder = sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
        let (mut first, count) = (0, sizes.len());
        let [targets, sources] = [&mut targets, &mut sources].map(|of: &mut Vec<_>| of.as_mut_ptr());
        // SAFETY: the arrays are as long as the call is told; the bytes of the host are held, and do not change.
        unsafe {
            sys::cuMemcpyBatchAsync_v2(
                targets,
                sources,
                sizes.as_mut_ptr(),
                count,
                &raw mut attributes,
                &raw mut first,
                1,
                self.raw,
            )
        }
        .describe("copying to the GPU")
    }

    /// Waits for all that is queued.
    pub(super) fn synchronize(&self) -> Result<(), DriverError> {
        // Copies that another thread queues meanwhile are not waited for.
        let copied = std::mem::take(&mut *lock(&self.copied));
        // SAFETY: the stream is alive.
        let waited = unsafe { stream::synchronize(self.raw) }.describe("waiting for the GPU");
        drop(copied);
        waited
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // An error has no receiver: the last user is gone.
        let _bound = self.context.bind();
        let _ = self.synchronize();
        self.staging.get_mut().unwrap_or_else(PoisonError::into_inner).free();
        self.pieces.free();
        // SAFETY: the stream is alive.
        let _ = unsafe { stream::destroy(self.raw) };
    }
}
