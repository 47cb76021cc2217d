//! Packing of activations as tiles of AMX, and the sizes of its tasks.

use crate::simd::PANEL;
use crate::simd::features::Amx;
use crate::simd::pair_tiles::{PairTiles as _, SIDE, TILE};

/// Most steps of one part of a sum.
const MOST_STEPS: usize = 48 * STEPS;

/// Words of weights that stay in the second-level cache beside the activations that stream through it.
const CACHED_WEIGHTS: usize = 3 << 16;

/// Rows of a strip: two tiles.
pub(super) const STRIP: usize = 2 * SIDE;

/// Steps (pairs of inputs) of a tile.
pub(super) const STEPS: usize = SIDE;

/// Packs up to 32 rows of `inputs` as one column of tiles or two. Rows past the last are zero.
pub(super) fn pack(amx: Amx, inputs: usize, x: &[f32], dst: &mut [u32]) {
    let column = inputs.div_ceil(2 * SIDE) * TILE;
    for (x, dst) in x.chunks(SIDE * inputs).zip(dst.chunks_exact_mut(column)) {
        let rows = x.chunks_exact(inputs);
        let n = rows.len();
        for (r, x) in rows.enumerate() {
            amx.round_row(x, 1.0, dst, r);
        }
        if n < SIDE {
            dst.chunks_exact_mut(TILE).for_each(|tile| tile[n * SIDE..].fill(0));
        }
    }
}

/// Steps of one part of a sum of `steps`: at most 96 KiB of a panel; the parts have about equal lengths.
pub(super) fn part(steps: usize) -> usize {
    steps.div_ceil(steps.div_ceil(MOST_STEPS)).next_multiple_of(STEPS)
}

/// Panels of a task, whose weights stay in the second-level cache for all strips.
pub(super) fn chunk(steps: usize) -> usize {
    (CACHED_WEIGHTS / (steps * PANEL)).max(2)
}
