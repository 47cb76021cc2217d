//! Weights in blocks of 32 inputs: `scale · q + min`, with q of 8 or 4 bits.
//!
//! A panel is block after block, each for 32 outputs: 32 scales (`f16`), for 4 bits also 32 minima (`f16`), then words of
//! four consecutive inputs, 32 outputs each. A byte is q + 128 of a signed q, so that its minimum is −128 · scale. A word of
//! 4-bit weights holds four inputs in the lower halves of its bytes, and the four inputs 16 further in the upper halves.

use std::ops::Range;

use half::f16;

use crate::simd::PANEL;

/// Inputs of a block.
pub(in crate::linear) const BLOCK: usize = 32;
/// Words of four inputs in a block.
pub(super) const QUADS: usize = BLOCK / 4;
/// Words of 32 `f16`.
pub(super) const HALVES: usize = PANEL / 2;
/// Words of one block of activations: 32 bytes, scale, start and sum.
pub(in crate::linear) const X_WORDS: usize = QUADS + 3;
/// Index of the scale of a block of activations (`f32`).
pub(super) const X_SCALE: usize = QUADS;
/// Index of the start of a product with bytes: −128 times the sum of the block's bytes (`i32`).
pub(super) const X_START: usize = QUADS + 1;
/// Index of the sum of the block's dequantised activations (`f32`), by which the minima of 4-bit blocks are multiplied.
pub(super) const X_SUM: usize = QUADS + 2;

/// Thirty-two weights of four bits: `scale · q + min`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Q4Block {
    /// Rounded to `f16` when packed.
    pub scale: f32,
    /// Rounded to `f16` when packed.
    pub min: f32,
    /// Each below 16.
    pub q: [u8; BLOCK],
}

/// Thirty-two weights of eight bits: `scale · q`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Q8Block {
    /// The largest magnitude / 127, rounded.
    pub scale: f16,
    /// From −127 to 127.
    pub q: [i8; BLOCK],
}

/// Bits of a block's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::linear) enum BlockFormat {
    /// 8 bits and a scale.
    Q8,
    /// 4 bits, a scale and a minimum.
    Q4,
}

impl BlockFormat {
    /// Words of a block of a panel.
    pub(in crate::linear) const fn words(self) -> usize {
        match self {
            BlockFormat::Q8 => HALVES + QUADS * PANEL,
            BlockFormat::Q4 => 2 * HALVES + QUADS / 2 * PANEL,
        }
    }

    /// Words before the first quad.
    pub(super) fn head(self) -> usize {
        match self {
            BlockFormat::Q8 => HALVES,
            BlockFormat::Q4 => 2 * HALVES,
        }
    }
}

/// Writes the `f16` of output `lane` in row `row` (0: scales, 1: minima) of a block.
fn set_f16(block: &mut [u32], row: usize, lane: usize, x: f16) {
    let halves: &mut [u16] = bytemuck::cast_slice_mut(&mut block[row * HALVES..(row + 1) * HALVES]);
    halves[lane] = x.to_bits();
}

/// Packs a row of blocks of eight bits as output `lane` of a panel.
pub(in crate::linear) fn pack_q8(row: &[Q8Block], lane: usize, panel: &mut [u32]) {
    for (x, block) in row.iter().zip(panel.chunks_exact_mut(BlockFormat::Q8.words())) {
        set_f16(block, 0, lane, x.scale);
        let words = block[HALVES..].iter_mut().skip(lane).step_by(PANEL);
        for (word, quad) in words.zip(x.q.as_chunks::<4>().0) {
            *word = u32::from_le_bytes(quad.map(|q| q as u8 ^ 0x80));
        }
    }
}

/// Packs a row of blocks of four bits as output `lane` of a panel.
pub(in crate::linear) fn pack_q4(row: &[Q4Block], lane: usize, panel: &mut [u32]) {
    for (x, block) in row.iter().zip(panel.chunks_exact_mut(BlockFormat::Q4.words())) {
        set_f16(block, 0, lane, f16::from_f32(x.scale));
        set_f16(block, 1, lane, f16::from_f32(x.min));
        for (t, word) in block[2 * HALVES..].iter_mut().skip(lane).step_by(PANEL).enumerate() {
            let byte = |i: usize| (x.q[4 * t + i] & 15) | (x.q[BLOCK / 2 + 4 * t + i] << 4);
            *word = u32::from_le_bytes([0, 1, 2, 3].map(byte));
        }
    }
}

/// The blocks that hold these steps of pairs.
pub(in crate::linear) fn blocks_of(steps: &Range<usize>) -> Range<usize> {
    steps.start / (BLOCK / 2)..steps.end / (BLOCK / 2)
}
