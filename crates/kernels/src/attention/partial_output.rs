//! Outputs of blocks over some of the keys, and how they become one.

use std::f32::consts::LOG2_E;

use super::query_blocks::QueryBlock;
use super::shape::STATS;
use super::workspace::{BUFFERS, split_off_front};
use crate::disjoint::DisjointMut;
use crate::scratch;
use crate::simd::{Kernel, STRIP, Simd, store_part};

/// The maximum before any score: finite, so that differences stay numbers.
pub(super) const LOWEST: f32 = -1e30;

/// An output over some of the keys, in the scale of base-2 scores.
pub(super) struct PartialOutput<'a> {
    /// Σ 2^(score − m) · value; strips × 12 × padded.
    pub(super) o: &'a mut [f32],
    /// The largest scores or, over tiles of integers, the largest with the logarithms of values' scales; strips × 16.
    pub(super) m: &'a mut [f32],
    /// Σ 2^(score − m); strips × 16.
    pub(super) l: &'a mut [f32],
}

impl<'a> PartialOutput<'a> {
    pub(super) fn new(block: &QueryBlock, mut floats: &'a mut [f32]) -> PartialOutput<'a> {
        let strips = block.strips();
        let o = split_off_front(&mut floats, strips * STRIP * block.shape.padded);
        PartialOutput {
            o,
            m: split_off_front(&mut floats, strips * STATS),
            l: split_off_front(&mut floats, strips * STATS),
        }
    }

    pub(super) fn clear(&mut self) {
        self.o.fill(0.0);
        self.m.fill(LOWEST);
        self.l.fill(0.0);
    }

    /// Merges an output over other keys into this one.
    #[inline(always)]
    pub(super) fn merge<S: Simd>(&mut self, simd: S, o: &[f32], m: &[f32], l: &[f32], padded: usize) {
        for s in 0..self.m.len() / STATS {
            let (mut old, mut new) = ([0.0; STATS], [0.0; STATS]);
            for i in (0..STATS).step_by(S::LANES) {
                let at = s * STATS + i;
                // SAFETY: all have STATS floats for strip `s`.
                unsafe {
                    let (ma, mb) = (simd.load(self.m.as_ptr().add(at)), simd.load(m.as_ptr().add(at)));
                    let max = simd.max(ma, mb);
                    let (a, b) = (simd.exp2(simd.sub(ma, max)), simd.exp2(simd.sub(mb, max)));
                    simd.store(old.as_mut_ptr().add(i), a);
                    simd.store(new.as_mut_ptr().add(i), b);
                    simd.store(self.m.as_mut_ptr().add(at), max);
                    let sum = simd.mul(simd.load(l.as_ptr().add(at)), b);
                    let sum = simd.fma(simd.load(self.l.as_ptr().add(at)), a, sum);
                    simd.store(self.l.as_mut_ptr().add(at), sum);
                }
            }
            for r in 0..STRIP {
                let row = (s * STRIP + r) * padded;
                let (to, from) = (&mut self.o[row..row + padded], &o[row..row + padded]);
                for i in (0..padded).step_by(S::LANES) {
                    // SAFETY: `padded` is a multiple of the lanes.
                    unsafe {
                        let v = simd.mul(simd.load(from.as_ptr().add(i)), simd.splat(new[r]));
                        let v = simd.fma(simd.load(to.as_ptr().add(i)), simd.splat(old[r]), v);
                        simd.store(to.as_mut_ptr().add(i), v);
                    }
                }
            }
        }
    }

    /// Writes the normalised rows.
    #[inline(always)]
    pub(super) fn finish<S: Simd>(
        &self,
        simd: S,
        block: &QueryBlock,
        out: &DisjointMut<f32>,
        lse: Option<&DisjointMut<f32>>,
    ) {
        let (d, padded) = (block.shape.head_dim, block.shape.padded);
        for i in 0..block.queries() {
            let (m, l) = (self.m[i / STRIP * STATS + i % STRIP], self.l[i / STRIP * STATS + i % STRIP]);
            if let Some(lse) = lse {
                // SAFETY: the query rows of a block belong to one task.
                let lse = unsafe { lse.part(block.index(i)..block.index(i) + 1) };
                lse[0] = (m + l.log2()) / LOG2_E;
            }
            let scale = simd.splat(1.0 / l);
            let o = &self.o[i * padded..(i + 1) * padded];
            let at = block.at(i);
            // SAFETY: the query rows of a block belong to one task.
            let to = unsafe { out.part(at..at + d) };
            for e in (0..d).step_by(S::LANES) {
                // SAFETY: `e` stays below `d` <= `padded`, a multiple of the lanes.
                unsafe {
                    let v = simd.mul(simd.load(o.as_ptr().add(e)), scale);
                    store_part(simd, to.as_mut_ptr().add(e), v, d - e);
                }
            }
        }
    }
}

/// Merges a block's segments and writes its rows.
pub(super) struct MergeSegments<'a> {
    /// One part for each segment, `size` floats apart.
    pub(super) parts: &'a [f32],
    pub(super) size: usize,
    pub(super) block: QueryBlock,
    pub(super) out: &'a DisjointMut<'a, f32>,
    pub(super) lse: Option<&'a DisjointMut<'a, f32>>,
}

impl Kernel for MergeSegments<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let MergeSegments { parts, size, block, out, lse } = self;
        let len = block.shape.part_len(block.queries());
        let mut scratch = scratch::borrow(&BUFFERS, len);
        let mut total = PartialOutput::new(&block, scratch.as_f32_mut());
        total.clear();
        for part in parts.chunks_exact(size) {
            let (o, stats) = part[..len].split_at(total.o.len());
            let (m, l) = stats.split_at(total.m.len());
            total.merge(simd, o, m, l, block.shape.padded);
        }
        total.finish(simd, &block, out, lse);
    }
}
