//! The same with tiles of `bf16`: S = Q · Kᵀ, 32 queries × 32 keys, so that a vector holds one query's scores and what
//! queries give to keys is summed lane by lane.
//!
//! What exponentials need is made by the product: queries are scaled, and the sum of each starts, such that the
//! result is (127 + log₂ of the weight) · 2²³, which as an integer is nearly the bits of the weight: see [`exp2`].

use std::arch::x86_64::*;
use std::f32::consts::LOG2_E;
use std::ops::Range;

use super::given::write_transposed;
use super::queries::{Block, Shape, cut};
use super::{Attention, WORK, keys};
use crate::scratch;
use crate::shared::Shared;
use crate::simd::amx::{SIDE, Square, TILE, Tiles, round_row, transpose};
use crate::simd::{Elem, KEYS, Kernel, Simd};

/// Queries, and keys, of a product.
const WIDE: usize = 2 * SIDE;
/// Its scores.
const SCORES: usize = WIDE * WIDE;
/// Queries of a block, about.
const QUERIES: usize = 256;
/// What a weight's exponent counts from, and the bits of its mantissa.
const BIAS: f32 = 127.0;
const ONE: f32 = (1 << 23) as f32;

/// Words of the prepared keys of 64 slots.
pub(super) fn tile_words(shape: &Shape) -> usize {
    KEYS / SIDE * shape.deep() * TILE
}

/// Rows of a block, whatever the number of threads: whole products where that is possible.
pub(super) fn block_rows(shape: &Shape) -> usize {
    // The fewest rows whose queries fill whole products.
    let unit = (1..=WIDE).find(|rows| (rows * shape.group).is_multiple_of(WIDE)).unwrap_or(WIDE);
    unit * (QUERIES / (unit * shape.group)).max(1)
}

/// At most 64 slots.
pub(super) enum Slots<'a> {
    All(Range<usize>),
    Some(&'a [u32]),
}

/// Rounds the keys of a KV head's slots and puts them as two panels: pairs of elements × 32 keys.
pub(super) struct Prepare<'a, E> {
    pub(super) shape: Shape,
    /// The head's keys, capacity × head_dim.
    pub(super) k: &'a [E],
    pub(super) slots: Slots<'a>,
    pub(super) out: &'a mut [u32],
}

impl<E: Elem> Kernel for Prepare<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Prepare { shape, k, slots, out } = self;
        let (d, deep, padded) = (shape.head_dim, shape.deep(), shape.padded);
        let mut scratch = scratch::lend(&WORK, KEYS * padded + deep * TILE);
        let mut floats = scratch.words.floats_mut();
        let rows = cut(&mut floats, KEYS * padded);
        let strip: &mut [u32] = bytemuck::cast_slice_mut(cut(&mut floats, deep * TILE));
        match slots {
            Slots::All(slots) => keys::rows::<S, E>(k, d, slots.start, slots, padded, rows),
            Slots::Some(slots) => keys::gather::<S, E>(k, d, slots, padded, rows),
        }
        for (part, rows) in rows.chunks_exact(SIDE * padded).enumerate() {
            for (t, row) in rows.chunks_exact(padded).enumerate() {
                // SAFETY: `Isa::Amx` is kept only where it is available; the strip holds the row's tiles.
                unsafe { round_row(row.as_ptr(), d, 1.0, strip.as_mut_ptr(), t) };
            }
            for (b, square) in strip.chunks_exact(TILE).enumerate() {
                let at = (part / 2 * deep + b) * 2 * TILE + part % 2 * SIDE;
                let out = &mut out[at..][..2 * TILE - SIDE];
                // SAFETY: 16 rows of 16, 32 words apart.
                unsafe { transpose(square.as_ptr(), out.as_mut_ptr(), WIDE) };
            }
        }
    }
}

/// Queries of a block as tiles, 32 together.
struct Queries<'a> {
    deep: usize,
    /// Two rows of `deep` tiles each time.
    q: &'a [u32],
    /// What their sums of products start from, 32 × 32.
    starts: &'a [f32],
    /// Slots that each sees: first those from which on, then those up to which.
    seen: &'a [i32],
}

/// Bits of 32 queries.
#[derive(Clone, Copy)]
struct Seeing {
    any: u32,
    all: u32,
}

impl<'a> Queries<'a> {
    fn count(block: &Block) -> usize {
        block.queries().div_ceil(WIDE)
    }

    fn words(block: &Block) -> usize {
        Queries::count(block) * (2 * block.shape.deep() * TILE + SCORES + 2 * WIDE)
    }

    /// # Safety
    /// AMX is there.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn new(a: &Attention, lse: &[f32], block: &Block, floats: &mut &'a mut [f32]) -> Queries<'a> {
        let (deep, count, n) = (block.shape.deep(), Queries::count(block), block.queries());
        let q: &mut [u32] = bytemuck::cast_slice_mut(cut(floats, count * 2 * deep * TILE));
        let starts = cut(floats, count * SCORES);
        let seen: &mut [i32] = bytemuck::cast_slice_mut(cut(floats, count * 2 * WIDE));
        if n < count * WIDE {
            // Queries that only fill the last ones up see nothing.
            q[(count - 1) * 2 * deep * TILE..].fill(0);
            starts[(count - 1) * SCORES..].fill(0.0);
            seen[(count - 1) * 2 * WIDE..].fill(0);
        }
        let Shape { heads, group, head_dim: d, .. } = block.shape;
        let mut i = 0;
        for row in block.rows.clone() {
            let first = row * heads + block.g * group;
            for (head, lse) in lse[first..first + group].iter().enumerate() {
                let at = first + head;
                let query = &a.q[at * d..(at + 1) * d];
                let to = &mut q[i / SIDE * deep * TILE..][..deep * TILE];
                let start = _mm512_set1_ps((BIAS - lse * LOG2_E) * ONE);
                let starts = starts[i * WIDE..][..WIDE].as_mut_ptr();
                // SAFETY: AMX is there, `to` holds the row's tiles, and there are 32 floats.
                unsafe {
                    round_row(query.as_ptr(), d, a.scale * LOG2_E * ONE, to.as_mut_ptr(), i % SIDE);
                    _mm512_storeu_ps(starts, start);
                    _mm512_storeu_ps(starts.add(SIDE), start);
                }
                let seen = &mut seen[i / WIDE * 2 * WIDE..][..2 * WIDE];
                (seen[i % WIDE], seen[WIDE + i % WIDE]) = (a.visible[row].0 as i32, a.visible[row].1 as i32);
                i += 1;
            }
        }
        Queries { deep, q, starts, seen }
    }

    /// Which of the 32 queries `c` see any, and which see all, of the slots from `first` to `last`.
    ///
    /// # Safety
    /// AVX-512 is there.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn seeing(&self, c: usize, first: usize, last: usize) -> Seeing {
        let seen = &self.seen[c * 2 * WIDE..][..2 * WIDE];
        let (first, last) = (_mm512_set1_epi32(first as i32), _mm512_set1_epi32(last as i32));
        let mut seeing = Seeing { any: 0, all: 0 };
        for half in 0..2 {
            // SAFETY: there are twice 32 numbers.
            let (from, to) = unsafe {
                let at = seen.as_ptr().add(half * SIDE);
                (_mm512_loadu_si512(at.cast()), _mm512_loadu_si512(at.add(WIDE).cast()))
            };
            let some = _mm512_cmplt_epi32_mask(from, to);
            let any = some & _mm512_cmple_epi32_mask(from, last) & _mm512_cmpgt_epi32_mask(to, first);
            let all = some & _mm512_cmple_epi32_mask(from, first) & _mm512_cmpgt_epi32_mask(to, last);
            seeing.any |= u32::from(any) << (half * SIDE);
            seeing.all |= u32::from(all) << (half * SIDE);
        }
        seeing
    }

    /// s (32 × 32) = scores of the 32 queries `c` with a panel of keys.
    fn multiply(&self, tiles: &Tiles, c: usize, panel: &[u32], s: &mut [f32]) {
        let each = self.deep * TILE;
        let (q, starts) = (&self.q[c * 2 * each..][..2 * each], &self.starts[c * SCORES..][..SCORES]);
        let (panel, s) = (panel[..2 * each].as_ptr(), s[..SCORES].as_mut_ptr());
        let to = Square { c: s, stride: 4 * WIDE, from: starts.as_ptr(), from_stride: 4 * WIDE };
        // SAFETY: the slices are as long as the tiles.
        unsafe { tiles.product_32([q.as_ptr(), q.as_ptr().wrapping_add(each)], panel, self.deep, to) };
    }

    /// The slots, of 16, that query `i` of the 32 queries `c` sees.
    ///
    /// # Safety
    /// AVX-512 is there.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn sees(&self, c: usize, i: usize, slots: __m512i) -> __mmask16 {
        let seen = &self.seen[c * 2 * WIDE..][..2 * WIDE];
        _mm512_cmple_epi32_mask(_mm512_set1_epi32(seen[i]), slots)
            & _mm512_cmplt_epi32_mask(slots, _mm512_set1_epi32(seen[WIDE + i]))
    }
}

/// Two factors whose product is 2^(x / 2²³ − 127), relative error 7e-4; below 2^−126 that.
///
/// As an integer, x is the bits of 2^n · m with m = 1 + the fraction, in 1 .. 2, where 2^n · 2^(m − 1) is wanted. So the other
/// factor is 2^(m − 1) / m, as a polynomial.
///
/// # Safety
/// AVX-512 is there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn exp2(x: __m512) -> (__m512, __m512) {
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

/// Adds what a block's queries give to the slots from `first` on to their sums.
pub(super) struct Receive<'a> {
    pub(super) a: &'a Attention<'a>,
    pub(super) lse: &'a [f32],
    /// The KV head's prepared keys.
    pub(super) prepared: &'a [u32],
    pub(super) first: usize,
    pub(super) block: Block,
    /// As many as there are prepared keys.
    pub(super) sums: &'a mut [f32],
}

impl Receive<'_> {
    pub(super) fn run(self) {
        // SAFETY: `Isa::Amx` is kept only where it is available; it comes with AVX-512 and BF16.
        unsafe { self.receive() }
    }

    /// # Safety
    /// AMX is there.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn receive(self) {
        let Receive { a, lse, prepared, first, block, sums } = self;
        let mut scratch = scratch::lend(&WORK, Queries::words(&block) + 2 * SCORES);
        let mut floats = scratch.words.floats_mut();
        let mut s = [cut(&mut floats, SCORES), cut(&mut floats, SCORES)];
        // SAFETY: this function's contract, here and below.
        let queries = unsafe { Queries::new(a, lse, &block, &mut floats) };
        let tiles = unsafe { Tiles::configure() };
        let span = block.span(a.visible, 0..block.queries());
        // Weights are made of one product while the next is on its way.
        let mut before = None;
        let panels = prepared.chunks_exact(2 * queries.deep * TILE).zip(sums.chunks_exact_mut(WIDE));
        for (p, (panel, sums)) in panels.enumerate() {
            let first = first + p * WIDE;
            if first >= span.end || first + WIDE <= span.start {
                continue;
            }
            for c in 0..Queries::count(&block) {
                let seeing = unsafe { queries.seeing(c, first, first + WIDE - 1) };
                if seeing.any != 0 {
                    queries.multiply(&tiles, c, panel, s[0]);
                    if let Some((c, seeing)) = before.replace((c, seeing)) {
                        unsafe { add(&queries, c, seeing, first, s[1], sums) };
                    }
                    s.swap(0, 1);
                }
            }
            if let Some((c, seeing)) = before.take() {
                unsafe { add(&queries, c, seeing, first, s[1], sums) };
            }
        }
    }
}

/// Adds the weights of one product, whose keys are those of the slots from `first` on, to their sums.
///
/// # Safety
/// AVX-512 is there.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn add(queries: &Queries, c: usize, seeing: Seeing, first: usize, s: &[f32], sums: &mut [f32]) {
    let (s, sums) = (s[..SCORES].as_ptr(), sums[..WIDE].as_mut_ptr());
    let mut total = [_mm512_setzero_ps(); 4];
    // SAFETY: there are 32 rows of 32 scores, and 32 sums.
    unsafe {
        if seeing.all == !0 {
            for i in (0..SCORES).step_by(4 * SIDE) {
                for (lane, total) in total.iter_mut().enumerate() {
                    let (x, y) = exp2(_mm512_loadu_ps(s.add(i + lane * SIDE)));
                    *total = _mm512_fmadd_ps(x, y, *total);
                }
            }
        } else {
            let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            for i in (0..WIDE).filter(|i| seeing.any >> i & 1 == 1) {
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
pub(super) struct Weigh<'a> {
    pub(super) a: &'a Attention<'a>,
    pub(super) lse: &'a [f32],
    /// Prepared keys of the slots, for each KV head.
    pub(super) prepared: &'a [u32],
    pub(super) slots: &'a [u32],
    pub(super) rows: Range<usize>,
    pub(super) out: &'a Shared<'a, f32>,
}

impl Weigh<'_> {
    pub(super) fn run(self) {
        // SAFETY: `Isa::Amx` is kept only where it is available; it comes with AVX-512 and BF16.
        unsafe { self.weigh() }
    }

    /// # Safety
    /// AMX is there.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn weigh(self) {
        let Weigh { a, lse, prepared, slots, rows, out } = self;
        let (shape, n) = (a.shape(), slots.len().next_multiple_of(WIDE));
        let words = Queries::words(&Block { shape, g: 0, rows: rows.clone() });
        let mut scratch = scratch::lend(&WORK, words + SCORES + rows.len() * n);
        let mut floats = scratch.words.floats_mut();
        let (s, sums) = (cut(&mut floats, SCORES), cut(&mut floats, rows.len() * n));
        sums.fill(0.0);
        let head = slots.len().div_ceil(KEYS) * tile_words(&shape);
        // SAFETY: this function's contract, here and below.
        let tiles = unsafe { Tiles::configure() };
        for (g, prepared) in prepared.chunks_exact(head.max(1)).enumerate() {
            let (block, mut floats) = (Block { shape, g, rows: rows.clone() }, &mut *floats);
            let queries = unsafe { Queries::new(a, lse, &block, &mut floats) };
            let panels = prepared.chunks_exact(2 * queries.deep * TILE);
            for (p, (panel, slots)) in panels.zip(slots.chunks(WIDE)).enumerate() {
                let (first, last) = (slots[0] as usize, slots[slots.len() - 1] as usize);
                for c in 0..Queries::count(&block) {
                    if unsafe { queries.seeing(c, first, last) }.any != 0 {
                        queries.multiply(&tiles, c, panel, s);
                        unsafe { add_apart(&queries, &block, c, slots, s, &mut sums[p * WIDE..], n) };
                    }
                }
            }
        }
        drop(tiles);
        write_transposed(sums, n, slots.len(), rows, a.visible.len(), out);
    }
}

/// Adds the weights of one product, whose keys are those of `slots`, to the sums of the queries' rows, `n` floats apart.
///
/// # Safety
/// AVX-512 is there.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn add_apart(
    queries: &Queries,
    block: &Block,
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
