//! A driver that runs the kernels on emulated threads of the CPU.

use std::ffi::{CString, c_char, c_void};
use std::ptr::NonNull;
use std::slice;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Instant;

use refrain_kernels::{HostBytes, HostSlice};

use crate::driver::{Arg, Driver, DriverError, Grid};

/// Bytes that allocations may have together.
const MEMORY: u64 = 16 << 30;
/// Multiprocessors that there are as if.
const MULTIPROCESSORS: usize = 4;
/// Bytes of shared memory that blocks of all kernels but Hopper's have, as on the GPUs that have the least (`MOST_SHARED` of `emulator.h`).
const MOST_SHARED: usize = 99 << 10;
/// Bytes of a piece of a copy from the host, about.
const PIECE: usize = 300 << 10;
/// Bytes of an error's text, as `emulated.cpp` has them.
const ERROR_BYTES: usize = 512;

unsafe extern "C" {
    fn emulator_alloc(bytes: usize) -> *mut c_void;
    fn emulator_free(memory: *mut c_void, bytes: usize);
    #[allow(clippy::too_many_arguments)]
    fn emulator_launch(
        name: *const c_char,
        blocks: *const u32,
        threads: u32,
        shared: u32,
        seed: u64,
        launch: u64,
        sizes: *const usize,
        arguments: *mut *mut c_void,
        count: usize,
        regions: *const Region,
        regions_count: usize,
        error: *mut c_char,
    ) -> i32;
}

/// Memory of a launch, as `emulated.cpp` has it.
#[repr(C)]
struct Region {
    first: *mut c_void,
    bytes: usize,
    is_constant: bool,
    is_written: bool,
}

/// Kernels on emulated threads. Everything is done when a call returns.
///
/// The first block of a launch begins as if the kernels before were busy: memory of arguments that are not [`Arg::Constant`] may not be touched until the
/// block waits for them, unless other threads use the driver meanwhile. A block that does not wait fails, and so does one that writes to memory of
/// which no argument is [`Arg::Memory`].
///
/// The order of threads follows from the seed. With an odd seed an asynchronous copy lands at once, with an even one when it is waited for; a
/// product of Hopper, too, with seeds below 4, and the other way round from 4 to 7. A seed that leaves 2 or 3 divided by 4 emulates a Hopper
/// GPU, any other one an earlier GPU.
#[derive(Clone, Debug)]
pub struct Emulated {
    seed: u64,
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    /// Bytes of memory.
    memory: u64,
    /// Bytes of the largest piece that is free.
    largest: AtomicU64,
    launches: AtomicU64,
    /// Bytes that were copied from the host.
    written: AtomicU64,
    allocated: AtomicU64,
    /// Most bytes that were allocated at a time.
    peak: AtomicU64,
    failed: Mutex<Option<DriverError>>,
    /// Times that the queue was waited for.
    waits: AtomicU64,
    /// Held by all that touches memory, and alone by a launch that begins while memory may not be touched.
    touching: RwLock<()>,
}

impl Emulated {
    /// Emulated threads whose order follows from `seed`.
    pub fn new(seed: u64) -> Emulated {
        Emulated::with_memory(seed, MEMORY)
    }

    /// Emulated threads with this many bytes of memory.
    pub fn with_memory(seed: u64, memory: u64) -> Emulated {
        let largest = AtomicU64::new(memory);
        let [launches, written, allocated, peak, waits] = [(); 5].map(|()| AtomicU64::new(0));
        let state = State {
            memory,
            largest,
            launches,
            written,
            allocated,
            peak,
            failed: Mutex::default(),
            waits,
            touching: RwLock::default(),
        };
        Emulated { seed, state: Arc::new(state) }
    }

    /// Kernels launched so far, by this driver and those beside it.
    pub fn launches(&self) -> u64 {
        self.state.launches.load(Ordering::Relaxed)
    }

    /// Bytes copied from the host so far, by this driver and those beside it.
    pub fn written(&self) -> u64 {
        self.state.written.load(Ordering::Relaxed)
    }

    /// The most bytes that were allocated at a time since the call before.
    pub fn take_peak(&self) -> u64 {
        let State { allocated, peak, .. } = &*self.state;
        peak.swap(allocated.load(Ordering::Relaxed), Ordering::Relaxed)
    }

    /// Has memory be in pieces from now on, of which the largest that is free has so many bytes.
    pub fn fragment(&self, largest: u64) {
        self.state.largest.store(largest, Ordering::Relaxed);
    }

    /// Has an operation fail, and with it all that follow.
    pub fn fail(&self, reason: &str) {
        self.state.keep(DriverError(reason.to_owned()));
    }
}

impl State {
    fn touch(&self) -> RwLockReadGuard<'_, ()> {
        self.touching.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// None while another thread touches memory.
    fn touch_alone(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        self.touching.try_write().ok()
    }

    /// Keeps the error of a call unless an earlier one is kept.
    fn keep(&self, error: DriverError) {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }
}

/// Memory of the host that ends, but for less than 16 bytes, at a page that may not be touched. Its bytes begin as NaNs.
///
/// It is aligned to 16 bytes, not to the 256 of a GPU, so that accesses past the end are found.
#[derive(Debug)]
pub struct EmulatedMemory {
    at: NonNull<u8>,
    bytes: usize,
    /// Times that the queue had been waited for when it was written last.
    written: AtomicU64,
    state: Arc<State>,
}

// SAFETY: the memory belongs to this value alone; a tensor that is written is borrowed mutably by the call that writes it.
unsafe impl Send for EmulatedMemory {}
// SAFETY: as above.
unsafe impl Sync for EmulatedMemory {}

impl Drop for EmulatedMemory {
    fn drop(&mut self) {
        // SAFETY: `emulator_alloc` gave this memory for as many bytes.
        unsafe { emulator_free(self.at.as_ptr().cast(), self.bytes) }
        self.state.allocated.fetch_sub(self.bytes as u64, Ordering::Relaxed);
    }
}

impl EmulatedMemory {
    /// Notes that it is written.
    fn mark(&self) {
        self.written.store(self.state.waits.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Whether the queue has been waited for since it was written last.
    fn is_settled(&self) -> bool {
        self.written.load(Ordering::Relaxed) < self.state.waits.load(Ordering::Relaxed)
    }

    /// The address of bytes that lie inside.
    ///
    /// # Panics
    /// If they do not.
    fn bytes_at(&self, at: usize, bytes: usize) -> *mut u8 {
        let end = at.checked_add(bytes).filter(|end| *end <= self.bytes);
        assert!(end.is_some(), "{bytes} bytes from {at} on lie outside of memory of {} bytes", self.bytes);
        // SAFETY: `at` is at most the length.
        unsafe { self.at.as_ptr().add(at) }
    }
}

impl Driver for Emulated {
    type Memory = EmulatedMemory;

    fn name(&self) -> String {
        "emulated CUDA".to_owned()
    }

    fn is_hopper(&self) -> bool {
        self.seed % 4 >= 2
    }

    fn most_shared(&self) -> usize {
        MOST_SHARED
    }

    fn multiprocessors(&self) -> usize {
        MULTIPROCESSORS
    }

    fn memory(&self) -> (u64, u64) {
        let State { memory, allocated, .. } = &*self.state;
        (*memory, memory.saturating_sub(allocated.load(Ordering::Relaxed)))
    }

    fn failure(&self) -> Option<DriverError> {
        self.state.failed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn alloc(&self, bytes: usize) -> Result<EmulatedMemory, DriverError> {
        let refused = || DriverError(format!("out of memory: {bytes} bytes"));
        let allocated = self.state.allocated.fetch_add(bytes as u64, Ordering::Relaxed);
        // SAFETY: any number of bytes may be asked for.
        let largest = self.state.largest.load(Ordering::Relaxed);
        let at = if bytes as u64 > largest || allocated + bytes as u64 > self.state.memory {
            None
        } else {
            NonNull::new(unsafe { emulator_alloc(bytes) }.cast())
        };
        let Some(at) = at else {
            self.state.allocated.fetch_sub(bytes as u64, Ordering::Relaxed);
            return Err(refused());
        };
        self.state.peak.fetch_max(allocated + bytes as u64, Ordering::Relaxed);
        Ok(EmulatedMemory { at, bytes, written: AtomicU64::new(u64::MAX), state: self.state.clone() })
    }

    fn zero(&self, memory: &EmulatedMemory, at: usize, bytes: usize) {
        memory.mark();
        let _touching = self.state.touch();
        // SAFETY: the bytes lie inside, and nobody reads them meanwhile.
        unsafe { memory.bytes_at(at, bytes).write_bytes(0, bytes) }
    }

    fn write_with(
        &self,
        memory: &EmulatedMemory,
        at: usize,
        bytes: usize,
        unit: usize,
        fill: &mut dyn FnMut(usize, &mut [u8]),
    ) {
        self.state.written.fetch_add(bytes as u64, Ordering::Relaxed);
        memory.mark();
        let mut words = vec![0u64; PIECE.next_multiple_of(unit).min(bytes).div_ceil(8)];
        for first in (0..bytes).step_by(PIECE.next_multiple_of(unit)) {
            let count = (bytes - first).min(PIECE.next_multiple_of(unit));
            let piece = &mut bytemuck::cast_slice_mut(&mut words)[..count];
            fill(first, piece);
            let _touching = self.state.touch();
            // SAFETY: the bytes lie inside, and nobody else uses them meanwhile.
            unsafe { memory.bytes_at(at + first, count).copy_from(piece.as_ptr(), count) }
        }
    }

    fn pin(&self, bytes: &HostBytes) {
        bytes.pin_by(|_| Some(Box::new(())));
    }

    fn write_pinned(&self, memory: &EmulatedMemory, parts: &[HostSlice<'_>]) {
        let mut at = 0;
        for part in parts {
            assert!(part.bytes().is_pinned(), "the bytes are pinned");
            self.write(memory, at, part.slice().as_bytes());
            at += part.slice().as_bytes().len();
        }
    }

    fn pinned_write_seconds(
        &self,
        memory: &EmulatedMemory,
        bytes: usize,
        runs: u32,
    ) -> Result<f64, DriverError> {
        let from = vec![0; bytes];
        let seconds = (0..runs).map(|_| {
            let start = Instant::now();
            self.write(memory, 0, &from);
            start.elapsed().as_secs_f64()
        });
        Ok(seconds.fold(f64::INFINITY, f64::min))
    }

    fn read(&self, memory: &EmulatedMemory, at: usize, to: &mut [u8]) -> Result<(), DriverError> {
        self.wait()?;
        let _touching = self.state.touch();
        // SAFETY: the bytes lie inside, and nobody writes them meanwhile.
        to.copy_from_slice(unsafe { slice::from_raw_parts(memory.bytes_at(at, to.len()), to.len()) });
        Ok(())
    }

    fn copy(&self, from: &EmulatedMemory, from_at: usize, to: &EmulatedMemory, to_at: usize, bytes: usize) {
        let (target, from, to) = (to, from.bytes_at(from_at, bytes), to.bytes_at(to_at, bytes));
        assert!(from.addr().abs_diff(to.addr()) >= bytes, "copies do not overlap");
        target.mark();
        let _touching = self.state.touch();
        // SAFETY: both lie inside of their memory and do not overlap.
        unsafe { to.copy_from_nonoverlapping(from, bytes) }
    }

    fn launch(&self, kernel: &'static str, grid: Grid, args: &[Arg<'_, EmulatedMemory>]) {
        // Eight bytes an argument, of which a kernel reads as many as it has; numbers are little-endian.
        let (mut values, sizes): (Vec<u64>, Vec<usize>) = args
            .iter()
            .map(|arg| match arg {
                Arg::Memory(memory, at) | Arg::Read(memory, at) | Arg::Constant(memory, at) => {
                    (memory.bytes_at(*at, 0).addr() as u64, 8)
                }
                Arg::Null => (0, 8),
                Arg::U32(x) => (u64::from(*x), 4),
                Arg::U64(x) => (*x, 8),
                Arg::F32(x) => (u64::from(x.to_bits()), 4),
            })
            .unzip();
        let mut arguments: Vec<*mut c_void> =
            values.iter_mut().map(|value| std::ptr::from_mut(value).cast()).collect();
        for arg in args {
            match arg {
                Arg::Memory(memory, _) => memory.mark(),
                Arg::Constant(memory, _) if !memory.is_settled() => {
                    let what = format!("{kernel}: memory that may be read early has not been waited for");
                    return self.state.keep(DriverError(what));
                }
                _ => {}
            }
        }
        let name = CString::new(kernel).unwrap_or_default();
        // The launch closes the memory of its arguments until its first block waits for the kernels before. Other threads that use memory now keep it open.
        let alone = self.state.touch_alone();
        let _touching = alone.is_none().then(|| self.state.touch());
        let regions = if alone.is_some() { regions_of(args) } else { Vec::new() };
        let mut error = [0u8; ERROR_BYTES];
        let launch = self.state.launches.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the emulator asserts that number and sizes of arguments are the kernel's; memory that they point to lives as long
        // as `args`, and accesses past its end are caught. Regions are whole allocations, which no other thread touches now.
        let refused = unsafe {
            emulator_launch(
                name.as_ptr(),
                grid.blocks.as_ptr(),
                grid.threads,
                grid.shared,
                self.seed,
                launch,
                sizes.as_ptr(),
                arguments.as_mut_ptr(),
                arguments.len(),
                regions.as_ptr(),
                regions.len(),
                error.as_mut_ptr().cast(),
            )
        };
        if refused != 0 {
            let text = error.split(|byte| *byte == 0).next().unwrap_or_default();
            let what = DriverError(format!("{kernel} {grid:?}: {}", String::from_utf8_lossy(text)));
            self.state.keep(what);
        }
    }

    fn wait(&self) -> Result<(), DriverError> {
        self.state.waits.fetch_add(1, Ordering::Relaxed);
        self.failure().map_or(Ok(()), Err)
    }

    fn beside(&self) -> Emulated {
        self.clone()
    }
}

/// The memory of a launch, with what its arguments let the kernel do with it.
fn regions_of(args: &[Arg<'_, EmulatedMemory>]) -> Vec<Region> {
    let mut regions: Vec<Region> = Vec::new();
    for arg in args {
        let (memory, is_constant, is_written) = match arg {
            Arg::Memory(memory, _) => (memory, false, true),
            Arg::Read(memory, _) => (memory, false, false),
            Arg::Constant(memory, _) => (memory, true, false),
            Arg::Null | Arg::U32(_) | Arg::U64(_) | Arg::F32(_) => continue,
        };
        let first = memory.at.as_ptr().cast();
        match regions.iter_mut().find(|region| region.first == first) {
            Some(region) => {
                region.is_constant &= is_constant;
                region.is_written |= is_written;
            }
            None if memory.bytes == 0 => {}
            None => regions.push(Region { first, bytes: memory.bytes, is_constant, is_written }),
        }
    }
    regions
}
