//! Packing of weights and of activations.

use std::cell::Cell;
use std::sync::Mutex;

use half::bf16;

#[cfg(target_arch = "x86_64")]
use super::pack_i16;
use super::quant_blocks::{BLOCK, BlockFormat, Q4Block, Q8Block, QuantizeWeights, pack_q4, pack_q8};
use super::weights::{Linear, Precision};
use crate::convert;
use crate::cpu::Cpu;
use crate::scratch::{self, AlignedVec};
#[cfg(target_arch = "x86_64")]
use crate::simd::features::Avx2;
use crate::simd::{Kernel, PANEL, Simd};
use crate::weight_arena::WeightWords;

thread_local! {
    /// Four rows before they are interleaved.
    static ROWS: Cell<AlignedVec> = const { Cell::new(AlignedVec::new()) };
}

/// Rows that are interleaved at a time.
const QUAD: usize = 4;

/// A function that writes a row of a matrix, given its index, as `T`s.
pub type WriteRow<'a, T, E> = &'a (dyn Fn(usize, &mut [T]) -> Result<(), E> + Sync);

/// The rows of a weight matrix, or what an earlier packing made of them. Each row or panel is asked for once, in any order, by several
/// threads.
pub enum WeightRows<'a, E> {
    /// Writes row `o` as `inputs` numbers.
    F32(WriteRow<'a, f32, E>),
    /// Writes row `o` as ⌈inputs / 32⌉ blocks of four bits, which [`Precision::Q8`] stores unchanged.
    Q4(WriteRow<'a, Q4Block, E>),
    /// Writes panel `p` of [`PackedPanels`] of this layout.
    Panels {
        /// Writes all words of a panel.
        write: WriteRow<'a, u32, E>,
        /// Whether its blocks are of four bits.
        four_bits: bool,
    },
}

/// Packed weights as words, for a file from which they are taken again as [`WeightRows::Panels`].
#[derive(Clone, Copy, Debug)]
pub struct PackedPanels<'a> {
    /// Panel after panel.
    pub words: &'a [u32],
    /// Words of a panel.
    pub panel_words: usize,
    /// Whether their blocks are of four bits.
    pub four_bits: bool,
}

impl<E> Clone for WeightRows<'_, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E> Copy for WeightRows<'_, E> {}

impl<E> WeightRows<'_, E> {
    /// Writes row `o` as numbers, for a device that packs in its own way.
    ///
    /// # Errors
    /// If the row cannot be had.
    ///
    /// # Panics
    /// If there are panels, which only a device with their layout asks for.
    pub fn write_f32(&self, o: usize, values: &mut [f32]) -> Result<(), E> {
        match self {
            WeightRows::F32(write) => write(o, values),
            WeightRows::Q4(write) => {
                let mut blocks = vec![Q4Block::default(); values.len().div_ceil(BLOCK)];
                write(o, &mut blocks)?;
                let weights = blocks.iter().flat_map(|b| b.q.map(|q| b.scale * f32::from(q) + b.min));
                values.iter_mut().zip(weights).for_each(|(value, weight)| *value = weight);
                Ok(())
            }
            WeightRows::Panels { .. } => panic!("panels are for devices with their layout"),
        }
    }
}

impl Cpu {
    /// Rounds a row of weights to blocks of eight bits, as [`Precision::Q8`] stores them; zeros fill the last block.
    ///
    /// # Panics
    /// If there are not ⌈inputs / 32⌉ blocks.
    pub fn quantize_weights(&self, row: &[f32], blocks: &mut [Q8Block]) {
        assert_eq!(blocks.len(), row.len().div_ceil(BLOCK), "a block for each 32 inputs");
        self.run(QuantizeWeights { row, blocks });
    }
}

impl Linear {
    /// Packs W (outputs × inputs, row-major). The whole matrix is never held in `f32`.
    ///
    /// # Errors
    /// One of the errors of `rows`.
    ///
    /// # Panics
    /// If `inputs` is 0, the bias does not have `outputs` elements, or blocks of four bits are packed with another
    /// precision than [`Precision::Q8`].
    pub fn pack<E: Send>(
        cpu: &Cpu,
        precision: Precision,
        outputs: usize,
        inputs: usize,
        bias: Option<Vec<f32>>,
        rows: WeightRows<E>,
    ) -> Result<Linear, E> {
        pack(cpu, precision, outputs, inputs, bias, None, rows)
    }

    /// Packs gate and up projections G and U (both width × inputs), interleaved by panel, for [`Cpu::linear_gated`]. `rows`
    /// gives the rows of G, then those of U; the bias has 2 · width elements.
    ///
    /// # Errors
    /// One of the errors of `rows`.
    ///
    /// # Panics
    /// As [`Linear::pack`], and if the bias has another length.
    pub fn pack_gate_up<E: Send>(
        cpu: &Cpu,
        precision: Precision,
        width: usize,
        inputs: usize,
        bias: Option<Vec<f32>>,
        rows: WeightRows<E>,
    ) -> Result<Linear, E> {
        pack(cpu, precision, 2 * width, inputs, bias, Some(width), rows)
    }

    /// The packed words.
    pub fn panels(&self) -> PackedPanels<'_> {
        let (panel_words, four_bits) = (self.panel_words(), self.format == BlockFormat::Q4);
        let words = &self.words.as_u32()[..self.outputs.div_ceil(PANEL) * panel_words];
        PackedPanels { words, panel_words, four_bits }
    }

    /// The outputs of panel `p` that have a row, as lane and row.
    fn lanes(&self, p: usize, rows: usize) -> impl Iterator<Item = (usize, usize)> {
        (0..PANEL).filter_map(move |lane| Some((lane, self.row_of(p * PANEL + lane, rows)?)))
    }

    /// The row of a packed output; none for the outputs past the last that fill a panel.
    fn row_of(&self, output: usize, rows: usize) -> Option<usize> {
        let Some(width) = self.gate_up else { return (output < rows).then_some(output) };
        let (panel, lane) = (output / PANEL, output % PANEL);
        let column = panel / 2 * PANEL + lane;
        (column < width).then_some(panel % 2 * width + column)
    }
}

fn pack<E: Send>(
    cpu: &Cpu,
    precision: Precision,
    rows: usize,
    inputs: usize,
    bias: Option<Vec<f32>>,
    gate_up: Option<usize>,
    source: WeightRows<E>,
) -> Result<Linear, E> {
    assert!(inputs > 0, "a product needs inputs");
    assert!(bias.as_ref().is_none_or(|b| b.len() == rows), "one bias for each output");
    let format = match source {
        WeightRows::F32(_) | WeightRows::Panels { four_bits: false, .. } => BlockFormat::Q8,
        WeightRows::Q4(_) | WeightRows::Panels { four_bits: true, .. } => BlockFormat::Q4,
    };
    assert!(
        precision == Precision::Q8 || format == BlockFormat::Q8,
        "blocks of four bits are packed with q8"
    );
    let outputs = gate_up.map_or(rows, |width| width.div_ceil(PANEL) * 2 * PANEL);
    let mut linear =
        Linear { precision, outputs, inputs, bias: None, gate_up, format, words: WeightWords::default() };
    linear.bias = bias.map(|b| (0..outputs).map(|o| linear.row_of(o, rows).map_or(0.0, |r| b[r])).collect());
    let (panels, panel_words) = (outputs.div_ceil(PANEL), linear.panel_words());
    let failed = Mutex::new(None);
    let write = |p: usize, dst: &mut [u32]| {
        let packed = match source {
            WeightRows::Panels { write, .. } => write(p, dst),
            WeightRows::Q4(row) => pack_q4_blocks(&linear, p, rows, dst, row),
            WeightRows::F32(row) if precision == Precision::Q8 => {
                pack_q8_blocks(cpu, &linear, p, rows, dst, row)
            }
            WeightRows::F32(row) => pack_panel(&linear, p, rows, dst, row),
        };
        if let Err(e) = packed {
            failed.lock().expect("no panic under this lock").get_or_insert(e);
        }
    };
    // SAFETY: `parallel` runs all tasks, or panics.
    let words = unsafe {
        cpu.weight_arena().in_parts(panels, panel_words, |parts, f| cpu.parallel(parts, f), &write)
    };
    match failed.into_inner().expect("no panic under this lock") {
        Some(e) => Err(e),
        None => Ok(Linear { words, ..linear }),
    }
}

/// Packs up to 32 rows of weights into panel `p` of blocks of eight bits.
fn pack_q8_blocks<E>(
    cpu: &Cpu,
    linear: &Linear,
    p: usize,
    rows: usize,
    dst: &mut [u32],
    row: WriteRow<f32, E>,
) -> Result<(), E> {
    let mut values = vec![0.0; linear.inputs];
    let mut blocks = vec![Q8Block::default(); linear.inputs.div_ceil(BLOCK)];
    linear.lanes(p, rows).try_for_each(|(lane, of)| {
        row(of, &mut values)?;
        cpu.quantize_weights(&values, &mut blocks);
        pack_q8(&blocks, lane, dst);
        Ok(())
    })
}

/// Packs up to 32 rows of blocks of four bits into panel `p`.
fn pack_q4_blocks<E>(
    linear: &Linear,
    p: usize,
    rows: usize,
    dst: &mut [u32],
    row: WriteRow<Q4Block, E>,
) -> Result<(), E> {
    let mut nibbles = vec![Q4Block::default(); linear.inputs.div_ceil(BLOCK)];
    linear.lanes(p, rows).try_for_each(|(lane, of)| {
        row(of, &mut nibbles)?;
        pack_q4(&nibbles, lane, dst);
        Ok(())
    })
}

/// Packs up to 32 rows of weights into panel `p`.
fn pack_panel<E>(
    linear: &Linear,
    p: usize,
    rows: usize,
    dst: &mut [u32],
    row: WriteRow<f32, E>,
) -> Result<(), E> {
    let (steps, inputs) = (linear.steps(), linear.inputs);
    let mut scratch = scratch::borrow(&ROWS, inputs + QUAD * steps);
    let (values, quad) = scratch.as_u32_mut().split_at_mut(inputs);
    let values: &mut [f32] = bytemuck::cast_slice_mut(values);
    for first in (0..PANEL).step_by(QUAD) {
        let lanes = |i: usize| linear.row_of(p * PANEL + first + i, rows);
        let n = (0..QUAD).filter_map(lanes).count();
        for (i, words) in quad.chunks_exact_mut(steps).take(n).enumerate() {
            row(lanes(i).expect("the first `n` lanes have rows"), values)?;
            match linear.precision {
                Precision::F32 => words.copy_from_slice(bytemuck::cast_slice(values)),
                Precision::Bf16 | Precision::Q8 => {
                    words[steps - 1] = 0;
                    let halves: &mut [bf16] = bytemuck::cast_slice_mut(words);
                    convert::f32_to_bf16(values, &mut halves[..inputs]);
                }
            }
        }
        interleave(&quad[..n * steps], steps, &mut dst[first..steps * PANEL], PANEL);
    }
    Ok(())
}

/// How activations are rounded.
#[derive(Clone, Copy)]
pub(super) enum Rounding {
    F32,
    /// Pairs of `bf16`.
    Pairs,
    /// [`pack_i16::round_row`].
    #[cfg(target_arch = "x86_64")]
    Integers(Avx2),
}

/// Packs `x` (rows × inputs) as one strip of `width` >= rows: word `s` of row `r` at `s · width + r`.
pub(super) struct PackStrip<'a> {
    pub(super) rounding: Rounding,
    pub(super) inputs: usize,
    pub(super) x: &'a [f32],
    pub(super) width: usize,
    pub(super) dst: &'a mut [u32],
}

impl Kernel for PackStrip<'_> {
    const PAIRS: bool = true;
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let words = self.dst.len() / self.width;
        if self.width == 1 {
            return round(simd, self.rounding, self.x, self.dst);
        }
        if self.x.len() < self.width * self.inputs {
            self.dst.fill(0);
        }
        let mut scratch = scratch::borrow(&ROWS, QUAD * words);
        let quad = scratch.as_u32_mut();
        for (q, x) in self.x.chunks(QUAD * self.inputs).enumerate() {
            let rows = x.len() / self.inputs;
            for (x, row) in x.chunks_exact(self.inputs).zip(quad.chunks_exact_mut(words)) {
                round(simd, self.rounding, x, row);
            }
            interleave(&quad[..rows * words], words, &mut self.dst[q * QUAD..], self.width);
        }
    }
}

/// Writes the words of one row of activations.
#[inline(always)]
fn round<S: Simd>(simd: S, rounding: Rounding, x: &[f32], dst: &mut [u32]) {
    match rounding {
        Rounding::F32 => dst.copy_from_slice(bytemuck::cast_slice(x)),
        #[cfg(target_arch = "x86_64")]
        Rounding::Integers(avx2) => pack_i16::round_row(avx2, x, dst),
        Rounding::Pairs => {
            let (_, rest) = dst.split_at_mut(x.len().div_ceil(2) * S::PAIR_WORDS);
            rest.fill(0);
            // SAFETY: `split_at_mut` has checked that `dst` holds the words.
            unsafe { simd.round_words(x.as_ptr(), x.len(), dst.as_mut_ptr()) };
        }
    }
}

/// Writes word `s` of row `r` (rows of `steps` words, at most four) to `dst[s · width + r]`.
#[inline(always)]
fn interleave(rows: &[u32], steps: usize, dst: &mut [u32], width: usize) {
    let n = rows.len() / steps;
    let transposed = if n == QUAD { steps / QUAD * QUAD } else { 0 };
    if transposed > 0 {
        assert!(dst.len() >= (steps - 1) * width + QUAD);
        for first in (0..transposed).step_by(QUAD) {
            // SAFETY: four rows of `steps` words each; the assertion bounds the writes.
            unsafe {
                transpose_quad(rows.as_ptr().add(first), steps, dst.as_mut_ptr().add(first * width), width)
            };
        }
    }
    for s in transposed..steps {
        for r in 0..n {
            dst[s * width + r] = rows[r * steps + s];
        }
    }
}

/// Transposes 4 × 4 words, rows `from` and `to` words apart.
///
/// # Safety
/// `src` and `dst` must be valid for four rows of four words.
#[inline(always)]
unsafe fn transpose_quad(src: *const u32, from: usize, dst: *mut u32, to: usize) {
    #[cfg(target_arch = "x86_64")]
    use std::arch::x86_64::*;
    // SAFETY: pointers as the caller vouches for; SSE2 is part of x86-64.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        let mut r: [__m128; QUAD] = std::array::from_fn(|i| _mm_loadu_ps(src.add(i * from).cast()));
        let [a, b, c, d] = &mut r;
        _MM_TRANSPOSE4_PS(a, b, c, d);
        for (i, r) in r.into_iter().enumerate() {
            _mm_storeu_ps(dst.add(i * to).cast(), r);
        }
    }
    // SAFETY: pointers as the caller vouches for.
    #[cfg(not(target_arch = "x86_64"))]
    unsafe {
        // Rows are read first and columns written whole, so that both become vectors.
        let r: [[u32; QUAD]; QUAD] =
            std::array::from_fn(|i| src.add(i * from).cast::<[u32; QUAD]>().read_unaligned());
        for i in 0..QUAD {
            dst.add(i * to).cast::<[u32; QUAD]>().write_unaligned(r.map(|row| row[i]));
        }
    }
}
