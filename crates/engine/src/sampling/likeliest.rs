//! The highest of a vocabulary's values. A vocabulary is never put into order for the few that are wanted of it.

/// Index of the highest value, ties to the lower index.
pub fn argmax(values: &[f32]) -> u32 {
    let highest = maximum(values);
    values.iter().position(|value| *value == highest).unwrap_or(0) as u32
}

/// The highest value; −∞ of none.
pub(super) fn maximum(values: &[f32]) -> f32 {
    let mut highest = [f32::NEG_INFINITY; 16];
    maxima(values, &mut highest);
    highest.into_iter().fold(f32::NEG_INFINITY, f32::max)
}

/// Indices of the `most` highest values, as far as they are at least `least`; the highest first, ties to the lower index.
pub(crate) fn likeliest(values: &[f32], most: usize, least: f32) -> Vec<u32> {
    let mut bound = least;
    // Sets that have no value in common: `most` of them have a maximum that is at least `bound`, and so have the highest values.
    if let Some(sets) = most.checked_mul(4).filter(|sets| (1..values.len()).contains(sets)) {
        let mut highest = vec![f32::NEG_INFINITY; sets];
        maxima(values, &mut highest);
        let (_, lowest, _) = highest.select_nth_unstable_by(most - 1, |a, b| b.total_cmp(a));
        bound = bound.max(*lowest);
    }
    let mut found: Vec<(u32, f32)> = (0..).zip(values.iter().copied()).filter(|(_, x)| *x >= bound).collect();
    let likelier = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    if most > 0 && most < found.len() {
        found.select_nth_unstable_by(most - 1, likelier);
    }
    found.truncate(most);
    found.sort_unstable_by(likelier);
    found.into_iter().map(|(at, _)| at).collect()
}

/// Maxima of as many sets of values as `highest` has places: each set has one value of every `highest.len()`.
fn maxima(values: &[f32], highest: &mut [f32]) {
    for values in values.chunks(highest.len()) {
        for (highest, value) in highest.iter_mut().zip(values) {
            *highest = if *value > *highest { *value } else { *highest };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_likeliest_are_those_of_a_vocabulary_in_order() {
        for values in [1, 5, 64, 1000, 5000] {
            // Many values stand several times.
            let all: Vec<f32> = (0..values).map(|i| ((i * 7919) % 701) as f32 / 100.0 - 3.0).collect();
            let mut sorted: Vec<u32> = (0..values as u32).collect();
            sorted.sort_by(|a, b| all[*b as usize].total_cmp(&all[*a as usize]).then(a.cmp(b)));
            assert_eq!(argmax(&all), sorted[0]);
            for most in [0, 1, 3, 20, 300, 2000, usize::MAX] {
                for least in [f32::NEG_INFINITY, -1.0, 3.9, 9.0] {
                    let kept = sorted.iter().copied().filter(|at| all[*at as usize] >= least);
                    let expected: Vec<u32> = kept.take(most).collect();
                    assert_eq!(likeliest(&all, most, least), expected, "{values} {most} {least}");
                }
            }
        }
        assert_eq!(likeliest(&[f32::NEG_INFINITY, 1.0, f32::NEG_INFINITY], 2, f32::NEG_INFINITY), [1, 0]);
        assert_eq!((argmax(&[1.0, 3.0, 3.0]), argmax(&[f32::NEG_INFINITY; 20]), argmax(&[])), (1, 0, 0));
    }
}
