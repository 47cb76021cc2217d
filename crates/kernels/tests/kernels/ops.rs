use refrain_kernels::{Buffer, Dtype, Slice, bf16, f16, softmax};

use crate::{DTYPES, Rng, assert_close, bits, cpus};

#[test]
fn rms_norm() {
    let mut rng = Rng::new(21);
    for (rows, n) in [(1, 1), (3, 17), (5, 576), (200, 896), (2, 100)] {
        let (x, w) = (rng.floats(rows * n), rng.floats(n));
        let mut should = Vec::new();
        for x in x.chunks_exact(n) {
            let mean = x.iter().map(|x| (*x as f64).powi(2)).sum::<f64>() / n as f64;
            should.extend(x.iter().zip(&w).map(|(x, w)| *x as f64 / (mean + 1e-5).sqrt() * *w as f64));
        }
        for cpu in cpus(2) {
            let mut y = vec![f32::NAN; rows * n];
            cpu.rms_norm(&x, &w, 1e-5, &mut y);
            assert_close(&y, &should, 1e-6, &format!("{rows}x{n} {:?}", cpu.isa()));
            let mut last = vec![0.0; n];
            cpu.rms_norm(&x[(rows - 1) * n..], &w, 1e-5, &mut last);
            assert_eq!(bits(&last), bits(&y[(rows - 1) * n..]));
        }
    }
}

#[test]
fn softmax_of_a_slice() {
    let mut rng = Rng::new(23);
    for n in [1, 5, 16, 33, 1000] {
        let x: Vec<f32> = rng.floats(n).iter().map(|x| 20.0 * x - 500.0).collect();
        let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
        let total: f64 = x.iter().map(|x| (*x as f64 - max).exp()).sum();
        let should: Vec<f64> = x.iter().map(|x| (*x as f64 - max).exp() / total).collect();
        let mut y = x.clone();
        softmax(&mut y);
        assert_close(&y, &should, 1e-6, &format!("{n} elements"));
    }
    softmax(&mut []);
    let mut masked = [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY];
    softmax(&mut masked);
    assert_eq!(masked, [0.0, 1.0, 0.0]);
}

fn rotated(x: &[f32], cos: &[f32], sin: &[f32]) -> Vec<f64> {
    let half = cos.len();
    let mut y: Vec<f64> = x.iter().map(|x| *x as f64).collect();
    for i in 0..half {
        let (a, b, c, s) = (x[i] as f64, x[i + half] as f64, cos[i] as f64, sin[i] as f64);
        (y[i], y[i + half]) = (a * c - b * s, b * c + a * s);
    }
    y
}

#[test]
fn rope() {
    let mut rng = Rng::new(24);
    for (tokens, heads, d, rot) in
        [(1, 1, 2, 2), (5, 3, 64, 64), (7, 2, 80, 20), (3, 4, 24, 24), (300, 9, 64, 64)]
    {
        let x = rng.floats(tokens * heads * d);
        let (cos, sin) = (rng.floats(tokens * rot / 2), rng.floats(tokens * rot / 2));
        let mut should = Vec::new();
        for (i, x) in x.chunks_exact(d).enumerate() {
            let at = i / heads * rot / 2;
            should.extend(rotated(x, &cos[at..at + rot / 2], &sin[at..at + rot / 2]));
        }
        for cpu in cpus(2) {
            let mut y = x.clone();
            cpu.rope(&mut y, heads, d, &cos, &sin, rot);
            assert_close(&y, &should, 1e-6, &format!("{tokens}x{heads}x{d} {:?}", cpu.isa()));
        }
    }
}

#[test]
fn keys_and_values_are_placed() {
    let mut rng = Rng::new(25);
    for (tokens, heads, d, rot) in [(5, 3, 64, 64), (9, 2, 80, 20), (500, 3, 64, 64), (3, 1, 24, 24)] {
        for dtype in DTYPES {
            let capacity = tokens + 7;
            let src = rng.buffer(dtype, tokens * heads * d);
            let (cos, sin) = (rng.floats(tokens * rot / 2), rng.floats(tokens * rot / 2));
            let ascending: Vec<u32> = (0..tokens as u32).map(|t| t + 4).collect();
            let descending: Vec<u32> = ascending.iter().rev().copied().collect();
            let tolerance = if dtype == Dtype::F32 { 1e-6 } else { 8e-3 };
            for (cpu, slots) in cpus(2).iter().flat_map(|c| [(c, &ascending), (c, &descending)]) {
                let (mut keys, mut values) =
                    (Buffer::zeros(dtype, heads * capacity * d), Buffer::zeros(dtype, heads * capacity * d));
                cpu.place_keys(src.as_slice(), heads, d, &cos, &sin, rot, slots, &mut keys);
                cpu.place_keys(src.as_slice(), heads, d, &[], &[], 0, slots, &mut values);
                for (t, slot) in slots.iter().enumerate() {
                    for h in 0..heads {
                        let from = (t * heads + h) * d..(t * heads + h + 1) * d;
                        let to = (h * capacity + *slot as usize) * d..(h * capacity + *slot as usize + 1) * d;
                        let mut x = vec![0.0; d];
                        src.as_slice().range(from).to_f32(&mut x);
                        let mut y = vec![0.0; d];
                        values.as_slice().range(to.clone()).to_f32(&mut y);
                        assert_eq!(bits(&x), bits(&y));
                        keys.as_slice().range(to).to_f32(&mut y);
                        let at = t * rot / 2;
                        let should = rotated(&x, &cos[at..at + rot / 2], &sin[at..at + rot / 2]);
                        assert_close(&y, &should, tolerance, &format!("{dtype} {:?}", cpu.isa()));
                    }
                }
                assert!(
                    keys.as_slice().range(0..4 * d).as_bytes().iter().all(|b| *b == 0),
                    "other slots stay"
                );
            }
        }
    }
}

/// Keys placed with their document and keys that come from a cache give equal bits, whatever else is placed with
/// them and wherever.
#[test]
fn cached_keys_equal_fresh_ones() {
    let mut rng = Rng::new(26);
    let (tokens, heads, d, rot) = (400, 3, 64, 64);
    let (cos, sin) = (rng.floats(tokens * rot / 2), rng.floats(tokens * rot / 2));
    for dtype in DTYPES {
        let fresh = rng.buffer(dtype, tokens * heads * d);
        let mut bytes = fresh.as_slice().as_bytes().to_vec();
        // Back from a file: the same values at another place.
        bytes.extend_from_within(..);
        let cached = Slice::from_bytes(dtype, &bytes[bytes.len() / 2..]).unwrap();
        let slots: Vec<u32> = (0..tokens as u32).collect();
        for cpu in cpus(2) {
            let mut whole = Buffer::zeros(dtype, heads * tokens * d);
            cpu.place_keys(fresh.as_slice(), heads, d, &cos, &sin, rot, &slots, &mut whole);
            let mut parts = Buffer::zeros(dtype, heads * tokens * d);
            for tokens in [0..1, 1..14, 14..390, 390..400] {
                let half = tokens.start * rot / 2..tokens.end * rot / 2;
                let src = cached.range(tokens.start * heads * d..tokens.end * heads * d);
                cpu.place_keys(
                    src,
                    heads,
                    d,
                    &cos[half.clone()],
                    &sin[half],
                    rot,
                    &slots[tokens],
                    &mut parts,
                );
            }
            assert!(whole.as_slice().as_bytes() == parts.as_slice().as_bytes(), "{dtype} {:?}", cpu.isa());
        }
    }
}

#[test]
fn rows_are_gathered() {
    let mut rng = Rng::new(27);
    let src = rng.floats(50 * 33);
    let rows: Vec<u32> = (0..2000).map(|_| rng.below(50) as u32).collect();
    for cpu in cpus(2) {
        let mut dst = vec![0.0; rows.len() * 33];
        cpu.gather_rows(&src, 33, &rows, &mut dst);
        for (row, dst) in rows.iter().zip(dst.chunks_exact(33)) {
            assert_eq!(dst, &src[*row as usize * 33..][..33]);
        }
    }
}

#[test]
fn conversions_round_as_half_does() {
    let mut rng = Rng::new(28);
    let mut x: Vec<f32> =
        (0..5000).map(|_| f32::from_bits(rng.next() as u32)).filter(|x| !x.is_nan()).collect();
    x.extend([0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, 65504.0, 65520.0, 1e-8, f32::MIN_POSITIVE / 4.0]);
    let mut f = Buffer::zeros(Dtype::F16, x.len());
    f.write_f32(0, &x);
    assert_eq!(f, Buffer::F16(x.iter().map(|x| f16::from_f32(*x)).collect()));
    let mut b = Buffer::zeros(Dtype::Bf16, x.len());
    b.write_f32(0, &x);
    assert_eq!(b, Buffer::Bf16(x.iter().map(|x| bf16::from_f32(*x)).collect()));
    let mut back = vec![0.0; x.len()];
    b.as_slice().to_f32(&mut back);
    assert!((0..x.len()).all(|i| back[i].to_bits() == b.as_slice().get(i).to_bits()));
    f.as_slice().to_f32(&mut back);
    assert!((0..x.len()).all(|i| back[i].to_bits() == f.as_slice().get(i).to_bits()));
    let mut nan = Buffer::zeros(Dtype::Bf16, 1);
    nan.write_f32(0, &[f32::from_bits(0x7f80_0001)]);
    assert!(nan.as_slice().get(0).is_nan());
}

#[test]
fn bytes_are_read_where_they_lie() {
    let buffer = Buffer::F16(vec![f16::from_f32(1.5), f16::from_f32(-2.0)]);
    let bytes = buffer.as_slice().as_bytes();
    assert_eq!(bytes, [0x00, 0x3e, 0x00, 0xc0]);
    assert_eq!(Slice::from_bytes(Dtype::F16, bytes).unwrap().get(1), -2.0);
    assert!(Slice::from_bytes(Dtype::F16, &bytes[..3]).is_err());
    assert!(Slice::from_bytes(Dtype::F16, &bytes[1..3]).is_err());
    for dtype in DTYPES {
        assert_eq!(dtype.to_string().parse(), Ok(dtype));
        assert_eq!(Buffer::zeros(dtype, 3).bytes(), 3 * dtype.size());
    }
    assert!("f64".parse::<Dtype>().is_err());
}
