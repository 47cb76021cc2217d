//! Weights of softmax as pairs of `bf16`, from the scores of a tile of 64 keys and 16 queries.
//!
//! Shape: 64 rows of 16 scores become 32 rows of 16 pairs, each of two keys. Bound: the two vector units of a core of Intel, 6 cycles a row of
//! pairs; measured: 6.6.
//!
//! A score in 256ths of an octave, as an integer beside the exponent's bias, is the bits of its weight with one bit more, but for the
//! mantissa: that of 2^f is 2^f − 1 where the integer has f. The difference, 22 units at most, comes from a table by the upper six bits of
//! f. So a pair of weights takes eleven instructions of integers, less than half of what exponentials in `f32` take, and the error of a
//! weight is .19 % (root mean square, .7 % at most) where rounding alone has .17 %.

use std::arch::x86_64::*;
use std::mem::transmute;

/// Units of a score in an octave of its weight: half a unit in the last place of `bf16`.
pub(crate) const OCTAVE: f32 = 256.0;
/// Queries of a tile, a lane of a vector each.
const QUERIES: usize = 16;
/// Steps of a tile of 64 keys: each turns the scores of four into two rows of pairs.
pub(crate) const STEPS: usize = 16;
/// Entry i: 256 · (f − (2^f − 1)), the mean of its four f = (4 · i + 0 … 3 − 0.5) / 256.
const MANTISSA_DIFFERENCES: [u8; 64] = [
    0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 13, 14, 15, 16, 16, 17, 18, 18, 19, 19, 20, 20, 20, 21, 21,
    21, 22, 22, 22, 22, 22, 22, 22, 22, 22, 22, 21, 21, 21, 20, 20, 20, 19, 19, 18, 17, 17, 16, 15, 14, 13,
    12, 11, 10, 9, 8, 7, 5, 4, 3, 1,
];

/// The scores of a tile on their way to weights, step after step.
pub(crate) struct TileWeights {
    /// Scores of the next step, and where its pairs belong.
    pub(super) s: *const f32,
    pub(super) p: *mut u32,
    /// Steps that are left, and those of them that are meant to be taken beside scores.
    pub(super) left: usize,
    pub(super) beside_scores: usize,
    /// Added to a score: the bias of an exponent less the query's maximum, and the half unit by which the last bit is rounded.
    pub(super) start: __m512,
    pub(super) differences: __m512i,
    /// Order of bytes: words of each four lanes of two vectors, one after the other.
    pub(super) interleaved: __m512i,
    pub(super) ones: __m512i,
    /// Σ of the weights of each query, of every other row of pairs.
    pub(super) sums: [__m512; 2],
}

/// Lower bytes of words.
pub(super) const LOWER: u64 = 0x5555_5555_5555_5555;

impl TileWeights {
    /// Weights relative to the maxima `max`, added to `sum`. Half of the steps are meant to be taken beside scores, or all unless `values`
    /// are summed meanwhile.
    ///
    /// # Safety
    /// Until the last step, `s` must be valid for 64 rows of 16 and `p` for 32.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
    pub(crate) unsafe fn new(
        (s, p): (*const f32, *mut u32),
        max: __m512,
        sum: __m512,
        values: bool,
    ) -> TileWeights {
        const BIAS: f32 = 127.0 * OCTAVE + 0.5;
        const ORDER: [u8; 16] = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15];
        // SAFETY: there are 64 and 16 bytes.
        unsafe {
            TileWeights {
                s,
                p,
                left: STEPS,
                beside_scores: if values { STEPS / 2 } else { STEPS },
                start: _mm512_sub_ps(_mm512_set1_ps(BIAS), max),
                differences: _mm512_loadu_si512(MANTISSA_DIFFERENCES.as_ptr().cast()),
                interleaved: _mm512_broadcast_i32x4(_mm_loadu_si128(ORDER.as_ptr().cast())),
                ones: _mm512_set1_epi16(0x3f80),
                sums: [sum, _mm512_setzero_ps()],
            }
        }
    }

    /// No steps.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
    pub(crate) fn none() -> TileWeights {
        let zero = _mm512_setzero_ps();
        // SAFETY: nothing is read or written where no step is left.
        let none = unsafe { TileWeights::new((std::ptr::null(), std::ptr::null_mut()), zero, zero, true) };
        TileWeights { left: 0, beside_scores: 0, ..none }
    }

    /// Takes up to `most` times `steps` off those that are left, for assembly that computes so many at a time; returns how many times.
    pub(super) fn take(&mut self, steps: usize, most: usize) -> usize {
        let times = most.min(self.left / steps);
        self.left -= times * steps;
        times
    }

    /// Takes the next step, if one is left.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
    pub(super) fn step(&mut self) {
        if self.left == 0 {
            return;
        }
        self.left -= 1;
        // SAFETY: `new`.
        unsafe {
            let [first, second] = [self.s, self.s.add(2 * QUERIES)];
            let first = self.pairs(_mm512_loadu_ps(first), _mm512_loadu_ps(first.add(QUERIES)));
            let second = self.pairs(_mm512_loadu_ps(second), _mm512_loadu_ps(second.add(QUERIES)));
            _mm512_storeu_si512(self.p.cast(), first);
            _mm512_storeu_si512(self.p.add(QUERIES).cast(), second);
            self.sums = [self.add(self.sums[0], first), self.add(self.sums[1], second)];
            (self.s, self.p) = (self.s.add(4 * QUERIES), self.p.add(2 * QUERIES));
        }
    }

    /// Takes the steps that are left; returns the sum.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
    pub(crate) fn finish(mut self) -> __m512 {
        while self.left > 0 {
            self.step();
        }
        _mm512_add_ps(self.sums[0], self.sums[1])
    }

    /// Weights of the scores of two keys, the first key's in the lower halves. Those below 2^−126 are less or 0.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
    fn pairs(&self, even: __m512, odd: __m512) -> __m512i {
        let even = _mm512_cvtps_epi32(_mm512_add_ps(even, self.start));
        let odd = _mm512_cvtps_epi32(_mm512_add_ps(odd, self.start));
        // Integers below zero become zero.
        let bits = _mm512_shuffle_epi8(_mm512_packus_epi32(even, odd), self.interleaved);
        let difference = _mm512_maskz_permutexvar_epi8(LOWER, _mm512_srli_epi16::<2>(bits), self.differences);
        _mm512_srli_epi16::<1>(_mm512_sub_epi16(bits, difference))
    }

    /// The sum and both weights of each query.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
    fn add(&self, sum: __m512, pairs: __m512i) -> __m512 {
        // SAFETY: all bits are pairs of `bf16`.
        unsafe {
            let [pairs, ones] =
                [transmute::<__m512i, __m512bh>(pairs), transmute::<__m512i, __m512bh>(self.ones)];
            _mm512_dpbf16_ps(sum, pairs, ones)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::features::Features;

    #[test]
    fn weights_are_powers_of_two_within_the_rounding_of_bf16() {
        let Some(features) = Features::detect() else { return };
        if features.extended().bf16().is_none() {
            return;
        }
        // 1,024 scores from 0 to 20 octaves below the maximum, which is among them.
        const MAX: f32 = 1234.5;
        let below = |i: usize| 20.0 * i as f32 / 1023.0;
        let s: Vec<f32> = (0..64 * QUERIES).map(|i| MAX - OCTAVE * below(i)).collect();
        let mut p = vec![0u32; 32 * QUERIES];
        // SAFETY: the features are there; scores and pairs are those of a tile.
        let sums = unsafe { weights(&s, &mut p, MAX) };
        let (mut worst, mut squares, mut expected) = (0.0f64, 0.0, [0.0f64; QUERIES]);
        for i in 0..64 * QUERIES {
            let (key, query) = (i / QUERIES, i % QUERIES);
            let word = p[key / 2 * QUERIES + query];
            let bits = if key % 2 == 0 { word << 16 } else { word & 0xffff_0000 };
            let weight = f64::from(f32::from_bits(bits));
            let error = weight / (-f64::from(below(i))).exp2() - 1.0;
            (worst, squares) = (worst.max(error.abs()), squares + error * error);
            expected[query] += weight;
        }
        assert_eq!(p[0] & 0xffff, 0x3f80, "the weight of the maximum is 1");
        let mean = (squares / 1024.0).sqrt();
        assert!(worst < 7.5e-3 && mean < 2.2e-3, "errors of {worst:e} at most, {mean:e} in the mean");
        for (sum, expected) in sums.into_iter().zip(expected) {
            assert!(
                (f64::from(sum) / expected - 1.0).abs() < 1e-5,
                "{sum} is the sum {expected} of the weights"
            );
        }
    }

    #[test]
    fn scores_far_below_weigh_nothing() {
        let Some(features) = Features::detect() else { return };
        if features.extended().bf16().is_none() {
            return;
        }
        let (s, mut p) = (vec![-3e30; 64 * QUERIES], vec![1u32; 32 * QUERIES]);
        for max in [0.0, -1e30, 3e8] {
            // SAFETY: the features are there; scores and pairs are those of a tile.
            let sums = unsafe { weights(&s, &mut p, max) };
            assert!(p.iter().all(|pair| *pair == 0) && sums == [0.0; QUERIES], "beside {max}");
        }
    }

    /// The sums of the weights.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
    fn weights(s: &[f32], p: &mut [u32], max: f32) -> [f32; QUERIES] {
        assert!(s.len() == 64 * QUERIES && p.len() == 32 * QUERIES);
        let mut sums = [0.0; QUERIES];
        // SAFETY: scores and pairs are those of a tile, and there are 16 sums.
        unsafe {
            let (max, zero) = (_mm512_set1_ps(max), _mm512_setzero_ps());
            let weights = TileWeights::new((s.as_ptr(), p.as_mut_ptr()), max, zero, false);
            _mm512_storeu_ps(sums.as_mut_ptr(), weights.finish());
        }
        sums
    }
}
