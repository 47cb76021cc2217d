//! Opens a GPU as a device.

use std::sync::Arc;

use refrain_kernels::Device;

use crate::driver::DriverError;

/// A GPU as a device, by its index, with `threads` threads of the host for what is done there: 0 for one a core.
///
/// # Errors
/// If there is no driver, no such GPU, or either is too old for the kernels; the error says which.
#[cfg(any(target_os = "linux", target_os = "windows"))]
pub fn open(index: usize, _threads: usize) -> Result<Arc<dyn Device>, DriverError> {
    let nvidia = crate::Nvidia::open(index)?;
    let name = crate::Driver::name(&nvidia);
    Err(DriverError(format!("{name} is there, but this build has no device for it")))
}

/// A GPU as a device.
///
/// # Errors
/// Always: NVIDIA has no driver for this system.
#[cfg(not(any(target_os = "linux", target_os = "windows")))]
pub fn open(_index: usize, _threads: usize) -> Result<Arc<dyn Device>, DriverError> {
    Err(DriverError(format!("NVIDIA has no driver for {}", std::env::consts::OS)))
}
