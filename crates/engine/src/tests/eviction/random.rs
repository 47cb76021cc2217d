//! Random shapes, GQA ratios and capacities: a bounded cache against a plain evaluation of the same policy in f64.

use proptest::prelude::*;
use refrain_kernels::{Dtype, KvRows, Precision, Slice, download, upload};
use refrain_kv::RopeTable;

use super::given::Given;
use super::plain::{Plain, Which};
use super::policy;
use crate::cache::KeptToken;
use crate::tests::device;

fn which() -> impl Strategy<Value = Which> {
    let (tau, step) = (prop::sample::select(vec![0.5f64, 1.0]), prop::sample::select(vec![0.1f64, 0.5]));
    let evict_after = prop::sample::select(vec![1.0f64, 1.5]);
    prop_oneof![
        (1usize..6, any::<bool>()).prop_map(|(recent, normalise)| Which::H2o { recent, normalise }),
        (1usize..6, 0u64..9, tau, step).prop_map(|(recent, seed, tau, step)| Which::Keyformer {
            recent,
            seed,
            tau,
            step
        }),
        (0usize..4).prop_map(|sinks| Which::Streaming { sinks }),
        (1usize..6, any::<bool>(), evict_after).prop_map(|(window, max, evict_after)| Which::Morph {
            window,
            max,
            evict_after
        }),
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
        (layers, gaps, attends_first) in (1usize..3, prop::sample::select(vec![-1.0f32, 0.0, 0.8]), any::<bool>()),
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
        // The question's rows are computed, and all, half or a tenth of the others.
        let chance = numbers(seed.rotate_left(32), n, 1.0);
        let is_computed = |row: &u32| *row as usize + question >= n || chance[*row as usize] >= gaps;
        let computed = (0..n as u32).filter(is_computed).collect();
        let given = Given { layers, computed, attends_first, heads, kv_heads, head_dim, n, system, question, dtype: Dtype::F32, q: q.clone(), k: by_head(k), v: by_head(v) };
        let device = device();
        let mut bounded = given.prefilled(&device, &eviction, tokens + 100).unwrap();
        let mut plain = Plain {
            given: &given, which, capacity, k: k.to_vec(), v: v.to_vec(), kept: vec![(0..n).collect(); kv_heads], weights: Vec::new(),
        };
        plain.attend_prompt();
        let rotary = RopeTable::default();
        let mut output = device.floats(heads * head_dim);
        for position in n..tokens {
            let before = plain.kept.clone();
            plain.prune(position);
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
            bounded.attend(precision, layers - 1, token, &mut output);
            let out = download(&*device, &output);
            let (mut parted, mut got_all) = (false, Vec::new());
            for (g, kept) in plain.kept.iter_mut().enumerate() {
                kept.sort_unstable();
                let mut got: Vec<usize> = bounded.positions(layers - 1, g).iter().map(|p| *p as usize).collect();
                got.sort_unstable();
                prop_assert_eq!(got.len(), kept.len(), "{:?} at {}", which, position);
                parted |= got != *kept;
                got_all.push(got);
            }
            if parted {
                let kept = std::mem::replace(&mut plain.kept, before);
                for (g, got) in got_all.iter().enumerate() {
                    let worth = |t: &usize| plain.score(position, g, *t);
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
