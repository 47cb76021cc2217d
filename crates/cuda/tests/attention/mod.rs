//! Attention over ranges of slots, against plain loops in `f64`.

use refrain_kernels::conformance::random;
use refrain_kernels::{Buffer, CachedAttention, Device, Dtype, Precision, download, upload};

/// An attention of rows that see ranges of slots.
pub(crate) struct Case {
    pub(crate) dtype: Dtype,
    pub(crate) head_dim: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) capacity: usize,
    pub(crate) visible: Vec<(u32, u32)>,
    pub(crate) precision: Precision,
}

impl Case {
    /// A case that tensor cores compute.
    pub(crate) fn new(
        dtype: Dtype,
        head_dim: usize,
        heads: usize,
        kv_heads: usize,
        visible: Vec<(u32, u32)>,
    ) -> Case {
        let capacity = visible.iter().map(|seen| seen.1).max().unwrap() as usize + 3;
        Case { dtype, head_dim, heads, kv_heads, capacity, visible, precision: Precision::Bf16 }
    }

    /// Keys or values; slots that no row sees are no numbers.
    pub(crate) fn side(&self, seed: u32) -> Buffer {
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

    /// Asserts that output and log-sum-exps are those of loops in `f64`.
    pub(crate) fn assert_right(&self, device: &dyn Device) {
        let Case { head_dim: d, heads, kv_heads, capacity, .. } = *self;
        let (rows, group, scale) = (self.visible.len(), heads / kv_heads, 1.0 / (d as f32).sqrt());
        let q: Vec<f32> = random(rows * heads * d, 1).iter().map(|x| 2.0 * x).collect();
        let (k, v) = (self.side(2), self.side(3));
        let (device_q, device_k, device_v) =
            (upload(device, &q), device.upload_kv(k.as_slice()), device.upload_kv(v.as_slice()));
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
            precision: self.precision,
        };
        let (mut out, mut lse) = (device.floats(q.len()), device.floats(0));
        device.attention(&a, &mut out, Some(&mut lse));
        let (out, lse) = (download(device, &out), download(device, &lse));
        let (k, v) = (k.as_slice().floats(), v.as_slice().floats());
        let (mut error, mut norm, mut worst) = (0f64, 0f64, 0f64);
        for (row, (from, to)) in self.visible.iter().enumerate() {
            for head in 0..heads {
                let at = (row * heads + head) * d;
                let first = |slot: u32| (head / group * capacity + slot as usize) * d;
                let score = |slot| {
                    let products = q[at..at + d].iter().zip(&k[first(slot)..]);
                    products.map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>() * f64::from(scale)
                };
                let scores: Vec<f64> = (*from..*to).map(score).collect();
                let most = scores.iter().copied().fold(f64::MIN, f64::max);
                let total: f64 = scores.iter().map(|score| (score - most).exp()).sum();
                let mut expected = vec![0.0; d];
                for (slot, score) in (*from..*to).zip(&scores) {
                    let weight = (score - most).exp() / total;
                    let of_slot = expected.iter_mut().zip(&v[first(slot)..]);
                    of_slot.for_each(|(sum, v)| *sum += weight * f64::from(*v));
                }
                for (out, expected) in out[at..at + d].iter().zip(expected) {
                    error += (f64::from(*out) - expected).powi(2);
                    norm += expected.powi(2);
                }
                worst = worst.max((f64::from(lse[row * heads + head]) - most - total.ln()).abs());
            }
        }
        let relative = (error / norm).sqrt();
        let most = match (self.precision, self.dtype) {
            (Precision::F32, _) => 3e-5,
            (_, Dtype::Bf16) => 6e-3,
            _ => 8e-4,
        };
        let what = format!(
            "{}, {}, head_dim {d}, {heads} heads, {kv_heads} KV heads, {rows} rows",
            self.precision, self.dtype
        );
        assert!(relative < most && worst < 1e-2, "{what}: relative error {relative:.1e}, sums {worst:.1e}");
    }
}

/// Rows at every `step`th position and at the last ones, which see a window of what is before them.
pub(crate) fn causal(prompt: u32, step: u32, window: u32) -> Vec<(u32, u32)> {
    let rows = (0..prompt).filter(|p| p % step == 0 || p + 5 >= prompt);
    rows.map(|p| ((p + 1).saturating_sub(window), p + 1)).collect()
}
