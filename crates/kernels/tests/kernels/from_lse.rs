//! Weights of rows on slots, from log-sum-exps that attention reported before.

use std::ops::Range;

use refrain_kernels::{AttentionOutputs, Cpu, Isa, Precision};

use crate::attention::{Case, causal};
use crate::{DTYPES, Rng, bits, cpus};

/// Logarithms that attention tells of the case's rows.
fn logarithms(case: &Case, cpu: &Cpu) -> Vec<f32> {
    let (mut out, mut lse) = (vec![0.0; case.q.len()], vec![f32::NAN; case.visible.len() * case.heads]);
    let report = AttentionOutputs { lse: Some(&mut lse), ..AttentionOutputs::default() };
    cpu.attention_with_outputs(&case.all(), &mut out, report);
    lse
}

/// Takes from each row the last slot that it saw, and from every seventh all of them; their logarithms become useless.
fn see_less(case: &mut Case, lse: &mut [f32]) {
    for (r, seen) in case.visible.iter_mut().enumerate() {
        seen.1 -= 1;
        if r % 7 == 3 {
            seen.1 = seen.0;
        }
        if seen.0 == seen.1 {
            lse[r * case.heads..][..case.heads].fill(f32::NAN);
        }
    }
}

/// Rows × heads × capacity: weights that softmax gave, of those slots that are seen now.
fn weights(case: &Case, seen: &[(u32, u32)]) -> Vec<f64> {
    let mut all = vec![0.0; case.visible.len() * case.heads * case.capacity];
    for r in 0..case.visible.len() {
        for h in 0..case.heads {
            for (t, p) in case.probabilities(r, h, 0) {
                if (seen[r].0..seen[r].1).contains(&(t as u32)) {
                    all[(r * case.heads + h) * case.capacity + t] = p;
                }
            }
        }
    }
    all
}

fn sums(case: &Case, weights: &[f64], slots: Range<usize>) -> Vec<f64> {
    let mut sums = vec![0.0; case.kv_heads * slots.len()];
    for (i, weights) in weights.chunks_exact(case.capacity).enumerate() {
        let g = i % case.heads / (case.heads / case.kv_heads);
        let sums = &mut sums[g * slots.len()..][..slots.len()];
        sums.iter_mut().zip(&weights[slots.clone()]).for_each(|(sum, w)| *sum += w);
    }
    sums
}

fn chosen(case: &Case, weights: &[f64], slots: &[u32]) -> Vec<f64> {
    let mut all = Vec::new();
    for slot in slots {
        for weights in weights.chunks_exact(case.heads * case.capacity) {
            all.push(weights.iter().skip(*slot as usize).step_by(case.capacity).sum());
        }
    }
    all
}

/// Asserts that errors are below `tolerance` of the number itself and the mean of all.
#[track_caller]
fn assert_near(a: &[f32], b: &[f64], tolerance: f64, what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    let mean = b.iter().sum::<f64>() / b.len().max(1) as f64;
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        let error = (f64::from(*a) - b).abs();
        assert!(error <= tolerance * (b + mean), "{what}: element {i} is {a}, should be {b}");
        assert!(*b != 0.0 || *a < 1e-30, "{what}: no row sees element {i}, {a}");
    }
}

#[test]
fn attention_mass_and_column_weights_of_given_logarithms() {
    let mut rng = Rng::new(41);
    let scattered = (0..41).map(|_| (rng.below(300) as u32, 301 + rng.below(300) as u32)).collect();
    let cases = [
        ((14, 2, 64), 300, causal(90, 300, usize::MAX), 0..300),
        ((9, 3, 64), 400, causal(203, 390, usize::MAX), 130..371),
        ((4, 4, 80), 200, causal(70, 200, 90), 77..200),
        ((6, 1, 128), 150, causal(33, 140, usize::MAX), 0..150),
        ((8, 2, 48), 620, scattered, 100..600),
        ((1, 1, 100), 300, causal(300, 300, usize::MAX), 0..65),
        ((4, 2, 7), 90, causal(3, 90, usize::MAX), 10..11),
        ((72, 1, 16), 64, causal(20, 64, usize::MAX), 0..64),
        ((4, 1, 256), 150, causal(33, 140, usize::MAX), 0..150),
    ];
    for (i, (shape, capacity, visible, slots)) in cases.into_iter().enumerate() {
        let mut case = Case::new(&mut rng, DTYPES[i % 3], shape, capacity, visible);
        let some: Vec<u32> = (0..capacity as u32).filter(|_| rng.below(3) == 0).collect();
        let few = &some[some.len() / 2..][..5.min(some.len() / 2)];
        let before = case.visible.clone();
        let mut seen = None;
        for precision in [Precision::F32, Precision::Bf16] {
            case.precision = precision;
            for cpu in cpus(2) {
                let what = format!("case {i} {precision} {:?}", cpu.isa());
                case.visible = before.clone();
                let mut lse = logarithms(&case, &cpu);
                see_less(&mut case, &mut lse);
                let should = seen.get_or_insert_with(|| {
                    let now = std::mem::replace(&mut case.visible, before.clone());
                    let all = weights(&case, &now);
                    case.visible = now;
                    all
                });
                let tolerance = match cpu.isa() {
                    // Scores of tiles are of queries and keys in bf16.
                    Isa::Amx | Isa::Avx512Bf16 if precision != Precision::F32 => 2e-2,
                    // The logarithms are those of queries and keys in integers of 12 bits and more.
                    Isa::Avx2 | Isa::Avx2Vnni if precision != Precision::F32 => 2e-3,
                    _ => 1e-4,
                };
                let mut got = vec![f32::NAN; case.kv_heads * slots.len()];
                cpu.attention_mass_from_lse(&case.all(), &lse, slots.clone(), &mut got);
                assert_near(&got, &sums(&case, should, slots.clone()), tolerance, &what);
                for some in [&some[..], few, &[]] {
                    let mut got = vec![f32::NAN; some.len() * case.visible.len()];
                    cpu.column_weights_from_lse(&case.all(), &lse, some, &mut got);
                    assert_near(&got, &chosen(&case, should, some), tolerance, &what);
                }
            }
        }
    }
}

#[test]
fn threads_do_not_change_attention_mass() {
    let mut rng = Rng::new(42);
    for (shape, n) in [((14, 2, 64), 700), ((9, 3, 64), 450), ((3, 1, 80), 900)] {
        let mut case = Case::new(&mut rng, DTYPES[1], shape, n, causal(n - 30, n, usize::MAX));
        let some: Vec<u32> = (0..n as u32).step_by(37).collect();
        for precision in [Precision::F32, Precision::Q8] {
            case.precision = precision;
            for (one, others) in cpus(1).iter().zip(cpus(2).into_iter().zip(cpus(3))) {
                let lse = logarithms(&case, one);
                let all = |cpu: &Cpu| {
                    let mut sums = vec![f32::NAN; case.kv_heads * n];
                    cpu.attention_mass_from_lse(&case.all(), &lse, 0..n, &mut sums);
                    let mut weights = vec![f32::NAN; some.len() * case.visible.len()];
                    cpu.column_weights_from_lse(&case.all(), &lse, &some, &mut weights);
                    (bits(&sums), bits(&weights))
                };
                let should = all(one);
                assert_eq!(all(&others.0), should, "2 threads, {:?}", one.isa());
                assert_eq!(all(&others.1), should, "3 threads, {:?}", one.isa());
            }
        }
    }
}

#[test]
fn slots_that_no_row_sees_give_nothing_whatever_they_hold() {
    let mut rng = Rng::new(43);
    let mut case = Case::new(&mut rng, DTYPES[0], (4, 2, 64), 200, causal(40, 150, 60));
    for g in 0..2 {
        for slots in [0..case.visible[0].0 as usize, 150..200] {
            case.k.write_f32((g * 200 + slots.start) * 64, &vec![f32::NAN; slots.len() * 64]);
        }
    }
    let all: Vec<u32> = (0..200).collect();
    case.precision = Precision::Bf16;
    for cpu in cpus(2) {
        let lse = logarithms(&case, &cpu);
        let (mut sums, mut weights) = (vec![f32::NAN; 2 * 200], vec![f32::NAN; 200 * 40]);
        cpu.attention_mass_from_lse(&case.all(), &lse, 0..200, &mut sums);
        cpu.column_weights_from_lse(&case.all(), &lse, &all, &mut weights);
        for total in [sums.iter().sum::<f32>(), weights.iter().sum()] {
            assert!((total - 160.0).abs() < 0.5, "{:?}: {total}", cpu.isa());
        }
        assert!(weights[150 * 40..].iter().all(|w| *w == 0.0), "{:?}", cpu.isa());
    }
}
