//! How rows of activations are rounded and packed for products of integers of 16 bits.
//!
//! A row is pairs of integers, then a scale for each block of the sum.

use crate::simd::STRIP;
use crate::simd::features::Avx2;
use crate::simd::i16_tiles::round_vector;

/// Rows from which on unpacking weights is worth its time.
pub(super) const LEAST_ROWS: usize = 24;
/// Rows of one task: the activations of a block of the sum and the sums of eight panels fit the second-level cache.
pub(super) const ROWS: usize = 16 * STRIP;
/// Most steps, pairs of inputs, of one block of the sum.
const STEPS: usize = 128;

/// Steps of one block of the sum, whole blocks of 32 inputs.
pub(super) fn part(steps: usize) -> usize {
    steps.div_ceil(steps.div_ceil(STEPS)).next_multiple_of(16)
}

/// Words of a packed row: its pairs, then a scale for each block of the sum.
pub(super) fn words(steps: usize) -> usize {
    steps + steps.div_ceil(part(steps))
}

/// Writes the words of one row of activations.
#[inline(always)]
pub(super) fn round_row(simd: Avx2, x: &[f32], words: &mut [u32]) {
    let steps = x.len().div_ceil(2).next_multiple_of(16);
    let (pairs, scales) = words.split_at_mut(steps);
    let part = part(steps);
    for (i, (pairs, scale)) in pairs.chunks_mut(part).zip(scales).enumerate() {
        let x = &x[(2 * part * i).min(x.len())..x.len().min(2 * part * (i + 1))];
        *scale = round_vector(simd, x, pairs).to_bits();
    }
}
