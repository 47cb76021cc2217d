//! Blocks of quantised weights with VNNI of 256 bits.
//!
//! Shape of a product: eight outputs at a time, whose weights stay in eight registers while all rows pass. `vpdpbusd` adds four
//! products of a byte without and a byte with a sign to 32 bits, so that 8 bits take no more than 4. Bound: 11 (4 bits) or 10 operations (8 bits) on
//! the two units that multiply for the 256 products of a block, a row and eight outputs, where AVX2 has 12 and 18. Measured on Zen 4, with the
//! encoding of AVX-512, 8×576×3072: 79 and 67 % of that bound, 1.2 and 2.2 times as fast as AVX2. Never run on a CPU that has AVX-VNNI alone.

use std::arch::x86_64::*;

use super::avx2::{AHEAD, LANES, halves, nibbles, quad};
use super::format::{BlockFormat, QUADS, X_SCALE, X_START, X_SUM, X_WORDS};
use crate::prefetch;
use crate::simd::PANEL;
use crate::simd::features::Vnni256;

/// y (rows × 32) = rows of `words` activations times a panel.
#[inline(always)]
pub(super) fn rows(
    vnni: Vnni256,
    format: BlockFormat,
    panel: &[u32],
    x: &[u32],
    words: usize,
    y: &mut [f32],
) {
    // SAFETY: the token proves that the instructions are there.
    unsafe {
        match vnni {
            Vnni256::Vex(_) => multiply_rows_vex(format, panel, x, words, y),
            Vnni256::Evex(_) => multiply_rows_evex(format, panel, x, words, y),
        }
    }
}

/// A kernel with one of the two encodings of `vpdpbusd`.
macro_rules! multiply_rows {
    ($name:ident, $features:literal, $vpdpbusd:ident) => {
        #[target_feature(enable = $features)]
        fn $name(format: BlockFormat, panel: &[u32], x: &[u32], words: usize, y: &mut [f32]) {
            let (blocks, rows) = (panel.len() / format.words(), y.len() / PANEL);
            assert!(words >= blocks * X_WORDS && x.len() >= rows * words);
            y.fill(0.0);
            for (index, block) in panel.chunks_exact(format.words()).enumerate() {
                prefetch::to_read(block.as_ptr().wrapping_add(AHEAD).cast(), size_of_val(block));
                for first in (0..PANEL).step_by(LANES) {
                    let mut weights = [_mm256_setzero_si256(); QUADS];
                    for (t, weights) in weights.iter_mut().enumerate() {
                        *weights = match format {
                            BlockFormat::Q8 => quad(block, format, t, first),
                            BlockFormat::Q4 => nibbles(block, t, first),
                        };
                    }
                    let four_bits = format == BlockFormat::Q4;
                    let scale = halves(block, 0, first);
                    let min = if four_bits { halves(block, 1, first) } else { _mm256_setzero_ps() };
                    for r in 0..rows {
                        // SAFETY: every row has as many blocks as the panel, and y 32 floats of it.
                        unsafe {
                            let x = x.as_ptr().add(r * words + index * X_WORDS);
                            let y = y.as_mut_ptr().add(r * PANEL + first);
                            let number = |at: usize| _mm256_set1_epi32(*x.add(at) as i32);
                            let float = |at: usize| _mm256_castsi256_ps(number(at));
                            let start = if four_bits { _mm256_setzero_si256() } else { number(X_START) };
                            let mut dots = [start, _mm256_setzero_si256()];
                            for t in (0..QUADS).step_by(2) {
                                dots[0] = $vpdpbusd(dots[0], weights[t], number(t));
                                dots[1] = $vpdpbusd(dots[1], weights[t + 1], number(t + 1));
                            }
                            let dots = _mm256_cvtepi32_ps(_mm256_add_epi32(dots[0], dots[1]));
                            let scale = _mm256_mul_ps(scale, float(X_SCALE));
                            let mut sum = _mm256_fmadd_ps(dots, scale, _mm256_loadu_ps(y));
                            if four_bits {
                                sum = _mm256_fmadd_ps(min, float(X_SUM), sum);
                            }
                            _mm256_storeu_ps(y, sum);
                        }
                    }
                }
            }
        }
    };
}

multiply_rows!(multiply_rows_vex, "avx2,fma,f16c,avxvnni", _mm256_dpbusd_avx_epi32);
multiply_rows!(multiply_rows_evex, "avx2,fma,f16c,avx512f,avx512vl,avx512vnni", _mm256_dpbusd_epi32);
