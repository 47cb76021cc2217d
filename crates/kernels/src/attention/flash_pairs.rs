//! Online softmax over tiles of `bf16` pairs, with AMX or `vdpbf16ps`: Sᵀ = K · Qᵀ, so that a vector holds one key's scores
//! for 16 queries and maxima and sums need no operation across lanes, then Oᵀ += Vᵀ · Pᵀ.
//!
//! As in [`super::flash`], a query takes in the tiles of keys that it sees, aligned to absolute slots, in ascending order,
//! and a tile that it does not see changes nothing. So a query's result does not depend on the other queries.

use std::arch::x86_64::*;
use std::array::from_fn;
use std::f32::consts::LOG2_E;
use std::ops::Range;

use super::gumbel::{self, GumbelNoise};
use super::input::Attention;
use super::kept_weights::{self, ENTRY, KeptWeights};
use super::key_tiles;
use super::query_blocks::QueryBlock;
use super::shape::AttentionShape;
use super::workspace::{BUFFERS, split_off_front};
use crate::disjoint::DisjointMut;
use crate::scratch;
use crate::simd::pair_tiles::{PairTiles, PairUnit as _, SIDE, TILE, interleaved_pairs};
use crate::simd::{Elem, KEYS, Kernel, Simd, store_part};

/// Queries of a block.
const QUERIES: usize = 128;
/// Groups of a block, and one place that stays empty after the last. A block holds one row at least.
const MOST_GROUPS: usize = QUERIES / SIDE + 1;
/// Query heads of a KV head that fit a block.
pub(super) const MOST_HEADS: usize = QUERIES;
/// The maximum before any score.
const LOWEST: f32 = -1e30;
/// The score of a key that is not seen: its 2^(score − maximum) is 0.
const UNSEEN: f32 = -3e30;

impl AttentionShape {
    /// Tiles along a head's vector as pairs of elements.
    pub(super) fn deep(&self) -> usize {
        self.head_dim.div_ceil(2 * SIDE)
    }

    /// Tiles along a head's vector as rows of elements.
    fn high(&self) -> usize {
        self.head_dim.div_ceil(SIDE)
    }

    /// Words of the packed keys and values of one tile of 64 slots.
    pub(super) fn tile_words(&self) -> usize {
        (KEYS / SIDE * self.deep() + KEYS / (2 * SIDE) * self.high()) * TILE
    }
}

/// Rows of a block: some 128 queries, fewer if there would be too few blocks for the threads.
pub(super) fn block_rows(shape: &AttentionShape, rows: usize, threads: usize) -> usize {
    let mut each = (QUERIES / shape.group).max(1);
    while each * shape.group > 2 * SIDE && shape.kv_heads * rows.div_ceil(each) < 3 * threads {
        each = each.div_ceil(2);
    }
    each
}

/// Rounds one tile of stored keys and values of a KV head and packs them as tiles: keys in four rows of 16, values
/// transposed in two of 32.
pub(super) struct PackKeysValues<'a, E, T> {
    pub(super) token: T,
    pub(super) shape: AttentionShape,
    /// The head's keys and values, capacity × head_dim.
    pub(super) k: &'a [E],
    pub(super) v: &'a [E],
    /// At most 64 slots from a multiple of 64 on.
    pub(super) slots: Range<usize>,
    pub(super) out: &'a mut [u32],
}

impl<E: Elem, T: PairTiles> Kernel for PackKeysValues<'_, E, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let PackKeysValues { token, shape, k, v, slots, out } = self;
        let (d, padded, first) = (shape.head_dim, shape.padded, slots.start / KEYS * KEYS);
        let mut scratch = scratch::borrow(&BUFFERS, KEYS * padded + 2 * TILE);
        let mut floats = scratch.as_f32_mut();
        let rows = split_off_front(&mut floats, KEYS * padded);
        let square: &mut [u32] = bytemuck::cast_slice_mut(split_off_front(&mut floats, TILE));
        let (keys_out, values_out) = out.split_at_mut(KEYS / SIDE * shape.deep() * TILE);
        key_tiles::rows(simd, k, d, first, slots.clone(), padded, rows);
        for (t, row) in rows.chunks_exact(padded).enumerate() {
            let strip = &mut keys_out[t / SIDE * shape.deep() * TILE..][..shape.deep() * TILE];
            token.round_row(&row[..d], 1.0, strip, t % SIDE);
        }
        key_tiles::rows(simd, v, d, first, slots, padded, rows);
        for (half, rows) in rows.chunks_exact(2 * SIDE * padded).enumerate() {
            for high in 0..shape.high() {
                for (pair, rows) in rows.chunks_exact(2 * padded).enumerate() {
                    let (even, odd) = (&rows[high * SIDE..][..SIDE], &rows[padded + high * SIDE..][..SIDE]);
                    let words = &mut square[pair * SIDE..][..SIDE];
                    token.round_pairs(even, odd, words);
                }
                let out = &mut values_out[(half * shape.high() + high) * TILE..][..TILE];
                token.transpose(square, out, SIDE);
            }
        }
    }
}

/// Computes a block over all its keys.
pub(super) struct FlashBlockPairs<'a, T> {
    pub(super) token: T,
    pub(super) a: &'a Attention<'a>,
    /// The KV head's packed tiles.
    pub(super) packed: &'a [u32],
    /// Slot of the first of them.
    pub(super) first: usize,
    pub(super) block: QueryBlock,
    /// Values are not read without it.
    pub(super) out: Option<&'a DisjointMut<'a, f32>>,
    pub(super) lse: Option<&'a DisjointMut<'a, f32>>,
    /// The block's attention mass of each packed slot, if it is wanted.
    pub(super) mass: Option<&'a mut [f32]>,
    /// Noise that multiplies the weights whose sums the mass is of.
    pub(super) noise: Option<&'a GumbelNoise<'a>>,
}

/// Sixteen queries.
struct QueryGroup<'a> {
    /// Slots that each sees.
    from: [i32; SIDE],
    to: [i32; SIDE],
    /// Slots that any sees, and those that all see.
    any: Range<usize>,
    all: Range<usize>,
    /// Maxima and sums so far.
    max: [f32; SIDE],
    sum: [f32; SIDE],
    /// Sums of noisy weights so far, and the hashes that their noise begins from.
    noisy_sum: [f32; SIDE],
    noise_keys: [u32; SIDE],
    /// Queries as tiles.
    q: &'a mut [u32],
    /// Weighted values so far, 16 · high × 16.
    o: &'a mut [f32],
}

impl<'a> QueryGroup<'a> {
    /// Queries `queries` of the block, times scale.
    fn new<T: PairTiles>(
        whole: &FlashBlockPairs<T>,
        queries: Range<usize>,
        floats: &mut &'a mut [f32],
    ) -> QueryGroup<'a> {
        let FlashBlockPairs { token, a, block, noise, .. } = whole;
        let (shape, n) = (block.shape, queries.len());
        let o = split_off_front(floats, shape.high() * TILE);
        o.fill(0.0);
        let q: &mut [u32] = bytemuck::cast_slice_mut(split_off_front(floats, shape.deep() * TILE));
        let (mut from, mut to) = ([0; SIDE], [0; SIDE]);
        let mut square = [0u32; TILE];
        // The empty range, and the range of all slots.
        let (mut any, mut all) = (Range { start: usize::MAX, end: 0 }, 0..usize::MAX);
        for (lane, i) in queries.clone().enumerate() {
            let seen = a.visible[block.row(i)];
            (from[lane], to[lane]) = (seen.0 as i32, seen.1 as i32);
            let (start, end) = (seen.0 as usize, seen.1 as usize);
            any = any.start.min(start)..any.end.max(end);
            all = all.start.max(start)..all.end.min(end);
        }
        if n < SIDE {
            all = 0..0;
        }
        for (deep, q) in q.chunks_exact_mut(TILE).enumerate() {
            square.fill(0);
            for (lane, i) in queries.clone().enumerate() {
                let query = &a.q[block.at(i)..][..shape.head_dim];
                let part = &query[deep * 2 * SIDE..query.len().min((deep + 1) * 2 * SIDE)];
                let factor = a.scale * LOG2_E;
                token.round_row(part, factor, &mut square, lane);
            }
            token.transpose(&square, q, SIDE);
        }
        let mut noise_keys = [0; SIDE];
        if let Some((noise, seed)) = noise.and_then(|noise| Some((noise, noise.seed?))) {
            for (key, i) in noise_keys.iter_mut().zip(queries) {
                let row = block.row(i);
                *key = noise.key(seed, block.index(i) - row * shape.heads, row);
            }
        }
        let (max, sum, noisy_sum) = ([LOWEST; SIDE], [0.0; SIDE], [0.0; SIDE]);
        QueryGroup { from, to, any, all, max, sum, noisy_sum, noise_keys, q, o }
    }

    fn sees(&self, first: usize) -> bool {
        self.any.start < first + KEYS && first < self.any.end
    }

    /// Turns scores (64 × 16) of the keys from slot `first` on into probabilities relative to the new maxima, as pairs of
    /// keys, and rescales the sums so far to them.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    fn softmax_tile(&mut self, s: &mut [f32], first: usize, p: &mut [u32]) {
        assert!(s.len() >= KEYS * SIDE && p.len() >= KEYS / 2 * SIDE);
        let s = s.as_mut_ptr();
        // SAFETY: there are 64 × 16 scores and half as many words; arrays have 16 elements.
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
            let old = _mm512_loadu_ps(self.max.as_ptr());
            let mut max = [old; 4];
            for t in (0..KEYS).step_by(4) {
                for (i, max) in max.iter_mut().enumerate() {
                    *max = _mm512_max_ps(*max, _mm512_loadu_ps(s.add((t + i) * SIDE)));
                }
            }
            let max = _mm512_max_ps(_mm512_max_ps(max[0], max[1]), _mm512_max_ps(max[2], max[3]));
            let change = exp2(_mm512_sub_ps(old, max));
            let mut sums = [_mm512_mul_ps(_mm512_loadu_ps(self.sum.as_ptr()), change), _mm512_setzero_ps()];
            for t in (0..KEYS).step_by(2) {
                let even = exp2(_mm512_sub_ps(_mm512_loadu_ps(s.add(t * SIDE)), max));
                let odd = exp2(_mm512_sub_ps(_mm512_loadu_ps(s.add((t + 1) * SIDE)), max));
                sums[0] = _mm512_add_ps(sums[0], even);
                sums[1] = _mm512_add_ps(sums[1], odd);
                let words = interleaved_pairs(even, odd);
                _mm512_storeu_si512(p.as_mut_ptr().add(t / 2 * SIDE).cast(), words);
            }
            _mm512_storeu_ps(self.sum.as_mut_ptr(), _mm512_add_ps(sums[0], sums[1]));
            _mm512_storeu_ps(self.max.as_mut_ptr(), max);
            if _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(old, max) != 0 {
                for o in self.o.chunks_exact_mut(SIDE) {
                    _mm512_storeu_ps(o.as_mut_ptr(), _mm512_mul_ps(_mm512_loadu_ps(o.as_ptr()), change));
                }
            }
        }
    }

    /// Multiplies the weights of a tile of keys from slot `first` on by their noise. `before` are the maxima that sums are relative to,
    /// `scratch` four tiles.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    fn add_noise<T: PairTiles>(
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
            let (sum, before) = (_mm512_loadu_ps(self.noisy_sum.as_ptr()), _mm512_loadu_ps(before.as_ptr()));
            let change = exp2(_mm512_sub_ps(before, _mm512_loadu_ps(self.max.as_ptr())));
            _mm512_storeu_ps(self.noisy_sum.as_mut_ptr(), _mm512_mul_ps(sum, change));
        }
        kept_weights::multiply(pairs, noise, &mut self.noisy_sum);
    }

    /// The factor of each query's weights that are relative to the maxima `max` and have the sums `sum`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    fn factors(&self, max: &[f32], sum: &[f32; SIDE]) -> [f32; SIDE] {
        let mut factors = [0.0; SIDE];
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

    /// Writes the normalised queries `queries` of the block.
    #[inline(always)]
    fn finish<S: Simd, T: PairTiles>(&self, simd: S, whole: &FlashBlockPairs<T>, queries: Range<usize>) {
        let FlashBlockPairs { token, block, out, lse, .. } = whole;
        let d = block.shape.head_dim;
        for (lane, i) in queries.clone().enumerate() {
            let Some(lse) = lse else { break };
            // SAFETY: the queries of a block belong to one task.
            let lse = unsafe { lse.part(block.index(i)..block.index(i) + 1) };
            lse[0] = (self.max[lane] + self.sum[lane].log2()) / LOG2_E;
        }
        let Some(out) = out else { return };
        let mut square = [0u32; TILE];
        for (high, o) in self.o.chunks_exact(TILE).enumerate() {
            token.transpose(bytemuck::cast_slice(o), &mut square, SIDE);
            for (lane, i) in queries.clone().enumerate() {
                let at = block.at(i) + high * SIDE;
                let n = SIDE.min(d - high * SIDE);
                // SAFETY: the queries of a block belong to one task; a row of the square has 16 floats.
                unsafe {
                    let to = out.part(at..at + n);
                    let scale = simd.splat(1.0 / self.sum[lane]);
                    for e in (0..n).step_by(S::LANES) {
                        let v = simd.load(square.as_ptr().add(lane * SIDE + e).cast());
                        store_part(simd, to.as_mut_ptr().add(e), simd.mul(v, scale), n - e);
                    }
                }
            }
        }
    }
}

/// 2^x for x <= 0, relative error 3e-6.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn exp2(x: __m512) -> __m512 {
    const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    let n = _mm512_roundscale_ps::<NEAREST>(x);
    let f = _mm512_sub_ps(x, n);
    let mut p = _mm512_set1_ps(0.009_582_845_5);
    for c in [0.055_906_433, 0.240_240_99, 0.693_124_2, 1.0] {
        p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
    }
    _mm512_scalef_ps(p, n)
}

impl<T: PairTiles> Kernel for FlashBlockPairs<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (shape, n) = (self.block.shape, self.block.queries());
        let count = n.div_ceil(SIDE);
        let span = self.block.span(self.a.visible, 0..n);
        let tiles = (span.start / KEYS..span.end.div_ceil(KEYS)).len();
        // Without mass, one entry is overwritten again and again.
        let entries = if self.mass.is_some() { tiles * count } else { 1 };
        let noise_words = if self.noise.is_some() { 4 * TILE } else { 0 };
        let words =
            2 * KEYS * SIDE + noise_words + entries * ENTRY + count * (shape.high() + shape.deep()) * TILE;
        let mut scratch = scratch::borrow(&BUFFERS, words);
        let mut floats = scratch.as_f32_mut();
        let s = [split_off_front(&mut floats, KEYS * SIDE), split_off_front(&mut floats, KEYS * SIDE)];
        let entries = bytemuck::cast_slice_mut(split_off_front(&mut floats, entries * ENTRY));
        let noise_tiles: &mut [u32] = bytemuck::cast_slice_mut(split_off_front(&mut floats, noise_words));
        let mut kept = KeptWeights::new(entries);
        let queries = |g: usize| g * SIDE..((g + 1) * SIDE).min(n);
        let mut groups: [Option<QueryGroup>; MOST_GROUPS] =
            from_fn(|g| (g < count).then(|| QueryGroup::new(&self, queries(g), &mut floats)));
        let unit = self.token.unit();
        let (deep, high) = (shape.deep(), shape.high());
        let tile = |first: usize| &self.packed[(first - self.first) / KEYS * shape.tile_words()..];
        let last = span.end.div_ceil(KEYS) * KEYS;
        // The next pair of a tile and a group that sees some of its slots. AMX computes its scores while the softmax of the pair
        // before is computed.
        let next = |groups: &[Option<QueryGroup>], mut first: usize, mut g: usize| {
            while first < last {
                match &groups[g] {
                    None => (first, g) = (first + KEYS, 0),
                    Some(group) if group.sees(first) => return Some((first, g)),
                    Some(_) => g += 1,
                }
            }
            None
        };
        let scores = |group: &Option<QueryGroup>, first: usize, s: &mut [f32]| {
            let Some(group) = group else { return };
            let k = &tile(first)[..KEYS / SIDE * deep * TILE];
            // SAFETY: keys, queries and scores are as long as the tiles.
            unsafe { unit.scores(k.as_ptr(), group.q.as_ptr(), deep, s[..KEYS * SIDE].as_mut_ptr()) };
        };
        let mut now = next(&groups, span.start / KEYS * KEYS, 0);
        if let Some((first, g)) = now {
            scores(&groups[g], first, s[0]);
        }
        let mut turn = 0;
        while let Some((first, g)) = now {
            now = next(&groups, first, g + 1);
            if let Some((first, g)) = now {
                scores(&groups[g], first, s[1 - turn]);
            }
            let Some(group) = &mut groups[g] else { break };
            let v = &tile(first)[KEYS / SIDE * deep * TILE..][..2 * high * TILE];
            let (p, before) = (kept.pairs(), group.max);
            // SAFETY: the token proves AVX-512 and BF16; values, probabilities and sums are as long as the tiles.
            unsafe {
                group.softmax_tile(s[turn], first, p);
                if self.out.is_some() {
                    unit.values(v.as_ptr(), p.as_ptr(), high, group.o[..high * TILE].as_mut_ptr());
                }
                if self.noise.is_some() {
                    group.add_noise(self.token, &before, first, p, noise_tiles);
                }
            }
            if self.mass.is_some() {
                kept.push(&group.max);
            }
            turn = 1 - turn;
        }
        drop(unit);
        for (g, group) in groups.iter().flatten().enumerate() {
            group.finish(simd, &self, queries(g));
        }
        let Some(mass) = self.mass else { return };
        mass.fill(0.0);
        let mut entries = kept.entries();
        for first in (span.start / KEYS * KEYS..last).step_by(KEYS) {
            let seeing = groups.iter().flatten().filter(|group| group.sees(first));
            let (mut of_tile, mut seen) = ([(&[][..], [0.0; SIDE]); MOST_GROUPS], 0);
            for (to, (group, entry)) in of_tile.iter_mut().zip(seeing.zip(&mut entries)) {
                let sum = if self.noise.is_some() { &group.noisy_sum } else { &group.sum };
                // SAFETY: the token proves AVX-512.
                *to = (entry, unsafe { group.factors(kept_weights::maxima(entry), sum) });
                seen += 1;
            }
            // SAFETY: as above.
            unsafe { kept_weights::add_by_key(&of_tile[..seen], &mut mass[first - self.first..]) };
        }
    }
}
