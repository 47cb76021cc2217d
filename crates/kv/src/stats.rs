//! Per-token statistics that methods select by.

use refrain_kernels::{CachedAttention, Device, WeightAggregation};
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
    /// One softmax a head over all keys that a row sees, the system part included, mean over heads and rows.
    Prompt,
}

/// Rows of the question whose attention counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Rows {
    /// All of them.
    #[default]
    Question,
    /// The last one, from which the first token of the answer is chosen.
    Last,
}

/// The way from the weights that rows and heads give a token to one score.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Aggregation {
    /// Mean over rows and heads.
    #[default]
    Mean,
    /// Mean over heads, then the root of the sum of squares over rows (InfoFlow, arXiv 2603.05353).
    L2,
    /// Mean over the heads of a KV head, then the highest of all rows and KV heads.
    Max,
}

/// The score of a document token by the attention that it receives from the question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuestionScore {
    /// Normalisation.
    pub softmax: Softmax,
    /// Rows that count.
    pub rows: Rows,
    /// From weights to a score. With one softmax over concatenated heads it is the sum over rows.
    pub aggregation: Aggregation,
}

impl From<Softmax> for QuestionScore {
    /// The mean, or for [`Softmax::Concatenated`] and [`Softmax::PerHead`] the sum, over all rows of the question.
    fn from(softmax: Softmax) -> QuestionScore {
        QuestionScore { softmax, rows: Rows::Question, aggregation: Aggregation::Mean }
    }
}

/// The part of a layer that [`question_attention`] reads.
#[derive(Clone, Debug)]
pub struct QuestionKeys<'a> {
    /// Attention of queries, of which those of the question come last, over keys of the whole prompt. The rows that attend
    /// and the slots that they see are left open.
    pub attention: CachedAttention<'a>,
    /// First slot that the layer's window leaves each row of the question; empty where there is no window.
    pub starts: Vec<u32>,
}

impl<'a> QuestionKeys<'a> {
    /// Attention of the last rows but `after`, of which only weights are wanted.
    fn rows(&self, device: &dyn Device, visible: &'a [(u32, u32)], after: usize) -> CachedAttention<'a> {
        let first_row = self.attention.q.len() / self.attention.width() - visible.len() - after;
        let precision = device.weights_precision(self.attention.precision);
        CachedAttention { first_row, visible, precision, ..self.attention }
    }

    /// The first slot from `start` on that the row at slot `row` sees, of a question whose last row is at `last`.
    fn first(&self, start: u32, row: u32, last: u32) -> u32 {
        let behind = (last - row) as usize;
        self.starts.len().checked_sub(behind + 1).map_or(start, |at| start.max(self.starts[at]))
    }
}

/// Attention that each document token receives from the question: by default `s[t] = Σ_{j∈Q} a[j,t]`, `t ∈ documents`.
///
/// The softmax runs over documents and question (causal inside the question, within the sliding window); earlier
/// positions are excluded. With [`Softmax::Documents`] it runs over documents alone, with [`Softmax::Prompt`] over all that a row
/// sees. A³ eq. 3: `z[j,t] = Σ_h q[j,h]·k[t,h/G] / √(H·d)`. Returns `documents.len()` scores.
pub fn question_attention(
    device: &dyn Device,
    keys: &QuestionKeys<'_>,
    documents: Span,
    question: Span,
    score: QuestionScore,
) -> Vec<f32> {
    let QuestionScore { softmax, rows, aggregation } = score;
    let rows = match rows {
        Rows::Question => question,
        Rows::Last => Span { start: question.end - 1, ..question },
    };
    let first = if softmax == Softmax::Prompt { 0 } else { documents.start };
    let from = |j: u32| keys.first(first, j, question.end - 1);
    let seen = |j: u32| match softmax {
        Softmax::Documents => (from(j).min(documents.end), documents.end),
        _ => (from(j), j + 1),
    };
    // Later rows see less of the documents; those beyond whose window all of them lie count nothing.
    let visible: Vec<(u32, u32)> = rows.positions().map(seen).take_while(|(from, to)| from < to).collect();
    if visible.is_empty() {
        return vec![0.0; documents.len()];
    }
    // Slots that rows see, of which the documents' are reported.
    let slots = first as usize..visible.last().map_or(0, |(_, end)| *end as usize);
    let own = documents.start as usize - slots.start..documents.end as usize - slots.start;
    let attention = keys.rows(device, &visible, rows.len() - visible.len());
    if softmax == Softmax::Concatenated {
        let scale = (keys.attention.width() as f32).sqrt().recip();
        let mut sums = vec![0.0; slots.len()];
        device.concat_attention_mass(&CachedAttention { scale, ..attention }, slots, &mut sums);
        return sums[own].to_vec();
    }
    let aggregation = match aggregation {
        Aggregation::Mean => None,
        Aggregation::L2 => Some(WeightAggregation::L2),
        Aggregation::Max => Some(WeightAggregation::Max),
    };
    if let Some(aggregation) = aggregation {
        let mut scores = vec![0.0; slots.len()];
        device.aggregated_weights(&attention, slots, aggregation, &mut scores);
        return scores[own].to_vec();
    }
    let mut heads = vec![0.0; attention.kv_heads * slots.len()];
    device.attention_mass(&attention, slots.clone(), &mut heads);
    let weight = if softmax == Softmax::PerHead { 1.0 } else { 1.0 / (attention.heads * rows.len()) as f32 };
    let mut scores = vec![0.0; own.len()];
    for head in heads.chunks(slots.len()) {
        scores.iter_mut().zip(&head[own.clone()]).for_each(|(sum, x)| *sum += x);
    }
    scores.iter_mut().for_each(|score| *score *= weight);
    scores
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
    let last = question.end - 1;
    let visible: Vec<(u32, u32)> = question.positions().map(|j| (keys.first(0, j, last), j + 1)).collect();
    let mut weights = vec![0.0; keys.attention.kv_heads * rows * all];
    device.row_weights(&keys.rows(device, &visible, 0), 0..all, &mut weights);
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
    use refrain_kernels::{Cpu, Precision, Slice, upload};

    use super::*;

    /// First slots of the question's rows in a window.
    fn starts(question: Span, window: usize) -> Vec<u32> {
        question.positions().map(|row| (row + 1).saturating_sub(window as u32)).collect()
    }

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
        let cached = cpu.upload_kv(Slice::F32(&k));
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
        let keys = QuestionKeys { attention, starts: starts(question, window) };
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
    fn scores_are_aggregated_over_rows_and_heads_of_each_softmax() {
        let (heads, kv_heads, d, n) = (4, 2, 8, 12);
        let value = |i: usize| ((i * 2_654_435_761) % 1000) as f32 / 250.0 - 2.0;
        let (documents, question) = (Span::new(2, 9), Span::new(9, n));
        let q: Vec<f32> = (0..question.len() * heads * d).map(value).collect();
        let k: Vec<f32> = (0..kv_heads * n * d).map(|i| value(i + 5000)).collect();
        let cpu = Cpu::new(1).unwrap();
        let (q_device, k_device) = (upload(&cpu, &q), cpu.upload_kv(Slice::F32(&k)));
        let attention = CachedAttention {
            q: &q_device,
            first_row: 0,
            k: &k_device,
            v: &k_device,
            heads,
            kv_heads,
            head_dim: d,
            capacity: n,
            visible: &[],
            scale: (d as f32).sqrt().recip(),
            precision: Precision::F32,
        };
        // The weight of head h and row j on token t, over those of the keys `over` that the row sees.
        let weight = |h: usize, j: usize, t: usize, over: std::ops::Range<usize>, window: usize| {
            let logit = |t: usize| {
                let q = &q[((j - 9) * heads + h) * d..][..d];
                let k = &k[(h / (heads / kv_heads) * n + t) * d..][..d];
                (q.iter().zip(k).map(|(q, k)| f64::from(q * k)).sum::<f64>() / (d as f64).sqrt()).exp()
            };
            let seen = |t: usize| t + window > j;
            if seen(t) { logit(t) / over.filter(|t| seen(*t)).map(logit).sum::<f64>() } else { 0.0 }
        };
        // With a window of 5 the first row sees some documents, and with one of 2 the last row sees none.
        for window in [n, 5, 2] {
            let starts = if window < n { starts(question, window) } else { Vec::new() };
            let keys = QuestionKeys { attention, starts };
            for softmax in [Softmax::PerHead, Softmax::Documents, Softmax::Prompt] {
                for rows in [Rows::Question, Rows::Last] {
                    for aggregation in [Aggregation::Mean, Aggregation::L2, Aggregation::Max] {
                        let score = QuestionScore { softmax, rows, aggregation };
                        let got = question_attention(&cpu, &keys, documents, question, score);
                        let of: Vec<usize> = if rows == Rows::Last { vec![n - 1] } else { (9..n).collect() };
                        for t in documents.range() {
                            let on = |h: usize, j: usize| match softmax {
                                Softmax::Documents => weight(h, j, t, 2..9, window),
                                Softmax::Prompt => weight(h, j, t, 0..j + 1, window),
                                _ => weight(h, j, t, 2..j + 1, window),
                            };
                            let mean = |j: usize| (0..heads).map(|h| on(h, j)).sum::<f64>() / heads as f64;
                            let group = |g: usize, j: usize| (on(2 * g, j) + on(2 * g + 1, j)) / 2.0;
                            let all = of.iter().map(|j| mean(*j));
                            let expected = match aggregation {
                                Aggregation::Mean if softmax == Softmax::PerHead => {
                                    all.sum::<f64>() * heads as f64
                                }
                                Aggregation::Mean => all.sum::<f64>() / of.len() as f64,
                                Aggregation::L2 => all.map(|x| x * x).sum::<f64>().sqrt(),
                                Aggregation::Max => {
                                    let each = of.iter().flat_map(|j| [group(0, *j), group(1, *j)]);
                                    each.fold(0.0, f64::max)
                                }
                            };
                            let got = f64::from(got[t - 2]);
                            assert!(
                                (got - expected).abs() < 1e-5,
                                "{window} {score:?} {t}: {got} {expected}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn concatenated_softmax_follows_equation_3() {
        // 2 query heads over 1 KV head, d = 2; S = 1 token, D = 2, Q = 2.
        let cpu = Cpu::new(1).unwrap();
        let q = [1.0, 0.0, 0.5, 0.5, 0.0, 1.0, -1.0, 0.5];
        let k = [9.0, 9.0, 1.0, 2.0, -1.0, 0.5, 0.3, 0.1, 0.2, -0.4];
        let cached = cpu.upload_kv(Slice::F32(&k));
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
        let keys = QuestionKeys { attention, starts: Vec::new() };
        let got =
            question_attention(&cpu, &keys, Span::new(1, 3), Span::new(3, 5), Softmax::Concatenated.into());
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
