//! Measured peaks of a GPU, with which kernels are compared.

use std::time::Instant;

use refrain_kernels::Device;

use super::context::CudaDevice;
use crate::driver::{Arg, Driver, DriverError, Grid};

/// Threads of a block that multiplies.
const THREADS: u32 = 256;
/// Operations of a warp in a round of `peak_bf16`: eight products of 16 × 16 by 16 × 8.
const ROUND_OPERATIONS: f64 = 8.0 * 2.0 * 16.0 * 16.0 * 8.0;
/// Operations of a warp in a round of `peak_bf16_groups`: a quarter of four products of 64 × 16 by 16 × 256.
const GROUP_ROUND_OPERATIONS: f64 = 2.0 * 64.0 * 16.0 * 256.0;
/// Bytes of the tiles of `peak_bf16_groups`.
const TILES: u32 = (64 + 256) * 128;
/// Bits of a pair of `bf16` that are drawn: signs and fractions, so that elements are of ±1 up to ±2.
const DRAWN: u32 = 0x807f_807f;

/// The work of a measurement of peaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeakWork {
    /// Blocks that multiply.
    pub blocks: u32,
    /// Rounds of each.
    pub rounds: u32,
    /// Bytes that are copied at a time.
    pub bytes: usize,
    /// Repetitions, of which the fastest counts.
    pub runs: u32,
}

impl Default for PeakWork {
    /// More blocks than any GPU has room for, which multiply for as long as a long prefill takes, so that a GPU's limit of power counts, and more bytes than
    /// its caches hold.
    fn default() -> PeakWork {
        PeakWork { blocks: 4096, rounds: 8192, bytes: 1 << 30, runs: 20 }
    }
}

/// A GPU whose peaks can be measured.
pub trait Peaks: Device {
    /// Most operations per second of products of `bf16` summed in `f32`, by the instruction that kernels use: `mma.sync` with all operands in
    /// registers, or `wgmma` with those in shared memory on a Hopper.
    ///
    /// # Errors
    /// If memory is short, or a call of the driver fails.
    fn peak_bf16(&self, work: PeakWork) -> Result<f64, DriverError>;

    /// Most bytes per second that the GPU's memory moves in copies from one place to another: a copied byte is read and written, and
    /// counts twice.
    ///
    /// # Errors
    /// If memory is short, or a call of the driver fails.
    fn peak_memory(&self, work: PeakWork) -> Result<f64, DriverError>;

    /// Most bytes per second that come from pinned memory of the host.
    ///
    /// # Errors
    /// If memory is short, so much memory of the host cannot be pinned, or a call of the driver fails.
    fn peak_bus(&self, work: PeakWork) -> Result<f64, DriverError>;
}

impl<D: Driver> Peaks for CudaDevice<D> {
    fn peak_bf16(&self, work: PeakWork) -> Result<f64, DriverError> {
        let warps = f64::from(work.blocks) * f64::from(THREADS / 32);
        let sums = self.driver.alloc(work.blocks as usize * THREADS as usize * 4)?;
        let (kernel, shared, operations) = match self.driver.is_hopper() {
            true => ("peak_bf16_groups", TILES, GROUP_ROUND_OPERATIONS),
            false => ("peak_bf16", 0, ROUND_OPERATIONS),
        };
        let seconds = self.fastest(work.runs, || {
            let grid = Grid { blocks: [work.blocks, 1, 1], threads: THREADS, shared };
            let args = [Arg::Memory(&sums, 0), Arg::U32(work.rounds), Arg::U32(DRAWN)];
            self.driver.launch(kernel, grid, &args);
        })?;
        Ok(warps * f64::from(work.rounds) * operations / seconds)
    }

    fn peak_memory(&self, work: PeakWork) -> Result<f64, DriverError> {
        let [from, to] = [self.driver.alloc(work.bytes)?, self.driver.alloc(work.bytes)?];
        self.driver.zero(&from, 0, work.bytes);
        let seconds = self.fastest(work.runs, || self.driver.copy(&from, 0, &to, 0, work.bytes))?;
        Ok(2.0 * work.bytes as f64 / seconds)
    }

    fn peak_bus(&self, work: PeakWork) -> Result<f64, DriverError> {
        let bytes = work.bytes / 4;
        let to = self.driver.alloc(bytes)?;
        Ok(bytes as f64 / self.driver.pinned_write_seconds(&to, bytes, work.runs)?)
    }
}

impl<D: Driver> CudaDevice<D> {
    /// Least seconds of some runs, after one that does not count.
    fn fastest(&self, runs: u32, run: impl Fn()) -> Result<f64, DriverError> {
        let mut least = f64::INFINITY;
        for counted in 0..=runs {
            let start = Instant::now();
            run();
            self.driver.wait()?;
            if counted > 0 {
                least = least.min(start.elapsed().as_secs_f64());
            }
        }
        Ok(least)
    }
}
