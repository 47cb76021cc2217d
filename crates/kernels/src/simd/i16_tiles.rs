//! Vectors as integers of 16 bits with a scale each, and their products with AVX2.
//!
//! `vpmaddwd` adds two products of 16 bits to 32, twice as many products as `f32` FMA does. Sums are exact, so that neither the tile's shape nor
//! the rows that are computed together change a bit. Integers are as large as sums of 32 bits allow ([`NORM`]): of 64 elements a rounded one is off by at most
//! 1/11575 of their root mean square, of 256 by 1/5787, where `bf16` may be off by 1/512 of the element itself.

use std::arch::x86_64::*;
use std::ops::Range;

use super::elem::{Elem, load_part};
use super::features::Avx2;
use super::tile::{KEYS, PANEL};
use super::vector::Simd;

/// Numbers of a register.
const LANES: usize = 8;
/// Elements that are packed at a time, to one register of pairs.
const UNIT: usize = 2 * LANES;
/// Rows whose sums, of sixteen columns each, fit the registers beside their factors.
const ROWS: usize = 6;
/// The even slots of 16, in the order in which `vpackssdw` leaves pairs of weights.
const PAIRS: [usize; LANES] = [0, 2, 8, 10, 4, 6, 12, 14];
/// Weights are integers up to 2^13, the largest power whose products with 12 bits can be added 64 times.
pub(crate) const WEIGHT_BITS: f32 = 13.0;
/// The largest integer of a value.
const VALUE: f32 = 4095.0;
/// The largest norm of a vector of integers. Sums of products stay below its square, by the inequality of Cauchy and Schwarz, and that below 2^31, even if
/// rounding adds half to each of 1,024 elements.
pub(crate) const NORM: f32 = 46_300.0;
/// The largest integer of 16 bits.
const MOST: f32 = 32_767.0;
/// Scales of values are no smaller, so that weights that are multiplied by them stay in the range of `f32`.
const LEAST_SCALE: f32 = 1.0 / (1u64 << 60) as f32;

/// An intrinsic where a token of AVX2 is at hand.
macro_rules! x86 {
    ($e:expr) => {
        // SAFETY: the token proves that the instructions are there; pointers are valid by the contract of the function.
        unsafe { $e }
    };
}

/// The largest magnitude of a vector times `factor`, NaN if it has one, and the sum of its squares.
#[inline(always)]
fn extent<E: Elem>(simd: Avx2, x: &[E], factor: f32) -> (f32, f32) {
    let (mut most, mut squares) = (x86!(_mm256_setzero_si256()), simd.splat(0.0));
    let (sign, factor) = (simd.splat(-0.0), simd.splat(factor));
    for i in (0..x.len()).step_by(LANES) {
        // SAFETY: `i` stays below the length, and the count within the vector.
        let v = simd.mul(unsafe { load_part(simd, x.as_ptr().add(i), x.len() - i) }, factor);
        squares = simd.fma(v, v, squares);
        // Bits of numbers without a sign are in the order of the numbers, and those of a NaN above all.
        most = x86!(_mm256_max_epi32(most, _mm256_castps_si256(_mm256_andnot_ps(sign, v))));
    }
    let most = x86!({
        let a = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256::<1>(most));
        let b = _mm_max_epi32(a, _mm_shuffle_epi32::<0b01_00_11_10>(a));
        let c = _mm_max_epi32(b, _mm_shuffle_epi32::<0b10_11_00_01>(b));
        f32::from_bits(_mm_cvtsi128_si32(c) as u32)
    });
    (most, simd.sum(squares))
}

/// Eight elements from `i` on, times `factor`, as integers; those past the vector are zero.
#[inline(always)]
fn integers<E: Elem>(simd: Avx2, x: &[E], i: usize, factor: f32) -> __m256i {
    if i >= x.len() {
        return x86!(_mm256_setzero_si256());
    }
    // SAFETY: `i` stays below the length, and the count within the vector.
    let v = unsafe { load_part(simd, x.as_ptr().add(i), x.len() - i) };
    x86!(_mm256_cvtps_epi32(simd.mul(v, simd.splat(factor))))
}

/// Rounds a vector, filled up with zeros to a multiple of 16 elements, to pairs of integers. Returns their scale, 0 if all elements are zero.
///
/// # Panics
/// If there are fewer pairs than elements take.
#[inline(always)]
pub(crate) fn round_vector<E: Elem>(simd: Avx2, x: &[E], pairs: &mut [u32]) -> f32 {
    assert!(pairs.len().is_multiple_of(LANES) && 2 * pairs.len() >= x.len());
    let (magnitude, squares) = extent(simd, x, 1.0);
    let scale = if (1e-30..1e30).contains(&squares) {
        (squares.sqrt() / NORM).max(magnitude / MOST)
    } else if magnitude <= MOST * f32::MIN_POSITIVE {
        pairs.fill(0);
        return 0.0;
    } else {
        // Squares leave the range of `f32`. A NaN stays one.
        let squares = extent(simd, x, 1.0 / magnitude).1;
        magnitude * (squares.sqrt() / NORM).max(1.0 / MOST)
    };
    let inverse = 1.0 / scale;
    for (unit, pairs) in pairs.chunks_exact_mut(LANES).enumerate() {
        let low = integers(simd, x, unit * UNIT, inverse);
        let high = integers(simd, x, unit * UNIT + LANES, inverse);
        // In the order of the elements.
        let words = x86!(_mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(low, high)));
        x86!(_mm256_storeu_si256(pairs.as_mut_ptr().cast(), words));
    }
    scale
}

/// Rounds columns of pairs of `bf16` (steps × 32) to pairs of integers, and writes the columns' scales.
///
/// # Panics
/// If there are not as many pairs.
#[inline(always)]
pub(crate) fn round_columns(simd: Avx2, x: &[u32], pairs: &mut [u32], scales: &mut [f32; PANEL]) {
    assert!(x.len() == pairs.len());
    for c in (0..PANEL).step_by(LANES) {
        let (sign, one) = (simd.splat(-0.0), simd.splat(1.0));
        let (mut most, mut squares) = (simd.splat(MOST * f32::MIN_POSITIVE), [simd.splat(0.0); 2]);
        for x in x.chunks_exact(PANEL) {
            // SAFETY: there are 32 words.
            let (even, odd) = unsafe { simd.load_pair(x.as_ptr().add(c)) };
            let magnitudes = x86!([_mm256_andnot_ps(sign, even), _mm256_andnot_ps(sign, odd)]);
            most = simd.max(most, simd.max(magnitudes[0], magnitudes[1]));
        }
        let of_most = simd.div(one, most);
        for x in x.chunks_exact(PANEL) {
            // SAFETY: there are 32 words.
            let (even, odd) = unsafe { simd.load_pair(x.as_ptr().add(c)) };
            let (even, odd) = (simd.mul(even, of_most), simd.mul(odd, of_most));
            squares = [simd.fma(even, even, squares[0]), simd.fma(odd, odd, squares[1])];
        }
        let norm = x86!(_mm256_sqrt_ps(simd.add(squares[0], squares[1])));
        // Columns of zeros, which have no norm, get a scale as well.
        let scale = simd.mul(most, simd.max(simd.mul(norm, simd.splat(1.0 / NORM)), simd.splat(1.0 / MOST)));
        let inverse = simd.div(one, scale);
        // SAFETY: there are 32 scales.
        unsafe { simd.store(scales.as_mut_ptr().add(c), scale) };
        for (x, pairs) in x.chunks_exact(PANEL).zip(pairs.chunks_exact_mut(PANEL)) {
            // SAFETY: there are 32 words each.
            unsafe {
                let (even, odd) = simd.load_pair(x.as_ptr().add(c));
                let even = _mm256_cvtps_epi32(simd.mul(even, inverse));
                let odd = _mm256_slli_epi32::<16>(_mm256_cvtps_epi32(simd.mul(odd, inverse)));
                _mm256_storeu_si256(pairs.as_mut_ptr().add(c).cast(), _mm256_blend_epi16::<0xaa>(even, odd));
            }
        }
    }
}

/// The scale of a value, and its inverse.
#[inline(always)]
pub(crate) fn value_scale<E: Elem>(simd: Avx2, v: &[E]) -> [f32; 2] {
    let scale = extent(simd, v, 1.0).0 / VALUE;
    // A NaN stays one.
    let scale = if scale < LEAST_SCALE { LEAST_SCALE } else { scale };
    [scale, 1.0 / scale]
}

/// Rounds the values of 64 slots, which are empty where there are none, to integers by their inverse scales, and writes pairs of slots; out: 32 × `padded`.
///
/// # Panics
/// If `out` has another length.
#[inline(always)]
pub(crate) fn pack_values<E: Elem>(
    simd: Avx2,
    v: &[&[E]; KEYS],
    inverses: &[f32; KEYS],
    padded: usize,
    out: &mut [u32],
) {
    assert!(padded.is_multiple_of(UNIT) && out.len() == KEYS / 2 * padded);
    for (pair, out) in out.chunks_exact_mut(padded).enumerate() {
        let even = pair / LANES * UNIT + PAIRS[pair % LANES];
        for (i, out) in out.chunks_exact_mut(LANES).enumerate() {
            let low = integers(simd, v[even], i * LANES, inverses[even]);
            let high = integers(simd, v[even + 1], i * LANES, inverses[even + 1]);
            let words = x86!(_mm256_blend_epi16::<0xaa>(low, _mm256_slli_epi32::<16>(high)));
            x86!(_mm256_storeu_si256(out.as_mut_ptr().cast(), words));
        }
    }
}

/// Pairs of integers that a product multiplies, and where they lie.
#[derive(Clone, Copy)]
pub(crate) struct Factors {
    /// Pairs of rows; [`multiply`] says how they lie.
    pub(crate) x: *const u32,
    /// Pairs of columns: that of pair `p` and column `c` at `p · columns + c`.
    pub(crate) w: *const u32,
    pub(crate) pairs: usize,
    /// A multiple of sixteen.
    pub(crate) columns: usize,
}

/// Sums of `R` rows and sixteen columns from `w` on.
///
/// # Safety
/// The pointers must be valid for these rows and columns.
#[inline(always)]
unsafe fn sums<const R: usize, const PAIR_STEP: usize, const ROW_STEP: usize>(
    _: Avx2,
    f: &Factors,
    x: *const u32,
    w: *const u32,
) -> [[__m256i; 2]; R] {
    let mut sums = x86!([[_mm256_setzero_si256(); 2]; R]);
    for p in 0..f.pairs {
        // SAFETY: the caller's.
        unsafe {
            let w = w.add(p * f.columns);
            let w = [_mm256_loadu_si256(w.cast()), _mm256_loadu_si256(w.add(LANES).cast())];
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = _mm256_set1_epi32(*x.add(p * PAIR_STEP + r * ROW_STEP) as i32);
                sums[0] = _mm256_add_epi32(sums[0], _mm256_madd_epi16(w[0], x));
                sums[1] = _mm256_add_epi32(sums[1], _mm256_madd_epi16(w[1], x));
            }
        }
    }
    sums
}

/// A use of the sums of a product.
pub(crate) trait Finish: Copy {
    /// Takes eight sums of row `r` from column `c` on.
    ///
    /// # Safety
    /// The row and the columns must be there.
    unsafe fn take(self, simd: Avx2, r: usize, c: usize, sums: __m256i);
}

/// Multiplies `R` rows from row `r` on.
///
/// # Safety
/// The pointers must be valid for these rows and all columns, and so must be what `finish` writes.
#[inline(always)]
unsafe fn multiply_rows<const R: usize, const PAIR_STEP: usize, const ROW_STEP: usize>(
    simd: Avx2,
    f: &Factors,
    r: usize,
    finish: impl Finish,
) {
    for c in (0..f.columns).step_by(UNIT) {
        // SAFETY: the caller's.
        unsafe {
            let sums = sums::<R, PAIR_STEP, ROW_STEP>(simd, f, f.x.add(r * ROW_STEP), f.w.add(c));
            for (i, [low, high]) in sums.into_iter().enumerate() {
                finish.take(simd, r + i, c, low);
                finish.take(simd, r + i, c + LANES, high);
            }
        }
    }
}

/// Multiplies `rows` rows; pair `p` of row `r` lies at `p · PAIR_STEP + r · ROW_STEP`. Rows are taken in sixes, but for a last one or two, so that up to three rows
/// after them are taken as well, whatever they hold.
///
/// # Safety
/// The pointers must be valid for these rows and all columns, and so must be what `finish` writes.
#[inline(always)]
pub(crate) unsafe fn multiply<const PAIR_STEP: usize, const ROW_STEP: usize>(
    simd: Avx2,
    f: &Factors,
    rows: usize,
    finish: impl Finish,
) {
    let mut r = 0;
    while r < rows {
        // SAFETY: the caller's.
        unsafe {
            if rows - r > 2 {
                multiply_rows::<ROWS, PAIR_STEP, ROW_STEP>(simd, f, r, finish);
                r += ROWS;
            } else {
                multiply_rows::<2, PAIR_STEP, ROW_STEP>(simd, f, r, finish);
                r += 2;
            }
        }
    }
}

/// Writes sums, rows 64 apart.
#[derive(Clone, Copy)]
pub(crate) struct Store(pub(crate) *mut i32);

impl Finish for Store {
    #[inline(always)]
    unsafe fn take(self, _: Avx2, r: usize, c: usize, sums: __m256i) {
        x86!(_mm256_storeu_si256(self.0.add(r * KEYS + c).cast(), sums));
    }
}

/// y = y · change + sums · factor, with one change and one factor a row; rows are `padded` apart.
#[derive(Clone, Copy)]
pub(crate) struct Accumulate {
    pub(crate) y: *mut f32,
    pub(crate) padded: usize,
    pub(crate) change: *const f32,
    pub(crate) factor: *const f32,
}

impl Finish for Accumulate {
    #[inline(always)]
    unsafe fn take(self, simd: Avx2, r: usize, c: usize, sums: __m256i) {
        // SAFETY: the caller's.
        unsafe {
            let y = self.y.add(r * self.padded + c);
            let old = simd.mul(simd.load(y), simd.splat(*self.change.add(r)));
            let sums = _mm256_cvtepi32_ps(sums);
            simd.store(y, simd.fma(sums, simd.splat(*self.factor.add(r)), old));
        }
    }
}

/// Scales of the keys and values of 64 slots.
#[derive(Clone, Copy)]
pub(crate) struct Scales<'a> {
    keys: &'a [f32; KEYS],
    /// Base-2 logarithms of the values' scales.
    value_logs: &'a [f32; KEYS],
    value_inverses: &'a [f32; KEYS],
}

impl Scales<'_> {
    /// Reads scales of keys, logarithms of scales of values and their inverses, which stand one after the other.
    ///
    /// # Panics
    /// If there are not three numbers for each slot.
    pub(crate) fn new(words: &[u32]) -> Scales<'_> {
        match bytemuck::cast_slice(words) {
            [keys, value_logs, value_inverses] => Scales { keys, value_logs, value_inverses },
            all => panic!("{} rows of scales, should be 3", all.len()),
        }
    }
}

/// Turns the sums of a row with 64 keys into scores, sum · key's scale · `scale` + logarithm of the value's scale, in their place, and −∞ outside of `seen`;
/// returns the largest.
///
/// # Safety
/// `sums` must be valid for 64 of them.
#[inline(always)]
pub(crate) unsafe fn scores(
    simd: Avx2,
    sums: *mut i32,
    scale: f32,
    scales: Scales,
    seen: Range<usize>,
) -> f32 {
    let whole = seen.start == 0 && seen.end >= KEYS;
    let mut most = [simd.splat(f32::NEG_INFINITY); 2];
    for j in (0..KEYS).step_by(LANES) {
        // SAFETY: all have 64 numbers.
        unsafe {
            let sum = _mm256_cvtepi32_ps(_mm256_loadu_si256(sums.add(j).cast()));
            let product = simd.mul(sum, simd.load(scales.keys.as_ptr().add(j)));
            let mut t = simd.fma(product, simd.splat(scale), simd.load(scales.value_logs.as_ptr().add(j)));
            if !whole {
                let (lo, hi) = (seen.start.saturating_sub(j), seen.end.saturating_sub(j));
                t = simd.keep(t, lo.min(LANES), hi.min(LANES));
            }
            simd.store(sums.add(j).cast(), t);
            most[j / LANES % 2] = simd.max(t, most[j / LANES % 2]);
        }
    }
    simd.largest(simd.max(most[0], most[1]))
}

/// Writes the weights 2^(score − `max` + 13) of 64 scores as pairs of integers and returns the sums of 2^(score − `max` + 13) over the values' scales, lane
/// by lane. What is summed may be kept, too, as `bf16`: eight slots in the lower halves of eight words, the next eight in the upper ones.
///
/// # Safety
/// `scores` must be valid for 64 of them, `pairs` and `kept` for 32 words.
#[inline(always)]
pub(crate) unsafe fn weigh(
    simd: Avx2,
    scores: *const f32,
    max: f32,
    scales: Scales,
    pairs: *mut u32,
    kept: Option<*mut u32>,
) -> __m256 {
    let (below, mut total) = (simd.splat(max - WEIGHT_BITS), simd.splat(0.0));
    for j in (0..KEYS).step_by(UNIT) {
        // SAFETY: there are 64 scores and scales, and 32 words.
        unsafe {
            let inverses = scales.value_inverses.as_ptr().add(j);
            let inverses = [simd.load(inverses), simd.load(inverses.add(LANES))];
            let low = exp2(simd, simd.sub(simd.load(scores.add(j)), below));
            let high = exp2(simd, simd.sub(simd.load(scores.add(j + LANES)), below));
            if let Some(kept) = kept {
                let weights = [simd.mul(low, inverses[0]), simd.mul(high, inverses[1])];
                let half = _mm256_set1_epi32(0x8000);
                let low = _mm256_add_epi32(_mm256_castps_si256(weights[0]), half);
                let high = _mm256_add_epi32(_mm256_castps_si256(weights[1]), half);
                let kept_pairs = _mm256_blend_epi16::<0xaa>(_mm256_srli_epi32::<16>(low), high);
                _mm256_storeu_si256(kept.add(j / 2).cast(), kept_pairs);
            }
            total = simd.fma(high, inverses[1], simd.fma(low, inverses[0], total));
            let packed = _mm256_packs_epi32(_mm256_cvtps_epi32(low), _mm256_cvtps_epi32(high));
            _mm256_storeu_si256(pairs.add(j / 2).cast(), packed);
        }
    }
    total
}

/// 2^x for x <= 14, relative error 3e-6, a fiftieth of a weight's rounding; exactly 0 below −126.5. A NaN stays one.
#[inline(always)]
fn exp2(simd: Avx2, x: __m256) -> __m256 {
    let x = simd.max(simd.splat(-127.0), x);
    let (n, power) = simd.nearest_power(x);
    let f = simd.sub(x, n);
    let mut p = simd.splat(9.582_853e-3);
    for c in [5.590_642_5e-2, 2.402_41e-1, 6.931_242e-1, 1.0] {
        p = simd.fma(p, f, simd.splat(c));
    }
    simd.mul(p, power)
}
