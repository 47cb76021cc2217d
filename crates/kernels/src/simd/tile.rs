//! The register tile that all products share.
//!
//! An output is one accumulator that takes its k steps in order, whatever the tile's shape: that is why a
//! row's result does not depend on the rows beside it. Blocking k stores and reloads the accumulator, which is exact.

use super::{PANEL, Simd};

/// Rows of a full strip of packed activations.
pub(crate) const STRIP: usize = 12;

/// Width that a strip of `rows` (1 ..= 12) rows is packed with: the next one that has a tile.
pub(crate) fn strip_width(rows: usize) -> usize {
    [1, 2, 4, 6, 8].into_iter().find(|w| rows <= *w).unwrap_or(STRIP)
}

/// Where a tile's operands lie. Strides count 32-bit words.
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    /// Steps of the sum: inputs, or pairs of inputs.
    pub(crate) k: usize,
    /// Weights; column `c` of step 0 is at (c / 32) · ps + c % 32.
    pub(crate) w: *const u32,
    /// From one step's weights to the next.
    pub(crate) ws: usize,
    /// From one panel of 32 columns to the next.
    pub(crate) ps: usize,
    /// Activations of row 0, step 0.
    pub(crate) x: *const u32,
    /// From one step's activations to the next (the second word of a pair counts as a step).
    pub(crate) ks: usize,
    /// Results, `f32`; column `c` of row `r` is at (c / 32) · cps + r · cs + c % 32.
    pub(crate) c: *mut f32,
    /// From one row of results to the next.
    pub(crate) cs: usize,
    /// From one panel of results to the next.
    pub(crate) cps: usize,
    /// Columns, a multiple of 16.
    pub(crate) cols: usize,
    /// Whether the sum goes on from what `c` holds; else it starts at 0.
    pub(crate) add: bool,
}

/// How one step multiplies.
pub(super) trait Step<S: Simd> {
    type W: Copy;
    /// Words of a row's activations in one step.
    const WORDS: usize;
    unsafe fn load(p: *const u32) -> Self::W;
    unsafe fn mul(acc: S::F, w: Self::W, x: *const u32, ks: usize) -> S::F;
}

/// `f32` by `f32`.
pub(super) struct Single;
/// Pairs of `bf16`.
pub(super) struct Paired;

impl<S: Simd> Step<S> for Single {
    type W = S::F;
    const WORDS: usize = 1;

    #[inline(always)]
    unsafe fn load(p: *const u32) -> S::F {
        // SAFETY: the caller's.
        unsafe { S::load(p.cast()) }
    }

    #[inline(always)]
    unsafe fn mul(acc: S::F, w: S::F, x: *const u32, _: usize) -> S::F {
        // SAFETY: the caller's.
        S::fma(S::splat(unsafe { *x.cast::<f32>() }), w, acc)
    }
}

impl<S: Simd> Step<S> for Paired {
    type W = S::Pair;
    const WORDS: usize = S::PAIR_WORDS;

    #[inline(always)]
    unsafe fn load(p: *const u32) -> S::Pair {
        // SAFETY: the caller's.
        unsafe { S::load_pair(p) }
    }

    #[inline(always)]
    unsafe fn mul(acc: S::F, w: S::Pair, x: *const u32, ks: usize) -> S::F {
        // SAFETY: the caller's.
        unsafe { S::fma_pair(acc, w, x, ks) }
    }
}

/// Writes the body out for each index below `n` (at most 12): as loops, the accumulators would be kept in memory.
macro_rules! unroll {
    ($i:ident < $n:ident: $body:block) => {
        unroll!(@ $i $n $body 0 1 2 3 4 5 6 7 8 9 10 11)
    };
    (@ $i:ident $n:ident $body:block $($at:literal)*) => {
        {
            $(if $at < $n {
                let $i = $at;
                $body
            })*
        }
    };
}

/// `MR` rows × `NV` vectors of columns from column `col` on.
///
/// # Safety
/// `t`'s pointers must be valid for that tile, and S's instructions enabled.
#[inline(always)]
unsafe fn tile<S: Simd, K: Step<S>, const MR: usize, const NV: usize, const RS: usize>(
    t: &Tile,
    row: usize,
    col: usize,
) {
    const { assert!(MR <= 12 && NV <= 4) };
    let at = |v: usize, stride: usize| {
        let c = col + v * S::LANES;
        c / PANEL * stride + c % PANEL
    };
    // SAFETY: all offsets stay within the tile that the caller vouches for.
    unsafe {
        let c = t.c.add(row * t.cs);
        let mut acc = [[S::splat(0.0); NV]; MR];
        if t.add {
            unroll!(r < MR: { unroll!(v < NV: { acc[r][v] = S::load(c.add(r * t.cs + at(v, t.cps))) }) });
        }
        let from: [usize; NV] = std::array::from_fn(|v| at(v, t.ps));
        let (mut w, mut x) = (t.w, t.x.add(row * RS));
        let step = t.ks * K::WORDS;
        for _ in 0..t.k {
            let mut weights = [K::load(w.add(from[0])); NV];
            unroll!(v < NV: { weights[v] = K::load(w.add(from[v])) });
            unroll!(r < MR: {
                unroll!(v < NV: { acc[r][v] = K::mul(acc[r][v], weights[v], x.add(r * RS), t.ks) })
            });
            w = w.add(t.ws);
            x = x.add(step);
        }
        unroll!(r < MR: { unroll!(v < NV: { S::store(c.add(r * t.cs + at(v, t.cps)), acc[r][v]) }) });
    }
}

/// All columns for `rows` rows, `MR` at a time.
///
/// # Safety
/// As for `tile`, for all rows and columns of `t`; `rows` is a multiple of `MR`.
#[inline(always)]
pub(super) unsafe fn tiles<S: Simd, K: Step<S>, const MR: usize, const NV: usize, const RS: usize>(
    t: &Tile,
    rows: usize,
) {
    let mut col = 0;
    while col < t.cols {
        let vectors = (t.cols - col) / S::LANES;
        let take = if vectors >= NV { NV } else { vectors.min(2) };
        for row in (0..rows).step_by(MR) {
            // SAFETY: the caller's.
            unsafe {
                match take {
                    1 => tile::<S, K, MR, 1, RS>(t, row, col),
                    2 => tile::<S, K, MR, 2, RS>(t, row, col),
                    _ => tile::<S, K, MR, NV, RS>(t, row, col),
                }
            }
        }
        col += take * S::LANES;
    }
}
