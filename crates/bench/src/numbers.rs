//! Numbers as tables have them.

/// The middle value, or the mean of the middle two; NaN of no values.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = |at: usize| values.get(at).copied().unwrap_or(f64::NAN);
    (middle(values.len().saturating_sub(1) / 2) + middle(values.len() / 2)) / 2.0
}

/// Microseconds, without a unit.
pub(crate) fn microseconds(seconds: f64) -> String {
    number(1e6 * seconds)
}

/// A number with a digit behind the point if it is below 10, else with none.
pub(crate) fn number(value: f64) -> String {
    if value < 10.0 { format!("{value:.1}") } else { format!("{value:.0}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_is_the_mean_of_the_middle_two() {
        assert_eq!([vec![3.0, 1.0, 2.0], vec![4.0, 1.0, 2.0, 3.0], vec![5.0]].map(median), [2.0, 2.5, 5.0]);
        assert!(median(Vec::new()).is_nan());
    }
}
