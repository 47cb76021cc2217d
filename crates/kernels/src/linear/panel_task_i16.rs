//! Products of many rows as integers of 16 bits, with AVX2.
//!
//! A block of the sum is at most 256 inputs. In each, a row of activations has a scale of its own, and so have the weights of an output, so that a row's bits
//! depend on no other row. Integers are as large as exact sums of 32 bits allow: by the inequality of Cauchy and Schwarz no sum of products is larger than the product
//! of both norms. With 256 numbers of one spread a rounded one is off by at most 1/5787 of it, where `bf16` is off by up to 1/512 of each number and bytes by 1/254 of the
//! largest of 32.
//!
//! Shape: 12 rows × 32 outputs × 256 inputs, 192 rows a task. Bound: `vpmaddwd` and an addition for the 16 products of a register, where bytes with a sign take four
//! instructions for 32, and `f32` one for 8. Measured on a Zen 3, one thread, 512 rows: 57 to 64 % of the rate of `vpmaddwd` alone.

use std::arch::x86_64::*;

use super::blocking::Blocking;
use super::panel_task::{PanelTask, UNPACKED};
use super::quant_blocks::unpack_q8_as_i16;
use super::weights::Precision;
use crate::scratch;
use crate::simd::features::Avx2;
use crate::simd::i16_tiles::{Factors, Finish, multiply, round_columns};
use crate::simd::{PANEL, STRIP, Simd};

impl PanelTask<'_> {
    /// Multiplies the panels, one block of the sum after the other.
    #[inline(always)]
    pub(super) fn integers(&self, simd: Avx2, strips: usize, cells: &mut [f32]) {
        let (Blocking { words, steps: part, .. }, steps) = (self.blocking, self.w.padded_steps());
        let (size, panels) = (self.blocking.cell(), self.panels.len());
        let mut unpacked = scratch::borrow(&UNPACKED, part * PANEL);
        let mut w_scales = [0.0f32; PANEL];
        for (i, start) in (0..steps).step_by(part).enumerate() {
            let range = start..(start + part).min(steps);
            let weights = &mut unpacked.as_u32_mut()[..range.len() * PANEL];
            for (p, panel) in self.panels.clone().enumerate() {
                if self.w.precision == Precision::Q8 {
                    unpack_q8_as_i16(simd, self.blocks(panel, &range), weights, &mut w_scales);
                } else {
                    let pairs = &self.w.panel(panel)[range.start * PANEL..range.end * PANEL];
                    round_columns(simd, pairs, weights, &mut w_scales);
                }
                for s in 0..strips {
                    let rows = self.strip(s);
                    let x = &self.packed[rows.start * words..][..STRIP * words];
                    let y = &mut cells[(s * panels + p) * size..][..size];
                    let (x_scales, w_scales) = (x[(steps + i) * STRIP..].as_ptr().cast(), w_scales.as_ptr());
                    let sums = AddScaled { y: y.as_mut_ptr(), x_scales, w_scales, begins: i == 0 };
                    let x = x[start * STRIP..].as_ptr();
                    let factors = Factors { x, w: weights.as_ptr(), pairs: range.len(), columns: PANEL };
                    // SAFETY: a strip has words for twelve rows and a cell floats for them; both sides have the steps of `range`.
                    unsafe { multiply::<STRIP, 1>(simd, &factors, rows.len(), sums) };
                }
            }
        }
    }
}

/// y = sums · row's scale · output's scale, added to y but where the sum `begins`; rows are 32 apart.
#[derive(Clone, Copy)]
struct AddScaled {
    y: *mut f32,
    x_scales: *const f32,
    w_scales: *const f32,
    begins: bool,
}

impl Finish for AddScaled {
    #[inline(always)]
    unsafe fn take(self, simd: Avx2, r: usize, c: usize, sums: __m256i) {
        // SAFETY: the caller's.
        unsafe {
            let y = self.y.add(r * PANEL + c);
            let old = if self.begins { simd.splat(0.0) } else { simd.load(y) };
            let sums = simd.mul(_mm256_cvtepi32_ps(sums), simd.splat(*self.x_scales.add(r)));
            simd.store(y, simd.fma(sums, simd.load(self.w_scales.add(c)), old));
        }
    }
}
