//! Sixteen queries of a block over tiles of pairs: the softmax of their scores, and their sums.
//!
//! A query takes in the tiles of keys that it sees, aligned to absolute slots, in ascending order, and a tile that it does not see
//! changes nothing. So its result does not depend on the other queries.

use std::arch::x86_64::*;
use std::f32::consts::LOG2_E;
use std::ops::Range;

use super::gumbel::{self, GumbelNoise};
use super::input::Attention;
use super::kept_weights;
use super::query_blocks::QueryBlock;
use super::workspace::split_off_front;
use crate::disjoint::DisjointMut;
use crate::simd::pair_tiles::{PairTiles, PairUnit, SIDE, Scores, TILE, Values};
use crate::simd::tile_weights::{OCTAVE, TileWeights};
use crate::simd::whole_tiles::pack_columns;
use crate::simd::{KEYS, Simd, store_part};

/// Queries of a block.
pub(super) const QUERIES: usize = 128;
/// Groups of a block, and one place that stays empty after the last. A block holds one row at least.
pub(super) const MOST_GROUPS: usize = QUERIES / SIDE + 1;
/// The maximum before any score.
const LOWEST: f32 = -1e30;
/// How much higher than the number that weights are relative to a score may be: its weight is 2⁸ at most.
const SLACK: f32 = 8.0 * OCTAVE;
/// The score of a key that is not seen: its 2^(score − maximum) is 0.
const UNSEEN: f32 = -3e30;

/// Groups of a block, in order.
pub(super) type Groups<'a> = [Option<QueryGroup<'a>>; MOST_GROUPS];

/// Sixteen queries.
pub(super) struct QueryGroup<'a> {
    /// Slots that each sees.
    from: [i32; SIDE],
    to: [i32; SIDE],
    /// Slots that any sees, and those that all see.
    any: Range<usize>,
    all: Range<usize>,
    pub(super) stats: GroupStats,
    /// The hashes that the noise begins from.
    noise_keys: [u32; SIDE],
    /// Queries as tiles.
    pub(super) q: &'a mut [u32],
    /// Weighted values so far, 16 · high × 16.
    pub(super) o: &'a mut [f32],
}

/// Maxima and sums of the scores of sixteen queries. Scores are in units of 1 / [`OCTAVE`] of a power of two.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct GroupStats {
    /// The highest score, or one that is lower by [`SLACK`] at most.
    pub(super) max: [f32; SIDE],
    /// Σ 2^((score − max) / 256), of weights as they are rounded.
    pub(super) sum: [f32; SIDE],
    /// Σ 2^((score − max) / 256) · noise.
    pub(super) noisy_sum: [f32; SIDE],
}

impl GroupStats {
    /// Before any score.
    pub(super) const NONE: GroupStats =
        GroupStats { max: [LOWEST; SIDE], sum: [0.0; SIDE], noisy_sum: [0.0; SIDE] };

    /// The factor of each query's weights that are relative to the maxima `max`, once all scores are known. `noisy` weights have noise.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    pub(super) fn factors(&self, max: &[f32], noisy: bool) -> [f32; SIDE] {
        let (sum, mut factors) = (if noisy { &self.noisy_sum } else { &self.sum }, [0.0; SIDE]);
        // SAFETY: there are 16 of each.
        unsafe {
            let sum = _mm512_loadu_ps(sum.as_ptr());
            let seeing = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(sum, _mm512_setzero_ps());
            let change =
                _mm512_sub_ps(_mm512_loadu_ps(max[..SIDE].as_ptr()), _mm512_loadu_ps(self.max.as_ptr()));
            _mm512_storeu_ps(factors.as_mut_ptr(), _mm512_maskz_div_ps(seeing, exp2(change), sum));
        }
        factors
    }
}

/// Slots that any of the queries `queries` of the block sees, and those that all see.
pub(super) fn seen_by(a: &Attention, block: &QueryBlock, queries: Range<usize>) -> [Range<usize>; 2] {
    // The empty range, and the range of all slots.
    let (mut any, mut all) = (Range { start: usize::MAX, end: 0 }, 0..usize::MAX);
    for i in queries {
        let seen = a.visible[block.row(i)];
        let (start, end) = (seen.0 as usize, seen.1 as usize);
        any = any.start.min(start)..any.end.max(end);
        all = all.start.max(start)..all.end.min(end);
    }
    [any, all]
}

/// Whether a tile from slot `first` on has some of the slots.
pub(super) fn overlaps(slots: &Range<usize>, first: usize) -> bool {
    slots.start < first + KEYS && first < slots.end
}

/// Queries of group `g` of a block.
pub(super) fn group_queries(block: &QueryBlock, g: usize) -> Range<usize> {
    g * SIDE..((g + 1) * SIDE).min(block.queries())
}

impl<'a> QueryGroup<'a> {
    /// Group `g` of a block, its queries times scale.
    pub(super) fn new<T: PairTiles>(
        token: T,
        (a, noise): (&Attention, Option<&GumbelNoise>),
        block: &QueryBlock,
        g: usize,
        floats: &mut &'a mut [f32],
    ) -> QueryGroup<'a> {
        let (shape, queries) = (block.shape, group_queries(block, g));
        let o = split_off_front(floats, shape.high() * TILE);
        o.fill(0.0);
        let q: &mut [u32] = bytemuck::cast_slice_mut(split_off_front(floats, shape.deep() * TILE));
        let (mut from, mut to) = ([0; SIDE], [0; SIDE]);
        for (lane, i) in queries.clone().enumerate() {
            let seen = a.visible[block.row(i)];
            (from[lane], to[lane]) = (seen.0 as i32, seen.1 as i32);
        }
        let [any, mut all] = seen_by(a, block, queries.clone());
        if queries.len() < SIDE {
            all = 0..0;
        }
        let factor = a.scale * LOG2_E * OCTAVE;
        if queries.len() == SIDE && shape.head_dim.is_multiple_of(2 * SIDE) {
            let mut rows = [&[][..]; SIDE];
            for (row, i) in rows.iter_mut().zip(queries.clone()) {
                *row = &a.q[block.at(i)..][..shape.head_dim];
            }
            pack_columns(token, rows, factor, q);
        } else {
            let mut square = [0u32; TILE];
            for (deep, q) in q.chunks_exact_mut(TILE).enumerate() {
                square.fill(0);
                for (lane, i) in queries.clone().enumerate() {
                    let query = &a.q[block.at(i)..][..shape.head_dim];
                    let part = &query[deep * 2 * SIDE..query.len().min((deep + 1) * 2 * SIDE)];
                    token.round_row(part, factor, &mut square, lane);
                }
                token.transpose(&square, q, SIDE);
            }
        }
        let noise_keys = noise.and_then(|noise| noise.keys(block, queries)).unwrap_or_default();
        QueryGroup { from, to, any, all, stats: GroupStats::NONE, noise_keys, q, o }
    }

    pub(super) fn sees(&self, first: usize) -> bool {
        overlaps(&self.any, first)
    }

    /// The keys of the tile from slot `first` on that come before the end of what some query sees.
    pub(super) fn keys(&self, first: usize) -> usize {
        (self.any.end - first).min(KEYS)
    }

    /// Turns scores (64 × 16) of the keys from slot `first` on into probabilities relative to the new maxima, as pairs of
    /// keys, and rescales the sums so far to them. The scores `next` are computed beside that, and the values `before`: by then the
    /// probabilities that were written last can be read as tiles without waiting for them.
    ///
    /// # Safety
    /// The pointers of `next` and `before` must be valid for [`PairUnit::scores`] and [`PairUnit::values`], the scores others than `s` and
    /// the probabilities others than `p`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
    pub(super) unsafe fn softmax_tile<U: PairUnit>(
        &mut self,
        (unit, next, before): (&U, Option<Scores>, Option<Values>),
        s: &mut [f32],
        first: usize,
        p: &mut [u32],
    ) {
        assert!(s.len() >= KEYS * SIDE && p.len() >= KEYS / 2 * SIDE);
        let (s, p) = (s.as_mut_ptr(), p.as_mut_ptr());
        // SAFETY: there are 64 × 16 scores and half as many words; arrays have 16 elements; the caller's.
        unsafe {
            if self.all.start > first || self.all.end < first + KEYS {
                let from = _mm512_loadu_si512(self.from.as_ptr().cast());
                let to = _mm512_loadu_si512(self.to.as_ptr().cast());
                for t in 0..KEYS {
                    let key = _mm512_set1_epi32((first + t) as i32);
                    let seen = _mm512_cmple_epi32_mask(from, key) & _mm512_cmplt_epi32_mask(key, to);
                    let v = _mm512_loadu_ps(s.add(t * SIDE));
                    _mm512_storeu_ps(s.add(t * SIDE), _mm512_mask_mov_ps(_mm512_set1_ps(UNSEEN), seen, v));
                }
            }
            let old = _mm512_loadu_ps(self.stats.max.as_ptr());
            let mut max = [old; 4];
            for t in (0..KEYS).step_by(4) {
                for (i, max) in max.iter_mut().enumerate() {
                    *max = _mm512_max_ps(*max, _mm512_loadu_ps(s.add((t + i) * SIDE)));
                }
            }
            let max = _mm512_max_ps(_mm512_max_ps(max[0], max[1]), _mm512_max_ps(max[2], max[3]));
            // Most tiles leave all as it is, and sums need not be scaled.
            let raised = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(_mm512_sub_ps(max, old), _mm512_set1_ps(SLACK));
            let max = _mm512_mask_mov_ps(old, raised, max);
            let change = if raised == 0 { _mm512_set1_ps(1.0) } else { exp2(_mm512_sub_ps(old, max)) };
            let sum = _mm512_mul_ps(_mm512_loadu_ps(self.stats.sum.as_ptr()), change);
            let mut weights = TileWeights::new((s, p), max, sum, before.is_some());
            if let Some(next) = next {
                unit.scores(next, &mut weights);
            }
            if let Some(before) = before {
                unit.values(before, &mut weights);
            }
            _mm512_storeu_ps(self.stats.sum.as_mut_ptr(), weights.finish());
            _mm512_storeu_ps(self.stats.max.as_mut_ptr(), max);
            if raised != 0 {
                for o in self.o.chunks_exact_mut(SIDE) {
                    _mm512_storeu_ps(o.as_mut_ptr(), _mm512_mul_ps(_mm512_loadu_ps(o.as_ptr()), change));
                }
            }
        }
    }

    /// Multiplies the weights of a tile of keys from slot `first` on by their noise. `before` are the maxima that sums are relative to,
    /// `scratch` four tiles.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    pub(super) fn add_noise<T: PairTiles>(
        &mut self,
        token: T,
        before: &[f32; SIDE],
        first: usize,
        pairs: &mut [u32],
        scratch: &mut [u32],
    ) {
        // Pairs of entries of 16 queries one below the other, and side by side.
        let (square, noise) = scratch.split_at_mut(2 * TILE);
        let starts = self.noise_keys.map(|key| gumbel::entry(key, first as u32));
        for (lane, start) in starts.into_iter().enumerate() {
            let halves = gumbel::tile(start).chunks_exact(KEYS / 2);
            for (square, entries) in square.chunks_exact_mut(TILE).zip(halves) {
                bytemuck::cast_slice_mut(&mut square[lane * SIDE..][..SIDE]).copy_from_slice(entries);
            }
        }
        for (square, noise) in square.chunks_exact(TILE).zip(noise.chunks_exact_mut(TILE)) {
            token.transpose(square, noise, SIDE);
        }
        // SAFETY: there are 16 of each.
        unsafe {
            let (sum, before) =
                (_mm512_loadu_ps(self.stats.noisy_sum.as_ptr()), _mm512_loadu_ps(before.as_ptr()));
            let change = exp2(_mm512_sub_ps(before, _mm512_loadu_ps(self.stats.max.as_ptr())));
            _mm512_storeu_ps(self.stats.noisy_sum.as_mut_ptr(), _mm512_mul_ps(sum, change));
        }
        kept_weights::multiply(pairs, noise, &mut self.stats.noisy_sum);
    }
}

/// Writes the normalised queries `queries` of the block. `o` are their weighted values, 16 · high × 16.
#[inline(always)]
pub(super) fn finish<S: Simd, T: PairTiles>(
    (simd, token): (S, T),
    block: &QueryBlock,
    queries: Range<usize>,
    (stats, o): (&GroupStats, &[f32]),
    (out, lse): (Option<&DisjointMut<f32>>, Option<&DisjointMut<f32>>),
) {
    let d = block.shape.head_dim;
    for (lane, i) in queries.clone().enumerate() {
        let Some(lse) = lse else { break };
        // SAFETY: the queries of a block belong to one task.
        let lse = unsafe { lse.part(block.index(i)..block.index(i) + 1) };
        lse[0] = (stats.max[lane] / OCTAVE + stats.sum[lane].log2()) / LOG2_E;
    }
    let Some(out) = out else { return };
    let mut square = [0u32; TILE];
    for (high, o) in o.chunks_exact(TILE).enumerate() {
        token.transpose(bytemuck::cast_slice(o), &mut square, SIDE);
        for (lane, i) in queries.clone().enumerate() {
            let at = block.at(i) + high * SIDE;
            let n = SIDE.min(d - high * SIDE);
            // SAFETY: the queries of a block belong to one task; a row of the square has 16 floats.
            unsafe {
                let to = out.part(at..at + n);
                let scale = simd.splat(1.0 / stats.sum[lane]);
                for e in (0..n).step_by(S::LANES) {
                    let v = simd.load(square.as_ptr().add(lane * SIDE + e).cast());
                    store_part(simd, to.as_mut_ptr().add(e), simd.mul(v, scale), n - e);
                }
            }
        }
    }
}

/// 2^(x / 256) for x <= 0, relative error 3e-6.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn exp2(x: __m512) -> __m512 {
    const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    let x = _mm512_mul_ps(x, _mm512_set1_ps(1.0 / OCTAVE));
    let n = _mm512_roundscale_ps::<NEAREST>(x);
    let f = _mm512_sub_ps(x, n);
    let mut p = _mm512_set1_ps(0.009_582_845_5);
    for c in [0.055_906_433, 0.240_240_99, 0.693_124_2, 1.0] {
        p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
    }
    _mm512_scalef_ps(p, n)
}
