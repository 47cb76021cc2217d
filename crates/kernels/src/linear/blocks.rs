//! Weights in blocks of 32 inputs: `scale · q + min`, with bytes or nibbles q.
//!
//! A panel is block after block, each for 32 outputs: 32 scales (`f16`), for nibbles 32 minima (`f16`), then words of
//! four consecutive inputs, 32 outputs each. A byte is q + 128 of a signed q (its minimum is −128 · scale); a word of
//! nibbles holds four inputs in the lower halves of its bytes and the four that come 16 later in the upper ones.

#[cfg(target_arch = "x86_64")]
mod avx512;

use std::ops::Range;

use half::f16;

use crate::simd::{Kernel, PANEL, Simd};

/// Inputs of a block.
pub(super) const BLOCK: usize = 32;
/// Words of four inputs in a block.
const QUADS: usize = BLOCK / 4;
/// Words of 32 `f16`.
const HALVES: usize = PANEL / 2;
/// Words of one block of activations: 32 bytes, then what follows.
pub(super) const X_WORDS: usize = QUADS + 3;
/// Where the scale of a block of activations stands (`f32`).
const X_SCALE: usize = QUADS;
/// −128 times the sum of its bytes (`i32`): what products with bytes begin with.
const X_START: usize = QUADS + 1;
/// The sum of what its bytes stand for (`f32`), which the minima of nibbles are multiplied by.
const X_SUM: usize = QUADS + 2;

/// Thirty-two weights of four bits: `scale · q + min`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Nibbles {
    /// Rounded to `f16` when packed.
    pub scale: f32,
    /// Rounded to `f16` when packed.
    pub min: f32,
    /// Each below 16.
    pub q: [u8; BLOCK],
}

/// Whether blocks hold bytes or nibbles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Bytes,
    Nibbles,
}

impl Form {
    /// Words of a block of a panel.
    pub(super) fn words(self) -> usize {
        match self {
            Form::Bytes => HALVES + QUADS * PANEL,
            Form::Nibbles => 2 * HALVES + QUADS / 2 * PANEL,
        }
    }

    /// Words before the first quad.
    fn head(self) -> usize {
        match self {
            Form::Bytes => HALVES,
            Form::Nibbles => 2 * HALVES,
        }
    }
}

/// Writes the `f16` of output `lane` in row `row` (scales, minima) of a block.
fn set_half(block: &mut [u32], row: usize, lane: usize, x: f32) {
    let halves: &mut [u16] = bytemuck::cast_slice_mut(&mut block[row * HALVES..(row + 1) * HALVES]);
    halves[lane] = f16::from_f32(x).to_bits();
}

/// The 32 `f16` of row `row` of a block.
#[inline(always)]
fn halves<S: Simd>(block: &[u32], row: usize) -> [f32; PANEL] {
    let halves: &[f16] = bytemuck::cast_slice(&block[row * HALVES..(row + 1) * HALVES]);
    let mut out = [0.0; PANEL];
    for lane in (0..PANEL).step_by(S::LANES) {
        // SAFETY: both have 32 elements, a multiple of the lanes.
        unsafe { S::store(out.as_mut_ptr().add(lane), S::load_f16(halves.as_ptr().add(lane))) };
    }
    out
}

/// Rounds a row of weights to bytes and packs it as output `lane` of a panel.
pub(super) fn pack_bytes(row: &[f32], lane: usize, panel: &mut [u32]) {
    for (x, block) in row.chunks(BLOCK).zip(panel.chunks_exact_mut(Form::Bytes.words())) {
        let largest = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        let scale = f16::from_f32(largest / 127.0).to_f32();
        let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
        set_half(block, 0, lane, scale);
        for (t, word) in block[HALVES..].iter_mut().skip(lane).step_by(PANEL).enumerate() {
            let byte = |i: usize| {
                let x = x.get(4 * t + i).copied().unwrap_or(0.0);
                ((x * inverse).round_ties_even().clamp(-127.0, 127.0) as i32 + 128) as u8
            };
            *word = u32::from_le_bytes([0, 1, 2, 3].map(byte));
        }
    }
}

/// Packs a row of blocks as output `lane` of a panel.
pub(super) fn pack_nibbles(row: &[Nibbles], lane: usize, panel: &mut [u32]) {
    for (x, block) in row.iter().zip(panel.chunks_exact_mut(Form::Nibbles.words())) {
        set_half(block, 0, lane, x.scale);
        set_half(block, 1, lane, x.min);
        for (t, word) in block[2 * HALVES..].iter_mut().skip(lane).step_by(PANEL).enumerate() {
            let byte = |i: usize| (x.q[4 * t + i] & 15) | (x.q[BLOCK / 2 + 4 * t + i] << 4);
            *word = u32::from_le_bytes([0, 1, 2, 3].map(byte));
        }
    }
}

/// Writes the weights of the blocks of `panel` as pairs of `bf16`, 16 steps of 32 words for each block.
pub(super) struct Unpack<'a> {
    pub(super) form: Form,
    pub(super) panel: &'a [u32],
    pub(super) out: &'a mut [u32],
}

impl Kernel for Unpack<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        #[cfg(target_arch = "x86_64")]
        if S::LANES == 16 && is_x86_feature_detected!("avx512bf16") {
            // SAFETY: sets of 16 lanes are AVX-512, and BF16 is there.
            return unsafe { avx512::unpack(self) };
        }
        let Unpack { form, panel, out } = self;
        let blocks = panel.chunks_exact(form.words()).zip(out.chunks_exact_mut(BLOCK / 2 * PANEL));
        for (block, out) in blocks {
            let scale = halves::<S>(block, 0);
            let min = match form {
                Form::Bytes => scale.map(|scale| -128.0 * scale),
                Form::Nibbles => halves::<S>(block, 1),
            };
            let (quads, pairs) = (block[form.head()..].chunks_exact(PANEL), 2 * PANEL);
            match form {
                Form::Bytes => {
                    for (quad, out) in quads.zip(out.chunks_exact_mut(pairs)) {
                        unpack_quad(quad, 0, 0xff, &scale, &min, out);
                    }
                }
                Form::Nibbles => {
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
            // To nearest even; weights are finite, and broken ones only have to do no harm.
            let bits = (q as i32 as f32 * scale[c] + min[c]).to_bits();
            bits.wrapping_add(0x7fff + ((bits >> 16) & 1))
        };
        first[c] = (value(0) >> 16) | (value(1) & 0xffff_0000);
        second[c] = (value(2) >> 16) | (value(3) & 0xffff_0000);
    }
}

/// Rounds a row of activations to signed bytes, [`X_WORDS`] words for each block.
pub(super) struct Quantize<'a> {
    pub(super) x: &'a [f32],
    pub(super) out: &'a mut [u32],
}

impl Kernel for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        #[cfg(target_arch = "x86_64")]
        if S::LANES == 16 {
            // SAFETY: sets of 16 lanes are AVX-512.
            return unsafe { avx512::quantize(self) };
        }
        for (x, out) in self.x.chunks(BLOCK).zip(self.out.chunks_exact_mut(X_WORDS)) {
            let mut values = [0.0f32; BLOCK];
            values[..x.len()].copy_from_slice(x);
            let mut rounded = [0.0f32; BLOCK];
            // SAFETY: both have 32 elements, a multiple of the lanes.
            let scale = unsafe {
                let mut largest = S::splat(0.0);
                for i in (0..BLOCK).step_by(S::LANES) {
                    let v = S::load(values.as_ptr().add(i));
                    largest = S::max(S::max(v, S::sub(S::splat(0.0), v)), largest);
                }
                let scale = S::largest(largest) / 127.0;
                let inverse = S::splat(if scale > 0.0 { 1.0 / scale } else { 0.0 });
                for i in (0..BLOCK).step_by(S::LANES) {
                    let v = S::round(S::mul(S::load(values.as_ptr().add(i)), inverse));
                    S::store(rounded.as_mut_ptr().add(i), v);
                }
                scale
            };
            // Integers in −127 ..= 127, or what the cast makes of a NaN: 0. Loops, since closures know nothing of the
            // instruction set.
            let (mut q, mut sum) = ([0i8; BLOCK], 0);
            for (q, rounded) in q.iter_mut().zip(rounded) {
                let rounded = rounded as i32;
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

/// y (rows × 32) = rows of `words` activations times a panel. What a row comes to does not depend on the others.
pub(super) struct PanelRows<'a> {
    pub(super) form: Form,
    pub(super) panel: &'a [u32],
    pub(super) x: &'a [u32],
    pub(super) words: usize,
    pub(super) y: &'a mut [f32],
}

impl Kernel for PanelRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let PanelRows { form, panel, x, words, y } = self;
        #[cfg(target_arch = "x86_64")]
        if S::LANES == 16 && is_x86_feature_detected!("avx512vnni") {
            // SAFETY: sets of 16 lanes are AVX-512, and VNNI is there.
            unsafe { avx512::rows(form, panel, x, words, y) };
            return;
        }
        for (x, y) in x.chunks_exact(words).zip(y.chunks_exact_mut(PANEL)) {
            Row { form, panel, x, y }.run::<S>();
        }
    }
}

/// y (32) = one row of activations times a panel.
struct Row<'a> {
    form: Form,
    panel: &'a [u32],
    x: &'a [u32],
    y: &'a mut [f32],
}

impl Row<'_> {
    #[inline(always)]
    fn run<S: Simd>(self) {
        let Row { form, panel, x, y } = self;
        let mut sums = [0.0f32; PANEL];
        for (block, x) in panel.chunks_exact(form.words()).zip(x.chunks_exact(X_WORDS)) {
            let (scale, x_scale) = (halves::<S>(block, 0), f32::from_bits(x[X_SCALE]));
            let quads = block[form.head()..].chunks_exact(PANEL);
            let mut dots = [0i32; PANEL];
            match form {
                Form::Bytes => {
                    dots.fill(x[X_START] as i32);
                    quads.zip(&x[..QUADS]).for_each(|(quad, x)| dot(quad, 0, 0xff, *x, &mut dots));
                }
                Form::Nibbles => {
                    for (t, quad) in quads.enumerate() {
                        dot(quad, 0, 0x0f, x[t], &mut dots);
                        dot(quad, 4, 0x0f, x[QUADS / 2 + t], &mut dots);
                    }
                }
            }
            for c in 0..PANEL {
                sums[c] += dots[c] as f32 * (scale[c] * x_scale);
            }
            if form == Form::Nibbles {
                let (min, x_sum) = (halves::<S>(block, 1), f32::from_bits(x[X_SUM]));
                sums.iter_mut().zip(min).for_each(|(sum, min)| *sum += min * x_sum);
            }
        }
        y.copy_from_slice(&sums);
    }
}

/// dots += Σ four bytes of 32 words, shifted and masked, by the four signed bytes of `x`.
#[inline(always)]
fn dot(quad: &[u32], shift: u32, mask: u32, x: u32, dots: &mut [i32; PANEL]) {
    let x = x.to_le_bytes().map(|x| i32::from(x as i8));
    for c in 0..PANEL {
        for (i, x) in x.iter().enumerate() {
            dots[c] += ((quad[c] >> (8 * i as u32 + shift)) & mask) as i32 * x;
        }
    }
}

/// The blocks of inputs that steps of pairs make.
pub(super) fn blocks_of(steps: &Range<usize>) -> Range<usize> {
    steps.start / (BLOCK / 2)..steps.end / (BLOCK / 2)
}
