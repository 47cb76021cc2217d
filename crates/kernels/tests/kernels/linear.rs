use std::f64::consts::FRAC_2_PI;
use std::ops::Range;

use refrain_kernels::{Activation, Cpu, Isa, Linear, Precision, Q4Block, WeightRows, bf16, f16};

use crate::{Rng, assert_close, bits, cpus};

const PRECISIONS: [Precision; 2] = [Precision::F32, Precision::Bf16];

fn pack(cpu: &Cpu, precision: Precision, w: &[f32], inputs: usize, bias: Option<Vec<f32>>) -> Linear {
    Linear::pack(cpu, precision, w.len() / inputs, inputs, bias, WeightRows::F32(&copy(w, inputs))).unwrap()
}

/// Hands the rows of a matrix out, `each` elements long.
fn copy<E: Copy + Sync>(w: &[E], each: usize) -> impl Fn(usize, &mut [E]) -> Result<(), ()> + Sync {
    move |o, buf| {
        buf.copy_from_slice(&w[o * each..(o + 1) * each]);
        Ok(())
    }
}

/// Both operands rounded as the product rounds them, summed in f64.
fn reference(precision: Precision, w: &[f32], bias: Option<&[f32]>, x: &[f32], inputs: usize) -> Vec<f64> {
    let round = |v: f32| match precision {
        Precision::F32 => v as f64,
        _ => bf16::from_f32(v).to_f64(),
    };
    let mut y = Vec::new();
    for x in x.chunks_exact(inputs) {
        for (o, w) in w.chunks_exact(inputs).enumerate() {
            let sum: f64 = x.iter().zip(w).map(|(x, w)| round(*x) * round(*w)).sum();
            y.push(sum + bias.map_or(0.0, |b| b[o] as f64));
        }
    }
    y
}

/// Errors of a sum in f32 grow with its length.
fn tolerance(inputs: usize) -> f64 {
    2e-6 * (inputs as f64).sqrt()
}

/// Rows from which on a product may be one of integers of 16 bits.
const MANY: usize = 24;

/// Whether products of many rows are those of integers of 16 bits.
fn multiplies_integers(cpu: &Cpu, precision: Precision, four_bits: bool) -> bool {
    match cpu.isa() {
        Isa::Avx2 => precision != Precision::F32 && !four_bits,
        Isa::Avx2Vnni => precision == Precision::Bf16,
        _ => false,
    }
}

/// A result that a product should have within an error: activations are rounded as the product rounds them, but to integers, which may be off by five
/// deviations of what rounding gives numbers below 1.
fn expected(
    cpu: &Cpu,
    precision: Precision,
    w: &[f32],
    bias: Option<&[f32]>,
    x: &[f32],
    inputs: usize,
) -> (Vec<f64>, f64) {
    if x.len() / inputs < MANY || !multiplies_integers(cpu, precision, false) {
        return (reference(precision, w, bias, x, inputs), tolerance(inputs));
    }
    let w: Vec<f32> = w.iter().map(|w| bf16::from_f32(*w).to_f32()).collect();
    (reference(Precision::F32, &w, bias, x, inputs), 2.5e-4 * (inputs as f64).sqrt())
}

#[test]
fn agrees_with_a_plain_loop() {
    let mut rng = Rng::new(1);
    let sizes = [(1, 1, 1), (1, 33, 70), (2, 64, 32), (3, 31, 31), (4, 5, 65), (5, 96, 100), (7, 577, 33)];
    let large =
        [(12, 576, 130), (13, 1000, 64), (37, 640, 95), (400, 99, 40), (25, 1153, 160), (1, 4864, 300)];
    // Several panels a task, sums in several parts, with bias and without.
    let several = [(70, 3300, 1100), (71, 3300, 1100)];
    for (m, inputs, outputs) in sizes.into_iter().chain(large).chain(several) {
        let (x, w) = (rng.floats(m * inputs), rng.floats(outputs * inputs));
        let bias = (m % 2 == 1).then(|| rng.floats(outputs));
        let before = rng.floats(m * outputs);
        for precision in PRECISIONS {
            for cpu in cpus(2) {
                let (should, tolerance) = expected(&cpu, precision, &w, bias.as_deref(), &x, inputs);
                let added: Vec<f64> = should.iter().zip(&before).map(|(s, b)| s + *b as f64).collect();
                let what = format!("{m}x{inputs}x{outputs} {precision} {:?}", cpu.isa());
                let linear = pack(&cpu, precision, &w, inputs, bias.clone());
                let mut y = vec![f32::NAN; m * outputs];
                cpu.linear(&linear, &x, &mut y);
                assert_close(&y, &should, tolerance, &what);
                let mut y = before.clone();
                cpu.linear_add(&linear, &x, &mut y);
                assert_close(&y, &added, tolerance, &what);
            }
        }
    }
}

/// activation(gate) · up of rows of [gate | up].
fn gate(activation: Activation, sums: &[f64], width: usize) -> Vec<f64> {
    let active = |x: f64| match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => x / 2.0 * (1.0 + ((x + 0.044715 * x.powi(3)) * FRAC_2_PI.sqrt()).tanh()),
    };
    let row = |row: &[f64]| -> Vec<f64> { (0..width).map(|i| active(row[i]) * row[width + i]).collect() };
    sums.chunks_exact(2 * width).flat_map(row).collect()
}

#[test]
fn gate_and_up_projections_are_multiplied() {
    let mut rng = Rng::new(22);
    for (m, inputs, width) in [(1, 3, 1), (3, 40, 19), (45, 96, 100), (300, 64, 160), (70, 3300, 600)] {
        let (x, w) = (rng.floats(m * inputs), rng.floats(2 * width * inputs));
        let bias = (m % 2 == 1).then(|| rng.floats(2 * width));
        for precision in PRECISIONS {
            for cpu in cpus(2) {
                let (sums, tolerance) = expected(&cpu, precision, &w, bias.as_deref(), &x, inputs);
                let rows = copy(&w, inputs);
                let linear = Linear::pack_gate_up(
                    &cpu,
                    precision,
                    width,
                    inputs,
                    bias.clone(),
                    WeightRows::F32(&rows),
                );
                let linear = linear.unwrap();
                for activation in [Activation::Silu, Activation::GeluTanh] {
                    let mut y = vec![f32::NAN; m * width];
                    cpu.linear_gated(&linear, activation, &x, &mut y);
                    let what = format!("{m}x{inputs}x{width} {precision} {activation} {:?}", cpu.isa());
                    // Errors of a gate are multiplied by what it opens.
                    assert_close(&y, &gate(activation, &sums, width), 20.0 * tolerance, &what);
                }
            }
        }
    }
}

#[test]
fn a_row_does_not_depend_on_its_company() {
    let mut rng = Rng::new(2);
    for (m, inputs, outputs) in [(37, 1300, 200), (37, 576, 576), (1001, 77, 65), (70, 1700, 500)] {
        let (x, w) = (rng.floats(m * inputs), rng.floats(outputs * inputs));
        let before = rng.floats(m * outputs);
        for (precision, bias) in
            PRECISIONS.into_iter().flat_map(|p| [(p, None), (p, Some(rng.floats(outputs)))])
        {
            for (cpu, alone) in cpus(3).into_iter().zip(cpus(1)) {
                let what =
                    format!("{m}x{inputs}x{outputs} {precision} {:?} bias {}", cpu.isa(), bias.is_some());
                let linear = pack(&cpu, precision, &w, inputs, bias.clone());
                let run = |cpu: &Cpu, rows: Range<usize>| {
                    let x = &x[rows.start * inputs..rows.end * inputs];
                    let mut y = vec![0.0; rows.len() * outputs];
                    cpu.linear(&linear, x, &mut y);
                    let mut added = before[rows.start * outputs..rows.end * outputs].to_vec();
                    cpu.linear_add(&linear, x, &mut added);
                    (bits(&y), bits(&added))
                };
                let all = run(&cpu, 0..m);
                // Few rows have their own kernels where many are integers, and the bits of their rows are those of one alone.
                let integers = multiplies_integers(&cpu, precision, false);
                for rows in [0..1, 11..12, 12..13, 30..32, 3..7, 2..8, 20..28, 25..37, 4..36, m - 1..m, 0..m]
                {
                    let should = if integers && rows.len() < MANY {
                        let each = rows.clone().map(|row| run(&alone, row..row + 1));
                        let (y, added): (Vec<_>, Vec<_>) = each.unzip();
                        (y.concat(), added.concat())
                    } else {
                        let of = rows.start * outputs..rows.end * outputs;
                        (all.0[of.clone()].to_vec(), all.1[of].to_vec())
                    };
                    for cpu in [&cpu, &alone] {
                        assert!(run(cpu, rows.clone()) == should, "{what} rows {rows:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn many_rows_go_in_several_rounds() {
    let mut rng = Rng::new(3);
    let (m, inputs, outputs) = (900, 4700, 3);
    let (x, w) = (rng.floats(m * inputs), rng.floats(outputs * inputs));
    for cpu in cpus(2) {
        let linear = pack(&cpu, Precision::F32, &w, inputs, None);
        let mut y = vec![0.0; m * outputs];
        cpu.linear(&linear, &x, &mut y);
        assert_close(
            &y,
            &reference(Precision::F32, &w, None, &x, inputs),
            tolerance(inputs),
            &format!("{:?}", cpu.isa()),
        );
    }
}

/// Whether products of blocks of more than four rows are products of bytes, too.
fn multiplies_bytes(cpu: &Cpu, four_bits: bool) -> bool {
    match cpu.isa() {
        Isa::Neon | Isa::NeonDotprod | Isa::Avx2 | Isa::Avx2Vnni | Isa::Avx512Vnni | Isa::Avx512Bf16 => true,
        Isa::Avx512 => four_bits,
        _ => false,
    }
}

/// Activations as products of bytes round them: to signed bytes in blocks of 32.
fn bytes(x: &[f32], inputs: usize) -> Vec<f32> {
    let block = |x: &[f32]| {
        let scale = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs())) / 127.0;
        let round = |x: &f32| if scale > 0.0 { (x * (1.0 / scale)).round_ties_even() * scale } else { 0.0 };
        x.iter().map(round).collect::<Vec<f32>>()
    };
    x.chunks(inputs).flat_map(|row| row.chunks(32).flat_map(block).collect::<Vec<f32>>()).collect()
}

/// Weights in blocks, as packed and as the numbers that they stand for.
fn blocks(rng: &mut Rng, outputs: usize, inputs: usize, four_bits: bool) -> (Vec<Q4Block>, Vec<f32>) {
    let (mut nibbles, mut w) = (Vec::new(), Vec::new());
    for i in 0..outputs * inputs.div_ceil(32) {
        let half = |x: f32| f16::from_f32(x).to_f32();
        let (scale, min) = (half(rng.float() * 0.2), half(rng.float()));
        let n = 32.min(inputs - i % inputs.div_ceil(32) * 32);
        if four_bits {
            let q = std::array::from_fn(|_| rng.below(16) as u8);
            w.extend(q[..n].iter().map(|q| scale * f32::from(*q) + min));
            nibbles.push(Q4Block { scale, min, q });
        } else {
            // The largest is 127, so that packing finds the same scale.
            let q = |i: usize| if i == 0 { 127.0 } else { rng.below(255) as f32 - 127.0 };
            w.extend((0..n).map(q).map(|q| scale * q).collect::<Vec<f32>>());
        }
    }
    (nibbles, w)
}

#[test]
fn blocks_agree_with_a_plain_loop() {
    let mut rng = Rng::new(5);
    let sizes = [(1, 64, 32), (1, 33, 70), (2, 4864, 40), (4, 96, 100), (5, 1153, 65), (40, 640, 33)];
    for (m, inputs, outputs) in sizes.into_iter().chain([(300, 99, 130), (1100, 576, 40), (70, 1700, 600)]) {
        for four_bits in [false, true] {
            let (nibbles, w) = blocks(&mut rng, outputs, inputs, four_bits);
            let x = rng.floats(m * inputs);
            let bias = (m % 2 == 1).then(|| rng.floats(outputs));
            let as_bytes = reference(Precision::F32, &w, bias.as_deref(), &bytes(&x, inputs), inputs);
            let as_bf16 = reference(Precision::Bf16, &w, bias.as_deref(), &x, inputs);
            let exact = reference(Precision::F32, &w, bias.as_deref(), &x, inputs);
            for cpu in cpus(2) {
                let tolerance = tolerance(inputs);
                // Errors of a gate are multiplied by what it opens.
                let (should, tolerance, opened) =
                    if m >= MANY && multiplies_integers(&cpu, Precision::Q8, four_bits) {
                        // A quarter of what rounding activations to bytes does to weights of up to 25.
                        (&exact, 1e3 * tolerance, 400.0)
                    } else if m <= 4 || multiplies_bytes(&cpu, four_bits) {
                        (&as_bytes, tolerance, 50.0)
                    } else {
                        (&as_bf16, tolerance, 50.0)
                    };
                let (of_nibbles, values) = (copy(&nibbles, inputs.div_ceil(32)), copy(&w, inputs));
                let rows = if four_bits { WeightRows::Q4(&of_nibbles) } else { WeightRows::F32(&values) };
                let linear = Linear::pack(&cpu, Precision::Q8, outputs, inputs, bias.clone(), rows).unwrap();
                let mut y = vec![f32::NAN; m * outputs];
                cpu.linear(&linear, &x, &mut y);
                let what = format!("{m}x{inputs}x{outputs}, four bits {four_bits}, {:?}", cpu.isa());
                assert_close(&y, should, 3.0 * tolerance, &what);
                let mut added = vec![1.0; m * outputs];
                cpu.linear_add(&linear, &x, &mut added);
                let one_more: Vec<f64> = should.iter().map(|y| y + 1.0).collect();
                assert_close(&added, &one_more, 3.0 * tolerance, &what);
                if outputs % 2 == 0 {
                    let width = outputs / 2;
                    let linear = Linear::pack_gate_up(&cpu, Precision::Q8, width, inputs, bias.clone(), rows);
                    let mut y = vec![f32::NAN; m * width];
                    cpu.linear_gated(&linear.unwrap(), Activation::Silu, &x, &mut y);
                    let should = gate(Activation::Silu, should, width);
                    assert_close(&y, &should, opened * tolerance, &what);
                }
            }
        }
    }
}

#[test]
fn a_row_of_blocks_does_not_depend_on_its_company() {
    let mut rng = Rng::new(6);
    for (m, inputs, outputs, four_bits) in
        [(37, 1300, 200, false), (200, 576, 96, false), (37, 1300, 200, true), (200, 576, 96, true)]
    {
        let (x, (nibbles, w)) = (rng.floats(m * inputs), blocks(&mut rng, outputs, inputs, four_bits));
        for cpu in cpus(2).into_iter().filter(|cpu| multiplies_bytes(cpu, four_bits)) {
            let (of_nibbles, values) = (copy(&nibbles, inputs.div_ceil(32)), copy(&w, inputs));
            let rows = if four_bits { WeightRows::Q4(&of_nibbles) } else { WeightRows::F32(&values) };
            let bias = Some(rng.floats(outputs));
            let linear = Linear::pack(&cpu, Precision::Q8, outputs, inputs, bias, rows).unwrap();
            let run = |rows: Range<usize>| {
                let mut y = vec![0.0; rows.len() * outputs];
                cpu.linear(&linear, &x[rows.start * inputs..rows.end * inputs], &mut y);
                bits(&y)
            };
            let (all, integers) = (run(0..m), multiplies_integers(&cpu, Precision::Q8, four_bits));
            for rows in [0..1, 7..9, 11..14, 3..8, 20..m, 5..35, m - 1..m] {
                let should = if integers && rows.len() < MANY {
                    rows.clone().map(|row| run(row..row + 1)).collect::<Vec<_>>().concat()
                } else {
                    all[rows.start * outputs..rows.end * outputs].to_vec()
                };
                assert!(run(rows.clone()) == should, "{m}x{inputs}x{outputs} {:?} rows {rows:?}", cpu.isa());
            }
        }
    }
}

/// A row has a scale of its own for 256 inputs: rows of other sizes, outliers, zeros and a NaN leave it as it is.
#[test]
fn integers_are_as_near_for_rows_of_any_size() {
    let (m, inputs, outputs) = (40, 700, 50);
    let mut rng = Rng::new(33);
    let w = rng.floats(outputs * inputs);
    let mut x = rng.floats(m * inputs);
    for (r, row) in x.chunks_exact_mut(inputs).enumerate() {
        row.iter_mut().for_each(|x| *x *= 10f32.powi(r as i32 * 3 / 2 - 30));
        row[r * 3] *= [1.0, 30.0, 1000.0][r % 3];
        if r % 10 == 0 {
            row.fill(0.0);
        }
    }
    x[7 * inputs + 500] = f32::NAN;
    let norm = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    // Rounded weights leave an error of this size.
    for (precision, error) in [(Precision::Bf16, 3e-4), (Precision::Q8, 1e-3)] {
        for cpu in cpus(2).into_iter().filter(|cpu| multiplies_integers(cpu, precision, false)) {
            let linear = pack(&cpu, precision, &w, inputs, None);
            let mut y = vec![1.0; m * outputs];
            cpu.linear(&linear, &x, &mut y);
            for (r, (x, y)) in x.chunks_exact(inputs).zip(y.chunks_exact(outputs)).enumerate() {
                for (o, y) in y.iter().enumerate() {
                    let w = &w[o * inputs..(o + 1) * inputs];
                    let sum: f64 = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                    let near = (f64::from(*y) - sum).abs() <= error * norm(x) * norm(w);
                    assert!(
                        if r == 7 { y.is_nan() } else { near },
                        "{precision} {:?} row {r}, output {o}: {y}, should be {sum}",
                        cpu.isa()
                    );
                }
            }
        }
    }
}

#[test]
fn instruction_sets_agree_closely_in_bf16() {
    let mut rng = Rng::new(4);
    let (m, inputs, outputs) = (5, 900, 64);
    let (x, w) = (rng.floats(m * inputs), rng.floats(outputs * inputs));
    let results: Vec<Vec<f64>> = cpus(1)
        .iter()
        .map(|cpu| {
            let mut y = vec![0.0; m * outputs];
            cpu.linear(&pack(cpu, Precision::Bf16, &w, inputs, None), &x, &mut y);
            y.into_iter().map(f64::from).collect()
        })
        .collect();
    for other in &results[1..] {
        let other: Vec<f32> = other.iter().map(|v| *v as f32).collect();
        assert_close(&other, &results[0], 1e-5, "portable against the others");
    }
}

#[test]
fn packing_reports_the_error_of_a_row() {
    let cpu = Cpu::new(2).unwrap();
    let rows = |o, _: &mut [f32]| if o == 77 { Err(o) } else { Ok(()) };
    for precision in [Precision::Bf16, Precision::Q8] {
        let packed = Linear::pack(&cpu, precision, 100, 8, None, WeightRows::F32(&rows));
        assert_eq!(packed.err(), Some(77));
    }
}

#[test]
fn no_rows_are_no_work() {
    let cpu = Cpu::new(2).unwrap();
    let linear = pack(&cpu, Precision::F32, &[1.0; 8], 4, None);
    cpu.linear(&linear, &[], &mut []);
    assert_eq!((linear.outputs(), linear.inputs(), linear.precision()), (2, 4, Precision::F32));
    assert!(linear.bytes() >= 32);
}

/// FNV-1a of words.
fn digest(words: &[u32]) -> u64 {
    words
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, word| (hash ^ u64::from(*word)).wrapping_mul(0x0100_0000_01b3))
}

/// Files keep packed weights under the name of their layout: other bits need another name (`PACKED_LAYOUT`).
#[test]
fn packed_bits_are_those_of_their_layout() {
    const INPUTS: usize = 70;
    let mut rng = Rng::new(31);
    let w = rng.floats(96 * INPUTS);
    let q4: Vec<Q4Block> = (0..96 * 3)
        .map(|_| Q4Block {
            scale: rng.float(),
            min: rng.float(),
            q: std::array::from_fn(|_| rng.below(16) as u8),
        })
        .collect();
    let floats = |row: usize, out: &mut [f32]| -> Result<(), ()> {
        out.copy_from_slice(&w[row * INPUTS..(row + 1) * INPUTS]);
        Ok(())
    };
    let blocks = |row: usize, out: &mut [Q4Block]| -> Result<(), ()> {
        out.copy_from_slice(&q4[row * 3..(row + 1) * 3]);
        Ok(())
    };
    for cpu in cpus(2) {
        let mut digests = Vec::new();
        for (precision, rows) in [
            (Precision::F32, WeightRows::F32(&floats)),
            (Precision::Bf16, WeightRows::F32(&floats)),
            (Precision::Q8, WeightRows::F32(&floats)),
            (Precision::Q8, WeightRows::Q4(&blocks)),
        ] {
            let plain = |rows: WeightRows<()>| Linear::pack(&cpu, precision, 83, INPUTS, None, rows).unwrap();
            let gated =
                |rows: WeightRows<()>| Linear::pack_gate_up(&cpu, precision, 45, INPUTS, None, rows).unwrap();
            for pack in [&plain as &dyn Fn(WeightRows<()>) -> Linear, &gated] {
                let packed = pack(rows);
                let panels = packed.panels();
                digests.push(digest(panels.words));
                let copy = |p: usize, out: &mut [u32]| -> Result<(), ()> {
                    out.copy_from_slice(&panels.words[p * panels.panel_words..][..panels.panel_words]);
                    Ok(())
                };
                let again = pack(WeightRows::Panels { write: &copy, four_bits: panels.four_bits });
                assert!(again.panels().words == panels.words, "{precision} {:?}", cpu.isa());
                let x = Rng::new(32).floats(3 * INPUTS);
                let [mut y, mut z] = [(); 2].map(|()| vec![0.0; 3 * packed.outputs()]);
                if packed.outputs() == 45 {
                    cpu.linear_gated(&packed, Activation::Silu, &x, &mut y);
                    cpu.linear_gated(&again, Activation::Silu, &x, &mut z);
                } else {
                    cpu.linear(&packed, &x, &mut y);
                    cpu.linear(&again, &x, &mut z);
                }
                assert_eq!(y, z, "{precision} {:?}", cpu.isa());
            }
        }
        assert_eq!(digests, PACKED_DIGESTS, "{:?}", cpu.isa());
    }
}

const PACKED_DIGESTS: [u64; 8] = [
    8_056_039_997_769_124_715,
    277_978_514_139_866_467,
    1_858_504_565_849_955_173,
    3_017_314_587_086_599_182,
    8_792_252_593_959_587_829,
    14_031_992_114_212_226_287,
    17_286_702_697_757_825_969,
    17_553_068_751_260_346_787,
];

/// Another treatment of NaN or infinity is another layout, too: files of packed weights keep what was made of a damaged model.
#[test]
fn packed_bits_of_nan_and_infinity_are_those_of_their_layout() {
    const INPUTS: usize = 70;
    let mut w = Rng::new(31).floats(40 * INPUTS);
    (w[3 * INPUTS + 40], w[17 * INPUTS + 2]) = (f32::NAN, f32::NEG_INFINITY);
    let floats = |row: usize, out: &mut [f32]| -> Result<(), ()> {
        out.copy_from_slice(&w[row * INPUTS..(row + 1) * INPUTS]);
        Ok(())
    };
    for cpu in cpus(2) {
        let digests = [Precision::Bf16, Precision::Q8].map(|precision| {
            let packed = Linear::pack(&cpu, precision, 40, INPUTS, None, WeightRows::F32(&floats)).unwrap();
            digest(packed.panels().words)
        });
        assert_eq!(digests, [16_222_419_181_361_185_624, 17_340_204_645_102_520_760], "{:?}", cpu.isa());
    }
}

/// A NaN must reach the logits, where it becomes an error: of a row each of its results is none, of a weight each of its output's.
#[test]
fn products_of_blocks_with_nan_are_nan() {
    let mut rng = Rng::new(35);
    let (inputs, outputs) = (200, 70);
    for four_bits in [false, true] {
        let (nibbles, mut w) = blocks(&mut rng, outputs, inputs, four_bits);
        if !four_bits {
            w[5 * inputs + 150] = f32::NAN;
        }
        let (of_nibbles, values) = (copy(&nibbles, inputs.div_ceil(32)), copy(&w, inputs));
        for (m, at) in [(1, 0), (1, 31), (1, 199), (40, 77)] {
            let (mut x, row) = (rng.floats(m * inputs), m / 2);
            x[row * inputs + at] = f32::NAN;
            for cpu in cpus(2) {
                let rows = if four_bits { WeightRows::Q4(&of_nibbles) } else { WeightRows::F32(&values) };
                let linear = Linear::pack(&cpu, Precision::Q8, outputs, inputs, None, rows).unwrap();
                let mut y = vec![0.0; m * outputs];
                cpu.linear(&linear, &x, &mut y);
                for (i, y) in y.iter().enumerate() {
                    let (r, o) = (i / outputs, i % outputs);
                    let poisoned = r == row || (o == 5 && !four_bits);
                    assert_eq!(
                        y.is_nan(),
                        poisoned,
                        "{:?} {four_bits} {m} {at}: row {r}, output {o}: {y}",
                        cpu.isa()
                    );
                }
            }
        }
    }
}
