//! What requests take of this server, as moving averages over the latest ones.

use std::time::Duration;

use refrain::engine::RequestStats;

/// The share of the newest request in an average.
const NEWEST: f64 = 0.2;

/// Moving averages, counted at first tokens. 0 where nothing was counted yet.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Averages {
    /// Seconds from a request's start to its first token.
    pub(crate) seconds: f64,
    /// Rows that methods computed of documents, as a share of all of them.
    pub(crate) charge: f64,
    /// Tokens of prompts computed a second.
    pub(crate) tokens_per_second: f64,
    /// Bytes of stored chunks brought in a second, by each thread that does.
    pub(crate) bytes_per_second: f64,
}

impl Averages {
    /// Counts a request whose first token came `time` after its start.
    pub(crate) fn count(&mut self, time: Duration, stats: &RequestStats) {
        self.seconds = (1.0 - NEWEST) * self.seconds + NEWEST * time.as_secs_f64();
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
        if stats.prefilled_chunks == 0 && stats.compute_ttft > 0.0 {
            average(&mut self.tokens_per_second, computed / stats.compute_ttft);
        }
        if stats.bytes_loaded > 0 && stats.load_seconds > 0.0 {
            average(&mut self.bytes_per_second, stats.bytes_loaded as f64 / stats.load_seconds);
        }
    }
}

fn average(mean: &mut f64, newest: f64) {
    *mean = if *mean > 0.0 { (1.0 - NEWEST) * *mean + NEWEST * newest } else { newest };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_of_what_was_computed_and_loaded() {
        let mut averages = Averages::default();
        let mut stats = RequestStats {
            prompt_tokens: 1200,
            document_tokens: 1000,
            charged_ratio: 0.3,
            compute_ttft: 0.5,
            bytes_loaded: 4000,
            load_seconds: 0.1,
            ..RequestStats::default()
        };
        averages.count(Duration::from_secs(1), &stats);
        assert_eq!((averages.charge, averages.tokens_per_second), (0.3, 1000.0));
        assert_eq!(averages.bytes_per_second, 40_000.0);
        // A request that had to prefill chunks tells nothing of the rate, and one without documents nothing of the charge.
        (stats.prefilled_chunks, stats.compute_ttft) = (3, 50.0);
        averages.count(Duration::from_secs(1), &stats);
        stats = RequestStats { prompt_tokens: 100, compute_ttft: 0.05, ..RequestStats::default() };
        averages.count(Duration::from_secs(1), &stats);
        assert_eq!((averages.charge, averages.bytes_per_second), (0.3, 40_000.0));
        assert!((averages.tokens_per_second - 1200.0).abs() < 1e-6, "{averages:?}");
        // Behind a beginning that was taken over, documents included, 120 tokens were computed.
        stats = RequestStats {
            prompt_tokens: 1120,
            document_tokens: 900,
            prefix_tokens: 1000,
            compute_ttft: 0.1,
            ..stats
        };
        averages.count(Duration::from_secs(1), &stats);
        assert_eq!(averages.charge, 0.3);
        assert!((averages.tokens_per_second - 1200.0).abs() < 1e-6, "{averages:?}");
    }
}
