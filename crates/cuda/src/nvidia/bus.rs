//! The speed of the bus: copies from pinned memory of the host.

use std::ffi::c_void;
use std::slice;
use std::time::Instant;

use cudarc::driver::result::{free_host, malloc_host, memcpy_htod_async};
use cudarc::driver::sys;

use super::call::Describe;
use super::stream::Stream;
use crate::driver::DriverError;

/// Pinned memory of the host.
struct Pinned(*mut c_void);

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: it was allocated by `malloc_host`; an error has no receiver.
        let _ = unsafe { free_host(self.0) };
    }
}

/// Least seconds of `runs` copies of `bytes` bytes to an address from which on there are as many, in a stream, whose context is current.
pub(super) fn write_seconds(
    stream: &Stream,
    to: sys::CUdeviceptr,
    bytes: usize,
    runs: u32,
) -> Result<f64, DriverError> {
    // SAFETY: the memory is written before it is read.
    let pinned = unsafe { malloc_host(bytes.max(1), sys::CU_MEMHOSTALLOC_PORTABLE) }
        .describe(&format!("pinning {bytes} bytes of the host"))?;
    let pinned = Pinned(pinned);
    // SAFETY: the memory is of as many bytes, and belongs to this function.
    unsafe { pinned.0.cast::<u8>().write_bytes(0, bytes) };
    // SAFETY: as above; the bytes have been written.
    let from = unsafe { slice::from_raw_parts(pinned.0.cast::<u8>(), bytes) };
    let mut least = f64::INFINITY;
    for _ in 0..runs {
        let start = Instant::now();
        // SAFETY: the bytes lie inside of the memory, and those of the host stay until the copy is waited for.
        let copied = unsafe { memcpy_htod_async(to, from, stream.raw()) };
        // The copy is waited for even if it failed: the pinned memory is freed behind it.
        let waited = stream.synchronize();
        copied.describe("copying to the GPU")?;
        waited?;
        least = least.min(start.elapsed().as_secs_f64());
    }
    Ok(least)
}
