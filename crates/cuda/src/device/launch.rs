//! Launches of kernels.

use refrain_kernels::{DeviceFailure, Dtype};

use super::alloc::alloc;
use super::context::CudaDevice;
use crate::driver::{Arg, Driver, DriverError, Grid};

/// Threads of a block of kernels whose threads are independent, at most.
const THREADS: usize = 256;

/// Bytes of the barriers of a kernel for Hopper, filled up to a multiple of the alignment of tiles.
pub(super) const BARRIERS: usize = 1024;

/// The name of a kernel that there is for each element type.
macro_rules! for_dtype {
    ($dtype:expr, $name:literal) => {
        match $dtype {
            refrain_kernels::Dtype::F32 => concat!($name, "_f32"),
            refrain_kernels::Dtype::F16 => concat!($name, "_f16"),
            refrain_kernels::Dtype::Bf16 => concat!($name, "_bf16"),
        }
    };
}

/// The name of a kernel that moves elements of 16 or 32 bits.
macro_rules! for_size {
    ($dtype:expr, $name:literal) => {
        if $dtype.size() == 2 { concat!($name, "_16") } else { concat!($name, "_32") }
    };
}

pub(super) use {for_dtype, for_size};

/// A size as kernels take it.
///
/// # Panics
/// If it is of more than 32 bits.
pub(super) fn size<M>(x: usize) -> Arg<'static, M> {
    Arg::U32(narrow(x))
}

pub(super) fn narrow(x: usize) -> u32 {
    u32::try_from(x).unwrap_or_else(|_| panic!("a size of {x} is too large for a kernel"))
}

impl<D: Driver> CudaDevice<D> {
    /// Runs a kernel of a thread for each of `count` elements.
    pub(super) fn launch_each(&self, kernel: &'static str, count: usize, args: &[Arg<'_, D::Memory>]) {
        let threads = count.next_multiple_of(32).min(THREADS);
        self.launch(kernel, [count.div_ceil(THREADS), 1, 1], narrow(threads), 0, args);
    }

    /// Runs a kernel, unless the grid is empty. `shared` counts bytes of shared memory of a block.
    pub(super) fn launch(
        &self,
        kernel: &'static str,
        blocks: [usize; 3],
        threads: u32,
        shared: usize,
        args: &[Arg<'_, D::Memory>],
    ) {
        if blocks.contains(&0) {
            return;
        }
        let grid = Grid { blocks: blocks.map(narrow), threads, shared: narrow(shared) };
        self.driver.launch(kernel, grid, args);
    }

    /// Memory, whose content is left open.
    ///
    /// # Panics
    /// With a [`DeviceFailure`] if there is not as much.
    pub(super) fn alloc(&self, bytes: usize) -> D::Memory {
        // Uploads that are kept make room.
        self.driver.alloc(bytes).unwrap_or_else(|_| {
            self.clear_uploads();
            alloc(&self.driver, bytes)
        })
    }

    /// The failure of a call, which was doing `what`.
    pub(super) fn broken(&self, what: &str, error: &DriverError) -> DeviceFailure {
        DeviceFailure::Broken { device: self.driver.name(), reason: format!("{what}: {error}") }
    }
}

/// Asserts that rows of `width` lie inside of a tensor of `len` elements.
pub(super) fn assert_rows(rows: &[u32], width: usize, len: usize) {
    assert!(rows.iter().all(|row| (*row as usize + 1) * width <= len), "rows lie inside of the tensor");
}

/// Asserts that two types of keys and values are one.
pub(super) fn assert_one_type(a: Dtype, b: Dtype) {
    assert_eq!(a, b, "keys and values of one call are of one type");
}
