//! Online softmax over tiles of keys.
//!
//! A row goes through the tiles it sees, aligned to absolute slots, in ascending order; a tile that it does not
//! see leaves its maximum, sum and values as they are, to the bit. So its result does not depend on the rows
//! that share the tiles with it.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use super::queries::{Block, SEGMENT, STATS, cut};
use super::{Attention, WORK, keys};
use crate::scratch;
use crate::shared::Shared;
use crate::simd::{Elem, KEYS, Kernel, STRIP, Simd, Tile, load_part, store_part, strip_width};

/// The maximum before any score: finite, so that differences stay numbers.
const LOWEST: f32 = -1e30;

/// A result over some of the keys, in the base-2 scores' scale.
struct Part<'a> {
    /// Σ 2^(score − m) · value; strips × 12 × padded.
    o: &'a mut [f32],
    /// Maxima; strips × 16.
    m: &'a mut [f32],
    /// Σ 2^(score − m); strips × 16.
    l: &'a mut [f32],
}

impl<'a> Part<'a> {
    fn new(block: &Block, mut floats: &'a mut [f32]) -> Part<'a> {
        let strips = block.strips();
        let o = cut(&mut floats, strips * STRIP * block.shape.padded);
        Part { o, m: cut(&mut floats, strips * STATS), l: cut(&mut floats, strips * STATS) }
    }

    fn clear(&mut self) {
        self.o.fill(0.0);
        self.m.fill(LOWEST);
        self.l.fill(0.0);
    }

    /// Takes in the result over other keys.
    #[inline(always)]
    fn merge<S: Simd>(&mut self, o: &[f32], m: &[f32], l: &[f32], padded: usize) {
        for s in 0..self.m.len() / STATS {
            let (mut old, mut new) = ([0.0; STATS], [0.0; STATS]);
            for i in (0..STATS).step_by(S::LANES) {
                let at = s * STATS + i;
                // SAFETY: all have STATS floats for strip `s`.
                unsafe {
                    let (ma, mb) = (S::load(self.m.as_ptr().add(at)), S::load(m.as_ptr().add(at)));
                    let max = S::max(ma, mb);
                    let (a, b) = (S::exp2(S::sub(ma, max)), S::exp2(S::sub(mb, max)));
                    S::store(old.as_mut_ptr().add(i), a);
                    S::store(new.as_mut_ptr().add(i), b);
                    S::store(self.m.as_mut_ptr().add(at), max);
                    let sum = S::mul(S::load(l.as_ptr().add(at)), b);
                    let sum = S::fma(S::load(self.l.as_ptr().add(at)), a, sum);
                    S::store(self.l.as_mut_ptr().add(at), sum);
                }
            }
            for r in 0..STRIP {
                let row = (s * STRIP + r) * padded;
                let (to, from) = (&mut self.o[row..row + padded], &o[row..row + padded]);
                for i in (0..padded).step_by(S::LANES) {
                    // SAFETY: `padded` is a multiple of the lanes.
                    unsafe {
                        let v = S::mul(S::load(from.as_ptr().add(i)), S::splat(new[r]));
                        let v = S::fma(S::load(to.as_ptr().add(i)), S::splat(old[r]), v);
                        S::store(to.as_mut_ptr().add(i), v);
                    }
                }
            }
        }
    }

    /// Writes the normalised rows.
    #[inline(always)]
    fn finish<S: Simd>(&self, block: &Block, out: &Shared<f32>, lse: Option<&Shared<f32>>) {
        let (d, padded) = (block.shape.head_dim, block.shape.padded);
        for i in 0..block.queries() {
            let (m, l) = (self.m[i / STRIP * STATS + i % STRIP], self.l[i / STRIP * STATS + i % STRIP]);
            if let Some(lse) = lse {
                // SAFETY: the query rows of a block belong to one task.
                let lse = unsafe { lse.part(block.index(i)..block.index(i) + 1) };
                lse[0] = (m + l.log2()) / LOG2_E;
            }
            let scale = S::splat(1.0 / l);
            let o = &self.o[i * padded..(i + 1) * padded];
            let at = block.at(i);
            // SAFETY: the query rows of a block belong to one task.
            let to = unsafe { out.part(at..at + d) };
            for e in (0..d).step_by(S::LANES) {
                // SAFETY: `e` stays below `d` <= `padded`, a multiple of the lanes.
                unsafe {
                    let v = S::mul(S::load(o.as_ptr().add(e)), scale);
                    store_part::<S, f32>(to.as_mut_ptr().add(e), v, d - e);
                }
            }
        }
    }
}

/// Buffers of one block.
struct Work<'a> {
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

impl<'a> Work<'a> {
    fn len(block: &Block) -> usize {
        let shape = block.shape;
        block.strips() * STRIP * (shape.head_dim + STATS) + KEYS * (shape.head_dim + shape.padded + STRIP)
    }

    /// Cuts the buffers off `floats` and packs the queries.
    fn new(a: &Attention, block: &Block, floats: &mut &'a mut [f32]) -> Work<'a> {
        let (shape, strips) = (block.shape, block.strips());
        // Tiles first, while the memory is aligned to cache lines.
        let p = cut(floats, STRIP * KEYS);
        let rows = cut(floats, KEYS * shape.padded);
        let k = cut(floats, shape.head_dim * KEYS);
        let lanes = cut(floats, strips * STRIP * STATS);
        let q = cut(floats, strips * STRIP * shape.head_dim);
        block.pack(a, a.scale * LOG2_E, q);
        Work { q, k, rows, p, lanes }
    }
}

/// A block over all its keys.
pub(super) struct Whole<'a, E> {
    pub(super) a: &'a Attention<'a>,
    pub(super) k: &'a [E],
    pub(super) v: &'a [E],
    pub(super) block: Block,
    pub(super) out: &'a Shared<'a, f32>,
    pub(super) lse: Option<&'a Shared<'a, f32>>,
}

impl<E: Elem> Kernel for Whole<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Whole { a, k, v, block, out, lse } = self;
        let size = block.shape.part_len(block.queries());
        let mut scratch = scratch::lend(&WORK, Work::len(&block) + 2 * size);
        let mut floats = scratch.words.floats_mut();
        let mut work = Work::new(a, &block, &mut floats);
        let mut total = Part::new(&block, cut(&mut floats, size));
        let mut part = Part::new(&block, cut(&mut floats, size));
        total.clear();
        let span = block.span(a.visible, 0..block.queries());
        for segment in span.start / SEGMENT..span.end.div_ceil(SEGMENT) {
            attend_segment::<S, E>(a, k, v, &block, segment, &mut work, &mut part);
            total.merge::<S>(part.o, part.m, part.l, block.shape.padded);
        }
        total.finish::<S>(&block, out, lse);
    }
}

/// A block over one segment of the keys.
pub(super) struct Piece<'a, E> {
    pub(super) a: &'a Attention<'a>,
    pub(super) k: &'a [E],
    pub(super) v: &'a [E],
    pub(super) block: Block,
    pub(super) segment: usize,
    /// The result.
    pub(super) part: &'a mut [f32],
}

impl<E: Elem> Kernel for Piece<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Piece { a, k, v, block, segment, part } = self;
        let mut scratch = scratch::lend(&WORK, Work::len(&block));
        let mut floats = scratch.words.floats_mut();
        let mut work = Work::new(a, &block, &mut floats);
        attend_segment::<S, E>(a, k, v, &block, segment, &mut work, &mut Part::new(&block, part));
    }
}

/// The union of a block's segments.
pub(super) struct Merge<'a> {
    /// One part for each segment, `size` floats apart.
    pub(super) parts: &'a [f32],
    pub(super) size: usize,
    pub(super) block: Block,
    pub(super) out: &'a Shared<'a, f32>,
    pub(super) lse: Option<&'a Shared<'a, f32>>,
}

impl Kernel for Merge<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Merge { parts, size, block, out, lse } = self;
        let len = block.shape.part_len(block.queries());
        let mut scratch = scratch::lend(&WORK, len);
        let mut total = Part::new(&block, scratch.words.floats_mut());
        total.clear();
        for part in parts.chunks_exact(size) {
            let (o, stats) = part[..len].split_at(total.o.len());
            let (m, l) = stats.split_at(total.m.len());
            total.merge::<S>(o, m, l, block.shape.padded);
        }
        total.finish::<S>(&block, out, lse);
    }
}

/// Attention of a block over the keys of one segment, from scratch.
#[inline(always)]
fn attend_segment<S: Simd, E: Elem>(
    a: &Attention,
    k: &[E],
    v: &[E],
    block: &Block,
    segment: usize,
    work: &mut Work,
    part: &mut Part,
) {
    let shape = block.shape;
    part.clear();
    work.lanes.fill(0.0);
    let span = block.span(a.visible, 0..block.queries());
    let (from, to) = (span.start.max(segment * SEGMENT), span.end.min((segment + 1) * SEGMENT));
    for first in (from / KEYS * KEYS..to).step_by(KEYS) {
        let slots = first.max(from)..(first + KEYS).min(to);
        keys::rows::<S, E>(
            shape.head(k, block.g),
            shape.head_dim,
            first,
            slots.clone(),
            shape.padded,
            work.rows,
        );
        keys::transpose::<S>(work.rows, shape.padded, shape.head_dim, work.k);
        keys::rows::<S, E>(shape.head(v, block.g), shape.head_dim, first, slots, shape.padded, work.rows);
        for s in 0..block.strips() {
            let seen = block.span(a.visible, block.strip(s));
            if seen.start < first + KEYS && first < seen.end {
                attend_tile::<S>(a, block, s, first, work, part);
            }
        }
    }
    for i in 0..block.queries() {
        let lanes = &work.lanes[i * STATS..(i + 1) * STATS];
        // SAFETY: `lanes` has at least LANES floats.
        part.l[i / STRIP * STATS + i % STRIP] = S::sum(unsafe { S::load(lanes.as_ptr()) });
    }
}

/// One strip over one tile of keys.
#[inline(always)]
fn attend_tile<S: Simd>(
    a: &Attention,
    block: &Block,
    s: usize,
    first: usize,
    work: &mut Work,
    part: &mut Part,
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
    unsafe { S::strip::<1>(width, &scores) };
    soften::<S>(a, block, queries, first, work, part);
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
    // SAFETY: as above.
    unsafe { S::strip::<KEYS>(width, &values) };
}

/// Turns a strip's scores into probabilities relative to the maximum so far, and what was summed before with them.
#[inline(always)]
fn soften<S: Simd>(
    a: &Attention,
    block: &Block,
    queries: Range<usize>,
    first: usize,
    work: &mut Work,
    part: &mut Part,
) {
    let padded = block.shape.padded;
    let stats = queries.start / STRIP * STATS;
    let old = &mut part.m[stats..stats + STATS];
    let mut new = [LOWEST; STATS];
    for (r, i) in queries.clone().enumerate() {
        let scores = &mut work.p[r * KEYS..(r + 1) * KEYS];
        let (start, end) = a.visible[block.row(i)];
        let seen = (start as usize).saturating_sub(first)..(end as usize).saturating_sub(first);
        new[r] = old[r].max(largest::<S>(scores, seen));
    }
    let mut change = [0.0; STATS];
    for i in (0..STATS).step_by(S::LANES) {
        // SAFETY: both have STATS floats.
        unsafe {
            let change_of = S::exp2(S::sub(S::load(old.as_ptr().add(i)), S::load(new.as_ptr().add(i))));
            S::store(change.as_mut_ptr().add(i), change_of);
        }
    }
    old.copy_from_slice(&new);
    for (r, i) in queries.enumerate() {
        let p = work.p[r * KEYS..(r + 1) * KEYS].as_mut_ptr();
        let lanes = work.lanes[i * STATS..(i + 1) * STATS].as_mut_ptr();
        let (max, change) = (S::splat(new[r]), S::splat(change[r]));
        // SAFETY: `p` has KEYS floats, `lanes` at least LANES.
        unsafe {
            let mut sum = S::mul(S::load(lanes), change);
            for j in (0..KEYS).step_by(S::LANES) {
                let v = S::exp2(S::sub(S::load(p.add(j)), max));
                S::store(p.add(j), v);
                sum = S::add(sum, v);
            }
            S::store(lanes, sum);
        }
    }
    for (r, change) in change.iter().enumerate().take(STRIP) {
        if *change != 1.0 {
            let o = &mut part.o[(stats / STATS * STRIP + r) * padded..][..padded];
            for j in (0..padded).step_by(S::LANES) {
                // SAFETY: `padded` is a multiple of the lanes.
                unsafe {
                    let v = S::mul(load_part::<S, f32>(o.as_ptr().add(j), padded - j), S::splat(*change));
                    S::store(o.as_mut_ptr().add(j), v);
                }
            }
        }
    }
}

/// The largest of a row's scores; those that are not `seen` become −∞ first.
#[inline(always)]
pub(super) fn largest<S: Simd>(scores: &mut [f32], seen: Range<usize>) -> f32 {
    hide::<S>(scores, seen);
    let p = scores[..KEYS].as_ptr();
    // SAFETY: `j` stays below KEYS, a multiple of the lanes.
    unsafe {
        let mut max = S::load(p);
        for j in (S::LANES..KEYS).step_by(S::LANES) {
            max = S::max(max, S::load(p.add(j)));
        }
        S::largest(max)
    }
}

/// Turns those of a row's scores that are not `seen` into −∞.
#[inline(always)]
pub(super) fn hide<S: Simd>(scores: &mut [f32], seen: Range<usize>) {
    let p = scores[..KEYS].as_mut_ptr();
    if seen.start > 0 || seen.end < KEYS {
        for j in (0..KEYS).step_by(S::LANES) {
            let (lo, hi) =
                (seen.start.saturating_sub(j).min(S::LANES), seen.end.saturating_sub(j).min(S::LANES));
            // SAFETY: `j` stays below KEYS, a multiple of the lanes.
            unsafe { S::store(p.add(j), S::keep(S::load(p.add(j)), lo, hi)) };
        }
    }
}
