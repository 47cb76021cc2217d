//! An open GPU: its context, its kernels, its streams and its memory.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::result::free_async;
use cudarc::driver::sys;

use super::call::Describe;
use super::context::{Context, Shortage};
use super::kernels::Kernels;
use super::role::Role;
use super::stream::Stream;
use super::uses::{Access, Uses};
use crate::driver::DriverError;

/// Most streams of a GPU: each has pinned memory of its own.
const MOST_STREAMS: usize = 64;

#[derive(Debug)]
pub(super) struct Gpu {
    pub(super) context: Arc<Context>,
    streams: Mutex<Streams>,
    /// Stream that frees memory which several streams have used: it waits for all of them, so that none of them waits for another.
    reclaim: Stream,
    /// Dropped behind the streams, which wait for the kernels that they hold.
    pub(super) kernels: Kernels,
}

#[derive(Debug, Default)]
struct Streams {
    all: Vec<Arc<Stream>>,
    /// Indices in `all` of streams that no queue has.
    free: Vec<usize>,
}

impl Gpu {
    pub(super) fn open(context: Context, is_hopper: bool) -> Result<Gpu, DriverError> {
        let context = Arc::new(context);
        let (kernels, reclaim) = (Kernels::load(&context, is_hopper)?, Stream::new(&context, Role::Loading)?);
        Ok(Gpu { context, streams: Mutex::default(), reclaim, kernels })
    }

    fn streams(&self) -> MutexGuard<'_, Streams> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // Kernels may still run, for the last owner may be a piece of memory; and the context, with the pool, may outlive this in pinned memory of
        // the host. An error has no receiver.
        let _ = self.context.give_back();
    }
}

/// A stream of a GPU while somebody has it; then another may.
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) gpu: Arc<Gpu>,
    pub(super) stream: Arc<Stream>,
    index: usize,
}

impl Queue {
    /// A stream that nobody has; if it has to be made, one of this role. The stream that computes is made first, and goes last.
    pub(super) fn new(gpu: &Arc<Gpu>, role: Role) -> Result<Queue, DriverError> {
        let mut streams = gpu.streams();
        let index = match streams.free.pop() {
            Some(index) => index,
            None if streams.all.len() == MOST_STREAMS => {
                return Err(DriverError(format!("all {MOST_STREAMS} streams of the GPU are taken")));
            }
            None => {
                streams.all.push(Arc::new(Stream::new(&gpu.context, role)?));
                streams.all.len() - 1
            }
        };
        let stream = streams.all[index].clone();
        drop(streams);
        Ok(Queue { gpu: gpu.clone(), stream, index })
    }

    /// Memory of `bytes` bytes.
    pub(super) fn alloc(&self, bytes: usize, shortage: Shortage) -> Result<NvidiaMemory, DriverError> {
        let address = self.gpu.context.alloc(bytes.max(1), self.stream.raw(), shortage)?;
        let piece = self.stream.pieces.count(self.stream.raw());
        Ok(NvidiaMemory { gpu: self.gpu.clone(), address, bytes, uses: Uses::new(&self.stream, piece) })
    }

    /// Queues a piece of work that uses memory.
    pub(super) fn run(
        &self,
        memory: &[(&NvidiaMemory, Access)],
        work: impl FnOnce(&Stream) -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        memory.iter().try_for_each(|(memory, access)| memory.uses.wait(&self.stream, *access))?;
        // A part of the work may be queued even if it has failed or panicked.
        let _piece = PieceEnd { stream: &self.stream, memory };
        work(&self.stream)
    }
}

/// Counts a piece of work, and notes what it uses, when it ends.
struct PieceEnd<'a> {
    stream: &'a Arc<Stream>,
    memory: &'a [(&'a NvidiaMemory, Access)],
}

impl Drop for PieceEnd<'_> {
    fn drop(&mut self) {
        let piece = self.stream.pieces.count(self.stream.raw());
        self.memory.iter().for_each(|(memory, access)| memory.uses.note(self.stream, piece, *access));
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.gpu.streams().free.push(self.index);
    }
}

/// Memory of a GPU.
#[derive(Debug)]
pub struct NvidiaMemory {
    gpu: Arc<Gpu>,
    address: sys::CUdeviceptr,
    bytes: usize,
    uses: Uses,
}

impl NvidiaMemory {
    /// The address of `bytes` bytes from `at` on.
    ///
    /// # Panics
    /// If they do not lie inside.
    pub(super) fn address(&self, at: usize, bytes: usize) -> sys::CUdeviceptr {
        let end = at.checked_add(bytes).filter(|end| *end <= self.bytes);
        assert!(end.is_some(), "{bytes} bytes from {at} on lie outside of memory of {} bytes", self.bytes);
        self.address + at as u64
    }

    /// Frees it in the order of all streams that have used it.
    fn free(&self) -> Result<(), DriverError> {
        let only = self.uses.only_stream();
        let stream = only.as_deref().unwrap_or(&self.gpu.reclaim);
        self.uses.wait(stream, Access::Write)?;
        // SAFETY: it is freed once, and whatever uses it is queued before.
        unsafe { free_async(self.address, stream.raw()) }.describe("freeing memory")
    }
}

impl Drop for NvidiaMemory {
    fn drop(&mut self) {
        self.gpu.context.run(|| self.free());
    }
}
