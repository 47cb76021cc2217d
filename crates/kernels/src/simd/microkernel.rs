//! The register tile that all products share.
//!
//! An output is one accumulator that takes its k steps in order, whatever the tile's shape. So a row's result does not
//! depend on the rows that are computed with it. Blocking k stores and reloads the accumulator, which is exact.

use super::tile::{PANEL, Tile};
use super::vector::Simd;

/// How one step multiplies.
pub(super) trait Step<S: Simd> {
    type W: Copy;
    /// Words of a row's activations in one step.
    const WORDS: usize;
    unsafe fn load(simd: S, p: *const u32) -> Self::W;
    unsafe fn mul(simd: S, acc: S::F, w: Self::W, x: *const u32, ks: usize) -> S::F;
}

/// `f32` by `f32`.
pub(super) struct Single;
/// Pairs of `bf16`.
pub(super) struct Paired;

impl<S: Simd> Step<S> for Single {
    type W = S::F;
    const WORDS: usize = 1;

    #[inline(always)]
    unsafe fn load(simd: S, p: *const u32) -> S::F {
        // SAFETY: the caller's.
        unsafe { simd.load(p.cast()) }
    }

    #[inline(always)]
    unsafe fn mul(simd: S, acc: S::F, w: S::F, x: *const u32, _: usize) -> S::F {
        // SAFETY: the caller's.
        simd.fma(simd.splat(unsafe { *x.cast::<f32>() }), w, acc)
    }
}

impl<S: Simd> Step<S> for Paired {
    type W = S::Pair;
    const WORDS: usize = S::PAIR_WORDS;

    #[inline(always)]
    unsafe fn load(simd: S, p: *const u32) -> S::Pair {
        // SAFETY: the caller's.
        unsafe { simd.load_pair(p) }
    }

    #[inline(always)]
    unsafe fn mul(simd: S, acc: S::F, w: S::Pair, x: *const u32, ks: usize) -> S::F {
        // SAFETY: the caller's.
        unsafe { simd.fma_pair(acc, w, x, ks) }
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
/// `t`'s pointers must be valid for that tile.
#[inline(always)]
unsafe fn tile<S: Simd, K: Step<S>, const MR: usize, const NV: usize, const RS: usize>(
    simd: S,
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
        let mut acc = [[simd.splat(0.0); NV]; MR];
        if t.add {
            unroll!(r < MR: { unroll!(v < NV: { acc[r][v] = simd.load(c.add(r * t.cs + at(v, t.cps))) }) });
        }
        let from: [usize; NV] = std::array::from_fn(|v| at(v, t.ps));
        let (mut w, mut x) = (t.w, t.x.add(row * RS));
        let step = t.ks * K::WORDS;
        for _ in 0..t.k {
            let mut weights = [K::load(simd, w.add(from[0])); NV];
            unroll!(v < NV: { weights[v] = K::load(simd, w.add(from[v])) });
            unroll!(r < MR: {
                unroll!(v < NV: { acc[r][v] = K::mul(simd, acc[r][v], weights[v], x.add(r * RS), t.ks) })
            });
            w = w.add(t.ws);
            x = x.add(step);
        }
        unroll!(r < MR: { unroll!(v < NV: { simd.store(c.add(r * t.cs + at(v, t.cps)), acc[r][v]) }) });
    }
}

/// All columns for `rows` rows, `MR` at a time.
///
/// # Safety
/// As for `tile`, for all rows and columns of `t`; `rows` is a multiple of `MR`.
#[inline(always)]
pub(super) unsafe fn tiles<S: Simd, K: Step<S>, const MR: usize, const NV: usize, const RS: usize>(
    simd: S,
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
                    1 => tile::<S, K, MR, 1, RS>(simd, t, row, col),
                    2 => tile::<S, K, MR, 2, RS>(simd, t, row, col),
                    _ => tile::<S, K, MR, NV, RS>(simd, t, row, col),
                }
            }
        }
        col += take * S::LANES;
    }
}
