//! A segment of attention of a few queries, as its kernels share it: the slots that are seen, the weights that scores become, and the
//! partial result.

use std::ops::Range;

use super::input::Attention;
use super::query_blocks::{QueryBlock, SEGMENT};
use super::shape::STATS;
use crate::simd::Simd;

/// Most queries of a block.
pub(super) const QUERIES: usize = 8;
/// Slots that kernels begin at are a multiple of this, so that sums do not depend on where a segment's first seen slot lies.
pub(super) const ALIGNED: usize = 16;
/// Values that are gone through for some of their elements after the others: a part of what the first-level cache holds.
pub(super) const CHUNK: usize = 32;
/// Bytes from those in use to those that are prefetched, into the second-level cache: more of its misses are under way at a time than
/// of the first level's. Cache lines are prefetched one after the other, as the processor's own reading ahead expects it.
pub(super) const AHEAD: usize = 4096;
/// The score of a key that is not seen.
const UNSEEN: f32 = -3e30;
/// The maximum of a query that sees no key.
pub(super) const LOWEST: f32 = -1e30;

/// Bytes from the start of a chunk of values to those that pass `pass` prefetches first. All passes over the chunk share its successor's
/// bytes, so that memory is read throughout.
#[inline(always)]
pub(super) fn ahead(chunk: usize, pass: usize, passes: usize) -> usize {
    pass * chunk / passes + if passes == 1 { AHEAD } else { chunk + AHEAD / 2 }
}

/// Floats of a head's vector in a partial result: the width up to a multiple of 32.
pub(super) fn width(block: &QueryBlock) -> usize {
    block.shape.head_dim.next_multiple_of(32)
}

/// Floats of a partial result: weighted values of each query, maxima, sums.
pub(super) fn part_len(block: &QueryBlock) -> usize {
    block.queries() * width(block) + 2 * STATS
}

/// The result of a block of queries over one segment, in the scale of base-2 scores.
pub(super) struct DecodePart<'a> {
    /// Σ 2^(score − max) · value; queries × [`width`].
    pub(super) o: &'a mut [f32],
    /// The largest score of each query.
    pub(super) max: &'a mut [f32],
    /// Σ 2^(score − max) of each query.
    pub(super) sum: &'a mut [f32],
}

impl<'a> DecodePart<'a> {
    pub(super) fn new(block: &QueryBlock, part: &'a mut [f32]) -> DecodePart<'a> {
        let (o, stats) = part[..part_len(block)].split_at_mut(block.queries() * width(block));
        let (max, sum) = stats.split_at_mut(STATS);
        DecodePart { o, max, sum }
    }

    /// The result over no key.
    pub(super) fn clear(&mut self) {
        self.o.fill(0.0);
        self.max.fill(LOWEST);
        self.sum.fill(0.0);
    }
}

/// Floats of [`KeptWeights`].
pub(super) const KEPT: usize = QUERIES * SEGMENT + 2 * STATS;

/// The weights that a block of queries gives to a segment.
pub(super) struct KeptWeights<'a> {
    /// 2^(score − max) of each slot from [`SegmentSlots::first`] on; [`QUERIES`] × [`SEGMENT`].
    pub(super) p: &'a mut [f32],
    /// The largest score of each query.
    pub(super) max: &'a mut [f32],
    /// Σ 2^(score − max) of each query.
    pub(super) sum: &'a mut [f32],
}

impl<'a> KeptWeights<'a> {
    /// Weights in [`KEPT`] floats: maxima and sums first.
    pub(super) fn new(kept: &'a mut [f32]) -> KeptWeights<'a> {
        let (stats, p) = kept[..KEPT].split_at_mut(2 * STATS);
        let (max, sum) = stats.split_at_mut(STATS);
        KeptWeights { p, max, sum }
    }

    /// No slot is seen.
    pub(super) fn clear(&mut self) {
        self.p.fill(0.0);
        self.max.fill(LOWEST);
        self.sum.fill(0.0);
    }
}

/// The slots of a segment that a block's queries see.
pub(super) struct SegmentSlots {
    /// The slot of the first score: where `seen` starts, down to a multiple of 16.
    pub(super) first: usize,
    pub(super) seen: Range<usize>,
}

impl SegmentSlots {
    /// `None` if no query sees a slot of the segment.
    pub(super) fn new(a: &Attention, block: &QueryBlock, segment: usize) -> Option<SegmentSlots> {
        let span = block.span(a.visible, 0..block.queries());
        let seen = span.start.max(segment * SEGMENT)..span.end.min((segment + 1) * SEGMENT);
        (!seen.is_empty()).then(|| SegmentSlots { first: seen.start / ALIGNED * ALIGNED, seen })
    }

    /// The slot whose key and value stand for those of slot `t`, which may be unseen.
    #[inline(always)]
    pub(super) fn readable(&self, t: usize) -> usize {
        t.max(self.seen.start).min(self.seen.end - 1)
    }
}

/// Turns a query's scores from `slots.first` on into probabilities relative to their maximum; returns it and their sum. `p` has
/// [`SEGMENT`] elements; those past the slots become 0 up to a multiple of 16.
#[inline(always)]
pub(super) fn softmax_segment<S: Simd>(
    simd: S,
    p: &mut [f32],
    slots: &SegmentSlots,
    visible: (u32, u32),
) -> (f32, f32) {
    let end = (slots.seen.end - slots.first).next_multiple_of(ALIGNED);
    let from = (visible.0 as usize).saturating_sub(slots.first).min(end);
    let to = (visible.1 as usize).saturating_sub(slots.first).min(slots.seen.end - slots.first);
    p[..from].fill(UNSEEN);
    p[to.max(from)..end].fill(UNSEEN);
    let p = p[..SEGMENT].as_mut_ptr();
    // SAFETY: `end` is at most SEGMENT, and a multiple of the lanes.
    unsafe {
        let mut max = simd.splat(LOWEST);
        for t in (0..end).step_by(S::LANES) {
            max = simd.max(max, simd.load(p.add(t)));
        }
        let (max, mut total) = (simd.largest(max), simd.splat(0.0));
        for t in (0..end).step_by(S::LANES) {
            let v = simd.exp2(simd.sub(simd.load(p.add(t)), simd.splat(max)));
            total = simd.add(total, v);
            simd.store(p.add(t), v);
        }
        (max, simd.sum(total))
    }
}
