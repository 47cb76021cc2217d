//! Weights in blocks of 32 inputs: `scale · q + min`, with bytes or nibbles q.
//!
//! A panel is block after block, each for 32 outputs: 32 scales (`f16`), for nibbles 32 minima (`f16`), then words of
//! four consecutive inputs, 32 outputs each. A byte is q + 128 of a signed q (its minimum is −128 · scale); a word of
//! nibbles holds four inputs in the lower halves of its bytes and the four that come 16 later in the upper ones.

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

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;
    use std::mem::transmute;

    use super::{BLOCK, Form, HALVES, PANEL, QUADS, Quantize, Unpack, X_SCALE, X_START, X_SUM, X_WORDS};

    /// Words from what is worked on to what is fetched.
    const AHEAD: usize = 768;

    /// The 16 `f16` of half `i` of row `row` of a block.
    ///
    /// # Safety
    /// AVX-512 F must be there, `block` valid for the row.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn half(block: *const u32, row: usize, i: usize) -> __m512 {
        // SAFETY: the caller's.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(block.add(row * HALVES + i * 8).cast())) }
    }

    /// # Safety
    /// AVX-512 F, BW and BF16 must be there.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    pub(super) unsafe fn unpack(u: Unpack) {
        let Unpack { form, panel, out } = u;
        // Lane 2i of the result is lane i of the lower half of the words, lane 2i + 1 of the upper half.
        let order: [u16; 32] = std::array::from_fn(|i| (i / 2 + i % 2 * 16) as u16);
        // SAFETY: 64 bytes.
        let order = unsafe { _mm512_loadu_si512(order.as_ptr().cast()) };
        let mask = _mm512_set1_epi32(if form == Form::Bytes { 0xff } else { 0x0f });
        let blocks = panel.chunks_exact(form.words()).zip(out.chunks_exact_mut(BLOCK / 2 * PANEL));
        for (block, out) in blocks {
            let (block, out) = (block.as_ptr(), out.as_mut_ptr());
            for i in 0..2 {
                // SAFETY: a block has head and quads as `form` says; the output has 16 steps of 32 words.
                unsafe {
                    let scale = half(block, 0, i);
                    let min = match form {
                        Form::Bytes => _mm512_mul_ps(scale, _mm512_set1_ps(-128.0)),
                        Form::Nibbles => half(block, 1, i),
                    };
                    let value = |w: __m512i| {
                        _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_and_si512(w, mask)), scale, min)
                    };
                    // Bytes of `w`, shifted, as the pairs of quad `t`.
                    let put = |w: __m512i, t: usize| {
                        let even = [value(w), value(_mm512_srli_epi32::<16>(w))];
                        let odd = [value(_mm512_srli_epi32::<8>(w)), value(_mm512_srli_epi32::<24>(w))];
                        for (j, (even, odd)) in even.into_iter().zip(odd).enumerate() {
                            let words = transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(odd, even));
                            let to = out.add((2 * t + j) * PANEL + i * 16);
                            _mm512_storeu_si512(to.cast(), _mm512_permutexvar_epi16(order, words));
                        }
                    };
                    let word =
                        |t: usize| _mm512_loadu_si512(block.add(form.head() + t * PANEL + i * 16).cast());
                    match form {
                        Form::Bytes => (0..QUADS).for_each(|t| put(word(t), t)),
                        Form::Nibbles => (0..QUADS / 2).for_each(|t| {
                            let w = word(t);
                            put(w, t);
                            put(_mm512_srli_epi32::<4>(w), QUADS / 2 + t);
                        }),
                    }
                }
            }
        }
    }

    /// # Safety
    /// AVX-512 F must be there.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn quantize(q: Quantize) {
        let Quantize { x, out } = q;
        for (x, out) in x.chunks(BLOCK).zip(out.chunks_exact_mut(X_WORDS)) {
            let there = ((1u64 << x.len()) - 1) as u32;
            // SAFETY: what is loaded of the block is there; its bytes fit the first words of `out`.
            unsafe {
                let x = [
                    _mm512_maskz_loadu_ps(there as u16, x.as_ptr()),
                    _mm512_maskz_loadu_ps((there >> 16) as u16, x.as_ptr().wrapping_add(16)),
                ];
                let largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(x[0]), _mm512_abs_ps(x[1])));
                let scale = largest / 127.0;
                let inverse = _mm512_set1_ps(if scale > 0.0 { 1.0 / scale } else { 0.0 });
                // To the nearest, ties to even; the lowest byte of what a NaN becomes is 0.
                let q = x.map(|x| _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse)));
                let sum = _mm512_reduce_add_epi32(_mm512_add_epi32(q[0], q[1]));
                let to = out.as_mut_ptr().cast::<__m128i>();
                _mm_storeu_si128(to, _mm512_cvtepi32_epi8(q[0]));
                _mm_storeu_si128(to.add(1), _mm512_cvtepi32_epi8(q[1]));
                out[X_SCALE] = scale.to_bits();
                out[X_START] = sum.wrapping_mul(-128) as u32;
                out[X_SUM] = (sum as f32 * scale).to_bits();
            }
        }
    }

    /// y (rows × 32) = rows of `words` activations times a panel. Weights of a block stay in registers while all rows pass.
    ///
    /// # Safety
    /// AVX-512 F, BW and VNNI must be there.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    pub(super) unsafe fn rows(form: Form, panel: &[u32], x: &[u32], words: usize, y: &mut [f32]) {
        let (blocks, rows) = (panel.len() / form.words(), y.len() / PANEL);
        assert!(words >= blocks * X_WORDS && x.len() >= rows * words);
        let low = _mm512_set1_epi8(0x0f);
        y.fill(0.0);
        for (index, block) in panel.chunks_exact(form.words()).enumerate() {
            let block = block.as_ptr();
            for line in (0..form.words()).step_by(16) {
                _mm_prefetch::<_MM_HINT_T0>(block.wrapping_add(AHEAD + line).cast());
            }
            let mut weights = [[_mm512_setzero_si512(); 2]; QUADS];
            let (mut scale, mut min) = ([_mm512_setzero_ps(); 2], [_mm512_setzero_ps(); 2]);
            for i in 0..2 {
                // SAFETY: a block has head and quads as `form` says.
                unsafe {
                    let word =
                        |t: usize| _mm512_loadu_si512(block.add(form.head() + t * PANEL + i * 16).cast());
                    match form {
                        Form::Bytes => (0..QUADS).for_each(|t| weights[t][i] = word(t)),
                        Form::Nibbles => (0..QUADS / 2).for_each(|t| {
                            let w = word(t);
                            weights[t][i] = _mm512_and_si512(w, low);
                            weights[QUADS / 2 + t][i] = _mm512_and_si512(_mm512_srli_epi16::<4>(w), low);
                        }),
                    }
                    scale[i] = half(block, 0, i);
                    if form == Form::Nibbles {
                        min[i] = half(block, 1, i);
                    }
                }
            }
            for (r, y) in y.chunks_exact_mut(PANEL).enumerate() {
                // SAFETY: every row has as many blocks as the panel, and `y` 32 floats.
                unsafe {
                    let (x, y) = (x.as_ptr().add(r * words + index * X_WORDS), y.as_mut_ptr());
                    let number = |at: usize| _mm512_set1_epi32(*x.add(at) as i32);
                    let float = |at: usize| _mm512_castsi512_ps(number(at));
                    let mut dots =
                        [if form == Form::Bytes { number(X_START) } else { _mm512_setzero_si512() }; 2];
                    for (t, weights) in weights.iter().enumerate() {
                        let x = number(t);
                        dots[0] = _mm512_dpbusd_epi32(dots[0], weights[0], x);
                        dots[1] = _mm512_dpbusd_epi32(dots[1], weights[1], x);
                    }
                    for i in 0..2 {
                        let y = y.add(i * 16);
                        let scale = _mm512_mul_ps(scale[i], float(X_SCALE));
                        let mut sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[i]), scale, _mm512_loadu_ps(y));
                        if form == Form::Nibbles {
                            sum = _mm512_fmadd_ps(min[i], float(X_SUM), sum);
                        }
                        _mm512_storeu_ps(y, sum);
                    }
                }
            }
        }
    }
}
