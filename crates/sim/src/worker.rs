//! A worker: a queue, two tiers of chunks, a disk, a link to the object store, and one that computes.

use std::collections::VecDeque;

use refrain_route::{Load, Rates};

use crate::scenario::{Missing, Scenario};
use crate::tiers::{Tier, Tiers};
use crate::traffic::Arrival;

/// Share of the latest request in the mean time that requests take.
const SERVICE_SHARE: f64 = 0.1;

/// Seconds and bytes that follow from a scenario.
#[derive(Clone, Debug)]
pub(crate) struct Timing {
    /// Bytes of a chunk.
    chunk_bytes: f64,
    /// Seconds of computing of a request whose chunks are all there.
    compute: f64,
    /// Seconds of computing of a missing chunk.
    prefill: f64,
    memory_rate: f64,
    disk_rate: f64,
    remote_rate: f64,
    remote_latency: f64,
    /// Whether requests load while others compute.
    overlap: bool,
    missing: Missing,
    prefill_rate: f64,
}

impl Timing {
    pub(crate) fn new(scenario: &Scenario) -> Timing {
        let tokens = f64::from(scenario.tokens);
        let computed = f64::from(scenario.question) + scenario.charge * scenario.chunks as f64 * tokens;
        Timing {
            chunk_bytes: scenario.chunk_bytes(),
            compute: computed / scenario.prefill,
            prefill: tokens / scenario.prefill,
            memory_rate: scenario.memory_rate * 1e9,
            disk_rate: scenario.disk_rate * 1e9,
            remote_rate: scenario.remote_rate * 1e9,
            remote_latency: scenario.remote_latency,
            overlap: scenario.overlap,
            missing: scenario.missing,
            prefill_rate: scenario.prefill,
        }
    }

    /// The rates of a worker that has not measured anything yet.
    pub(crate) fn rates(&self) -> Rates {
        Rates {
            prefill: self.prefill_rate,
            local: self.disk_rate,
            remote: self.remote_rate,
            remote_latency: self.remote_latency,
            service: self.compute,
        }
    }
}

/// Where the chunks of requests came from.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Sources {
    pub(crate) memory: u64,
    pub(crate) disk: u64,
    pub(crate) fetched: u64,
    pub(crate) prefilled: u64,
}

/// The course of a request at its worker, as of its turn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Plan {
    /// The time from which on computing it goes through without a pause.
    pub(crate) ready: f64,
    /// Seconds for which it keeps others from computing.
    pub(crate) compute: f64,
    /// Whether missing chunks are fetched, and not prefilled.
    fetches: bool,
    pub(crate) sources: Sources,
}

/// A worker and its requests, which are numbers to it.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) tiers: Tiers,
    /// Requests that have had no turn yet.
    pub(crate) queue: VecDeque<usize>,
    /// Requests that can be computed.
    pub(crate) ready: VecDeque<usize>,
    /// The request that is computed, and the time at which that ends.
    pub(crate) computing: Option<(usize, f64)>,
    /// Requests without a first token, by gateway.
    waiting: Vec<u32>,
    /// The times from which on the loaders and the link to the object store are free.
    local_free: f64,
    link_free: f64,
    /// Bytes read locally, and the seconds that it took.
    local: (f64, f64),
    /// Mean seconds of the latest requests.
    service: f64,
    /// States published.
    pub(crate) seq: u64,
}

impl Worker {
    pub(crate) fn new(scenario: &Scenario, timing: &Timing) -> Worker {
        Worker {
            tiers: Tiers::new(scenario.memory, scenario.disk),
            queue: VecDeque::new(),
            ready: VecDeque::new(),
            computing: None,
            waiting: vec![0; scenario.gateways],
            local_free: 0.0,
            link_free: 0.0,
            local: (0.0, 0.0),
            service: timing.compute,
            seq: 0,
        }
    }

    pub(crate) fn enqueue(&mut self, request: usize, gateway: usize) {
        self.queue.push_back(request);
        self.waiting[gateway] += 1;
    }

    /// The first token of a request of a gateway.
    pub(crate) fn first_token(&mut self, gateway: usize) {
        self.waiting[gateway] -= 1;
    }

    /// The requests of a gateway, and those of all.
    pub(crate) fn load(&self, gateway: usize) -> (Load, Load) {
        let waiting = |waiting| Load { running: 0, waiting };
        (waiting(self.waiting[gateway]), waiting(self.waiting.iter().sum()))
    }

    /// Its measured speed.
    pub(crate) fn rates(&self, timing: &Timing) -> Rates {
        let (bytes, seconds) = self.local;
        let local = if seconds > 0.0 { bytes / seconds } else { timing.disk_rate };
        Rates { local, service: self.service, ..timing.rates() }
    }

    /// Begins a request: finds its chunks, and starts to load them.
    pub(crate) fn begin(&mut self, arrival: &Arrival, now: f64, timing: &Timing) -> Plan {
        let (mut sources, mut loaded, mut missing) = (Sources::default(), now, Vec::new());
        for chunk in &arrival.chunks {
            let Some((tier, there)) = self.tiers.find(*chunk) else {
                missing.push(*chunk);
                continue;
            };
            loaded = loaded.max(there);
            match tier {
                Tier::Memory => sources.memory += 1,
                Tier::Disk => {
                    sources.disk += 1;
                    self.tiers.keep(*chunk, there);
                }
            }
        }
        let bytes = |chunks: u64| chunks as f64 * timing.chunk_bytes;
        let local = bytes(sources.memory) / timing.memory_rate + bytes(sources.disk) / timing.disk_rate;
        self.local = (self.local.0 + bytes(sources.memory + sources.disk), self.local.1 + local);
        let needs = Needs {
            compute: timing.compute * arrival.slowness,
            prefill: missing.len() as f64 * timing.prefill * arrival.slowness,
            local: local * arrival.slowness,
            loaded,
            transfer: bytes(missing.len() as u64) / timing.remote_rate * arrival.slowness,
        };
        let plan = if timing.overlap { self.beside(now, &needs, timing) } else { alone(now, &needs, timing) };
        let count = missing.len() as u64;
        if plan.fetches {
            sources.fetched = count
        } else {
            sources.prefilled = count
        }
        let there = if timing.overlap { plan.ready + plan.compute } else { now };
        missing.iter().for_each(|chunk| self.tiers.keep(*chunk, there));
        self.service += SERVICE_SHARE * (plan.compute - self.service);
        Plan { sources, ..plan }
    }

    /// Loading goes on while others compute: a request whose keys and values are not there yet lets the next one have its turn, and is
    /// taken up again when computing it does not have to wait any more.
    fn beside(&mut self, now: f64, needs: &Needs, timing: &Timing) -> Plan {
        let mut loaded = needs.loaded;
        if needs.local > 0.0 {
            self.local_free = self.local_free.max(now) + needs.local;
            loaded = loaded.max(self.local_free);
        }
        let plan = |fetches: bool, loaded: f64, compute: f64| Plan {
            ready: now.max(loaded - compute),
            compute,
            fetches,
            sources: Sources::default(),
        };
        let link_free = self.link_free.max(now) + needs.transfer;
        let fetched = plan(true, loaded.max(link_free + timing.remote_latency), needs.compute);
        let prefilled = plan(false, loaded, needs.compute + needs.prefill);
        if needs.prefill == 0.0 {
            return prefilled;
        }
        let behind = match timing.missing {
            Missing::Quickest => 0,
            Missing::CountQueue => self.queue.len() + self.ready.len(),
        };
        let held_up = behind as f64 * needs.prefill;
        if fetched.ready + fetched.compute > prefilled.ready + prefilled.compute + held_up {
            return prefilled;
        }
        self.link_free = link_free;
        fetched
    }
}

/// The work of a request at a worker, in seconds.
#[derive(Debug)]
struct Needs {
    /// Computing of the question and of the method's rows, and of the missing chunks.
    compute: f64,
    prefill: f64,
    /// Reading of memory and disk.
    local: f64,
    /// The time at which the last of its chunks that are on their way is there.
    loaded: f64,
    /// Transfer of the missing chunks.
    transfer: f64,
}

/// A request has the worker alone, for the longer one of loading and computing.
fn alone(now: f64, needs: &Needs, timing: &Timing) -> Plan {
    let fetch = if needs.prefill > 0.0 { timing.remote_latency + needs.transfer } else { 0.0 };
    let fetched = needs.compute.max(needs.local + fetch);
    let prefilled = (needs.compute + needs.prefill).max(needs.local);
    let (fetches, compute) = (fetched <= prefilled, fetched.min(prefilled));
    Plan { ready: now, compute, fetches, sources: Sources::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::scenario;

    /// Chunks of 100 tokens and 100 MB: a second to prefill, 0.1 to read from disk, 0.5 to fetch after 0.2. A request computes 0.3 s.
    const VALUES: [&str; 9] = [
        "--tokens=100",
        "--bytes-per-token=1000000",
        "--prefill=100",
        "--memory-rate=100",
        "--disk-rate=1",
        "--remote-rate=0.2",
        "--remote-latency=0.2",
        "--question=30",
        "--charge=0",
    ];

    fn worker(values: &[&str]) -> (Worker, Timing) {
        let scenario = scenario(&[VALUES.as_slice(), values].concat());
        let timing = Timing::new(&scenario);
        (Worker::new(&scenario, &timing), timing)
    }

    fn arrival(chunks: &[u32]) -> Arrival {
        Arrival { time: 0.0, chunks: chunks.to_vec(), gateway: 0, slowness: 1.0 }
    }

    fn assert_plan(plan: Plan, ready: f64, compute: f64, [memory, disk, fetched, prefilled]: [u64; 4]) {
        assert!((plan.ready - ready).abs() < 1e-9 && (plan.compute - compute).abs() < 1e-9, "{plan:?}");
        assert_eq!(plan.sources, Sources { memory, disk, fetched, prefilled });
    }

    #[test]
    fn alone_loading_and_computing_take_the_longer_time() {
        let (mut worker, timing) = worker(&["--overlap=false", "--memory=1", "--chunks=1"]);
        assert_plan(worker.begin(&arrival(&[1]), 0.0, &timing), 0.0, 0.7, [0, 0, 1, 0]);
        assert_plan(worker.begin(&arrival(&[1]), 5.0, &timing), 5.0, 0.3, [1, 0, 0, 0]);
        assert_plan(worker.begin(&arrival(&[2]), 5.0, &timing), 5.0, 0.7, [0, 0, 1, 0]);
        assert_plan(worker.begin(&arrival(&[1]), 5.0, &timing), 5.0, 0.3, [0, 1, 0, 0]);
        let slow = Arrival { slowness: 2.0, ..arrival(&[3]) };
        assert_plan(worker.begin(&slow, 5.0, &timing), 5.0, 1.2, [0, 0, 1, 0]);
    }

    #[test]
    fn a_chunk_is_prefilled_where_the_store_is_slower() {
        for overlap in ["--overlap=false", "--overlap=true"] {
            let (mut worker, timing) = worker(&[overlap, "--remote-rate=0.05"]);
            assert_plan(worker.begin(&arrival(&[1, 2]), 1.0, &timing), 1.0, 2.3, [0, 0, 0, 2]);
        }
    }

    #[test]
    fn beside_others_a_request_computes_as_soon_as_it_need_not_wait() {
        let (mut worker, timing) = worker(&[]);
        // There at 0.7, and computed for 0.3 before.
        assert_plan(worker.begin(&arrival(&[1]), 0.0, &timing), 0.4, 0.3, [0, 0, 1, 0]);
        // The link is busy until 0.5, but the latency passes beside it.
        assert_plan(worker.begin(&arrival(&[2]), 0.0, &timing), 0.9, 0.3, [0, 0, 1, 0]);
        // A chunk that is on its way is not fetched twice, and not there before.
        assert_plan(worker.begin(&arrival(&[2]), 0.1, &timing), 0.9, 0.3, [1, 0, 0, 0]);
        // Two are fetched by 1.7, which is later than prefilled by 0.1 + 1.3.
        assert_plan(worker.begin(&arrival(&[3]), 0.1, &timing), 0.1, 1.3, [0, 0, 0, 1]);
        // The link is not kept busy by what was prefilled.
        assert_plan(worker.begin(&arrival(&[4]), 0.5, &timing), 1.4, 0.3, [0, 0, 1, 0]);
    }

    #[test]
    fn the_disk_is_read_for_one_request_after_the_other() {
        let (mut worker, timing) = worker(&["--memory=5", "--question=1"]);
        let begin = |worker: &mut Worker, chunks: &[u32], now| worker.begin(&arrival(chunks), now, &timing);
        begin(&mut worker, &[1, 2, 3, 4, 5], 0.0);
        begin(&mut worker, &[6, 7, 8, 9, 10], 10.0);
        let plan = begin(&mut worker, &[1, 2, 3], 20.0);
        assert_plan(plan, 20.29, 0.01, [0, 3, 0, 0]);
        assert_plan(begin(&mut worker, &[4, 5], 20.0), 20.49, 0.01, [0, 2, 0, 0]);
        let rates = worker.rates(&timing);
        assert!((rates.local - 1e9).abs() < 1.0, "five chunks of 100 MB in half a second: {}", rates.local);
    }

    #[test]
    fn a_queue_counts_where_it_is_told_to() {
        for (missing, sources) in [("quickest", [0, 0, 0, 1]), ("count-queue", [0, 0, 1, 0])] {
            // Fetched by 1.2, prefilled by 1.1.
            let (mut worker, timing) = worker(&["--missing", missing, "--remote-rate=0.1", "--question=10"]);
            worker.enqueue(7, 0);
            let plan = worker.begin(&arrival(&[1]), 0.0, &timing);
            let [memory, disk, fetched, prefilled] = sources;
            assert_eq!(plan.sources, Sources { memory, disk, fetched, prefilled }, "{missing}");
        }
    }
}
