//! Attention of a few queries, as in a step of decoding. Keys and values are read in the order in which they are stored,
//! and nothing is transposed. Sums are taken in another order than in [`super::flash`].

use std::f32::consts::LOG2_E;
use std::ops::Range;

use super::input::Attention;
use super::query_blocks::{QueryBlock, SEGMENT};
use super::shape::STATS;
use super::workspace::{BUFFERS, split_off_front};
use crate::scratch;
use crate::simd::{Elem, Kernel, STRIP, Simd, load_part, store_part};

/// Most queries of a block.
pub(super) const QUERIES: usize = 8;
/// Queries whose scores are computed at once: with four keys, sixteen sums.
const AT_ONCE: usize = 4;
/// Bytes from the vector in use to the cache line that is prefetched.
const AHEAD: usize = 3072;
/// The score of a key that is not seen.
const UNSEEN: f32 = -3e30;
/// The maximum of a query that sees no key.
const LOWEST: f32 = -1e30;

/// Computes a block of up to [`QUERIES`] queries over one segment of the keys.
pub(super) struct DecodeSegment<'a, E> {
    pub(super) a: &'a Attention<'a>,
    pub(super) k: &'a [E],
    pub(super) v: &'a [E],
    pub(super) block: QueryBlock,
    pub(super) segment: usize,
    /// The result, laid out as `flash::PartialOutput`.
    pub(super) part: &'a mut [f32],
    /// If weights are asked for, receives the probabilities relative to the segment's maxima: [`QUERIES`] × [`SEGMENT`].
    pub(super) kept: Option<&'a mut [f32]>,
}

impl<E: Elem> Kernel for DecodeSegment<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        match self.block.queries() {
            1 => self.segment::<S, 1, 4>(simd),
            2 => self.segment::<S, 2, 4>(simd),
            3 => self.segment::<S, 3, 4>(simd),
            4 => self.segment::<S, 4, 4>(simd),
            5 | 6 => self.segment::<S, 6, 2>(simd),
            _ => self.segment::<S, 8, 2>(simd),
        }
    }
}

impl<E: Elem> DecodeSegment<'_, E> {
    /// `N` queries, those past the block's zero; `J` vectors of values at a time.
    #[inline(always)]
    fn segment<S: Simd, const N: usize, const J: usize>(self, simd: S) {
        let DecodeSegment { a, k, v, block, segment, part, kept } = self;
        let (shape, n) = (block.shape, block.queries());
        let (d, padded) = (shape.head_dim, shape.padded);
        let span = block.span(a.visible, 0..n);
        let slots = span.start.max(segment * SEGMENT)..span.end.min((segment + 1) * SEGMENT);
        let mut scratch = scratch::borrow(&BUFFERS, N * (padded + SEGMENT));
        let mut floats = scratch.as_f32_mut();
        let own = split_off_front(&mut floats, N * SEGMENT);
        let p = match kept {
            Some(kept) => kept,
            None => own,
        };
        let q = split_off_front(&mut floats, N * padded);
        q.fill(0.0);
        for (i, q) in q.chunks_exact_mut(padded).enumerate().take(n) {
            let query = &a.q[block.at(i)..][..d];
            q.iter_mut().zip(query).for_each(|(to, q)| *to = q * (a.scale * LOG2_E));
        }
        // The queries of a block's rows share strips of twelve.
        let (o, stats) = part.split_at_mut(block.strips() * STRIP * padded);
        let (max, sum) = stats.split_at_mut(block.strips() * STATS);
        o.fill(0.0);
        max.fill(LOWEST);
        sum.fill(0.0);
        if slots.is_empty() {
            return;
        }
        let k = &shape.head(k, block.g)[slots.start * d..slots.end * d];
        for (q, p) in q.chunks(AT_ONCE * padded).zip(p.chunks_mut(AT_ONCE * SEGMENT)) {
            match q.len() / padded {
                1 => scores::<S, E, 1>(simd, k, d, q, padded, p),
                2 => scores::<S, E, 2>(simd, k, d, q, padded, p),
                3 => scores::<S, E, 3>(simd, k, d, q, padded, p),
                _ => scores::<S, E, 4>(simd, k, d, q, padded, p),
            }
        }
        for i in 0..n {
            let p = &mut p[i * SEGMENT..][..SEGMENT];
            let (from, to) = a.visible[block.row(i)];
            (max[i], sum[i]) = softmax_segment(simd, p, &slots, from as usize..to as usize);
        }
        let v = &shape.head(v, block.g)[slots.start * d..slots.end * d];
        for e in (0..d).step_by(J * S::LANES) {
            values::<S, E, N, J>(simd, v, d, e, p, &mut o[..n * padded], padded);
        }
    }
}

/// The weights that one row gives to the slots of a segment, summed over the heads of a group.
pub(super) struct SegmentWeights<'a> {
    pub(super) block: QueryBlock,
    /// Results of all segments, `size` floats apart.
    pub(super) parts: &'a [f32],
    pub(super) size: usize,
    pub(super) segment: usize,
    /// The probabilities that [`DecodeSegment`] kept of this segment.
    pub(super) kept: &'a [f32],
    /// One for each slot of the segment.
    pub(super) weights: &'a mut [f32],
}

impl Kernel for SegmentWeights<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let SegmentWeights { block, parts, size, segment, kept, weights } = self;
        let stats = block.strips() * STRIP * block.shape.padded;
        let max = |part: &[f32], i: usize| part[stats + i];
        let mut scales = [0.0; QUERIES];
        for (i, scale) in scales.iter_mut().enumerate().take(block.queries()) {
            let mut highest = LOWEST;
            for part in parts.chunks_exact(size) {
                highest = highest.max(max(part, i));
            }
            let mut total = 0.0;
            for part in parts.chunks_exact(size) {
                total += part[stats + block.strips() * STATS + i] * (max(part, i) - highest).exp2();
            }
            *scale = (max(&parts[segment * size..], i) - highest).exp2() / total;
        }
        for t in (0..weights.len()).step_by(S::LANES) {
            let mut sum = simd.splat(0.0);
            for (i, scale) in scales.iter().enumerate().take(block.queries()) {
                // SAFETY: a query has SEGMENT probabilities, a multiple of the lanes.
                let p = unsafe { simd.load(kept[i * SEGMENT..][..SEGMENT].as_ptr().add(t)) };
                sum = simd.fma(p, simd.splat(*scale), sum);
            }
            let n = weights.len() - t;
            // SAFETY: `n` weights are left.
            unsafe { store_part(simd, weights.as_mut_ptr().add(t), sum, n) };
        }
    }
}

/// p\[i · SEGMENT + t\] = q\[i\] · k\[t\]
#[inline(always)]
fn scores<S: Simd, E: Elem, const N: usize>(
    simd: S,
    k: &[E],
    d: usize,
    q: &[f32],
    padded: usize,
    p: &mut [f32],
) {
    assert!(q.len() >= N * padded && p.len() >= N * SEGMENT && k.len() <= SEGMENT * d && d <= padded);
    let mut t = 0;
    for k in k.chunks(4 * d) {
        if k.len() == 4 * d {
            fetch(simd, k);
            let sums = dots::<S, E, N, 4>(simd, k, d, q, padded);
            for i in 0..N {
                let sums = simd.sums([sums[0][i], sums[1][i], sums[2][i], sums[3][i]]);
                p[i * SEGMENT + t..][..4].copy_from_slice(&sums);
            }
            t += 4;
            continue;
        }
        for k in k.chunks_exact(d) {
            let [sums] = dots::<S, E, N, 1>(simd, k, d, q, padded);
            for (i, sum) in sums.into_iter().enumerate() {
                p[i * SEGMENT + t] = simd.sum(sum);
            }
            t += 1;
        }
    }
}

/// Prefetches the memory [`AHEAD`] bytes after `x`.
#[inline(always)]
fn fetch<S: Simd, E>(simd: S, x: &[E]) {
    for line in (0..size_of_val(x)).step_by(64) {
        simd.fetch(x.as_ptr().wrapping_byte_add(AHEAD + line));
    }
}

/// Products of `T` keys with `N` queries, still to be summed over their lanes.
#[inline(always)]
fn dots<S: Simd, E: Elem, const N: usize, const T: usize>(
    simd: S,
    k: &[E],
    d: usize,
    q: &[f32],
    padded: usize,
) -> [[S::F; N]; T] {
    // No closures: they would be compiled apart, without the instruction set.
    let mut sums = [[simd.splat(0.0); N]; T];
    let whole = d / S::LANES * S::LANES;
    for e in (0..whole).step_by(S::LANES) {
        // SAFETY: each key and query has LANES elements from `e` on.
        unsafe { add_products::<S, E, N, T>(simd, (k, d), (e, S::LANES), q, padded, &mut sums) };
    }
    if whole < d {
        // SAFETY: the rest of a key; `padded` is a multiple of the lanes, and so a query has LANES elements.
        unsafe { add_products::<S, E, N, T>(simd, (k, d), (whole, d - whole), q, padded, &mut sums) };
    }
    sums
}

/// One vector of each product.
///
/// # Safety
/// Each of `T` keys must have `n` elements from `e` on, and each of `N` queries LANES.
#[inline(always)]
unsafe fn add_products<S: Simd, E: Elem, const N: usize, const T: usize>(
    simd: S,
    (k, d): (&[E], usize),
    (e, n): (usize, usize),
    q: &[f32],
    padded: usize,
    sums: &mut [[S::F; N]; T],
) {
    for (t, sums) in sums.iter_mut().enumerate() {
        // SAFETY: this function's contract.
        unsafe {
            let k = load_part(simd, k.as_ptr().add(t * d + e), n);
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = simd.fma(k, simd.load(q.as_ptr().add(i * padded + e)), *sum);
            }
        }
    }
}

/// Turns the scores of `slots` into probabilities relative to their maximum; returns it and their sum. `p` has
/// [`SEGMENT`] elements; those past the slots become 0.
#[inline(always)]
fn softmax_segment<S: Simd>(simd: S, p: &mut [f32], slots: &Range<usize>, seen: Range<usize>) -> (f32, f32) {
    let n = slots.len();
    let (from, to) =
        (seen.start.saturating_sub(slots.start).min(n), seen.end.saturating_sub(slots.start).min(n));
    p[..from].fill(UNSEEN);
    p[to.max(from)..].fill(UNSEEN);
    let p = p[..SEGMENT].as_mut_ptr();
    let end = n.next_multiple_of(S::LANES);
    // SAFETY: `end` is at most SEGMENT, a multiple of the lanes.
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

/// o\[i\] = Σ_t p\[i, t\] · v\[t\] for `J` vectors from element `e` on.
#[inline(always)]
fn values<S: Simd, E: Elem, const N: usize, const J: usize>(
    simd: S,
    v: &[E],
    d: usize,
    e: usize,
    p: &[f32],
    o: &mut [f32],
    padded: usize,
) {
    let sums = if d - e >= J * S::LANES {
        weighted::<S, E, N, J, true>(simd, v, d, e, p)
    } else {
        weighted::<S, E, N, J, false>(simd, v, d, e, p)
    };
    for (o, sums) in o.chunks_exact_mut(padded).zip(sums) {
        for (o, sum) in o[e..].chunks_exact_mut(S::LANES).zip(sums) {
            // SAFETY: a chunk has LANES elements.
            unsafe { simd.store(o.as_mut_ptr(), sum) };
        }
    }
}

/// Σ_t p\[i, t\] · v\[t\] for `J` vectors from element `e` on; all of them are `WHOLE`, or some end before.
#[inline(always)]
fn weighted<S: Simd, E: Elem, const N: usize, const J: usize, const WHOLE: bool>(
    simd: S,
    v: &[E],
    d: usize,
    e: usize,
    p: &[f32],
) -> [[S::F; J]; N] {
    let mut sums = [[simd.splat(0.0); J]; N];
    for (t, v) in v.chunks_exact(d).enumerate() {
        if e == 0 {
            fetch(simd, v);
        }
        for j in 0..J {
            let at = e + j * S::LANES;
            let n = if WHOLE { S::LANES } else { d.saturating_sub(at) };
            // SAFETY: the count stays within the value; where it is 0 nothing is read.
            let v = unsafe { load_part(simd, v.as_ptr().wrapping_add(at), n) };
            for (i, sums) in sums.iter_mut().enumerate() {
                sums[j] = simd.fma(v, simd.splat(p[i * SEGMENT + t]), sums[j]);
            }
        }
    }
    sums
}
