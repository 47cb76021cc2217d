//! AVX2 and NEON compute the same bits, so that what one is tested for holds for the other. Logarithms and angles are the system's, and are left out, and so are
//! attention of more than eight queries whose keys and values may be rounded and products of 24 rows and more, of which AVX2 rounds some to integers.
//!
//! Both are never in one machine: each is compared with a digest. A change that rounds otherwise changes the digest of both.

use refrain_kernels::{
    Activation, Buffer, Cpu, Dtype, Isa, Linear, Precision, Q4Block, WeightRows, f16, softmax,
};

use crate::attention::Case;
use crate::{DTYPES, Rng};

/// FNV-1a over the bits of all results.
struct Digest(u64);

const START: u64 = 0xcbf2_9ce4_8422_2325;

impl Digest {
    fn add(&mut self, x: &[f32]) {
        for byte in x.iter().flat_map(|x| x.to_bits().to_le_bytes()) {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
    }
}

/// The digest of what `work` computes with each instruction set of the family that this machine has.
fn digests(work: impl Fn(&Cpu, &mut Digest)) -> Vec<(Isa, u64)> {
    let family = [Isa::Avx2, Isa::Avx2Vnni, Isa::Neon, Isa::NeonDotprod];
    let cpus = family.into_iter().filter_map(|isa| Cpu::with_isa(2, isa).ok());
    cpus.map(|cpu| {
        let mut digest = Digest(START);
        work(&cpu, &mut digest);
        (cpu.isa(), digest.0)
    })
    .collect()
}

#[track_caller]
fn assert_digests(digests: Vec<(Isa, u64)>, expected: u64) {
    for (isa, digest) in digests {
        assert_eq!(digest, expected, "{isa}: {digest:#x}");
    }
}

#[test]
fn products_have_the_same_bits() {
    let (inputs, outputs) = (200, 70);
    let mut rng = Rng::new(91);
    let (w, bias) = (rng.floats(outputs * inputs), rng.floats(outputs));
    let nibbles: Vec<Q4Block> = (0..outputs * inputs.div_ceil(32))
        .map(|_| Q4Block {
            scale: 0.1 * rng.float(),
            min: rng.float(),
            q: std::array::from_fn(|_| rng.below(16) as u8),
        })
        .collect();
    let x = rng.floats(23 * inputs);
    let products = digests(|cpu, digest| {
        for (precision, four_bits) in
            [(Precision::F32, false), (Precision::Bf16, false), (Precision::Q8, false), (Precision::Q8, true)]
        {
            let values = |o: usize, row: &mut [f32]| {
                row.copy_from_slice(&w[o * inputs..][..inputs]);
                Ok::<(), ()>(())
            };
            let blocks = |o: usize, row: &mut [Q4Block]| {
                row.copy_from_slice(&nibbles[o * row.len()..][..row.len()]);
                Ok::<(), ()>(())
            };
            let rows = || if four_bits { WeightRows::Q4(&blocks) } else { WeightRows::F32(&values) };
            let linear = Linear::pack(cpu, precision, outputs, inputs, Some(bias.clone()), rows()).unwrap();
            let gated = Linear::pack_gate_up(cpu, precision, outputs / 2, inputs, None, rows()).unwrap();
            for m in [1, 2, 3, 8, 23] {
                let x = &x[..m * inputs];
                let mut y = vec![0.0; m * outputs];
                cpu.linear(&linear, x, &mut y);
                digest.add(&y);
                for activation in [Activation::Silu, Activation::GeluTanh] {
                    let mut y = vec![0.0; m * (outputs / 2)];
                    cpu.linear_gated(&gated, activation, x, &mut y);
                    digest.add(&y);
                }
            }
        }
    });
    assert_digests(products, 0xf5c3_b028_756e_a67b);
}

#[test]
fn attention_has_the_same_bits() {
    let mut rng = Rng::new(92);
    let mut cases = Vec::new();
    for dtype in DTYPES {
        for (shape, rows) in [((4, 2, 20), 1), ((3, 1, 64), 2), ((6, 2, 33), 21)] {
            let visible = (0..rows).map(|i| (i / 3, 600 + i)).collect();
            cases.push(Case::new(&mut rng, dtype, shape, 640, visible));
        }
    }
    let attention = digests(|cpu, digest| {
        for case in &cases {
            digest.add(&case.run(cpu, 0..case.visible.len()));
        }
    });
    assert_digests(attention, 0xdb39_7003_8c78_8f57);
}

/// Attention of up to eight queries that may be rounded, and the weights of a single row.
#[test]
fn decoding_has_the_same_bits() {
    let mut rng = Rng::new(95);
    let mut cases = Vec::new();
    for dtype in DTYPES {
        // One query to eight, heads that do not fill vectors, two segments, and one that a row does not see.
        for (shape, visible) in [
            ((1, 1, 40), vec![(0, 600)]),
            ((4, 2, 20), vec![(5, 530)]),
            ((3, 1, 64), vec![(530, 577)]),
            ((8, 2, 33), vec![(3, 590)]),
            ((6, 2, 24), vec![(0, 541), (9, 30)]),
            ((2, 1, 128), vec![(0, 17), (5, 600), (520, 530), (511, 513)]),
        ] {
            let mut case = Case::new(&mut rng, dtype, shape, 600, visible);
            case.precision = Precision::Bf16;
            cases.push(case);
        }
    }
    let decoding = digests(|cpu, digest| {
        for case in &cases {
            digest.add(&case.run(cpu, 0..case.visible.len()));
            if let [(_, end)] = case.visible[..] {
                let (mut out, mut weights) =
                    (vec![0.0; case.q.len()], vec![0.0; case.kv_heads * end as usize]);
                cpu.decode_with_weights(&case.all(), &mut out, &mut weights);
                digest.add(&out);
                digest.add(&weights);
            }
        }
    });
    assert_digests(decoding, 0xc1de_242b_7887_8b03);
}

#[test]
fn weights_of_attention_have_the_same_bits() {
    let mut rng = Rng::new(96);
    let (slots, mut cases) = (70..231, Vec::new());
    for dtype in DTYPES {
        for (shape, rows) in [((6, 2, 33), 21), ((4, 1, 64), 3)] {
            let visible = (0..rows).map(|i| (9 * i, 200 + i)).collect();
            let case = Case::new(&mut rng, dtype, shape, 240, visible);
            // In place of logarithms that the system would take.
            let lse = rng.floats(case.visible.len() * case.heads);
            cases.push((case, lse));
        }
    }
    let some: Vec<u32> = (0..240).filter(|slot| slot % 5 < 2).collect();
    let weights = digests(|cpu, digest| {
        for (case, lse) in &cases {
            let (a, rows, n) = (case.all(), case.visible.len(), slots.len());
            let mut mass = vec![0.0; case.kv_heads * n];
            cpu.attention_mass(&a, slots.clone(), &mut mass);
            digest.add(&mass);
            cpu.attention_mass_from_lse(&a, lse, slots.clone(), &mut mass);
            digest.add(&mass);
            let mut columns = vec![0.0; some.len() * rows];
            cpu.column_weights_from_lse(&a, lse, &some, &mut columns);
            digest.add(&columns);
            let mut weights = vec![0.0; case.kv_heads * rows * n];
            cpu.row_weights(&a, slots.clone(), &mut weights);
            digest.add(&weights);
            let (shape, mut logits) = ((case.heads, case.kv_heads, case.head_dim), vec![0.0; rows * n]);
            let k = case.k.as_slice();
            cpu.concat_logits(&case.q, shape.0, shape.1, shape.2, k, 240, slots.clone(), 0.3, &mut logits);
            digest.add(&logits);
        }
    });
    assert_digests(weights, 0x0269_8e52_0267_2d32);
}

#[test]
fn operations_have_the_same_bits() {
    let mut rng = Rng::new(93);
    let (x, weight) = (rng.floats(3 * 50), rng.floats(50));
    let operations = digests(|cpu, digest| {
        let mut y = vec![0.0; x.len()];
        cpu.rms_norm(&x, &weight, 1e-5, &mut y);
        digest.add(&y);
        let angles: Vec<(f32, f32)> =
            (0..3 * 8).map(|i| ((i as f32 / 32.0), 1.0 - i as f32 / 64.0)).collect();
        let (cos, sin): (Vec<f32>, Vec<f32>) = angles.into_iter().unzip();
        let mut rotated = x[..3 * 2 * 20].to_vec();
        cpu.rope(&mut rotated, 2, 20, &cos, &sin, 16);
        digest.add(&rotated);
    });
    assert_digests(operations, 0x0404_5cd6_2434_59f7);
}

/// Functions without a CPU run the set of the process.
#[test]
fn functions_without_a_cpu_have_the_same_bits() {
    if !matches!(Isa::selected(), Ok(Isa::Avx2 | Isa::Avx2Vnni | Isa::Neon | Isa::NeonDotprod)) {
        return;
    }
    let mut rng = Rng::new(94);
    // Beside usual numbers: subnormal and infinite halves, halfway cases, and both zeros.
    let mut numbers = rng.floats(37);
    numbers.extend([6e-8, -1e-7, 65_519.9, 65_520.0, 1.000_488_3, 1.003_906_3, -0.0, 0.0, f32::NEG_INFINITY]);
    let mut digest = Digest(START);
    let mut probabilities = rng.floats(150);
    softmax(&mut probabilities);
    digest.add(&probabilities);
    for dtype in [Dtype::F16, Dtype::Bf16] {
        let mut buffer = Buffer::zeros(dtype, numbers.len());
        buffer.write_f32(0, &numbers);
        digest.add(&buffer.as_slice().floats());
    }
    let mut halves = vec![f16::ZERO; numbers.len()];
    refrain_kernels::round_to_f16(&mut halves, &numbers);
    digest.add(&halves.iter().map(|half| half.to_f32()).collect::<Vec<f32>>());
    assert_digests(vec![(Isa::selected().unwrap(), digest.0)], 0xa871_4f0c_202c_4aaf);
}
