//! NVIDIA GPUs as a device: kernels in CUDA C++ behind a seam, which CUDA's driver runs on a GPU and an emulator on the CPU.

mod driver;

pub use driver::{Arg, Driver, DriverError, Grid};
