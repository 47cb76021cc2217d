//! A GPU against the reference device and plain loops, where there is one.
//!
//! `REFRAIN_TEST_GPU=1` says that there is one: then that it cannot be opened is a failure. `tools/gpu-check` carries these tests to such a machine.

mod matrices;

use std::sync::Arc;

use matrices::{Kept, assert_invariant, assert_looked_up, assert_right, assert_unpacked_alike};
use refrain_kernels::{Activation, Device, conformance};

/// The GPU, and the same with the kernels for those before Hopper; none if there is none and none need be there.
fn gpus() -> Vec<Arc<dyn Device>> {
    match refrain_cuda::open(0, 0) {
        Ok(device) => {
            println!("on {}", device.name());
            [Some(device), without_hopper()].into_iter().flatten().collect()
        }
        Err(error) if std::env::var_os("REFRAIN_TEST_GPU").is_none() => {
            println!("skipped: {error}");
            Vec::new()
        }
        Err(error) => panic!("{error}"),
    }
}

#[cfg(any(target_os = "linux", target_os = "windows"))]
fn without_hopper() -> Option<Arc<dyn Device>> {
    let gpu = refrain_cuda::Nvidia::open(0).ok()?.without_hopper();
    Some(Arc::new(refrain_cuda::CudaDevice::new(gpu, 0).expect("the GPU opens once more")))
}

#[cfg(not(any(target_os = "linux", target_os = "windows")))]
fn without_hopper() -> Option<Arc<dyn Device>> {
    None
}

#[test]
fn every_call_on_a_gpu_computes_what_the_reference_device_does() {
    gpus().iter().for_each(|device| conformance::check(&**device));
}

#[test]
fn products_on_a_gpu_are_right_in_every_precision() {
    gpus().iter().for_each(|device| check_products(&**device));
}

fn check_products(device: &dyn Device) {
    let kept = [Kept::Bf16, Kept::Q8, Kept::Q4];
    let few = [(1, 33, 40), (1, 4100, 4096), (3, 70, 1100), (8, 9000, 1024), (16, 130, 200)];
    let many = [(17, 64, 64), (130, 150, 72), (131, 31, 450), (258, 4096, 576), (1026, 300, 130)];
    for size in few.into_iter().chain(many) {
        kept.iter().for_each(|kept| assert_right(device, *kept, size));
    }
    for kept in kept.into_iter().chain([Kept::F32]) {
        for size in [(140, 161, 328), (259, 4096, 1088)] {
            assert_invariant(device, kept, size);
        }
    }
    for (outputs, inputs) in [(70, 40), (33, 72), (9, 3), (2000, 4096)] {
        assert_looked_up(device, outputs, inputs);
    }
    for (rows, activation) in [(1, Activation::Silu), (130, Activation::GeluTanh), (260, Activation::Silu)] {
        for kept in [Kept::Q8, Kept::Q4] {
            assert_unpacked_alike(device, kept, rows, activation);
        }
    }
}
