//! NVIDIA GPUs as a device: kernels in CUDA C++ behind a seam, which CUDA's driver runs on a GPU and an emulator on the CPU.
//!
//! [`CudaDevice`] is the device, over any [`Driver`]. With the feature `emulate`, `Emulated` is a driver that runs the sources of the kernels
//! on emulated threads, so that tests need no GPU.

mod device;
mod driver;
#[cfg(feature = "emulate")]
#[allow(unsafe_code)]
mod emulated;
#[cfg(any(target_os = "linux", target_os = "windows"))]
#[allow(unsafe_code)]
mod nvidia;
mod open;

pub use device::{CudaDevice, PeakWork, Peaks};
pub use driver::{Arg, Driver, DriverError, Grid};
#[cfg(feature = "emulate")]
pub use emulated::{Emulated, EmulatedMemory};
#[cfg(any(target_os = "linux", target_os = "windows"))]
pub use nvidia::{Nvidia, NvidiaDevice, NvidiaMemory};
pub use open::{open, open_measured};
