//! Tiles of `bf16` pairs, and the products of attention over them: by the tile registers of AMX or by `vdpbf16ps`.
//!
//! A tile is 16 rows of 16 words, a word a pair of `bf16`. Sᵀ = K · Qᵀ has a key in each row of K's tiles and a query in each column of
//! Qᵀ's, so that a vector holds one key's scores for 16 queries; Oᵀ = Vᵀ · Pᵀ has pairs of keys along the rows of Vᵀ's tiles.

use std::arch::x86_64::*;
use std::array::from_fn;
use std::mem::transmute;

use super::avx512::Avx512;
use super::features::{Bf16, Features};
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
}

/// A token of instructions that multiply tiles of pairs.
///
/// # Safety
/// A value may exist only where the process may use AVX-512 BF16 and what [`Features`] stands for.
pub(crate) unsafe trait PairTiles: Copy + Send + Sync {
    /// The state of a thread that multiplies tiles, such as configured registers.
    type Unit: PairUnit;

    /// The features that come with the token, BF16 among them.
    fn features(self) -> Features;

    /// Prepares this thread.
    fn unit(self) -> Self::Unit;

    /// Rounds `src`, times `factor`, to `bf16` and writes it as row `r` of ⌈n / 32⌉ tiles, zeros at the end.
    ///
    /// # Panics
    /// If `dst` does not hold the tiles, or `r` is not a row of a tile.
    #[inline(always)]
    fn round_row(self, src: &[f32], factor: f32, dst: &mut [u32], r: usize) {
        assert!(r < SIDE && dst.len() >= src.len().div_ceil(2 * SIDE) * TILE, "the row lies in the tiles");
        // SAFETY: the token proves that the instructions are there; the assertion bounds the writes.
        unsafe { round_row(src.as_ptr(), src.len(), factor, dst.as_mut_ptr(), r) }
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

    /// Rounds 16 numbers of each of two rows to `bf16` and writes them as 16 pairs, the first row's in the lower halves.
    ///
    /// # Panics
    /// If one of the slices is shorter than 16.
    #[inline(always)]
    fn round_pairs(self, first: &[f32], second: &[f32], dst: &mut [u32]) {
        assert!(first.len() >= SIDE && second.len() >= SIDE && dst.len() >= SIDE, "16 of each");
        // SAFETY: the token proves that the instructions are there; the assertion bounds reads and writes.
        unsafe { round_pairs(first.as_ptr(), second.as_ptr(), dst.as_mut_ptr()) }
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

    /// Sᵀ (64 × 16) = K · Qᵀ. `k`: four rows of `blocks` tiles; `q`: `blocks` tiles; `s`: 64 rows of 16.
    ///
    /// # Safety
    /// The pointers must be valid for that.
    unsafe fn scores(&self, k: *const u32, q: *const u32, blocks: usize, s: *mut f32);

    /// Oᵀ (16 · `blocks` × 16) += Vᵀ · Pᵀ over 64 keys. `v`: two rows of `blocks` tiles, 32 keys each; `p`: two tiles.
    ///
    /// # Safety
    /// The pointers must be valid for that.
    unsafe fn values(&self, v: *const u32, p: *const u32, blocks: usize, o: *mut f32);
}

// SAFETY: the token is made where BF16 and the features beside it were found.
unsafe impl PairTiles for Bf16 {
    type Unit = Bf16;

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
    unsafe fn scores(&self, k: *const u32, q: *const u32, blocks: usize, s: *mut f32) {
        // SAFETY: the caller's; the token proves that the instructions are there.
        unsafe { scores(k, q, blocks, s) }
    }

    #[inline(always)]
    unsafe fn values(&self, v: *const u32, p: *const u32, blocks: usize, o: *mut f32) {
        // SAFETY: the caller's; the token proves that the instructions are there.
        unsafe { values(v, p, blocks, o) }
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
                let columns = from_fn::<_, 2, _>(|half| {
                    transmute::<__m512i, __m512bh>(_mm512_loadu_si512(b.add((2 * pair + half) * SIDE).cast()))
                });
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

/// [`PairUnit::scores`] by `vdpbf16ps`: 16 keys at a time, each a sum of 16 queries in a register.
///
/// # Safety
/// As for [`PairUnit::scores`].
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn scores(k: *const u32, q: *const u32, blocks: usize, s: *mut f32) {
    for rows in 0..4 {
        // SAFETY: the caller's.
        unsafe {
            let mut sums = [_mm512_setzero_ps(); SIDE];
            add_products(&mut sums, k.add(rows * blocks * TILE), q, blocks);
            store(&sums, s.add(rows * TILE));
        }
    }
}

/// [`PairUnit::values`] by `vdpbf16ps`.
///
/// # Safety
/// As for [`PairUnit::values`].
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn values(v: *const u32, p: *const u32, blocks: usize, o: *mut f32) {
    for block in 0..blocks {
        // SAFETY: the caller's.
        unsafe {
            let o = o.add(block * TILE);
            let mut sums = from_fn(|row| _mm512_loadu_ps(o.add(row * SIDE)));
            add_products(&mut sums, v.add(block * TILE), p, 1);
            add_products(&mut sums, v.add((blocks + block) * TILE), p.add(TILE), 1);
            store(&sums, o);
        }
    }
}

/// Sums (16 × 16) += A · B over `blocks` tiles each.
///
/// # Safety
/// `a` and `b` must be valid for the tiles.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn add_products(sums: &mut [__m512; SIDE], a: *const u32, b: *const u32, blocks: usize) {
    for block in 0..blocks {
        for pair in 0..SIDE {
            // SAFETY: the caller's.
            unsafe {
                let columns = transmute::<__m512i, __m512bh>(_mm512_loadu_si512(
                    b.add(block * TILE + pair * SIDE).cast(),
                ));
                for (row, sum) in sums.iter_mut().enumerate() {
                    let word = _mm512_set1_epi32(*a.add(block * TILE + row * SIDE + pair) as i32);
                    *sum = _mm512_dpbf16_ps(*sum, columns, transmute::<__m512i, __m512bh>(word));
                }
            }
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

/// [`PairTiles::round_row`] of `n` numbers.
///
/// # Safety
/// `src` must be valid for `n` floats and `dst` for the tiles.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn round_row(src: *const f32, n: usize, factor: f32, dst: *mut u32, r: usize) {
    let factor = _mm512_set1_ps(factor);
    // SAFETY: the caller's; masked loads do not touch what is beyond `n`.
    unsafe {
        let mut i = 0;
        let mut to = dst.add(r * SIDE);
        while i < n {
            let left = n - i;
            let mask = |left: usize| if left >= SIDE { !0 } else { (1u16 << left) - 1 };
            let low = _mm512_maskz_loadu_ps(mask(left), src.add(i));
            let high = if left > SIDE {
                _mm512_maskz_loadu_ps(mask(left - SIDE), src.add(i + SIDE))
            } else {
                _mm512_setzero_ps()
            };
            let (low, high) = (_mm512_mul_ps(low, factor), _mm512_mul_ps(high, factor));
            let words = transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
            _mm512_storeu_si512(to.cast(), words);
            to = to.add(TILE);
            i += 2 * SIDE;
        }
    }
}

/// [`PairTiles::transpose`].
///
/// # Safety
/// both must be valid for a tile.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn transpose(features: Features, src: *const u32, dst: *mut u32, stride: usize) {
    // SAFETY: the caller's; words are moved as they are.
    unsafe { Avx512::widening(features).transpose(src.cast(), SIDE, dst.cast(), stride, SIDE) }
}

/// [`PairTiles::round_pairs`].
///
/// # Safety
/// the pointers must be valid for 16 elements.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn round_pairs(first: *const f32, second: *const f32, dst: *mut u32) {
    // SAFETY: the caller's.
    unsafe {
        let words = interleaved_pairs(_mm512_loadu_ps(first), _mm512_loadu_ps(second));
        _mm512_storeu_si512(dst.cast(), words);
    }
}

/// Lanes rounded to `bf16`: word i has lane i of `first` in its lower half and lane i of `second` in its upper half.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(crate) fn interleaved_pairs(first: __m512, second: __m512) -> __m512i {
    // The instruction leaves the lanes of `first` in the lower sixteen half words, those of `second` in the upper sixteen.
    let order: [u16; 32] = from_fn(|i| (i / 2 + i % 2 * 16) as u16);
    // SAFETY: the order has 64 bytes, and both types are 512 bits of any value.
    unsafe {
        let words = transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(second, first));
        _mm512_permutexvar_epi16(_mm512_loadu_si512(order.as_ptr().cast()), words)
    }
}
