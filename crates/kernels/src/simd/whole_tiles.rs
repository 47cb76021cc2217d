//! Keys and values of 64 slots, and 16 queries, as tiles of `bf16` pairs, without a look at parts of tiles.
//!
//! Shape: 64 rows of keys become four rows of tiles, 64 rows of values two, of 32 slots each. Bound, heads of 64 and `f16`: vector units, 512 cycles for keys and 640 for
//! pairs of values, and the one that moves lanes, 512 where elements come first. Measured from the second-level cache, on a Xeon with AMX: 2,900.

use std::arch::x86_64::*;
use std::mem::transmute;

use super::KEYS;
use super::avx512::Avx512;
use super::elem::Elem;
use super::features::Features;
use super::pair_tiles::{PairTiles, SIDE, TILE, interleaved_pairs, transpose};
use crate::prefetch;

/// Packs the keys and values (64 × `width` each) of a KV head; asks for what comes `ahead` bytes later.
///
/// # Panics
/// If `width` is not a multiple of 32, or a slice has another length than its rows or tiles.
#[inline(always)]
pub(crate) fn pack_whole_tiles<T: PairTiles, E: Elem>(
    token: T,
    [k, v]: [&[E]; 2],
    width: usize,
    ahead: usize,
    [keys, values]: [&mut [u32]; 2],
) {
    assert!(width.is_multiple_of(2 * SIDE) && k.len() == KEYS * width && v.len() == KEYS * width);
    assert!(keys.len() == KEYS * width / 2 && values.len() == KEYS * width / 2);
    let features = token.features();
    // SAFETY: the token proves that the instructions are there; the assertions bound reads and writes.
    unsafe {
        pack_keys(features, k.as_ptr(), width, ahead, keys.as_mut_ptr());
        match T::ELEMENTS_FIRST {
            true => pack_values::<E, true>(features, v.as_ptr(), width, ahead, values.as_mut_ptr()),
            false => pack_values::<E, false>(features, v.as_ptr(), width, ahead, values.as_mut_ptr()),
        }
    }
}

/// Packs 16 rows, times `factor`: pair `p` of row `r` becomes word `r` of row `p` of the tiles.
///
/// # Panics
/// If the rows' length is not a multiple of 32, a row is shorter than the first, or there are not as many tiles.
#[inline(always)]
pub(crate) fn pack_columns<T: PairTiles>(token: T, rows: [&[f32]; SIDE], factor: f32, tiles: &mut [u32]) {
    let width = rows[0].len();
    assert!(width.is_multiple_of(2 * SIDE) && rows.iter().all(|row| row.len() >= width));
    assert!(tiles.len() == width / (2 * SIDE) * TILE);
    // SAFETY: the token proves that the instructions are there; the assertions bound reads and writes.
    unsafe { pack_rows_as_columns(token.features(), rows, factor, tiles) }
}

/// # Safety
/// The features must include BF16; rows must be as long as the first, for which `tiles` has room.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
unsafe fn pack_rows_as_columns(features: Features, rows: [&[f32]; SIDE], factor: f32, tiles: &mut [u32]) {
    let factor = _mm512_set1_ps(factor);
    let mut square = [0u32; TILE];
    for (block, out) in tiles.chunks_exact_mut(TILE).enumerate() {
        for (words, row) in square.chunks_exact_mut(SIDE).zip(rows) {
            // SAFETY: the caller's; a row of the square is 64 bytes.
            unsafe {
                let row = row.as_ptr().add(block * 2 * SIDE);
                let low = _mm512_mul_ps(_mm512_loadu_ps(row), factor);
                let high = _mm512_mul_ps(_mm512_loadu_ps(row.add(SIDE)), factor);
                let pairs = transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
                _mm512_storeu_si512(words.as_mut_ptr().cast(), pairs);
            }
        }
        // SAFETY: both are a square of words.
        unsafe { transpose(features, square.as_ptr(), out.as_mut_ptr(), SIDE) };
    }
}

/// Key `t` becomes row `t % 16` of the tiles of strip `t / 16`.
///
/// # Safety
/// The features must include BF16; `k` must be valid for 64 rows and `out` for their tiles.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
unsafe fn pack_keys<E: Elem>(features: Features, k: *const E, width: usize, ahead: usize, out: *mut u32) {
    let (simd, blocks) = (Avx512::widening(features), width / (2 * SIDE));
    for t in 0..KEYS {
        // SAFETY: the caller's.
        unsafe {
            let (row, out) = (k.add(t * width), out.add(t / SIDE * blocks * TILE + t % SIDE * SIDE));
            prefetch::to_read_later(row.wrapping_byte_add(ahead).cast(), width * size_of::<E>());
            for block in 0..blocks {
                let row = row.add(block * 2 * SIDE);
                let (low, high) = (E::load(simd, row), E::load(simd, row.add(SIDE)));
                let words = transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
                _mm512_storeu_si512(out.add(block * TILE).cast(), words);
            }
        }
    }
}

/// Values of a pair of slots become pairs of a tile's column where `ELEMENTS_FIRST`, and of a row otherwise.
///
/// # Safety
/// The features must include BF16; `v` must be valid for 64 rows and `out` for their tiles.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
unsafe fn pack_values<E: Elem, const ELEMENTS_FIRST: bool>(
    features: Features,
    v: *const E,
    width: usize,
    ahead: usize,
    out: *mut u32,
) {
    let (simd, high) = (Avx512::widening(features), width / SIDE);
    let mut square = [0u32; TILE];
    for tile in 0..KEYS / (2 * SIDE) * high {
        // SAFETY: the caller's.
        unsafe {
            let first = v.add(tile / high * 2 * SIDE * width + tile % high * SIDE);
            let out = out.add(tile * TILE);
            let pairs = if ELEMENTS_FIRST { square.as_mut_ptr() } else { out };
            for pair in 0..SIDE {
                let even = first.add(2 * pair * width);
                let odd = even.add(width);
                if tile % high == 0 {
                    prefetch::to_read_later(even.wrapping_byte_add(ahead).cast(), 2 * width * size_of::<E>());
                }
                let pair_words = interleaved_pairs(E::load(simd, even), E::load(simd, odd));
                _mm512_storeu_si512(pairs.add(pair * SIDE).cast(), pair_words);
            }
            if ELEMENTS_FIRST {
                transpose(features, square.as_ptr(), out, SIDE);
            }
        }
    }
}
