//! The selection rule shared by all methods: descending score, ties to the lower index, result ascending.

/// Indices of the `k` highest scores, ascending. `k` is clamped to the number of scores; NaN ranks lowest.
pub fn top_k(scores: &[f32], k: usize) -> Vec<u32> {
    let k = k.min(scores.len());
    if k == 0 {
        return Vec::new();
    }
    let rank = |i: u32| {
        let score = scores[i as usize];
        if score.is_nan() { f32::NEG_INFINITY } else { score }
    };
    let mut order: Vec<u32> = (0..scores.len() as u32).collect();
    let by_score = |a: &u32, b: &u32| rank(*b).total_cmp(&rank(*a)).then(a.cmp(b));
    if k < order.len() {
        order.select_nth_unstable_by(k - 1, by_score);
        order.truncate(k);
    }
    order.sort_unstable();
    order
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

    #[test]
    fn counts_are_floored_and_clamped() {
        assert_eq!(top_count(0.15, 100, 100), 15);
        assert_eq!(top_count(0.15, 99, 100), 14);
        assert!((0..=100).all(|percent| top_count(f64::from(percent) / 100.0, 100, 100) == percent as usize));
        assert_eq!(top_count(1.0, 100, 40), 40);
        assert_eq!(top_count(0.0, 100, 40), 0);
    }
}
