//! Attention mass beside attention over tiles of pairs: the weights that a block's sweep over the keys computes are kept, relative to each
//! query's maximum at that time. Once maxima and sums are known they are scaled and summed by key, so that neither products nor exponentials
//! are computed again.

use std::arch::x86_64::*;

use crate::simd::pair_tiles::{SIDE, interleaved_pairs};
use crate::simd::{KEYS, sums_of_four, sums_of_lanes};

/// Words of the pairs of one tile of keys and 16 queries.
const PAIRS: usize = KEYS / 2 * SIDE;
/// Words of these and of the queries' maxima.
pub(super) const ENTRY: usize = PAIRS + SIDE;

/// Weights of the tiles and groups of queries of a block, in the order of the sweep.
pub(super) struct KeptWeights<'a> {
    entries: &'a mut [u32],
    used: usize,
}

impl<'a> KeptWeights<'a> {
    pub(super) fn new(entries: &'a mut [u32]) -> KeptWeights<'a> {
        KeptWeights { entries, used: 0 }
    }

    /// Room for the pairs of the next tile and group.
    pub(super) fn pairs(&mut self) -> &mut [u32] {
        &mut self.entries[self.used * ENTRY..][..PAIRS]
    }

    /// Takes note of the maxima that these pairs are relative to.
    pub(super) fn push(&mut self, max: &[f32; SIDE]) {
        let to = &mut self.entries[self.used * ENTRY + PAIRS..][..SIDE];
        to.copy_from_slice(bytemuck::cast_slice(max));
        self.used += 1;
    }

    /// All entries, in the order of the sweep.
    pub(super) fn entries(&self) -> impl Iterator<Item = &[u32]> {
        self.entries[..self.used * ENTRY].chunks_exact(ENTRY)
    }
}

/// Multiplies the pairs of a tile by pairs of noise, 32 rows of 16 each, and adds the products to the queries' sums.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) fn multiply(pairs: &mut [u32], noise: &[u32], sums: &mut [f32; SIDE]) {
    let upper = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
    // SAFETY: rows have 16 words.
    unsafe {
        let mut totals = [_mm512_loadu_ps(sums.as_ptr()), _mm512_setzero_ps()];
        for (pairs, noise) in pairs.chunks_exact_mut(SIDE).zip(noise.chunks_exact(SIDE)) {
            let (pair, by) =
                (_mm512_loadu_si512(pairs.as_ptr().cast()), _mm512_loadu_si512(noise.as_ptr().cast()));
            let even = |pair| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pair));
            let odd = |pair| _mm512_castsi512_ps(_mm512_and_si512(pair, upper));
            let (even, odd) = (_mm512_mul_ps(even(pair), even(by)), _mm512_mul_ps(odd(pair), odd(by)));
            totals[0] = _mm512_add_ps(totals[0], even);
            totals[1] = _mm512_add_ps(totals[1], odd);
            _mm512_storeu_si512(pairs.as_mut_ptr().cast(), interleaved_pairs(even, odd));
        }
        _mm512_storeu_ps(sums.as_mut_ptr(), _mm512_add_ps(totals[0], totals[1]));
    }
}

/// The maxima that an entry's pairs are relative to.
pub(super) fn maxima(entry: &[u32]) -> &[f32] {
    bytemuck::cast_slice(&entry[PAIRS..])
}

/// Adds the weights of a tile, each times its query's factor, to the sums of the tile's 64 keys.
#[target_feature(enable = "avx512f")]
pub(super) fn add_by_key(entries: &[(&[u32], [f32; SIDE])], sums: &mut [f32]) {
    let upper = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
    for (keys, sums) in sums[..KEYS].chunks_exact_mut(SIDE).enumerate() {
        let mut totals = [_mm512_setzero_ps(); SIDE];
        for (entry, factors) in entries {
            let pairs = &entry[keys * SIDE / 2 * SIDE..][..SIDE / 2 * SIDE];
            // SAFETY: 16 floats, and 16 words in each of eight rows.
            unsafe {
                let factors = _mm512_loadu_ps(factors.as_ptr());
                for (row, totals) in totals.chunks_exact_mut(2).enumerate() {
                    let pair = _mm512_loadu_si512(pairs.as_ptr().add(row * SIDE).cast());
                    let even = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pair));
                    let odd = _mm512_castsi512_ps(_mm512_and_si512(pair, upper));
                    totals[0] = _mm512_fmadd_ps(even, factors, totals[0]);
                    totals[1] = _mm512_fmadd_ps(odd, factors, totals[1]);
                }
            }
        }
        // SAFETY: 16 floats.
        unsafe {
            let mut fours = [_mm512_setzero_ps(); 4];
            for (fours, totals) in fours.iter_mut().zip(totals.chunks_exact(4)) {
                *fours = sums_of_four([totals[0], totals[1], totals[2], totals[3]]);
            }
            let sum = _mm512_add_ps(_mm512_loadu_ps(sums.as_ptr()), sums_of_lanes(fours));
            _mm512_storeu_ps(sums.as_mut_ptr(), sum);
        }
    }
}
