//! Values of weights as f32, from every number format that can be read.
//!
//! Layouts are ggml's (`ggml-common.h`, all little-endian); the results are bit-for-bit those of
//! ggml's reference loops, because every value is formed by the same operations in the same order.

use half::f16;
use refrain_kernels::Q4Block;

use crate::dtype::DType;
use crate::error::{ModelError, Result};

/// Writes the values of `bytes`, blocks of type `dtype`, to `out`.
///
/// # Errors
/// [`ModelError::Blocks`] unless `bytes` holds exactly `out.len()` values in whole blocks.
pub fn dequantize(dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<()> {
    if dtype.bytes_for(out.len()) != Some(bytes.len()) {
        return Err(ModelError::Blocks { dtype, bytes: bytes.len(), values: out.len() });
    }
    match dtype {
        DType::F32 => blocks::<4, 1>(bytes, out, |b, y| y[0] = f32::from_le_bytes(*b)),
        DType::F16 => dequantize_f16(bytes, out),
        DType::BF16 => blocks::<2, 1>(bytes, out, |b, y| {
            // bf16 is the upper half of an f32.
            y[0] = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
        }),
        DType::Q8_0 => blocks(bytes, out, q8_0),
        DType::Q4_0 => blocks(bytes, out, q4_0),
        DType::Q4_1 => blocks(bytes, out, q4_1),
        DType::Q5_0 => blocks(bytes, out, q5_0),
        DType::Q5_1 => blocks(bytes, out, q5_1),
        DType::Q2K => blocks(bytes, out, q2_k),
        DType::Q3K => blocks(bytes, out, q3_k),
        DType::Q4K => blocks(bytes, out, q4_k),
        DType::Q5K => blocks(bytes, out, q5_k),
        DType::Q6K => blocks(bytes, out, q6_k),
        DType::Iq4Nl => blocks(bytes, out, iq4_nl),
        DType::Iq4Xs => blocks(bytes, out, iq4_xs),
        DType::Mxfp4 => blocks(bytes, out, mxfp4),
    }
    Ok(())
}

/// Whether blocks of this type are nibbles with a scale and a minimum for each 32 of them.
pub(crate) fn has_nibbles(dtype: DType) -> bool {
    matches!(dtype, DType::Q4_0 | DType::Q4_1 | DType::Q4K)
}

/// Writes the blocks of `bytes`, of a type that [`has_nibbles`], to `out`.
///
/// # Errors
/// [`ModelError::Blocks`] unless `bytes` holds exactly 32 · `out.len()` values in such blocks.
pub(crate) fn nibbles(dtype: DType, bytes: &[u8], out: &mut [Q4Block]) -> Result<()> {
    if !has_nibbles(dtype) || dtype.bytes_for(32 * out.len()) != Some(bytes.len()) {
        return Err(ModelError::Blocks { dtype, bytes: bytes.len(), values: 32 * out.len() });
    }
    // Sixteen bytes hold values j and j + 16.
    let halves = |qs: &[u8; 16]| std::array::from_fn(|j| if j < 16 { qs[j] & 0x0F } else { qs[j - 16] >> 4 });
    match dtype {
        DType::Q4_0 => {
            for (b, out) in bytes.as_chunks::<18>().0.iter().zip(out) {
                let scale = half_at(b, 0);
                *out = Q4Block { scale, min: -8.0 * scale, q: halves(part(b, 2)) };
            }
        }
        DType::Q4_1 => {
            for (b, out) in bytes.as_chunks::<20>().0.iter().zip(out) {
                *out = Q4Block { scale: half_at(b, 0), min: half_at(b, 2), q: halves(part(b, 4)) };
            }
        }
        _ => {
            for (b, out) in bytes.as_chunks::<144>().0.iter().zip(out.as_chunks_mut::<8>().0) {
                let (d, min, scales) = (half_at(b, 0), half_at(b, 2), part::<12>(b, 4));
                for (j, out) in out.iter_mut().enumerate() {
                    // Two blocks share 32 bytes: lower halves, then upper.
                    let (qs, (s, m)) = (part::<32>(b, 16 + 32 * (j / 2)), scale_min(j, scales));
                    let q = qs.map(|q| if j % 2 == 0 { q & 0x0F } else { q >> 4 });
                    *out = Q4Block { scale: d * s, min: -min * m, q };
                }
            }
        }
    }
    Ok(())
}

/// Applies `block` to every pair of a block's `B` bytes and its `N` values.
#[inline(always)]
fn blocks<const B: usize, const N: usize>(
    bytes: &[u8],
    out: &mut [f32],
    block: impl Fn(&[u8; B], &mut [f32; N]),
) {
    for (b, y) in bytes.as_chunks::<B>().0.iter().zip(out.as_chunks_mut::<N>().0) {
        block(b, y);
    }
}

/// f16 by groups: `half` converts slices with the processor's own instruction where there is one.
fn dequantize_f16(bytes: &[u8], out: &mut [f32]) {
    use half::slice::HalfFloatSliceExt;
    const GROUP: usize = 64;
    let mut halves = [f16::ZERO; GROUP];
    for (bytes, out) in bytes.chunks(2 * GROUP).zip(out.chunks_mut(GROUP)) {
        for (h, b) in halves.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *h = f16::from_le_bytes(*b);
        }
        halves[..out.len()].convert_to_f32_slice(out);
    }
}

/// The f16 at `b[at..at + 2]`.
#[inline(always)]
fn half_at<const B: usize>(b: &[u8; B], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

/// The `N` bytes at `b[at..at + N]`; callers pass constants that lie inside their block.
#[inline(always)]
fn part<const N: usize>(b: &[u8], at: usize) -> &[u8; N] {
    b[at..].first_chunk().expect("parts lie inside their fixed-size block")
}

fn q8_0(b: &[u8; 34], y: &mut [f32; 32]) {
    let d = half_at(b, 0);
    for (y, &q) in y.iter_mut().zip(part::<32>(b, 2)) {
        *y = f32::from(q as i8) * d;
    }
}

fn q4_0(b: &[u8; 18], y: &mut [f32; 32]) {
    let d = half_at(b, 0);
    let qs = part::<16>(b, 2);
    for j in 0..16 {
        y[j] = (i32::from(qs[j] & 0x0F) - 8) as f32 * d;
        y[j + 16] = (i32::from(qs[j] >> 4) - 8) as f32 * d;
    }
}

fn q4_1(b: &[u8; 20], y: &mut [f32; 32]) {
    let (d, m) = (half_at(b, 0), half_at(b, 2));
    let qs = part::<16>(b, 4);
    for j in 0..16 {
        y[j] = f32::from(qs[j] & 0x0F) * d + m;
        y[j + 16] = f32::from(qs[j] >> 4) * d + m;
    }
}

/// The 32 values of 5 bits of a Q5_0 or Q5_1 block, from their fifth bits and their nibbles.
#[inline(always)]
fn five_bits(qh: u32, qs: &[u8; 16]) -> [i32; 32] {
    let mut q = [0; 32];
    for j in 0..16 {
        q[j] = i32::from(qs[j] & 0x0F) | ((((qh >> j) & 1) << 4) as i32);
        q[j + 16] = i32::from(qs[j] >> 4) | ((((qh >> (j + 16)) & 1) << 4) as i32);
    }
    q
}

fn q5_0(b: &[u8; 22], y: &mut [f32; 32]) {
    let d = half_at(b, 0);
    let q = five_bits(u32::from_le_bytes(*part(b, 2)), part(b, 6));
    for (y, q) in y.iter_mut().zip(q) {
        *y = (q - 16) as f32 * d;
    }
}

fn q5_1(b: &[u8; 24], y: &mut [f32; 32]) {
    let (d, m) = (half_at(b, 0), half_at(b, 2));
    let q = five_bits(u32::from_le_bytes(*part(b, 4)), part(b, 8));
    for (y, q) in y.iter_mut().zip(q) {
        *y = q as f32 * d + m;
    }
}

/// The 6-bit scale and minimum of sub-block `j` of 8, packed in the 12 bytes of a Q4_K or Q5_K block.
#[inline(always)]
fn scale_min(j: usize, s: &[u8; 12]) -> (f32, f32) {
    let (scale, min) = if j < 4 {
        (s[j] & 63, s[j + 4] & 63)
    } else {
        ((s[j + 4] & 0x0F) | ((s[j - 4] >> 6) << 4), (s[j + 4] >> 4) | ((s[j] >> 6) << 4))
    };
    (f32::from(scale), f32::from(min))
}

fn q4_k(b: &[u8; 144], y: &mut [f32; 256]) {
    let (d, min) = (half_at(b, 0), half_at(b, 2));
    let scales = part::<12>(b, 4);
    for (j, y) in y.as_chunks_mut::<64>().0.iter_mut().enumerate() {
        let qs = part::<32>(b, 16 + 32 * j);
        let ((s1, n1), (s2, n2)) = (scale_min(2 * j, scales), scale_min(2 * j + 1, scales));
        let (d1, m1, d2, m2) = (d * s1, min * n1, d * s2, min * n2);
        for l in 0..32 {
            y[l] = d1 * f32::from(qs[l] & 0x0F) - m1;
            y[l + 32] = d2 * f32::from(qs[l] >> 4) - m2;
        }
    }
}

fn q5_k(b: &[u8; 176], y: &mut [f32; 256]) {
    let (d, min) = (half_at(b, 0), half_at(b, 2));
    let scales = part::<12>(b, 4);
    let qh = part::<32>(b, 16);
    for (j, y) in y.as_chunks_mut::<64>().0.iter_mut().enumerate() {
        let qs = part::<32>(b, 48 + 32 * j);
        let ((s1, n1), (s2, n2)) = (scale_min(2 * j, scales), scale_min(2 * j + 1, scales));
        let (d1, m1, d2, m2) = (d * s1, min * n1, d * s2, min * n2);
        for l in 0..32 {
            let high = qh[l] >> (2 * j);
            y[l] = d1 * f32::from((qs[l] & 0x0F) | ((high & 1) << 4)) - m1;
            y[l + 32] = d2 * f32::from((qs[l] >> 4) | ((high & 2) << 3)) - m2;
        }
    }
}

fn q6_k(b: &[u8; 210], y: &mut [f32; 256]) {
    let d = half_at(b, 208);
    for (n, y) in y.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        let ql = part::<64>(b, 64 * n);
        let qh = part::<32>(b, 128 + 32 * n);
        let scales = part::<8>(b, 192 + 8 * n).map(|s| d * f32::from(s as i8));
        for l in 0..32 {
            let (low, high, h, s) = (ql[l], ql[l + 32], qh[l], l / 16);
            y[l] = scales[s] * six_bits(low & 0x0F, h);
            y[l + 32] = scales[s + 2] * six_bits(high & 0x0F, h >> 2);
            y[l + 64] = scales[s + 4] * six_bits(low >> 4, h >> 4);
            y[l + 96] = scales[s + 6] * six_bits(high >> 4, h >> 6);
        }
    }
}

/// A 6-bit value out of a nibble and the two low bits of `high`, less 32.
#[inline(always)]
fn six_bits(low: u8, high: u8) -> f32 {
    (i32::from(low | ((high & 3) << 4)) - 32) as f32
}

fn q2_k(b: &[u8; 84], y: &mut [f32; 256]) {
    let (d, min) = (half_at(b, 80), half_at(b, 82));
    for (j, y) in y.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        // Sixteen values are two bits each of sixteen bytes; eight such runs share 32 bytes.
        let (scale, qs) = (b[j], part::<16>(b, 16 + 32 * (j / 8) + 16 * (j % 2)));
        let (dl, ml) = (d * f32::from(scale & 0x0F), min * f32::from(scale >> 4));
        for (y, q) in y.iter_mut().zip(qs) {
            *y = dl * f32::from((q >> (j % 8 / 2 * 2)) & 3) - ml;
        }
    }
}

fn q3_k(b: &[u8; 110], y: &mut [f32; 256]) {
    let (d, high, packed) = (half_at(b, 108), part::<32>(b, 0), part::<12>(b, 96));
    for (j, y) in y.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        // Four low bits of sixteen scales in eight bytes, then their two high bits in four.
        let low = (packed[j % 8] >> (j / 8 * 4)) & 0x0F;
        let scale = i32::from(low | (((packed[8 + j % 4] >> (j / 4 * 2)) & 3) << 4)) - 32;
        let (dl, at) = (d * scale as f32, 16 * (j % 2));
        let qs = part::<16>(b, 32 + 32 * (j / 8) + at);
        for (l, (y, q)) in y.iter_mut().zip(qs).enumerate() {
            let missing = if high[at + l] >> (j / 2) & 1 == 1 { 0 } else { 4 };
            *y = dl * (i32::from((q >> (j % 8 / 2 * 2)) & 3) - missing) as f32;
        }
    }
}

/// The values that the nibbles of IQ4_NL and IQ4_XS stand for.
const NON_LINEAR: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Twice the values that the nibbles of MXFP4 stand for: sign, two bits of exponent, one of mantissa.
const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Thirty-two values of a table by nibbles: sixteen bytes hold values j and j + 16.
#[inline(always)]
fn looked_up(table: &[i8; 16], d: f32, qs: &[u8; 16], y: &mut [f32]) {
    for (j, q) in qs.iter().enumerate() {
        y[j] = d * f32::from(table[usize::from(q & 0x0F)]);
        y[j + 16] = d * f32::from(table[usize::from(q >> 4)]);
    }
}

fn iq4_nl(b: &[u8; 18], y: &mut [f32; 32]) {
    looked_up(&NON_LINEAR, half_at(b, 0), part(b, 2), y);
}

fn iq4_xs(b: &[u8; 136], y: &mut [f32; 256]) {
    let (d, high) = (half_at(b, 0), u16::from_le_bytes(*part(b, 2)));
    for (j, y) in y.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let low = (b[4 + j / 2] >> (j % 2 * 4)) & 0x0F;
        let scale = i32::from(low) | i32::from((high >> (2 * j)) & 3) << 4;
        looked_up(&NON_LINEAR, d * (scale - 32) as f32, part(b, 8 + 16 * j), y);
    }
}

/// Blocks of the OCP Microscaling specification: a power of two, and values of four bits.
fn mxfp4(b: &[u8; 17], y: &mut [f32; 32]) {
    // Half of 2^(e − 127), since the table holds doubled values; the lowest two are subnormal.
    let e = u32::from(b[0]);
    let half = f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (e - 1) << 23 });
    looked_up(&E2M1, half, part(b, 1), y);
}

#[cfg(test)]
#[path = "quant_tests.rs"]
mod tests;
