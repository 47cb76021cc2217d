//! Memory of a driver, or the failure that there is none.

use refrain_kernels::DeviceFailure;

use crate::driver::Driver;

/// Memory of a driver, whose content is left open.
///
/// # Panics
/// With a [`DeviceFailure`] if there is not as much.
pub(super) fn alloc<D: Driver>(driver: &D, bytes: usize) -> D::Memory {
    driver.alloc(bytes).unwrap_or_else(|_| {
        let device = driver.name();
        match driver.failure() {
            Some(first) => DeviceFailure::Broken { device, reason: first.to_string() },
            None => DeviceFailure::OutOfMemory { device, bytes: bytes as u64, free: driver.memory().1 },
        }
        .unwind()
    })
}
