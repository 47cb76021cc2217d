//! Per-token statistics that methods select by.

use refrain_kernels::{Attention, Cpu, Precision, Slice};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Span;

/// Rows whose logits are held at once in [`question_attention`]; bounds its memory to `ROWS · n` floats.
const ROWS: usize = 64;

/// How the question's attention is normalised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Softmax {
    /// All heads concatenated into one softmax (A³, arXiv 2511.17560, eq. 3).
    Concatenated,
    /// One softmax a head, summed over heads.
    PerHead,
    /// One softmax a head over the document keys alone, mean over heads and question tokens (ProphetKV, arXiv 2602.02579).
    Documents,
}

/// The part of a layer that [`question_attention`] reads.
#[derive(Clone, Copy, Debug)]
pub struct QuestionKeys<'a> {
    /// Rotated queries of the question's rows, `|Q| × H × d`.
    pub q: &'a [f32],
    /// Rotated keys of the whole prompt, `Hkv × capacity × d`.
    pub k: Slice<'a>,
    /// Query heads, `H`.
    pub heads: usize,
    /// KV heads, `Hkv`.
    pub kv_heads: usize,
    /// Elements of a head, `d`.
    pub head_dim: usize,
    /// Slots of a KV head in `k`.
    pub capacity: usize,
    /// Positions that a row sees at most, its own included.
    pub window: Option<usize>,
    /// Factor of the logits q·k, the layer's attention scale.
    pub scale: f32,
}

impl<'a> QuestionKeys<'a> {
    /// Attention of the rows in f32, of which only weights are wanted.
    fn attention(&self, visible: &'a [(u32, u32)]) -> Attention<'a> {
        Attention {
            q: self.q,
            k: self.k,
            v: self.k,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            capacity: self.capacity,
            visible,
            scale: self.scale,
            precision: Precision::F32,
        }
    }

    /// The first position from `start` on that the row at `position` sees.
    fn first(&self, start: u32, position: u32) -> u32 {
        let window = self.window.map_or(u32::MAX, |window| window as u32);
        start.max((position + 1).saturating_sub(window))
    }
}

/// Attention that each document token receives from the question: `s[t] = Σ_{j∈Q} a[j,t]`, `t ∈ documents`.
///
/// The softmax runs over documents and question (causal inside the question, within the sliding window); earlier
/// positions are excluded. With [`Softmax::Documents`] it runs over documents alone.
/// A³ eq. 3: `z[j,t] = Σ_h q[j,h]·k[t,h/G] / √(H·d)`. Returns `documents.len()` scores.
pub fn question_attention(
    cpu: &Cpu,
    keys: &QuestionKeys<'_>,
    documents: Span,
    question: Span,
    softmax: Softmax,
) -> Vec<f32> {
    let columns = documents.range().start..question.range().end;
    match softmax {
        Softmax::PerHead => {
            let visible: Vec<(u32, u32)> =
                question.positions().map(|j| (keys.first(documents.start, j), j + 1)).collect();
            let attention = keys.attention(&visible);
            let mut heads = vec![0.0; keys.kv_heads * columns.len()];
            cpu.attention_mass(&attention, columns.clone(), &mut heads);
            let sum = |t| heads[t..].iter().step_by(columns.len()).sum();
            (0..documents.len()).map(sum).collect()
        }
        Softmax::Documents => {
            let visible: Vec<(u32, u32)> = question
                .positions()
                .map(|j| (keys.first(documents.start, j).min(documents.end), documents.end))
                .collect();
            let mut heads = vec![0.0; keys.kv_heads * documents.len()];
            cpu.attention_mass(&keys.attention(&visible), documents.range(), &mut heads);
            let weight = 1.0 / (keys.heads * question.len()) as f32;
            let mean = |t| heads[t..].iter().step_by(documents.len()).sum::<f32>() * weight;
            (0..documents.len()).map(mean).collect()
        }
        Softmax::Concatenated => concatenated(cpu, keys, documents, question, columns),
    }
}

/// Attention that each question row gives to each document token, mean over heads: `question.len() × documents.len()`.
///
/// The softmax runs over all that a row sees, as in the model. `keys.q` holds the rows of `question`, which end the prompt.
pub fn question_map(cpu: &Cpu, keys: &QuestionKeys<'_>, documents: Span, question: Span) -> Vec<f32> {
    let (rows, columns, all) = (question.len(), documents.len(), question.range().end);
    let visible: Vec<(u32, u32)> = question.positions().map(|j| (keys.first(0, j), j + 1)).collect();
    let mut weights = vec![0.0; keys.kv_heads * rows * all];
    cpu.row_weights(&keys.attention(&visible), 0..all, &mut weights);
    let mut map = vec![0.0; rows * columns];
    for (i, row) in weights.chunks(all).enumerate() {
        let out = &mut map[i % rows * columns..][..columns];
        let seen = &row[documents.range()];
        out.iter_mut().zip(seen).for_each(|(sum, weight)| *sum += weight / keys.heads as f32);
    }
    map
}

fn concatenated(
    cpu: &Cpu,
    keys: &QuestionKeys<'_>,
    documents: Span,
    question: Span,
    columns: std::ops::Range<usize>,
) -> Vec<f32> {
    let width = keys.heads * keys.head_dim;
    let scale = (width as f32).sqrt().recip();
    let mut sums = vec![0.0; documents.len()];
    let mut logits = vec![0.0; ROWS.min(question.len()) * columns.len()];
    for (block, q) in keys.q.chunks(ROWS * width).enumerate() {
        let rows = q.len() / width;
        let logits = &mut logits[..rows * columns.len()];
        cpu.concat_logits(
            q,
            keys.heads,
            keys.kv_heads,
            keys.head_dim,
            keys.k,
            keys.capacity,
            columns.clone(),
            scale,
            logits,
        );
        for (row, logits) in logits.chunks_mut(columns.len()).enumerate() {
            let position = question.start + (block * ROWS + row) as u32;
            let from = (keys.first(documents.start, position) - documents.start) as usize;
            let seen = &mut logits[from..=(position - documents.start) as usize];
            refrain_kernels::softmax(seen);
            sums.iter_mut().skip(from).zip(&*seen).for_each(|(sum, probability)| *sum += probability);
        }
    }
    sums
}

/// Moving average over `taps` (odd) neighbours, zero-padded; the divisor is `taps` also at the edges.
pub fn smooth(scores: &[f32], taps: usize) -> Vec<f32> {
    let side = taps / 2;
    (0..scores.len())
        .map(|t| {
            let range = t.saturating_sub(side)..(t + side + 1).min(scores.len());
            scores[range].iter().sum::<f32>() / taps as f32
        })
        .collect()
}

/// The highest of `taps` (odd) neighbours.
pub fn highest(scores: &[f32], taps: usize) -> Vec<f32> {
    let side = taps / 2;
    (0..scores.len())
        .map(|t| {
            let range = t.saturating_sub(side)..(t + side + 1).min(scores.len());
            scores[range].iter().copied().fold(f32::NEG_INFINITY, f32::max)
        })
        .collect()
}

/// The mean of rows of `width`, summed in f64; zeros of no row.
pub fn mean(rows: &[f32], width: usize) -> Vec<f32> {
    let mut sums = vec![0.0f64; width];
    for row in rows.chunks_exact(width) {
        sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x));
    }
    let count = (rows.len() / width).max(1) as f64;
    sums.into_iter().map(|sum| (sum / count) as f32).collect()
}

/// Attention over two sets of keys becomes attention over their union: `out` (`rows × H × d`) and `lse` (`rows × H`, the
/// logarithms of the softmax's sums) are those of one set, `other` those of the other. Any split and order gives the same;
/// −∞ is the sum over no key.
pub fn merge_attention(out: &mut [f32], lse: &mut [f32], other: &[f32], other_lse: &[f32]) {
    let d = out.len() / lse.len().max(1);
    let heads = out.chunks_exact_mut(d.max(1)).zip(other.chunks_exact(d.max(1)));
    for ((a, b), (sa, sb)) in heads.zip(lse.iter_mut().zip(other_lse)) {
        let max = sa.max(*sb);
        if max == f32::NEG_INFINITY {
            continue;
        }
        let (wa, wb) = ((*sa - max).exp(), (*sb - max).exp());
        let total = wa + wb;
        let (fa, fb) = (wa / total, wb / total);
        a.iter_mut().zip(b).for_each(|(a, b)| *a = fa * *a + fb * b);
        *sa = max + total.ln();
    }
}

/// How far recomputed and cached rows are apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Distance {
    /// Sum of squared differences.
    L2,
    /// Sum of absolute differences.
    L1,
}

/// Distance of each row (`width` elements) of `fresh` from `cached`, both `tokens × width`.
pub fn deviation(fresh: Slice<'_>, cached: Slice<'_>, width: usize, distance: Distance) -> Vec<f32> {
    let (mut a, mut b) = (vec![0.0; width], vec![0.0; width]);
    (0..fresh.len() / width)
        .map(|t| {
            fresh.range(t * width..(t + 1) * width).to_f32(&mut a);
            cached.range(t * width..(t + 1) * width).to_f32(&mut b);
            let differences = a.iter().zip(&b).map(|(a, b)| a - b);
            match distance {
                Distance::L2 => differences.map(|x| x * x).sum(),
                Distance::L1 => differences.map(f32::abs).sum(),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smoothing_divides_by_the_taps_also_at_the_edges() {
        assert_eq!(smooth(&[5.0, 0.0, 0.0, 10.0], 5), [1.0, 3.0, 3.0, 2.0]);
        assert_eq!(smooth(&[5.0, 1.0], 1), [5.0, 1.0]);
        assert_eq!(highest(&[-5.0, -6.0, -7.0, -1.0], 3), [-5.0, -5.0, -1.0, -1.0]);
    }

    #[test]
    fn a_map_is_the_mean_of_the_heads_softmax_over_all_that_a_row_sees() {
        let (heads, kv_heads, d, n, window) = (4, 2, 8, 12, 7);
        let value = |i: usize| ((i * 2_654_435_761) % 1000) as f32 / 250.0 - 2.0;
        let (documents, question) = (Span::new(2, 9), Span::new(9, n));
        let q: Vec<f32> = (0..question.len() * heads * d).map(value).collect();
        let k: Vec<f32> = (0..kv_heads * n * d).map(|i| value(i + 5000)).collect();
        let keys = QuestionKeys {
            q: &q,
            k: Slice::F32(&k),
            heads,
            kv_heads,
            head_dim: d,
            capacity: n,
            window: Some(window),
            scale: (d as f32).sqrt().recip(),
        };
        let got = question_map(&Cpu::new(1).unwrap(), &keys, documents, question);
        for j in question.range() {
            let first = (j + 1).saturating_sub(window);
            let logit = |h: usize, t: usize| {
                let q = &q[((j - 9) * heads + h) * d..][..d];
                let k = &k[(h / (heads / kv_heads) * n + t) * d..][..d];
                q.iter().zip(k).map(|(q, k)| f64::from(q * k)).sum::<f64>() / (d as f64).sqrt()
            };
            for t in documents.range() {
                let weight = |h| {
                    let total: f64 = (first..=j).map(|t| logit(h, t).exp()).sum();
                    if t >= first { logit(h, t).exp() / total } else { 0.0 }
                };
                let expected = (0..heads).map(weight).sum::<f64>() / heads as f64;
                let got = f64::from(got[(j - 9) * documents.len() + t - 2]);
                assert!((got - expected).abs() < 1e-5, "{j} {t}: {got} {expected}");
            }
        }
    }

    #[test]
    fn oracle_15_any_split_and_order_of_keys_is_attention_over_all_of_them() {
        let (heads, d, keys) = (3, 8, 40);
        let value = |i: usize| ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0;
        let scores: Vec<f32> = (0..heads * keys).map(|i| 9.0 * value(i + 7)).collect();
        let values: Vec<f32> = (0..heads * keys * d).map(|i| value(i + 100_000)).collect();
        let over = |slots: &[usize]| {
            let (mut out, mut lse) = (vec![0.0; heads * d], vec![f32::NEG_INFINITY; heads]);
            for h in 0..heads {
                let weight = |s: &usize| f64::from(scores[h * keys + s]).exp();
                let total: f64 = slots.iter().map(weight).sum();
                if total > 0.0 {
                    lse[h] = total.ln() as f32;
                }
                for s in slots {
                    for e in 0..d {
                        let v = f64::from(values[(h * keys + s) * d + e]);
                        out[h * d + e] += (weight(s) / total * v) as f32;
                    }
                }
            }
            (out, lse)
        };
        let (whole, sum) = over(&(0..keys).collect::<Vec<_>>());
        for parts in [vec![0..39, 39..40], vec![0..1, 1..40], vec![30..40, 0..12, 12..12, 12..30]] {
            let (mut out, mut lse) = over(&[]);
            for part in parts {
                let (other, other_lse) = over(&part.collect::<Vec<_>>());
                merge_attention(&mut out, &mut lse, &other, &other_lse);
            }
            assert!(out.iter().zip(&whole).all(|(a, b)| (a - b).abs() < 1e-5));
            assert!(lse.iter().zip(&sum).all(|(a, b)| (a - b).abs() < 1e-5));
        }
    }

    #[test]
    fn concatenated_softmax_follows_equation_3() {
        // 2 query heads over 1 KV head, d = 2; S = 1 token, D = 2, Q = 2.
        let cpu = Cpu::new(1).unwrap();
        let q = [1.0, 0.0, 0.5, 0.5, 0.0, 1.0, -1.0, 0.5];
        let k = [9.0, 9.0, 1.0, 2.0, -1.0, 0.5, 0.3, 0.1, 0.2, -0.4];
        let keys = QuestionKeys {
            q: &q,
            k: Slice::F32(&k),
            heads: 2,
            kv_heads: 1,
            head_dim: 2,
            capacity: 5,
            window: None,
            scale: 2f32.sqrt().recip(),
        };
        let got = question_attention(&cpu, &keys, Span::new(1, 3), Span::new(3, 5), Softmax::Concatenated);
        let mut expected = [0f64; 2];
        for j in 0..2 {
            let logit = |t: usize| {
                let dot = |h: usize| {
                    (0..2).map(|e| f64::from(q[4 * j + 2 * h + e]) * f64::from(k[2 * t + e])).sum::<f64>()
                };
                ((dot(0) + dot(1)) / 2.0).exp()
            };
            let total: f64 = (1..4 + j).map(logit).sum();
            expected[0] += logit(1) / total;
            expected[1] += logit(2) / total;
        }
        for (got, expected) in got.iter().zip(expected) {
            assert!((f64::from(*got) - expected).abs() < 1e-6, "{got} {expected}");
        }
    }
}
