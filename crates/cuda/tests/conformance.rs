//! The emulated device against the reference device, in both ways of asynchronous copies.
#![cfg(feature = "emulate")]

use refrain_cuda::{CudaDevice, Emulated};
use refrain_kernels::conformance;

#[test]
fn every_call_computes_what_the_reference_device_does() {
    for seed in 0..4 {
        conformance::check(&CudaDevice::new(Emulated::new(seed), 2).unwrap());
    }
}
