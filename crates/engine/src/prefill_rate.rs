//! The speed of prefills of chunks, as they show it.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The weight that a prefill keeps when the next one comes.
const DECAY: f64 = 0.8;

/// Tokens and the seconds that the computing of them took, with decaying weights.
#[derive(Debug, Default)]
pub(crate) struct PrefillRate(Mutex<(f64, f64)>);

impl PrefillRate {
    /// Takes note of a prefill of so many tokens.
    pub(crate) fn learn(&self, tokens: usize, took: Duration) {
        let mut sums = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *sums = (DECAY * sums.0 + tokens as f64, DECAY * sums.1 + took.as_secs_f64());
    }

    /// The time that the prefill of so many tokens is expected to take; none before the first.
    pub(crate) fn time_of(&self, tokens: usize) -> Option<Duration> {
        let (known, seconds) = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (known > 0.0).then(|| Duration::try_from_secs_f64(seconds / known * tokens as f64).ok()).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_follows_from_the_tokens_and_the_latest_prefills() {
        let rate = PrefillRate::default();
        assert_eq!(rate.time_of(100), None);
        rate.learn(500, Duration::from_secs(1));
        assert_eq!(rate.time_of(100), Some(Duration::from_millis(200)));
        (0..40).for_each(|_| rate.learn(500, Duration::from_millis(500)));
        let time = rate.time_of(100).unwrap().as_secs_f64();
        assert!((time - 0.1).abs() < 1e-3, "{time}");
    }
}
