//! Packing of weights and of activations.

use std::cell::Cell;
use std::sync::Mutex;

use half::bf16;

use super::{Linear, Precision};
use crate::scratch::{self, Words};
use crate::shared::Shared;
use crate::simd::{Kernel, PANEL, Simd};
use crate::{Cpu, convert};

thread_local! {
    /// Four rows before they are interleaved.
    static ROWS: Cell<Words> = const { Cell::new(Words::new()) };
}

/// Rows that are interleaved at a time.
const QUAD: usize = 4;

impl Linear {
    /// Packs W (outputs × inputs, row-major). `row(o, buf)` writes row `o` (length inputs) as `f32`; rows are
    /// asked for in parallel, in any order, each once. The whole matrix is never held in `f32`.
    ///
    /// # Errors
    /// One of the errors of `row`.
    ///
    /// # Panics
    /// If `inputs` is 0 or the bias does not have `outputs` elements.
    pub fn pack<E: Send>(
        cpu: &Cpu,
        precision: Precision,
        outputs: usize,
        inputs: usize,
        bias: Option<Vec<f32>>,
        row: impl Fn(usize, &mut [f32]) -> Result<(), E> + Sync,
    ) -> Result<Linear, E> {
        assert!(inputs > 0, "a product needs inputs");
        assert!(bias.as_ref().is_none_or(|b| b.len() == outputs), "one bias for each output");
        let mut linear = Linear { precision, outputs, inputs, bias, gated: None, words: Words::default() };
        let (steps, panel) = (linear.steps(), linear.padded_steps() * PANEL);
        linear.words = Words::zeros(outputs.div_ceil(PANEL) * panel);
        let failed = Mutex::new(None);
        let words = Shared::new(linear.words.words_mut());
        cpu.parallel(outputs.div_ceil(PANEL), &|p| {
            // SAFETY: panel `p` belongs to task `p`.
            let dst = unsafe { words.part(p * panel..p * panel + steps * PANEL) };
            let rows = p * PANEL..((p + 1) * PANEL).min(outputs);
            if let Err(e) = pack_panel(precision, inputs, rows, dst, &row) {
                failed.lock().expect("no panic under this lock").get_or_insert(e);
            }
        });
        match failed.into_inner().expect("no panic under this lock") {
            Some(e) => Err(e),
            None => Ok(linear),
        }
    }

    /// Packs gates G and what they open U (both width × inputs) for `Cpu::linear_swiglu`. `row(o, buf)` writes row `o`
    /// of \[G | U\], and the bias is as long.
    ///
    /// # Errors
    /// One of the errors of `row`.
    ///
    /// # Panics
    /// If `inputs` is 0 or the bias does not have 2 · width elements.
    pub fn pack_gated<E: Send>(
        cpu: &Cpu,
        precision: Precision,
        width: usize,
        inputs: usize,
        bias: Option<Vec<f32>>,
        row: impl Fn(usize, &mut [f32]) -> Result<(), E> + Sync,
    ) -> Result<Linear, E> {
        assert!(bias.as_ref().is_none_or(|b| b.len() == 2 * width), "one bias for each output");
        // Which row of [G | U] an output is; none where it only fills a panel up.
        let of = |output: usize| {
            let (panel, lane) = (output / PANEL, output % PANEL);
            let column = panel / 2 * PANEL + lane;
            (column < width).then_some(panel % 2 * width + column)
        };
        let outputs = width.div_ceil(PANEL) * 2 * PANEL;
        let bias = bias.map(|bias| (0..outputs).map(|o| of(o).map_or(0.0, |row| bias[row])).collect());
        let linear = Linear::pack(cpu, precision, outputs, inputs, bias, |output, buf| match of(output) {
            Some(o) => row(o, buf),
            None => {
                buf.fill(0.0);
                Ok(())
            }
        })?;
        Ok(Linear { gated: Some(width), ..linear })
    }
}

/// Packs up to 32 rows of weights into one panel.
fn pack_panel<E>(
    precision: Precision,
    inputs: usize,
    rows: std::ops::Range<usize>,
    dst: &mut [u32],
    row: &impl Fn(usize, &mut [f32]) -> Result<(), E>,
) -> Result<(), E> {
    let steps = dst.len() / PANEL;
    let mut scratch = scratch::lend(&ROWS, inputs + QUAD * steps);
    let (values, quad) = scratch.words.words_mut().split_at_mut(inputs);
    let values: &mut [f32] = bytemuck::cast_slice_mut(values);
    for first in rows.clone().step_by(QUAD) {
        let n = QUAD.min(rows.end - first);
        for (i, words) in quad.chunks_exact_mut(steps).take(n).enumerate() {
            row(first + i, values)?;
            match precision {
                Precision::F32 => words.copy_from_slice(bytemuck::cast_slice(values)),
                Precision::Bf16 => {
                    words[steps - 1] = 0;
                    let halves: &mut [bf16] = bytemuck::cast_slice_mut(words);
                    convert::f32_to_bf16(values, &mut halves[..inputs]);
                }
            }
        }
        interleave(&quad[..n * steps], steps, &mut dst[first - rows.start..], PANEL);
    }
    Ok(())
}

/// Packs `x` (rows × inputs) as one strip of `width` >= rows: word `s` of row `r` at `s · width + r`.
pub(super) struct PackStrip<'a> {
    pub(super) precision: Precision,
    pub(super) inputs: usize,
    pub(super) x: &'a [f32],
    pub(super) width: usize,
    pub(super) dst: &'a mut [u32],
}

impl Kernel for PackStrip<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let words = self.dst.len() / self.width;
        if self.width == 1 {
            return round::<S>(self.precision, self.x, self.dst);
        }
        if self.x.len() < self.width * self.inputs {
            self.dst.fill(0);
        }
        let mut scratch = scratch::lend(&ROWS, QUAD * words);
        let quad = scratch.words.words_mut();
        for (q, x) in self.x.chunks(QUAD * self.inputs).enumerate() {
            let rows = x.len() / self.inputs;
            for (x, row) in x.chunks_exact(self.inputs).zip(quad.chunks_exact_mut(words)) {
                round::<S>(self.precision, x, row);
            }
            interleave(&quad[..rows * words], words, &mut self.dst[q * QUAD..], self.width);
        }
    }
}

/// Writes the words of one row of activations.
#[inline(always)]
fn round<S: Simd>(precision: Precision, x: &[f32], dst: &mut [u32]) {
    match precision {
        Precision::F32 => dst.copy_from_slice(bytemuck::cast_slice(x)),
        Precision::Bf16 => {
            assert!(dst.len() >= x.len().div_ceil(2) * S::PAIR_WORDS);
            // SAFETY: the assertion's.
            unsafe { S::round_words(x.as_ptr(), x.len(), dst.as_mut_ptr()) };
        }
    }
}

/// Writes word `s` of row `r` (rows of `steps` words, at most four) to `dst[s · width + r]`.
#[inline(always)]
fn interleave(rows: &[u32], steps: usize, dst: &mut [u32], width: usize) {
    let n = rows.len() / steps;
    let mut first = 0;
    #[cfg(target_arch = "x86_64")]
    if n == QUAD {
        assert!(dst.len() >= (steps - 1) * width + QUAD);
        while first + QUAD <= steps {
            // SAFETY: four rows of `steps` words each; the assertion bounds the writes.
            unsafe {
                transpose_quad(rows.as_ptr().add(first), steps, dst.as_mut_ptr().add(first * width), width)
            };
            first += QUAD;
        }
    }
    for s in first..steps {
        for r in 0..n {
            dst[s * width + r] = rows[r * steps + s];
        }
    }
}

/// Transposes 4 × 4 words, rows `from` and `to` words apart.
///
/// # Safety
/// `src` and `dst` must be valid for four rows of four words.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn transpose_quad(src: *const u32, from: usize, dst: *mut u32, to: usize) {
    use std::arch::x86_64::*;
    // SAFETY: pointers as the caller vouches for; SSE2 is part of x86-64.
    unsafe {
        let mut r: [__m128; QUAD] = std::array::from_fn(|i| _mm_loadu_ps(src.add(i * from).cast()));
        let [a, b, c, d] = &mut r;
        _MM_TRANSPOSE4_PS(a, b, c, d);
        for (i, r) in r.into_iter().enumerate() {
            _mm_storeu_ps(dst.add(i * to).cast(), r);
        }
    }
}
