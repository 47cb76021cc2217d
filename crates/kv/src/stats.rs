//! Per-token statistics that methods select by.

use refrain_kernels::{CachedAttention, Device, Precision};
pub use refrain_kernels::{Distance, mean};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Span;

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
    /// Attention of queries, of which those of the question come last, over keys of the whole prompt. The rows that attend,
    /// the slots that they see and the precision are left open.
    pub attention: CachedAttention<'a>,
    /// Positions that a row sees at most, its own included.
    pub window: Option<usize>,
}

impl<'a> QuestionKeys<'a> {
    /// Attention of the last rows in f32, of which only weights are wanted.
    fn rows(&self, visible: &'a [(u32, u32)]) -> CachedAttention<'a> {
        let first_row = self.attention.q.len() / self.attention.width() - visible.len();
        CachedAttention { first_row, visible, precision: Precision::F32, ..self.attention }
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
    device: &dyn Device,
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
            let attention = keys.rows(&visible);
            let mut heads = vec![0.0; keys.attention.kv_heads * columns.len()];
            device.attention_mass(&attention, columns.clone(), &mut heads);
            let sum = |t| heads[t..].iter().step_by(columns.len()).sum();
            (0..documents.len()).map(sum).collect()
        }
        Softmax::Documents => {
            let visible: Vec<(u32, u32)> = question
                .positions()
                .map(|j| (keys.first(documents.start, j).min(documents.end), documents.end))
                .collect();
            let mut heads = vec![0.0; keys.attention.kv_heads * documents.len()];
            device.attention_mass(&keys.rows(&visible), documents.range(), &mut heads);
            let weight = 1.0 / (keys.attention.heads * question.len()) as f32;
            let mean = |t| heads[t..].iter().step_by(documents.len()).sum::<f32>() * weight;
            (0..documents.len()).map(mean).collect()
        }
        Softmax::Concatenated => {
            let visible: Vec<(u32, u32)> =
                question.positions().map(|j| (keys.first(documents.start, j), j + 1)).collect();
            let scale = (keys.attention.width() as f32).sqrt().recip();
            let attention = CachedAttention { scale, ..keys.rows(&visible) };
            let mut sums = vec![0.0; columns.len()];
            device.concat_attention_mass(&attention, columns, &mut sums);
            sums.truncate(documents.len());
            sums
        }
    }
}

/// Attention that each question row gives to each document token, mean over heads: `question.len() × documents.len()`.
///
/// The softmax runs over all that a row sees, as in the model. The rows of `question` are the last ones of `keys.q`.
pub fn question_map(
    device: &dyn Device,
    keys: &QuestionKeys<'_>,
    documents: Span,
    question: Span,
) -> Vec<f32> {
    let (rows, columns, all) = (question.len(), documents.len(), question.range().end);
    let visible: Vec<(u32, u32)> = question.positions().map(|j| (keys.first(0, j), j + 1)).collect();
    let mut weights = vec![0.0; keys.attention.kv_heads * rows * all];
    device.row_weights(&keys.rows(&visible), 0..all, &mut weights);
    let mut map = vec![0.0; rows * columns];
    for (i, row) in weights.chunks(all).enumerate() {
        let out = &mut map[i % rows * columns..][..columns];
        let seen = &row[documents.range()];
        out.iter_mut().zip(seen).for_each(|(sum, weight)| *sum += weight / keys.attention.heads as f32);
    }
    map
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

#[cfg(test)]
mod tests {
    use refrain_kernels::{Cpu, Slice, upload, upload_kv};

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
        let cpu = Cpu::new(1).unwrap();
        let cached = upload_kv(&cpu, Slice::F32(&k));
        let attention = CachedAttention {
            q: &upload(&cpu, &q),
            first_row: 0,
            k: &cached,
            v: &cached,
            heads,
            kv_heads,
            head_dim: d,
            capacity: n,
            visible: &[],
            scale: (d as f32).sqrt().recip(),
            precision: Precision::F32,
        };
        let keys = QuestionKeys { attention, window: Some(window) };
        let got = question_map(&cpu, &keys, documents, question);
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
    fn concatenated_softmax_follows_equation_3() {
        // 2 query heads over 1 KV head, d = 2; S = 1 token, D = 2, Q = 2.
        let cpu = Cpu::new(1).unwrap();
        let q = [1.0, 0.0, 0.5, 0.5, 0.0, 1.0, -1.0, 0.5];
        let k = [9.0, 9.0, 1.0, 2.0, -1.0, 0.5, 0.3, 0.1, 0.2, -0.4];
        let cached = upload_kv(&cpu, Slice::F32(&k));
        let attention = CachedAttention {
            q: &upload(&cpu, &q),
            first_row: 0,
            k: &cached,
            v: &cached,
            heads: 2,
            kv_heads: 1,
            head_dim: 2,
            capacity: 5,
            visible: &[],
            scale: 2f32.sqrt().recip(),
            precision: Precision::F32,
        };
        let keys = QuestionKeys { attention, window: None };
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
