//! An open GPU: its context, its kernels, its streams and its memory.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::result::free_async;
use cudarc::driver::sys;

use super::call::Describe;
use super::context::Context;
use super::kernels::Kernels;
use super::stream::Stream;
use crate::driver::DriverError;

/// Most streams of a GPU: memory has a bit for each.
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
    /// Those that no queue has.
    free: Vec<usize>,
}

impl Gpu {
    pub(super) fn open(context: Context) -> Result<Gpu, DriverError> {
        let context = Arc::new(context);
        let (kernels, reclaim) = (Kernels::load(&context)?, Stream::new(&context)?);
        Ok(Gpu { context, streams: Mutex::default(), reclaim, kernels })
    }

    fn streams(&self) -> MutexGuard<'_, Streams> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
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
    /// A stream that nobody has.
    pub(super) fn new(gpu: &Arc<Gpu>) -> Result<Queue, DriverError> {
        let mut streams = gpu.streams();
        let index = match streams.free.pop() {
            Some(index) => index,
            None if streams.all.len() == MOST_STREAMS => {
                return Err(DriverError(format!("all {MOST_STREAMS} streams of the GPU are taken")));
            }
            None => {
                streams.all.push(Arc::new(Stream::new(&gpu.context)?));
                streams.all.len() - 1
            }
        };
        let stream = streams.all[index].clone();
        drop(streams);
        Ok(Queue { gpu: gpu.clone(), stream, index })
    }

    /// Memory of `bytes` bytes.
    pub(super) fn alloc(&self, bytes: usize) -> Result<NvidiaMemory, DriverError> {
        let address = self.gpu.context.alloc(bytes.max(1), self.stream.raw())?;
        Ok(NvidiaMemory {
            gpu: self.gpu.clone(),
            home: self.stream.clone(),
            address,
            bytes,
            users: AtomicU64::new(1 << self.index),
        })
    }

    /// Notes that what is queued next uses memory. Memory of another stream is waited for at its first use: that stream may still be
    /// about to allocate it.
    pub(super) fn uses(&self, memory: &NvidiaMemory) -> Result<(), DriverError> {
        let me = 1 << self.index;
        if memory.users.load(Ordering::Acquire) & me == 0 {
            self.stream.wait_for(&memory.home)?;
            memory.users.fetch_or(me, Ordering::AcqRel);
        }
        Ok(())
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
    /// The stream in whose order it was allocated.
    home: Arc<Stream>,
    address: sys::CUdeviceptr,
    bytes: usize,
    /// The streams that have used it, a bit each.
    users: AtomicU64,
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
        let users = self.users.load(Ordering::Acquire);
        let stream = if users.is_power_of_two() {
            &self.home
        } else {
            let used = self.gpu.streams().all.clone();
            for stream in used.iter().enumerate().filter(|(index, _)| users >> index & 1 == 1) {
                self.gpu.reclaim.wait_for(stream.1)?;
            }
            &self.gpu.reclaim
        };
        // SAFETY: it is freed once, and whatever uses it is queued before.
        unsafe { free_async(self.address, stream.raw()) }.describe("freeing memory")
    }
}

impl Drop for NvidiaMemory {
    fn drop(&mut self) {
        self.gpu.context.run(|| self.free());
    }
}
