//! Statistics of attention on tensor cores, emulated.
#![cfg(feature = "emulate")]

mod attention_statistics;

use attention_statistics::{Case, cases, ranges};
use refrain_cuda::{CudaDevice, Emulated};
use refrain_kernels::{Device, Dtype};

/// With asynchronous copies that land when they are waited for, and at once.
const SEEDS: [u64; 2] = [2, 3];

fn every_seed(f: impl Fn(&CudaDevice<Emulated>)) {
    SEEDS.into_iter().for_each(|seed| f(&CudaDevice::new(Emulated::new(seed), 1).unwrap()));
}

#[test]
fn mass_is_right() {
    for case in ranges().iter().flat_map(|visible| cases(visible)) {
        every_seed(|device| case.assert_mass(device));
    }
}

#[test]
fn weights_of_rows_and_of_columns_are_right() {
    for case in ranges().iter().flat_map(|visible| cases(visible)) {
        every_seed(|device| case.assert_weights(device));
    }
}

#[test]
fn one_rows_attention_comes_with_its_weights() {
    for case in cases(&[(6, 140)]) {
        every_seed(|device| case.assert_weights_of_one_row(device));
    }
}

#[test]
fn mass_of_concatenated_heads_is_right() {
    for case in ranges().iter().flat_map(|visible| cases(visible)) {
        every_seed(|device| case.assert_concat_mass(device));
    }
}

#[test]
fn statistics_of_large_groups_are_right() {
    let visible = vec![(9, 90), (0, 40), (30, 131)];
    let case = Case { dtype: Dtype::Bf16, head_dim: 128, group: 16, kv_heads: 1, visible };
    every_seed(|device| {
        case.assert_mass(device);
        case.assert_weights(device);
    });
}

#[test]
fn sums_of_many_keys_are_merged_of_pieces() {
    for (dtype, head_dim) in [(Dtype::F16, 64), (Dtype::Bf16, 64), (Dtype::Bf16, 256)] {
        // The second row sees nothing of most pieces, and the third nothing from the first slot on.
        let visible = vec![(17, 1111), (1090, 1111), (17, 30)];
        let case = Case { dtype, head_dim, group: 2, kv_heads: 1, visible };
        every_seed(|device| {
            case.run(device, |a, of| {
                let slots = 33..1111;
                let mut got = vec![7.0; slots.len()];
                let launches = device.driver().launches();
                device.attention_mass(a, slots.clone(), &mut got);
                assert_eq!(device.driver().launches() - launches, 4, "sums, their merging, rounding, mass");
                case.assert_close("mass", &got, &of.mass(a.scale, slots.start as u32, slots.clone()));
            });
        });
    }
}
