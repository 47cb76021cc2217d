//! A GPU against the reference device and plain loops, where there is one.
//!
//! `REFRAIN_TEST_GPU=1` says that there is one: then that it cannot be opened is a failure. `tools/gpu-check` carries these tests to such a machine.

mod matrices;

use std::sync::Arc;

use matrices::{Kept, assert_invariant, assert_looked_up, assert_right, assert_unpacked_alike};
use refrain_kernels::{Activation, Device, conformance};

/// The GPU; none if there is none and none need be there.
fn gpu() -> Option<Arc<dyn Device>> {
    match refrain_cuda::open(0, 0) {
        Ok(device) => {
            println!("on {}", device.name());
            Some(device)
        }
        Err(error) if std::env::var_os("REFRAIN_TEST_GPU").is_none() => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn every_call_on_a_gpu_computes_what_the_reference_device_does() {
    if let Some(device) = gpu() {
        conformance::check(&*device);
    }
}

#[test]
fn products_on_a_gpu_are_right_in_every_precision() {
    let Some(device) = gpu() else { return };
    let kept = [Kept::Bf16, Kept::Q8, Kept::Q4];
    let few = [(1, 33, 40), (1, 4100, 4096), (3, 70, 1100), (8, 9000, 1024), (16, 130, 200)];
    let many = [(17, 64, 64), (130, 150, 72), (131, 31, 450), (258, 4096, 576), (1026, 300, 130)];
    for size in few.into_iter().chain(many) {
        kept.iter().for_each(|kept| assert_right(&*device, *kept, size));
    }
    for kept in kept.into_iter().chain([Kept::F32]) {
        for size in [(140, 161, 328), (259, 4096, 1088)] {
            assert_invariant(&*device, kept, size);
        }
    }
    for (outputs, inputs) in [(70, 40), (33, 72), (9, 3), (2000, 4096)] {
        assert_looked_up(&*device, outputs, inputs);
    }
    for (rows, activation) in [(1, Activation::Silu), (130, Activation::GeluTanh), (260, Activation::Silu)] {
        for kept in [Kept::Q8, Kept::Q4] {
            assert_unpacked_alike(&*device, kept, rows, activation);
        }
    }
}
