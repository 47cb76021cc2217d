//! Sums by key of the weights of some groups of 16 queries, which lie as pairs of two keys.
//!
//! Shape: up to eight groups' weights of 64 keys become 64 sums. Bound with AMX: two products of tiles for a group, 32 cycles, and two tiles
//! that come from the second-level cache, 42. Vectors take some 70 cycles by their multiplications alone.

use std::arch::asm;
use std::arch::x86_64::*;

use super::{KEYS, sums_of_four, sums_of_lanes};

/// Queries of a group, and rows and columns of a tile.
const SIDE: usize = 16;
/// Words of a tile.
const TILE: usize = SIDE * SIDE;

/// Weights that 16 queries give to 64 keys, and the factor of each query's.
#[derive(Clone, Copy)]
pub(crate) struct KeptTile<'a> {
    /// 32 rows of 16 words: a row is two keys, a word both weights of a query.
    pub(crate) pairs: &'a [u32],
    pub(crate) factors: [f32; SIDE],
}

impl KeptTile<'_> {
    /// No weights.
    pub(crate) const NONE: KeptTile<'static> = KeptTile { pairs: &[], factors: [0.0; SIDE] };
}

/// Adds the weights, each times its query's factor, to the sums of the 64 keys, by vectors.
#[target_feature(enable = "avx512f")]
pub(super) fn add_by_vectors(tiles: &[KeptTile], sums: &mut [f32]) {
    let upper = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
    for (keys, sums) in sums[..KEYS].chunks_exact_mut(SIDE).enumerate() {
        let mut totals = [_mm512_setzero_ps(); SIDE];
        for KeptTile { pairs, factors } in tiles {
            let pairs = &pairs[keys * SIDE / 2 * SIDE..][..SIDE / 2 * SIDE];
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

/// Words of a query's row of factors.
const ROW: usize = 4;

/// The rows of a tile that has a row of four words for each query: its factor for even keys and for odd keys, and what rounding to `bf16` left
/// of it for both. Rows lie four words apart, so that a tile that is loaded has later rows behind each; nobody uses their products.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Factors([u32; ROW * SIDE + SIDE - ROW]);

/// Most groups that are added at once.
const MOST: usize = 8;

/// [`add_by_vectors`] by tiles: weights are the rows of the first operand, so that a product sums over queries.
///
/// # Safety
/// The thread's tile registers must be configured.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn add_by_tiles(tiles: &[KeptTile], sums: &mut [f32]) {
    let sums = &mut sums[..KEYS];
    for tiles in tiles.chunks(MOST) {
        let mut factors = [Factors([0; ROW * SIDE + SIDE - ROW]); MOST];
        let mut operands = [(std::ptr::null(), std::ptr::null()); MOST];
        for (operand, (to, tile)) in operands.iter_mut().zip(factors.iter_mut().zip(tiles)) {
            split(&tile.factors, to);
            *operand = (tile.pairs[..2 * TILE].as_ptr(), to.0.as_ptr());
        }
        let mut of_rows = [0f32; 2 * TILE];
        // SAFETY: there are two tiles of weights and a tile of factors for each operand, one at least, and two of results; the caller's.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "2:",
                "mov {w}, [{operands}]",
                "mov {f}, [{operands} + 8]",
                "tileloadd tmm4, [{f} + {s16}*1]",
                "tileloadd tmm5, [{w} + {s64}*1]",
                "tdpbf16ps tmm0, tmm5, tmm4",
                "tileloadd tmm6, [{w} + {s64}*1 + 1024]",
                "tdpbf16ps tmm1, tmm6, tmm4",
                "add {operands}, 16",
                "dec {n}",
                "jnz 2b",
                "tilestored [{c} + {s64}*1], tmm0",
                "tilestored [{c} + {s64}*1 + 1024], tmm1",
                operands = inout(reg) operands.as_ptr() => _,
                n = inout(reg) tiles.len() => _,
                w = out(reg) _,
                f = out(reg) _,
                c = in(reg) of_rows.as_mut_ptr(),
                s16 = in(reg) 4 * ROW,
                s64 = in(reg) 4 * SIDE,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
        for (sums, row) in sums.chunks_exact_mut(2).zip(of_rows.chunks_exact(SIDE)) {
            sums[0] += row[0] + row[2];
            sums[1] += row[1] + row[3];
        }
    }
}

/// Writes the rows of factors.
#[target_feature(enable = "avx512f")]
fn split(factors: &[f32; SIDE], to: &mut Factors) {
    // Queries in the order in which the rows of four vectors follow one another when lanes of 128 bits are turned about.
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let upper = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
    // SAFETY: there are 16 factors, and 16 rows of four words.
    unsafe {
        let factors = _mm512_permutexvar_ps(order, _mm512_loadu_ps(factors.as_ptr()));
        let rounded = _mm512_and_si512(_mm512_castps_si512(factors), upper);
        let left = _mm512_castps_si512(_mm512_sub_ps(factors, _mm512_castsi512_ps(rounded)));
        let left = _mm512_and_si512(left, upper);
        let (even, left_even) = (_mm512_srli_epi32::<16>(rounded), _mm512_srli_epi32::<16>(left));
        let (low, left_low) = (_mm512_unpacklo_epi32(even, rounded), _mm512_unpacklo_epi32(left_even, left));
        let (high, left_high) =
            (_mm512_unpackhi_epi32(even, rounded), _mm512_unpackhi_epi32(left_even, left));
        let rows = [
            _mm512_unpacklo_epi64(low, left_low),
            _mm512_unpackhi_epi64(low, left_low),
            _mm512_unpacklo_epi64(high, left_high),
            _mm512_unpackhi_epi64(high, left_high),
        ];
        for (i, rows) in rows.into_iter().enumerate() {
            _mm512_storeu_si512(to.0.as_mut_ptr().add(i * SIDE).cast(), rows);
        }
    }
}
