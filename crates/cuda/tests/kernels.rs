//! Kernels of attention, emulated, against plain loops in `f64`.
#![cfg(feature = "emulate")]

use refrain_cuda::{CudaDevice, Emulated};
use refrain_kernels::conformance::{random, stored};
use refrain_kernels::{
    Buffer, CachedAttention, Device, Dtype, Floats, GumbelNoise, KvBuffer, Precision, download, upload,
    upload_kv,
};

/// With asynchronous copies that land when they are waited for, and at once.
const SEEDS: [u64; 2] = [2, 3];

fn device(seed: u64) -> CudaDevice<Emulated> {
    CudaDevice::new(Emulated::new(seed), 1).unwrap()
}

// Attention.

struct Case {
    dtype: Dtype,
    head_dim: usize,
    heads: usize,
    kv_heads: usize,
    capacity: usize,
    visible: Vec<(u32, u32)>,
}

impl Case {
    fn new(dtype: Dtype, head_dim: usize, heads: usize, kv_heads: usize, visible: Vec<(u32, u32)>) -> Case {
        let capacity = visible.iter().map(|seen| seen.1).max().unwrap() as usize + 3;
        Case { dtype, head_dim, heads, kv_heads, capacity, visible }
    }

    /// Keys or values; slots that no row sees are no numbers.
    fn side(&self, seed: u32) -> Buffer {
        let mut values = random(self.kv_heads * self.capacity * self.head_dim, seed);
        for (i, x) in values.iter_mut().enumerate() {
            let slot = (i / self.head_dim % self.capacity) as u32;
            if !self.visible.iter().any(|(from, to)| (*from..*to).contains(&slot)) {
                *x = f32::NAN;
            }
        }
        let mut side = Buffer::zeros(self.dtype, values.len());
        side.write_f32(0, &values);
        side
    }

    /// Compares output and log-sum-exps with loops in `f64`.
    fn check(&self, device: &CudaDevice<Emulated>) {
        let Case { head_dim: d, heads, kv_heads, capacity, .. } = *self;
        let (rows, group, scale) = (self.visible.len(), heads / kv_heads, 1.0 / (d as f32).sqrt());
        let q: Vec<f32> = random(rows * heads * d, 1).iter().map(|x| 2.0 * x).collect();
        let (k, v) = (self.side(2), self.side(3));
        let (device_q, device_k, device_v) =
            (upload(device, &q), upload_kv(device, k.as_slice()), upload_kv(device, v.as_slice()));
        let a = CachedAttention {
            q: &device_q,
            first_row: 0,
            k: &device_k,
            v: &device_v,
            heads,
            kv_heads,
            head_dim: d,
            capacity,
            visible: &self.visible,
            scale,
            precision: Precision::Bf16,
        };
        let (mut out, mut lse) = (device.floats(q.len()), device.floats(0));
        let launches = device.driver().launches();
        device.attention(&a, &mut out, Some(&mut lse));
        // One kernel, or one and the merging of pieces: no plain one, which begins with the sums.
        assert!(device.driver().launches() - launches <= 2);
        let (out, lse, k, v) = (download(device, &out), download(device, &lse), k.as_slice(), v.as_slice());
        let (mut error, mut norm, mut worst) = (0f64, 0f64, 0f64);
        for (row, (from, to)) in self.visible.iter().enumerate() {
            for head in 0..heads {
                let at = (row * heads + head) * d;
                let element = |slot: u32, i: usize| (head / group * capacity + slot as usize) * d + i;
                let score = |slot| {
                    let products = (0..d).map(|i| f64::from(q[at + i]) * f64::from(k.get(element(slot, i))));
                    products.sum::<f64>() * f64::from(scale)
                };
                let scores: Vec<f64> = (*from..*to).map(score).collect();
                let most = scores.iter().copied().fold(f64::MIN, f64::max);
                let total: f64 = scores.iter().map(|score| (score - most).exp()).sum();
                for i in 0..d {
                    let values = (*from..*to).zip(&scores).map(|(slot, score)| {
                        (score - most).exp() / total * f64::from(v.get(element(slot, i)))
                    });
                    let expected: f64 = values.sum();
                    error += (f64::from(out[at + i]) - expected).powi(2);
                    norm += expected.powi(2);
                }
                worst = worst.max((f64::from(lse[row * heads + head]) - most - total.ln()).abs());
            }
        }
        let relative = (error / norm).sqrt();
        let most = if self.dtype == Dtype::Bf16 { 6e-3 } else { 8e-4 };
        let what = format!("{}, head_dim {d}, {heads} heads, {kv_heads} KV heads, {rows} rows", self.dtype);
        assert!(relative < most && worst < 1e-2, "{what}: relative error {relative:.1e}, sums {worst:.1e}");
    }
}

/// Rows at every `step`th position and at the last ones, which see a window of what is before them.
fn causal(prompt: u32, step: u32, window: u32) -> Vec<(u32, u32)> {
    let rows = (0..prompt).filter(|p| p % step == 0 || p + 5 >= prompt);
    rows.map(|p| ((p + 1).saturating_sub(window), p + 1)).collect()
}

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
    });
}

#[test]
fn tensor_core_attention_is_right_in_windows_and_in_any_order() {
    every_type_and_seed(|dtype, device| {
        Case::new(dtype, 64, 2, 1, causal(300, 3, 70)).check(device);
        let mut backwards = causal(150, 4, 40);
        backwards.reverse();
        Case::new(dtype, 80, 3, 1, backwards).check(device);
        // Slots between that no row sees.
        Case::new(dtype, 64, 4, 2, vec![(3, 9), (190, 260), (100, 131), (5, 20)]).check(device);
    });
}

#[test]
fn tensor_core_attention_of_few_rows_is_merged_of_pieces() {
    every_type_and_seed(|dtype, device| {
        Case::new(dtype, 64, 4, 2, vec![(17, 1111)]).check(device);
        // The second row sees nothing of most pieces.
        Case::new(dtype, 128, 2, 1, vec![(0, 900), (880, 900)]).check(device);
    });
}

#[test]
fn plain_attention_of_a_row_does_not_depend_on_its_company() {
    let (heads, kv_heads, d, rows, capacity) = (6, 2, 48, 23, 130);
    for dtype in [Dtype::F32, Dtype::F16] {
        let device = device(2);
        let side = |seed| upload_kv(&device, stored(dtype, kv_heads * capacity * d, seed).as_slice());
        let (k, v, q) = (side(1), side(2), upload(&device, &random(rows * heads * d, 3)));
        let visible: Vec<(u32, u32)> = (0..rows as u32).map(|row| (row % 7 * 9, 80 + row)).collect();
        let attend = |first_row: usize, count: usize| {
            let visible = &visible[first_row..first_row + count];
            let a = attention(&q, (&k, &v), (heads, kv_heads, d), capacity, visible, first_row);
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

fn attention<'a>(
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
    let side = |seed| upload_kv(&device, stored(Dtype::F32, kv_heads * capacity * d, seed).as_slice());
    let (k, v) = (side(1), side(2));
    let visible: Vec<(u32, u32)> = (0..rows as u32).map(|row| (row, 80 + row)).collect();
    let a = attention(&q, (&k, &v), (heads, kv_heads, d), capacity, &visible, 0);
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
