//! Kernels of products, emulated, against plain loops in `f64`.
#![cfg(feature = "emulate")]

mod matrices;

use matrices::{
    BLOCK, Kept, Matrix, assert_invariant, assert_looked_up, assert_right, assert_unpacked_alike, bits,
    finished, layer_of,
};
use refrain_cuda::{CudaDevice, Emulated};
use refrain_kernels::{Activation, Device};

/// With asynchronous copies that land when they are waited for, and at once: before Hopper, and on it.
const SEEDS: [u64; 4] = [0, 1, 2, 3];

fn device(seed: u64) -> CudaDevice<Emulated> {
    CudaDevice::new(Emulated::new(seed), 1).unwrap()
}

#[test]
fn products_on_tensor_cores_are_right_at_ragged_sizes() {
    let sizes = [
        (1, 33, 40),
        (16, 130, 200),
        (17, 64, 64),
        (130, 150, 72),
        (131, 31, 450),
        (3, 70, 1100),
        // Several panels for each block, whose pieces are more than there are stages.
        (2, 300, 1100),
        (150, 470, 330),
        // Two of six tiles are left when all multiprocessors have had one, and fall into narrower ones.
        (200, 640, 72),
    ];
    let kept = [Kept::Bf16, Kept::Q8, Kept::Q4];
    for (seed, kept) in SEEDS.into_iter().flat_map(|seed| kept.map(|kept| (seed, kept))) {
        sizes.iter().for_each(|size| assert_right(&device(seed), kept, *size));
    }
}

#[test]
fn products_of_few_rows_are_right_where_lanes_lag_behind_others() {
    // Hopper, whose copies land at once. One step a panel, which only the first lane loads: the others wait for the stage alone.
    for seed in (3..4003).step_by(4) {
        assert_right(&device(seed), Kept::Bf16, (2, 300, 64));
    }
}

#[test]
fn a_row_of_a_product_has_the_same_bits_in_any_company() {
    let kept = [Kept::Bf16, Kept::F32, Kept::Q8, Kept::Q4];
    for (seed, kept) in [0, 2].into_iter().flat_map(|seed| kept.map(|kept| (seed, kept))) {
        assert_invariant(&device(seed), kept, (140, 161, 328));
    }
}

const LAYERS: [(u64, usize, Activation); 6] = [
    (0, 150, Activation::Silu),
    (1, 3, Activation::GeluTanh),
    (2, 3, Activation::Silu),
    (3, 3, Activation::GeluTanh),
    (2, 150, Activation::GeluTanh),
    (3, 150, Activation::Silu),
];

#[test]
fn a_layer_in_bf16_is_that_of_f32_but_for_rounding() {
    for (seed, rows, activation) in LAYERS {
        let layer = |kept| finished(&device(seed), rows, activation, &layer_of(kept));
        let (rounded, exact) = (layer(Kept::Bf16), layer(Kept::F32));
        let square = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>();
        let error =
            square(&mut rounded.iter().zip(&exact).map(|(a, b)| a - b)) / square(&mut exact.iter().copied());
        assert!(error.sqrt() < 1e-2, "{rows} rows, {activation}: relative error {:.1e}", error.sqrt());
    }
}

#[test]
fn a_layer_on_a_hopper_is_to_the_bit_that_of_other_gpus() {
    let sizes = [
        (3, Activation::Silu),
        (16, Activation::GeluTanh),
        // A tile, and behind it rows that are a product of few rows.
        (130, Activation::Silu),
        (150, Activation::Silu),
        (200, Activation::Silu),
        (260, Activation::GeluTanh),
    ];
    for (rows, activation) in sizes {
        for kept in [Kept::Bf16, Kept::Q8, Kept::Q4] {
            let layer = layer_of(kept);
            let [before, hopper] =
                [1, 3].map(|seed| bits(&finished(&device(seed), rows, activation, &layer)));
            assert_eq!(before, hopper, "{kept:?}, {rows} rows, {activation}");
        }
    }
}

#[test]
fn a_layer_of_blocks_is_to_the_bit_that_of_their_values_in_bf16() {
    for (seed, rows, activation) in LAYERS {
        for kept in [Kept::Q8, Kept::Q4] {
            assert_unpacked_alike(&device(seed), kept, rows, activation);
        }
    }
}

#[test]
fn rows_of_bf16_are_looked_up_and_scaled() {
    for (outputs, inputs) in [(70, 40), (33, 72), (5, 130), (9, 3)] {
        assert_looked_up(&device(2), outputs, inputs);
    }
    for kept in [Kept::F32, Kept::Q8, Kept::Q4] {
        let device = device(2);
        let (packed, mut x) = (Matrix::new(kept, 40, 64, 1).packed(&device, false), device.floats(7));
        assert!(!device.embed(&packed, &[1], 1.0, &mut x), "{kept:?}");
        assert_eq!(x.len(), 7);
    }
}

#[test]
fn a_matrix_takes_the_bytes_of_its_precision() {
    let (device, outputs, inputs) = (device(2), 64, 4096);
    let bytes = |kept| {
        let matrix = Matrix::new(kept, outputs, inputs, 1);
        matrix.packed(&device, false).bytes() - 4 * outputs
    };
    let of_block =
        [Kept::F32, Kept::Bf16, Kept::Q8, Kept::Q4].map(|kept| bytes(kept) * BLOCK / (outputs * inputs));
    assert_eq!(of_block, [128, 64, 34, 20]);
}
