//! A GPU against the reference device and plain loops, where there is one.
//!
//! `REFRAIN_TEST_GPU=1` says that there is one: then that it cannot be opened is a failure. `tools/gpu-check` carries these tests to such a machine.

mod attention;
mod attention_statistics;
mod matrices;

use std::sync::Arc;

use attention::{Case, causal};
use attention_statistics::{cases, ranges};
use matrices::{Kept, assert_invariant, assert_looked_up, assert_right, assert_unpacked_alike};
use refrain_kernels::{Activation, Device, Dtype, Precision, conformance};

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

#[test]
fn attention_on_a_gpu_is_right_at_the_sizes_of_models() {
    gpus().iter().for_each(|device| check_attention(&**device));
}

/// Head dimensions of the kernels on tensor cores.
const HEAD_DIMS: [usize; 5] = [64, 80, 96, 128, 256];

/// The rows of a question behind so many keys that they are shared out in pieces.
fn question() -> Vec<(u32, u32)> {
    (0..32).map(|row| (0, 6113 + row)).collect()
}

fn check_attention(device: &dyn Device) {
    // A prompt; windows; rows in no order with gaps between what they see; one row, and two of which one sees little.
    let ranges = [
        causal(230, 5, u32::MAX),
        causal(300, 3, 70),
        vec![(3, 9), (190, 260), (100, 131), (5, 20)],
        vec![(17, 1111)],
        vec![(0, 900), (880, 900)],
    ];
    for dtype in [Dtype::F16, Dtype::Bf16] {
        for d in HEAD_DIMS {
            for visible in &ranges {
                for group in [1, 3, 4, 7, 16] {
                    Case::new(dtype, d, 2 * group, 2, visible.clone()).assert_right(device);
                }
            }
            Case::new(dtype, d, 4, 1, question()).assert_right(device);
            let plain = Case::new(dtype, d, 6, 2, causal(130, 5, u32::MAX));
            Case { precision: Precision::F32, ..plain }.assert_right(device);
        }
    }
}

#[test]
fn statistics_of_attention_on_a_gpu_are_right_at_the_sizes_of_models() {
    gpus().iter().for_each(|device| check_statistics(&**device));
}

fn check_statistics(device: &dyn Device) {
    for case in ranges().iter().flat_map(|visible| cases(visible)) {
        case.assert_mass(device);
        case.assert_weights(device);
        case.assert_concat_mass(device);
    }
    cases(&[(6, 140)]).iter().for_each(|case| case.assert_weights_of_one_row(device));
    for dtype in [Dtype::F16, Dtype::Bf16] {
        for head_dim in HEAD_DIMS {
            let visible = question();
            attention_statistics::Case { dtype, head_dim, group: 4, kv_heads: 1, visible }
                .assert_mass(device);
        }
    }
}
