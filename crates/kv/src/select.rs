//! The selection rule shared by all methods: descending score, ties to the lower index, result ascending.

/// Indices of the `k` highest scores, ascending. `k` is clamped to the number of scores; NaN ranks lowest.
pub fn top_k(scores: &[f32], k: usize) -> Vec<u32> {
    let positions: Vec<u32> = (0..scores.len() as u32).collect();
    survivors(scores, &positions, k)
}

/// Slots of the `keep` highest scores, ascending; of equal ones the earlier position goes first. `keep` is clamped to the
/// number of scores; NaN ranks lowest.
pub fn survivors(scores: &[f32], positions: &[u32], keep: usize) -> Vec<u32> {
    let ranked = |(slot, score): (u32, &f32)| (rank(*score, positions[slot as usize]), slot);
    let mut order: Vec<(u64, u32)> = (0..).zip(scores).map(ranked).collect();
    if keep < order.len() {
        order.select_nth_unstable(keep);
        order.truncate(keep);
    }
    let mut slots: Vec<u32> = order.into_iter().map(|(_, slot)| slot).collect();
    slots.sort_unstable();
    slots
}

/// The slot that [`survivors`] would leave out if one had to go; none if there is none.
pub fn weakest(scores: &[f32], positions: &[u32]) -> Option<usize> {
    let mut lowest = f32::INFINITY;
    for score in scores {
        // NaN is not below anything.
        lowest = if *score < lowest { *score } else { lowest };
    }
    if scores.iter().any(|score| score.is_nan()) {
        lowest = f32::NEG_INFINITY;
    }
    let weak = |slot: &usize| scores[*slot] <= lowest || scores[*slot].is_nan();
    (0..scores.len()).filter(weak).max_by_key(|slot| positions[*slot])
}

/// A number that is lower for a higher score, and of equal scores for an earlier position.
fn rank(score: f32, position: u32) -> u64 {
    let score = if score.is_nan() { f32::NEG_INFINITY } else { score + 0.0 };
    // Ascends as `f32::total_cmp` orders scores.
    let bits = score.to_bits();
    let ascending = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
    u64::from(!ascending) << 32 | u64::from(position)
}

/// `floor(ratio · tokens)`, clamped to `0..=candidates`.
///
/// `ratio · tokens` is nudged by 1e-9 so that a product like 0.29 · 100, which rounds to 28.999…, counts 29.
pub fn top_count(ratio: f64, tokens: usize, candidates: usize) -> usize {
    let count = (ratio * tokens as f64 + 1e-9).floor();
    if count <= 0.0 { 0 } else { (count as usize).min(candidates) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_the_lower_index_and_the_result_ascends() {
        assert_eq!(top_k(&[1.0, 3.0, 3.0, 2.0, 3.0], 2), [1, 2]);
        assert_eq!(top_k(&[1.0, 3.0, 3.0, 2.0, 3.0], 4), [1, 2, 3, 4]);
        assert_eq!(top_k(&[0.0, -0.0, 0.0], 1), [0]);
        assert_eq!(top_k(&[f32::NAN, -1.0], 1), [1]);
        assert_eq!(top_k(&[1.0], 9), [0]);
        assert!(top_k(&[], 3).is_empty());
    }

    proptest::proptest! {
        #[test]
        fn one_that_goes_is_the_one_that_does_not_survive(
            scores in proptest::collection::vec(
                proptest::sample::select(vec![0.0f32, -0.0, 1.0, -2.5, f32::INFINITY, f32::NEG_INFINITY, f32::NAN]), 1..20),
            shift in 0usize..20,
        ) {
            let n = scores.len();
            let positions: Vec<u32> = (0..n).map(|i| ((i + shift) * 7 % n.next_power_of_two().max(8)) as u32 * 64 + i as u32).collect();
            let left = survivors(&scores, &positions, n - 1);
            let gone = (0..n).find(|slot| !left.contains(&(*slot as u32)));
            proptest::prop_assert_eq!(gone, weakest(&scores, &positions));
        }
    }

    #[test]
    fn of_equal_scores_earlier_positions_survive_wherever_they_are() {
        assert_eq!(survivors(&[1.0, 2.0, 1.0, 1.0], &[9, 8, 3, 5], 3), [1, 2, 3]);
        assert_eq!(survivors(&[1.0, 2.0, 1.0, 1.0], &[9, 8, 3, 5], 2), [1, 2]);
        assert_eq!(survivors(&[1.0, 2.0], &[0, 1], 5), [0, 1]);
        assert_eq!(weakest(&[1.0, 2.0, 1.0, 1.0], &[7, 8, 9, 5]), Some(2));
        assert_eq!(weakest(&[], &[]), None);
    }

    #[test]
    fn counts_are_floored_and_clamped() {
        assert_eq!(top_count(0.15, 100, 100), 15);
        assert_eq!(top_count(0.15, 99, 100), 14);
        assert!((0..=100).all(|percent| top_count(f64::from(percent) / 100.0, 100, 100) == percent as usize));
        assert_eq!(top_count(1.0, 100, 40), 40);
        assert_eq!(top_count(0.0, 100, 40), 0);
    }
}
