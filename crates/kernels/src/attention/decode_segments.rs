//! Attention of a few queries, segment after segment: which kernel computes the segments, and how their results become rows.
//!
//! A segment's keys are read once for all queries of a KV head. Every row is merged from the same segments in the same order, so that
//! any number of threads gives the same bits.

use std::f32::consts::LOG2_E;

use super::decode::{DecodeSegment, DecodeWeights};
#[cfg(target_arch = "x86_64")]
use super::decode_pairs::DecodePairs;
use super::decode_part::{ALIGNED, KEPT, LOWEST, QUERIES, part_len, width};
use super::input::Attention;
use super::query_blocks::{QueryBlock, SEGMENT};
use super::shape::STATS;
use super::workspace::{BUFFERS, ROUNDS};
#[cfg(target_arch = "x86_64")]
use crate::buffer::Dtype;
use crate::cpu::Cpu;
use crate::disjoint::DisjointMut;
use crate::scratch;
#[cfg(target_arch = "x86_64")]
use crate::simd::pair_tiles::PairTiles as _;
use crate::simd::{Elem, Kernel, Simd, store_part};

/// Writes the factor of each segment's results, segments × [`STATS`], and returns each query's maximum and sum over all segments. `stats`
/// are the maxima and sums of the segments.
#[inline(always)]
fn factors<'a, S: Simd>(
    simd: S,
    stats: impl Iterator<Item = &'a [f32]> + Clone,
    factors: &mut [f32],
) -> [[f32; STATS]; 2] {
    let (mut max, mut sum) = ([LOWEST; STATS], [0.0; STATS]);
    for i in (0..STATS).step_by(S::LANES) {
        // SAFETY: a segment has STATS maxima and as many sums, the factors STATS for each segment.
        unsafe {
            let mut highest = simd.splat(LOWEST);
            for stats in stats.clone() {
                highest = simd.max(highest, simd.load(stats[..2 * STATS].as_ptr().add(i)));
            }
            let mut total = simd.splat(0.0);
            for (stats, factors) in stats.clone().zip(factors.chunks_exact_mut(STATS)) {
                let stats = stats[..2 * STATS].as_ptr().add(i);
                let factor = simd.exp2(simd.sub(simd.load(stats), highest));
                total = simd.fma(simd.load(stats.add(STATS)), factor, total);
                simd.store(factors.as_mut_ptr().add(i), factor);
            }
            simd.store(max.as_mut_ptr().add(i), highest);
            simd.store(sum.as_mut_ptr().add(i), total);
        }
    }
    [max, sum]
}

impl Cpu {
    /// Whether the kernels of few queries compute the attention.
    pub(super) fn is_decode(&self, a: &Attention) -> bool {
        let queries = a.visible.len() * a.shape().group;
        a.precision != crate::Precision::F32 && (1..=QUERIES).contains(&queries)
    }

    /// [`Cpu::attention`] of a few queries; `weights` are those of [`Cpu::decode_with_weights`].
    pub(super) fn decode<E: Elem>(
        &self,
        a: &Attention,
        (k, v): (&[E], &[E]),
        out: &DisjointMut<f32>,
        lse: Option<&DisjointMut<f32>>,
        weights: Option<&mut [f32]>,
    ) {
        let (shape, rows) = (a.shape(), a.visible.len());
        let block = |g| QueryBlock { shape, g, rows: 0..rows };
        let seen = block(0).span(a.visible, 0..block(0).queries());
        let worth = rows * seen.len() * shape.heads * shape.head_dim > 1 << 17;
        let (first, size) = (seen.start / SEGMENT, part_len(&block(0)));
        let segments = seen.end.div_ceil(SEGMENT) - first;
        let kept = if weights.is_some() { KEPT } else { 0 };
        let pieces = shape.kv_heads * segments;
        let mut scratch = scratch::borrow(&ROUNDS, pieces * (size + kept));
        let (parts, all_kept) = scratch.as_f32_mut()[..pieces * (size + kept)].split_at_mut(pieces * size);
        let (shared, shared_kept) = (DisjointMut::new(parts), DisjointMut::new(all_kept));
        self.parallel_if(worth, pieces, &|i| {
            let (block, segment) = (block(i / segments), first + i % segments);
            // SAFETY: part `i` belongs to task `i`.
            let part = unsafe { shared.part(i * size..(i + 1) * size) };
            self.decode_segment(a, (k, v), block.clone(), segment, part);
            if kept > 0 {
                // SAFETY: part `i` belongs to task `i`.
                let kept = unsafe { shared_kept.part(i * kept..(i + 1) * kept) };
                // The keys are in the second-level cache by now.
                self.run(DecodeWeights { a, k, block, segment, kept });
            }
        });
        let parts = &*parts;
        self.parallel_if(pieces * size > 1 << 18, shape.kv_heads, &|g| {
            let parts = &parts[g * segments * size..(g + 1) * segments * size];
            self.run(MergeParts { parts, block: block(g), out, lse });
        });
        let Some(weights) = weights else { return };
        let weights = DisjointMut::new(weights);
        self.parallel_if(seen.end * shape.heads > 1 << 15, shape.kv_heads, &|g| {
            // SAFETY: a head's weights belong to one task.
            let weights = unsafe { weights.part(g * seen.end..(g + 1) * seen.end) };
            let kept = &all_kept[g * segments * kept..(g + 1) * segments * kept];
            weights[..seen.start].fill(0.0);
            let (queries, first) = (shape.group, first * SEGMENT);
            self.run(SumWeights { kept, queries, first, start: seen.start, weights });
        });
    }

    /// Computes a segment by pairs where they are fast and keys and values have 16 bits.
    fn decode_segment<E: Elem>(
        &self,
        a: &Attention,
        (k, v): (&[E], &[E]),
        block: QueryBlock,
        segment: usize,
        part: &mut [f32],
    ) {
        #[cfg(target_arch = "x86_64")]
        if let Some(token) = self.fast_pairs().filter(|_| a.k.dtype() != Dtype::F32) {
            return token.run(DecodePairs { token, a, block, segment, part });
        }
        self.run(DecodeSegment { a, k, v, block, segment, part });
    }
}

/// Merges the segments of a block and writes its rows.
struct MergeParts<'a> {
    /// A [`DecodePart`](super::decode_part::DecodePart) of each segment.
    parts: &'a [f32],
    block: QueryBlock,
    out: &'a DisjointMut<'a, f32>,
    lse: Option<&'a DisjointMut<'a, f32>>,
}

impl Kernel for MergeParts<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let MergeParts { parts, block, out, lse } = self;
        let (d, width) = (block.shape.head_dim, width(&block));
        let parts = parts.chunks_exact(part_len(&block));
        let mut scratch = scratch::borrow(&BUFFERS, parts.len() * STATS);
        let scales = &mut scratch.as_f32_mut()[..parts.len() * STATS];
        let stats = block.queries() * width;
        let [max, sum] = factors(simd, parts.clone().map(|part| &part[stats..]), scales);
        for i in 0..block.queries() {
            if let Some(lse) = lse {
                // SAFETY: the queries of a block belong to one task.
                let lse = unsafe { lse.part(block.index(i)..block.index(i) + 1) };
                lse[0] = (max[i] + sum[i].log2()) / LOG2_E;
            }
            // SAFETY: the queries of a block belong to one task.
            let to = unsafe { out.part(block.at(i)..block.at(i) + d) };
            let scale = simd.splat(1.0 / sum[i]);
            for e in (0..d).step_by(S::LANES) {
                let mut o = simd.splat(0.0);
                for (part, scales) in parts.clone().zip(scales.chunks_exact(STATS)) {
                    // SAFETY: the width is a multiple of the lanes.
                    let more = unsafe { simd.load(part[i * width..][..width].as_ptr().add(e)) };
                    o = simd.fma(more, simd.splat(scales[i]), o);
                }
                // SAFETY: `d - e` elements are left.
                unsafe { store_part(simd, to.as_mut_ptr().add(e), simd.mul(o, scale), d - e) };
            }
        }
    }
}

/// The weights that a single row gives to each slot, summed over the heads of a group.
struct SumWeights<'a> {
    /// [`KeptWeights`](super::decode_part::KeptWeights) of each segment.
    kept: &'a [f32],
    /// Heads of the group.
    queries: usize,
    /// The first slot of the first segment.
    first: usize,
    /// The first slot that the row sees.
    start: usize,
    /// One for each slot.
    weights: &'a mut [f32],
}

impl Kernel for SumWeights<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let SumWeights { kept, queries, first, start, weights } = self;
        let kept = kept.chunks_exact(KEPT);
        let mut scratch = scratch::borrow(&BUFFERS, kept.len() * STATS);
        let scales = &mut scratch.as_f32_mut()[..kept.len() * STATS];
        let [_, sum] = factors(simd, kept.clone(), scales);
        for (segment, (kept, scales)) in kept.zip(scales.chunks_exact(STATS)).enumerate() {
            // A segment's weights begin at the first slot that is seen, down to a multiple of 16.
            let from = (first + segment * SEGMENT).max(start / ALIGNED * ALIGNED);
            let to = (first + (segment + 1) * SEGMENT).min(weights.len());
            for t in (from..to).step_by(S::LANES) {
                let mut total = simd.splat(0.0);
                for (i, p) in kept[2 * STATS..].chunks_exact(SEGMENT).enumerate().take(queries) {
                    // SAFETY: a query has SEGMENT weights, a multiple of the lanes.
                    let p = unsafe { simd.load(p.as_ptr().add(t - from)) };
                    total = simd.fma(p, simd.splat(scales[i] / sum[i]), total);
                }
                // SAFETY: `to - t` weights are left.
                unsafe { store_part(simd, weights.as_mut_ptr().add(t), total, to - t) };
            }
        }
    }
}
