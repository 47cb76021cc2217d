//! Attention by the kernels for Hopper, emulated.
#![cfg(feature = "emulate")]

mod attention;
#[path = "attention/emulated.rs"]
mod emulated;

use attention::{Case, causal};
use refrain_cuda::{CudaDevice, Emulated};
use refrain_kernels::conformance::random;
use refrain_kernels::{CachedAttention, Device, Dtype, Precision, download, upload};

/// Hopper, with copies and products each of which land when they are waited for or at once.
const SEEDS: [u64; 4] = [2, 3, 6, 7];
/// A seed of a GPU before Hopper.
const EARLIER: u64 = 0;

fn device(seed: u64) -> CudaDevice<Emulated> {
    CudaDevice::new(Emulated::new(seed), 1).unwrap()
}

fn every_type_size_and_seed(f: impl Fn(Dtype, usize, &CudaDevice<Emulated>)) {
    for dtype in [Dtype::F16, Dtype::Bf16] {
        for d in [64, 128] {
            SEEDS.into_iter().for_each(|seed| f(dtype, d, &device(seed)));
        }
    }
}

/// Ranges of all kinds: some begin late, some end early, row 77 alone sees the last slots, and none the ones before these.
fn ragged(rows: u32) -> Vec<(u32, u32)> {
    let range = |row: u32| match row {
        77 => (460, 495),
        _ => (row * 37 % 200, row * 37 % 200 + 1 + row * 13 % 150),
    };
    (0..rows).map(range).collect()
}

#[test]
fn hopper_attention_is_right_for_prompts_and_groups_of_every_size() {
    every_type_size_and_seed(|dtype, d, device| {
        // Blocks that end within a row's group, and more tiles than are under way at a time.
        Case::new(dtype, d, 3, 1, causal(431, 7, u32::MAX)).check(device);
        Case::new(dtype, d, 16, 2, causal(130, 5, u32::MAX)).check(device);
        Case::new(dtype, d, 2, 2, causal(150, 1, u32::MAX)).check(device);
    });
}

#[test]
fn hopper_attention_is_right_where_lanes_lag_behind_others() {
    // Copies that land when they are waited for, in many orders, and many tiles.
    for seed in (2..34).step_by(4) {
        Case::new(Dtype::F16, 64, 2, 1, causal(1200, 40, u32::MAX)).check_in_pieces(&device(seed));
    }
}

#[test]
fn hopper_attention_is_right_in_windows_in_any_order_and_over_gaps() {
    every_type_size_and_seed(|dtype, d, device| {
        Case::new(dtype, d, 2, 1, causal(300, 3, 70)).check(device);
        Case::new(dtype, d, 2, 1, ragged(90)).check(device);
        let mut backwards = causal(400, 4, 40);
        backwards.reverse();
        Case::new(dtype, d, 4, 2, backwards).check(device);
    });
}

#[test]
fn hopper_attention_of_pieces_is_right() {
    every_type_size_and_seed(|dtype, d, device| {
        // Two blocks and two pieces of each; the block of the last rows sees nothing of the first piece.
        let visible = (0..70).map(|row| if row < 32 { (0, 1100 + row) } else { (900 + row, 1130) });
        Case::new(dtype, d, 256 / d, 1, visible.collect()).check_in_pieces(device);
    });
}

/// Bits of output and log-sum-exps of `count` rows of a case from `first_row` on.
fn bits(case: &Case, device: &CudaDevice<Emulated>, first_row: usize, count: usize) -> [Vec<u32>; 2] {
    let Case { head_dim, heads, kv_heads, capacity, .. } = *case;
    let width = heads * head_dim;
    let q = upload(device, &random(case.visible.len() * width, 1));
    let (k, v) = (case.side(2), case.side(3));
    let (k, v) = (device.upload_kv(k.as_slice()), device.upload_kv(v.as_slice()));
    let a = CachedAttention {
        q: &q,
        first_row,
        k: &k,
        v: &v,
        heads,
        kv_heads,
        head_dim,
        capacity,
        visible: &case.visible[first_row..first_row + count],
        scale: 0.2,
        precision: Precision::Bf16,
    };
    let (mut out, mut lse) = (device.floats(q.len()), device.floats(0));
    device.attention(&a, &mut out, Some(&mut lse));
    let own = first_row..first_row + count;
    let (out, lse) = (download(device, &out), download(device, &lse));
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect();
    [bits(&out[own.start * width..own.end * width]), bits(&lse[own.start * heads..own.end * heads])]
}

#[test]
fn hopper_attention_of_a_row_has_the_bits_of_other_kernels_and_of_any_company() {
    every_type_size_and_seed(|dtype, d, hopper| {
        let mut visible = causal(230, 2, 190);
        // Rows that see nothing, one of them between others.
        (visible[3], visible[50]) = ((5, 5), (80, 80));
        let (heads, kv_heads, rows) = (4, 2, visible.len());
        let case = Case::new(dtype, d, heads, kv_heads, visible);
        let all = bits(&case, hopper, 0, rows);
        assert!(
            all == bits(&case, &device(EARLIER), 0, rows),
            "{dtype}, head_dim {d}: not those of mma.sync"
        );
        // So few rows that a group has 16 entries at most are summed in pieces of slots.
        for (first, count) in [(0, 65), (17, 90), (rows - 9, 9)] {
            let own = bits(&case, hopper, first, count);
            let [out, lse] = &all;
            let of = |x: &[u32], width: usize| x[first * width..(first + count) * width].to_vec();
            assert!(
                own == [of(out, heads * d), of(lse, heads)],
                "{dtype}, head_dim {d}: rows from {first} on"
            );
        }
    });
}
