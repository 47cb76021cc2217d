//! Online softmax over tiles of keys.
//!
//! A row takes in the tiles that it sees, aligned to absolute slots, in ascending order. A tile that it does not see leaves
//! its maximum, sum and values unchanged to the bit. So a row's result does not depend on the rows beside it.

use std::f32::consts::LOG2_E;
use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::flash_i16::{self, IntegerBuffers, PackedTiles};
use super::input::Attention;
use super::key_tiles;
use super::partial_output::{LOWEST, PartialOutput};
use super::query_blocks::{QueryBlock, SEGMENT};
use super::shape::STATS;
use super::workspace::{BUFFERS, split_off_front};
use crate::disjoint::DisjointMut;
use crate::scratch;
#[cfg(target_arch = "x86_64")]
use crate::simd::features::Avx2;
use crate::simd::{Elem, KEYS, Kernel, STRIP, Simd, Tile, load_part, strip_width};

/// Keys and values, kv_heads × capacity × head_dim.
pub(super) struct Stored<'a, E> {
    pub(super) k: &'a [E],
    pub(super) v: &'a [E],
    /// Their tiles of integers, where these are packed already.
    #[cfg(target_arch = "x86_64")]
    pub(super) packed: Option<PackedTiles<'a>>,
}

/// Buffers of one block, by the numbers that its tiles of keys hold.
enum Buffers<'a> {
    Floats(FloatBuffers<'a>),
    #[cfg(target_arch = "x86_64")]
    Integers(Avx2, IntegerBuffers<'a>),
}

impl<'a> Buffers<'a> {
    /// Floats that they take.
    #[inline(always)]
    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(unused_variables, reason = "AVX2 alone has tiles of integers")
    )]
    fn len<S: Simd>(simd: S, a: &Attention, block: &QueryBlock) -> usize {
        #[cfg(target_arch = "x86_64")]
        if flash_i16::token(simd, a).is_some() {
            return IntegerBuffers::len(block);
        }
        FloatBuffers::len(block)
    }

    /// Cuts the buffers off `floats` and packs the queries.
    #[inline(always)]
    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(unused_variables, reason = "AVX2 alone has tiles of integers")
    )]
    fn new<S: Simd>(simd: S, a: &Attention, block: &QueryBlock, floats: &mut &'a mut [f32]) -> Buffers<'a> {
        #[cfg(target_arch = "x86_64")]
        if let Some(avx2) = flash_i16::token(simd, a) {
            return Buffers::Integers(avx2, IntegerBuffers::new(avx2, a, block, floats));
        }
        Buffers::Floats(FloatBuffers::new(a, block, floats))
    }

    /// Attention of a block over the keys of one segment, from scratch.
    #[inline(always)]
    fn attend_segment<S: Simd, E: Elem>(
        &mut self,
        simd: S,
        a: &Attention,
        stored: &Stored<E>,
        block: &QueryBlock,
        segment: usize,
        part: &mut PartialOutput,
    ) {
        part.clear();
        match self {
            Buffers::Floats(buffers) => attend_segment(simd, a, stored, block, segment, buffers, part),
            #[cfg(target_arch = "x86_64")]
            Buffers::Integers(avx2, buffers) => {
                let Stored { k, v, packed } = *stored;
                buffers.attend_segment(*avx2, a, (k, v, packed), block, segment, (part, None));
            }
        }
    }
}

/// Buffers of one block whose tiles of keys are of `f32`.
struct FloatBuffers<'a> {
    /// Packed queries, in base-2 scores' scale.
    q: &'a mut [f32],
    /// Keys, head_dim × 64.
    k: &'a mut [f32],
    /// Converted keys or values, 64 × padded.
    rows: &'a mut [f32],
    /// Scores, then probabilities; 12 × 64.
    p: &'a mut [f32],
    /// Sums lane by lane; strips × 12 × 16.
    lanes: &'a mut [f32],
}

impl<'a> FloatBuffers<'a> {
    fn len(block: &QueryBlock) -> usize {
        let shape = block.shape;
        block.strips() * STRIP * (shape.head_dim + STATS) + KEYS * (shape.head_dim + shape.padded + STRIP)
    }

    /// Cuts the buffers off `floats` and packs the queries.
    fn new(a: &Attention, block: &QueryBlock, floats: &mut &'a mut [f32]) -> FloatBuffers<'a> {
        let (shape, strips) = (block.shape, block.strips());
        // Tiles first, while the memory is aligned to cache lines.
        let p = split_off_front(floats, STRIP * KEYS);
        let rows = split_off_front(floats, KEYS * shape.padded);
        let k = split_off_front(floats, shape.head_dim * KEYS);
        let lanes = split_off_front(floats, strips * STRIP * STATS);
        let q = split_off_front(floats, strips * STRIP * shape.head_dim);
        block.pack(a, a.scale * LOG2_E, q);
        FloatBuffers { q, k, rows, p, lanes }
    }
}

/// Computes a block over all its keys.
pub(super) struct FlashBlock<'a, E> {
    pub(super) a: &'a Attention<'a>,
    pub(super) stored: &'a Stored<'a, E>,
    pub(super) block: QueryBlock,
    pub(super) out: &'a DisjointMut<'a, f32>,
    pub(super) lse: Option<&'a DisjointMut<'a, f32>>,
}

impl<E: Elem> Kernel for FlashBlock<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let FlashBlock { a, stored, block, out, lse } = self;
        let size = block.shape.part_len(block.queries());
        let mut scratch = scratch::borrow(&BUFFERS, Buffers::len(simd, a, &block) + 2 * size);
        let mut floats = scratch.as_f32_mut();
        let mut work = Buffers::new(simd, a, &block, &mut floats);
        let mut total = PartialOutput::new(&block, split_off_front(&mut floats, size));
        let mut part = PartialOutput::new(&block, split_off_front(&mut floats, size));
        total.clear();
        let span = block.span(a.visible, 0..block.queries());
        for segment in span.start / SEGMENT..span.end.div_ceil(SEGMENT) {
            work.attend_segment(simd, a, stored, &block, segment, &mut part);
            total.merge(simd, part.o, part.m, part.l, block.shape.padded);
        }
        total.finish(simd, &block, out, lse);
    }
}

/// Computes a block over one segment of the keys.
pub(super) struct FlashSegment<'a, E> {
    pub(super) a: &'a Attention<'a>,
    pub(super) stored: &'a Stored<'a, E>,
    pub(super) block: QueryBlock,
    pub(super) segment: usize,
    /// The [`PartialOutput`].
    pub(super) part: &'a mut [f32],
}

impl<E: Elem> Kernel for FlashSegment<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let FlashSegment { a, stored, block, segment, part } = self;
        let mut scratch = scratch::borrow(&BUFFERS, Buffers::len(simd, a, &block));
        let mut floats = scratch.as_f32_mut();
        let mut part = PartialOutput::new(&block, part);
        Buffers::new(simd, a, &block, &mut floats)
            .attend_segment(simd, a, stored, &block, segment, &mut part);
    }
}

/// Attention of a block over the keys of one segment.
#[inline(always)]
fn attend_segment<S: Simd, E: Elem>(
    simd: S,
    a: &Attention,
    stored: &Stored<E>,
    block: &QueryBlock,
    segment: usize,
    work: &mut FloatBuffers,
    part: &mut PartialOutput,
) {
    let shape = block.shape;
    work.lanes.fill(0.0);
    let span = block.span(a.visible, 0..block.queries());
    let (from, to) = (span.start.max(segment * SEGMENT), span.end.min((segment + 1) * SEGMENT));
    for first in (from / KEYS * KEYS..to).step_by(KEYS) {
        let slots = first.max(from)..(first + KEYS).min(to);
        key_tiles::rows(
            simd,
            shape.head(stored.k, block.g),
            shape.head_dim,
            first,
            slots.clone(),
            shape.padded,
            work.rows,
        );
        key_tiles::transpose(simd, work.rows, shape.padded, shape.head_dim, work.k);
        key_tiles::rows(
            simd,
            shape.head(stored.v, block.g),
            shape.head_dim,
            first,
            slots,
            shape.padded,
            work.rows,
        );
        for s in 0..block.strips() {
            let seen = block.span(a.visible, block.strip(s));
            if seen.start < first + KEYS && first < seen.end {
                attend_key_tile(simd, a, block, s, first, work, part);
            }
        }
    }
    for i in 0..block.queries() {
        let lanes = &work.lanes[i * STATS..(i + 1) * STATS];
        // SAFETY: `lanes` has at least LANES floats.
        part.l[i / STRIP * STATS + i % STRIP] = simd.sum(unsafe { simd.load(lanes.as_ptr()) });
    }
}

/// Computes one strip over one tile of keys.
#[inline(always)]
fn attend_key_tile<S: Simd>(
    simd: S,
    a: &Attention,
    block: &QueryBlock,
    s: usize,
    first: usize,
    work: &mut FloatBuffers,
    part: &mut PartialOutput,
) {
    let (d, padded) = (block.shape.head_dim, block.shape.padded);
    let queries = block.strip(s);
    let width = strip_width(queries.len());
    let scores = Tile {
        k: d,
        w: work.k[..d * KEYS].as_ptr().cast(),
        ws: KEYS,
        ps: 32,
        x: work.q[s * STRIP * d..][..width * d].as_ptr().cast(),
        ks: width,
        c: work.p[..width * KEYS].as_mut_ptr(),
        cs: KEYS,
        cps: 32,
        cols: KEYS,
        add: false,
    };
    // SAFETY: the slices above have the lengths the tile needs.
    unsafe { simd.strip::<1>(width, &scores) };
    softmax_tile(simd, a, block, queries, first, work, part);
    let values = Tile {
        k: KEYS,
        w: work.rows[..KEYS * padded].as_ptr().cast(),
        ws: padded,
        ps: 32,
        x: work.p[..width * KEYS].as_ptr().cast(),
        ks: 1,
        c: part.o[s * STRIP * padded..][..width * padded].as_mut_ptr(),
        cs: padded,
        cps: 32,
        cols: padded,
        add: true,
    };
    // SAFETY: the slices above have the lengths the tile needs.
    unsafe { simd.strip::<KEYS>(width, &values) };
}

/// Turns a strip's scores into probabilities relative to the new maxima, and rescales the sums so far to them.
#[inline(always)]
fn softmax_tile<S: Simd>(
    simd: S,
    a: &Attention,
    block: &QueryBlock,
    queries: Range<usize>,
    first: usize,
    work: &mut FloatBuffers,
    part: &mut PartialOutput,
) {
    let padded = block.shape.padded;
    let stats = queries.start / STRIP * STATS;
    let old = &mut part.m[stats..stats + STATS];
    let mut new = [LOWEST; STATS];
    for (r, i) in queries.clone().enumerate() {
        let scores = &mut work.p[r * KEYS..(r + 1) * KEYS];
        let (start, end) = a.visible[block.row(i)];
        let seen = (start as usize).saturating_sub(first)..(end as usize).saturating_sub(first);
        new[r] = old[r].max(largest(simd, scores, seen));
    }
    let mut change = [0.0; STATS];
    for i in (0..STATS).step_by(S::LANES) {
        // SAFETY: both have STATS floats.
        unsafe {
            let change_of =
                simd.exp2(simd.sub(simd.load(old.as_ptr().add(i)), simd.load(new.as_ptr().add(i))));
            simd.store(change.as_mut_ptr().add(i), change_of);
        }
    }
    old.copy_from_slice(&new);
    for (r, i) in queries.enumerate() {
        let p = work.p[r * KEYS..(r + 1) * KEYS].as_mut_ptr();
        let lanes = work.lanes[i * STATS..(i + 1) * STATS].as_mut_ptr();
        let (max, change) = (simd.splat(new[r]), simd.splat(change[r]));
        // SAFETY: `p` has KEYS floats, `lanes` at least LANES.
        unsafe {
            let mut sum = simd.mul(simd.load(lanes), change);
            for j in (0..KEYS).step_by(S::LANES) {
                let v = simd.exp2(simd.sub(simd.load(p.add(j)), max));
                simd.store(p.add(j), v);
                sum = simd.add(sum, v);
            }
            simd.store(lanes, sum);
        }
    }
    for (r, change) in change.iter().enumerate().take(STRIP) {
        if *change != 1.0 {
            let o = &mut part.o[(stats / STATS * STRIP + r) * padded..][..padded];
            for j in (0..padded).step_by(S::LANES) {
                // SAFETY: `padded` is a multiple of the lanes.
                unsafe {
                    let v = simd.mul(load_part(simd, o.as_ptr().add(j), padded - j), simd.splat(*change));
                    simd.store(o.as_mut_ptr().add(j), v);
                }
            }
        }
    }
}

/// Masks a row's scores that are not `seen` with −∞, then returns the largest.
#[inline(always)]
pub(super) fn largest<S: Simd>(simd: S, scores: &mut [f32], seen: Range<usize>) -> f32 {
    mask(simd, scores, seen);
    let p = scores[..KEYS].as_ptr();
    // SAFETY: `j` stays below KEYS, a multiple of the lanes.
    unsafe {
        let mut max = simd.load(p);
        for j in (S::LANES..KEYS).step_by(S::LANES) {
            max = simd.max(max, simd.load(p.add(j)));
        }
        simd.largest(max)
    }
}

/// Masks a row's scores that are not `seen` with −∞.
#[inline(always)]
pub(super) fn mask<S: Simd>(simd: S, scores: &mut [f32], seen: Range<usize>) {
    let p = scores[..KEYS].as_mut_ptr();
    if seen.start > 0 || seen.end < KEYS {
        for j in (0..KEYS).step_by(S::LANES) {
            let (lo, hi) =
                (seen.start.saturating_sub(j).min(S::LANES), seen.end.saturating_sub(j).min(S::LANES));
            // SAFETY: `j` stays below KEYS, a multiple of the lanes.
            unsafe { simd.store(p.add(j), simd.keep(simd.load(p.add(j)), lo, hi)) };
        }
    }
}
