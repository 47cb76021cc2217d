//! The counts of a simulation.

use serde::Serialize;

use crate::worker::Sources;

/// A request that has its first token.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) worker: usize,
    /// Seconds.
    pub(crate) ttft: f64,
    pub(crate) sources: Sources,
}

/// Counts of the measured requests, and of the time in which they came.
#[derive(Debug)]
pub(crate) struct Statistics {
    ttft: Vec<f64>,
    sources: Sources,
    /// Measured requests of each worker.
    requests: Vec<u64>,
    /// The times of the first and the last measured request.
    start: f64,
    stop: f64,
    /// Seconds of computing of all workers between those times.
    busy: f64,
    /// The ends of computations under way, and of some that are over.
    ends: Vec<f64>,
}

/// The figures of a simulation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Summary {
    pub(crate) requests: usize,
    /// Seconds: median, 95th and 99th percentile, and mean.
    pub(crate) ttft_p50: f64,
    pub(crate) ttft_p95: f64,
    pub(crate) ttft_p99: f64,
    pub(crate) ttft_mean: f64,
    /// Shares of the chunks of requests, by where they came from.
    pub(crate) memory_share: f64,
    pub(crate) disk_share: f64,
    pub(crate) fetched_share: f64,
    pub(crate) prefilled_share: f64,
    /// Gets of the object store, and bytes, a request.
    pub(crate) gets: f64,
    pub(crate) remote_bytes: f64,
    /// Share of the workers' time in which they computed, or loaded where nothing else goes on meanwhile.
    pub(crate) utilisation: f64,
    /// Requests of the worker that got most / requests a worker.
    pub(crate) busiest: f64,
}

impl Statistics {
    pub(crate) fn new(workers: usize) -> Statistics {
        Statistics {
            ttft: Vec::new(),
            sources: Sources::default(),
            requests: vec![0; workers],
            start: f64::INFINITY,
            stop: f64::INFINITY,
            busy: 0.0,
            ends: Vec::new(),
        }
    }

    /// Measuring begins. Of computations under way, the rest counts.
    pub(crate) fn start(&mut self, now: f64) {
        self.start = now;
        self.busy = self.left(now);
    }

    /// The last request has come. Of computations under way, the rest does not count.
    pub(crate) fn stop(&mut self, now: f64) {
        self.stop = now;
        self.busy -= self.left(now);
    }

    /// Seconds for which computations under way go on.
    fn left(&self, now: f64) -> f64 {
        self.ends.iter().map(|end| (end - now).max(0.0)).sum()
    }

    /// A worker computes for a while.
    pub(crate) fn computes(&mut self, from: f64, to: f64) {
        if self.stop.is_infinite() {
            self.busy += to - from;
            // Times ascend: a computation that is over is not asked for again.
            if self.ends.len() > 2 * self.requests.len() {
                self.ends.retain(|end| *end > from);
            }
            self.ends.push(to);
        }
    }

    pub(crate) fn finished(&mut self, request: &Finished) {
        self.ttft.push(request.ttft);
        self.requests[request.worker] += 1;
        let Sources { memory, disk, fetched, prefilled } = request.sources;
        self.sources.memory += memory;
        self.sources.disk += disk;
        self.sources.fetched += fetched;
        self.sources.prefilled += prefilled;
    }

    /// The summary, with `chunk_bytes` a chunk.
    pub(crate) fn summary(mut self, chunk_bytes: f64) -> Summary {
        self.ttft.sort_by(f64::total_cmp);
        let requests = self.ttft.len();
        let percentile = |share: f64| {
            let at = (share * requests as f64).ceil() as usize;
            self.ttft.get(at.saturating_sub(1)).copied().unwrap_or(f64::NAN)
        };
        let Sources { memory, disk, fetched, prefilled } = self.sources;
        let share = |chunks: u64| chunks as f64 / (memory + disk + fetched + prefilled) as f64;
        let a_request = |sum: f64| sum / requests as f64;
        let (workers, most) = (self.requests.len() as f64, self.requests.iter().max().copied().unwrap_or(0));
        Summary {
            requests,
            ttft_p50: percentile(0.5),
            ttft_p95: percentile(0.95),
            ttft_p99: percentile(0.99),
            ttft_mean: a_request(self.ttft.iter().sum()),
            memory_share: share(memory),
            disk_share: share(disk),
            fetched_share: share(fetched),
            prefilled_share: share(prefilled),
            gets: a_request(fetched as f64),
            remote_bytes: a_request(fetched as f64 * chunk_bytes),
            utilisation: self.busy / (workers * (self.stop - self.start)),
            busiest: a_request(most as f64) * workers,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_counts_what_was_measured() {
        let mut statistics = Statistics::new(2);
        statistics.computes(0.0, 4.0);
        statistics.start(3.0);
        statistics.computes(5.0, 6.0);
        statistics.computes(9.0, 20.0);
        statistics.stop(13.0);
        statistics.computes(20.0, 30.0);
        for ttft in 1..=100 {
            let sources = Sources { memory: 1, disk: 2, fetched: 3, prefilled: 4 };
            let worker = usize::from(ttft % 4 == 0);
            statistics.finished(&Finished { worker, ttft: f64::from(101 - ttft), sources });
        }
        let summary = statistics.summary(10.0);
        assert_eq!((summary.ttft_p50, summary.ttft_p95, summary.ttft_p99), (50.0, 95.0, 99.0));
        assert_eq!((summary.requests, summary.ttft_mean), (100, 50.5));
        assert_eq!((summary.memory_share, summary.disk_share), (0.1, 0.2));
        assert_eq!((summary.fetched_share, summary.prefilled_share), (0.3, 0.4));
        assert_eq!((summary.gets, summary.remote_bytes), (3.0, 30.0));
        // Of ten seconds of two workers: one after the start, one, and four before the end.
        assert_eq!(summary.utilisation, 6.0 / 20.0);
        assert_eq!(summary.busiest, 1.5);
    }
}
