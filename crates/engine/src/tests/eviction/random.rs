//! Random shapes, GQA ratios and capacities: a bounded cache against a plain evaluation of the same policy in f64.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;
use refrain_eviction::{Eviction, PromptSpans};
use refrain_kernels::{Buffer, Device, Dtype, KvRows, Precision, Slice, download, upload};
use refrain_kv::{LayerCache, MemoryMeter, Rope, RopeTable, Ropes, Span};
use refrain_model::{Config, LayerSpec, ModelFiles};

use super::policy;
use crate::cache::{DecodeCache, EvictingCache, KeptToken, PromptLayer};
use crate::tests::{device, tiny};

/// Queries, keys and values of one layer; nothing is rotated.
pub(super) struct Given {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    /// Tokens of the prompt.
    pub(super) n: usize,
    /// Tokens of its system part and of its question.
    pub(super) system: usize,
    pub(super) question: usize,
    pub(super) dtype: Dtype,
    /// `tokens × H × d`
    pub(super) q: Vec<f32>,
    /// `Hkv × n × d`
    pub(super) k: Vec<f32>,
    /// `Hkv × n × d`
    pub(super) v: Vec<f32>,
}

impl Given {
    fn config(&self) -> Config {
        let Given { heads, kv_heads, head_dim, .. } = *self;
        let tiny = ModelFiles::open(tiny("llama")).unwrap().config().clone();
        let attention_scale = (head_dim as f32).sqrt().recip();
        let layers = vec![LayerSpec { window: None, attention_scale, ..tiny.layers[0].clone() }];
        Config { layers, heads, kv_heads, head_dim, ..tiny }
    }

    /// The cache after the prompt, with room for `room` tokens.
    pub(super) fn prefilled(
        &self,
        device: &Arc<dyn Device>,
        eviction: &Eviction,
        room: usize,
    ) -> crate::Result<EvictingCache> {
        let Given { heads, head_dim, n, dtype, .. } = *self;
        let prompt =
            PromptSpans { system: Span::new(0, self.system), question: Span::new(n - self.question, n) };
        let ropes = Ropes::shared(Rope::new(vec![0.0; head_dim / 2], 1.0), 1);
        let mut bounded =
            EvictingCache::new(device, &self.config(), ropes, eviction, prompt, (dtype, room), None)?
                .unwrap();
        let stored = |values: &[f32]| {
            let mut buffer = Buffer::zeros(dtype, values.len());
            buffer.write_f32(0, values);
            device.upload_kv(buffer.as_slice())
        };
        let cache = LayerCache { k: stored(&self.k), v: stored(&self.v) };
        let rows: Vec<u32> = (0..n as u32).collect();
        let visible: Vec<(u32, u32)> = (1..=n as u32).map(|end| (0, end)).collect();
        let q = upload(&**device, &self.q[..n * heads * head_dim]);
        let prompt = PromptLayer {
            whole: &cache,
            q: &q,
            first_row: 0,
            rows: &rows,
            visible: &visible,
            origins: None,
            precision: Precision::F32,
            lse: None,
            mass: None,
        };
        bounded.observe_prompt(0, &prompt, &MemoryMeter::default());
        Ok(bounded)
    }
}

/// A policy evaluated by its definition: what every row gave to every token is kept for good.
struct Plain<'a> {
    given: &'a Given,
    capacity: usize,
    /// Keys and values by token, `tokens × Hkv × d`.
    k: Vec<f32>,
    v: Vec<f32>,
    /// Tokens that stay, for each KV head.
    kept: Vec<Vec<usize>>,
    /// weights[row][KV head]: token to weight, summed over the group.
    weights: Vec<Vec<BTreeMap<usize, f64>>>,
}

impl Plain<'_> {
    /// Attention of token `row` over what is kept; its weights are noted.
    fn attend(&mut self, row: usize) -> Vec<f64> {
        let Given { heads, kv_heads, head_dim: d, .. } = *self.given;
        let mut out = vec![0.0; heads * d];
        let mut weights = vec![BTreeMap::new(); kv_heads];
        for h in 0..heads {
            let g = h / (heads / kv_heads);
            let seen: Vec<usize> = self.kept[g].iter().copied().filter(|t| *t <= row).collect();
            let score = |t: &usize| {
                let q = &self.given.q[(row * heads + h) * d..][..d];
                let k = &self.k[(t * kv_heads + g) * d..][..d];
                q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>() / (d as f64).sqrt()
            };
            let scores: Vec<f64> = seen.iter().map(score).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
            for (t, s) in seen.iter().zip(scores) {
                let p = (s - max).exp() / total;
                *weights[g].entry(*t).or_insert(0.0) += p;
                for e in 0..d {
                    out[h * d + e] += p * f64::from(self.v[(t * kv_heads + g) * d + e]);
                }
            }
        }
        self.weights.push(weights);
        out
    }

    /// Keeps `keep` tokens of each head, the last `recent` of `next` and the best of the others.
    fn prune(&mut self, next: usize, keep: usize, recent: usize, score: impl Fn(&Self, usize, usize) -> f64) {
        for g in 0..self.given.kv_heads {
            let mut order: Vec<(f64, usize)> = self.kept[g]
                .iter()
                .map(|t| (if t + recent >= next { f64::INFINITY } else { score(self, g, *t) }, *t))
                .collect();
            order.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            order.truncate(keep);
            self.kept[g] = order.into_iter().map(|(_, t)| t).collect();
        }
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

#[derive(Clone, Copy, Debug)]
enum Which {
    H2o {
        recent: usize,
    },
    Streaming {
        sinks: usize,
    },
    Morph {
        window: usize,
        max: bool,
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
    fn is_one_shot(self) -> bool {
        matches!(self, Which::OneShot { .. })
    }

    fn spec(self, capacity: usize) -> String {
        match self {
            Which::H2o { recent } => format!("h2o:capacity={capacity},recent={recent}"),
            Which::Streaming { sinks } => {
                format!("streaming_llm:capacity={capacity},sinks={sinks},positions=original")
            }
            Which::Morph { window, max } => {
                format!(
                    "morph_kv:capacity={capacity},window={window},fuse={}",
                    if max { "max" } else { "sum" }
                )
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

    /// A token's score for a head, from the weights that the first `rows` rows gave it.
    fn score(self, plain: &Plain<'_>, rows: usize, g: usize, t: usize) -> f64 {
        match self {
            Which::H2o { .. } => (0..rows).map(|row| plain.given_to(row, g, t)).sum(),
            Which::Streaming { sinks } => {
                if t < sinks {
                    f64::INFINITY
                } else {
                    t as f64
                }
            }
            Which::Morph { window, max } => {
                let last = (rows.saturating_sub(window)..rows).map(|row| plain.given_to(row, g, t));
                if max { last.fold(0.0, f64::max) } else { last.sum() }
            }
            Which::Scissorhands { history, .. } => {
                let group = (plain.given.heads / plain.given.kv_heads) as f64;
                let unimportant = |row: &usize| {
                    let seen = plain.weights[*row][g].len() as f64;
                    *row >= t && plain.given_to(*row, g, t) < group / seen
                };
                -((rows.saturating_sub(history)..rows).filter(unimportant).count() as f64)
            }
            Which::MorphCode { window, max, mistral } => {
                let group = plain.given.heads / plain.given.kv_heads;
                let distant: Vec<usize> =
                    plain.kept[g].iter().copied().filter(|t| t + window < rows).collect();
                let Some(at) = distant.iter().position(|distant| *distant == t) else { return f64::INFINITY };
                let heads = g * group..(g + 1) * group;
                let given = |row: usize| {
                    let mut logits = heads.clone().map(|h| plain.logits_in_f16(row, h, &distant));
                    if mistral {
                        return logits.map(|logits| softmax(&logits)[at]).fold(0.0, f64::max);
                    }
                    let first = logits.next().unwrap();
                    let add =
                        |sum: Vec<f64>, one: Vec<f64>| sum.iter().zip(one).map(|(a, b)| a + b).collect();
                    softmax(&logits.fold(first, add))[at]
                };
                let last = (rows.saturating_sub(window - usize::from(mistral))..rows).map(given);
                if max { last.fold(0.0, f64::max) } else { last.sum() }
            }
            Which::OneShot { protects, window, kernel, max } => {
                let Given { n, system, question, .. } = *plain.given;
                let (first, last) = if protects { (system, n - question) } else { (0, n - window) };
                if t < first {
                    return f64::INFINITY;
                }
                if t >= last {
                    // The latest of these tokens stay if there is no room for all.
                    return 1e30 * (1.0 + t as f64);
                }
                let rows = if window == 0 { plain.capacity / 2 } else { window };
                let rows = if protects { rows.min(question) } else { rows };
                let sum = |t| (n - rows..n).map(|row| plain.given_to(row, g, t)).sum();
                let sums: Vec<f64> = (first..last).map(sum).collect();
                pooled(&sums, t - first, kernel, max)
            }
        }
    }

    /// The tokens that are kept before token `next` comes.
    fn prune(self, plain: &mut Plain<'_>, next: usize, capacity: usize) {
        if plain.kept[0].len() <= capacity || (self.is_one_shot() && next > plain.given.n) {
            return;
        }
        let (keep, recent) = match self {
            Which::H2o { recent } => (capacity, recent),
            Which::Streaming { .. } => (capacity, 0),
            Which::Morph { window, .. } | Which::MorphCode { window, .. } => (capacity, window),
            Which::OneShot { .. } => (capacity, 0),
            Which::Scissorhands { recent, .. } => (capacity + 1 - (capacity / 2).max(1), recent),
        };
        let rows = plain.weights.len();
        plain.prune(next, keep, recent, |plain, g, t| self.score(plain, rows, g, t));
    }
}

fn which() -> impl Strategy<Value = Which> {
    prop_oneof![
        (1usize..6).prop_map(|recent| Which::H2o { recent }),
        (0usize..4).prop_map(|sinks| Which::Streaming { sinks }),
        (1usize..6, any::<bool>()).prop_map(|(window, max)| Which::Morph { window, max }),
        (1usize..9, 1usize..3).prop_map(|(history, recent)| Which::Scissorhands { history, recent }),
        (2usize..6, any::<bool>(), any::<bool>()).prop_map(|(window, max, mistral)| Which::MorphCode {
            window,
            max,
            mistral
        }),
        (any::<bool>(), 1usize..6, 0usize..3, any::<bool>()).prop_map(|(protects, window, side, max)| {
            Which::OneShot { protects, window: window - usize::from(protects), kernel: 2 * side + 1, max }
        }),
    ]
}

fn numbers(seed: u64, count: usize, scale: f32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale
    };
    (0..count).map(|_| next()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Outputs and retained sets at every step are those of the definition. Where two scores are so near one another that
    /// rounding decides, the rest of the run is let go.
    #[test]
    fn a_bounded_cache_does_what_the_policy_says(
        which in which(),
        (kv_heads, group, head_dim) in (1usize..4, 1usize..5, prop::sample::select(vec![4usize, 8, 24])),
        (n, steps, capacity) in (1usize..40, 1usize..30, 7usize..24),
        (system, question) in (1usize..5, 1usize..10),
        precision in prop::sample::select(vec![Precision::F32, Precision::Bf16]),
        seed in any::<u64>(),
    ) {
        let heads = kv_heads * group;
        // A policy that prunes once has a prompt to prune.
        let n = if which.is_one_shot() { n + capacity } else { n };
        let system = system.min(n - 1);
        let question = question.min(n - system);
        let eviction = policy(&which.spec(capacity));
        let tokens = n + steps;
        let (q, by_token) = (numbers(seed, tokens * heads * head_dim, 3.0), numbers(!seed, 2 * tokens * kv_heads * head_dim, 1.0));
        let (k, v) = by_token.split_at(tokens * kv_heads * head_dim);
        let by_head = |x: &[f32]| {
            let mut out = Vec::new();
            for g in 0..kv_heads {
                for t in 0..n {
                    out.extend_from_slice(&x[(t * kv_heads + g) * head_dim..][..head_dim]);
                }
            }
            out
        };
        let given = Given { heads, kv_heads, head_dim, n, system, question, dtype: Dtype::F32, q: q.clone(), k: by_head(k), v: by_head(v) };
        let device = device();
        let mut bounded = given.prefilled(&device, &eviction, tokens + 100).unwrap();
        let mut plain = Plain {
            given: &given, capacity, k: k.to_vec(), v: v.to_vec(), kept: vec![(0..n).collect(); kv_heads], weights: Vec::new(),
        };
        for row in 0..n {
            plain.attend(row);
        }
        let rotary = RopeTable::default();
        let mut output = device.floats(heads * head_dim);
        for position in n..tokens {
            let before = plain.kept.clone();
            which.prune(&mut plain, position, capacity);
            plain.kept.iter_mut().for_each(|kept| kept.push(position));
            let expected = plain.attend(position);
            let row = position * kv_heads * head_dim..(position + 1) * kv_heads * head_dim;
            let (own_k, own_v) = (Slice::F32(&k[row.clone()]), Slice::F32(&v[row]));
            let mut own_q = upload(&*device, &q[position * heads * head_dim..][..heads * head_dim]);
            let token = KeptToken {
                position: position as u32,
                rotary: rotary.slice(0, 0),
                q: &mut own_q,
                kv: (KvRows::Host(own_k), KvRows::Host(own_v)),
            };
            bounded.attend(precision, 0, token, &mut output);
            let out = download(&*device, &output);
            let (mut parted, mut got_all) = (false, Vec::new());
            for (g, kept) in plain.kept.iter_mut().enumerate() {
                kept.sort_unstable();
                let mut got: Vec<usize> = bounded.positions(0, g).iter().map(|p| *p as usize).collect();
                got.sort_unstable();
                prop_assert_eq!(got.len(), kept.len(), "{:?} at {}", which, position);
                parted |= got != *kept;
                got_all.push(got);
            }
            if parted {
                let kept = std::mem::replace(&mut plain.kept, before);
                for (g, got) in got_all.iter().enumerate() {
                    let worth = |t: &usize| which.score(&plain, position, g, *t);
                    let only = |of: &[usize], not: &[usize]| -> Vec<f64> {
                        let mut only: Vec<f64> = of.iter().filter(|t| !not.contains(t)).map(worth).collect();
                        only.sort_by(f64::total_cmp);
                        only
                    };
                    for (a, b) in only(got, &kept[g]).iter().zip(only(&kept[g], got)) {
                        prop_assert!((a - b).abs() <= 2e-3 * a.abs().max(b.abs()), "{:?} at {}: {} {}", which, position, a, b);
                    }
                }
                return Ok(());
            }
            for (got, expected) in out.iter().zip(&expected) {
                prop_assert!((f64::from(*got) - expected).abs() < 1e-4, "{:?} at {}: {} {}", which, position, got, expected);
            }
        }
    }
}
