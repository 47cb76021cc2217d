//! Statistics of attention on tensor cores, against plain loops in `f64`.

use std::ops::Range;

use refrain_kernels::conformance::random;
use refrain_kernels::{Buffer, CachedAttention, Device, Dtype, Precision, WeightAggregation, upload};

/// Rows of queries before those that attend.
const BEFORE: usize = 1;

/// An attention of rows that see ranges of slots.
pub(crate) struct Case {
    pub(crate) dtype: Dtype,
    pub(crate) head_dim: usize,
    pub(crate) group: usize,
    pub(crate) kv_heads: usize,
    pub(crate) visible: Vec<(u32, u32)>,
}

/// A case's operands in the host's memory, and what is expected of them.
pub(crate) struct Operands<'c> {
    case: &'c Case,
    capacity: usize,
    q: Vec<f32>,
    k: Buffer,
}

impl Case {
    fn heads(&self) -> usize {
        self.group * self.kv_heads
    }

    /// Keys that no row sees are no numbers.
    fn operands(&self) -> Operands<'_> {
        let capacity = self.visible.iter().map(|seen| seen.1).max().unwrap() as usize + 3;
        let mut keys = random(self.kv_heads * capacity * self.head_dim, 6);
        for (i, x) in keys.iter_mut().enumerate() {
            let slot = (i / self.head_dim % capacity) as u32;
            if !self.visible.iter().any(|(from, to)| (*from..*to).contains(&slot)) {
                *x = f32::NAN;
            }
        }
        let mut k = Buffer::zeros(self.dtype, keys.len());
        k.write_f32(0, &keys);
        let q = random((self.visible.len() + BEFORE) * self.heads() * self.head_dim, 5);
        Operands { case: self, capacity, q, k }
    }

    /// Runs `f` with the attention on a device.
    pub(crate) fn run(&self, device: &dyn Device, f: impl Fn(&CachedAttention<'_>, &Operands<'_>)) {
        let of = self.operands();
        let (q, k) = (upload(device, &of.q), device.upload_kv(of.k.as_slice()));
        let a = CachedAttention {
            q: &q,
            first_row: BEFORE,
            k: &k,
            v: &k,
            heads: self.heads(),
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            capacity: of.capacity,
            visible: &self.visible,
            scale: 2.0 / (self.head_dim as f32).sqrt(),
            precision: Precision::Bf16,
        };
        f(&a, &of);
    }

    pub(crate) fn assert_close(&self, what: &str, got: &[f32], expected: &[f64]) {
        assert_eq!(got.len(), expected.len());
        let most = if self.dtype == Dtype::Bf16 { 2e-2 } else { 3e-3 };
        for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
            let close = (f64::from(*got) - expected).abs() < most * expected.max(0.05);
            let Case { dtype, head_dim, group, .. } = self;
            assert!(
                close,
                "{what} {i}, {dtype}, head_dim {head_dim}, groups of {group}: {got} and not {expected}"
            );
        }
    }

    /// Asserts that the mass of slots is right: from log-sum-exps, and from sums over what rows see from the first of the slots on.
    pub(crate) fn assert_mass(&self, device: &dyn Device) {
        self.run(device, |a, of| {
            let slots = 37..of.capacity - 29;
            let (mut out, mut lse) = (device.floats(a.q.len()), device.floats(0));
            device.attention(a, &mut out, Some(&mut lse));
            let mut got = [vec![7.0; a.kv_heads * slots.len()], vec![7.0; a.kv_heads * slots.len()]];
            device.attention_mass_from_lse(a, &lse, slots.clone(), &mut got[0]);
            device.attention_mass(a, slots.clone(), &mut got[1]);
            for (got, first) in got.iter().zip([0, slots.start as u32]) {
                self.assert_close("mass", got, &of.mass(a.scale, first, slots.clone()));
            }
        });
    }

    /// Asserts that weights of rows, of columns, and aggregated ones are right.
    pub(crate) fn assert_weights(&self, device: &dyn Device) {
        self.run(device, |a, of| {
            let (rows, slots) = (a.visible.len(), 15..of.capacity - 5);
            let mut got = vec![7.0; a.kv_heads * rows * slots.len()];
            device.row_weights(a, slots.clone(), &mut got);
            let weights = of.weights(a.scale, slots.start as u32);
            let expected: Vec<f64> =
                weights.chunks(of.capacity).flat_map(|row| &row[slots.clone()]).copied().collect();
            self.assert_close("weight", &got, &expected);

            let at = |g: usize, row: usize, slot: usize| expected[(g * rows + row) * slots.len() + slot];
            for aggregation in [WeightAggregation::L2, WeightAggregation::Max] {
                let score = |slot| {
                    let of_row = |row| (0..a.kv_heads).map(move |g| (g, row));
                    match aggregation {
                        WeightAggregation::L2 => {
                            let mean = |row| of_row(row).map(|(g, row)| at(g, row, slot)).sum::<f64>();
                            (0..rows).map(|row| (mean(row) / a.heads as f64).powi(2)).sum::<f64>().sqrt()
                        }
                        WeightAggregation::Max => {
                            let all = (0..rows).flat_map(of_row).map(|(g, row)| at(g, row, slot));
                            all.fold(0.0, f64::max) / self.group as f64
                        }
                    }
                };
                let mut got = vec![7.0; slots.len()];
                device.aggregated_weights(a, slots.clone(), aggregation, &mut got);
                self.assert_close("score", &got, &(0..slots.len()).map(score).collect::<Vec<f64>>());
            }

            let (mut out, mut lse) = (device.floats(a.q.len()), device.floats(0));
            device.attention(a, &mut out, Some(&mut lse));
            let some: Vec<u32> = (0..of.capacity as u32).filter(|slot| slot % 7 < 3).collect();
            let mut got = vec![7.0; some.len() * rows];
            device.column_weights_from_lse(a, &lse, &some, &mut got);
            let weights = of.weights(a.scale, 0);
            let weight = |slot: &u32, row: usize| {
                let of_head = |g: usize| weights[(g * rows + row) * of.capacity + *slot as usize];
                (0..a.kv_heads).map(of_head).sum::<f64>()
            };
            let expected: Vec<f64> =
                some.iter().flat_map(|slot| (0..rows).map(move |row| weight(slot, row))).collect();
            self.assert_close("column weight", &got, &expected);
        });
    }

    /// Asserts that the weights that come with a single row's attention are right.
    pub(crate) fn assert_weights_of_one_row(&self, device: &dyn Device) {
        self.run(device, |a, of| {
            let end = a.visible[0].1 as usize;
            let (mut out, mut got) = (device.floats(a.q.len()), vec![7.0; a.kv_heads * end]);
            device.attention_with_weights(a, &mut out, &mut got);
            let weights = of.weights(a.scale, 0);
            let expected: Vec<f64> =
                weights.chunks(of.capacity).flat_map(|row| &row[..end]).copied().collect();
            self.assert_close("weight", &got, &expected);
        });
    }

    /// Asserts that the mass of concatenated heads is right.
    pub(crate) fn assert_concat_mass(&self, device: &dyn Device) {
        self.run(device, |a, of| {
            let from = a.visible.iter().map(|seen| seen.0 as usize).min().unwrap();
            let slots = from..of.capacity - 2;
            let a = CachedAttention { scale: 0.5 * a.scale, ..*a };
            let mut got = vec![7.0; slots.len()];
            device.concat_attention_mass(&a, slots.clone(), &mut got);
            let mut expected = vec![0.0; slots.len()];
            for (row, (from, to)) in a.visible.iter().enumerate() {
                let logit = |slot: u32| {
                    let products: f64 = (0..a.heads).map(|head| of.dot(row, head, slot)).sum();
                    (products * f64::from(a.scale)).exp()
                };
                let total: f64 = (*from..*to).map(logit).sum();
                (*from..*to).for_each(|slot| expected[slot as usize - slots.start] += logit(slot) / total);
            }
            self.assert_close("concatenated mass", &got, &expected);
        });
    }
}

impl Operands<'_> {
    /// The score of a head of a row and a slot, before scaling.
    fn dot(&self, row: usize, head: usize, slot: u32) -> f64 {
        let Case { head_dim: d, group, .. } = *self.case;
        let q = &self.q[((row + BEFORE) * self.case.heads() + head) * d..][..d];
        let at = (head / group * self.capacity + slot as usize) * d;
        q.iter().enumerate().map(|(i, q)| f64::from(*q) * f64::from(self.k.as_slice().get(at + i))).sum()
    }

    /// The mass of some slots, of softmaxes over what rows see from `first` on.
    pub(crate) fn mass(&self, scale: f32, first: u32, slots: Range<usize>) -> Vec<f64> {
        let mut mass = vec![0.0; self.case.kv_heads * slots.len()];
        for (i, row) in self.weights(scale, first).chunks(self.capacity).enumerate() {
            let sums = &mut mass[i / self.case.visible.len() * slots.len()..][..slots.len()];
            sums.iter_mut().zip(&row[slots.clone()]).for_each(|(sum, weight)| *sum += weight);
        }
        mass
    }

    /// The weight of each KV head, row and slot of the cache, of softmaxes over what rows see from `first` on.
    fn weights(&self, scale: f32, first: u32) -> Vec<f64> {
        let Case { kv_heads, ref visible, .. } = *self.case;
        let mut weights = vec![0.0; kv_heads * visible.len() * self.capacity];
        for (row, (from, to)) in visible.iter().enumerate() {
            for head in 0..self.case.heads() {
                let at = (head / self.case.group * visible.len() + row) * self.capacity;
                let seen = (*from).max(first)..(*to).max(first);
                let score = |slot| (self.dot(row, head, slot) * f64::from(scale)).exp();
                let total: f64 = seen.clone().map(score).sum();
                seen.for_each(|slot| weights[at + slot as usize] += score(slot) / total);
            }
        }
        weights
    }
}

/// Rows at every `step`th position and at the last ones, which see a window of what is before them.
fn causal(prompt: u32, step: u32, window: u32) -> Vec<(u32, u32)> {
    let rows = (0..prompt).filter(|p| p % step == 0 || p + 5 >= prompt);
    rows.map(|p| ((p + 1).saturating_sub(window), p + 1)).collect()
}

/// Cases of these ranges in both types, at sizes of models.
pub(crate) fn cases(visible: &[(u32, u32)]) -> Vec<Case> {
    let shapes = [(64, 1), (64, 3), (80, 2), (96, 2), (128, 4), (256, 2), (128, 7)];
    let case = |dtype| {
        shapes.map(|(head_dim, group)| Case {
            dtype,
            head_dim,
            group,
            kv_heads: 2,
            visible: visible.to_vec(),
        })
    };
    [Dtype::F16, Dtype::Bf16].into_iter().flat_map(case).collect()
}

/// A prompt of which each row sees a window, in shares; rows in no order with gaps between what they see; a question's rows.
pub(crate) fn ranges() -> [Vec<(u32, u32)>; 3] {
    [causal(230, 1, 150), vec![(60, 131), (3, 59), (190, 260), (200, 201), (5, 20)], vec![(9, 90); 18]]
}
