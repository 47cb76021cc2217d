//! Opens a GPU as a device.

use std::sync::Arc;

use refrain_kernels::Device;

use crate::driver::DriverError;
use crate::{CudaDevice, Driver, Peaks};

/// A GPU as a device, by its index, with `threads` threads of the host for what is done there: 0 for one a core.
///
/// With the feature `emulate` and the environment variable `REFRAIN_EMULATED_GPU`, a seed, the GPU is one of emulated threads.
///
/// # Errors
/// If there is no driver, no such GPU, or either is too old for the kernels; the error says which.
pub fn open(index: usize, threads: usize) -> Result<Arc<dyn Device>, DriverError> {
    Ok(open_measured(index, threads)?)
}

/// A GPU as [`open`] gives it, to be measured.
///
/// # Errors
/// If there is no such GPU, or it cannot be used: those of [`open`].
pub fn open_measured(index: usize, threads: usize) -> Result<Arc<dyn Peaks>, DriverError> {
    #[cfg(feature = "emulate")]
    if let Some(seed) = std::env::var_os("REFRAIN_EMULATED_GPU") {
        let seed = seed.to_str().and_then(|seed| seed.parse().ok());
        let seed = seed.ok_or_else(|| DriverError("REFRAIN_EMULATED_GPU is no seed, a number".to_owned()))?;
        return device(crate::Emulated::new(seed), threads);
    }
    gpu(index, threads)
}

#[cfg(any(target_os = "linux", target_os = "windows"))]
fn gpu(index: usize, threads: usize) -> Result<Arc<dyn Peaks>, DriverError> {
    device(crate::Nvidia::open(index)?, threads)
}

#[cfg(not(any(target_os = "linux", target_os = "windows")))]
fn gpu(_index: usize, _threads: usize) -> Result<Arc<dyn Peaks>, DriverError> {
    Err(DriverError(format!("NVIDIA has no driver for {}", std::env::consts::OS)))
}

#[cfg_attr(not(any(feature = "emulate", target_os = "linux", target_os = "windows")), expect(dead_code))]
fn device<D: Driver>(driver: D, threads: usize) -> Result<Arc<dyn Peaks>, DriverError> {
    let device = CudaDevice::new(driver, threads).map_err(|error| DriverError(error.to_string()))?;
    Ok(Arc::new(device))
}
