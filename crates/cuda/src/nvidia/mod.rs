//! The driver of NVIDIA's GPUs, through its library, which is looked for at run time.
//!
//! Work is queued in streams, which wait for each other where they use the same memory (`order`). Memory is allocated and freed in their
//! order. No toolkit is needed, neither to build nor to run: the program carries its kernels in compiled form.

mod bus;
mod call;
mod context;
mod gpu;
mod kernels;
mod order;
mod registered;
mod role;
mod staging;
mod stream;
mod uses;

use std::ffi::c_int;
use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys;
use refrain_kernels::{HostBytes, HostSlice};

use crate::driver::{Arg, Driver, DriverError, Grid};
use call::{Describe, error};
use context::{Context, Shortage};
use gpu::{Gpu, Queue};
use registered::Registered;
use role::Role;
use stream::Stream;
use uses::Access;

pub use context::NvidiaDevice;
pub use gpu::NvidiaMemory;

/// The least version of CUDA that a driver has to support, as the driver counts: that of the compiler of the kernels.
const LEAST_CUDA: c_int = 13000;
/// The first driver that supports it.
const LEAST_DRIVER: u32 = 580;
/// The least compute capability that the kernels are compiled for.
const LEAST_COMPUTE_CAPABILITY: (u32, u32) = (8, 0);

/// An NVIDIA GPU.
#[derive(Clone, Debug)]
pub struct Nvidia {
    queue: Arc<Queue>,
    device: Arc<NvidiaDevice>,
}

impl Nvidia {
    /// Opens a GPU by its index among those that the driver shows.
    ///
    /// # Errors
    /// If there is no driver, no such GPU, or either is too old for the kernels; the error says which.
    pub fn open(index: usize) -> Result<Nvidia, DriverError> {
        if index >= count()? {
            return Err(no_such_gpu(index, &Nvidia::devices()?));
        }
        check_version(driver_version()?)?;
        // The others are not asked: one that has failed hides no other.
        let (handle, device) = NvidiaDevice::of(index)?;
        check_capability(&device)?;
        let gpu = Arc::new(Gpu::open(Context::open(handle)?, device.is_hopper())?);
        Ok(Nvidia { queue: Arc::new(Queue::new(&gpu, Role::Computing)?), device: Arc::new(device) })
    }

    /// This GPU with the kernels for those before Hopper, which tests run on a Hopper, too.
    #[must_use]
    pub fn without_hopper(self) -> Nvidia {
        let device = NvidiaDevice { compute_capability: LEAST_COMPUTE_CAPABILITY, ..(*self.device).clone() };
        Nvidia { device: Arc::new(device), ..self }
    }

    /// All GPUs that the driver shows.
    ///
    /// # Errors
    /// If there is no driver or no GPU.
    pub fn devices() -> Result<Vec<NvidiaDevice>, DriverError> {
        (0..count()?).map(|index| NvidiaDevice::of(index).map(|(_, device)| device)).collect()
    }

    /// Queues a piece of work that uses memory. If it fails, its error is kept.
    fn run(&self, memory: &[(&NvidiaMemory, Access)], work: impl FnOnce(&Stream) -> Result<(), DriverError>) {
        self.queue.gpu.context.run(|| self.queue.run(memory, work));
    }

    /// Waits for the queue. The first error of all is the one that is told.
    fn settle(&self) -> Result<(), DriverError> {
        let context = &self.queue.gpu.context;
        match context.bind().and_then(|_bound| self.queue.stream.synchronize()) {
            Ok(()) => context.check(),
            Err(error) => Err(context.keep(error)),
        }
    }
}

impl Driver for Nvidia {
    type Memory = NvidiaMemory;

    fn name(&self) -> String {
        self.device.name.clone()
    }

    fn is_hopper(&self) -> bool {
        self.device.is_hopper()
    }

    fn most_shared(&self) -> usize {
        self.queue.gpu.kernels.shared_limit as usize
    }

    fn multiprocessors(&self) -> usize {
        self.device.multiprocessors
    }

    fn memory(&self) -> (u64, u64) {
        // A GPU that does not tell is asked again by each allocation; one that has failed says so there.
        self.queue.gpu.context.memory().unwrap_or((self.device.memory, self.device.memory))
    }

    fn failure(&self) -> Option<DriverError> {
        self.queue.gpu.context.check().err()
    }

    fn alloc(&self, bytes: usize) -> Result<NvidiaMemory, DriverError> {
        self.queue.alloc(bytes, Shortage::Waits)
    }

    fn try_alloc(&self, bytes: usize) -> Option<NvidiaMemory> {
        self.queue.alloc(bytes, Shortage::Refuses).ok()
    }

    fn zero(&self, memory: &NvidiaMemory, at: usize, bytes: usize) {
        let address = memory.address(at, bytes);
        if bytes > 0 {
            self.run(&[(memory, Access::Write)], |stream| {
                // SAFETY: the bytes lie inside of the memory.
                unsafe { result::memset_d8_async(address, 0, bytes, stream.raw()) }.describe("zeroing")
            });
        }
    }

    fn write_with(
        &self,
        memory: &NvidiaMemory,
        at: usize,
        bytes: usize,
        unit: usize,
        fill: &mut dyn FnMut(usize, &mut [u8]),
    ) {
        let address = memory.address(at, bytes);
        let kernels = &self.queue.gpu.kernels;
        self.run(&[(memory, Access::Write)], |stream| stream.write(kernels, address, bytes, unit, fill));
    }

    fn pin(&self, bytes: &HostBytes) {
        bytes.pin_by(|bytes| Some(Box::new(Registered::new(&self.queue.gpu.context, bytes)?)));
    }

    fn write_pinned(&self, memory: &NvidiaMemory, parts: &[HostSlice<'_>]) {
        let bytes = parts.iter().map(|part| part.slice().as_bytes().len()).sum();
        let address = memory.address(0, bytes);
        if bytes > 0 {
            self.run(&[(memory, Access::Write)], |stream| stream.write_pinned(address, parts));
        }
    }

    fn pinned_write_seconds(
        &self,
        memory: &NvidiaMemory,
        bytes: usize,
        runs: u32,
    ) -> Result<f64, DriverError> {
        self.settle()?;
        let (to, mut least) = (memory.address(0, bytes), f64::INFINITY);
        self.queue.run(&[(memory, Access::Write)], |stream| {
            least = bus::write_seconds(stream, to, bytes, runs)?;
            Ok(())
        })?;
        Ok(least)
    }

    fn read(&self, memory: &NvidiaMemory, at: usize, to: &mut [u8]) -> Result<(), DriverError> {
        let address = memory.address(at, to.len());
        if !to.is_empty() {
            self.run(&[(memory, Access::Read)], |stream| {
                // SAFETY: the bytes lie inside of the memory; `to` is borrowed until the copy is waited for, below.
                unsafe { result::memcpy_dtoh_async(to, address, stream.raw()) }
                    .describe("copying from the GPU")
            });
        }
        self.settle()
    }

    fn copy(&self, from: &NvidiaMemory, from_at: usize, to: &NvidiaMemory, to_at: usize, bytes: usize) {
        let (from_address, to_address) = (from.address(from_at, bytes), to.address(to_at, bytes));
        if bytes > 0 {
            self.run(&[(from, Access::Read), (to, Access::Write)], |stream| {
                // SAFETY: both places lie inside of their memory.
                unsafe { result::memcpy_dtod_async(to_address, from_address, bytes, stream.raw()) }
                    .describe("copying on the GPU")
            });
        }
    }

    fn launch(&self, kernel: &'static str, grid: Grid, args: &[Arg<'_, NvidiaMemory>]) {
        let mut memory = Vec::with_capacity(args.len());
        let mut arguments = Vec::with_capacity(args.len());
        for arg in args {
            arguments.push(match *arg {
                Arg::Memory(used, at) => {
                    memory.push((used, Access::Write));
                    used.address(at, 0)
                }
                Arg::Read(used, at) | Arg::Constant(used, at) => {
                    memory.push((used, Access::Read));
                    used.address(at, 0)
                }
                Arg::Null => 0,
                Arg::U32(number) => number.into(),
                Arg::U64(number) => number,
                Arg::F32(number) => number.to_bits().into(),
            });
        }
        let kernels = &self.queue.gpu.kernels;
        self.run(&memory, |stream| kernels.launch(kernel, grid, stream.raw(), &mut arguments));
    }

    fn wait(&self) -> Result<(), DriverError> {
        self.settle()
    }

    fn beside(&self) -> Nvidia {
        // If all streams are taken, it shares this one: its calls then wait for more than they must.
        let queue = Queue::new(&self.queue.gpu, Role::Loading).map_or_else(|_| self.queue.clone(), Arc::new);
        Nvidia { queue, device: self.device.clone() }
    }
}

/// Starts the driver, and counts the GPUs that it shows; there is one at least.
fn count() -> Result<usize, DriverError> {
    // SAFETY: this loads the library, whose name is that of NVIDIA's driver, and runs what it does as it is loaded.
    if !unsafe { sys::is_culib_present() } {
        return Err(DriverError("NVIDIA's driver is not installed: there is no libcuda.so.1".to_owned()));
    }
    let none = || DriverError("there is no NVIDIA GPU, or CUDA_VISIBLE_DEVICES hides it".to_owned());
    result::init().map_err(|failed| match failed.0 {
        sys::CUresult::CUDA_ERROR_NO_DEVICE => none(),
        sys::CUresult::CUDA_ERROR_STUB_LIBRARY => DriverError(
            "the libcuda that was found is a stub of the CUDA toolkit, which has no driver: take the toolkit's folder of stubs out of \
             LD_LIBRARY_PATH, or put that of NVIDIA's driver before it"
                .to_owned(),
        ),
        _ => error("starting NVIDIA's driver", failed),
    })?;
    let count = result::device::get_count().describe("counting GPUs")?;
    usize::try_from(count).ok().filter(|count| *count > 0).ok_or_else(none)
}

/// The version of CUDA that the driver supports, as it counts: 13000 for 13.0.
fn driver_version() -> Result<c_int, DriverError> {
    let mut version = 0;
    // SAFETY: the version is written where it may be.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.describe("asking for the driver's version")?;
    Ok(version)
}

fn check_version(version: c_int) -> Result<(), DriverError> {
    if version >= LEAST_CUDA {
        return Ok(());
    }
    let shown = |version: c_int| format!("{}.{}", version / 1000, version % 1000 / 10);
    Err(DriverError(format!(
        "NVIDIA's driver supports CUDA {}, and the kernels need {}: driver {LEAST_DRIVER} or later",
        shown(version),
        shown(LEAST_CUDA)
    )))
}

fn check_capability(device: &NvidiaDevice) -> Result<(), DriverError> {
    if device.compute_capability >= LEAST_COMPUTE_CAPABILITY {
        return Ok(());
    }
    let shown = |(major, minor): (u32, u32)| format!("{major}.{minor}");
    Err(DriverError(format!(
        "GPU {}, {}, has compute capability {}, and the kernels need {} (Ampere) or later",
        device.index,
        device.name,
        shown(device.compute_capability),
        shown(LEAST_COMPUTE_CAPABILITY)
    )))
}

fn no_such_gpu(index: usize, devices: &[NvidiaDevice]) -> DriverError {
    let names: Vec<String> =
        devices.iter().map(|device| format!("{}: {}", device.index, device.name)).collect();
    DriverError(format!("there is no GPU {index}; the GPUs here are {}", names.join(", ")))
}

#[cfg(test)]
mod tests;
