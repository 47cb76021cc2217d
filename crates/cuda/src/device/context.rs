//! The parts of a CUDA device.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

use refrain_kernels::{Cpu, IsaError};

use super::block::Block;
use super::uploads::Uploads;
use crate::driver::Driver;

/// Weights of norms in the GPU's memory, by their address and length in the host's, with what they were.
pub(super) type NormWeights<D> = Mutex<HashMap<(usize, usize), (Vec<f32>, Arc<Block<D>>)>>;

/// A GPU as a device.
///
/// Weights are kept in their precision, blocks of 8 and 4 bits among them; kernels unpack blocks to `bf16`. But for weights in `f32`, products round
/// activations to `bf16`, and all sum in `f32`. The bits of a row never depend on the rows beside it in a product: each element is one ascending sum.
pub struct CudaDevice<D: Driver> {
    pub(super) driver: D,
    /// The queue of the thread that computes; `driver` itself unless the device is one beside it.
    pub(super) home: D,
    pub(super) cpu: Cpu,
    pub(super) norm_weights: Arc<NormWeights<D>>,
    /// The table of Gumbel noise, once some was asked for.
    pub(super) noise: Arc<OnceLock<Arc<Block<D>>>>,
    pub(super) uploads: Arc<Mutex<Uploads<D>>>,
    /// Tables of rotations, of all queues.
    pub(super) tables: Arc<Mutex<Uploads<D>>>,
}

impl<D: Driver> CudaDevice<D> {
    /// The GPU behind `driver`, with `threads` threads of the host, as in [`Cpu::new`], for what is done there.
    ///
    /// # Errors
    /// If the environment variable `REFRAIN_CPU` names no instruction set, or one that this machine lacks.
    pub fn new(driver: D, threads: usize) -> Result<CudaDevice<D>, IsaError> {
        let (cpu, home) = (Cpu::new(threads)?, driver.clone());
        Ok(CudaDevice {
            driver,
            home,
            cpu,
            norm_weights: Arc::default(),
            noise: Arc::default(),
            uploads: Arc::default(),
            tables: Arc::default(),
        })
    }

    /// This device with a queue of its own, for a thread beside the one that computes.
    pub(super) fn to_beside(&self) -> CudaDevice<D> {
        CudaDevice {
            driver: self.driver.beside(),
            home: self.home.clone(),
            cpu: self.cpu.single_threaded(),
            norm_weights: Arc::default(),
            noise: Arc::default(),
            uploads: Arc::default(),
            tables: self.tables.clone(),
        }
    }

    /// The driver.
    pub fn driver(&self) -> &D {
        &self.driver
    }
}

impl<D: Driver> Clone for CudaDevice<D> {
    fn clone(&self) -> CudaDevice<D> {
        CudaDevice {
            driver: self.driver.clone(),
            home: self.home.clone(),
            cpu: self.cpu.clone(),
            norm_weights: self.norm_weights.clone(),
            noise: self.noise.clone(),
            uploads: self.uploads.clone(),
            tables: self.tables.clone(),
        }
    }
}

impl<D: Driver> std::fmt::Debug for CudaDevice<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.driver.name())
    }
}
