//! Counts and times of a prefill, taken while it runs.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use refrain_kv::Span;
use refrain_model::Config;

use super::capture::AttentionMap;

/// Work of a prefill.
#[derive(Clone, Debug, Default)]
pub(crate) struct PrefillStats {
    /// Document tokens whose keys and values were computed, by layer of the last pass.
    pub(crate) document_rows: Vec<usize>,
    /// Rows that probes projected, summed over their layers.
    pub(crate) probe_rows: usize,
    /// Positions computed at the last layer, before it shrinks to the last token; ascending.
    pub(crate) final_rows: Vec<u32>,
    /// Positions that were read from the cache at one layer at least.
    pub(crate) cached_tokens: usize,
    /// Positions behind the prefix cache's that were read at one layer and were not computed at the last one.
    pub(crate) reused_tokens: usize,
    /// Positions that were neither read nor computed.
    pub(crate) left_out_tokens: usize,
    /// Document tokens whose cached keys and values are exact.
    pub(crate) exact_tokens: usize,
    /// Cached tokens of parts that were prefilled for this request.
    pub(crate) prefilled_tokens: usize,
    /// First tokens of the prompt that came out of the prefix cache.
    pub(crate) prefix_tokens: usize,
    /// Floating point operations of products and attention, probes included.
    pub(crate) operations: f64,
    /// The most bytes of keys and values that were allocated at a time.
    pub(crate) kv_bytes_peak: usize,
    /// Time that the method took to choose tokens: probes, reports and decisions.
    pub(crate) selecting: Duration,
    /// Tokens of the prompt that attention has before it when the first token is chosen.
    pub(crate) kept_tokens: usize,
    /// The order in which the method has put the prompt's chunks, where it is another.
    pub(crate) order: Option<Vec<usize>>,
    /// Times that the method met a case that its paper leaves open.
    pub(crate) ambiguous_cases: usize,
    /// Attention of the question to every document token at layer 1, if it was asked for.
    pub(crate) attention: Option<Vec<f32>>,
    /// The question's attention maps by layer, if they were asked for.
    pub(crate) maps: Vec<AttentionMap>,
    /// Time that these took, which is no part of the prefill.
    pub(crate) capturing: Duration,
}

impl PrefillStats {
    /// Statistics of the pass after a probe: those of the probe that count for the whole prefill.
    pub(crate) fn after_probe(probe: PrefillStats) -> PrefillStats {
        PrefillStats {
            probe_rows: probe.probe_rows,
            operations: probe.operations,
            selecting: probe.selecting,
            capturing: probe.capturing,
            ..PrefillStats::default()
        }
    }

    /// Counts a layer at which `projected` tokens were projected and `continuing` ones went on, seeing `keys` keys together.
    pub(crate) fn count_layer(&mut self, config: &Config, projected: usize, continuing: usize, keys: usize) {
        self.operations += operations(config, projected, continuing, keys);
    }
}

/// Keys and values that were brought in, and the time that it took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LoadStats {
    /// Bytes from the store.
    pub(crate) bytes: u64,
    /// Bytes copied to the device's own memory.
    pub(crate) copied: u64,
    /// Bytes that the device's memory had.
    pub(crate) reused: u64,
    /// Summed over threads.
    pub(crate) busy: Duration,
    /// Time in which some thread loaded while the computing thread did not wait for it.
    pub(crate) hidden: Duration,
}

impl LoadStats {
    /// The difference to `before`, an earlier count.
    pub(crate) fn since(&self, before: &LoadStats) -> LoadStats {
        LoadStats {
            bytes: self.bytes - before.bytes,
            copied: self.copied - before.copied,
            reused: self.reused - before.reused,
            busy: self.busy - before.busy,
            hidden: self.hidden.saturating_sub(before.hidden),
        }
    }
}

impl std::ops::Add for LoadStats {
    type Output = LoadStats;

    fn add(self, other: LoadStats) -> LoadStats {
        LoadStats {
            bytes: self.bytes + other.bytes,
            copied: self.copied + other.copied,
            reused: self.reused + other.reused,
            busy: self.busy + other.busy,
            hidden: self.hidden + other.hidden,
        }
    }
}

/// The time in which at least one of some threads works.
#[derive(Debug, Default)]
pub(crate) struct SharedClock(Mutex<Working>);

#[derive(Debug, Default)]
struct Working {
    threads: usize,
    /// When the first of them began.
    since: Option<Instant>,
    /// Time in which a thread worked, until `since`.
    elapsed: Duration,
    /// Sum of all threads' times.
    summed: Duration,
}

impl SharedClock {
    /// Takes the time of a thread's work.
    pub(crate) fn timed<T>(&self, work: impl FnOnce() -> T) -> T {
        let lock = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let started = Instant::now();
        let mut working = lock();
        working.threads += 1;
        working.since.get_or_insert(started);
        drop(working);
        let done = work();
        let mut working = lock();
        working.threads -= 1;
        working.summed += started.elapsed();
        if working.threads == 0
            && let Some(since) = working.since.take()
        {
            working.elapsed += since.elapsed();
        }
        done
    }

    /// Time in which some thread worked, up to now, and the time of all threads that are done.
    pub(crate) fn elapsed_and_summed(&self) -> (Duration, Duration) {
        let working = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = working.since.map_or(Duration::ZERO, |since| since.elapsed());
        (working.elapsed + now, working.summed)
    }
}

/// Floating point operations of a layer: queries, keys and values of `projected` tokens, and all the rest for `continuing` ones
/// that see `keys` keys together (`2P` a token and `4·H·d` a key).
fn operations(config: &Config, projected: usize, continuing: usize, keys: usize) -> f64 {
    let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
    let rest = config.hidden * (q + 3 * config.intermediate);
    2.0 * (projected * config.hidden * (q + 2 * kv) + continuing * rest + 2 * q * keys) as f64
}

/// Number of ascending `positions` within `span`.
pub(crate) fn count_within(positions: &[u32], span: Span) -> usize {
    let before = |bound: u32| positions.partition_point(|p| *p < bound);
    before(span.end) - before(span.start)
}

#[cfg(test)]
mod tests {
    use std::thread::{scope, sleep};

    use super::*;

    #[test]
    fn time_of_several_threads_counts_once() {
        let (clock, time) = (SharedClock::default(), Duration::from_millis(60));
        clock.timed(|| {
            scope(|scope| {
                _ = (0..3).map(|_| scope.spawn(|| clock.timed(|| sleep(time)))).collect::<Vec<_>>()
            });
        });
        sleep(time);
        clock.timed(|| ());
        let (elapsed, summed) = clock.elapsed_and_summed();
        assert!(time <= elapsed && 4 * time <= summed, "{elapsed:?} {summed:?}");
        assert!(elapsed < summed / 2, "{elapsed:?} {summed:?}");
    }
}
