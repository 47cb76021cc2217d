//! Attention of a few queries, segment after segment: which kernel computes the segments, and how their results become rows.
//!
//! A segment's keys are read once for all queries of a KV head. Every row is merged from the same segments in the same order, so that
//! any number of threads gives the same bits.

use std::f32::consts::LOG2_E;

use super::decode::DecodeSegment;
#[cfg(target_arch = "x86_64")]
use super::decode_pairs::DecodePairs;
use super::decode_part::{LOWEST, QUERIES, part_len, width};
use super::input::Attention;
use super::query_blocks::{QueryBlock, SEGMENT};
use super::shape::STATS;
use super::workspace::{BUFFERS, ROUNDS};
#[cfg(target_arch = "x86_64")]
use crate::buffer::Dtype;
use crate::cpu::Cpu;
use crate::disjoint::DisjointMut;
use crate::scratch;
use crate::simd::{Elem, Kernel, Simd, store_part};

/// The partial results of a block over all segments, one after the other.
#[derive(Clone, Copy)]
struct Parts<'a> {
    block: &'a QueryBlock,
    floats: &'a [f32],
}

impl<'a> Parts<'a> {
    fn iter(self) -> impl Iterator<Item = &'a [f32]> {
        self.floats.chunks_exact(part_len(self.block))
    }

    /// What each segment's results are multiplied by, segments × [`STATS`], and each query's maximum and sum over all segments.
    #[inline(always)]
    fn factors<S: Simd>(self, simd: S, factors: &mut [f32]) -> [[f32; STATS]; 2] {
        let at = self.block.queries() * width(self.block);
        let (mut max, mut sum) = ([LOWEST; STATS], [0.0; STATS]);
        for i in (0..STATS).step_by(S::LANES) {
            // SAFETY: a part has STATS maxima and as many sums, the factors STATS for each part.
            unsafe {
                let mut highest = simd.splat(LOWEST);
                for part in self.iter() {
                    highest = simd.max(highest, simd.load(part[at..][..STATS].as_ptr().add(i)));
                }
                let mut total = simd.splat(0.0);
                for (part, factors) in self.iter().zip(factors.chunks_exact_mut(STATS)) {
                    let stats = part[at..][..2 * STATS].as_ptr().add(i);
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
}

impl Cpu {
    /// Whether the kernels of few queries compute the attention.
    pub(super) fn is_decode(&self, a: &Attention) -> bool {
        a.precision != crate::Precision::F32 && a.visible.len() * a.shape().group <= QUERIES
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
        if rows == 0 {
            return;
        }
        let block = |g| QueryBlock { shape, g, rows: 0..rows };
        let seen = block(0).span(a.visible, 0..block(0).queries());
        let worth = rows * seen.len() * shape.heads * shape.head_dim > 1 << 18;
        let (first, size) = (seen.start / SEGMENT, part_len(&block(0)));
        let segments = seen.end.div_ceil(SEGMENT) - first;
        let kept = if weights.is_some() { QUERIES * SEGMENT } else { 0 };
        let pieces = shape.kv_heads * segments;
        let mut scratch = scratch::borrow(&ROUNDS, pieces * (size + kept));
        let (parts, all_kept) = scratch.as_f32_mut()[..pieces * (size + kept)].split_at_mut(pieces * size);
        let (shared, shared_kept) = (DisjointMut::new(parts), DisjointMut::new(all_kept));
        self.parallel_if(worth, pieces, &|i| {
            let (block, segment) = (block(i / segments), first + i % segments);
            // SAFETY: part `i` belongs to task `i`.
            let part = unsafe { shared.part(i * size..(i + 1) * size) };
            // SAFETY: part `i` belongs to task `i`.
            let kept = (kept > 0).then(|| unsafe { shared_kept.part(i * kept..(i + 1) * kept) });
            #[cfg(target_arch = "x86_64")]
            if let Some(token) = self.fast_pairs().filter(|_| a.k.dtype() != Dtype::F32) {
                return self.run(DecodePairs { token, a, block, segment, part, kept });
            }
            self.run(DecodeSegment { a, k, v, block, segment, part, kept });
        });
        let parts = &*parts;
        let of_head = |g: usize| &parts[g * segments * size..(g + 1) * segments * size];
        self.parallel_if(pieces * size > 1 << 18, shape.kv_heads, &|g| {
            let block = block(g);
            self.run(MergeParts { parts: Parts { block: &block, floats: of_head(g) }, out, lse });
        });
        let Some(weights) = weights else { return };
        let weights = DisjointMut::new(weights);
        self.parallel_if(seen.end * shape.heads > 1 << 15, shape.kv_heads, &|g| {
            // SAFETY: a head's weights belong to one task.
            let weights = unsafe { weights.part(g * seen.end..(g + 1) * seen.end) };
            let (block, kept) = (block(g), &all_kept[g * segments * kept..(g + 1) * segments * kept]);
            weights[..seen.start].fill(0.0);
            let parts = Parts { block: &block, floats: of_head(g) };
            self.run(SumWeights { parts, first: first * SEGMENT, start: seen.start, kept, weights });
        });
    }
}

/// Merges the segments of a block and writes its rows.
struct MergeParts<'a> {
    parts: Parts<'a>,
    out: &'a DisjointMut<'a, f32>,
    lse: Option<&'a DisjointMut<'a, f32>>,
}

impl Kernel for MergeParts<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let MergeParts { parts, out, lse } = self;
        let (block, d) = (parts.block, parts.block.shape.head_dim);
        let count = parts.floats.len() / part_len(block);
        let mut scratch = scratch::borrow(&BUFFERS, count * STATS);
        let factors = &mut scratch.as_f32_mut()[..count * STATS];
        let [max, sum] = parts.factors(simd, factors);
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
                for (part, factors) in parts.iter().zip(factors.chunks_exact(STATS)) {
                    // SAFETY: the width is a multiple of the lanes.
                    let more = unsafe { simd.load(part[i * width(block)..][..width(block)].as_ptr().add(e)) };
                    o = simd.fma(more, simd.splat(factors[i]), o);
                }
                // SAFETY: `d - e` elements are left.
                unsafe { store_part(simd, to.as_mut_ptr().add(e), simd.mul(o, scale), d - e) };
            }
        }
    }
}

/// The weights that a single row gives to each slot, summed over the heads of a group.
struct SumWeights<'a> {
    parts: Parts<'a>,
    /// The first slot of the first segment.
    first: usize,
    /// The first slot that the row sees.
    start: usize,
    /// The probabilities that were kept of each segment, relative to its maxima.
    kept: &'a [f32],
    /// One for each slot.
    weights: &'a mut [f32],
}

impl Kernel for SumWeights<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let SumWeights { parts, first, start, kept, weights } = self;
        let (segments, queries) = (kept.len() / (QUERIES * SEGMENT), parts.block.queries());
        let mut scratch = scratch::borrow(&BUFFERS, segments * STATS);
        let factors = &mut scratch.as_f32_mut()[..segments * STATS];
        let [_, sum] = parts.factors(simd, factors);
        for (segment, kept) in kept.chunks_exact(QUERIES * SEGMENT).enumerate() {
            // A segment's probabilities begin at the first slot that is seen, down to a multiple of 16.
            let from = (first + segment * SEGMENT).max(start / 16 * 16);
            let to = (first + (segment + 1) * SEGMENT).min(weights.len());
            for t in (from..to).step_by(S::LANES) {
                let mut total = simd.splat(0.0);
                for (i, kept) in kept.chunks_exact(SEGMENT).enumerate().take(queries) {
                    let factor = factors[segment * STATS + i] / sum[i];
                    // SAFETY: a query has SEGMENT probabilities, a multiple of the lanes.
                    let p = unsafe { simd.load(kept.as_ptr().add(t - from)) };
                    total = simd.fma(p, simd.splat(factor), total);
                }
                // SAFETY: `to - t` weights are left.
                unsafe { store_part(simd, weights.as_mut_ptr().add(t), total, to - t) };
            }
        }
    }
}
