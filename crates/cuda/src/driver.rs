//! The seam under the CUDA device: memory, copies and launches, by CUDA's driver or by the emulator.

use std::fmt;

use refrain_kernels::{HostBytes, HostSlice};

/// The text of a call that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverError(pub String);

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for DriverError {}

/// Blocks of a launch, and the threads of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Blocks in x, y and z.
    pub blocks: [u32; 3],
    /// Threads of a block, in x; at most 1024.
    pub threads: u32,
    /// Bytes of dynamic shared memory of a block.
    pub shared: u32,
}

/// An argument of a kernel.
#[derive(Debug)]
pub enum Arg<'a, M> {
    /// A pointer: memory from this byte on.
    Memory(&'a M, usize),
    /// A pointer to memory that the kernel only reads, from this byte on.
    Read(&'a M, usize),
    /// A pointer to memory that was waited for since it was written last, from this byte on: it may be read while the kernels before are still busy.
    Constant(&'a M, usize),
    /// A pointer to nothing.
    Null,
    /// A number of 32 bits.
    U32(u32),
    /// A number of 64 bits, as a size or a seed.
    U64(u64),
    /// A number of 32 bits.
    F32(f32),
}

// Not derived: memory itself need not be one that is copied.
impl<M> Clone for Arg<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for Arg<'_, M> {}

impl<M> Arg<'_, M> {
    /// The argument, whose memory begins `bytes` bytes further on. Arguments without memory stay as they are.
    #[must_use]
    pub fn further(self, bytes: usize) -> Self {
        match self {
            Arg::Memory(memory, at) => Arg::Memory(memory, at + bytes),
            Arg::Read(memory, at) => Arg::Read(memory, at + bytes),
            Arg::Constant(memory, at) => Arg::Constant(memory, at + bytes),
            other => other,
        }
    }
}

/// A GPU with one queue of work, or an emulator of one.
///
/// Calls are queued in the order in which they come; [`Driver::read`] and [`Driver::wait`] return when all before them in the queue is done.
/// Several queues of one GPU ([`Driver::beside`]) are ordered by memory alone: what a call does comes after what the calls before it did with
/// the same memory, in whichever queue, unless both only read it ([`Arg::Read`]); all else may be done in any order, or at once. A call is before another if it has returned when the
/// other begins. Memory that is dropped is freed after all that uses it.
pub trait Driver: Clone + fmt::Debug + Send + Sync + 'static {
    /// Memory of the GPU, of a fixed length, aligned to 256 bytes.
    type Memory: fmt::Debug + Send + Sync + 'static;

    /// Name of the processor.
    fn name(&self) -> String;

    /// Whether kernels for Hopper GPUs run (`hopper.h`).
    fn is_hopper(&self) -> bool;

    /// Bytes of shared memory that a block may have.
    fn most_shared(&self) -> usize;

    /// Multiprocessors: how many blocks run at once if each has one for itself.
    fn multiprocessors(&self) -> usize;

    /// Bytes of memory, and how many of them are free once all that was queued is done.
    fn memory(&self) -> (u64, u64);

    /// The first error of any call but [`Driver::alloc`] for want of memory, as far as it is known without waiting.
    fn failure(&self) -> Option<DriverError>;

    /// Memory of `bytes` bytes, whose content is left open.
    ///
    /// # Errors
    /// If there is not as much; the driver goes on then. Any other error is kept for [`Driver::failure`].
    fn alloc(&self, bytes: usize) -> Result<Self::Memory, DriverError>;

    /// Memory like that of [`Driver::alloc`]; none if it would have to wait for what is queued.
    fn try_alloc(&self, bytes: usize) -> Option<Self::Memory> {
        self.alloc(bytes).ok()
    }

    /// Makes `bytes` bytes from `at` on zeros.
    fn zero(&self, memory: &Self::Memory, at: usize, bytes: usize);

    /// Copies `bytes` bytes from the host to where `at` begins: `fill` writes them, piece after piece, each from the byte on that it is told. Pieces are
    /// whole multiples of `unit` bytes, but for the last one, and are aligned to 8.
    fn write_with(
        &self,
        memory: &Self::Memory,
        at: usize,
        bytes: usize,
        unit: usize,
        fill: &mut dyn FnMut(usize, &mut [u8]),
    );

    /// Copies from the host to where `at` begins; returns when `from` may change.
    fn write(&self, memory: &Self::Memory, at: usize, from: &[u8]) {
        self.write_with(memory, at, from.len(), 1, &mut |first, to| {
            to.copy_from_slice(&from[first..first + to.len()]);
        });
    }

    /// Pins bytes of the host, if they begin at a page and the system lets it, for [`Driver::write_pinned`].
    fn pin(&self, bytes: &HostBytes);

    /// Copies parts of pinned bytes from the host, one behind the other, to the beginning of `memory`, which the GPU does by itself: the bytes stay
    /// where they are until it has.
    fn write_pinned(&self, memory: &Self::Memory, parts: &[HostSlice<'_>]);

    /// Least seconds of `runs` copies of `bytes` bytes from the host to the beginning of `memory`, from host memory that the GPU reads by itself.
    ///
    /// # Errors
    /// If there is no such memory of the host, or this call or any queued before it has failed.
    fn pinned_write_seconds(
        &self,
        memory: &Self::Memory,
        bytes: usize,
        runs: u32,
    ) -> Result<f64, DriverError>;

    /// Copies bytes from `at` on to the host.
    ///
    /// # Errors
    /// If this call, or any queued before it, has failed: the first of these.
    fn read(&self, memory: &Self::Memory, at: usize, to: &mut [u8]) -> Result<(), DriverError>;

    /// Copies bytes between places that do not overlap.
    fn copy(&self, from: &Self::Memory, from_at: usize, to: &Self::Memory, to_at: usize, bytes: usize);

    /// Runs a kernel. It may begin while those before it are still busy, and itself waits for them (`wait_for_kernels` of `device.h`) before it touches memory
    /// that is not [`Arg::Constant`]. A launch that fails is told by the next [`Driver::read`] or [`Driver::wait`].
    fn launch(&self, kernel: &'static str, grid: Grid, args: &[Arg<'_, Self::Memory>]);

    /// Waits for all that was queued.
    ///
    /// # Errors
    /// The first error since the driver was opened.
    fn wait(&self) -> Result<(), DriverError>;

    /// A driver of this GPU with a queue of its own, which goes on while other queues are busy with other memory.
    fn beside(&self) -> Self;
}
