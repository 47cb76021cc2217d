//! Opens a GPU as a device.

use std::sync::Arc;

use refrain_kernels::Device;

use crate::driver::DriverError;

/// A GPU as a device, by its index, with `threads` threads of the host for what is done there: 0 for one a core.
///
/// # Errors
/// If there is no driver, no such GPU, or either is too old for the kernels; the error says which.
#[cfg(any(target_os = "linux", target_os = "windows"))]
pub fn open(index: usize, threads: usize) -> Result<Arc<dyn Device>, DriverError> {
    let device = crate::CudaDevice::new(crate::Nvidia::open(index)?, threads);
    Ok(Arc::new(device.map_err(|error| DriverError(error.to_string()))?))
}

/// A GPU as a device.
///
/// # Errors
/// Always: NVIDIA has no driver for this system.
#[cfg(not(any(target_os = "linux", target_os = "windows")))]
pub fn open(_index: usize, _threads: usize) -> Result<Arc<dyn Device>, DriverError> {
    Err(DriverError(format!("NVIDIA has no driver for {}", std::env::consts::OS)))
}
