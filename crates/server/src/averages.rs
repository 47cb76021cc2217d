//! What requests take of this server, as moving averages over the latest ones.

use std::time::Duration;

use refrain::engine::RequestStats;

/// The share of the newest request in an average.
const NEWEST: f64 = 0.2;

/// Moving averages, counted at first tokens. 0 where nothing was counted yet.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Averages {
    /// Seconds for which a request is computed up to its first token. Its time in the queue, and that of other work between its steps, is no
    /// part of it.
    pub(crate) seconds: f64,
    /// Rows that methods computed of documents, as a share of all of them.
    pub(crate) charge: f64,
    /// Tokens of a prompt that are computed, and the seconds that they take.
    computed: (f64, f64),
    /// Bytes of stored chunks brought in a second, by all threads together.
    pub(crate) bytes_per_second: f64,
}

impl Averages {
    /// Tokens of prompts computed a second. Prompts count by the time that they take: the rate of a few tokens behind a beginning that was
    /// taken over is not that of a long prompt.
    pub(crate) fn tokens_per_second(&self) -> f64 {
        let (tokens, seconds) = self.computed;
        if seconds > 0.0 { tokens / seconds } else { 0.0 }
    }

    /// Counts a request that was computed for `time` up to its first token.
    pub(crate) fn count(&mut self, time: Duration, stats: &RequestStats) {
        let seconds = time.as_secs_f64();
        average(&mut self.seconds, seconds);
        // A prompt whose beginning was taken over tells nothing of the method: all that follows is computed.
        let taken_over = stats.prefix_tokens > 0;
        if stats.document_tokens > 0 && !taken_over {
            average(&mut self.charge, stats.charged_ratio);
        }
        let without = |tokens| stats.prompt_tokens.saturating_sub(tokens) as f64;
        let computed = match taken_over {
            true => without(stats.prefix_tokens),
            false => without(stats.document_tokens) + stats.charged_ratio * stats.document_tokens as f64,
        };
        // The time of a request that has prefilled chunks is not that of its own tokens alone.
        if stats.prefilled_chunks == 0 {
            average(&mut self.computed.0, computed);
            average(&mut self.computed.1, seconds);
        }
        let loading = stats.load_hidden_seconds + stats.load_wait_seconds;
        if stats.bytes_loaded > 0 && loading > 0.0 {
            average(&mut self.bytes_per_second, stats.bytes_loaded as f64 / loading);
        }
    }
}

fn average(mean: &mut f64, newest: f64) {
    *mean = if *mean > 0.0 { (1.0 - NEWEST) * *mean + NEWEST * newest } else { newest };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_near(value: f64, expected: f64) {
        assert!((value / expected - 1.0).abs() < 1e-9, "{value} is not {expected}");
    }

    #[test]
    fn rates_are_of_what_was_computed_and_loaded() {
        let mut averages = Averages::default();
        assert_eq!(averages.tokens_per_second(), 0.0, "nothing is known");
        let (half, minute) = (Duration::from_millis(500), Duration::from_secs(60));
        let mut stats = RequestStats {
            prompt_tokens: 1200,
            document_tokens: 1000,
            charged_ratio: 0.3,
            // The wall clock has other requests' time as well.
            ttft: 50.0,
            compute_ttft: 40.0,
            bytes_loaded: 4000,
            // Four threads load at a time.
            load_seconds: 0.4,
            load_hidden_seconds: 0.06,
            load_wait_seconds: 0.04,
            ..RequestStats::default()
        };
        averages.count(half, &stats);
        assert_eq!((averages.seconds, averages.charge), (0.5, 0.3), "the first one counts whole");
        assert_near(averages.tokens_per_second(), 1000.0);
        assert_near(averages.bytes_per_second, 40_000.0);
        // A request that had to prefill chunks tells nothing of the rate, and one without documents nothing of the charge.
        stats.prefilled_chunks = 3;
        averages.count(minute, &stats);
        assert_near(averages.seconds, 0.8 * 0.5 + 0.2 * 60.0);
        stats = RequestStats { prompt_tokens: 100, ..RequestStats::default() };
        averages.count(half / 10, &stats);
        assert_eq!(averages.charge, 0.3);
        assert_near(averages.bytes_per_second, 40_000.0);
        assert_near(averages.tokens_per_second(), (0.8 * 500.0 + 0.2 * 100.0) / (0.8 * 0.5 + 0.2 * 0.05));
        // Behind a beginning that was taken over, documents included, 120 tokens were computed.
        let mut averages = Averages::default();
        stats = RequestStats { prompt_tokens: 1120, document_tokens: 900, prefix_tokens: 1000, ..stats };
        averages.count(half / 5, &stats);
        assert_eq!(averages.charge, 0.0);
        assert_near(averages.tokens_per_second(), 1200.0);
    }

    /// Seven further answers to a prompt of 600 tokens compute one token each, at the price of a pass over the weights.
    #[test]
    fn prompts_of_few_tokens_count_for_little_in_the_rate() {
        let mut averages = Averages::default();
        let mut stats = RequestStats { prompt_tokens: 600, ..RequestStats::default() };
        averages.count(Duration::from_millis(200), &stats);
        stats.prefix_tokens = 599;
        (0..7).for_each(|_| averages.count(Duration::from_millis(20), &stats));
        assert!(averages.tokens_per_second() > 2000.0, "{averages:?}");
    }
}
