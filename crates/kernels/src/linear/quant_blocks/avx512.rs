//! Blocks of quantised weights with AVX-512.

use std::arch::x86_64::*;

use super::format::{BLOCK, BlockFormat, HALVES, QUADS, X_SCALE, X_START, X_SUM, X_WORDS};
use crate::prefetch;
use crate::simd::PANEL;
use crate::simd::features::{Bf16, Features, Vnni};
use crate::simd::pair_tiles::interleaved_pairs;

/// Words from the block in use to the block that is prefetched where several rows pass.
const AHEAD: usize = 2048;

/// The 16 `f16` of half `i` of row `row` of a block.
///
/// # Safety
/// `block` must be valid for the row.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn half(block: *const u32, row: usize, i: usize) -> __m512 {
    // SAFETY: the caller's.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(block.add(row * HALVES + i * 8).cast())) }
}

/// Dequantises the blocks of `panel` to pairs of `bf16`, 16 steps of 32 words for each block.
#[inline(always)]
pub(super) fn unpack(_: Bf16, format: BlockFormat, panel: &[u32], out: &mut [u32]) {
    // SAFETY: the token proves that the instructions are there.
    unsafe { unpack_blocks(format, panel, out) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn unpack_blocks(format: BlockFormat, panel: &[u32], out: &mut [u32]) {
    let mask = _mm512_set1_epi32(if format == BlockFormat::Q8 { 0xff } else { 0x0f });
    let blocks = panel.chunks_exact(format.words()).zip(out.chunks_exact_mut(BLOCK / 2 * PANEL));
    for (block, out) in blocks {
        let (block, out) = (block.as_ptr(), out.as_mut_ptr());
        for i in 0..2 {
            // SAFETY: a block has head and quads as `format` says; the output has 16 steps of 32 words.
            unsafe {
                let scale = half(block, 0, i);
                let min = match format {
                    BlockFormat::Q8 => _mm512_mul_ps(scale, _mm512_set1_ps(-128.0)),
                    BlockFormat::Q4 => half(block, 1, i),
                };
                let value =
                    |w: __m512i| _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_and_si512(w, mask)), scale, min);
                // Bytes of `w`, shifted, as the pairs of quad `t`.
                let put = |w: __m512i, t: usize| {
                    let even = [value(w), value(_mm512_srli_epi32::<16>(w))];
                    let odd = [value(_mm512_srli_epi32::<8>(w)), value(_mm512_srli_epi32::<24>(w))];
                    for (j, (even, odd)) in even.into_iter().zip(odd).enumerate() {
                        let to = out.add((2 * t + j) * PANEL + i * 16);
                        _mm512_storeu_si512(to.cast(), interleaved_pairs(even, odd));
                    }
                };
                let word =
                    |t: usize| _mm512_loadu_si512(block.add(format.head() + t * PANEL + i * 16).cast());
                for t in 0..if format == BlockFormat::Q8 { QUADS } else { QUADS / 2 } {
                    let w = word(t);
                    put(w, t);
                    if format == BlockFormat::Q4 {
                        put(_mm512_srli_epi32::<4>(w), QUADS / 2 + t);
                    }
                }
            }
        }
    }
}

/// Rounds a row of activations to signed bytes, [`X_WORDS`] words for each block.
#[inline(always)]
pub(super) fn quantize(_: Features, x: &[f32], out: &mut [u32]) {
    // SAFETY: the token proves that the instructions are there.
    unsafe { quantize_row(x, out) }
}

#[target_feature(enable = "avx512f")]
fn quantize_row(x: &[f32], out: &mut [u32]) {
    for (x, out) in x.chunks(BLOCK).zip(out.chunks_exact_mut(X_WORDS)) {
        let there = ((1u64 << x.len()) - 1) as u32;
        // SAFETY: the masks cover the inputs of the block; its bytes fit the first words of `out`.
        unsafe {
            // No closure: one that is not inlined passes vectors through memory.
            let first = _mm512_maskz_loadu_ps(there as u16, x.as_ptr());
            let last = _mm512_maskz_loadu_ps((there >> 16) as u16, x.as_ptr().wrapping_add(16));
            // By their bits, among which those of a NaN are the largest.
            let bits = _mm512_max_epu32(
                _mm512_castps_si512(_mm512_abs_ps(first)),
                _mm512_castps_si512(_mm512_abs_ps(last)),
            );
            let scale = f32::from_bits(_mm512_reduce_max_epu32(bits)) / 127.0;
            let inverse = _mm512_set1_ps(if scale > 0.0 { 1.0 / scale } else { 0.0 });
            // To the nearest, ties to even; a NaN becomes 0.
            let (first, last) = (_mm512_mul_ps(first, inverse), _mm512_mul_ps(last, inverse));
            let first = _mm512_maskz_cvtps_epi32(_mm512_cmp_ps_mask::<_CMP_ORD_Q>(first, first), first);
            let last = _mm512_maskz_cvtps_epi32(_mm512_cmp_ps_mask::<_CMP_ORD_Q>(last, last), last);
            let sum = _mm512_reduce_add_epi32(_mm512_add_epi32(first, last));
            let to = out.as_mut_ptr().cast::<__m128i>();
            _mm_storeu_si128(to, _mm512_cvtepi32_epi8(first));
            _mm_storeu_si128(to.add(1), _mm512_cvtepi32_epi8(last));
            out[X_SCALE] = scale.to_bits();
            out[X_START] = sum.wrapping_mul(-128) as u32;
            out[X_SUM] = (sum as f32 * scale).to_bits();
        }
    }
}

/// y (rows × 32) = rows of `words` activations times a panel.
#[inline(always)]
pub(super) fn rows(_: Vnni, format: BlockFormat, panel: &[u32], x: &[u32], words: usize, y: &mut [f32]) {
    // SAFETY: the token proves that the instructions are there.
    unsafe {
        match (format, y.as_chunks_mut::<PANEL>()) {
            (BlockFormat::Q4, ([y], [])) => multiply_row(panel, x, y),
            _ => multiply_rows(format, panel, x, words, y),
        }
    }
}

/// One row by blocks of 4 bits: its sums stay in registers, and the upper halves of bytes are multiplied as they lie, sixteen times as
/// large. The bits are those of [`multiply_rows`].
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn multiply_row(panel: &[u32], x: &[u32], y: &mut [f32; PANEL]) {
    let (format, low, high) =
        (BlockFormat::Q4, _mm512_set1_epi8(0x0f), _mm512_set1_epi8(0xf0_u8.cast_signed()));
    assert!(x.len() >= panel.len() / format.words() * X_WORDS);
    let mut sums = [_mm512_setzero_ps(); 2];
    for (block, x) in panel.chunks_exact(format.words()).zip(x.chunks_exact(X_WORDS)) {
        let (block, x) = (block.as_ptr(), x.as_ptr());
        // SAFETY: a block has head and quads as `format` says, and a block of activations its words.
        unsafe {
            let number = |at: usize| _mm512_set1_epi32(*x.add(at) as i32);
            let float = |at: usize| _mm512_castsi512_ps(number(at));
            let (mut lower, mut upper) = ([_mm512_setzero_si512(); 2], [_mm512_setzero_si512(); 2]);
            for t in 0..QUADS / 2 {
                for i in 0..2 {
                    let w = _mm512_loadu_si512(block.add(format.head() + t * PANEL + i * 16).cast());
                    lower[i] = _mm512_dpbusd_epi32(lower[i], _mm512_and_si512(w, low), number(t));
                    upper[i] =
                        _mm512_dpbusd_epi32(upper[i], _mm512_and_si512(w, high), number(QUADS / 2 + t));
                }
            }
            for (i, sum) in sums.iter_mut().enumerate() {
                let dot = _mm512_add_epi32(lower[i], _mm512_srai_epi32::<4>(upper[i]));
                let scale = _mm512_mul_ps(half(block, 0, i), float(X_SCALE));
                *sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, *sum);
                *sum = _mm512_fmadd_ps(half(block, 1, i), float(X_SUM), *sum);
            }
        }
    }
    // SAFETY: there are 32 sums.
    unsafe {
        _mm512_storeu_ps(y.as_mut_ptr(), sums[0]);
        _mm512_storeu_ps(y.as_mut_ptr().add(16), sums[1]);
    }
}

/// Weights of a block stay in registers while all rows pass.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn multiply_rows(format: BlockFormat, panel: &[u32], x: &[u32], words: usize, y: &mut [f32]) {
    let (blocks, rows) = (panel.len() / format.words(), y.len() / PANEL);
    assert!(words >= blocks * X_WORDS && x.len() >= rows * words);
    let low = _mm512_set1_epi8(0x0f);
    y.fill(0.0);
    for (index, block) in panel.chunks_exact(format.words()).enumerate() {
        let block = block.as_ptr();
        // One row passes fast enough for the processor's own reading ahead.
        if rows > 1 {
            prefetch::to_read_later(block.wrapping_add(AHEAD).cast(), format.words() * size_of::<u32>());
        }
        let mut weights = [[_mm512_setzero_si512(); 2]; QUADS];
        let (mut scale, mut min) = ([_mm512_setzero_ps(); 2], [_mm512_setzero_ps(); 2]);
        for i in 0..2 {
            // SAFETY: a block has head and quads as `format` says.
            unsafe {
                let word =
                    |t: usize| _mm512_loadu_si512(block.add(format.head() + t * PANEL + i * 16).cast());
                match format {
                    BlockFormat::Q8 => {
                        for (t, weights) in weights.iter_mut().enumerate() {
                            weights[i] = word(t);
                        }
                    }
                    BlockFormat::Q4 => {
                        for t in 0..QUADS / 2 {
                            let w = word(t);
                            weights[t][i] = _mm512_and_si512(w, low);
                            weights[QUADS / 2 + t][i] = _mm512_and_si512(_mm512_srli_epi16::<4>(w), low);
                        }
                    }
                }
                scale[i] = half(block, 0, i);
                if format == BlockFormat::Q4 {
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
                    [if format == BlockFormat::Q8 { number(X_START) } else { _mm512_setzero_si512() }; 2];
                for (t, weights) in weights.iter().enumerate() {
                    let x = number(t);
                    dots[0] = _mm512_dpbusd_epi32(dots[0], weights[0], x);
                    dots[1] = _mm512_dpbusd_epi32(dots[1], weights[1], x);
                }
                for i in 0..2 {
                    let y = y.add(i * 16);
                    let scale = _mm512_mul_ps(scale[i], float(X_SCALE));
                    let mut sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[i]), scale, _mm512_loadu_ps(y));
                    if format == BlockFormat::Q4 {
                        sum = _mm512_fmadd_ps(min[i], float(X_SUM), sum);
                    }
                    _mm512_storeu_ps(y, sum);
                }
            }
        }
    }
}
