//! Attention of a few queries over one segment of the keys, as in a step of decoding. Keys and values are read in the order in which they
//! are stored, and nothing is transposed. Sums are taken in another order than in [`super::flash`].

use std::f32::consts::LOG2_E;

use super::decode_part::{
    AHEAD, CHUNK, DecodePart, KEPT, KeptWeights, SegmentSlots, ahead, softmax_segment, width,
};
use super::input::Attention;
use super::query_blocks::{QueryBlock, SEGMENT};
use super::workspace::{BUFFERS, split_off_front};
use crate::prefetch;
use crate::scratch;
use crate::simd::{Elem, Kernel, Simd, load_part};

/// Whether there are sixteen registers, and not 32. Sums that do not all fit go through memory at each step, which takes a third longer.
const fn few_registers<S: Simd>() -> bool {
    S::LANES < 16
}

/// Computes a block of up to [`QUERIES`](super::decode_part::QUERIES) queries over one segment of the keys.
pub(super) struct DecodeSegment<'a, E> {
    pub(super) a: &'a Attention<'a>,
    pub(super) k: &'a [E],
    pub(super) v: &'a [E],
    pub(super) block: QueryBlock,
    pub(super) segment: usize,
    /// The result, a [`DecodePart`].
    pub(super) part: &'a mut [f32],
}

/// Computes the weights that a block of queries gives to one segment of the keys, in `f32`.
pub(super) struct DecodeWeights<'a, E> {
    pub(super) a: &'a Attention<'a>,
    pub(super) k: &'a [E],
    pub(super) block: QueryBlock,
    pub(super) segment: usize,
    /// The result, [`KeptWeights`](super::decode_part::KeptWeights).
    pub(super) kept: &'a mut [f32],
}

impl<E: Elem> Kernel for DecodeWeights<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let DecodeWeights { a, k, block, segment, kept } = self;
        let mut kept = KeptWeights::new(kept);
        let Some(slots) = SegmentSlots::new(a, &block, segment) else { return kept.clear() };
        let mut scratch = scratch::borrow(&BUFFERS, block.queries() * block.shape.padded);
        weigh(simd, a, k, &block, &slots, scratch.as_f32_mut(), &mut kept);
    }
}

impl<E: Elem> Kernel for DecodeSegment<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        match self.block.queries() {
            1 => self.segment::<S, 1, 4>(simd),
            2 => self.segment::<S, 2, 4>(simd),
            3 if few_registers::<S>() => self.segment::<S, 3, 2>(simd),
            3 => self.segment::<S, 3, 4>(simd),
            4 if few_registers::<S>() => self.segment::<S, 4, 2>(simd),
            4 => self.segment::<S, 4, 4>(simd),
            5 | 6 if few_registers::<S>() => self.segment::<S, 6, 1>(simd),
            5 | 6 => self.segment::<S, 6, 2>(simd),
            _ if few_registers::<S>() => self.segment::<S, 8, 1>(simd),
            _ => self.segment::<S, 8, 2>(simd),
        }
    }
}

impl<E: Elem> DecodeSegment<'_, E> {
    /// `N` queries, those past the block's zero; `J` vectors of values at a time.
    #[inline(always)]
    fn segment<S: Simd, const N: usize, const J: usize>(self, simd: S) {
        let DecodeSegment { a, k, v, block, segment, part } = self;
        let (shape, n, width) = (block.shape, block.queries(), width(&block));
        let d = shape.head_dim;
        let mut part = DecodePart::new(&block, part);
        let Some(slots) = SegmentSlots::new(a, &block, segment) else { return part.clear() };
        let mut scratch = scratch::borrow(&BUFFERS, KEPT + N * (shape.padded + width));
        let mut floats = scratch.as_f32_mut();
        let mut kept = KeptWeights::new(split_off_front(&mut floats, KEPT));
        weigh(simd, a, k, &block, &slots, split_off_front(&mut floats, N * shape.padded), &mut kept);
        part.max.copy_from_slice(kept.max);
        part.sum.copy_from_slice(kept.sum);
        let (v, p) = (shape.head(v, block.g), &*kept.p);
        let o = split_off_front(&mut floats, N * width);
        o.fill(0.0);
        for from in slots.seen.clone().step_by(CHUNK) {
            let chunk = from..(from + CHUNK).min(slots.seen.end);
            let (v, p) = (&v[chunk.start * d..chunk.end * d], &p[from - slots.first..]);
            for e in (0..d).step_by(J * S::LANES) {
                if d - e >= J * S::LANES {
                    add_values::<S, E, N, J, true>(simd, (v, d), e, p, o, width);
                } else {
                    add_values::<S, E, N, J, false>(simd, (v, d), e, p, o, width);
                }
            }
        }
        part.o.copy_from_slice(&o[..n * width]);
    }
}

/// The weights of a segment's slots; `q` has room for the queries, each padded to a multiple of 16.
#[inline(always)]
fn weigh<S: Simd, E: Elem>(
    simd: S,
    a: &Attention,
    k: &[E],
    block: &QueryBlock,
    slots: &SegmentSlots,
    q: &mut [f32],
    kept: &mut KeptWeights,
) {
    let (shape, n) = (block.shape, block.queries());
    let (d, padded) = (shape.head_dim, shape.padded);
    for (i, q) in q.chunks_exact_mut(padded).enumerate().take(n) {
        let query = &a.q[block.at(i)..][..d];
        q.iter_mut().zip(query).for_each(|(to, q)| *to = q * (a.scale * LOG2_E));
        q[d..].fill(0.0);
    }
    let k = shape.head(k, block.g);
    let at_once = if few_registers::<S>() { 3 } else { 4 };
    let q = q[..n * padded].chunks(at_once * padded);
    for (q, p) in q.zip(kept.p.chunks_mut(at_once * SEGMENT)) {
        match q.len() / padded {
            1 => scores::<S, E, 1>(simd, (k, d), slots, q, padded, p),
            2 => scores::<S, E, 2>(simd, (k, d), slots, q, padded, p),
            3 => scores::<S, E, 3>(simd, (k, d), slots, q, padded, p),
            _ => scores::<S, E, 4>(simd, (k, d), slots, q, padded, p),
        }
    }
    for i in 0..n {
        (kept.max[i], kept.sum[i]) =
            softmax_segment(simd, &mut kept.p[i * SEGMENT..][..SEGMENT], slots, a.visible[block.row(i)]);
    }
}

/// p\[i · SEGMENT + t − first\] = q\[i\] · k\[t\]
#[inline(always)]
fn scores<S: Simd, E: Elem, const N: usize>(
    simd: S,
    (k, d): (&[E], usize),
    slots: &SegmentSlots,
    q: &[f32],
    padded: usize,
    p: &mut [f32],
) {
    assert!(q.len() >= N * padded && p.len() >= N * SEGMENT && k.len() >= slots.seen.end * d && d <= padded);
    for t in (slots.first..slots.seen.end).step_by(4) {
        let mut keys = [k.as_ptr(); 4];
        for (i, key) in keys.iter_mut().enumerate() {
            *key = key.wrapping_add(slots.readable(t + i) * d);
        }
        prefetch::to_read_later(
            k.as_ptr().wrapping_add(t * d).wrapping_byte_add(AHEAD).cast(),
            4 * d * size_of::<E>(),
        );
        let mut sums = [[simd.splat(0.0); 4]; N];
        // SAFETY: keys have `d` elements, and queries `padded`.
        unsafe {
            if few_registers::<S>() && N > 2 {
                let first = dots::<S, E, N, 2>(simd, [keys[0], keys[1]], d, q, padded);
                let second = dots::<S, E, N, 2>(simd, [keys[2], keys[3]], d, q, padded);
                for (i, sums) in sums.iter_mut().enumerate() {
                    *sums = [first[i][0], first[i][1], second[i][0], second[i][1]];
                }
            } else {
                sums = dots::<S, E, N, 4>(simd, keys, d, q, padded);
            }
        }
        for (i, sums) in sums.into_iter().enumerate() {
            p[i * SEGMENT + t - slots.first..][..4].copy_from_slice(&simd.sums(sums));
        }
    }
}

/// Products of `N` queries with `T` keys, still to be summed over their lanes.
///
/// # Safety
/// Keys must have `d` elements, and queries `padded`, a multiple of the lanes.
#[inline(always)]
unsafe fn dots<S: Simd, E: Elem, const N: usize, const T: usize>(
    simd: S,
    keys: [*const E; T],
    d: usize,
    q: &[f32],
    padded: usize,
) -> [[S::F; T]; N] {
    // No closures: they would be compiled apart, without the instruction set.
    let mut sums = [[simd.splat(0.0); T]; N];
    let whole = d / S::LANES * S::LANES;
    for e in (0..whole).step_by(S::LANES) {
        // SAFETY: each key and query has LANES elements from `e` on.
        unsafe { add_products::<S, E, N, T>(simd, keys, (e, S::LANES), q, padded, &mut sums) };
    }
    if whole < d {
        // SAFETY: the rest of a key; a query has LANES elements from there on.
        unsafe { add_products::<S, E, N, T>(simd, keys, (whole, d - whole), q, padded, &mut sums) };
    }
    sums
}

/// One vector of each product.
///
/// # Safety
/// Each key must have `n` elements from `e` on, and each of `N` queries LANES.
#[inline(always)]
unsafe fn add_products<S: Simd, E: Elem, const N: usize, const T: usize>(
    simd: S,
    keys: [*const E; T],
    (e, n): (usize, usize),
    q: &[f32],
    padded: usize,
    sums: &mut [[S::F; T]; N],
) {
    for (t, key) in keys.into_iter().enumerate() {
        // SAFETY: this function's contract.
        unsafe {
            let k = load_part(simd, key.add(e), n);
            for (i, sums) in sums.iter_mut().enumerate() {
                sums[t] = simd.fma(k, simd.load(q.as_ptr().add(i * padded + e)), sums[t]);
            }
        }
    }
}

/// o\[i\] += Σ_t p\[i, t\] · v\[t\] for `J` vectors from element `e` on; all of them are `WHOLE`, or some end before.
#[inline(always)]
fn add_values<S: Simd, E: Elem, const N: usize, const J: usize, const WHOLE: bool>(
    simd: S,
    (v, d): (&[E], usize),
    e: usize,
    p: &[f32],
    o: &mut [f32],
    width: usize,
) {
    assert!(o.len() >= N * width && p.len() >= (N - 1) * SEGMENT + v.len() / d);
    let mut sums = [[simd.splat(0.0); J]; N];
    let vectors = if WHOLE { J } else { (width - e) / S::LANES };
    for (o, sums) in o.chunks_exact(width).zip(&mut sums) {
        for (o, sum) in o[e..].chunks_exact(S::LANES).zip(sums).take(vectors) {
            // SAFETY: a chunk has LANES elements.
            *sum = unsafe { simd.load(o.as_ptr()) };
        }
    }
    let ahead = ahead(size_of_val(v), e / (J * S::LANES), d.div_ceil(J * S::LANES));
    let mut next = v.as_ptr().wrapping_byte_add(ahead);
    for (t, v) in v.chunks_exact(d).enumerate() {
        prefetch::to_read_later(next.cast(), J * S::LANES * size_of::<E>());
        next = next.wrapping_add(J * S::LANES);
        for j in 0..J {
            let at = e + j * S::LANES;
            let n = if WHOLE { S::LANES } else { d.saturating_sub(at) };
            // SAFETY: the count stays within the value; where it is 0 nothing is read. A query has as many weights as there are values.
            unsafe {
                let v = load_part(simd, v.as_ptr().wrapping_add(at), n);
                for (i, sums) in sums.iter_mut().enumerate() {
                    sums[j] = simd.fma(v, simd.splat(*p.get_unchecked(i * SEGMENT + t)), sums[j]);
                }
            }
        }
    }
    for (o, sums) in o.chunks_exact_mut(width).zip(sums) {
        for (o, sum) in o[e..].chunks_exact_mut(S::LANES).zip(sums).take(vectors) {
            // SAFETY: a chunk has LANES elements.
            unsafe { simd.store(o.as_mut_ptr(), sum) };
        }
    }
}
