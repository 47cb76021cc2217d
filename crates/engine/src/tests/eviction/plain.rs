//! Policies evaluated by their definitions, in f64.

use std::collections::BTreeMap;

use refrain_kernels::{Buffer, Dtype, GumbelNoise};

use super::given::Given;

/// A policy evaluated by its definition: what every row gave to every token is kept for good.
pub(super) struct Plain<'a> {
    pub(super) given: &'a Given,
    pub(super) which: Which,
    pub(super) capacity: usize,
    /// Keys and values by token, `tokens × Hkv × d`.
    pub(super) k: Vec<f32>,
    pub(super) v: Vec<f32>,
    /// Tokens that stay, for each KV head.
    pub(super) kept: Vec<Vec<usize>>,
    /// weights[row][KV head]: token to weight, summed over the group; nothing of rows that are not computed.
    pub(super) weights: Vec<Vec<BTreeMap<usize, f64>>>,
}

impl Plain<'_> {
    /// Notes the weights of the prompt's computed rows.
    pub(super) fn attend_prompt(&mut self) {
        for row in 0..self.given.n {
            if self.given.computed.contains(&(row as u32)) {
                self.attend(row);
            } else {
                self.weights.push(vec![BTreeMap::new(); self.given.kv_heads]);
            }
        }
    }

    /// Attention of token `row` over what is kept; the weights that score are noted.
    pub(super) fn attend(&mut self, row: usize) -> Vec<f64> {
        let Given { heads, kv_heads, head_dim: d, .. } = *self.given;
        let mut out = vec![0.0; heads * d];
        let mut weights = vec![BTreeMap::new(); kv_heads];
        for h in 0..heads {
            let g = h / (heads / kv_heads);
            let seen: Vec<usize> = self.kept[g].iter().copied().filter(|t| *t <= row).collect();
            let logit = |t: &usize| {
                let q = &self.given.q[(row * heads + h) * d..][..d];
                let k = &self.k[(t * kv_heads + g) * d..][..d];
                q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>() / (d as f64).sqrt()
            };
            let logits: Vec<f64> = seen.iter().map(logit).collect();
            let noted = softmax(&self.scoring_logits(row, h, &seen, &logits));
            for ((t, p), noted) in seen.iter().zip(softmax(&logits)).zip(noted) {
                *weights[g].entry(*t).or_insert(0.0) += noted;
                for e in 0..d {
                    out[h * d + e] += p * f64::from(self.v[(t * kv_heads + g) * d + e]);
                }
            }
        }
        self.weights.push(weights);
        out
    }

    /// Logits whose softmax scores `tokens` for query head `h` of token `row`: attention's own, but for Keyformer.
    fn scoring_logits(&self, row: usize, h: usize, tokens: &[usize], logits: &[f64]) -> Vec<f64> {
        let Which::Keyformer { seed, tau, step, .. } = self.which else { return logits.to_vec() };
        // A layer's noise is not that of another. The prompt has the first temperature, each step a higher one.
        let seed = seed ^ (self.given.layers as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let tau = (tau + step * (row + 1).saturating_sub(self.given.n) as f64).min(TAU_END);
        let noisy = |(t, logit): (&usize, &f64)| {
            let (seed, query, key) = (Some(seed), [row as u32], [*t as u32]);
            let noise =
                GumbelNoise { seed, temperature: 1.0, query_positions: &query, key_positions: Some(&key) };
            (logit + f64::from(noise.weight(h, 0, (0, 0), 1).unwrap()).ln()) / tau
        };
        tokens.iter().zip(logits).map(noisy).collect()
    }

    /// Keeps `keep` tokens of each head, the last `recent` of `next` and the best of the others.
    fn keep(&mut self, next: usize, keep: usize, recent: usize) {
        for g in 0..self.given.kv_heads {
            let mut order: Vec<(f64, usize)> = self.kept[g]
                .iter()
                .map(|t| (if t + recent >= next { f64::INFINITY } else { self.score(next, g, *t) }, *t))
                .collect();
            order.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            order.truncate(keep);
            self.kept[g] = order.into_iter().map(|(_, t)| t).collect();
        }
    }

    /// Whether token `row` has been computed.
    fn is_noted(&self, row: usize) -> bool {
        !self.weights[row][0].is_empty()
    }

    /// A token's score for a head, from the weights that the first `rows` rows gave it.
    pub(super) fn score(&self, rows: usize, g: usize, t: usize) -> f64 {
        match self.which {
            Which::H2o { normalise, .. } => {
                let computed = (t..rows).filter(|row| self.is_noted(*row)).count();
                let sum = (0..rows).map(|row| self.given_to(row, g, t)).sum::<f64>();
                if normalise { sum / computed as f64 } else { sum }
            }
            Which::Keyformer { .. } => (0..rows).map(|row| self.given_to(row, g, t)).sum(),
            Which::Streaming { sinks } => {
                if t < sinks {
                    f64::INFINITY
                } else {
                    t as f64
                }
            }
            Which::Morph { window, max, .. } => {
                let last = (rows.saturating_sub(window)..rows).map(|row| self.given_to(row, g, t));
                if max { last.fold(0.0, f64::max) } else { last.sum() }
            }
            Which::Scissorhands { history, .. } => {
                let group = (self.given.heads / self.given.kv_heads) as f64;
                let unimportant = |row: &usize| {
                    let seen = self.weights[*row][g].len() as f64;
                    *row >= t && self.given_to(*row, g, t) < group / seen
                };
                // Rows of the prompt's end that are not computed are not looked back at: decoding fills their places.
                let noted = (self.given.n.saturating_sub(history)..rows).filter(|row| self.is_noted(*row));
                -(noted.rev().take(history).filter(unimportant).count() as f64)
            }
            Which::MorphCode { window, max, mistral } => {
                let group = self.given.heads / self.given.kv_heads;
                let distant: Vec<usize> =
                    self.kept[g].iter().copied().filter(|t| t + window < rows).collect();
                let Some(at) = distant.iter().position(|distant| *distant == t) else { return f64::INFINITY };
                let heads = g * group..(g + 1) * group;
                let given = |row: usize| {
                    let mut logits = heads.clone().map(|h| self.logits_in_f16(row, h, &distant));
                    if mistral {
                        return logits.map(|logits| softmax(&logits)[at]).fold(0.0, f64::max);
                    }
                    let first = logits.next().unwrap();
                    let add =
                        |sum: Vec<f64>, one: Vec<f64>| sum.iter().zip(one).map(|(a, b)| a + b).collect();
                    softmax(&logits.fold(first, add))[at]
                };
                let last = rows.saturating_sub(window - usize::from(mistral))..rows;
                let last = last.filter(|row| self.is_noted(*row)).map(given);
                if max { last.fold(0.0, f64::max) } else { last.sum() }
            }
            Which::OneShot { protects, window, kernel, max } => {
                let Given { n, system, question, .. } = *self.given;
                let (first, last) = if protects { (system, n - question) } else { (0, n - window) };
                if t < first {
                    return f64::INFINITY;
                }
                if t >= last {
                    // The latest of these tokens stay if there is no room for all.
                    return 1e30 * (1.0 + t as f64);
                }
                let rows = if window == 0 { self.capacity / 2 } else { window };
                let rows = if protects { rows.min(question) } else { rows };
                let sum = |t| (n - rows..n).map(|row| self.given_to(row, g, t)).sum();
                let sums: Vec<f64> = (first..last).map(sum).collect();
                pooled(&sums, t - first, kernel, max)
            }
        }
    }

    /// Leaves the tokens that are kept before token `next` comes.
    pub(super) fn prune(&mut self, next: usize) {
        let (held, capacity) = (self.kept[0].len(), self.capacity);
        if held <= capacity || (self.which.is_one_shot() && next > self.given.n) {
            return;
        }
        let (keep, recent) = match self.which {
            Which::Morph { evict_after, .. } if ((held + 1) as f64) < (capacity + 1) as f64 * evict_after => {
                return;
            }
            Which::H2o { recent, .. } | Which::Keyformer { recent, .. } => (capacity, recent),
            Which::Streaming { .. } | Which::OneShot { .. } => (capacity, 0),
            Which::Morph { window, .. } | Which::MorphCode { window, .. } => (capacity, window),
            Which::Scissorhands { recent, .. } => (capacity + 1 - (capacity / 2).max(1), recent),
        };
        self.keep(next, keep, recent);
    }

    fn given_to(&self, row: usize, g: usize, t: usize) -> f64 {
        self.weights[row][g].get(&t).copied().unwrap_or(0.0)
    }

    /// Scaled logits of a query head of token `row`, kept in f16, over `tokens`.
    fn logits_in_f16(&self, row: usize, h: usize, tokens: &[usize]) -> Vec<f64> {
        let Given { heads, kv_heads, head_dim: d, .. } = *self.given;
        let mut kept = Buffer::zeros(Dtype::F16, d);
        kept.write_f32(0, &self.given.q[(row * heads + h) * d..][..d]);
        let q = kept.as_slice().floats();
        let key = |t: &usize| &self.k[(t * kv_heads + h / (heads / kv_heads)) * d..][..d];
        let dot = |k: &[f32]| q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>();
        tokens.iter().map(|t| dot(key(t)) / (d as f64).sqrt()).collect()
    }
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = logits.iter().map(|z| (z - max).exp()).sum();
    logits.iter().map(|z| (z - max).exp() / total).collect()
}

/// Element `t` of `scores`, pooled over `kernel` neighbours: their maximum, or their sum over `kernel`.
fn pooled(scores: &[f64], t: usize, kernel: usize, max: bool) -> f64 {
    let near = &scores[t.saturating_sub(kernel / 2)..(t + kernel / 2 + 1).min(scores.len())];
    if max { near.iter().copied().fold(0.0, f64::max) } else { near.iter().sum::<f64>() / kernel as f64 }
}

/// The highest temperature of Keyformer.
const TAU_END: f64 = 2.0;

#[derive(Clone, Copy, Debug)]
pub(super) enum Which {
    H2o {
        recent: usize,
        normalise: bool,
    },
    /// With noise; `step` is the temperature's increase at each step.
    Keyformer {
        recent: usize,
        seed: u64,
        tau: f64,
        step: f64,
    },
    Streaming {
        sinks: usize,
    },
    /// Pruned when the cache is `evict_after` times its capacity.
    Morph {
        window: usize,
        max: bool,
        evict_after: f64,
    },
    Scissorhands {
        history: usize,
        recent: usize,
    },
    /// The published code's softmax over distant tokens alone: for Mistral one a query head, of a row less, else one of summed logits.
    MorphCode {
        window: usize,
        max: bool,
        mistral: bool,
    },
    /// SnapKV's window, or A³-ex's, which protects system part and question; 0 is as much of the question as half the capacity.
    OneShot {
        protects: bool,
        window: usize,
        kernel: usize,
        max: bool,
    },
}

impl Which {
    pub(super) fn is_one_shot(self) -> bool {
        matches!(self, Which::OneShot { .. })
    }

    pub(super) fn spec(self, capacity: usize) -> String {
        match self {
            Which::H2o { recent, normalise } => {
                format!("h2o:capacity={capacity},recent={recent},normalise={normalise}")
            }
            Which::Keyformer { recent, seed, tau, step } => {
                let share = recent as f64 / capacity as f64;
                format!(
                    "keyformer:capacity={capacity},recent_share={share},noise_seed={seed},tau={tau},tau_step={step},tau_end={TAU_END}"
                )
            }
            Which::Streaming { sinks } => {
                format!("streaming_llm:capacity={capacity},sinks={sinks},positions=original")
            }
            Which::Morph { window, max, evict_after } => {
                let fuse = if max { "max" } else { "sum" };
                format!("morph_kv:capacity={capacity},window={window},fuse={fuse},evict_after={evict_after}")
            }
            Which::Scissorhands { history, recent } => {
                format!("scissorhands:capacity={capacity},history={history},recent={recent}")
            }
            Which::MorphCode { window, max, mistral } => {
                let (fuse, profile) =
                    (if max { "max" } else { "sum" }, if mistral { "mistral" } else { "llama" });
                format!("morph_kv:capacity={capacity},window={window},fuse={fuse},profile=code_{profile}")
            }
            Which::OneShot { protects, window, kernel, max } => {
                let (name, pool) =
                    (if protects { "a3_ex" } else { "snap_kv" }, if max { "max" } else { "avg" });
                format!("{name}:capacity={capacity},window={window},kernel={kernel},pool={pool}")
            }
        }
    }
}
