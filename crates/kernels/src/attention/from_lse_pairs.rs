//! Weights from given log-sum-exps over tiles of `bf16` pairs, with AMX or `vdpbf16ps`: S = Q · Kᵀ, 32 queries × 32 keys, so that a vector holds one query's scores
//! and the mass of keys is summed lane by lane.
//!
//! The product prepares the exponentials: queries are scaled, and sums start, such that the result is
//! (127 + log₂ of the weight) · 2²³, which as an integer is nearly the bits of the weight: see [`exp2`].

use std::arch::x86_64::*;
use std::f32::consts::LOG2_E;
use std::ops::Range;

use super::attention_mass::write_transposed;
use super::input::Attention;
use super::key_tiles;
use super::query_blocks::QueryBlock;
use super::shape::AttentionShape;
use super::workspace::{BUFFERS, split_off_front};
use crate::disjoint::DisjointMut;
use crate::scratch;
use crate::simd::pair_tiles::{PairTiles, PairUnit, SIDE, Square, TILE};
use crate::simd::{Elem, KEYS, Kernel, Simd};

/// Queries, and keys, of a product.
const WIDE: usize = 2 * SIDE;
/// Its scores.
const SCORES: usize = WIDE * WIDE;
/// Queries of a block, about.
const QUERIES: usize = 256;
/// Bias of a float's exponent.
const BIAS: f32 = 127.0;
/// Unit of the exponent in the bits of a float.
const ONE: f32 = (1 << 23) as f32;

/// Words of the packed keys of 64 slots.
pub(super) fn tile_words(shape: &AttentionShape) -> usize {
    KEYS / SIDE * shape.deep() * TILE
}

/// Rows of a block, whole products if possible. It does not depend on the number of threads.
pub(super) fn block_rows(shape: &AttentionShape) -> usize {
    let unit = shape.whole_rows(WIDE);
    unit * (QUERIES / (unit * shape.group)).max(1)
}

/// At most 64 slots.
pub(super) enum SlotSet<'a> {
    Range(Range<usize>),
    List(&'a [u32]),
}

/// Rounds the keys of a KV head's slots and packs them as two panels: pairs of elements × 32 keys.
pub(super) struct PackKeys<'a, E, T> {
    pub(super) token: T,
    pub(super) shape: AttentionShape,
    /// The head's keys, capacity × head_dim.
    pub(super) k: &'a [E],
    pub(super) slots: SlotSet<'a>,
    pub(super) out: &'a mut [u32],
}

impl<E: Elem, T: PairTiles> Kernel for PackKeys<'_, E, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let PackKeys { token, shape, k, slots, out } = self;
        let (d, deep, padded) = (shape.head_dim, shape.deep(), shape.padded);
        let mut scratch = scratch::borrow(&BUFFERS, KEYS * padded + deep * TILE);
        let mut floats = scratch.as_f32_mut();
        let rows = split_off_front(&mut floats, KEYS * padded);
        let strip: &mut [u32] = bytemuck::cast_slice_mut(split_off_front(&mut floats, deep * TILE));
        match slots {
            SlotSet::Range(slots) => key_tiles::rows(simd, k, d, slots.start, slots, padded, rows),
            SlotSet::List(slots) => key_tiles::gather(simd, k, d, slots, padded, rows),
        }
        for (part, rows) in rows.chunks_exact(SIDE * padded).enumerate() {
            for (t, row) in rows.chunks_exact(padded).enumerate() {
                token.round_row(&row[..d], 1.0, strip, t);
            }
            for (b, square) in strip.chunks_exact(TILE).enumerate() {
                let at = (part / 2 * deep + b) * 2 * TILE + part % 2 * SIDE;
                let out = &mut out[at..][..2 * TILE - SIDE];
                token.transpose(square, out, WIDE);
            }
        }
    }
}

/// Queries of a block as tiles, 32 together.
struct QueryTiles<'a> {
    deep: usize,
    /// Two rows of `deep` tiles each time.
    q: &'a [u32],
    /// Initial values of the sums of products, 32 × 32.
    starts: &'a [f32],
    /// Slots that each query sees: first the starts, then the ends.
    seen: &'a [i32],
}

/// Bits of 32 queries.
#[derive(Clone, Copy)]
struct Visibility {
    any: u32,
    all: u32,
}

impl<'a> QueryTiles<'a> {
    fn count(block: &QueryBlock) -> usize {
        block.queries().div_ceil(WIDE)
    }

    fn words(block: &QueryBlock) -> usize {
        QueryTiles::count(block) * (2 * block.shape.deep() * TILE + SCORES + 2 * WIDE)
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    fn new<T: PairTiles>(
        token: T,
        a: &Attention,
        lse: &[f32],
        block: &QueryBlock,
        floats: &mut &'a mut [f32],
    ) -> QueryTiles<'a> {
        let (deep, count, n) = (block.shape.deep(), QueryTiles::count(block), block.queries());
        let q: &mut [u32] = bytemuck::cast_slice_mut(split_off_front(floats, count * 2 * deep * TILE));
        let starts = split_off_front(floats, count * SCORES);
        let seen: &mut [i32] = bytemuck::cast_slice_mut(split_off_front(floats, count * 2 * WIDE));
        if n < count * WIDE {
            // Queries past the last of the block see no slot.
            q[(count - 1) * 2 * deep * TILE..].fill(0);
            starts[(count - 1) * SCORES..].fill(0.0);
            seen[(count - 1) * 2 * WIDE..].fill(0);
        }
        let AttentionShape { heads, group, head_dim: d, .. } = block.shape;
        let mut i = 0;
        for row in block.rows.clone() {
            let first = row * heads + block.g * group;
            for (head, lse) in lse[first..first + group].iter().enumerate() {
                let at = first + head;
                let query = &a.q[at * d..(at + 1) * d];
                let to = &mut q[i / SIDE * deep * TILE..][..deep * TILE];
                let start = _mm512_set1_ps((BIAS - lse * LOG2_E) * ONE);
                let starts = starts[i * WIDE..][..WIDE].as_mut_ptr();
                token.round_row(query, a.scale * LOG2_E * ONE, to, i % SIDE);
                // SAFETY: there are 32 floats.
                unsafe {
                    _mm512_storeu_ps(starts, start);
                    _mm512_storeu_ps(starts.add(SIDE), start);
                }
                let seen = &mut seen[i / WIDE * 2 * WIDE..][..2 * WIDE];
                (seen[i % WIDE], seen[WIDE + i % WIDE]) = (a.visible[row].0 as i32, a.visible[row].1 as i32);
                i += 1;
            }
        }
        QueryTiles { deep, q, starts, seen }
    }

    /// Which of the 32 queries `c` see any, and which see all, of the slots from `first` to `last`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    fn visibility(&self, c: usize, first: usize, last: usize) -> Visibility {
        let seen = &self.seen[c * 2 * WIDE..][..2 * WIDE];
        let (first, last) = (_mm512_set1_epi32(first as i32), _mm512_set1_epi32(last as i32));
        let mut visibility = Visibility { any: 0, all: 0 };
        for half in 0..2 {
            // SAFETY: there are twice 32 numbers.
            let (from, to) = unsafe {
                let at = seen.as_ptr().add(half * SIDE);
                (_mm512_loadu_si512(at.cast()), _mm512_loadu_si512(at.add(WIDE).cast()))
            };
            let some = _mm512_cmplt_epi32_mask(from, to);
            let any = some & _mm512_cmple_epi32_mask(from, last) & _mm512_cmpgt_epi32_mask(to, first);
            let all = some & _mm512_cmple_epi32_mask(from, first) & _mm512_cmpgt_epi32_mask(to, last);
            visibility.any |= u32::from(any) << (half * SIDE);
            visibility.all |= u32::from(all) << (half * SIDE);
        }
        visibility
    }

    /// s (32 × 32) = scores of the 32 queries `c` with a panel of keys.
    fn multiply<U: PairUnit>(&self, unit: &U, c: usize, panel: &[u32], s: &mut [f32]) {
        let each = self.deep * TILE;
        let (q, starts) = (&self.q[c * 2 * each..][..2 * each], &self.starts[c * SCORES..][..SCORES]);
        let (panel, s) = (panel[..2 * each].as_ptr(), s[..SCORES].as_mut_ptr());
        let to = Square { c: s, stride: 4 * WIDE, from: starts.as_ptr(), from_stride: 4 * WIDE, next: s };
        // SAFETY: the slices are as long as the tiles.
        unsafe { unit.product_32([q.as_ptr(), q.as_ptr().wrapping_add(each)], panel, self.deep, to) };
    }

    /// The slots, of 16, that query `i` of the 32 queries `c` sees.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    fn sees(&self, c: usize, i: usize, slots: __m512i) -> __mmask16 {
        let seen = &self.seen[c * 2 * WIDE..][..2 * WIDE];
        _mm512_cmple_epi32_mask(_mm512_set1_epi32(seen[i]), slots)
            & _mm512_cmplt_epi32_mask(slots, _mm512_set1_epi32(seen[WIDE + i]))
    }
}

/// Two factors whose product is 2^(x / 2²³ − 127), relative error 7e-4; below 2^−126 that.
///
/// As an integer, x is the bits of 2^n · m with m = 1 + the fraction, in 1 .. 2, where 2^n · 2^(m − 1) is wanted. So the other
/// factor is 2^(m − 1) / m, as a polynomial.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
fn exp2(x: __m512) -> (__m512, __m512) {
    let bits = _mm512_cvtps_epi32(_mm512_max_ps(x, _mm512_set1_ps(ONE)));
    // (bits & mantissa) | 1.0
    let (mantissa, one) = (_mm512_set1_epi32(0x007f_ffff), _mm512_set1_epi32(0x3f80_0000));
    let m = _mm512_castsi512_ps(_mm512_ternarylogic_epi32::<0xea>(bits, mantissa, one));
    let mut p = _mm512_set1_ps(-0.106_445_7);
    for c in [0.707_475_83, -1.377_307_6, 1.775_614_7] {
        p = _mm512_fmadd_ps(p, m, _mm512_set1_ps(c));
    }
    (_mm512_castsi512_ps(bits), p)
}

/// Adds the weights that a block's queries give to the slots from `first` on to the sums of the slots.
pub(super) struct AttentionMassPairs<'a, T> {
    pub(super) token: T,
    pub(super) a: &'a Attention<'a>,
    pub(super) lse: &'a [f32],
    /// The KV head's packed keys.
    pub(super) packed: &'a [u32],
    pub(super) first: usize,
    pub(super) block: QueryBlock,
    /// One for each packed key.
    pub(super) sums: &'a mut [f32],
}

impl<T: PairTiles> AttentionMassPairs<'_, T> {
    pub(super) fn run(self) {
        // SAFETY: the token proves that the instructions are there.
        unsafe { self.add_blocks() }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    fn add_blocks(self) {
        let AttentionMassPairs { token, a, lse, packed, first, block, sums } = self;
        let mut scratch = scratch::borrow(&BUFFERS, QueryTiles::words(&block) + 2 * SCORES);
        let mut floats = scratch.as_f32_mut();
        let mut s = [split_off_front(&mut floats, SCORES), split_off_front(&mut floats, SCORES)];
        let queries = QueryTiles::new(token, a, lse, &block, &mut floats);
        let unit = token.unit();
        let span = block.span(a.visible, 0..block.queries());
        // Exponentials of one product are computed while AMX computes the next.
        let mut before = None;
        let panels = packed.chunks_exact(2 * queries.deep * TILE).zip(sums.chunks_exact_mut(WIDE));
        for (p, (panel, sums)) in panels.enumerate() {
            let first = first + p * WIDE;
            if first >= span.end || first + WIDE <= span.start {
                continue;
            }
            for c in 0..QueryTiles::count(&block) {
                let visibility = queries.visibility(c, first, first + WIDE - 1);
                if visibility.any != 0 {
                    queries.multiply(&unit, c, panel, s[0]);
                    if let Some((c, visibility)) = before.replace((c, visibility)) {
                        add(&queries, c, visibility, first, s[1], sums);
                    }
                    s.swap(0, 1);
                }
            }
            if let Some((c, visibility)) = before.take() {
                add(&queries, c, visibility, first, s[1], sums);
            }
        }
    }
}

/// Adds the weights of one product, whose keys are those of the slots from `first` on, to their sums.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
fn add(queries: &QueryTiles, c: usize, visibility: Visibility, first: usize, s: &[f32], sums: &mut [f32]) {
    let (s, sums) = (s[..SCORES].as_ptr(), sums[..WIDE].as_mut_ptr());
    let mut total = [_mm512_setzero_ps(); 4];
    // SAFETY: there are 32 rows of 32 scores, and 32 sums.
    unsafe {
        if visibility.all == !0 {
            for i in (0..SCORES).step_by(4 * SIDE) {
                for (lane, total) in total.iter_mut().enumerate() {
                    let (x, y) = exp2(_mm512_loadu_ps(s.add(i + lane * SIDE)));
                    *total = _mm512_fmadd_ps(x, y, *total);
                }
            }
        } else {
            let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            for i in (0..WIDE).filter(|i| visibility.any >> i & 1 == 1) {
                for (half, total) in total[..2].iter_mut().enumerate() {
                    let slots = _mm512_add_epi32(_mm512_set1_epi32((first + half * SIDE) as i32), lanes);
                    let (x, y) = exp2(_mm512_loadu_ps(s.add(i * WIDE + half * SIDE)));
                    *total = _mm512_mask3_fmadd_ps(x, y, *total, queries.sees(c, i, slots));
                }
            }
        }
        for half in 0..2 {
            let to = sums.add(half * SIDE);
            let more = _mm512_add_ps(total[half], total[half + 2]);
            _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), more));
        }
    }
}

/// Weights of some rows for gathered slots.
pub(super) struct ColumnWeightsPairs<'a, T> {
    pub(super) token: T,
    pub(super) a: &'a Attention<'a>,
    pub(super) lse: &'a [f32],
    /// Prepared keys of the slots, for each KV head.
    pub(super) packed: &'a [u32],
    pub(super) slots: &'a [u32],
    pub(super) rows: Range<usize>,
    pub(super) out: &'a DisjointMut<'a, f32>,
}

impl<T: PairTiles> ColumnWeightsPairs<'_, T> {
    pub(super) fn run(self) {
        // SAFETY: the token proves that the instructions are there.
        unsafe { self.write_weights() }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    fn write_weights(self) {
        let ColumnWeightsPairs { token, a, lse, packed, slots, rows, out } = self;
        let (shape, n) = (a.shape(), slots.len().next_multiple_of(WIDE));
        let words = QueryTiles::words(&QueryBlock { shape, g: 0, rows: rows.clone() });
        let mut scratch = scratch::borrow(&BUFFERS, words + SCORES + rows.len() * n);
        let mut floats = scratch.as_f32_mut();
        let (s, sums) = (split_off_front(&mut floats, SCORES), split_off_front(&mut floats, rows.len() * n));
        sums.fill(0.0);
        let head = slots.len().div_ceil(KEYS) * tile_words(&shape);
        let unit = token.unit();
        for (g, packed) in packed.chunks_exact(head.max(1)).enumerate() {
            let (block, mut floats) = (QueryBlock { shape, g, rows: rows.clone() }, &mut *floats);
            let queries = QueryTiles::new(token, a, lse, &block, &mut floats);
            let panels = packed.chunks_exact(2 * queries.deep * TILE);
            for (p, (panel, slots)) in panels.zip(slots.chunks(WIDE)).enumerate() {
                let (first, last) = (slots[0] as usize, slots[slots.len() - 1] as usize);
                for c in 0..QueryTiles::count(&block) {
                    if queries.visibility(c, first, last).any != 0 {
                        queries.multiply(&unit, c, panel, s);
                        add_apart(&queries, &block, c, slots, s, &mut sums[p * WIDE..], n);
                    }
                }
            }
        }
        drop(unit);
        write_transposed(sums, n, slots.len(), rows, a.visible.len(), out);
    }
}

/// Adds the weights of one product, whose keys are those of `slots`, to the sums of the queries' rows, `n` floats apart.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
fn add_apart(
    queries: &QueryTiles,
    block: &QueryBlock,
    c: usize,
    slots: &[u32],
    s: &[f32],
    sums: &mut [f32],
    n: usize,
) {
    let mut padded = [i32::MAX; WIDE];
    padded.iter_mut().zip(slots).for_each(|(to, slot)| *to = *slot as i32);
    // No division for each query.
    let group = block.shape.group;
    let (mut row, mut head) = (c * WIDE / group, c * WIDE % group);
    for (i, s) in s[..SCORES].chunks_exact(WIDE).enumerate().take(block.queries() - c * WIDE) {
        if head == group {
            (row, head) = (row + 1, 0);
        }
        head += 1;
        let sums = &mut sums[row * n..][..WIDE];
        for half in 0..slots.len().div_ceil(SIDE) {
            // SAFETY: scores, slots and sums are 32.
            unsafe {
                let slots = _mm512_loadu_si512(padded.as_ptr().add(half * SIDE).cast());
                let (x, y) = exp2(_mm512_loadu_ps(s.as_ptr().add(half * SIDE)));
                let to = sums.as_mut_ptr().add(half * SIDE);
                let sum = _mm512_mask3_fmadd_ps(x, y, _mm512_loadu_ps(to), queries.sees(c, i, slots));
                _mm512_storeu_ps(to, sum);
            }
        }
    }
}
