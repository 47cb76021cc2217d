//! Longest common subsequences, 64 cells of the table at a time.

use std::collections::HashMap;
use std::hash::Hash;

const BITS: usize = u64::BITS as usize;

/// A sequence made ready for its longest common subsequences with others.
///
/// With `T(i, j)` the length of the longest common subsequence of `other[..i]` and `sequence[..j]`, a row `i` is kept as bits:
/// bit `j` is 0 where `T(i, j + 1) = T(i, j) + 1`, else 1. From one row to the next it is `(V + (V & M)) | (V & !M)`, `M` having
/// the places of `other[i]` in the sequence (Hyyrö, Bit-parallel LCS-length computation revisited, 2004).
pub(crate) struct Pattern<'s, T> {
    sequence: &'s [T],
    places: HashMap<&'s T, Vec<u64>>,
}

impl<'s, T: Eq + Hash> Pattern<'s, T> {
    pub(crate) fn new(sequence: &'s [T]) -> Self {
        let words = sequence.len().div_ceil(BITS);
        let mut places = HashMap::new();
        for (j, item) in sequence.iter().enumerate() {
            places.entry(item).or_insert_with(|| vec![0; words])[j / BITS] |= 1 << (j % BITS);
        }
        Pattern { sequence, places }
    }

    /// Length of the longest common subsequence with `other`.
    pub(crate) fn length(&self, other: &[T]) -> usize {
        let mut row = self.first_row();
        other.iter().for_each(|item| self.advance(&mut row, item));
        row.iter().map(|word| word.count_zeros() as usize).sum()
    }

    /// One longest common subsequence with `other`, last item first. Where the last items differ, it is the one of `other` that
    /// is given up if `T(i-1, j) > T(i, j-1)`, else the sequence's.
    pub(crate) fn common<'o>(&self, other: &'o [T]) -> Vec<&'o T> {
        let mut row = self.first_row();
        let words = row.len();
        let mut rows = Vec::with_capacity(other.len() * words);
        for item in other {
            self.advance(&mut row, item);
            rows.extend_from_slice(&row);
        }
        let mut common = Vec::new();
        let (mut i, mut j) = (other.len(), self.sequence.len());
        while i > 0 && j > 0 {
            let word = rows[(i - 1) * words + (j - 1) / BITS];
            if other[i - 1] == self.sequence[j - 1] {
                common.push(&other[i - 1]);
                i -= 1;
                j -= 1;
            } else if word >> ((j - 1) % BITS) & 1 == 0 {
                // T(i, j) = max(T(i-1, j), T(i, j-1)) here, so T(i-1, j) > T(i, j-1) exactly where T(i, j) > T(i, j-1).
                i -= 1;
            } else {
                j -= 1;
            }
        }
        common
    }

    fn first_row(&self) -> Vec<u64> {
        vec![u64::MAX; self.sequence.len().div_ceil(BITS)]
    }

    fn advance(&self, row: &mut [u64], item: &T) {
        let Some(places) = self.places.get(item) else { return };
        let mut carry = false;
        for (v, m) in row.iter_mut().zip(places) {
            let (sum, over) = v.overflowing_add(*v & m);
            let (sum, over_by_carry) = sum.overflowing_add(carry.into());
            carry = over || over_by_carry;
            *v = sum | (*v & !m);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The subsequence by the whole table and the reference's rule.
    fn by_table(other: &[u8], sequence: &[u8]) -> Vec<u8> {
        let (n, m) = (other.len(), sequence.len());
        let mut table = vec![vec![0; m + 1]; n + 1];
        for i in 1..=n {
            for j in 1..=m {
                table[i][j] = if other[i - 1] == sequence[j - 1] {
                    table[i - 1][j - 1] + 1
                } else {
                    table[i - 1][j].max(table[i][j - 1])
                };
            }
        }
        let (mut i, mut j, mut common) = (n, m, Vec::new());
        while i > 0 && j > 0 {
            if other[i - 1] == sequence[j - 1] {
                common.push(other[i - 1]);
                (i, j) = (i - 1, j - 1);
            } else if table[i - 1][j] > table[i][j - 1] {
                i -= 1;
            } else {
                j -= 1;
            }
        }
        common
    }

    #[test]
    fn equals_the_table_and_its_traceback() {
        let mut state = 1u32;
        let mut draw = |below: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) % below
        };
        for round in 0..300 {
            let letters = 2 + draw(5);
            let longest = if round % 3 == 0 { 200 } else { 20 };
            let [a, b] = [(); 2].map(|_| (0..draw(longest)).map(|_| draw(letters) as u8).collect::<Vec<_>>());
            let expected = by_table(&a, &b);
            let pattern = Pattern::new(&b);
            assert_eq!(pattern.common(&a).into_iter().copied().collect::<Vec<_>>(), expected, "{a:?} {b:?}");
            assert_eq!(pattern.length(&a), expected.len(), "{a:?} {b:?}");
        }
    }
}
