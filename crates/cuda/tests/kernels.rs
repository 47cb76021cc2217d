//! Kernels of attention, emulated, against plain loops in `f64`.
#![cfg(feature = "emulate")]

mod attention;
#[path = "attention/emulated.rs"]
mod emulated;

use attention::{Case, causal};
use refrain_cuda::{CudaDevice, Emulated};
use refrain_kernels::conformance::{random, stored};
use refrain_kernels::{
    CachedAttention, Device, Dtype, Floats, GumbelNoise, KvBuffer, Precision, download, upload,
};

/// With asynchronous copies that land when they are waited for, and at once; on GPUs before Hopper, and on Hopper.
const SEEDS: [u64; 4] = [0, 1, 2, 3];

fn device(seed: u64) -> CudaDevice<Emulated> {
    CudaDevice::new(Emulated::new(seed), 1).unwrap()
}

// Attention.

fn every_type_and_seed(f: impl Fn(Dtype, &CudaDevice<Emulated>)) {
    for dtype in [Dtype::F16, Dtype::Bf16] {
        SEEDS.into_iter().for_each(|seed| f(dtype, &device(seed)));
    }
}

#[test]
fn tensor_core_attention_is_right_at_every_head_dimension() {
    every_type_and_seed(|dtype, device| {
        for d in [64, 80, 96, 128, 256] {
            Case::new(dtype, d, 6, 2, causal(230, 5, u32::MAX)).check(device);
        }
    });
}

#[test]
fn tensor_core_attention_is_right_in_groups_of_every_size() {
    every_type_and_seed(|dtype, device| {
        for group in 1..=8 {
            Case::new(dtype, 64, 2 * group, 2, causal(100, 7, u32::MAX)).check(device);
        }
        Case::new(dtype, 128, 16, 1, causal(40, 9, u32::MAX)).check(device);
    });
}

#[test]
fn tensor_core_attention_is_right_in_windows_and_in_any_order() {
    every_type_and_seed(|dtype, device| {
        Case::new(dtype, 64, 2, 1, causal(300, 3, 70)).check(device);
        let mut backwards = causal(150, 4, 40);
        backwards.reverse();
        Case::new(dtype, 80, 3, 1, backwards).check(device);
        Case::new(dtype, 256, 4, 1, causal(100, 9, 40)).check(device);
        // Slots between that no row sees.
        Case::new(dtype, 64, 4, 2, vec![(3, 9), (190, 260), (100, 131), (5, 20)]).check_in_pieces(device);
    });
}

#[test]
fn tensor_core_attention_of_few_rows_is_merged_of_pieces() {
    every_type_and_seed(|dtype, device| {
        Case::new(dtype, 64, 4, 2, vec![(17, 1111)]).check_in_pieces(device);
        // The second row sees nothing of most pieces.
        Case::new(dtype, 128, 2, 1, vec![(0, 900), (880, 900)]).check_in_pieces(device);
        Case::new(dtype, 128, 16, 1, vec![(17, 400)]).check_in_pieces(device);
    });
}

#[test]
fn tensor_core_attention_of_many_rows_is_merged_of_pieces() {
    // Three pieces, of which some rows see one or two. Hopper has a kernel of its own for 64 and 128.
    for (dtype, seed) in [(Dtype::F16, 0), (Dtype::Bf16, 1)] {
        for d in [64, 80, 96, 128, 256] {
            let visible = (0..20).map(|row| (33 * row, 781 + row)).collect();
            Case::new(dtype, d, 2, 1, visible).check_in_pieces(&device(seed));
        }
    }
}

#[test]
fn plain_attention_over_caches_of_16_bits_is_right_at_every_head_dimension() {
    for dtype in [Dtype::F16, Dtype::Bf16] {
        for d in [64, 80, 96, 128, 256] {
            let case = Case::new(dtype, d, 3, 1, causal(40, 9, u32::MAX));
            Case { precision: Precision::F32, ..case }.assert_right(&device(2));
        }
    }
}

#[test]
fn attention_of_few_rows_does_not_depend_on_the_rows_beside_one() {
    every_type_and_seed(|dtype, device| {
        // The last row sees nothing, and the others begin and end in different pieces.
        let visible = [(17, 700), (0, 130), (300, 301), (512, 512)];
        for d in [64, 80, 96, 128, 256] {
            let (heads, kv_heads) = (8, 2);
            let case = Case::new(dtype, d, heads, kv_heads, visible.to_vec());
            let capacity = case.capacity;
            let side = |seed| device.upload_kv(case.side(seed).as_slice());
            let (k, v, q) = (side(1), side(2), upload(device, &random(4 * heads * d, 3)));
            let attend = |row: usize, count: usize| {
                let a = CachedAttention {
                    q: &q,
                    first_row: row,
                    k: &k,
                    v: &v,
                    heads,
                    kv_heads,
                    head_dim: d,
                    capacity,
                    visible: &visible[row..row + count],
                    scale: 1.0 / (d as f32).sqrt(),
                    precision: Precision::Bf16,
                };
                let (mut out, mut lse) = (device.floats(q.len()), device.floats(0));
                device.attention(&a, &mut out, Some(&mut lse));
                let (out, lse) = (download(device, &out), download(device, &lse));
                let own = row * heads..(row + count) * heads;
                let own = [&out[own.start * d..own.end * d], &lse[own]];
                own.map(|x| x.iter().map(|x| x.to_bits()).collect::<Vec<u32>>())
            };
            let [all, all_lse] = attend(0, 4);
            for row in 0..4 {
                let [out, lse] = attend(row, 1);
                assert_eq!(
                    out,
                    all[row * heads * d..(row + 1) * heads * d],
                    "{dtype}, head_dim {d}, row {row}"
                );
                assert_eq!(lse, all_lse[row * heads..(row + 1) * heads]);
            }
            assert!(all[3 * heads * d..].iter().all(|x| *x == 0));
            assert!(all_lse[3 * heads..].iter().all(|x| f32::from_bits(*x) == f32::NEG_INFINITY));
        }
    });
}

#[test]
fn plain_attention_of_a_row_does_not_depend_on_its_company() {
    let (heads, kv_heads, d, rows, capacity) = (6, 2, 48, 23, 130);
    for dtype in [Dtype::F32, Dtype::F16] {
        let device = device(2);
        let side = |seed| device.upload_kv(stored(dtype, kv_heads * capacity * d, seed).as_slice());
        let (k, v, q) = (side(1), side(2), upload(&device, &random(rows * heads * d, 3)));
        let visible: Vec<(u32, u32)> = (0..rows as u32).map(|row| (row % 7 * 9, 80 + row)).collect();
        let attend = |first_row: usize, count: usize| {
            let visible = &visible[first_row..first_row + count];
            let a = problem(&q, (&k, &v), (heads, kv_heads, d), capacity, visible, first_row);
            let (mut out, mut lse) = (device.floats(q.len()), device.floats(0));
            device.attention(&a, &mut out, Some(&mut lse));
            let width = heads * d;
            let (out, lse) = (download(&device, &out), download(&device, &lse));
            let own = first_row..first_row + count;
            let (out, lse) =
                (&out[own.start * width..own.end * width], &lse[own.start * heads..own.end * heads]);
            [out, lse].map(|x| x.iter().map(|x| x.to_bits()).collect::<Vec<u32>>())
        };
        let all = attend(0, rows);
        for row in [0, 4, 5, rows - 1] {
            let [out, lse] = attend(row, 1);
            assert_eq!(out, all[0][row * heads * d..(row + 1) * heads * d]);
            assert_eq!(lse, all[1][row * heads..(row + 1) * heads]);
        }
    }
}

fn problem<'a>(
    q: &'a Floats,
    (k, v): (&'a KvBuffer, &'a KvBuffer),
    (heads, kv_heads, head_dim): (usize, usize, usize),
    capacity: usize,
    visible: &'a [(u32, u32)],
    first_row: usize,
) -> CachedAttention<'a> {
    let precision = Precision::F32;
    CachedAttention {
        q,
        first_row,
        k,
        v,
        heads,
        kv_heads,
        head_dim,
        capacity,
        visible,
        scale: 0.3,
        precision,
    }
}

// Noise.

#[test]
fn noise_is_that_of_the_cpu() {
    let (heads, kv_heads, d, capacity, rows) = (4, 2, 16, 90, 3);
    let device = device(2);
    // Queries of zero leave the noise alone: weights are softmax(g / τ).
    let q = upload(&device, &vec![0.0; rows * heads * d]);
    let side = |seed| device.upload_kv(stored(Dtype::F32, kv_heads * capacity * d, seed).as_slice());
    let (k, v) = (side(1), side(2));
    let visible: Vec<(u32, u32)> = (0..rows as u32).map(|row| (row, 80 + row)).collect();
    let a = problem(&q, (&k, &v), (heads, kv_heads, d), capacity, &visible, 0);
    let query_positions: Vec<u32> = (0..rows as u32).map(|row| 4_000_000_000 + row).collect();
    let key_positions: Vec<u32> =
        (0..(kv_heads * capacity) as u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
    let (seed, temperature) = (Some(0xfedc_ba98_7654_3210), 0.8);
    for key_positions in [Some(&key_positions[..]), None] {
        let noise = GumbelNoise { seed, temperature, query_positions: &query_positions, key_positions };
        let mut sums = vec![0.0; kv_heads * capacity];
        device.noisy_attention_mass(&a, 0..capacity, &noise, &mut sums);
        let mut expected = vec![0f64; sums.len()];
        for (row, (from, to)) in visible.iter().enumerate() {
            for head in 0..heads {
                let g = head / (heads / kv_heads);
                let weight = |slot: u32| {
                    let factor = noise.weight(head, row, (g, slot as usize), capacity).unwrap();
                    f64::from(factor).powf(1.0 / f64::from(temperature))
                };
                let total: f64 = (*from..*to).map(weight).sum();
                (*from..*to).for_each(|slot| expected[g * capacity + slot as usize] += weight(slot) / total);
            }
        }
        for (got, expected) in sums.iter().zip(expected) {
            assert!((f64::from(*got) - expected).abs() < 1e-5, "{got} and not {expected}");
        }
    }
}
