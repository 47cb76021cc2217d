//! Online softmax over tiles of keys and values as integers of 16 bits, with AVX2.
//!
//! Each query, key and value has a scale of its own, so that its integers do not depend on what lies beside it. A weight is multiplied by its value's scale
//! before it is rounded, to 13 bits below the largest of the row's weights in the tile. The sum of a row's weights divides by the same scales again, and is not
//! rounded.
//!
//! Shape: 12 queries × 64 keys. Bound: `vpmaddwd` and an addition for the 16 products of a register; a Zen 3 begins both in .62 of a cycle, where FMA takes
//! 1, so that the two products of a tile with heads of 64 take 3,960 cycles. Measured there, one thread, 4,096 rows over their 4,096 keys: 66 % of that with
//! heads of 64, 70 % with heads of 128. The softmax of a tile takes a sixth of the time, packing keys and values for each block took a twelfth.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use super::input::Attention;
use super::partial_output::{LOWEST, PartialOutput};
use super::query_blocks::{QueryBlock, SEGMENT};
use super::shape::{AttentionShape, STATS};
use super::workspace::split_off_front;
use crate::cpu::Cpu;
use crate::disjoint::DisjointMut;
use crate::linear::Precision;
use crate::scratch::AlignedVec;
use crate::simd::features::Avx2;
use crate::simd::i16_tiles::{
    Accumulate, Factors, Scales, Store, WEIGHT_BITS, multiply, pack_values, round_vector, scores,
    value_scale, weigh,
};
use crate::simd::{Elem, KEYS, Kernel, STRIP, Simd};

/// Words of a row of weights.
pub(super) const WEIGHTS: usize = KEYS / 2;
/// Words of the weights of a strip and a tile.
pub(super) const PAIRS: usize = STRIP * WEIGHTS;
/// Words of these and of the rows' maxima.
pub(super) const ENTRY: usize = PAIRS + STATS;

/// AVX2, if keys and values may be rounded and the instruction set has no wider vectors.
#[inline(always)]
pub(super) fn token<S: Simd>(simd: S, a: &Attention) -> Option<Avx2> {
    if a.precision == Precision::F32 || simd.avx512().is_some() { None } else { simd.avx2() }
}

/// Words of a tile: pairs of keys, padded / 2 × 64; pairs of values, 32 × padded; [`Scales`].
fn tile_words(shape: &AttentionShape) -> usize {
    KEYS * shape.padded + 3 * KEYS
}

/// Tiles of all KV heads, packed once for many blocks.
#[derive(Clone, Copy)]
pub(super) struct PackedTiles<'a> {
    words: &'a [u32],
    /// Words of a tile.
    each: usize,
    /// The first slot, a multiple of 64.
    start: usize,
    /// Tiles of a KV head.
    tiles: usize,
}

impl<'a> PackedTiles<'a> {
    /// The tile of a KV head's slots from `slot` on.
    #[inline(always)]
    fn tile(&self, g: usize, slot: usize) -> &'a [u32] {
        let tile = g * self.tiles + (slot - self.start) / KEYS;
        &self.words[tile * self.each..][..self.each]
    }
}

impl Cpu {
    /// Packs the keys and values of an attention whose blocks, if there are `several`, would each do so, and if its tiles are of integers.
    pub(super) fn pack_integers<'s, E: Elem>(
        &self,
        a: &Attention,
        (k, v): (&[E], &[E]),
        several: bool,
        scratch: &'s mut AlignedVec,
    ) -> Option<PackedTiles<'s>> {
        let simd = self.avx2().and_then(|simd| token(simd, a)).filter(|_| several)?;
        let (shape, words) = (a.shape(), tile_words(&a.shape()));
        let seen = a.visible.iter().map(|v| v.0 as usize).min().unwrap_or(0);
        let (start, end) = (seen / KEYS * KEYS, a.visible.iter().map(|v| v.1 as usize).max().unwrap_or(0));
        let tiles = (end - start).div_ceil(KEYS);
        scratch.reserve(shape.kv_heads * tiles * words);
        let packed = &mut scratch.as_u32_mut()[..shape.kv_heads * tiles * words];
        let shared = DisjointMut::new(packed);
        self.parallel(shape.kv_heads * tiles, &|t| {
            let (g, first) = (t / tiles, start + t % tiles * KEYS);
            // SAFETY: tile `t` belongs to task `t`.
            let out = unsafe { shared.part(t * words..(t + 1) * words) };
            let slots = first.max(seen)..(first + KEYS).min(end);
            self.run(PackTile { simd, shape, k: shape.head(k, g), v: shape.head(v, g), slots, out });
        });
        Some(PackedTiles { words: packed, each: words, start, tiles })
    }
}

/// Rounds the keys and values of at most 64 slots to a tile. Its other slots have zeros.
struct PackTile<'a, E> {
    simd: Avx2,
    shape: AttentionShape,
    /// The head's keys and values, capacity × head_dim.
    k: &'a [E],
    v: &'a [E],
    /// Slots of one tile.
    slots: Range<usize>,
    out: &'a mut [u32],
}

impl<E: Elem> Kernel for PackTile<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let PackTile { simd, shape: AttentionShape { head_dim, padded, .. }, k, v, slots, out } = self;
        let (first, pairs) = (slots.start / KEYS * KEYS, padded / 2);
        let (keys_out, out) = out.split_at_mut(pairs * KEYS);
        let (values_out, scales_out) = out.split_at_mut(pairs * KEYS);
        let (mut scales, mut values) = ([[0.0f32; KEYS]; 3], [&[][..]; KEYS]);
        let [key_scales, value_logs, value_inverses] = &mut scales;
        // Keys lie where values will, until they are transposed.
        if slots.len() < KEYS {
            values_out.fill(0);
        }
        for slot in slots {
            let (t, of_slot) = (slot - first, slot * head_dim..(slot + 1) * head_dim);
            values[t] = &v[of_slot.clone()];
            key_scales[t] = round_vector(simd, &k[of_slot], &mut values_out[t * pairs..][..pairs]);
            let [scale, inverse] = value_scale(simd, values[t]);
            (value_logs[t], value_inverses[t]) = (scale.log2(), inverse);
        }
        for t in (0..KEYS).step_by(Avx2::LANES) {
            for p in (0..pairs).step_by(Avx2::LANES) {
                let (from, to) = (&values_out[t * pairs + p..], &mut keys_out[p * KEYS + t..]);
                // SAFETY: eight rows of eight words lie within both.
                unsafe {
                    simd.transpose(from.as_ptr().cast(), pairs, to.as_mut_ptr().cast(), KEYS, Avx2::LANES);
                }
            }
        }
        pack_values(simd, &values, value_inverses, padded, values_out);
        scales_out.copy_from_slice(bytemuck::cast_slice(scales.as_flattened()));
    }
}

/// Weights of a block as `bf16`, without the scales of values; tile after tile and in it strip after strip.
pub(super) struct KeptWeights<'a> {
    entries: &'a mut [u32],
    strips: usize,
    /// The block's first tile.
    first: usize,
}

impl<'a> KeptWeights<'a> {
    /// Room for tiles from the one with index `first` on.
    pub(super) fn new(entries: &'a mut [u32], strips: usize, first: usize) -> KeptWeights<'a> {
        KeptWeights { entries, strips, first }
    }

    /// Weights and maxima of strip `s` and the tile of the slots from `slot` on.
    pub(super) fn entry(&mut self, s: usize, slot: usize) -> &mut [u32] {
        let at = (slot / KEYS - self.first) * self.strips + s;
        &mut self.entries[at * ENTRY..][..ENTRY]
    }
}

/// Buffers of one block.
pub(super) struct IntegerBuffers<'a> {
    /// Keys and values that are not packed yet.
    tile: &'a mut [u32],
    strips: Strips<'a>,
}

/// The queries of a block, twelve to a strip, and what is computed of them.
struct Strips<'a> {
    /// Sums of one strip, then its scores; 12 × 64.
    scores: &'a mut [i32],
    /// Weights of one strip; 12 × 32.
    weights: &'a mut [u32],
    /// Pairs of all queries; strips × padded / 2 × 12.
    queries: &'a mut [u32],
    /// Scales of their scores; strips × 12.
    scales: &'a mut [f32],
    /// Their sums of weights, lane by lane; strips × 12 × 16.
    lanes: &'a mut [f32],
}

impl<'a> IntegerBuffers<'a> {
    /// Floats that they take.
    pub(super) fn len(block: &QueryBlock) -> usize {
        let each = block.shape.padded / 2 + 1 + STATS;
        tile_words(&block.shape) + STRIP * (KEYS + WEIGHTS) + block.strips() * STRIP * each
    }

    /// Cuts the buffers off `floats` and rounds the queries.
    #[inline(always)]
    pub(super) fn new(
        simd: Avx2,
        a: &Attention,
        block: &QueryBlock,
        floats: &mut &'a mut [f32],
    ) -> IntegerBuffers<'a> {
        let (AttentionShape { padded, head_dim, .. }, rows) = (block.shape, block.strips() * STRIP);
        let tile: &mut [u32] = bytemuck::cast_slice_mut(split_off_front(floats, tile_words(&block.shape)));
        let scores = bytemuck::cast_slice_mut(split_off_front(floats, STRIP * KEYS));
        let weights = bytemuck::cast_slice_mut(split_off_front(floats, STRIP * WEIGHTS));
        let queries: &mut [u32] = bytemuck::cast_slice_mut(split_off_front(floats, rows * padded / 2));
        let scales = split_off_front(floats, rows);
        let lanes = split_off_front(floats, rows * STATS);
        // Rows past the last query are multiplied as well.
        queries.fill(0);
        for i in 0..block.queries() {
            let pairs = &mut tile[..padded / 2];
            let scale = round_vector(simd, &a.q[block.at(i)..][..head_dim], pairs);
            scales[i] = scale * a.scale * LOG2_E;
            let strip = &mut queries[i / STRIP * STRIP * padded / 2..];
            for (p, pair) in pairs.iter().enumerate() {
                strip[p * STRIP + i % STRIP] = *pair;
            }
        }
        IntegerBuffers { tile, strips: Strips { scores, weights, queries, scales, lanes } }
    }

    /// Attention of the block over the keys of one segment; keys and values are kv_heads × capacity × head_dim, and their tiles may be packed already. Weights
    /// may be kept.
    #[inline(always)]
    pub(super) fn attend_segment<E: Elem>(
        &mut self,
        simd: Avx2,
        a: &Attention,
        (k, v, packed): (&[E], &[E], Option<PackedTiles>),
        block: &QueryBlock,
        segment: usize,
        (part, mut kept): (&mut PartialOutput, Option<&mut KeptWeights>),
    ) {
        let IntegerBuffers { tile, strips } = self;
        let (shape, g) = (block.shape, block.g);
        strips.lanes.fill(0.0);
        let span = block.span(a.visible, 0..block.queries());
        let (from, to) = (span.start.max(segment * SEGMENT), span.end.min((segment + 1) * SEGMENT));
        for first in (from / KEYS * KEYS..to).step_by(KEYS) {
            let tile = match packed {
                Some(packed) => packed.tile(g, first),
                None => {
                    let slots = first.max(from)..(first + KEYS).min(to);
                    let (k, v) = (shape.head(k, g), shape.head(v, g));
                    PackTile { simd, shape, k, v, slots, out: tile }.run(simd);
                    &tile[..]
                }
            };
            for s in 0..block.strips() {
                let seen = block.span(a.visible, block.strip(s));
                if seen.start < first + KEYS && first < seen.end {
                    let kept = kept.as_deref_mut().map(|kept| kept.entry(s, first));
                    strips.attend_tile(simd, a, block, s, (first, tile), (part, kept));
                }
            }
        }
        for i in 0..block.queries() {
            let lanes = &strips.lanes[i * STATS..(i + 1) * STATS];
            // SAFETY: `lanes` has at least LANES floats.
            part.l[i / STRIP * STATS + i % STRIP] = simd.sum(unsafe { simd.load(lanes.as_ptr()) });
        }
    }
}

impl Strips<'_> {
    /// Takes strip `s` over the tile of the slots from `first` on.
    #[inline(always)]
    fn attend_tile(
        &mut self,
        simd: Avx2,
        a: &Attention,
        block: &QueryBlock,
        s: usize,
        (first, tile): (usize, &[u32]),
        (part, mut kept): (&mut PartialOutput, Option<&mut [u32]>),
    ) {
        let (padded, queries) = (block.shape.padded, block.strip(s));
        let (keys, rest) = tile.split_at(KEYS * padded / 2);
        let (values, of_slots) = rest.split_at(KEYS * padded / 2);
        let scales = Scales::new(of_slots);
        let x = self.queries[s * STRIP * padded / 2..][..STRIP * padded / 2].as_ptr();
        let products = Factors { x, w: keys.as_ptr(), pairs: padded / 2, columns: KEYS };
        // SAFETY: a strip has twelve rows, and the buffers the lengths that they are said to have.
        unsafe { multiply::<STRIP, 1>(simd, &products, queries.len(), Store(self.scores.as_mut_ptr())) };
        // Maxima of all rows first, since each waits long for operations across lanes.
        let mut of_tile = [LOWEST; STATS];
        for (r, i) in queries.clone().enumerate() {
            let (start, end) = a.visible[block.row(i)];
            let seen = (start as usize).saturating_sub(first)..(end as usize).saturating_sub(first);
            let sums = self.scores[r * KEYS..][..KEYS].as_mut_ptr();
            // SAFETY: there are 64 sums.
            of_tile[r] = unsafe { scores(simd, sums, self.scales[i], scales, seen) }.max(LOWEST);
        }
        if let Some(kept) = kept.as_deref_mut() {
            kept[PAIRS..].copy_from_slice(bytemuck::cast_slice(&of_tile));
        }
        let (mut change, mut factor) = ([0.0; STATS], [0.0; STATS]);
        let max = &mut part.m[s * STATS..][..STATS];
        for i in (0..STATS).step_by(Avx2::LANES) {
            // SAFETY: all have STATS floats.
            unsafe {
                let (old, of_tile) = (simd.load(max.as_ptr().add(i)), simd.load(of_tile.as_ptr().add(i)));
                let new = simd.max(old, of_tile);
                simd.store(max.as_mut_ptr().add(i), new);
                simd.store(change.as_mut_ptr().add(i), simd.exp2(simd.sub(old, new)));
                let below = simd.sub(of_tile, simd.add(new, simd.splat(WEIGHT_BITS)));
                simd.store(factor.as_mut_ptr().add(i), simd.exp2(below));
            }
        }
        for (r, i) in queries.clone().enumerate() {
            let weights = self.weights[r * WEIGHTS..][..WEIGHTS].as_mut_ptr();
            let (scores, lanes) = (&self.scores[r * KEYS..][..KEYS], &mut self.lanes[i * STATS..][..STATS]);
            // SAFETY: there are 64 scores and 32 words; `lanes` has at least LANES floats.
            unsafe {
                let kept = kept.as_deref_mut().map(|kept| kept[r * WEIGHTS..][..WEIGHTS].as_mut_ptr());
                let total = weigh(simd, scores.as_ptr().cast(), of_tile[r], scales, weights, kept);
                let old = simd.mul(simd.load(lanes.as_ptr()), simd.splat(change[r]));
                simd.store(lanes.as_mut_ptr(), simd.fma(total, simd.splat(factor[r]), old));
            }
        }
        let y = part.o[s * STRIP * padded..][..STRIP * padded].as_mut_ptr();
        let sums = Accumulate { y, padded, change: change.as_ptr(), factor: factor.as_ptr() };
        let (x, w) = (self.weights.as_ptr(), values.as_ptr());
        let products = Factors { x, w, pairs: WEIGHTS, columns: padded };
        // SAFETY: as above; sums and statistics of a strip are those of twelve rows.
        unsafe { multiply::<1, WEIGHTS>(simd, &products, queries.len(), sums) };
    }
}
