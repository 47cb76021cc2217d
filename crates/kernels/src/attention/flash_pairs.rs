//! Online softmax over tiles of `bf16` pairs, with AMX or `vdpbf16ps`: Sᵀ = K · Qᵀ, so that a vector holds one key's scores
//! for 16 queries and maxima and sums need no operation across lanes, then Oᵀ += Vᵀ · Pᵀ.
//!
//! Shape: 64 keys × 16 queries, some 128 queries of a KV head for each tile of keys. Bound: `vdpbf16ps`, of which a Zen 4 begins one a cycle.
//! Measured on two of its cores, 4,096 rows over their 4,096 keys, with softmax in `f32`: 78 to 80 % of the bound with heads of 64, 83 to 85 %
//! with heads of 128. The softmax of a tile is computed between the products of the next, which leaves its multiplications to be paid for.
//!
//! With AMX the bound is a product of tiles in 16 cycles, 256 for 64 keys and 16 queries with heads of 64. 120 more go to stores of tiles,
//! beside which a core begins nothing else, 60 to maxima, and a product whose operands are loaded takes 18 to 20; queries and results come from and go to
//! memory. Values of a tile wait for the softmax of the next, since weights that were just written are read as a tile only once they are in the cache.
//!
//! As in [`super::flash`], a query takes in the tiles of keys that it sees, aligned to absolute slots, in ascending order,
//! and a tile that it does not see changes nothing. So a query's result does not depend on the other queries.

use std::array::from_fn;
use std::ops::Range;

use super::decode_part::AHEAD;
use super::gumbel::GumbelNoise;
use super::input::Attention;
use super::kept_weights::{self, ENTRY, KeptWeights};
use super::query_blocks::QueryBlock;
use super::query_groups::{GroupStats, Groups, MOST_GROUPS, QUERIES, QueryGroup, finish, group_queries};
use super::shape::AttentionShape;
use super::workspace::{BUFFERS, split_off_front};
use crate::disjoint::DisjointMut;
use crate::prefetch;
use crate::scratch;
use crate::simd::pair_tiles::{PairTiles, PairUnit as _, SIDE, Scores, TILE, Values};
use crate::simd::tile_weights::TileWeights;
use crate::simd::whole_tiles::pack_whole_tiles;
use crate::simd::{Elem, KEYS, Kernel, Simd};

/// Query heads of a KV head that fit a block.
pub(super) const MOST_HEADS: usize = QUERIES;

impl AttentionShape {
    /// Tiles along a head's vector as pairs of elements.
    pub(super) fn deep(&self) -> usize {
        self.head_dim.div_ceil(2 * SIDE)
    }

    /// Tiles along a head's vector as rows of elements.
    pub(super) fn high(&self) -> usize {
        self.head_dim.div_ceil(SIDE)
    }

    /// Words of the packed keys and values of one tile of 64 slots.
    pub(super) fn tile_words(&self) -> usize {
        (KEYS / SIDE * self.deep() + KEYS / (2 * SIDE) * self.high()) * TILE
    }
}

/// The most rows of a block. Their queries fill groups of sixteen, if so many fit.
pub(super) fn most_rows(shape: &AttentionShape) -> usize {
    let (most, unit) = ((QUERIES / shape.group).max(1), shape.whole_rows(SIDE));
    if unit <= most { most / unit * unit } else { most }
}

/// Rows of a block: some 128 queries, fewer if there would be too few blocks for the threads.
pub(super) fn block_rows(shape: &AttentionShape, rows: usize, threads: usize) -> usize {
    let mut each = most_rows(shape);
    while each * shape.group > 2 * SIDE && shape.kv_heads * rows.div_ceil(each) < 3 * threads {
        each = each.div_ceil(2);
    }
    each
}

/// Rounds one tile of stored keys and values of a KV head and packs them as tiles: keys in four rows of 16, pairs of values in two of
/// 32, as the token's products take them.
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

impl<'a, E: Elem, T: PairTiles> Kernel for PackKeysValues<'a, E, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let PackKeysValues { token, shape, k, v, slots, out } = self;
        let (d, first) = (shape.head_dim, slots.start / KEYS * KEYS);
        let (keys_out, values_out) = out.split_at_mut(KEYS / SIDE * shape.deep() * TILE);
        if slots.len() == KEYS && d.is_multiple_of(2 * SIDE) {
            let of = |rows: &'a [E]| &rows[slots.start * d..slots.end * d];
            return pack_whole_tiles(token, [of(k), of(v)], d, AHEAD, [keys_out, values_out]);
        }
        if slots.len() < KEYS {
            keys_out.fill(0);
        }
        // A thread's next tile is this one's neighbour.
        let ahead = |row: &[E]| {
            prefetch::to_read_later(row.as_ptr().wrapping_byte_add(AHEAD).cast(), size_of_val(row));
        };
        for slot in slots.clone() {
            let (key, t) = (&k[slot * d..][..d], slot - first);
            ahead(key);
            let strip = &mut keys_out[t / SIDE * shape.deep() * TILE..][..shape.deep() * TILE];
            token.round_row(key, 1.0, strip, t % SIDE);
        }
        // A slot that is not among them has no elements, which count as zeros.
        let value = |slot: usize| if slots.contains(&slot) { &v[slot * d..][..d] } else { &[] };
        let mut square = [0; TILE];
        for (half, out) in values_out.chunks_exact_mut(shape.high() * TILE).enumerate() {
            for (high, out) in out.chunks_exact_mut(TILE).enumerate() {
                let words = if T::ELEMENTS_FIRST { &mut square[..] } else { &mut out[..] };
                for (pair, words) in words.chunks_exact_mut(SIDE).enumerate() {
                    let even = first + half * 2 * SIDE + 2 * pair;
                    let [even, odd] = [even, even + 1].map(value);
                    if high == 0 {
                        ahead(even);
                        ahead(odd);
                    }
                    let [even, odd] = [even, odd].map(|row| &row[(high * SIDE).min(row.len())..]);
                    token.round_pairs(even, odd, words);
                }
                if T::ELEMENTS_FIRST {
                    token.transpose(&square, out, SIDE);
                }
            }
        }
    }
}

/// A block's way over packed keys and values.
pub(super) struct Sweep<'a, T> {
    pub(super) token: T,
    pub(super) a: &'a Attention<'a>,
    /// Packed tiles of the KV head.
    pub(super) packed: &'a [u32],
    /// Slots that they hold, from a multiple of 64 on.
    pub(super) slots: Range<usize>,
    pub(super) block: QueryBlock,
    /// Whether values are summed; otherwise they are not read.
    pub(super) values: bool,
    /// Whether the weights are kept.
    pub(super) keep: bool,
    /// Noise that multiplies the weights that are kept.
    pub(super) noise: Option<&'a GumbelNoise<'a>>,
}

/// Computes a block over all its keys.
pub(super) struct FlashBlockPairs<'a, T> {
    pub(super) sweep: Sweep<'a, T>,
    pub(super) out: Option<&'a DisjointMut<'a, f32>>,
    pub(super) lse: Option<&'a DisjointMut<'a, f32>>,
    /// The block's attention mass of each packed slot, if it is wanted.
    pub(super) mass: Option<&'a mut [f32]>,
}

impl<T: PairTiles> Sweep<'_, T> {
    /// Slots that some query sees, and that are packed. Where none are both, the span is empty and lies among those that are packed, or at their end.
    pub(super) fn span(&self) -> Range<usize> {
        let seen = self.block.span(self.a.visible, 0..self.block.queries());
        let start = seen.start.clamp(self.slots.start, self.slots.end);
        start..seen.end.min(self.slots.end).max(start)
    }

    /// First slots of the tiles that hold them.
    pub(super) fn tiles(&self) -> impl ExactSizeIterator<Item = usize> + use<T> {
        let span = self.span();
        (span.start / KEYS..span.end.div_ceil(KEYS)).map(|tile| tile * KEYS)
    }

    /// Groups of sixteen queries.
    pub(super) fn groups(&self) -> usize {
        self.block.queries().div_ceil(SIDE)
    }

    /// Words of all weights that may be kept.
    pub(super) fn kept_words(&self) -> usize {
        if self.keep { self.tiles().len() * self.groups() * ENTRY } else { 0 }
    }

    fn noise_words(&self) -> usize {
        if self.noise.is_some() { 4 * TILE } else { 0 }
    }

    /// Floats of scratch.
    pub(super) fn floats(&self) -> usize {
        let shape = &self.block.shape;
        3 * KEYS * SIDE + self.noise_words() + self.groups() * (shape.high() + shape.deep()) * TILE
    }

    /// The groups' statistics and sums. A group that sees none of the slots has none.
    #[inline(always)]
    pub(super) fn run<'f>(&self, floats: &mut &'f mut [f32], kept: &mut KeptWeights) -> Groups<'f> {
        let (shape, count) = (self.block.shape, self.groups());
        let s = [split_off_front(floats, KEYS * SIDE), split_off_front(floats, KEYS * SIDE)];
        let pairs: &mut [u32] = bytemuck::cast_slice_mut(split_off_front(floats, KEYS * SIDE));
        let noise_tiles: &mut [u32] = bytemuck::cast_slice_mut(split_off_front(floats, self.noise_words()));
        // Queries of one KV head lie apart, and are many lines before the first of them is there.
        for i in 0..self.block.queries() {
            let query = &self.a.q[self.block.at(i)..][..shape.head_dim];
            prefetch::to_read(query.as_ptr().cast(), size_of_val(query));
        }
        let mut groups: Groups<'f> = from_fn(|g| {
            (g < count).then(|| QueryGroup::new(self.token, (self.a, self.noise), &self.block, g, floats))
        });
        let unit = self.token.unit();
        let (deep, high) = (shape.deep(), shape.high());
        let tile = |first: usize| &self.packed[(first - self.slots.start) / KEYS * shape.tile_words()..];
        let span = self.span();
        let last = span.end.div_ceil(KEYS) * KEYS;
        // The next pair of a tile and a group that sees some of its slots. Its scores are computed beside the softmax of the pair before.
        let next = |groups: &Groups, mut first: usize, mut g: usize| {
            while first < last {
                match &groups[g] {
                    None => (first, g) = (first + KEYS, 0),
                    Some(group) if group.sees(first) => return Some((first, g)),
                    Some(_) => g += 1,
                }
            }
            None
        };
        let scores = |groups: &Groups, (first, g): (usize, usize), s: &mut [f32]| {
            let group = groups[g].as_ref()?;
            let k = tile(first)[..KEYS / SIDE * deep * TILE].as_ptr();
            let strips = group.keys(first).div_ceil(SIDE);
            let s = s[..KEYS * SIDE].as_mut_ptr();
            Some(Scores { k, q: group.q.as_ptr(), blocks: deep, strips, s })
        };
        let mut now = next(&groups, span.start / KEYS * KEYS, 0);
        if let Some(scores) = now.and_then(|now| scores(&groups, now, s[0])) {
            // SAFETY: keys, queries and scores are as long as the tiles.
            unsafe { unit.scores(scores, &mut TileWeights::none()) };
        }
        let (mut turn, mut before) = (0, None);
        while let Some((first, g)) = now {
            now = next(&groups, first, g + 1);
            let beside = now.and_then(|now| scores(&groups, now, s[1 - turn]));
            let Some(group) = &mut groups[g] else { break };
            let v = &tile(first)[KEYS / SIDE * deep * TILE..][..2 * high * TILE];
            let halves = group.keys(first).div_ceil(2 * SIDE);
            let p = if self.keep { kept.pairs() } else { &mut pairs[turn * KEYS / 2 * SIDE..] };
            let max = group.stats.max;
            // SAFETY: the token proves AVX-512 and BF16; keys, queries, values, probabilities and sums are as long as the tiles.
            unsafe {
                group.softmax_tile((&unit, beside, before.take()), s[turn], first, p);
                let o = group.o[..high * TILE].as_mut_ptr();
                before =
                    self.values.then_some(Values { v: v.as_ptr(), p: p.as_ptr(), blocks: high, halves, o });
                if self.noise.is_some() {
                    // Values have no noise.
                    if let Some(values) = before.take() {
                        unit.values(values, &mut TileWeights::none());
                    }
                    group.add_noise(self.token, &max, first, p, noise_tiles);
                }
            }
            if self.keep {
                kept.push(&group.stats.max);
            }
            turn = 1 - turn;
        }
        // SAFETY: as above.
        if let Some(values) = before {
            unsafe { unit.values(values, &mut TileWeights::none()) };
        }
        groups
    }
}

/// Adds the weights of the tile from slot `first` on to the sums of its 64 keys. `groups` are the statistics of the groups that see it,
/// over all keys, and `entries` the kept weights of these groups.
pub(super) fn add_mass<'a>(
    groups: impl Iterator<Item = &'a GroupStats>,
    entries: &mut impl Iterator<Item = &'a [u32]>,
    noisy: bool,
    sums: &mut [f32],
) {
    let (mut of_tile, mut seen) = ([(&[][..], [0.0; SIDE]); MOST_GROUPS], 0);
    for (to, (stats, entry)) in of_tile.iter_mut().zip(groups.zip(entries)) {
        // SAFETY: a token that proves AVX-512 has computed the weights.
        *to = (entry, unsafe { stats.factors(kept_weights::maxima(entry), noisy) });
        seen += 1;
    }
    // SAFETY: as above.
    unsafe { kept_weights::add_by_key(&of_tile[..seen], sums) };
}

impl<T: PairTiles> Kernel for FlashBlockPairs<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let FlashBlockPairs { sweep, out, lse, mass } = self;
        let kept_words = sweep.kept_words();
        let mut scratch = scratch::borrow(&BUFFERS, sweep.floats() + kept_words);
        let mut floats = scratch.as_f32_mut();
        let entries = bytemuck::cast_slice_mut(split_off_front(&mut floats, kept_words));
        let mut kept = KeptWeights::new(entries);
        let groups = sweep.run(&mut floats, &mut kept);
        if let Some(out) = out {
            for i in 0..sweep.block.queries() {
                let bytes = sweep.block.shape.head_dim * size_of::<f32>();
                prefetch::to_write(out.as_mut_ptr(sweep.block.at(i)..sweep.block.at(i) + 1).cast(), bytes);
            }
        }
        for (g, group) in groups.iter().flatten().enumerate() {
            let queries = group_queries(&sweep.block, g);
            finish((simd, sweep.token), &sweep.block, queries, (&group.stats, group.o), (out, lse));
        }
        let Some(mass) = mass else { return };
        mass.fill(0.0);
        let mut entries = kept.entries();
        for first in sweep.tiles() {
            let seeing = groups.iter().flatten().filter(|group| group.sees(first)).map(|group| &group.stats);
            add_mass(seeing, &mut entries, sweep.noise.is_some(), &mut mass[first - sweep.slots.start..]);
        }
    }
}
