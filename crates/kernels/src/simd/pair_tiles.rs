//! Tiles of `bf16` pairs, and the products of attention over them: by the tile registers of AMX or by `vdpbf16ps`.
//!
//! A tile is 16 rows of 16 words, a word a pair of `bf16`. Sᵀ = K · Qᵀ has a key in each row of K's tiles and a query in each column of
//! Qᵀ's, so that a vector holds one key's scores for 16 queries; Oᵀ = Vᵀ · Pᵀ has pairs of keys along the rows of Vᵀ's tiles where they are
//! loaded into registers, and along the columns where single words are.

use std::arch::x86_64::*;
use std::mem::transmute;

use super::avx512::Avx512;
use super::elem::{Elem, load_part};
use super::features::{Bf16, Features};
use super::level::Kernel;
use super::tile_weights::{STEPS, TileWeights};
use super::vector::Simd;

/// 32-bit words of a tile: 16 rows of 16 words.
pub(crate) const TILE: usize = 256;
/// Rows, columns and words of a row of a tile.
pub(crate) const SIDE: usize = 16;

/// Results of 32 × 32 and their initial values (null: zeros); strides are bytes from row to row.
#[derive(Clone, Copy)]
pub(crate) struct Square {
    pub(crate) c: *mut f32,
    pub(crate) stride: usize,
    pub(crate) from: *const f32,
    pub(crate) from_stride: usize,
    /// The first row of results that a product may ask for in passing, two rows for each block: its own, or those of the next one. Any
    /// address will do.
    pub(crate) next: *const f32,
}

/// Scores Sᵀ (64 × 16) = K · Qᵀ of 64 keys and 16 queries.
#[derive(Clone, Copy)]
pub(crate) struct Scores {
    /// Four strips of 16 keys, `blocks` tiles each.
    pub(crate) k: *const u32,
    /// `blocks` tiles.
    pub(crate) q: *const u32,
    pub(crate) blocks: usize,
    /// Strips that are wanted, one at least; scores of the others may be left as they are.
    pub(crate) strips: usize,
    /// 64 rows of 16.
    pub(crate) s: *mut f32,
}

/// Sums Oᵀ (16 · `blocks` × 16) += Vᵀ · Pᵀ of 64 keys, of which those after the first 32 · `halves` have no weight.
#[derive(Clone, Copy)]
pub(crate) struct Values {
    /// Two rows of `blocks` tiles, 32 keys each, in the order that [`PairTiles::ELEMENTS_FIRST`] tells.
    pub(crate) v: *const u32,
    /// Two tiles.
    pub(crate) p: *const u32,
    pub(crate) blocks: usize,
    pub(crate) halves: usize,
    pub(crate) o: *mut f32,
}

/// A token of instructions that multiply tiles of pairs.
///
/// # Safety
/// A value may exist only where the process may use AVX-512 BF16 and what [`Features`] stands for.
pub(crate) unsafe trait PairTiles: Copy + Send + Sync {
    /// The state of a thread that multiplies tiles, such as configured registers.
    type Unit: PairUnit;

    /// Whether a tile of [`PairUnit::values`] is elements × pairs of keys, and not pairs of keys × elements.
    const ELEMENTS_FIRST: bool;

    /// The features that come with the token, BF16 among them.
    fn features(self) -> Features;

    /// Prepares this thread.
    fn unit(self) -> Self::Unit;

    /// Runs a kernel in a function that has AVX-512 with BF16 enabled. Kernels of pairs are compiled for no other set.
    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        let simd = Avx512::dots(self.features()).expect("BF16 comes with the token");
        // SAFETY: the token of the vectors proves the features that the method enables.
        unsafe { kernel.run_avx512_dots(simd) }
    }

    /// Rounds `src`, times `factor`, to `bf16` and writes it as row `r` of ⌈n / 32⌉ tiles, zeros at the end.
    ///
    /// # Panics
    /// If `dst` does not hold the tiles, or `r` is not a row of a tile.
    #[inline(always)]
    fn round_row<E: Elem>(self, src: &[E], factor: f32, dst: &mut [u32], r: usize) {
        assert!(r < SIDE && dst.len() >= src.len().div_ceil(2 * SIDE) * TILE, "the row lies in the tiles");
        // SAFETY: the token proves that the instructions are there; the assertion bounds the writes.
        unsafe { round_row(self.features(), src, factor, dst.as_mut_ptr(), r) }
    }

    /// Mirrors a 16 × 16 square of words, the rows of a tile, about its diagonal; writes the rows `stride` words apart.
    ///
    /// # Panics
    /// If `src` or `dst` is shorter than that.
    #[inline(always)]
    fn transpose(self, src: &[u32], dst: &mut [u32], stride: usize) {
        assert!(src.len() >= TILE && dst.len() >= (SIDE - 1) * stride + SIDE, "both are a square of words");
        // SAFETY: the token proves that the instructions are there; the assertion bounds reads and writes.
        unsafe { transpose(self.features(), src.as_ptr(), dst.as_mut_ptr(), stride) }
    }

    /// Rounds the first 16 numbers of each of two rows to `bf16` and writes them as 16 pairs, the first row's in the lower halves, zeros
    /// for those that are missing.
    ///
    /// # Panics
    /// If `dst` is shorter than 16 words.
    #[inline(always)]
    fn round_pairs<E: Elem>(self, first: &[E], second: &[E], dst: &mut [u32]) {
        assert!(dst.len() >= SIDE, "there are 16 words");
        // SAFETY: the token proves that the instructions are there; the assertion bounds the writes.
        unsafe { round_pairs(self.features(), first, second, dst.as_mut_ptr()) }
    }
}

/// Products of tiles by one thread.
pub(crate) trait PairUnit {
    /// C (32 × 32) = initial values + A · B. `a`: two columns of tiles of A, one of 16 rows below the other, each
    /// `blocks` tiles in a row. `b`: `blocks` × 16 rows of 32 words.
    ///
    /// # Safety
    /// The pointers must be valid for that; only this thread may use C.
    unsafe fn product_32(&self, a: [*const u32; 2], b: *const u32, blocks: usize, to: Square);

    /// Computes scores, and takes steps of `beside` while units would be idle.
    ///
    /// # Safety
    /// The pointers must be valid for that, and the steps may not touch the scores.
    unsafe fn scores(&self, of: Scores, beside: &mut TileWeights);

    /// Adds to sums of values, and takes steps of `beside` while units would be idle.
    ///
    /// # Safety
    /// The pointers must be valid for that, and the steps may not touch the values and weights.
    unsafe fn values(&self, of: Values, beside: &mut TileWeights);
}

// SAFETY: the token is made where BF16 and the features beside it were found.
unsafe impl PairTiles for Bf16 {
    type Unit = Bf16;

    const ELEMENTS_FIRST: bool = false;

    fn features(self) -> Features {
        Bf16::features(self)
    }

    fn unit(self) -> Bf16 {
        self
    }
}

impl PairUnit for Bf16 {
    #[inline(always)]
    unsafe fn product_32(&self, a: [*const u32; 2], b: *const u32, blocks: usize, to: Square) {
        // SAFETY: the caller's; the token proves that the instructions are there.
        unsafe { product_32(a, b, blocks, to) }
    }

    #[inline(always)]
    unsafe fn scores(&self, of: Scores, beside: &mut TileWeights) {
        // SAFETY: the caller's; the token proves that the instructions are there.
        unsafe { scores(of, beside) }
    }

    #[inline(always)]
    unsafe fn values(&self, of: Values, _: &mut TileWeights) {
        // SAFETY: the caller's; the token proves that the instructions are there.
        unsafe { values(of) }
    }
}

/// [`PairUnit::product_32`] by `vdpbf16ps`: eight rows at a time, with both halves of their results in registers.
///
/// # Safety
/// As for [`PairUnit::product_32`].
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn product_32(a: [*const u32; 2], b: *const u32, blocks: usize, to: Square) {
    const ROWS: usize = 8;
    for first in (0..2 * SIDE).step_by(ROWS) {
        let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
        // SAFETY: the caller's.
        unsafe {
            if !to.from.is_null() {
                for (row, sums) in sums.iter_mut().enumerate() {
                    let from = to.from.byte_add((first + row) * to.from_stride);
                    *sums = [_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(SIDE))];
                }
            }
            let a = a[first / SIDE].add(first % SIDE * SIDE);
            for pair in 0..blocks * SIDE {
                let b = b.add(2 * pair * SIDE);
                let columns = [_mm512_loadu_si512(b.cast()), _mm512_loadu_si512(b.add(SIDE).cast())];
                let columns = transmute::<[__m512i; 2], [__m512bh; 2]>(columns);
                for (row, sums) in sums.iter_mut().enumerate() {
                    let word =
                        _mm512_set1_epi32(*a.add(pair / SIDE * TILE + row * SIDE + pair % SIDE) as i32);
                    let word = transmute::<__m512i, __m512bh>(word);
                    sums[0] = _mm512_dpbf16_ps(sums[0], columns[0], word);
                    sums[1] = _mm512_dpbf16_ps(sums[1], columns[1], word);
                }
            }
            for (row, sums) in sums.iter().enumerate() {
                let c = to.c.byte_add((first + row) * to.stride);
                _mm512_storeu_ps(c, sums[0]);
                _mm512_storeu_ps(c.add(SIDE), sums[1]);
            }
        }
    }
}

/// [`PairUnit::scores`] by `vdpbf16ps`: 16 keys at a time, each a sum of 16 queries in a register, and a quarter of the products after
/// each step, so that each uses the units that the other leaves idle.
///
/// # Safety
/// As for [`PairUnit::scores`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
unsafe fn scores(of: Scores, beside: &mut TileWeights) {
    let Scores { k, q, blocks, strips, s } = of;
    let steps = STEPS / 4;
    for strip in 0..strips {
        // SAFETY: the caller's.
        unsafe {
            let k = k.add(strip * blocks * TILE);
            let mut sums = [_mm512_setzero_ps(); SIDE];
            for step in 0..steps {
                beside.step();
                for pair in 0..SIDE * blocks / steps {
                    let pair = step * SIDE * blocks / steps + pair;
                    add_products::<SIDE>(
                        &mut sums,
                        k.add(pair / SIDE * TILE + pair % SIDE),
                        q.add(pair * SIDE),
                    );
                }
            }
            store(&sums, s.add(strip * TILE));
        }
    }
}

/// [`PairUnit::values`] by `vdpbf16ps`.
///
/// # Safety
/// As for [`PairUnit::values`].
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn values(of: Values) {
    let Values { v, p, blocks, halves, o } = of;
    for block in 0..blocks {
        // SAFETY: the caller's.
        unsafe {
            let o = o.add(block * TILE);
            let mut sums = [_mm512_setzero_ps(); SIDE];
            for (row, sum) in sums.iter_mut().enumerate() {
                *sum = _mm512_loadu_ps(o.add(row * SIDE));
            }
            for half in 0..halves {
                let (v, p) = (v.add((half * blocks + block) * TILE), p.add(half * TILE));
                for pair in 0..SIDE {
                    add_products::<1>(&mut sums, v.add(pair * SIDE), p.add(pair * SIDE));
                }
            }
            store(&sums, o);
        }
    }
}

/// Each of 16 sums += the products of a word of `a`, these `ROW` words apart, and the 16 words of `b`.
///
/// # Safety
/// `a` and `b` must be valid for that.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn add_products<const ROW: usize>(sums: &mut [__m512; SIDE], a: *const u32, b: *const u32) {
    // SAFETY: the caller's.
    unsafe {
        let columns = transmute::<__m512i, __m512bh>(_mm512_loadu_si512(b.cast()));
        for (row, sum) in sums.iter_mut().enumerate() {
            let word = _mm512_set1_epi32(*a.add(row * ROW) as i32);
            *sum = _mm512_dpbf16_ps(*sum, columns, transmute::<__m512i, __m512bh>(word));
        }
    }
}

/// Writes 16 rows of 16.
///
/// # Safety
/// `to` must be valid for a tile.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store(sums: &[__m512; SIDE], to: *mut f32) {
    for (row, sum) in sums.iter().enumerate() {
        // SAFETY: the caller's.
        unsafe { _mm512_storeu_ps(to.add(row * SIDE), *sum) };
    }
}

/// [`PairTiles::round_row`].
///
/// # Safety
/// The features must include BF16, and `dst` must be valid for the tiles.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
unsafe fn round_row<E: Elem>(features: Features, src: &[E], factor: f32, dst: *mut u32, r: usize) {
    let (simd, factor) = (Avx512::widening(features), _mm512_set1_ps(factor));
    for (block, src) in src.chunks(2 * SIDE).enumerate() {
        // SAFETY: as many numbers are read as there are; the caller's.
        unsafe {
            let low = load_part(simd, src.as_ptr(), src.len());
            let high = load_part(simd, src.as_ptr().wrapping_add(SIDE), src.len().saturating_sub(SIDE));
            let (low, high) = (_mm512_mul_ps(low, factor), _mm512_mul_ps(high, factor));
            let words = transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
            _mm512_storeu_si512(dst.add(block * TILE + r * SIDE).cast(), words);
        }
    }
}

/// [`PairTiles::transpose`].
///
/// # Safety
/// both must be valid for a tile.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub(super) unsafe fn transpose(features: Features, src: *const u32, dst: *mut u32, stride: usize) {
    // SAFETY: the caller's; words are moved as they are.
    unsafe { Avx512::widening(features).transpose(src.cast(), SIDE, dst.cast(), stride, SIDE) }
}

/// [`PairTiles::round_pairs`].
///
/// # Safety
/// The features must include BF16, and `dst` must be valid for 16 words.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
unsafe fn round_pairs<E: Elem>(features: Features, first: &[E], second: &[E], dst: *mut u32) {
    let simd = Avx512::widening(features);
    // SAFETY: as many numbers are read as there are; the caller's.
    unsafe {
        let first = load_part(simd, first.as_ptr(), first.len());
        let second = load_part(simd, second.as_ptr(), second.len());
        _mm512_storeu_si512(dst.cast(), interleaved_pairs(first, second));
    }
}

/// Lanes rounded to `bf16`: word i has lane i of `first` in its lower half and lane i of `second` in its upper half.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(crate) fn interleaved_pairs(first: __m512, second: __m512) -> __m512i {
    // The instruction leaves the lanes of `first` in the lower sixteen half words, those of `second` in the upper sixteen.
    const ORDER: [u16; 32] = {
        let mut order = [0; 32];
        let mut i = 0;
        while i < 32 {
            order[i] = (i / 2 + i % 2 * 16) as u16;
            i += 1;
        }
        order
    };
    // SAFETY: the order has 64 bytes, and both types are 512 bits of any value.
    unsafe {
        let words = transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(second, first));
        _mm512_permutexvar_epi16(_mm512_loadu_si512(ORDER.as_ptr().cast()), words)
    }
}
