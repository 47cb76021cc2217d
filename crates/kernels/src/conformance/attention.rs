//! Attention, and what is reported of it.

use std::ops::Range;

use super::{Both, CAPACITY, HEAD_DIM, HEADS, KV_HEADS, random, stored, visible};
use crate::attention::GumbelNoise;
use crate::device::{CachedAttention, Device, HeadKeys, WeightAggregation, download, upload};
use crate::linear::Precision;

impl Both<'_> {
    /// Runs `f` with an attention of rows after the first two of some queries.
    fn with_attention<T>(&self, d: &dyn Device, f: impl Fn(&CachedAttention<'_>) -> T) -> T {
        let elements = KV_HEADS * CAPACITY * HEAD_DIM;
        let (k, v) = (stored(self.dtype, elements, 17), stored(self.dtype, elements, 18));
        let (k, v) = (d.upload_kv(k.as_slice()), d.upload_kv(v.as_slice()));
        let q = upload(d, &random((self.rows + 2) * HEADS * HEAD_DIM, 19));
        f(&CachedAttention {
            q: &q,
            first_row: 2,
            k: &k,
            v: &v,
            heads: HEADS,
            kv_heads: KV_HEADS,
            head_dim: HEAD_DIM,
            capacity: CAPACITY,
            visible: &visible(self.rows),
            scale: 0.7,
            precision: Precision::F32,
        })
    }

    pub(super) fn attention(&self) {
        let width = HEADS * HEAD_DIM;
        self.agree("attention", |d| {
            self.with_attention(d, |a| {
                let (mut out, mut lse) = (upload(d, &vec![0.5; a.q.len()]), d.floats(1));
                d.attention(a, &mut out, Some(&mut lse));
                assert_eq!(lse.len(), (self.rows + 2) * HEADS, "one sum for each row of q and head");
                let (out, lse) = (download(d, &out), download(d, &lse));
                assert_eq!(out[..2 * width], vec![0.5; 2 * width], "rows that do not attend stay");
                [&out[..], &lse[2 * HEADS..]].concat()
            })
        });
        self.agree("attention of some rows after others", |d| {
            self.with_attention(d, |a| {
                let (mut out, mut lse) = (upload(d, &vec![0.5; a.q.len()]), d.floats(0));
                let (mut first_row, most) = (a.first_row, self.rows.div_ceil(2));
                for visible in a.visible.chunks(most) {
                    d.attention(&CachedAttention { first_row, visible, ..*a }, &mut out, Some(&mut lse));
                    first_row += visible.len();
                }
                [&download(d, &out)[2 * width..], &download(d, &lse)[2 * HEADS..]].concat()
            })
        });
        self.agree("attention_with_weights", |d| {
            self.with_attention(d, |a| {
                let (one, mut out) = ([(0, 120)], upload(d, &vec![0.5; a.q.len()]));
                let mut weights = vec![0.0; KV_HEADS * 120];
                d.attention_with_weights(&CachedAttention { visible: &one, ..*a }, &mut out, &mut weights);
                [&download(d, &out)[2 * width..3 * width], &weights].concat()
            })
        });
        self.agree("merge_attention", |d| {
            self.with_attention(d, |a| {
                let near = vec![(60, 150); self.rows];
                let far = vec![(0, 60); self.rows];
                let (mut out, mut lse) = (d.floats(a.q.len()), d.floats(0));
                d.attention(&CachedAttention { visible: &near, ..*a }, &mut out, Some(&mut lse));
                let mut q = d.floats(self.rows * width);
                d.copy(a.q, 2 * width..(self.rows + 2) * width, &mut q, 0);
                let (mut other, mut other_lse) = (d.floats(q.len()), d.floats(0));
                let a = CachedAttention { q: &q, first_row: 0, visible: &far, ..*a };
                d.attention(&a, &mut other, Some(&mut other_lse));
                d.merge_attention(2 * HEADS, &mut out, &mut lse, &other, &other_lse);
                [&download(d, &out)[2 * width..], &download(d, &lse)[2 * HEADS..]].concat()
            })
        });
    }

    pub(super) fn reports(&self) {
        let slots: Range<usize> = 20..140;
        let sums = |heads: usize| vec![7.0; heads * slots.len()];
        self.agree("attention_mass", |d| {
            self.with_attention(d, |a| {
                let mut sums = sums(KV_HEADS);
                d.attention_mass(a, slots.clone(), &mut sums);
                sums
            })
        });
        let query_positions: Vec<u32> = (0..self.rows as u32).map(|i| 1000 + i).collect();
        let key_positions: Vec<u32> = (0..(KV_HEADS * CAPACITY) as u32).collect();
        for seed in [None, Some(3)] {
            let noise = GumbelNoise {
                seed,
                temperature: 1.3,
                query_positions: &query_positions,
                key_positions: Some(&key_positions),
            };
            self.agree("noisy_attention_mass", |d| {
                self.with_attention(d, |a| {
                    let mut sums = sums(KV_HEADS);
                    d.noisy_attention_mass(a, slots.clone(), &noise, &mut sums);
                    sums
                })
            });
        }
        self.agree("row_weights", |d| {
            self.with_attention(d, |a| {
                let mut weights = sums(KV_HEADS * self.rows);
                d.row_weights(a, slots.clone(), &mut weights);
                weights
            })
        });
        for aggregation in [WeightAggregation::L2, WeightAggregation::Max] {
            self.agree("aggregated_weights", |d| {
                self.with_attention(d, |a| {
                    let mut scores = sums(1);
                    d.aggregated_weights(a, slots.clone(), aggregation, &mut scores);
                    scores
                })
            });
        }
        self.agree("concat_attention_mass", |d| {
            self.with_attention(d, |a| {
                let within = vec![(30, 90); self.rows];
                let mut sums = sums(1);
                d.concat_attention_mass(
                    &CachedAttention { visible: &within, ..*a },
                    slots.clone(),
                    &mut sums,
                );
                sums
            })
        });
        let noise = GumbelNoise {
            seed: Some(5),
            temperature: 1.0,
            query_positions: &query_positions,
            key_positions: None,
        };
        for noise in [None, Some(&noise)] {
            self.agree("attention_with_mass", |d| {
                self.with_attention(d, |a| {
                    let (mut out, mut lse) = (d.floats(a.q.len()), d.floats(0));
                    let end = a.visible.iter().map(|seen| seen.1 as usize).max().unwrap_or(0);
                    let mut sums = vec![0.5; KV_HEADS * end];
                    d.attention_with_mass(a, &mut out, &mut lse, noise, &mut sums);
                    let rows = a.first_row..a.first_row + a.visible.len();
                    let of = |all: Vec<f32>, width: usize| all[rows.start * width..rows.end * width].to_vec();
                    let (lse, width) = (download(d, &lse), a.q.len() * HEADS / lse.len());
                    [sums, of(download(d, &out), width), of(lse, HEADS)].concat()
                })
            });
        }
        self.agree("attention_mass_from_lse and column_weights_from_lse", |d| {
            self.with_attention(d, |a| {
                let (mut out, mut lse) = (d.floats(a.q.len()), d.floats(0));
                d.attention(a, &mut out, Some(&mut lse));
                // Each row without its own slot.
                let others: Vec<(u32, u32)> = a.visible.iter().map(|(from, to)| (*from, to - 1)).collect();
                let a = CachedAttention { visible: &others, ..*a };
                let (mut sums, mut columns) = (sums(KV_HEADS), vec![7.0; 3 * self.rows]);
                d.attention_mass_from_lse(&a, &lse, slots.clone(), &mut sums);
                d.column_weights_from_lse(&a, &lse, &[31, 77, 149], &mut columns);
                [sums, columns].concat()
            })
        });
        self.agree("concat_logits", |d| {
            self.with_attention(d, |a| {
                let (q, mut z) = (random(self.rows * 3 * HEAD_DIM, 20), vec![0.0; self.rows * 101]);
                let keys = HeadKeys { k: a.k, head: 1, head_dim: HEAD_DIM, capacity: CAPACITY, queries: 3 };
                d.concat_logits(&q, keys, 0.3, &mut z);
                z
            })
        });
    }
}
