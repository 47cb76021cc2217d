//! AVX-512 with BF16: sixteen lanes.

use std::arch::x86_64::*;
use std::mem::transmute;

use half::{bf16, f16};

use super::elem::{load_part, store_part};
use super::features::{Avx2, Features};
use super::microkernel::{Paired, Single, Step, tiles};
use super::tile::Tile;
use super::vector::Simd;

/// The token of AVX-512: [`Features`], among them BF16 where `DOTS`.
///
/// `DOTS` multiplies `bf16` pairs with `vdpbf16ps`, which does twice an FMA's work in an FMA's time on AMD's
/// cores, but half of it on Intel's; without it the pairs are widened to `f32`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512<const DOTS: bool>(Features);

impl Avx512<false> {
    /// Widens `bf16` pairs.
    pub(crate) fn widening(features: Features) -> Avx512<false> {
        Avx512(features)
    }
}

impl Avx512<true> {
    /// Multiplies `bf16` pairs as they are, if the features include BF16.
    pub(crate) fn dots(features: Features) -> Option<Avx512<true>> {
        features.bf16().map(|_| Avx512(features))
    }
}

impl<const DOTS: bool> Avx512<DOTS> {
    /// The features that the token proves.
    #[inline(always)]
    pub(crate) fn features(self) -> Features {
        self.0
    }
}

const LANES: usize = 16;

/// An intrinsic, in a method of [`Avx512`] or where a value of it is at hand.
macro_rules! x86 {
    ($e:expr) => {
        // SAFETY: the token proves that the instructions are there; pointers are valid for the lanes that are read or
        // written by the contract of the method.
        unsafe { $e }
    };
}

/// [`Simd::transpose`].
///
/// # Safety
/// `src` must be valid for rows of a vector, and `out` for `n` of them.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn transpose(src: *const f32, from: usize, out: *mut f32, to: usize, n: usize) {
    let mut r = [_mm512_setzero_ps(); LANES];
    for (i, r) in r.iter_mut().enumerate() {
        // SAFETY: the caller's.
        *r = unsafe { _mm512_loadu_ps(src.add(i * from)) };
    }
    // Pairs of rows, then of pairs, within 128-bit lanes ...
    let (mut a, mut b, mut c, mut d) = (r, r, r, r);
    for i in (0..LANES).step_by(2) {
        a[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for i in (0..LANES).step_by(4) {
        for j in 0..2 {
            let (x, y) = (_mm512_castps_pd(a[i + j]), _mm512_castps_pd(a[i + j + 2]));
            b[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
            b[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
        }
    }
    // ... then the 128-bit lanes: b[4q + j] holds columns j, 4+j, 8+j, 12+j of rows 4q..4q+4.
    for j in 0..4 {
        c[j] = _mm512_shuffle_f32x4::<0x88>(b[j], b[4 + j]);
        c[4 + j] = _mm512_shuffle_f32x4::<0xdd>(b[j], b[4 + j]);
        c[8 + j] = _mm512_shuffle_f32x4::<0x88>(b[8 + j], b[12 + j]);
        c[12 + j] = _mm512_shuffle_f32x4::<0xdd>(b[8 + j], b[12 + j]);
    }
    for j in 0..4 {
        d[j] = _mm512_shuffle_f32x4::<0x88>(c[j], c[8 + j]);
        d[4 + j] = _mm512_shuffle_f32x4::<0x88>(c[4 + j], c[12 + j]);
        d[8 + j] = _mm512_shuffle_f32x4::<0xdd>(c[j], c[8 + j]);
        d[12 + j] = _mm512_shuffle_f32x4::<0xdd>(c[4 + j], c[12 + j]);
    }
    // A number of rows that is known beforehand needs no test for each.
    let n = if n >= LANES { LANES } else { n };
    for (i, d) in d.iter().enumerate().take(n) {
        // SAFETY: the caller's.
        unsafe { _mm512_storeu_ps(out.add(i * to), *d) };
    }
}

/// Products of one strip: the tile's accumulators, weights and an activation fill the 32 registers.
///
/// # Safety
/// As for `tiles`.
#[inline(always)]
unsafe fn strip<S: Simd, K: Step<S>, const RS: usize>(simd: S, rows: usize, t: &Tile) {
    // SAFETY: the caller's.
    unsafe {
        match rows {
            1 => tiles::<S, K, 1, 4, RS>(simd, t, rows),
            2 => tiles::<S, K, 2, 4, RS>(simd, t, rows),
            4 => tiles::<S, K, 4, 4, RS>(simd, t, rows),
            6 => tiles::<S, K, 6, 2, RS>(simd, t, rows),
            8 => tiles::<S, K, 8, 2, RS>(simd, t, rows),
            _ => tiles::<S, K, 12, 2, RS>(simd, t, rows),
        }
    }
}

/// # Safety
/// As for `tiles`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn strip_single<const RS: usize>(simd: Avx512<false>, rows: usize, t: &Tile) {
    // SAFETY: the caller's.
    unsafe { strip::<_, Single, RS>(simd, rows, t) }
}

/// # Safety
/// As for `tiles`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn strip_widened(simd: Avx512<false>, rows: usize, t: &Tile) {
    // SAFETY: the caller's.
    unsafe { strip::<_, Paired, 1>(simd, rows, t) }
}

/// # Safety
/// As for `tiles`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
unsafe fn strip_dots(simd: Avx512<true>, rows: usize, t: &Tile) {
    // SAFETY: the caller's.
    unsafe { strip::<_, Paired, 1>(simd, rows, t) }
}

/// The bits of `v` with the lower halves rounded away, to nearest even. Not `vcvtneps2bf16`, which flushes
/// subnormals.
#[inline(always)]
fn rounded<const DOTS: bool>(_: Avx512<DOTS>, v: __m512) -> __m512i {
    x86!({
        let bits = _mm512_castps_si512(v);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
        let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
        _mm512_and_si512(
            _mm512_mask_blend_epi32(nan, rounded, quiet),
            _mm512_set1_epi32(0xffff_0000_u32 as i32),
        )
    })
}

/// In every 128 bits the sums of those of four vectors, one after the other.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn sums_of_four([a, b, c, d]: [__m512; 4]) -> __m512 {
    let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    let (low, high) = (_mm512_unpacklo_pd(ab, cd), _mm512_unpackhi_pd(ab, cd));
    _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high))
}

/// The sums of the four times 128 bits of four vectors, one vector's after the other's.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn sums_of_lanes([a, b, c, d]: [__m512; 4]) -> __m512 {
    let halves = |a: __m512, b: __m512| {
        _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b))
    };
    halves(halves(a, b), halves(c, d))
}

// SAFETY: `Features` are made by `detect` alone, which checks them, and `Avx512<true>` only where they include BF16;
// 16 lanes divide 16.
unsafe impl<const DOTS: bool> Simd for Avx512<DOTS> {
    type F = __m512;
    type Pair = __m512i;
    const LANES: usize = LANES;
    const PAIR_WORDS: usize = if DOTS { 1 } else { 2 };

    #[inline(always)]
    fn avx512(self) -> Option<Features> {
        Some(self.0)
    }

    #[inline(always)]
    fn avx2(self) -> Option<Avx2> {
        Some(self.0.avx2())
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        x86!(_mm512_set1_ps(x))
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        x86!(_mm512_loadu_ps(p))
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m512) {
        x86!(_mm512_storeu_ps(p, v))
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const f16) -> __m512 {
        x86!(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast())))
    }

    #[inline(always)]
    unsafe fn store_f16(self, p: *mut f16, v: __m512) {
        x86!(_mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)))
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const bf16) -> __m512 {
        x86!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(
            p.cast()
        )))))
    }

    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> __m512 {
        x86!(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))))
    }

    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut bf16, v: __m512) {
        x86!({
            let words = _mm512_srli_epi32::<16>(rounded(self, v));
            _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(words))
        })
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        x86!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        x86!(_mm512_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        x86!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        x86!(_mm512_div_ps(a, b))
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        x86!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        x86!(_mm512_max_ps(a, b))
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        x86!(_mm512_min_ps(a, b))
    }

    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        x86!(_mm512_roundscale_ps::<_MM_FROUND_TO_NEAREST_INT>(a))
    }

    #[inline(always)]
    fn lowest_bits_as_exponent(self, a: __m512) -> __m512 {
        x86!(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(a))))
    }

    #[inline(always)]
    fn sum(self, a: __m512) -> f32 {
        x86!(_mm512_reduce_add_ps(a))
    }

    #[inline(always)]
    fn sums(self, [a, b, c, d]: [__m512; 4]) -> [f32; 4] {
        x86!({
            let all = sums_of_four([a, b, c, d]);
            let half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps::<1>(all));
            let sums = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps::<1>(half));
            std::mem::transmute::<__m128, [f32; 4]>(sums)
        })
    }

    #[inline(always)]
    fn largest(self, a: __m512) -> f32 {
        x86!(_mm512_reduce_max_ps(a))
    }

    #[inline(always)]
    fn keep(self, a: __m512, lo: usize, hi: usize) -> __m512 {
        let mask = ((1u32 << hi) - 1) & !((1u32 << lo) - 1);
        x86!(_mm512_mask_mov_ps(_mm512_set1_ps(f32::NEG_INFINITY), mask as u16, a))
    }

    #[inline(always)]
    unsafe fn round_words(self, src: *const f32, n: usize, dst: *mut u32) {
        x86!({
            if !DOTS {
                for i in (0..n).step_by(LANES) {
                    let v = _mm512_castsi512_ps(rounded(self, load_part(self, src.add(i), n - i)));
                    // A last odd input gets a zero for a partner.
                    store_part(self, dst.add(i).cast::<f32>(), v, (n - i).next_multiple_of(2));
                }
                return;
            }
            let mut i = 0;
            while i + 2 * LANES <= n {
                let v = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(src.add(i + LANES)), _mm512_loadu_ps(src.add(i)));
                _mm512_storeu_si512(dst.add(i / 2).cast(), transmute::<__m512bh, __m512i>(v));
                i += 2 * LANES;
            }
            while i < n {
                // The lanes past the end are zeros: the partner of a last odd input.
                let v = _mm512_cvtneps_pbh(load_part(self, src.add(i), n - i));
                let words: [u32; 8] = transmute(v);
                let count = (n - i).div_ceil(2).min(8);
                std::ptr::copy_nonoverlapping(words.as_ptr(), dst.add(i / 2), count);
                i += LANES;
            }
        })
    }

    #[inline(always)]
    unsafe fn load_pair(self, p: *const u32) -> __m512i {
        x86!(_mm512_loadu_si512(p.cast()))
    }

    #[inline(always)]
    unsafe fn fma_pair(self, acc: __m512, w: __m512i, x: *const u32, ks: usize) -> __m512 {
        x86!({
            if DOTS {
                let x = _mm512_set1_epi32(*x.cast::<i32>());
                return _mm512_dpbf16_ps(
                    acc,
                    transmute::<__m512i, __m512bh>(w),
                    transmute::<__m512i, __m512bh>(x),
                );
            }
            // The two halves are the same for all rows of a tile: the compiler takes them out.
            let even = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(w));
            let odd = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(0xffff_0000_u32 as i32)));
            let acc = _mm512_fmadd_ps(_mm512_set1_ps(*x.cast::<f32>()), even, acc);
            _mm512_fmadd_ps(_mm512_set1_ps(*x.add(ks).cast::<f32>()), odd, acc)
        })
    }

    #[inline(always)]
    unsafe fn transpose(self, src: *const f32, from: usize, out: *mut f32, to: usize, n: usize) {
        x86!(transpose(src, from, out, to, n))
    }

    #[inline(always)]
    unsafe fn strip<const RS: usize>(self, rows: usize, t: &Tile) {
        // `DOTS` changes products of pairs alone: both sets share the products of `f32`.
        x86!(strip_single::<RS>(Avx512(self.0), rows, t))
    }

    #[inline(always)]
    unsafe fn strip_pairs(self, rows: usize, t: &Tile) {
        x86!(if DOTS { strip_dots(Avx512(self.0), rows, t) } else { strip_widened(Avx512(self.0), rows, t) })
    }
}
