//! Packing of activations as tiles of AMX, and the sizes of its tasks.

use std::ops::Range;

use crate::simd::PANEL;
use crate::simd::features::Amx;
use crate::simd::pair_tiles::{PairTiles as _, SIDE, TILE};

/// Most steps of one part of a sum: 36 KiB of a strip's activations, which stay in the first-level cache while the weights of all panels
/// pass.
const MOST_STEPS: usize = 18 * STEPS;

/// Words of weights that stay in the second-level cache beside the activations that stream through it.
const CACHED_WEIGHTS: usize = 3 << 15;

/// Bytes of unfinished sums that stay there, too.
const CACHED_SUMS: usize = 768 << 10;

/// Rows of a task.
pub(super) const ROWS: usize = 512;

/// Rows of a strip: two tiles.
pub(super) const STRIP: usize = 2 * SIDE;

/// Steps (pairs of inputs) of a tile.
pub(super) const STEPS: usize = SIDE;

/// Packs the inputs of one part of a sum, of up to 32 rows of `inputs`, as one column of tiles or two. Rows past the last are zero.
pub(super) fn pack(amx: Amx, inputs: usize, x: &[f32], part: Range<usize>, dst: &mut [u32]) {
    for (x, dst) in x.chunks(SIDE * inputs).zip(dst.chunks_exact_mut(part.len() * SIDE)) {
        let rows = x.chunks_exact(inputs);
        let n = rows.len();
        for (r, x) in rows.enumerate() {
            amx.round_row(&x[2 * part.start..inputs.min(2 * part.end)], 1.0, dst, r);
        }
        if n < SIDE {
            dst.chunks_exact_mut(TILE).for_each(|tile| tile[n * SIDE..].fill(0));
        }
    }
}

/// Steps of each part of a sum of `words`, `steps` in all parts but the last.
pub(super) fn parts(words: usize, steps: usize) -> impl Iterator<Item = Range<usize>> {
    (0..words).step_by(steps).map(move |start| start..(start + steps).min(words))
}

/// Words of `width` packed rows from `first` on of a part, among `rows` packed rows. All rows of a part lie together: those of one row
/// would be so far apart that the parts of many fall into the same few sets of a cache.
pub(super) fn packed(part: &Range<usize>, rows: usize, first: usize, width: usize) -> Range<usize> {
    let at = part.start * rows + part.len() * first;
    at..at + part.len() * width
}

/// Steps of one part of a sum of `steps`: at most 36 KiB of a panel; the parts have about equal lengths.
pub(super) fn part(steps: usize) -> usize {
    steps.div_ceil(steps.div_ceil(MOST_STEPS)).next_multiple_of(STEPS)
}

/// Panels of a task, whose weights and unfinished sums stay in the second-level cache for all strips. `steps` of a part, `words` of all.
pub(super) fn chunk(steps: usize, words: usize) -> usize {
    let most = if steps < words { CACHED_SUMS / (ROWS * PANEL * size_of::<f32>()) } else { usize::MAX };
    (CACHED_WEIGHTS / (steps * PANEL)).clamp(2, most)
}
