use std::ops::Range;

use refrain_kernels::{Attention, AttentionOutputs, Buffer, Cpu, Dtype, GumbelNoise, Isa, Precision};

use crate::{DTYPES, Rng, assert_close, bits, cpus};

pub(crate) struct Case {
    pub(crate) q: Vec<f32>,
    pub(crate) k: Buffer,
    pub(crate) v: Buffer,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) capacity: usize,
    pub(crate) visible: Vec<(u32, u32)>,
    pub(crate) precision: Precision,
}

impl Case {
    pub(crate) fn new(
        rng: &mut Rng,
        dtype: Dtype,
        shape: (usize, usize, usize),
        capacity: usize,
        visible: Vec<(u32, u32)>,
    ) -> Case {
        let (heads, kv_heads, head_dim) = shape;
        // Scores have one size at all head dimensions from 64 on, and so have errors of rounding.
        let size = 3.0 * (64.0 / head_dim as f32).sqrt().min(1.0);
        let q = rng.floats(visible.len() * heads * head_dim).iter().map(|q| size * q).collect();
        let n = kv_heads * capacity * head_dim;
        let (k, v) = (rng.buffer(dtype, n), rng.buffer(dtype, n));
        Case { q, k, v, heads, kv_heads, head_dim, capacity, visible, precision: Precision::F32 }
    }

    fn rows(&self, rows: Range<usize>) -> Attention<'_> {
        let width = self.heads * self.head_dim;
        Attention {
            q: &self.q[rows.start * width..rows.end * width],
            k: self.k.as_slice(),
            v: self.v.as_slice(),
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            capacity: self.capacity,
            visible: &self.visible[rows],
            scale: 0.3,
            precision: self.precision,
        }
    }

    pub(crate) fn all(&self) -> Attention<'_> {
        self.rows(0..self.visible.len())
    }

    pub(crate) fn run(&self, cpu: &Cpu, rows: Range<usize>) -> Vec<f32> {
        let mut out = vec![f32::NAN; rows.len() * self.heads * self.head_dim];
        cpu.attention(&self.rows(rows), &mut out);
        out
    }

    fn score(&self, r: usize, h: usize, t: usize) -> f64 {
        let (d, g) = (self.head_dim, h / (self.heads / self.kv_heads));
        let q = &self.q[(r * self.heads + h) * d..][..d];
        let dot: f64 =
            (0..d).map(|e| q[e] as f64 * self.k.as_slice().get((g * self.capacity + t) * d + e) as f64).sum();
        0.3f32 as f64 * dot
    }

    /// Probabilities of the slots that a row sees from `first` on.
    pub(crate) fn probabilities(&self, r: usize, h: usize, first: usize) -> Vec<(usize, f64)> {
        let (start, end) = self.visible[r];
        let p: Vec<_> =
            ((start as usize).max(first)..end as usize).map(|t| (t, self.score(r, h, t))).collect();
        let max = p.iter().map(|p| p.1).fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = p.iter().map(|p| (p.1 - max).exp()).sum();
        p.into_iter().map(|(t, s)| (t, (s - max).exp() / total)).collect()
    }

    fn reference(&self) -> Vec<f64> {
        let d = self.head_dim;
        let mut out = Vec::new();
        for r in 0..self.visible.len() {
            for h in 0..self.heads {
                let g = h / (self.heads / self.kv_heads);
                let mut o = vec![0.0; d];
                for (t, p) in self.probabilities(r, h, 0) {
                    for (e, o) in o.iter_mut().enumerate() {
                        *o += p * self.v.as_slice().get((g * self.capacity + t) * d + e) as f64;
                    }
                }
                out.extend(o);
            }
        }
        out
    }
}

/// Rows at the end of `n` slots, each seeing all up to itself, `window` slots at most.
pub(crate) fn causal(rows: usize, n: usize, window: usize) -> Vec<(u32, u32)> {
    (n - rows..n).map(|i| ((i + 1).saturating_sub(window) as u32, i as u32 + 1)).collect()
}

#[test]
fn agrees_with_a_plain_loop() {
    let (mut rng, mut ends) = (Rng::new(11), Rng::new(21));
    let cases = [
        ((9, 3, 64), 150, causal(70, 140, usize::MAX)),
        ((14, 2, 64), 600, causal(3, 600, usize::MAX)),
        ((4, 4, 80), 70, causal(13, 66, usize::MAX)),
        ((6, 2, 96), 100, causal(37, 90, 20)),
        ((12, 2, 128), 1100, causal(1, 1090, usize::MAX)),
        ((2, 1, 16), 65, causal(65, 65, usize::MAX)),
        ((3, 1, 24), 700, causal(40, 690, 100)),
        ((5, 1, 7), 30, causal(5, 30, usize::MAX)),
        // A step of decoding: few queries a head, heads that do not fill vectors, keys that do not fill fours.
        ((3, 3, 24), 600, causal(1, 599, usize::MAX)),
        ((6, 3, 7), 40, causal(1, 38, usize::MAX)),
        ((3, 1, 100), 130, causal(2, 129, usize::MAX)),
        ((9, 3, 64), 520, causal(1, 517, 300)),
        ((4, 1, 40), 20, causal(1, 3, usize::MAX)),
        ((14, 2, 64), 600, causal(1, 599, usize::MAX)),
        ((5, 1, 40), 100, causal(1, 97, usize::MAX)),
        ((8, 1, 100), 1200, causal(1, 1190, 100)),
        // Any order, starts apart from the tiles, slots beyond every row's sight.
        ((8, 2, 32), 1500, (0..23).map(|_| (rng.below(700) as u32, 701 + rng.below(700) as u32)).collect()),
        ((2, 2, 16), 1200, vec![(0, 1), (1199, 1200), (511, 513), (64, 128), (3, 1024), (512, 1024)]),
        // Few rows over several segments: blocks that end within a group, windows, segments that a group does not see.
        ((9, 3, 64), 2100, causal(53, 2090, usize::MAX)),
        ((6, 2, 100), 2200, causal(20, 2200, 1900)),
        ((4, 2, 24), 2600, (0..70).map(|i| (33 * i, 33 * i + 1 + ends.below(250) as u32)).collect()),
        // Windows of later blocks begin behind the first segment, within a tile.
        ((9, 3, 64), 2200, causal(100, 2200, 1650)),
        // Heads of 256, and a group above those that decoding takes.
        ((4, 1, 256), 700, causal(1, 690, usize::MAX)),
        ((4, 1, 256), 700, causal(40, 690, usize::MAX)),
        ((16, 1, 128), 600, causal(1, 590, usize::MAX)),
    ];
    for (i, (shape, capacity, visible)) in cases.into_iter().enumerate() {
        let mut case = Case::new(&mut rng, DTYPES[i % 3], shape, capacity, visible);
        let should = case.reference();
        for (precision, tolerance) in [(Precision::F32, 3e-6), (Precision::Bf16, 1e-2)] {
            case.precision = precision;
            // A score is a sum of `head_dim` products, each of which rounds it.
            let tolerance = tolerance * f64::max(case.head_dim as f64 / 128.0, 1.0);
            for cpu in cpus(2) {
                // AVX2 rounds to integers of 12 bits and more.
                let integers = matches!(cpu.isa(), Isa::Avx2 | Isa::Avx2Vnni);
                let tolerance = if integers { f64::min(tolerance, 1e-3) } else { tolerance };
                let out = case.run(&cpu, 0..case.visible.len());
                assert_close(&out, &should, tolerance, &format!("case {i} {precision} {:?}", cpu.isa()));
            }
        }
    }
}

#[test]
fn a_row_does_not_depend_on_its_company() {
    let mut rng = Rng::new(12);
    let shapes =
        [((9, 3, 64), 1200, causal(110, 1200, usize::MAX)), ((14, 2, 24), 900, causal(150, 880, 300))];
    for (i, (shape, capacity, visible)) in shapes.into_iter().enumerate() {
        let mut case = Case::new(&mut rng, DTYPES[i + 1], shape, capacity, visible);
        let (n, width) = (case.visible.len(), shape.0 * shape.2);
        for precision in [Precision::F32, Precision::Bf16] {
            case.precision = precision;
            // Many threads take the path over segments, one thread the path over blocks.
            for (many, one) in cpus(8).into_iter().zip(cpus(1)) {
                let all = case.run(&one, 0..n);
                let least = if precision == Precision::F32 { 1 } else { 16 };
                for rows in [0..1, n - 1..n, 5..6, 40..53, 0..37, 13..29, 40..61, 7..n, 0..n] {
                    for cpu in [&many, &one] {
                        let out = case.run(cpu, rows.clone());
                        let should = &all[rows.start * width..rows.end * width];
                        let what = format!("case {i} {precision} {:?} rows {rows:?}", cpu.isa());
                        assert!(rows.len() < least || bits(&out) == bits(should), "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_of_a_few_does_not_depend_on_its_company() {
    let mut rng = Rng::new(19);
    // Rows that see other ends, other starts and other segments.
    for (i, (shape, visible)) in [
        ((6, 3, 64), causal(4, 1100, usize::MAX)),
        ((2, 1, 128), vec![(3, 1045), (37, 38), (0, 513), (600, 1100)]),
        ((2, 2, 40), causal(7, 1093, 30)),
        ((4, 2, 7), vec![(0, 1100), (1090, 1099)]),
    ]
    .into_iter()
    .enumerate()
    {
        for dtype in DTYPES {
            let mut case = Case::new(&mut rng, dtype, shape, 1100, visible.clone());
            case.precision = Precision::Bf16;
            let (rows, width) = (visible.len(), shape.0 * shape.2);
            for (one, three) in cpus(1).into_iter().zip(cpus(3)) {
                let what = format!("case {i} {dtype} {:?}", one.isa());
                let all = case.run(&three, 0..rows);
                assert_close(&all, &case.reference(), 1e-2, &what);
                for row in 0..rows {
                    let alone = case.run(&one, row..row + 1);
                    let should = &all[row * width..(row + 1) * width];
                    assert_eq!(bits(&alone), bits(should), "{what} row {row}");
                }
            }
        }
    }
}

#[test]
fn no_rows_are_no_work() {
    let mut case = Case::new(&mut Rng::new(20), Dtype::F16, (4, 2, 16), 10, Vec::new());
    for precision in [Precision::F32, Precision::Bf16] {
        case.precision = precision;
        assert!(cpus(2).iter().all(|cpu| case.run(cpu, 0..0).is_empty()));
    }
}

#[test]
fn slots_that_no_row_sees_do_not_matter() {
    let mut rng = Rng::new(13);
    // One block of rows and several.
    for (rows, precision) in [(20, Precision::F32), (20, Precision::Bf16), (190, Precision::Bf16)] {
        let mut case = Case::new(&mut rng, Dtype::F32, (4, 2, 32), 300, causal(rows, 200, 100));
        case.precision = precision;
        // Tiles of pairs are packed from multiples of 64 on.
        let integers = |cpu: &Cpu| matches!(cpu.isa(), Isa::Avx2 | Isa::Avx2Vnni);
        let cpus: Vec<_> =
            cpus(2).into_iter().filter(|cpu| precision == Precision::F32 || integers(cpu)).collect();
        let before: Vec<_> = cpus.iter().map(|cpu| case.run(cpu, 0..rows)).collect();
        for g in 0..2 {
            for slots in [0..case.visible[0].0 as usize, 200..300] {
                let junk = vec![f32::NAN; slots.len() * 32];
                case.k.write_f32((g * 300 + slots.start) * 32, &junk);
                case.v.write_f32((g * 300 + slots.start) * 32, &junk);
            }
        }
        for (cpu, before) in cpus.iter().zip(before) {
            assert_eq!(bits(&case.run(cpu, 0..rows)), bits(&before), "{precision} {:?}", cpu.isa());
        }
    }
}

/// Vectors of zeros, values of very different sizes and elements far above the others keep their share where keys and values are rounded.
#[test]
fn uneven_keys_and_values_are_near() {
    let mut rng = Rng::new(25);
    for (shape, n, rows) in [((3, 1, 24), 200, 20), ((6, 2, 64), 500, 300), ((2, 2, 40), 700, 30)] {
        let mut case = Case::new(&mut rng, Dtype::F32, shape, n, causal(rows, n, usize::MAX));
        let (d, stored) = (shape.2, shape.1 * n);
        for slot in 0..stored {
            let key = (0..d).map(|e| match (slot % 7, e) {
                (0, _) => 0.0,
                (3, 5) => 9.0,
                _ => case.k.as_slice().get(slot * d + e),
            });
            case.k.write_f32(slot * d, &key.collect::<Vec<_>>());
            let size = [0.0, 1e-30, 1e-3, 1.0, 5.0][slot % 5];
            let value = (0..d).map(|e| size * case.v.as_slice().get(slot * d + e));
            case.v.write_f32(slot * d, &value.collect::<Vec<_>>());
        }
        let should = case.reference();
        for (precision, tolerance) in [(Precision::F32, 1e-4), (Precision::Q8, 2e-2)] {
            case.precision = precision;
            for cpu in cpus(2) {
                let out = case.run(&cpu, 0..rows);
                assert_close(&out, &should, tolerance, &format!("{shape:?} {precision} {:?}", cpu.isa()));
            }
        }
        // Equal weights of equal values are the largest sums; values may be nothing but zeros.
        case.k.write_f32(0, &vec![0.0; stored * d]);
        for value in [3.0, 0.0] {
            case.v.write_f32(0, &vec![value; stored * d]);
            for cpu in cpus(2) {
                let should = vec![f64::from(value); case.q.len()];
                assert_close(&case.run(&cpu, 0..rows), &should, 1e-6, &format!("{shape:?} {:?}", cpu.isa()));
            }
        }
    }
}

/// A NaN must reach the logits, where it becomes an error.
#[test]
fn rows_that_see_nan_are_nan() {
    let mut rng = Rng::new(26);
    for precision in [Precision::F32, Precision::Bf16] {
        for poisoned in 0..3 {
            let mut case = Case::new(&mut rng, Dtype::F32, (2, 1, 40), 200, causal(30, 200, usize::MAX));
            case.precision = precision;
            match poisoned {
                0 => case.k.write_f32(100 * 40 + 3, &[f32::NAN]),
                1 => case.v.write_f32(100 * 40 + 39, &[f32::NAN]),
                _ => case.q.iter_mut().step_by(40).for_each(|q| *q = f32::NAN),
            }
            for cpu in cpus(2) {
                let integers = matches!(cpu.isa(), Isa::Avx2 | Isa::Avx2Vnni);
                if precision == Precision::F32 || integers {
                    let out = case.run(&cpu, 0..30);
                    let rows = out.chunks_exact(40).all(|row| row.iter().any(|x| x.is_nan()));
                    assert!(rows, "{poisoned} {precision} {:?}", cpu.isa());
                }
            }
        }
    }
}

#[test]
fn far_scores_do_not_overflow() {
    let mut rng = Rng::new(14);
    let mut case = Case::new(&mut rng, Dtype::F32, (2, 1, 16), 200, causal(30, 200, usize::MAX));
    case.q.iter_mut().for_each(|q| *q *= 300.0);
    let should = case.reference();
    for cpu in cpus(2) {
        assert_close(&case.run(&cpu, 0..30), &should, 2e-3, &format!("{:?}", cpu.isa()));
    }
}

/// A query that an `f16` key's factor would make infinite, times a key of zeros, has no score of its own.
#[test]
fn large_queries_have_finite_results() {
    for dtype in [Dtype::F16, Dtype::Bf16] {
        let mut case = Case::new(&mut Rng::new(24), dtype, (2, 1, 16), 200, causal(1, 200, usize::MAX));
        case.q.iter_mut().for_each(|q| *q *= 1e6);
        case.precision = Precision::Bf16;
        for cpu in cpus(2) {
            let out = case.run(&cpu, 0..1);
            assert!(out.iter().all(|x| x.is_finite()), "{dtype} {:?}: {out:?}", cpu.isa());
        }
    }
}

#[test]
fn logits_over_all_heads() {
    let mut rng = Rng::new(15);
    for (i, (shape, capacity, rows, slots)) in
        [((9, 3, 64), 300, 37, 10..290), ((4, 1, 24), 100, 1, 0..100), ((6, 6, 80), 70, 13, 69..70)]
            .into_iter()
            .enumerate()
    {
        let case = Case::new(&mut rng, DTYPES[i], shape, capacity, causal(rows, capacity, usize::MAX));
        let mut should = Vec::new();
        for r in 0..rows {
            for t in slots.clone() {
                should.push((0..shape.0).map(|h| case.score(r, h, t)).sum::<f64>());
            }
        }
        for cpu in cpus(2) {
            let mut z = vec![f32::NAN; rows * slots.len()];
            let k = case.k.as_slice();
            cpu.concat_logits(&case.q, shape.0, shape.1, shape.2, k, capacity, slots.clone(), 0.3, &mut z);
            assert_close(&z, &should, 1e-5, &format!("case {i} {:?}", cpu.isa()));
        }
    }
}

#[test]
fn probabilities_summed_over_rows_and_heads() {
    let mut rng = Rng::new(16);
    let cases = [
        ((9, 3, 64), 300, causal(80, 300, usize::MAX), 0..300),
        ((4, 1, 24), 400, causal(90, 390, 120), 130..350),
        ((6, 2, 80), 200, causal(200, 200, usize::MAX), 77..200),
        ((2, 2, 16), 100, vec![(0, 10), (50, 100), (3, 64)], 40..60),
        // A row that sees none of the slots, a few slots of a long span, and so many that blocks have fewer rows.
        ((2, 2, 16), 100, vec![(0, 10)], 40..60),
        ((4, 1, 16), 3000, causal(60, 3000, usize::MAX), 100..130),
        ((32, 1, 8), 12_000, causal(20, 12_000, usize::MAX), 0..12_000),
    ];
    for (i, (shape, capacity, visible, slots)) in cases.into_iter().enumerate() {
        let case = Case::new(&mut rng, DTYPES[i % 3], shape, capacity, visible);
        let (n, group) = (slots.len(), case.heads / case.kv_heads);
        let mut should = vec![0.0; case.kv_heads * n];
        for r in 0..case.visible.len() {
            for h in 0..case.heads {
                for (t, p) in case.probabilities(r, h, slots.start) {
                    if slots.contains(&t) {
                        should[h / group * n + t - slots.start] += p;
                    }
                }
            }
        }
        for (cpu, one) in cpus(5).into_iter().zip(cpus(1)) {
            let (mut s, mut other) = (vec![f32::NAN; should.len()], vec![f32::NAN; should.len()]);
            cpu.attention_mass(&case.all(), slots.clone(), &mut s);
            assert_close(&s, &should, 1e-5, &format!("case {i} {:?}", cpu.isa()));
            one.attention_mass(&case.all(), slots.clone(), &mut other);
            assert_eq!(bits(&s), bits(&other), "case {i}: threads change the sums");
        }
    }
}

/// Sums of the weights that all rows give to each of the first slots, with noise if there is some.
fn sums(case: &Case, slots: usize, noise: Option<&GumbelNoise>) -> Vec<f64> {
    let mut sums = vec![0.0; case.kv_heads * slots];
    for r in 0..case.visible.len() {
        for h in 0..case.heads {
            let g = h / (case.heads / case.kv_heads);
            let mut weights = case.probabilities(r, h, 0);
            for (t, p) in &mut weights {
                let Some(noise) = noise else { break };
                let factor = noise.weight(h, r, (g, *t), case.capacity).map_or(1.0, f64::from);
                *p = (*p * factor).powf(1.0 / f64::from(noise.temperature));
            }
            let total: f64 = weights.iter().map(|(_, p)| p).sum();
            weights.into_iter().for_each(|(t, p)| sums[g * slots + t] += p / total);
        }
    }
    sums
}

#[test]
fn mass_of_many_blocks_does_not_depend_on_threads() {
    let mut rng = Rng::new(18);
    // Windows, blocks of several waves, groups that end within a block, and rows that see little; then keys that go segment after segment, in the
    // second of these cases for each block apart, in the third with blocks that see none of the first segment; and rows so few that a number of
    // threads could divide them otherwise than another.
    let cases = [
        ((9, 3, 64), 800, 780, usize::MAX),
        ((12, 2, 128), 450, 430, usize::MAX),
        ((4, 4, 80), 1300, 1280, 200),
        ((9, 3, 64), 2000, 40, 1700),
        ((6, 1, 40), 1950, 28, usize::MAX),
        ((9, 3, 64), 2000, 40, 1470),
        ((6, 1, 40), 400, 28, usize::MAX),
    ];
    for (i, (shape, n, rows, window)) in cases.into_iter().enumerate() {
        let mut case = Case::new(&mut rng, DTYPES[i % 3], shape, n, causal(rows, n, window));
        case.visible.iter_mut().step_by(9).for_each(|seen| seen.0 = seen.1 - 3);
        case.precision = Precision::Bf16;
        let rows: Vec<u32> = (0..case.visible.len() as u32).map(|row| 70_000 + 3 * row).collect();
        let slots: Vec<u32> = (0..(case.kv_heads * n) as u32).rev().collect();
        let noise =
            GumbelNoise { seed: Some(3), temperature: 1.0, query_positions: &rows, key_positions: None };
        let scattered = GumbelNoise { key_positions: Some(&slots), ..noise };
        let hot = GumbelNoise { temperature: 1.5, ..noise };
        for noise in [None, Some(&noise), Some(&scattered), Some(&hot)] {
            let should = sums(&case, n, noise);
            let of = |cpu: &Cpu| {
                let rows = case.visible.len();
                let (mut out, mut lse) = (vec![0.0; case.q.len()], vec![0.0; rows * case.heads]);
                let mut mass = vec![0.0; case.kv_heads * n];
                let report = AttentionOutputs { lse: Some(&mut lse), mass: Some(&mut mass), noise };
                cpu.attention_with_outputs(&case.all(), &mut out, report);
                (mass, bits(&out))
            };
            for (one, three) in cpus(1).iter().zip(cpus(3)) {
                let ((mass, out), (others, same)) = (of(one), of(&three));
                let what = format!("case {i} {:?} {noise:?}", one.isa());
                assert_close(&mass, &should, 1e-2, &what);
                assert_eq!(bits(&others), bits(&mass), "{what}: 3 threads");
                let mut alone = vec![f32::NAN; mass.len()];
                match noise {
                    Some(noise) => one.noisy_attention_mass(&case.all(), 0..n, noise, &mut alone),
                    None => one.attention_mass(&case.all(), 0..n, &mut alone),
                }
                assert_close(&alone, &should, 1e-2, &format!("{what}: without values"));
                assert_eq!(
                    (&out, &same),
                    (&bits(&case.run(one, 0..rows.len())), &out),
                    "{what}: values have no noise"
                );
            }
        }
    }
}

#[test]
fn further_outputs_of_an_attention() {
    let mut rng = Rng::new(17);
    for (shape, capacity, visible) in
        [((6, 2, 64), 300, causal(70, 290, usize::MAX)), ((4, 4, 24), 150, causal(3, 150, 40))]
    {
        let mut case = Case::new(&mut rng, Dtype::F16, shape, capacity, visible);
        let rows = case.visible.len();
        let mut should = Vec::new();
        for r in 0..rows {
            for h in 0..case.heads {
                let (from, to) = case.visible[r];
                let sum: f64 = (from..to).map(|t| case.score(r, h, t as usize).exp()).sum();
                should.push(sum.ln());
            }
        }
        for (precision, tolerance) in [(Precision::F32, 1e-5), (Precision::Bf16, 1e-2)] {
            case.precision = precision;
            for cpu in cpus(2) {
                let (plain, mut out) = (case.run(&cpu, 0..rows), vec![f32::NAN; case.q.len()]);
                let slots = case.visible[rows - 1].1 as usize;
                let (mut lse, mut mass) =
                    (vec![f32::NAN; rows * case.heads], vec![1.0; case.kv_heads * slots]);
                let report = AttentionOutputs { lse: Some(&mut lse), mass: Some(&mut mass), noise: None };
                cpu.attention_with_outputs(&case.all(), &mut out, report);
                let what = format!("{precision} {:?}", cpu.isa());
                assert_eq!(bits(&out), bits(&plain), "{what}");
                assert_close(&lse, &should, tolerance, &what);
                mass.iter_mut().for_each(|sum| *sum -= 1.0);
                assert_close(&mass, &sums(&case, slots, None), tolerance, &what);
            }
        }
    }
}
