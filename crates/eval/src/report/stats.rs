//! Means and medians with their confidence intervals.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// A statistic of samples with its 95 % interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Stat {
    pub value: f64,
    pub low: f64,
    pub high: f64,
    pub samples: usize,
    /// There are samples enough, in all and in every group, for the interval to mean something.
    pub enough: bool,
}

/// Fewer samples decide nothing: the bootstrap's interval is too narrow, and of one sample has no width.
const ENOUGH: usize = 8;
const RESAMPLES: usize = 2000;
const SEED: u64 = 0;

impl Stat {
    pub(super) fn times(self, scale: f64) -> Stat {
        Stat { value: self.value * scale, low: self.low * scale, high: self.high * scale, ..self }
    }
}

/// The percentile bootstrap (Efron 1979): each group is resampled in itself, one sample fewer than it has: as many would make the variance
/// of a mean of n samples too small by (n − 1) / n (McCarthy and Snowden 1985). Groups without samples do not count. None
/// without a sample, or if the statistic is not a number. No width where a group has fewer than two samples.
pub(super) fn bootstrap<T: Copy + PartialEq>(
    mut groups: Vec<Vec<T>>,
    statistic: impl Fn(&[Vec<T>]) -> f64,
) -> Option<Stat> {
    groups.retain(|group| !group.is_empty());
    let samples = groups.iter().map(Vec::len).sum();
    let value = if samples == 0 { f64::NAN } else { statistic(&groups) };
    if !value.is_finite() {
        return None;
    }
    // A group of one sample does not vary, whatever it is: an interval over such groups would be too narrow.
    let varies = groups.iter().all(|group| group.len() > 1);
    let enough = samples >= ENOUGH && varies;
    // Resamples of equal samples are equal.
    if !varies || groups.iter().all(|group| group.iter().all(|sample| *sample == group[0])) {
        return Some(Stat { value, low: value, high: value, samples, enough });
    }
    let mut random = ChaCha8Rng::seed_from_u64(SEED);
    let mut drawn = groups.clone();
    drawn.iter_mut().for_each(|group| _ = group.pop());
    let mut values: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            for (to, from) in drawn.iter_mut().zip(&groups) {
                // A high product is as even as a remainder, and faster.
                to.fill_with(|| from[((u64::from(random.next_u32()) * from.len() as u64) >> 32) as usize]);
            }
            statistic(&drawn)
        })
        .filter(|value| value.is_finite())
        .collect();
    values.sort_by(f64::total_cmp);
    let at = |part: f64| values.get((part * values.len() as f64) as usize).copied().unwrap_or(value);
    Some(Stat { value, low: at(0.025), high: at(0.975), samples, enough })
}

pub(super) fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The unweighted mean of the groups' means.
pub(super) fn mean_of_means(groups: &[Vec<f64>]) -> f64 {
    groups.iter().map(|group| mean(group)).sum::<f64>() / groups.len() as f64
}

/// Mean over groups of the mean of the pairs' first values, divided by that of their second values.
pub(super) fn ratio_of_means(groups: &[Vec<(f64, f64)>]) -> f64 {
    let sum = |of: fn(&(f64, f64)) -> f64| -> f64 {
        groups.iter().map(|group| group.iter().map(of).sum::<f64>() / group.len() as f64).sum()
    };
    sum(|pair| pair.0) / sum(|pair| pair.1)
}

/// The median of all samples together.
pub(super) fn median(groups: &[Vec<f64>]) -> f64 {
    let mut values = groups.concat();
    let (even, half) = (values.len().is_multiple_of(2), values.len() / 2);
    let (below, upper, _) = values.select_nth_unstable_by(half, f64::total_cmp);
    let lower = below.iter().copied().max_by(f64::total_cmp).filter(|_| even);
    lower.map_or(*upper, |lower| (lower + *upper) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_hold_the_mean_and_are_the_same_again() {
        let groups = vec![(0..40).map(f64::from).collect::<Vec<_>>(), vec![1.0, 5.0, 9.0]];
        let stat = bootstrap(groups.clone(), mean_of_means).unwrap();
        assert_eq!((stat.value, stat.samples), ((19.5 + 5.0) / 2.0, 43));
        assert!(stat.low < stat.value && stat.value < stat.high);
        assert_eq!(bootstrap(groups, mean_of_means), Some(stat));
    }

    #[test]
    fn a_wide_sample_has_the_normal_interval() {
        // Standard error of the mean of 400 values, uniform on 0..1.
        let values: Vec<f64> = (0..400).map(|i| (f64::from(i) + 0.5) / 400.0).collect();
        let stat = bootstrap(vec![values], mean_of_means).unwrap();
        let error = (1.0f64 / 12.0 / 400.0).sqrt();
        assert!(((stat.high - stat.low) / (2.0 * 1.96 * error) - 1.0).abs() < 0.08, "{stat:?}");
    }

    /// The standard error of the mean of n samples is that of n - 1 in the denominator, also of two.
    #[test]
    fn small_groups_have_the_whole_variance() {
        let groups: Vec<Vec<f64>> = (0..200).map(|_| vec![0.0, 1.0]).collect();
        let stat = bootstrap(groups, mean_of_means).unwrap();
        let error = (0.5f64 / 2.0 / 200.0).sqrt();
        assert!(((stat.high - stat.low) / (2.0 * 1.96 * error) - 1.0).abs() < 0.08, "{stat:?}");
    }

    #[test]
    fn nothing_has_no_statistic() {
        assert_eq!(bootstrap::<f64>(vec![], mean_of_means), None);
        assert_eq!(bootstrap(vec![vec![]], mean_of_means), None);
        assert_eq!(bootstrap(vec![vec![(1.0, 0.0)]], ratio_of_means), None);
        let one = Stat { value: 3.0, low: 3.0, high: 3.0, samples: 1, enough: false };
        assert_eq!(bootstrap(vec![vec![], vec![3.0]], mean_of_means), Some(one));
    }

    #[test]
    fn few_samples_are_not_enough() {
        let enough = |groups: &[usize]| {
            let groups = groups.iter().map(|size| (0..*size).map(|i| i as f64).collect()).collect();
            bootstrap(groups, mean_of_means).unwrap().enough
        };
        assert!(!enough(&[1]) && !enough(&[7]) && enough(&[8]) && enough(&[4, 4]));
        assert!(!enough(&[1; 11]), "no group varies");
        assert!(!enough(&[1, 20]), "a group does not vary");
        let few = bootstrap(vec![vec![1.0], vec![2.0], vec![1.0, 4.0]], mean_of_means).unwrap();
        assert_eq!((few.low, few.high), (few.value, few.value));
    }

    #[test]
    fn medians_are_of_all_and_ratios_of_means() {
        assert_eq!(median(&[vec![9.0, 1.0], vec![2.0]]), 2.0);
        assert_eq!(median(&[vec![9.0, 1.0], vec![2.0, 4.0]]), 3.0);
        assert_eq!(ratio_of_means(&[vec![(1.0, 2.0), (2.0, 4.0)], vec![(0.0, 3.0)]]), 1.5 / 6.0);
    }
}
