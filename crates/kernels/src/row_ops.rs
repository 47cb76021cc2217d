//! Operations on rows of stored weights and on sums of them.

use half::f16;

use crate::simd::{Kernel, Simd, load_part, store_part};
use crate::{convert, isa};

/// Numbers that are worked on together: a multiple of every vector's.
const LANES: usize = 16;

/// The mean of rows of `width`, summed in f64; zeros of no row.
pub fn mean(rows: &[f32], width: usize) -> Vec<f32> {
    let mut sums = vec![0.0f64; width];
    for row in rows.chunks_exact(width) {
        sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x));
    }
    let count = (rows.len() / width).max(1) as f64;
    sums.into_iter().map(|sum| (sum / count) as f32).collect()
}

/// Replaces a row of weights by a new one, rounded to `f16`, and updates sums over rows: `sum += new − old`. Weights in
/// `f16` are multiples of 2⁻²⁴, so that sums in `f64` are exact.
///
/// # Panics
/// If the lengths differ.
pub fn replace_row_in_sums(row: &mut [f16], new: &[f32], sums: &mut [f64]) {
    assert!(new.len() == row.len() && sums.len() == row.len(), "rows of one length");
    isa::process_level().run(ReplaceRow { row, new, sums });
}

struct ReplaceRow<'a> {
    row: &'a mut [f16],
    new: &'a [f32],
    sums: &'a mut [f64],
}

impl Kernel for ReplaceRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let slots = self.row.chunks_mut(LANES).zip(self.new.chunks(LANES)).zip(self.sums.chunks_mut(LANES));
        for ((row, new), sums) in slots {
            let (mut old, mut rounded) = ([0.0f32; LANES], [0.0f32; LANES]);
            let n = row.len();
            for i in (0..n).step_by(S::LANES) {
                let at = row.as_mut_ptr().wrapping_add(i);
                // SAFETY: the counts stay within slices of `n` and arrays of LANES, a multiple of the vector's.
                unsafe {
                    simd.store(old.as_mut_ptr().add(i), load_part(simd, at, n - i));
                    store_part(simd, at, load_part(simd, new.as_ptr().add(i), n - i), n - i);
                    simd.store(rounded.as_mut_ptr().add(i), load_part(simd, at, n - i));
                }
            }
            // Not in `f32`, where 7 − 2⁻²⁴ is 7.
            for ((sum, old), new) in sums.iter_mut().zip(old).zip(rounded) {
                *sum += f64::from(new) - f64::from(old);
            }
        }
    }
}

/// row = `new`, rounded to `f16`, ties to even.
///
/// # Panics
/// If the lengths differ.
pub fn round_to_f16(row: &mut [f16], new: &[f32]) {
    assert_eq!(row.len(), new.len(), "rows of one length");
    convert::f32_to_f16(new, row);
}

/// row = max(row, other), element by element; no element is negative.
///
/// # Panics
/// If the lengths differ.
pub fn max_assign(row: &mut [f16], other: &[f16]) {
    assert_eq!(row.len(), other.len(), "rows of one length");
    // Numbers in `f16` that are not negative are ordered as their bits are.
    for (to, other) in row.iter_mut().zip(other) {
        let (a, b) = (to.to_bits() as i16, other.to_bits() as i16);
        *to = f16::from_bits(a.max(b) as u16);
    }
}

/// The index of the smallest value among those whose position is below `before`; of equal values, the index of the largest
/// position. A NaN is never the smallest. None if no position is below `before`, or all of their values are NaN.
///
/// # Panics
/// If the lengths differ.
pub fn argmin_before<T>(values: &[T], positions: &[u32], before: u32) -> Option<usize>
where
    T: Copy + PartialOrd + From<f32>,
{
    assert_eq!(values.len(), positions.len(), "a position for every value");
    isa::process_level().run(ArgminBefore { sums: values, positions, before })
}

struct ArgminBefore<'a, T> {
    sums: &'a [T],
    positions: &'a [u32],
    before: u32,
}

impl<T: Copy + PartialOrd + From<f32>> Kernel for ArgminBefore<'_, T> {
    type Output = Option<usize>;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> Option<usize> {
        let ArgminBefore { sums, positions, before } = self;
        let infinity = T::from(f32::INFINITY);
        let mut lanes = [infinity; LANES];
        let whole = sums.len() / LANES * LANES;
        for (sums, positions) in sums[..whole].chunks_exact(LANES).zip(positions.chunks_exact(LANES)) {
            for i in 0..LANES {
                let sum = if positions[i] < before { sums[i] } else { infinity };
                lanes[i] = if sum < lanes[i] { sum } else { lanes[i] };
            }
        }
        let mut least = infinity;
        for lane in lanes {
            least = if lane < least { lane } else { least };
        }
        for i in whole..sums.len() {
            least = if positions[i] < before && sums[i] < least { sums[i] } else { least };
        }
        let mut found: Option<usize> = None;
        for (group, sums) in sums.chunks(LANES).enumerate() {
            let mut any = false;
            for sum in sums {
                any |= *sum <= least;
            }
            if any {
                for i in group * LANES..group * LANES + sums.len() {
                    let here = self.sums[i] <= least && positions[i] < before;
                    if here && found.is_none_or(|best| positions[best] < positions[i]) {
                        found = Some(i);
                    }
                }
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_follow_the_rows_and_the_lowest_is_found() {
        let n = 37;
        let born: Vec<u32> = (0..n as u32).map(|i| i * 5 % 37).collect();
        let weights = |seed: u32| -> Vec<f32> {
            (0..n as u32).map(|i| ((i * 7 + seed * 13) % 31) as f32 / 64.0).collect()
        };
        let (mut row, mut sums) = (vec![f16::ZERO; n], vec![0.0; n]);
        replace_row_in_sums(&mut row, &weights(1), &mut sums);
        let mut other = vec![f16::ZERO; n];
        replace_row_in_sums(&mut other, &weights(3), &mut sums);
        replace_row_in_sums(&mut row, &weights(2), &mut sums);
        for (i, sum) in sums.iter().enumerate() {
            assert_eq!(*sum, f64::from(weights(2)[i]) + f64::from(weights(3)[i]), "{i}");
        }
        max_assign(&mut row, &other);
        for (i, row) in row.iter().enumerate() {
            assert_eq!(row.to_f32(), weights(2)[i].max(weights(3)[i]), "{i}");
        }
        for before in [0, 1, 17, 37, 99] {
            let expected = (0..n)
                .filter(|i| born[*i] < before)
                .min_by(|a, b| sums[*a].total_cmp(&sums[*b]).then(born[*b].cmp(&born[*a])));
            assert_eq!(argmin_before(&sums, &born, before), expected, "{before}");
            // These sums are exact in `f32`.
            let short: Vec<f32> = sums.iter().map(|sum| *sum as f32).collect();
            assert_eq!(argmin_before(&short, &born, before), expected, "{before}");
        }
        assert_eq!(argmin_before(&[0.0; 20], &(0..20).collect::<Vec<_>>(), 9), Some(8));
        assert_eq!(argmin_before::<f64>(&[], &[], 9), None);
    }

    #[test]
    fn differences_of_weights_are_exact() {
        for (old, new) in
            [(1.999f32, 6e-8f32), (0.5, 0.500_488_3), (2.0, 5.96e-8), (7.0, 1.2e-7), (0.0, 3e-8)]
        {
            let (old, new) = (f16::from_f32(old), f16::from_f32(new));
            let (mut row, mut sums) = ([old], [f64::from(old)]);
            replace_row_in_sums(&mut row, &[new.to_f32()], &mut sums);
            assert_eq!(sums, [f64::from(new)], "{old} {new}");
        }
    }
}
