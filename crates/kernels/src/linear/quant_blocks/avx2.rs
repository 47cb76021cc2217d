//! Blocks of quantised weights with AVX2.
//!
//! Shape of a product: 32 outputs, 32 inputs a block, up to some tens of rows; weights stay in eight registers while all rows pass: of 8 bits those
//! of eight outputs, of 4 bits those of all outputs and eight inputs, so that a word of activations is loaded once for 32 outputs, and sums of 16 bits
//! wait in the first-level cache. `vpmaddubsw` adds two products of a byte without and a byte with a sign to 16 bits, which must not overflow: two
//! products of 127 · 127 fit, and so do a lane's sixteen of a block where weights have 4 bits. Bound: 12 (4 bits) or 18 multiplications (8 bits) on two units for
//! the 256 products of a block, a row and eight outputs. Measured on Zen 4, 8×576×3072: 70 and 58 % of that bound.
//!
//! A product of one or two rows keeps the sums of a panel in registers, and each weight is read once. Bound: reading the weights. Measured on two cores of
//! a Zen 1: a decoded token of SmolLM2-135M and of Qwen2.5-Coder-0.5B takes 8 to 9 % less time than by the kernel of more rows.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::format::{BLOCK, BlockFormat, HALVES, QUADS, X_SCALE, X_START, X_SUM, X_WORDS};
use crate::prefetch;
use crate::simd::PANEL;
use crate::simd::features::Avx2;
use crate::simd::i16_tiles::NORM;

/// Outputs of a register.
pub(super) const LANES: usize = 8;
/// Words from the block in use to the block that is prefetched.
pub(super) const AHEAD: usize = 768;
/// Registers that the outputs of a panel take.
const GROUPS: usize = PANEL / LANES;
/// Rows whose magnitudes, or sums, are kept.
const ROWS: usize = 64;

/// Sums of 16 bits of a row and all outputs of a panel, in the middle of a block.
type Sums = MaybeUninit<[__m256i; GROUPS]>;

/// Rounds a row of activations to signed bytes, [`X_WORDS`] words for each block.
#[inline(always)]
pub(super) fn quantize(_: Avx2, x: &[f32], out: &mut [u32]) {
    // SAFETY: the token proves that the instructions are there.
    unsafe { quantize_row(x, out) }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn quantize_row(x: &[f32], out: &mut [u32]) {
    // Words of vectors that were narrowed in each 128 bits apart.
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (x, out) in x.chunks(BLOCK).zip(out.chunks_exact_mut(X_WORDS)) {
        let mut block = [0.0f32; BLOCK];
        block[..x.len()].copy_from_slice(x);
        let mut values = [_mm256_setzero_ps(); 4];
        for (values, block) in values.iter_mut().zip(block.chunks_exact(LANES)) {
            // SAFETY: eight floats.
            *values = unsafe { _mm256_loadu_ps(block.as_ptr()) };
        }
        // By their bits, among which those of a NaN are the largest.
        let magnitude = |x| _mm256_castps_si256(_mm256_andnot_ps(_mm256_set1_ps(-0.0), x));
        let pair = |i: usize| _mm256_max_epu32(magnitude(values[i]), magnitude(values[i + 1]));
        let mut lanes = [0u32; LANES];
        // SAFETY: eight words.
        unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast(), _mm256_max_epu32(pair(0), pair(2))) };
        let scale = f32::from_bits(lanes.into_iter().fold(0, u32::max)) / 127.0;
        let inverse = _mm256_set1_ps(if scale > 0.0 { 1.0 / scale } else { 0.0 });
        // To the nearest, ties to even; a NaN becomes 0.
        let mut q = [_mm256_setzero_si256(); 4];
        for (q, x) in q.iter_mut().zip(values) {
            let x = _mm256_mul_ps(x, inverse);
            let number = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_ORD_Q>(x, x));
            *q = _mm256_and_si256(_mm256_cvtps_epi32(x), number);
        }
        let sums = _mm256_add_epi32(_mm256_add_epi32(q[0], q[1]), _mm256_add_epi32(q[2], q[3]));
        let words = [_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3])];
        let bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words[0], words[1]), order);
        let mut lanes = [0i32; LANES];
        // SAFETY: eight words each.
        unsafe {
            _mm256_storeu_si256(out[..QUADS].as_mut_ptr().cast(), bytes);
            _mm256_storeu_si256(lanes.as_mut_ptr().cast(), sums);
        }
        let sum = lanes.into_iter().fold(0i32, i32::wrapping_add);
        out[X_SCALE] = scale.to_bits();
        out[X_START] = sum.wrapping_mul(-128) as u32;
        out[X_SUM] = (sum as f32 * scale).to_bits();
    }
}

/// y (rows × 32) = rows of `words` activations times a panel.
#[inline(always)]
pub(super) fn rows(_: Avx2, format: BlockFormat, panel: &[u32], x: &[u32], words: usize, y: &mut [f32]) {
    // SAFETY: the token proves that the instructions are there.
    unsafe {
        match (format, y.len() / PANEL) {
            (BlockFormat::Q8, 1) => return few_rows::<false, 1>(panel, x, words, y),
            (BlockFormat::Q8, 2) => return few_rows::<false, 2>(panel, x, words, y),
            (BlockFormat::Q4, 1) => return few_rows::<true, 1>(panel, x, words, y),
            (BlockFormat::Q4, 2) => return few_rows::<true, 2>(panel, x, words, y),
            _ => {}
        }
    }
    for (x, y) in x.chunks(ROWS * words).zip(y.chunks_mut(ROWS * PANEL)) {
        // SAFETY: the token proves that the instructions are there.
        unsafe { multiply_rows(format, panel, x, words, y) }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn multiply_rows(format: BlockFormat, panel: &[u32], x: &[u32], words: usize, y: &mut [f32]) {
    let (blocks, rows) = (panel.len() / format.words(), y.len() / PANEL);
    assert!(words >= blocks * X_WORDS && x.len() >= rows * words && rows <= ROWS);
    y.fill(0.0);
    // Magnitudes of a block's activations.
    let mut magnitudes = [[0u32; QUADS]; ROWS];
    let mut sums = [Sums::uninit(); ROWS];
    for (index, block) in panel.chunks_exact(format.words()).enumerate() {
        prefetch::to_read(block.as_ptr().wrapping_add(AHEAD).cast(), size_of_val(block));
        if format == BlockFormat::Q8 {
            for (x, magnitudes) in x.chunks_exact(words).zip(&mut magnitudes) {
                // SAFETY: a block of activations begins with 32 bytes.
                unsafe {
                    let x = _mm256_loadu_si256(x.as_ptr().add(index * X_WORDS).cast());
                    _mm256_storeu_si256(magnitudes.as_mut_ptr().cast(), _mm256_abs_epi8(x));
                }
            }
        }
        // SAFETY: every row has as many blocks as the panel, and y 32 floats of it.
        unsafe {
            let x = (x.as_ptr().add(index * X_WORDS), words);
            match format {
                BlockFormat::Q8 => {
                    for first in (0..PANEL).step_by(LANES) {
                        eight_bits(block, first, x, &magnitudes[..rows], y.as_mut_ptr().add(first));
                    }
                }
                BlockFormat::Q4 => four_bits(block, x, &mut sums[..rows], y.as_mut_ptr()),
            }
        }
    }
}

/// `R` rows by all outputs, whose sums stay in registers while the weights pass. What is summed, and in which order, is as with more rows.
#[target_feature(enable = "avx2,fma,f16c")]
#[expect(clippy::needless_range_loop, reason = "an index is of several arrays")]
fn few_rows<const FOUR_BITS: bool, const R: usize>(panel: &[u32], x: &[u32], words: usize, y: &mut [f32]) {
    let format = if FOUR_BITS { BlockFormat::Q4 } else { BlockFormat::Q8 };
    let blocks = panel.len() / format.words();
    assert!(words >= blocks * X_WORDS && x.len() >= R * words && y.len() >= R * PANEL);
    let ones = _mm256_set1_epi16(1);
    let mut totals = [[_mm256_setzero_ps(); GROUPS]; R];
    for index in 0..blocks {
        let block = &panel[index * format.words()..][..format.words()];
        prefetch::to_read(block.as_ptr().wrapping_add(AHEAD).cast(), size_of_val(block));
        // SAFETY: every row has as many blocks as the panel.
        let number = |r: usize, at: usize| unsafe {
            _mm256_set1_epi32(*x.as_ptr().add(r * words + index * X_WORDS + at) as i32)
        };
        let mut sums = [[_mm256_setzero_si256(); GROUPS]; R];
        for t in 0..QUADS {
            let mut inputs = [[_mm256_setzero_si256(); 2]; R];
            for r in 0..R {
                let x = number(r, t);
                inputs[r] = [x, _mm256_abs_epi8(x)];
            }
            for g in 0..GROUPS {
                let first = g * LANES;
                let weights = if FOUR_BITS { nibbles(block, t, first) } else { signed(block, t, first) };
                for r in 0..R {
                    let [x, magnitude] = inputs[r];
                    sums[r][g] = if FOUR_BITS {
                        _mm256_add_epi16(sums[r][g], _mm256_maddubs_epi16(weights, x))
                    } else {
                        let pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(weights, x));
                        _mm256_add_epi32(sums[r][g], _mm256_madd_epi16(pairs, ones))
                    };
                }
            }
        }
        for g in 0..GROUPS {
            let scales = halves(block, 0, g * LANES);
            for r in 0..R {
                let float = |at: usize| _mm256_castsi256_ps(number(r, at));
                let dots = if FOUR_BITS { _mm256_madd_epi16(sums[r][g], ones) } else { sums[r][g] };
                let scale = _mm256_mul_ps(scales, float(X_SCALE));
                totals[r][g] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), scale, totals[r][g]);
                if FOUR_BITS {
                    totals[r][g] = _mm256_fmadd_ps(halves(block, 1, g * LANES), float(X_SUM), totals[r][g]);
                }
            }
        }
    }
    for (total, y) in totals.iter().flatten().zip(y.chunks_exact_mut(LANES)) {
        // SAFETY: eight floats.
        unsafe { _mm256_storeu_ps(y.as_mut_ptr(), *total) }
    }
}

/// Unpacks blocks of eight bits to pairs of inputs as integers of 16 bits, 16 × 32 words for each block, and writes each output's scale. The norm of an output's weights
/// is at most 127 · √(32 · the sum of the squares of its blocks' scales).
#[inline(always)]
pub(in crate::linear) fn unpack_q8_as_i16(
    _: Avx2,
    blocks: &[u32],
    out: &mut [u32],
    scales: &mut [f32; PANEL],
) {
    // SAFETY: the token proves that the instructions are there.
    unsafe { unpack_q8(blocks, out, scales) }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn unpack_q8(blocks: &[u32], out: &mut [u32], scales: &mut [f32; PANEL]) {
    // Bytes 0 and 1 of each word, and then 2 and 3, in the upper halves of 16 bits.
    let low = _mm256_broadcastsi128_si256(_mm_setr_epi32(0x0180_0080, 0x0580_0480, 0x0980_0880, 0x0d80_0c80));
    let orders = [low, _mm256_add_epi32(low, _mm256_set1_epi32(0x0200_0200))];
    for (g, out_scales) in scales.chunks_exact_mut(LANES).enumerate() {
        let first = g * LANES;
        let mut squares = _mm256_setzero_ps();
        for block in blocks.chunks_exact(BlockFormat::Q8.words()) {
            let scales = halves(block, 0, first);
            squares = _mm256_fmadd_ps(scales, scales, squares);
        }
        let norm = _mm256_mul_ps(_mm256_sqrt_ps(squares), _mm256_set1_ps(127.0 * (BLOCK as f32).sqrt()));
        let scale = _mm256_mul_ps(norm, _mm256_set1_ps(1.0 / NORM));
        // 256 over an output's scale, or 0 where all of its weights are zero.
        let zero = _mm256_cmp_ps::<_CMP_EQ_OQ>(scale, _mm256_setzero_ps());
        let inverse = _mm256_andnot_ps(zero, _mm256_div_ps(_mm256_set1_ps(256.0), scale));
        // SAFETY: eight floats.
        unsafe { _mm256_storeu_ps(out_scales.as_mut_ptr(), scale) };
        let outs = out.chunks_exact_mut(BLOCK / 2 * PANEL);
        for (block, out) in blocks.chunks_exact(BlockFormat::Q8.words()).zip(outs) {
            // At most 256 · NORM / (127 · √32), below 2^15.
            let factor = _mm256_cvtps_epi32(_mm256_mul_ps(halves(block, 0, first), inverse));
            let factor = _mm256_or_si256(factor, _mm256_slli_epi32::<16>(factor));
            for t in 0..QUADS {
                let weights = signed(block, t, first);
                for (i, order) in orders.iter().enumerate() {
                    // 128 q · 256 s / 2^15 = q · s.
                    let q = _mm256_srai_epi16::<1>(_mm256_shuffle_epi8(weights, *order));
                    let out = &mut out[(2 * t + i) * PANEL + first..][..LANES];
                    // SAFETY: 32 bytes.
                    unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), _mm256_mulhrs_epi16(q, factor)) };
                }
            }
        }
    }
}

/// Eight `f16` of row `row` of a block.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn halves(block: &[u32], row: usize, first: usize) -> __m256 {
    let from = &block[row * HALVES + first / 2..][..LANES / 2];
    // SAFETY: 16 bytes.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().cast())) }
}

/// Weights of eight outputs, four inputs a word.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn quad(block: &[u32], format: BlockFormat, t: usize, first: usize) -> __m256i {
    let from = &block[format.head() + t * PANEL + first..][..LANES];
    // SAFETY: 32 bytes.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

/// Weights of four bits of eight outputs, four inputs a word, each in a byte.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn nibbles(block: &[u32], t: usize, first: usize) -> __m256i {
    let both = quad(block, BlockFormat::Q4, t % (QUADS / 2), first);
    let low = if t < QUADS / 2 { both } else { _mm256_srli_epi16::<4>(both) };
    _mm256_and_si256(low, _mm256_set1_epi8(0x0f))
}

/// Weights of eight bits of eight outputs, four inputs a word: from q + 128 to q, between −127 and 127.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn signed(block: &[u32], t: usize, first: usize) -> __m256i {
    _mm256_xor_si256(quad(block, BlockFormat::Q8, t, first), _mm256_set1_epi8(-128))
}

/// Adds a block's products of four bits and its minima to rows of `y`, 32 floats apart; `sums` holds the rows' sums meanwhile.
///
/// # Safety
/// `x` must be valid for a block of each row, `words` apart, and `y` for 32 floats of each row; there are as many rows as sums.
#[target_feature(enable = "avx2,fma,f16c")]
#[expect(clippy::needless_range_loop, reason = "an index is of several arrays")]
unsafe fn four_bits(block: &[u32], (x, words): (*const u32, usize), sums: &mut [Sums], y: *mut f32) {
    let ones = _mm256_set1_epi16(1);
    let (mut scales, mut minima) = ([_mm256_setzero_ps(); GROUPS], [_mm256_setzero_ps(); GROUPS]);
    for g in 0..GROUPS {
        (scales[g], minima[g]) = (halves(block, 0, g * LANES), halves(block, 1, g * LANES));
    }
    for t in (0..QUADS).step_by(2) {
        let mut weights = [[_mm256_setzero_si256(); GROUPS]; 2];
        for (i, weights) in weights.iter_mut().enumerate() {
            for (g, weights) in weights.iter_mut().enumerate() {
                *weights = nibbles(block, t + i, g * LANES);
            }
        }
        for (r, kept) in sums.iter_mut().enumerate() {
            // SAFETY: the caller's; sums are written with the first two words and read with those after them.
            unsafe {
                let (x, y, kept) = (x.add(r * words), y.add(r * PANEL), kept.as_mut_ptr().cast::<__m256i>());
                // At most 16 · 15 · 127 a lane.
                let mut sums = [_mm256_setzero_si256(); GROUPS];
                for g in 0..GROUPS {
                    if t > 0 {
                        sums[g] = *kept.add(g);
                    }
                }
                for i in 0..2 {
                    let input = _mm256_set1_epi32(*x.add(t + i) as i32);
                    for g in 0..GROUPS {
                        let pairs = _mm256_maddubs_epi16(weights[i][g], input);
                        sums[g] = if t + i == 0 { pairs } else { _mm256_add_epi16(sums[g], pairs) };
                    }
                }
                if t + 2 < QUADS {
                    for g in 0..GROUPS {
                        *kept.add(g) = sums[g];
                    }
                    continue;
                }
                let x_scale = _mm256_broadcast_ss(&*x.add(X_SCALE).cast());
                let x_sum = _mm256_broadcast_ss(&*x.add(X_SUM).cast());
                for g in 0..GROUPS {
                    let y = y.add(g * LANES);
                    let dots = _mm256_cvtepi32_ps(_mm256_madd_epi16(sums[g], ones));
                    let sum = _mm256_fmadd_ps(dots, _mm256_mul_ps(scales[g], x_scale), _mm256_loadu_ps(y));
                    _mm256_storeu_ps(y, _mm256_fmadd_ps(minima[g], x_sum, sum));
                }
            }
        }
    }
}

/// Adds a block's products of eight bits to rows of `y`, 32 floats apart.
///
/// # Safety
/// `x` must be valid for a block of each row, `words` apart, and `y` for eight floats of each row; there are as many rows as magnitudes.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn eight_bits(
    block: &[u32],
    first: usize,
    (x, words): (*const u32, usize),
    magnitudes: &[[u32; QUADS]],
    y: *mut f32,
) {
    let mut weights = [_mm256_setzero_si256(); QUADS];
    for (t, weights) in weights.iter_mut().enumerate() {
        *weights = signed(block, t, first);
    }
    let (scale, ones) = (halves(block, 0, first), _mm256_set1_epi16(1));
    for (r, magnitudes) in magnitudes.iter().enumerate() {
        // SAFETY: the caller's.
        unsafe {
            let (x, y) = (x.add(r * words), y.add(r * PANEL));
            let product = |t: usize| {
                let signed = _mm256_sign_epi8(weights[t], _mm256_set1_epi32(*x.add(t) as i32));
                let pairs = _mm256_maddubs_epi16(_mm256_set1_epi32(magnitudes[t] as i32), signed);
                _mm256_madd_epi16(pairs, ones)
            };
            let mut sums = [product(0), product(1)];
            for t in (2..QUADS).step_by(2) {
                sums[0] = _mm256_add_epi32(sums[0], product(t));
                sums[1] = _mm256_add_epi32(sums[1], product(t + 1));
            }
            let dots = _mm256_cvtepi32_ps(_mm256_add_epi32(sums[0], sums[1]));
            let scale = _mm256_mul_ps(scale, _mm256_broadcast_ss(&*x.add(X_SCALE).cast()));
            _mm256_storeu_ps(y, _mm256_fmadd_ps(dots, scale, _mm256_loadu_ps(y)));
        }
    }
}
