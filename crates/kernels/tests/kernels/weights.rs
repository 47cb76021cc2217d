//! Attention's reports of its weights.

use refrain_kernels::{Cpu, Dtype, GumbelNoise, Precision};

use crate::attention::{Case, causal};
use crate::{DTYPES, Rng, assert_close, bits, cpus};

/// The weight of each row on each slot from `first` on, summed over the heads of a group: kv_heads × rows × (end − first).
fn weights(case: &Case, first: usize, end: usize) -> Vec<f64> {
    let (n, rows, group) = (end - first, case.visible.len(), case.heads / case.kv_heads);
    let mut all = vec![0.0; case.kv_heads * rows * n];
    for r in 0..rows {
        for h in 0..case.heads {
            for (t, p) in case.probabilities(r, h, first).into_iter().filter(|(t, _)| *t < end) {
                all[(h / group * rows + r) * n + t - first] += p;
            }
        }
    }
    all
}

#[test]
fn weights_of_each_row() {
    let mut rng = Rng::new(31);
    let cases = [
        ((9, 3, 64), 300, causal(30, 300, usize::MAX), 0..300),
        ((4, 1, 24), 400, causal(90, 390, 120), 130..350),
        ((14, 2, 64), 700, causal(1, 650, usize::MAX), 0..650),
        ((2, 2, 16), 100, vec![(0, 10), (50, 100), (3, 64)], 40..60),
    ];
    for (i, (shape, capacity, visible, slots)) in cases.into_iter().enumerate() {
        let case = Case::new(&mut rng, DTYPES[i % 3], shape, capacity, visible);
        let should = weights(&case, slots.start, slots.end);
        for cpu in cpus(3) {
            let mut got = vec![f32::NAN; should.len()];
            cpu.row_weights(&case.all(), slots.clone(), &mut got);
            assert_close(&got, &should, 1e-5, &format!("case {i} {:?}", cpu.isa()));
        }
    }
}

#[test]
fn a_step_of_decoding_is_the_same_weighed_and_not() {
    let mut rng = Rng::new(32);
    let cases = [
        ((9, 3, 64), 600, causal(1, 599, usize::MAX)),
        ((9, 3, 64), 4200, causal(1, 4111, usize::MAX)),
        ((14, 2, 64), 1100, causal(1, 1100, usize::MAX)),
        ((4, 4, 24), 20, causal(1, 3, usize::MAX)),
        ((8, 1, 100), 1300, causal(1, 1290, 700)),
        ((12, 1, 16), 600, causal(1, 530, usize::MAX)),
        ((5, 1, 40), 1024, causal(1, 1024, usize::MAX)),
    ];
    for (i, (shape, capacity, visible)) in cases.into_iter().enumerate() {
        let end = visible[0].1 as usize;
        let mut case = Case::new(&mut rng, DTYPES[i % 3], shape, capacity, visible);
        let should = weights(&case, 0, end);
        for precision in [Precision::F32, Precision::Bf16] {
            case.precision = precision;
            for cpu in cpus(2) {
                let (mut out, mut got) = (vec![f32::NAN; case.q.len()], vec![f32::NAN; should.len()]);
                cpu.decode_with_weights(&case.all(), &mut out, &mut got);
                let what = format!("case {i} {precision} {:?}", cpu.isa());
                assert_eq!(bits(&out), bits(&case.run(&cpu, 0..1)), "{what}");
                assert_close(&got, &should, 1e-5, &what);
            }
        }
    }
}

fn noisy(cpu: &Cpu, case: &Case, noise: &GumbelNoise) -> Vec<f32> {
    let mut sums = vec![f32::NAN; case.kv_heads * case.capacity];
    cpu.noisy_attention_mass(&case.all(), 0..case.capacity, noise, &mut sums);
    sums
}

#[test]
fn no_noise_and_a_temperature_of_1_change_nothing() {
    let mut rng = Rng::new(33);
    let case = Case::new(&mut rng, Dtype::F16, (6, 2, 32), 200, causal(70, 190, usize::MAX));
    let (rows, tokens) = (vec![0; 70], vec![0; 400]);
    for cpu in cpus(2) {
        let mut plain = vec![0.0; 400];
        cpu.attention_mass(&case.all(), 0..200, &mut plain);
        let noise = GumbelNoise {
            seed: None,
            temperature: 1.0,
            query_positions: &rows,
            key_positions: Some(&tokens),
        };
        assert_eq!(bits(&noisy(&cpu, &case, &noise)), bits(&plain));
        assert_ne!(bits(&noisy(&cpu, &case, &GumbelNoise { temperature: 2.0, ..noise })), bits(&plain));
        let hot = noisy(&cpu, &case, &GumbelNoise { temperature: 1e6, ..noise });
        let even: f64 = case.visible.iter().map(|seen| 1.0 / f64::from(seen.1)).sum();
        assert_close(&hot[..1], &[3.0 * even], 1e-4, "a very high temperature makes all alike");
    }
}

/// Gumbel noise turns the highest logit into a draw from the softmax: of logits ln 0.7 and ln 0.3 the first wins seven
/// times in ten.
#[test]
fn noise_is_gumbel_and_belongs_to_token_and_row_not_to_the_slot() {
    const ROWS: usize = 4000;
    let mut rng = Rng::new(34);
    let mut case = Case::new(&mut rng, Dtype::F32, (1, 1, 8), 2, vec![(0, 2); ROWS]);
    case.q.fill(0.0);
    case.q.iter_mut().step_by(8).for_each(|q| *q = 1.0 / 0.3);
    let keys = [0.7f32.ln(), 0.3f32.ln()];
    let write = |case: &mut Case, keys: [f32; 2]| {
        keys.iter().enumerate().for_each(|(t, key)| case.k.write_f32(8 * t, &[*key]));
    };
    let rows: Vec<u32> = (100..100 + ROWS as u32).collect();
    let noise = GumbelNoise {
        seed: Some(7),
        temperature: 1e-4,
        query_positions: &rows,
        key_positions: Some(&[4, 9]),
    };
    for cpu in cpus(2) {
        write(&mut case, keys);
        let first = noisy(&cpu, &case, &noise);
        let share = f64::from(first[0]) / ROWS as f64;
        assert!((share - 0.7).abs() < 0.03, "{:?}: {share}", cpu.isa());
        write(&mut case, [keys[1], keys[0]]);
        let swapped = noisy(&cpu, &case, &GumbelNoise { key_positions: Some(&[9, 4]), ..noise });
        assert_close(&[swapped[1], swapped[0]], &[first[0].into(), first[1].into()], 1e-5, "swapped slots");
        let other = noisy(&cpu, &case, &GumbelNoise { seed: Some(8), ..noise });
        assert_ne!(bits(&other), bits(&swapped), "another seed, other noise");
    }
}
