//! The expected time of a request at a worker.

use crate::state::{Rates, WorkerId};

/// A chunk of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The first 8 bytes of its key.
    pub key: u64,
    /// Its length in tokens.
    pub tokens: u32,
}

/// A request whose worker is to be chosen.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The chunks of its prompt, in any order.
    pub chunks: &'a [Chunk],
    /// Tokens of its prompt that any worker computes.
    pub question: u32,
    /// Rows that the method computes of the chunks over all layers and passes / (layers × tokens of the chunks): 0 for `pie`, the
    /// ratio for `a3`.
    pub charge: f64,
    /// Workers that must not be chosen, such as those that failed it.
    pub exclude: &'a [WorkerId],
    /// Seconds since any time, the same one for all requests of a router: the clock by which work that was booked passes.
    pub now: f64,
}

/// The expected time of a request at a worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Seconds until its turn.
    pub wait: f64,
    /// Seconds from its turn to its first token.
    pub work: f64,
    /// Tokens of its chunks that the worker holds.
    pub held: u64,
    /// Tokens of its chunks that it does not.
    pub missing: u64,
}

impl Estimate {
    /// Seconds to the first token.
    pub fn ttft(&self) -> f64 {
        self.wait + self.work
    }
}

/// The reciprocals of a worker's rates: seconds a token.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Costs {
    compute: f64,
    fetch: f64,
    read: f64,
    /// The quicker one of reading and fetching.
    load: f64,
    /// 1 / (reading and computing).
    both: f64,
    /// Seconds a fetch.
    latency: f64,
}

impl Costs {
    pub(crate) fn new(rates: &Rates, bytes_per_token: u64) -> Costs {
        let bytes = bytes_per_token as f64;
        let (compute, read, fetch) = (rates.prefill.recip(), bytes / rates.local, bytes / rates.remote);
        let (load, both) = (read.min(fetch), (read + compute).recip());
        Costs { compute, fetch, read, load, both, latency: rates.remote_latency }
    }
}

/// A request's sums, in tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Demand {
    /// Tokens of all chunks.
    pub(crate) tokens: u64,
    /// Tokens that are computed wherever the chunks lie.
    computed: f64,
}

impl Demand {
    pub(crate) fn new(request: &Request) -> Demand {
        let tokens = request.chunks.iter().map(|chunk| u64::from(chunk.tokens)).sum();
        Demand { tokens, computed: f64::from(request.question) + request.charge.max(0.0) * tokens as f64 }
    }

    /// Seconds from a request's turn to its first token at a worker that holds `held` tokens of its chunks; the crate's docs have the
    /// formula. They never grow with `held`: a chunk that is read more slowly than it would be fetched or prefilled counts as if it
    /// were not there.
    pub(crate) fn work(&self, costs: &Costs, held: u64) -> f64 {
        let (all, held) = (self.tokens as f64, held as f64);
        let compute = self.computed * costs.compute;
        let latency = if held < all { costs.latency } else { 0.0 };
        let fetched = compute.max(held * costs.load + latency + (all - held) * costs.fetch);
        // As much as is read by the time that the rest is prefilled.
        let worth_reading = held.min((compute + all * costs.compute) * costs.both);
        let prefilled = (compute + (all - worth_reading) * costs.compute).max(worth_reading * costs.read);
        fetched.min(prefilled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SmolLM2-135M on two cores: 512 tokens are 11.8 MB, and are computed in 171 ms, read in 5.9 ms, fetched in 29.5 ms.
    const RATES: Rates =
        Rates { prefill: 3000.0, local: 2e9, remote: 0.4e9, remote_latency: 0.03, service: 0.2 };

    fn work(charge: f64, rates: &Rates, held: u64) -> f64 {
        let chunks = [Chunk { key: 1, tokens: 512 }; 5];
        let request = Request { chunks: &chunks, question: 90, charge, exclude: &[], now: 0.0 };
        Demand::new(&request).work(&Costs::new(rates, 23_040), held)
    }

    fn assert_near(value: f64, expected: f64) {
        assert!((value - expected).abs() < 1e-9, "{value} is not {expected}");
    }

    #[test]
    fn the_longer_one_of_computing_and_loading_counts() {
        let chunk = 512.0 * 23_040.0;
        // a3 computes 90 + 0.15 · 2560 = 474 tokens, which takes longer than reading or fetching.
        assert_near(work(0.15, &RATES, 2560), 474.0 / 3000.0);
        assert_near(work(0.15, &RATES, 512), 474.0 / 3000.0);
        assert_near(work(0.15, &RATES, 0), 0.03 + 5.0 * chunk / 0.4e9);
        // pie computes the question alone: what is not there is waited for.
        assert_near(work(0.0, &RATES, 2560), 90.0 / 3000.0);
        assert_near(work(0.0, &RATES, 1024), 2.0 * chunk / 2e9 + 0.03 + 3.0 * chunk / 0.4e9);
    }

    #[test]
    fn missing_chunks_are_prefilled_where_that_is_quicker() {
        let slow = Rates { remote: 1e6, ..RATES };
        assert_near(work(0.0, &slow, 2048), (90.0 + 512.0) / 3000.0);
        assert_near(work(0.15, &slow, 0), (474.0 + 2560.0) / 3000.0);
    }

    #[test]
    fn chunks_that_are_read_slowly_count_as_missing() {
        let disk = Rates { local: 1e7, ..RATES };
        assert_near(work(0.0, &disk, 2560), work(0.0, &disk, 0) - 0.03);
        let both = Rates { remote: 1e7, ..disk };
        // Three of five chunks are prefilled while two are read, or nearly.
        assert!(work(0.0, &both, 2560) < work(0.0, &both, 0), "reading beside prefilling gains");
        assert_near(work(0.0, &both, 2560), work(0.0, &both, 2048));
    }
}
