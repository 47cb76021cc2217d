//! Attention of a few queries over one segment of keys and values of 16 bits, by `vdpbf16ps`.
//!
//! Shape: up to 8 queries, 512 slots of a KV head. Bound: reading keys and values from memory. Measured on two cores of a Zen 4 that read
//! 37 GB/s, one row over 4096 keys in `f16`: 3 heads of 64 with 3 queries each take 100 µs, 84 % of the bound (`f32` FMAs: 122 µs); 2 heads
//! of 128 with 6 queries each take 156 µs, 73 % (234 µs).
//!
//! **Words.** `bf16` is multiplied as it lies. Of an `f16` the exponent and the first seven bits of the fraction, moved to where `bf16`
//! has them, are its rounded value times 2⁻¹¹² (the difference of the exponents' biases): an addition, a shift and a mask for 32 elements.
//! Queries and weights are 2¹¹² times larger then. Subnormals count as zero, infinities as 2¹⁶, and a NaN as
//! some finite number.
//!
//! **Scores.** A key's products with a query are summed over the lanes of a vector, and those of 16 keys become one vector by shuffles and
//! additions, always in the same order: a score does not depend on where its key lies.
//!
//! **Values.** The words of two values side by side are pairs of slots, which a pair of weights multiplies. Sums lie in the order of that
//! interleaving until the end of the segment.

use std::arch::x86_64::*;
use std::f32::consts::LOG2_E;
use std::mem::transmute;

use super::decode_part::{AHEAD, CHUNK, DecodePart, QUERIES, SegmentSlots, ahead, softmax_segment, width};
use super::input::Attention;
use super::query_blocks::{QueryBlock, SEGMENT};
use super::workspace::{BUFFERS, split_off_front};
use crate::buffer::Slice;
use crate::prefetch;
use crate::scratch;
use crate::simd::features::Bf16;
use crate::simd::{Kernel, Simd, sums_of_four, sums_of_lanes};

/// Elements of a vector of pairs.
const WORDS: usize = 32;
/// Slots whose scores become one vector.
const KEYS: usize = 16;
/// 2¹¹²
const F16_FACTOR: f32 = f32::from_bits((127 + 112) << 23);
/// The largest query: times 2¹¹² it is the largest `bf16`.
const LARGEST: f32 = 65280.0;

/// Computes a block of up to [`QUERIES`] queries over one segment of the keys.
pub(super) struct DecodePairs<'a> {
    pub(super) token: Bf16,
    pub(super) a: &'a Attention<'a>,
    pub(super) block: QueryBlock,
    pub(super) segment: usize,
    /// The result, a [`DecodePart`].
    pub(super) part: &'a mut [f32],
}

impl Kernel for DecodePairs<'_> {
    type Output = ();

    /// # Panics
    /// If keys and values are not both of `f16` or both of `bf16`.
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        match (self.a.k, self.a.v) {
            (Slice::F16(k), Slice::F16(v)) => {
                self.segment::<S, true>(simd, bytemuck::cast_slice(k), bytemuck::cast_slice(v));
            }
            (Slice::Bf16(k), Slice::Bf16(v)) => {
                self.segment::<S, false>(simd, bytemuck::cast_slice(k), bytemuck::cast_slice(v));
            }
            (k, v) => panic!("keys of {} and values of {} are no words of 16 bits", k.dtype(), v.dtype()),
        }
    }
}

impl DecodePairs<'_> {
    #[inline(always)]
    fn segment<S: Simd, const F16: bool>(self, simd: S, k: &[u16], v: &[u16]) {
        let DecodePairs { token, a, block, segment, part } = self;
        let (shape, n, width) = (block.shape, block.queries(), width(&block));
        let d = shape.head_dim;
        let mut part = DecodePart::new(&block, part);
        let Some(slots) = SegmentSlots::new(a, &block, segment) else { return part.clear() };
        let mut scratch = scratch::borrow(&BUFFERS, QUERIES * (SEGMENT + SEGMENT / 2 + 2 * width));
        let mut floats = scratch.as_f32_mut();
        let p = split_off_front(&mut floats, QUERIES * SEGMENT);
        let o = split_off_front(&mut floats, QUERIES * width);
        let words: &mut [u32] = bytemuck::cast_slice_mut(floats);
        let (pairs, q) = words.split_at_mut(QUERIES * SEGMENT / 2);
        let factor = if F16 { F16_FACTOR } else { 1.0 };
        let (k, v) = (shape.head(k, block.g), shape.head(v, block.g));
        let heads = Heads::<F16> { _proof: token, k, v, d, slots: &slots };
        // The queries lie in `o` before they are rounded; those past the block's are not looked at.
        for (i, (o, q)) in o.chunks_exact_mut(width).zip(q.chunks_exact_mut(width / 2)).enumerate().take(n) {
            let query = &a.q[block.at(i)..][..d];
            let scaled = |q: &f32| (q * (a.scale * LOG2_E)).clamp(-LARGEST, LARGEST) * factor;
            o.iter_mut().zip(query).for_each(|(to, q)| *to = scaled(q));
            o[d..].fill(0.0);
            // SAFETY: a query has `width` numbers and half as many words.
            unsafe { simd.round_words(o.as_ptr(), width, q.as_mut_ptr()) };
        }
        // SAFETY: the token proves AVX-512 and BF16.
        unsafe {
            match n {
                1 => heads.scores::<1>(q, p),
                2 => heads.scores::<2>(q, p),
                3 => heads.scores::<3>(q, p),
                4 => heads.scores::<4>(q, p),
                5 | 6 => heads.scores::<6>(q, p),
                _ => heads.scores::<8>(q, p),
            }
        }
        // The first values arrive while weights are computed.
        let first = heads.v[slots.seen.start * d..].as_ptr();
        prefetch::to_read_later(first.cast(), 2 * AHEAD);
        for i in 0..n {
            let p = &mut p[i * SEGMENT..][..SEGMENT];
            (part.max[i], part.sum[i]) = softmax_segment(simd, p, &slots, a.visible[block.row(i)]);
        }
        // SAFETY: the token proves AVX-512 and BF16.
        unsafe {
            match n {
                1 => heads.values::<1, 2>(p, pairs, o),
                2 => heads.values::<2, 2>(p, pairs, o),
                3 => heads.values::<3, 2>(p, pairs, o),
                4 => heads.values::<4, 1>(p, pairs, o),
                5 | 6 => heads.values::<6, 1>(p, pairs, o),
                _ => heads.values::<8, 1>(p, pairs, o),
            }
        }
        // Each 128 bits of the first half have the elements before those of the second half.
        for (to, o) in part.o.chunks_exact_mut(WORDS).zip(o.chunks_exact(WORDS)) {
            let (low, high) = o.split_at(WORDS / 2);
            for (to, (low, high)) in to.chunks_exact_mut(8).zip(low.chunks_exact(4).zip(high.chunks_exact(4)))
            {
                to[..4].copy_from_slice(low);
                to[4..].copy_from_slice(high);
            }
        }
    }
}

/// A KV head's keys and values, `F16` or `bf16`, capacity × d.
struct Heads<'a, const F16: bool> {
    /// The instructions of its methods are there.
    _proof: Bf16,
    k: &'a [u16],
    v: &'a [u16],
    d: usize,
    slots: &'a SegmentSlots,
}

impl<const F16: bool> Heads<'_, F16> {
    /// p\[i · SEGMENT + t − first\] = q\[i\] · k\[t\] for `N` queries, which follow one another in `q`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    fn scores<const N: usize>(&self, q: &[u32], p: &mut [f32]) {
        let (d, slots, words) = (self.d, self.slots, self.d.next_multiple_of(WORDS) / 2);
        assert!(q.len() >= N * words && p.len() >= N * SEGMENT && self.k.len() >= slots.seen.end * d);
        let whole = d / WORDS * WORDS;
        for t in (slots.first..slots.seen.end).step_by(KEYS) {
            let inside = t >= slots.seen.start && t + KEYS <= slots.seen.end;
            let mut fours = [[_mm512_setzero_ps(); 4]; N];
            for four in 0..4 {
                let mut keys = [self.k.as_ptr(); 4];
                for (i, key) in keys.iter_mut().enumerate() {
                    let slot = t + 4 * four + i;
                    *key = key.wrapping_add(if inside { slot } else { slots.readable(slot) } * d);
                }
                let row = self.k.as_ptr().wrapping_add((t + 4 * four) * d);
                for line in (0..4 * d).step_by(WORDS) {
                    prefetch::to_read_later(row.wrapping_add(line).wrapping_byte_add(AHEAD).cast(), 1);
                }
                let mut sums = [[_mm512_setzero_ps(); 4]; N];
                let mut vectors = [_mm512_setzero_si512(); 4];
                // SAFETY: a key has `d` elements; a query as many, rounded up to whole vectors.
                unsafe {
                    for e in (0..whole).step_by(WORDS) {
                        for (key, to) in keys.into_iter().zip(&mut vectors) {
                            *to = pairs::<F16>(_mm512_loadu_si512(key.add(e).cast()));
                        }
                        add_products(vectors, q, words, e, &mut sums);
                    }
                    if whole < d {
                        for (key, to) in keys.into_iter().zip(&mut vectors) {
                            let key = _mm512_maskz_loadu_epi16(mask(d - whole), key.add(whole).cast());
                            *to = pairs::<F16>(key);
                        }
                        add_products(vectors, q, words, whole, &mut sums);
                    }
                }
                for (fours, sums) in fours.iter_mut().zip(sums) {
                    fours[four] = sums_of_four(sums);
                }
            }
            for (p, fours) in p.chunks_exact_mut(SEGMENT).zip(fours) {
                let p = &mut p[t - slots.first..][..KEYS];
                // SAFETY: there are 16 scores.
                unsafe { _mm512_storeu_ps(p.as_mut_ptr(), sums_of_lanes(fours)) };
            }
        }
    }

    /// o\[i\] = Σ_t p\[i, t\] · v\[t\] for `N` queries, `J` vectors of pairs at a time; `pairs` receives the rounded weights. Elements
    /// lie in the order in which two values are interleaved.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    fn values<const N: usize, const J: usize>(&self, p: &[f32], pairs: &mut [u32], o: &mut [f32]) {
        let (d, slots, width) = (self.d, self.slots, self.d.next_multiple_of(WORDS));
        assert!(p.len() >= N * SEGMENT && pairs.len() >= N * SEGMENT / 2 && o.len() >= N * width);
        assert!(self.v.len() >= slots.seen.end * d);
        let factor = _mm512_set1_ps(if F16 { F16_FACTOR } else { 1.0 });
        let count = slots.seen.end - slots.first;
        for (p, pairs) in p.chunks_exact(SEGMENT).zip(pairs.chunks_exact_mut(SEGMENT / 2)).take(N) {
            for (p, pairs) in
                p.chunks_exact(WORDS).zip(pairs.chunks_exact_mut(KEYS)).take(count.div_ceil(WORDS))
            {
                // SAFETY: there are 32 weights and 16 words.
                unsafe {
                    let low = _mm512_mul_ps(_mm512_loadu_ps(p.as_ptr()), factor);
                    let high = _mm512_mul_ps(_mm512_loadu_ps(p.as_ptr().add(KEYS)), factor);
                    let words = transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
                    _mm512_storeu_si512(pairs.as_mut_ptr().cast(), words);
                }
            }
        }
        // A value of more than J vectors is read once for each J of them. Chunks keep it in the first-level cache until the last of these reads.
        let chunk = if d <= J * WORDS { SEGMENT } else { CHUNK };
        for from in (slots.first..slots.seen.end).step_by(chunk) {
            let to = (from + chunk).min(slots.seen.end);
            for e in (0..d).step_by(J * WORDS) {
                // SAFETY: weights, values and sums are as long as asserted.
                unsafe {
                    if d - e >= J * WORDS {
                        self.add_values::<N, J, true>(from..to, e, pairs, o, from > slots.first);
                    } else {
                        self.add_values::<N, J, false>(from..to, e, pairs, o, from > slots.first);
                    }
                }
            }
        }
    }

    /// The weighted values of `chunk`, to which those in `o` are added if `add`: `J` vectors of pairs from element `e` on, of which all are
    /// `WHOLE`, or some end before.
    ///
    /// # Safety
    /// The arguments must be those of [`Heads::values`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    unsafe fn add_values<const N: usize, const J: usize, const WHOLE: bool>(
        &self,
        chunk: std::ops::Range<usize>,
        e: usize,
        weights: &[u32],
        o: &mut [f32],
        add: bool,
    ) {
        let (d, slots, width) = (self.d, self.slots, self.d.next_multiple_of(WORDS));
        let mut masks = [0; J];
        for (j, to) in masks.iter_mut().enumerate() {
            *to = mask(d.saturating_sub(e + j * WORDS));
        }
        let vectors = if WHOLE { J } else { (d - e).div_ceil(WORDS) };
        let mut sums = [[[_mm512_setzero_ps(); 2]; J]; N];
        // SAFETY: values have `d` elements, and what lies past them is masked; there are `vectors` of sums, and a weight for each slot.
        unsafe {
            for (i, sums) in sums.iter_mut().enumerate().take(if add { N } else { 0 }) {
                for (j, [low, high]) in sums.iter_mut().enumerate().take(vectors) {
                    let o = o.as_ptr().add(i * width + e + j * WORDS);
                    (*low, *high) = (_mm512_loadu_ps(o), _mm512_loadu_ps(o.add(WORDS / 2)));
                }
            }
            let ahead = ahead(2 * chunk.len() * d, e / (J * WORDS), d.div_ceil(J * WORDS));
            let mut next = self.v.as_ptr().wrapping_add(chunk.start * d).wrapping_byte_add(ahead);
            for t in chunk.step_by(2) {
                let even = self.v.as_ptr().wrapping_add(slots.readable(t) * d + e);
                let odd = self.v.as_ptr().wrapping_add(slots.readable(t + 1) * d + e);
                let weights = weights.as_ptr().add((t - slots.first) / 2);
                for j in 0..J {
                    let (a, b) = (even.wrapping_add(j * WORDS), odd.wrapping_add(j * WORDS));
                    prefetch::to_read_later(next.cast(), 1);
                    prefetch::to_read_later(next.wrapping_add(WORDS).cast(), 1);
                    next = next.wrapping_add(2 * WORDS);
                    let (a, b) = if WHOLE {
                        (_mm512_loadu_si512(a.cast()), _mm512_loadu_si512(b.cast()))
                    } else {
                        (
                            _mm512_maskz_loadu_epi16(masks[j], a.cast()),
                            _mm512_maskz_loadu_epi16(masks[j], b.cast()),
                        )
                    };
                    let (a, b) = (pairs::<F16>(a), pairs::<F16>(b));
                    let (low, high) = (_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b));
                    for (i, sums) in sums.iter_mut().enumerate() {
                        let weight = _mm512_set1_epi32(*weights.add(i * SEGMENT / 2).cast());
                        sums[j][0] = dot(sums[j][0], low, weight);
                        sums[j][1] = dot(sums[j][1], high, weight);
                    }
                }
            }
            for (i, sums) in sums.iter().enumerate() {
                for (j, [low, high]) in sums.iter().enumerate().take(vectors) {
                    let o = o.as_mut_ptr().add(i * width + e + j * WORDS);
                    _mm512_storeu_ps(o, *low);
                    _mm512_storeu_ps(o.add(WORDS / 2), *high);
                }
            }
        }
    }
}

/// Adds the products of 32 elements of four keys with those of `N` queries from element `e` on.
///
/// # Safety
/// `N` queries must have 32 elements from `e` on, `words` words apart.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn add_products<const N: usize>(
    keys: [__m512i; 4],
    q: &[u32],
    words: usize,
    e: usize,
    sums: &mut [[__m512; 4]; N],
) {
    for (i, sums) in sums.iter_mut().enumerate() {
        // SAFETY: this function's contract.
        let q = unsafe { _mm512_loadu_si512(q.as_ptr().add(i * words + e / 2).cast()) };
        for (sum, key) in sums.iter_mut().zip(keys) {
            *sum = dot(*sum, key, q);
        }
    }
}

/// Words of 16 bits as `bf16`: those of `f16` rounded, times 2⁻¹¹².
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn pairs<const F16: bool>(words: __m512i) -> __m512i {
    if !F16 {
        return words;
    }
    let rounded = _mm512_add_epi16(words, _mm512_set1_epi16(4));
    let moved = _mm512_srai_epi16::<3>(rounded);
    _mm512_and_si512(moved, _mm512_set1_epi16(0x8fff_u16.cast_signed()))
}

/// sum + Σ a · b over the two elements of each word.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn dot(sum: __m512, a: __m512i, b: __m512i) -> __m512 {
    // SAFETY: both types are the same 512 bits.
    unsafe { _mm512_dpbf16_ps(sum, transmute::<__m512i, __m512bh>(a), transmute::<__m512i, __m512bh>(b)) }
}

/// The first `n` elements of a vector.
fn mask(n: usize) -> u32 {
    if n >= WORDS { u32::MAX } else { (1 << n) - 1 }
}
