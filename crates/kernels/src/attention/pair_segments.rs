//! Attention of some rows over many keys by tiles of pairs, segment after segment.
//!
//! A task packs one segment of a KV head's keys and values, which stays in its core's second-level cache, and takes all queries over
//! it. Tiles of all keys, packed before any query comes, would go to memory and back: with few rows that took a third of the time. Every
//! query is merged from the same segments in the same order, so that any number of threads gives the same bits.

use std::array::from_fn;
use std::ops::Range;

use super::flash_pairs::{PackKeysValues, Sweep, add_mass, most_rows};
use super::gumbel::GumbelNoise;
use super::input::Attention;
use super::kept_weights::{ENTRY, KeptWeights};
use super::query_blocks::{QueryBlock, SEGMENT};
use super::query_groups::{GroupStats, MOST_GROUPS, finish, group_queries, overlaps, seen_by};
use super::shape::AttentionShape;
use super::workspace::{BUFFERS, PACKED_KEYS, ROUNDS, split_off_front};
use crate::cpu::Cpu;
use crate::disjoint::DisjointMut;
use crate::scratch;
use crate::simd::pair_tiles::{PairTiles, SIDE, TILE};
use crate::simd::tile_weights::OCTAVE;
use crate::simd::{Elem, KEYS, Kernel, Simd};

/// Most queries of a KV head: their sums stay in the second-level cache beside the keys.
const MOST_QUERIES: usize = 512;
/// Results of a segment take at most so many times the memory of its tiles: kept weights grow with queries times keys.
const MOST_RESULTS: usize = 2;
/// Fewest segments: fewer are too few tasks.
const FEWEST_SEGMENTS: usize = 4;
/// Tiles of a segment.
const TILES: usize = SEGMENT / KEYS;
/// Floats of a group's statistics.
const STATS: usize = size_of::<GroupStats>() / size_of::<f32>();

/// Segment `segment` of the slots.
fn slots(segment: usize) -> Range<usize> {
    segment * SEGMENT..(segment + 1) * SEGMENT
}

/// How the queries of an attention are divided, and what is kept of each part.
#[derive(Clone, Copy)]
pub(super) struct Division<'a> {
    a: &'a Attention<'a>,
    shape: AttentionShape,
    /// Rows of a block; the last one may have fewer.
    each: usize,
    blocks: usize,
    /// Whether values are summed.
    values: bool,
    /// Whether weights are kept.
    keep: bool,
    noise: Option<&'a GumbelNoise<'a>>,
}

impl<'a> Division<'a> {
    /// The division of an attention over the slots `start..end` whose rows are few enough for its keys to be taken segment after segment;
    /// `values` are summed, and weights kept if `keep`.
    pub(super) fn of_few_rows(
        a: &'a Attention,
        (start, end): (usize, usize),
        [values, keep]: [bool; 2],
        noise: Option<&'a GumbelNoise>,
    ) -> Option<Division<'a>> {
        let (shape, rows) = (a.shape(), a.visible.len());
        let segments = end.div_ceil(SEGMENT) - start / SEGMENT;
        if rows * shape.group > MOST_QUERIES || segments < FEWEST_SEGMENTS {
            return None;
        }
        let each = most_rows(&shape);
        let division = Division { a, shape, each, blocks: rows.div_ceil(each), values, keep, noise };
        (division.len(division.blocks) <= MOST_RESULTS * TILES * shape.tile_words()).then_some(division)
    }

    fn block(&self, g: usize, b: usize) -> QueryBlock {
        let rows = b * self.each..((b + 1) * self.each).min(self.a.visible.len());
        QueryBlock { shape: self.shape, g, rows }
    }

    /// The way of block `b` of KV head `g` over a segment.
    fn sweep<'b, T>(
        &'b self,
        token: T,
        (g, b): (usize, usize),
        segment: usize,
        packed: &'b [u32],
    ) -> Sweep<'b, T> {
        let Division { a, values, keep, noise, .. } = *self;
        Sweep { token, a, packed, slots: slots(segment), block: self.block(g, b), values, keep, noise }
    }

    /// Floats of a group's weighted values.
    fn sums(&self) -> usize {
        if self.values { self.shape.high() * TILE } else { 0 }
    }

    /// Groups of the blocks `..b`. All blocks but the last have equally many.
    fn groups(&self, b: usize) -> usize {
        let rows = (b * self.each).min(self.a.visible.len());
        let (whole, rest) = (rows / self.each, rows % self.each);
        let of = |rows: usize| (rows * self.shape.group).div_ceil(SIDE);
        whole * of(self.each) + of(rest)
    }

    /// Floats of the results of the blocks `..b` over a segment: statistics and weighted values of each group, and then the kept weights, for
    /// one block after the other.
    fn len(&self, b: usize) -> usize {
        self.groups(b) * (STATS + self.sums() + if self.keep { TILES * ENTRY } else { 0 })
    }

    /// Indices of the results of `blocks` among those of a segment.
    fn part(&self, blocks: Range<usize>) -> Range<usize> {
        self.len(blocks.start)..self.len(blocks.end)
    }

    /// Floats of a block's result before the kept weights.
    fn results_len(&self, b: usize) -> usize {
        (self.groups(b + 1) - self.groups(b)) * (STATS + self.sums())
    }
}

impl Cpu {
    /// `Cpu::attend_pairs` of few rows, which see slots from `start` to `end`.
    pub(super) fn attend_pair_segments<E: Elem, T: PairTiles>(
        &self,
        token: T,
        division: Division,
        (k, v): (&[E], &[E]),
        (start, end): (usize, usize),
        out: Option<&DisjointMut<f32>>,
        (lse, mass): (Option<&DisjointMut<f32>>, Option<&mut [f32]>),
    ) {
        let Division { a, shape, blocks, noise, .. } = division;
        let (first, segments) = (start / SEGMENT, end.div_ceil(SEGMENT) - start / SEGMENT);
        let (pieces, size, groups) =
            (shape.kv_heads * segments, division.len(blocks), division.groups(blocks));
        let stats = shape.kv_heads * groups * STATS;
        let mut scratch = scratch::borrow(&ROUNDS, pieces * size + stats);
        let mut floats = scratch.as_f32_mut();
        let parts = split_off_front(&mut floats, pieces * size);
        let stats: &mut [GroupStats] = bytemuck::cast_slice_mut(split_off_front(&mut floats, stats));
        // A segment is packed once for all blocks, or once for each if there are few segments for the threads.
        let ways = if pieces < 2 * self.threads() { blocks } else { 1 };
        let shared = DisjointMut::new(parts);
        self.parallel(pieces * ways, &|t| {
            let (piece, way) = (t / ways, t % ways);
            let blocks = way * blocks / ways..(way + 1) * blocks / ways;
            let part = division.part(blocks.clone());
            // SAFETY: the parts of these blocks belong to this task.
            let parts = unsafe { shared.part(piece * size + part.start..piece * size + part.end) };
            let (g, segment) = (piece / segments, first + piece % segments);
            let (k, v) = (shape.head(k, g), shape.head(v, g));
            token.run(SegmentPairs { token, division: &division, k, v, g, segment, blocks, parts });
        });
        let (parts, shared) = (&*parts, DisjointMut::new(stats));
        self.parallel(shape.kv_heads * blocks, &|t| {
            let (g, b) = (t / blocks, t % blocks);
            let of_block = g * groups + division.groups(b)..g * groups + division.groups(b + 1);
            // SAFETY: the statistics of this block belong to this task.
            let stats = unsafe { shared.part(of_block) };
            let parts = parts[g * segments * size..(g + 1) * segments * size].chunks_exact(size);
            let parts = parts.map(|part| &part[division.part(b..b + 1)]);
            token.run(MergePairs {
                token,
                division: &division,
                block: division.block(g, b),
                parts,
                stats,
                out,
                lse,
            });
        });
        let Some(mass) = mass else { return };
        let (stats, seen) = (&*stats, mass.len() / shape.kv_heads);
        let mass = DisjointMut::new(mass);
        self.parallel(pieces, &|piece| {
            let (g, segment) = (piece / segments, first + piece % segments);
            let range = slots(segment);
            let range = range.start..range.end.min(seen).min(end);
            // SAFETY: a KV head's slots of a segment belong to one task.
            let mass = unsafe { mass.part(g * seen + range.start..g * seen + range.end) };
            let mut sums = [0.0; SEGMENT];
            for b in 0..blocks {
                let part = &parts[piece * size..(piece + 1) * size][division.part(b..b + 1)];
                let kept: &[u32] = bytemuck::cast_slice(&part[division.results_len(b)..]);
                let (sweep, mut entries) =
                    (division.sweep(token, (g, b), segment, &[]), kept.chunks_exact(ENTRY));
                let stats = &stats[g * groups + division.groups(b)..];
                let seen: [Range<usize>; MOST_GROUPS] = from_fn(|group| {
                    let [any, _] = seen_by(a, &sweep.block, group_queries(&sweep.block, group));
                    any
                });
                for first in sweep.tiles() {
                    let seeing = stats.iter().zip(&seen[..sweep.groups()]);
                    let seeing = seeing.filter(|(_, seen)| overlaps(seen, first)).map(|(stats, _)| stats);
                    add_mass(seeing, &mut entries, noise.is_some(), &mut sums[first - range.start..]);
                }
            }
            mass.iter_mut().zip(sums).for_each(|(mass, more)| *mass += more);
        });
    }
}

/// Computes blocks over one segment.
struct SegmentPairs<'a, E, T> {
    token: T,
    division: &'a Division<'a>,
    /// The head's keys and values, capacity × head_dim.
    k: &'a [E],
    v: &'a [E],
    g: usize,
    segment: usize,
    blocks: Range<usize>,
    /// The blocks' results.
    parts: &'a mut [f32],
}

impl<E: Elem, T: PairTiles> Kernel for SegmentPairs<'_, E, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let SegmentPairs { token, division, k, v, g, segment, blocks, mut parts } = self;
        let (shape, words) = (division.shape, division.shape.tile_words());
        let mut packed = scratch::borrow(&PACKED_KEYS, TILES * words);
        let packed = &mut packed.as_u32_mut()[..TILES * words];
        let spans = blocks.clone().map(|b| division.sweep(token, (g, b), segment, &[]).span());
        let seen = spans
            .filter(|span| !span.is_empty())
            .reduce(|all, span| all.start.min(span.start)..all.end.max(span.end))
            .unwrap_or(0..0);
        for (tile, out) in packed.chunks_exact_mut(words).enumerate() {
            let first = segment * SEGMENT + tile * KEYS;
            let slots = first.max(seen.start)..(first + KEYS).min(seen.end);
            if !slots.is_empty() {
                PackKeysValues { token, shape, k, v, slots, out }.run(simd);
            }
        }
        for b in blocks {
            let sweep = division.sweep(token, (g, b), segment, packed);
            let part = split_off_front(&mut parts, division.part(b..b + 1).len());
            let (results, kept) = part.split_at_mut(division.results_len(b));
            let mut scratch = scratch::borrow(&BUFFERS, sweep.floats());
            let mut floats = scratch.as_f32_mut();
            let mut kept = KeptWeights::new(bytemuck::cast_slice_mut(kept));
            let groups = sweep.run(&mut floats, &mut kept);
            let results = results.chunks_exact_mut(STATS + division.sums());
            for (group, result) in groups.iter().flatten().zip(results) {
                let (stats, sums) = result.split_at_mut(STATS);
                stats.copy_from_slice(bytemuck::cast_slice(std::slice::from_ref(&group.stats)));
                sums.copy_from_slice(&group.o[..sums.len()]);
            }
        }
    }
}

/// Merges the segments of a block and writes its rows.
struct MergePairs<'a, T, P> {
    token: T,
    division: &'a Division<'a>,
    block: QueryBlock,
    /// The block's result over each segment.
    parts: P,
    /// Receives the groups' statistics over all of them.
    stats: &'a mut [GroupStats],
    out: Option<&'a DisjointMut<'a, f32>>,
    lse: Option<&'a DisjointMut<'a, f32>>,
}

impl<'p, T: PairTiles, P: Iterator<Item = &'p [f32]> + Clone> Kernel for MergePairs<'_, T, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let MergePairs { token, division, block, parts, stats, out, lse } = self;
        let mut scratch = scratch::borrow(&BUFFERS, division.sums());
        let sums = &mut scratch.as_f32_mut()[..division.sums()];
        for (group, stats) in stats.iter_mut().enumerate() {
            let at = group * (STATS + division.sums());
            let parts = parts.clone().map(|part| part[at..][..STATS + division.sums()].split_at(STATS));
            let of = |stats: &'p [f32]| -> &'p GroupStats { &bytemuck::cast_slice(stats)[0] };
            *stats = GroupStats::NONE;
            for (part, _) in parts.clone() {
                stats.max.iter_mut().zip(&of(part).max).for_each(|(max, of)| *max = max.max(*of));
            }
            sums.fill(0.0);
            for (part, of_part) in parts {
                let part = of(part);
                for i in (0..SIDE).step_by(S::LANES) {
                    // SAFETY: statistics have 16 numbers, sums rows of 16.
                    unsafe {
                        let load = |from: &[f32; SIDE]| simd.load(from.as_ptr().add(i));
                        let change = simd.sub(load(&part.max), load(&stats.max));
                        let factor = simd.exp2(simd.mul(change, simd.splat(1.0 / OCTAVE)));
                        let sum = simd.fma(load(&part.sum), factor, load(&stats.sum));
                        let noisy_sum = simd.fma(load(&part.noisy_sum), factor, load(&stats.noisy_sum));
                        simd.store(stats.sum.as_mut_ptr().add(i), sum);
                        simd.store(stats.noisy_sum.as_mut_ptr().add(i), noisy_sum);
                        for (to, from) in sums.chunks_exact_mut(SIDE).zip(of_part.chunks_exact(SIDE)) {
                            let to = to.as_mut_ptr().add(i);
                            simd.store(to, simd.fma(simd.load(from.as_ptr().add(i)), factor, simd.load(to)));
                        }
                    }
                }
            }
            finish((simd, token), &block, group_queries(&block, group), (stats, sums), (out, lse));
        }
    }
}
