//! The time of a step of decoding by its rows, as steps show it.

/// The cost of a further row, as a share of a step's, before steps of different sizes have shown it.
const FIRST_SHARE: f64 = 0.15;
/// The least share, against noise.
const LEAST_SHARE: f64 = 0.01;
/// The weight that a step keeps when the next one comes.
const DECAY: f64 = 0.97;

/// A line through the times of steps, seconds = base + each · rows, by decaying least squares.
#[derive(Clone, Debug, Default)]
pub(crate) struct StepCost {
    weight: f64,
    rows: f64,
    seconds: f64,
    rows_squared: f64,
    rows_seconds: f64,
}

impl StepCost {
    /// Takes note of a step.
    pub(crate) fn learn(&mut self, rows: usize, seconds: f64) {
        let rows = rows as f64;
        for (sum, value) in [
            (&mut self.weight, 1.0),
            (&mut self.rows, rows),
            (&mut self.seconds, seconds),
            (&mut self.rows_squared, rows * rows),
            (&mut self.rows_seconds, rows * seconds),
        ] {
            *sum = DECAY * *sum + value;
        }
    }

    /// The time of a further row as a share of the time of a step of `rows` rows.
    pub(crate) fn share_of_row(&self, rows: usize) -> f64 {
        let (mean_rows, mean) = (self.rows / self.weight, self.seconds / self.weight);
        let variance = self.rows_squared / self.weight - mean_rows * mean_rows;
        if !(variance > 0.25 && mean > 0.0) {
            return FIRST_SHARE / (1.0 + FIRST_SHARE * (rows as f64 - 1.0));
        }
        let each = (self.rows_seconds / self.weight - mean_rows * mean) / variance;
        let step = mean + each * (rows as f64 - mean_rows);
        (each / step.max(f64::MIN_POSITIVE)).max(LEAST_SHARE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cost_of_a_row_is_that_of_the_line_through_the_steps() {
        let mut cost = StepCost::default();
        assert!((cost.share_of_row(1) - FIRST_SHARE).abs() < 1e-9);
        for step in 0..40 {
            let rows = 1 + step % 5;
            cost.learn(rows, 8.0 + 2.0 * rows as f64);
        }
        assert!((cost.share_of_row(1) - 2.0 / 10.0).abs() < 1e-6);
        assert!((cost.share_of_row(6) - 2.0 / 20.0).abs() < 1e-6);
        let mut same = StepCost::default();
        (0..40).for_each(|_| same.learn(3, 1.0));
        assert!(same.share_of_row(1) == FIRST_SHARE, "steps of one size show no line");
    }
}
