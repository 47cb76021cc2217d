//! Kernels over quantised blocks, for every instruction set.

use half::f16;

use super::format::{BLOCK, BlockFormat, HALVES, Q8Block, QUADS, X_SCALE, X_START, X_SUM, X_WORDS};
#[cfg(target_arch = "aarch64")]
use super::neon;
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx2_vnni, avx512};
#[cfg(target_arch = "x86_64")]
use crate::simd::features::Features;
use crate::simd::{Kernel, PANEL, Simd};

/// The 32 `f16` of row `row` of a block.
#[inline(always)]
fn f16_row<S: Simd>(simd: S, block: &[u32], row: usize) -> [f32; PANEL] {
    let halves: &[f16] = bytemuck::cast_slice(&block[row * HALVES..(row + 1) * HALVES]);
    let mut out = [0.0; PANEL];
    for lane in (0..PANEL).step_by(S::LANES) {
        // SAFETY: both have 32 elements, a multiple of the lanes.
        unsafe { simd.store(out.as_mut_ptr().add(lane), simd.load_f16(halves.as_ptr().add(lane))) };
    }
    out
}

/// Dequantises the blocks of `panel` to pairs of `bf16`, 16 steps of 32 words for each block.
pub(in crate::linear) struct Unpack<'a> {
    pub(in crate::linear) format: BlockFormat,
    pub(in crate::linear) panel: &'a [u32],
    pub(in crate::linear) out: &'a mut [u32],
}

impl Kernel for Unpack<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        #[cfg(target_arch = "x86_64")]
        if let Some(bf16) = simd.avx512().and_then(Features::bf16) {
            return avx512::unpack(bf16, self.format, self.panel, self.out);
        }
        let Unpack { format, panel, out } = self;
        let blocks = panel.chunks_exact(format.words()).zip(out.chunks_exact_mut(BLOCK / 2 * PANEL));
        for (block, out) in blocks {
            let scale = f16_row(simd, block, 0);
            let min = match format {
                BlockFormat::Q8 => scale.map(|scale| -128.0 * scale),
                BlockFormat::Q4 => f16_row(simd, block, 1),
            };
            let (quads, pairs) = (block[format.head()..].chunks_exact(PANEL), 2 * PANEL);
            match format {
                BlockFormat::Q8 => {
                    for (quad, out) in quads.zip(out.chunks_exact_mut(pairs)) {
                        unpack_quad(quad, 0, 0xff, &scale, &min, out);
                    }
                }
                BlockFormat::Q4 => {
                    let (low, high) = out.split_at_mut(BLOCK / 4 * PANEL);
                    let out = low.chunks_exact_mut(pairs).zip(high.chunks_exact_mut(pairs));
                    for (quad, (low, high)) in quads.zip(out) {
                        unpack_quad(quad, 0, 0x0f, &scale, &min, low);
                        unpack_quad(quad, 4, 0x0f, &scale, &min, high);
                    }
                }
            }
        }
    }
}

/// Two steps of pairs out of the bytes of 32 words, shifted and masked.
#[inline(always)]
fn unpack_quad(
    quad: &[u32],
    shift: u32,
    mask: u32,
    scale: &[f32; PANEL],
    min: &[f32; PANEL],
    out: &mut [u32],
) {
    let (first, second) = out.split_at_mut(PANEL);
    for c in 0..PANEL {
        let value = |byte: u32| {
            let q = (quad[c] >> (8 * byte + shift)) & mask;
            // To nearest even. Weights are finite; the result of others is unspecified.
            let bits = (q as i32 as f32 * scale[c] + min[c]).to_bits();
            bits.wrapping_add(0x7fff + ((bits >> 16) & 1))
        };
        first[c] = (value(0) >> 16) | (value(1) & 0xffff_0000);
        second[c] = (value(2) >> 16) | (value(3) & 0xffff_0000);
    }
}

/// The largest magnitude of a block, by its bits, among which those of a NaN are the largest: a scale that is no number makes every result that
/// it is part of none.
#[inline(always)]
fn largest(values: &[f32; BLOCK]) -> f32 {
    let mut largest = 0;
    for value in values {
        largest = largest.max(value.abs().to_bits());
    }
    f32::from_bits(largest)
}

/// The block's values times `inverse`, each rounded to the nearest integer.
#[inline(always)]
fn rounded<S: Simd>(simd: S, values: &[f32; BLOCK], inverse: f32) -> [f32; BLOCK] {
    let mut rounded = [0.0; BLOCK];
    for i in (0..BLOCK).step_by(S::LANES) {
        // SAFETY: both have 32 elements, a multiple of the lanes.
        unsafe {
            let v = simd.mul(simd.load(values.as_ptr().add(i)), simd.splat(inverse));
            simd.store(rounded.as_mut_ptr().add(i), simd.round(v));
        }
    }
    rounded
}

/// Rounds a row of weights to blocks of eight bits; the last is filled up with zeros.
pub(in crate::linear) struct QuantizeWeights<'a> {
    pub(in crate::linear) row: &'a [f32],
    pub(in crate::linear) blocks: &'a mut [Q8Block],
}

impl Kernel for QuantizeWeights<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for (x, block) in self.row.chunks(BLOCK).zip(self.blocks) {
            let mut values = [0.0f32; BLOCK];
            values[..x.len()].copy_from_slice(x);
            block.scale = f16::from_f32(largest(&values) / 127.0);
            let scale = block.scale.to_f32();
            let rounded = rounded(simd, &values, if scale > 0.0 { 1.0 / scale } else { 0.0 });
            // The scale is rounded, so that a quotient may be above 127.
            for (q, rounded) in block.q.iter_mut().zip(rounded) {
                *q = rounded.clamp(-127.0, 127.0) as i8;
            }
        }
    }
}

/// Rounds a row of activations to signed bytes, [`X_WORDS`] words for each block.
pub(in crate::linear) struct QuantizeRow<'a> {
    pub(in crate::linear) x: &'a [f32],
    pub(in crate::linear) out: &'a mut [u32],
}

impl Kernel for QuantizeRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        #[cfg(target_arch = "x86_64")]
        if let Some(features) = simd.avx512() {
            return avx512::quantize(features, self.x, self.out);
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(avx2) = simd.avx2() {
            return avx2::quantize(avx2, self.x, self.out);
        }
        #[cfg(target_arch = "aarch64")]
        if let Some(token) = simd.neon() {
            return neon::quantize(token, self.x, self.out);
        }
        for (x, out) in self.x.chunks(BLOCK).zip(self.out.chunks_exact_mut(X_WORDS)) {
            let mut values = [0.0f32; BLOCK];
            values[..x.len()].copy_from_slice(x);
            let scale = largest(&values) / 127.0;
            let rounded = rounded(simd, &values, if scale > 0.0 { 1.0 / scale } else { 0.0 });
            // Integers in −127 ..= 127, also where a small scale has no inverse; a NaN becomes 0. Loops, since closures would be compiled apart,
            // without the instruction set.
            let (mut q, mut sum) = ([0i8; BLOCK], 0);
            for (q, rounded) in q.iter_mut().zip(rounded) {
                let rounded = rounded.clamp(-127.0, 127.0) as i32;
                *q = rounded as i8;
                sum += rounded;
            }
            out[..QUADS].copy_from_slice(bytemuck::cast_slice(&q));
            out[X_SCALE] = scale.to_bits();
            out[X_START] = (-128 * sum) as u32;
            out[X_SUM] = (sum as f32 * scale).to_bits();
        }
    }
}

/// y (rows × 32) = rows of `words` activations times a panel. A row's result does not depend on the other rows.
pub(in crate::linear) struct MultiplyRows<'a> {
    pub(in crate::linear) format: BlockFormat,
    pub(in crate::linear) panel: &'a [u32],
    pub(in crate::linear) x: &'a [u32],
    pub(in crate::linear) words: usize,
    pub(in crate::linear) y: &'a mut [f32],
}

impl Kernel for MultiplyRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let MultiplyRows { format, panel, x, words, y } = self;
        #[cfg(target_arch = "x86_64")]
        if let Some(vnni) = simd.avx512().and_then(Features::vnni) {
            return avx512::rows(vnni, format, panel, x, words, y);
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(avx2) = simd.avx2() {
            return match avx2.vnni() {
                Some(vnni) => avx2_vnni::rows(vnni, format, panel, x, words, y),
                None => avx2::rows(avx2, format, panel, x, words, y),
            };
        }
        #[cfg(target_arch = "aarch64")]
        if let Some(token) = simd.neon() {
            return neon::rows(token, format, panel, x, words, y);
        }
        for (x, y) in x.chunks_exact(words).zip(y.chunks_exact_mut(PANEL)) {
            MultiplyRow { format, panel, x, y }.run(simd);
        }
    }
}

/// y (32) = one row of activations times a panel.
struct MultiplyRow<'a> {
    format: BlockFormat,
    panel: &'a [u32],
    x: &'a [u32],
    y: &'a mut [f32],
}

impl MultiplyRow<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let MultiplyRow { format, panel, x, y } = self;
        let mut sums = [0.0f32; PANEL];
        for (block, x) in panel.chunks_exact(format.words()).zip(x.chunks_exact(X_WORDS)) {
            let (scale, x_scale) = (f16_row(simd, block, 0), f32::from_bits(x[X_SCALE]));
            let quads = block[format.head()..].chunks_exact(PANEL);
            let mut dots = [0i32; PANEL];
            match format {
                BlockFormat::Q8 => {
                    dots.fill(x[X_START] as i32);
                    quads.zip(&x[..QUADS]).for_each(|(quad, x)| dot(quad, 0, 0xff, *x, &mut dots));
                }
                BlockFormat::Q4 => {
                    for (t, quad) in quads.enumerate() {
                        dot(quad, 0, 0x0f, x[t], &mut dots);
                        dot(quad, 4, 0x0f, x[QUADS / 2 + t], &mut dots);
                    }
                }
            }
            for c in 0..PANEL {
                sums[c] += dots[c] as f32 * (scale[c] * x_scale);
            }
            if format == BlockFormat::Q4 {
                let (min, x_sum) = (f16_row(simd, block, 1), f32::from_bits(x[X_SUM]));
                sums.iter_mut().zip(min).for_each(|(sum, min)| *sum += min * x_sum);
            }
        }
        y.copy_from_slice(&sums);
    }
}

/// dots += Σ four bytes of 32 words, shifted and masked, by the four signed bytes of `x`.
#[inline(always)]
fn dot(quad: &[u32], shift: u32, mask: u32, x: u32, dots: &mut [i32; PANEL]) {
    let [a, b, c, d] = x.to_le_bytes();
    let [a, b, c, d] = [i32::from(a as i8), i32::from(b as i8), i32::from(c as i8), i32::from(d as i8)];
    // No sum comes near the bounds of i32. A check of each would keep the loop from becoming vectors.
    for (dot, word) in dots.iter_mut().zip(quad) {
        let part = |byte: u32| (word >> (8 * byte + shift) & mask) as i32;
        let low = part(0).wrapping_mul(a).wrapping_add(part(1).wrapping_mul(b));
        let high = part(2).wrapping_mul(c).wrapping_add(part(3).wrapping_mul(d));
        *dot = dot.wrapping_add(low.wrapping_add(high));
    }
}
