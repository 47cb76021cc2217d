//! AVX2 with FMA and F16C: eight lanes.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::elem::{load_part, store_part};
use super::features::Avx2;
use super::microkernel::{Paired, Single, Step, tiles};
use super::tile::Tile;
use super::vector::Simd;

const LANES: usize = 8;

/// An intrinsic, in a method of [`Avx2`] or where a value of it is at hand.
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
#[target_feature(enable = "avx")]
unsafe fn transpose(src: *const f32, from: usize, out: *mut f32, to: usize, n: usize) {
    let mut r = [_mm256_setzero_ps(); LANES];
    for (i, r) in r.iter_mut().enumerate() {
        // SAFETY: the caller's.
        *r = unsafe { _mm256_loadu_ps(src.add(i * from)) };
    }
    let (mut a, mut b, mut c) = (r, r, r);
    for i in (0..LANES).step_by(2) {
        a[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for i in (0..LANES).step_by(4) {
        for j in 0..2 {
            b[i + 2 * j] = _mm256_shuffle_ps::<0x44>(a[i + j], a[i + j + 2]);
            b[i + 2 * j + 1] = _mm256_shuffle_ps::<0xee>(a[i + j], a[i + j + 2]);
        }
    }
    // b[4q + j] holds columns j and 4+j of rows 4q..4q+4.
    for j in 0..4 {
        c[j] = _mm256_permute2f128_ps::<0x20>(b[j], b[4 + j]);
        c[4 + j] = _mm256_permute2f128_ps::<0x31>(b[j], b[4 + j]);
    }
    for (i, c) in c.iter().enumerate().take(n) {
        // SAFETY: the caller's.
        unsafe { _mm256_storeu_ps(out.add(i * to), *c) };
    }
}

/// Products of one strip: the tile's accumulators, weights and an activation fill the sixteen registers.
///
/// # Safety
/// As for `tiles`.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn strip<K: Step<Avx2>, const RS: usize>(simd: Avx2, rows: usize, t: &Tile) {
    // SAFETY: the caller's.
    unsafe {
        match rows {
            1 => tiles::<Avx2, K, 1, 4, RS>(simd, t, rows),
            2 => tiles::<Avx2, K, 2, 4, RS>(simd, t, rows),
            4 | 8 => tiles::<Avx2, K, 4, 2, RS>(simd, t, rows),
            _ => tiles::<Avx2, K, 6, 2, RS>(simd, t, rows),
        }
    }
}

/// The bits of `v` with the lower halves rounded away, to nearest even.
#[inline(always)]
fn rounded(_: Avx2, v: __m256) -> __m256i {
    x86!({
        let bits = _mm256_castps_si256(v);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
        let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
        _mm256_and_si256(_mm256_blendv_epi8(rounded, quiet, nan), _mm256_set1_epi32(0xffff_0000_u32 as i32))
    })
}

// SAFETY: a value is made by `detect` alone, which checks the features; 8 lanes divide 16.
unsafe impl Simd for Avx2 {
    type F = __m256;
    type Pair = (__m256, __m256);
    const LANES: usize = LANES;
    const PAIR_WORDS: usize = 2;

    #[inline(always)]
    fn avx2(self) -> Option<Avx2> {
        Some(self)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        x86!(_mm256_set1_ps(x))
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m256 {
        x86!(_mm256_loadu_ps(p))
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m256) {
        x86!(_mm256_storeu_ps(p, v))
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const f16) -> __m256 {
        x86!(_mm256_cvtph_ps(_mm_loadu_si128(p.cast())))
    }

    #[inline(always)]
    unsafe fn store_f16(self, p: *mut f16, v: __m256) {
        x86!(_mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)))
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const bf16) -> __m256 {
        x86!(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())))))
    }

    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> __m256 {
        x86!(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()))))
    }

    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut bf16, v: __m256) {
        x86!({
            let words = _mm256_srli_epi32::<16>(rounded(self, v));
            let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(words, words));
            _mm_storeu_si128(p.cast(), _mm256_castsi256_si128(packed))
        })
    }

    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        x86!(_mm256_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        x86!(_mm256_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        x86!(_mm256_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        x86!(_mm256_div_ps(a, b))
    }

    #[inline(always)]
    fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        x86!(_mm256_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        x86!(_mm256_max_ps(a, b))
    }

    #[inline(always)]
    fn min(self, a: __m256, b: __m256) -> __m256 {
        x86!(_mm256_min_ps(a, b))
    }

    #[inline(always)]
    fn round(self, a: __m256) -> __m256 {
        x86!(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a))
    }

    #[inline(always)]
    fn lowest_bits_as_exponent(self, a: __m256) -> __m256 {
        x86!(_mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_castps_si256(a))))
    }

    #[inline(always)]
    fn sum(self, a: __m256) -> f32 {
        x86!({
            let b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let c = _mm_add_ps(b, _mm_movehl_ps(b, b));
            _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps::<1>(c, c)))
        })
    }

    #[inline(always)]
    fn sums(self, [a, b, c, d]: [__m256; 4]) -> [f32; 4] {
        x86!({
            let ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            let cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
            let (ab, cd) = (_mm256_castps_pd(ab), _mm256_castps_pd(cd));
            let (low, high) = (_mm256_unpacklo_pd(ab, cd), _mm256_unpackhi_pd(ab, cd));
            let all = _mm256_add_ps(_mm256_castpd_ps(low), _mm256_castpd_ps(high));
            let sums = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps::<1>(all));
            std::mem::transmute::<__m128, [f32; 4]>(sums)
        })
    }

    #[inline(always)]
    fn largest(self, a: __m256) -> f32 {
        x86!({
            let b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let c = _mm_max_ps(b, _mm_movehl_ps(b, b));
            _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps::<1>(c, c)))
        })
    }

    #[inline(always)]
    fn keep(self, a: __m256, lo: usize, hi: usize) -> __m256 {
        x86!({
            let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let below = _mm256_cmpgt_epi32(_mm256_set1_epi32(lo as i32), lane);
            let within = _mm256_andnot_si256(below, _mm256_cmpgt_epi32(_mm256_set1_epi32(hi as i32), lane));
            _mm256_blendv_ps(_mm256_set1_ps(f32::NEG_INFINITY), a, _mm256_castsi256_ps(within))
        })
    }

    #[inline(always)]
    unsafe fn round_words(self, src: *const f32, n: usize, dst: *mut u32) {
        x86!({
            for i in (0..n).step_by(LANES) {
                let v = _mm256_castsi256_ps(rounded(self, load_part(self, src.add(i), n - i)));
                // A last odd input gets a zero for a partner.
                store_part(self, dst.add(i).cast::<f32>(), v, (n - i).next_multiple_of(2));
            }
        })
    }

    #[inline(always)]
    unsafe fn load_pair(self, p: *const u32) -> (__m256, __m256) {
        x86!({
            let w = _mm256_loadu_si256(p.cast());
            let odd = _mm256_and_si256(w, _mm256_set1_epi32(0xffff_0000_u32 as i32));
            (_mm256_castsi256_ps(_mm256_slli_epi32::<16>(w)), _mm256_castsi256_ps(odd))
        })
    }

    #[inline(always)]
    unsafe fn fma_pair(self, acc: __m256, w: (__m256, __m256), x: *const u32, ks: usize) -> __m256 {
        x86!({
            let x = x.cast::<f32>();
            let acc = _mm256_fmadd_ps(_mm256_set1_ps(*x), w.0, acc);
            _mm256_fmadd_ps(_mm256_set1_ps(*x.add(ks)), w.1, acc)
        })
    }

    #[inline(always)]
    unsafe fn transpose(self, src: *const f32, from: usize, out: *mut f32, to: usize, n: usize) {
        x86!(transpose(src, from, out, to, n))
    }

    #[inline(always)]
    unsafe fn strip<const RS: usize>(self, rows: usize, t: &Tile) {
        x86!(strip::<Single, RS>(self, rows, t))
    }

    #[inline(always)]
    unsafe fn strip_pairs(self, rows: usize, t: &Tile) {
        x86!(strip::<Paired, 1>(self, rows, t))
    }
}
