//! Products with tiles: activations are packed as 16 × 32 tiles of `bf16`, and a panel of weights, pair of inputs
//! after pair, is a column of tiles as it lies.

use crate::simd::PANEL;
use crate::simd::amx::{SIDE, TILE, Tiles, round_row};

/// Rows of a strip: two tiles.
pub(super) const STRIP: usize = 2 * SIDE;

/// Steps (pairs of inputs) of a tile.
pub(super) const STEPS: usize = SIDE;

/// Packs up to 32 rows of `inputs` as one column of tiles or two; zeros fill them up.
pub(super) fn pack(inputs: usize, x: &[f32], dst: &mut [u32]) {
    let column = inputs.div_ceil(2 * SIDE) * TILE;
    for (x, dst) in x.chunks(SIDE * inputs).zip(dst.chunks_exact_mut(column)) {
        let rows = x.chunks_exact(inputs);
        let n = rows.len();
        for (r, x) in rows.enumerate() {
            // SAFETY: `Isa::Amx` is kept only where it is available; a column holds every row's tiles.
            unsafe { round_row(x.as_ptr(), inputs, dst.as_mut_ptr(), r) };
        }
        if n < SIDE {
            dst.chunks_exact_mut(TILE).for_each(|tile| tile[n * SIDE..].fill(0));
        }
    }
}

/// Adds `steps` of a sum to one cell (32 × 32): `x` holds the strip's tiles, `all` steps for each 16 rows; `w` begins
/// with the panel's weights of the first step. Meanwhile the same steps of the next panel are fetched, a part of them
/// with each strip `s`.
#[allow(clippy::too_many_arguments)]
pub(super) fn cell(
    tiles: &Tiles,
    steps: std::ops::Range<usize>,
    all: usize,
    rows: usize,
    s: usize,
    x: &[u32],
    w: &[u32],
    cell: &mut [f32],
) {
    let (blocks, add) = (steps.len() / STEPS, steps.start > 0);
    let column = |i: usize| x[i * all * SIDE..][steps.start * SIDE..steps.end * SIDE].as_ptr();
    // Some eight strips share a panel: each fetches an eighth of the next one.
    let ahead = w.as_ptr().wrapping_add(all * PANEL + s * blocks * 64);
    let (w, c) =
        (w[..steps.len() * PANEL].as_ptr(), cell[..rows.next_multiple_of(SIDE) * PANEL].as_mut_ptr());
    // SAFETY: the slices hold the tiles of these steps and the cell's rows.
    unsafe {
        if rows > SIDE {
            tiles.product_32([column(0), column(1)], w, blocks, c, PANEL * 4, add, ahead);
        } else {
            tiles.product_16(column(0), w, blocks, c, PANEL * 4, add);
        }
    }
}
