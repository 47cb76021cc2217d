//! A gateway: the real router under a rule, or a rule to hold it against.

use anyhow::Result;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use refrain_route::{Choice, Chunk, Request, Router, Settings, WorkerId};

use crate::scenario::{Case, Rule, Scenario};
use crate::traffic::uniform;
use crate::worker::Timing;

/// Requests that the holder of the first chunk may have more than the least loaded worker under [`Rule::Prefix`].
const PREFIX_SLACK: u32 = 4;

/// The key of a chunk of the corpus: as evenly spread as the first bytes of a digest.
pub(crate) fn key_of(chunk: u32) -> u64 {
    let x = (u64::from(chunk) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^ (x >> 32)
}

/// A gateway of the fleet. Worker `i` has the id `i`.
#[derive(Debug)]
pub(crate) struct Gateway {
    pub(crate) router: Router,
    rule: Rule,
    rng: ChaCha8Rng,
    workers: usize,
    tokens: u32,
    question: u32,
    charge: f64,
    chunks: Vec<Chunk>,
}

impl Gateway {
    pub(crate) fn new(scenario: &Scenario, case: &Case, number: usize, timing: &Timing) -> Result<Gateway> {
        let Case { workers, rule, .. } = *case;
        let settings = Settings {
            rule: match rule {
                Rule::Tessera => refrain_route::Rule::Tessera { slack: scenario.slack },
                _ => refrain_route::Rule::Cost,
            },
            bytes_per_token: scenario.bytes_per_token,
            rates: timing.rates(),
        };
        let mut router = Router::new(settings);
        for worker in 0..workers {
            router.add(WorkerId(worker as u64))?;
        }
        let mut rng = ChaCha8Rng::seed_from_u64(scenario.seed);
        rng.set_stream(1 + number as u64);
        let (question, charge) = (scenario.question, scenario.charge);
        Ok(Gateway {
            router,
            rule,
            rng,
            workers,
            tokens: scenario.tokens,
            question,
            charge,
            chunks: Vec::new(),
        })
    }

    /// Chooses a worker for a request, and books it there.
    pub(crate) fn choose(&mut self, chunks: &[u32], now: f64) -> Option<Choice> {
        let tokens = self.tokens;
        self.chunks.clear();
        self.chunks.extend(chunks.iter().map(|chunk| Chunk { key: key_of(*chunk), tokens }));
        let (question, charge) = (self.question, self.charge);
        let request = Request { chunks: &self.chunks, question, charge, exclude: &[], now };
        let worker = match self.rule {
            Rule::Tessera | Rule::Cost => return self.router.choose(&request, self.rng.next_u64()),
            Rule::Random => WorkerId((uniform(&mut self.rng) * self.workers as f64) as u64),
            Rule::LeastLoaded => least_loaded(&self.router, &mut self.rng)?.0,
            Rule::Prefix => {
                let (least, load) = least_loaded(&self.router, &mut self.rng)?;
                holder(&self.router, self.chunks[0].key, load + PREFIX_SLACK).unwrap_or(least)
            }
        };
        self.router.book(worker, &request)
    }
}

/// One of the workers with the fewest requests, by chance, and how many it has.
fn least_loaded(router: &Router, rng: &mut ChaCha8Rng) -> Option<(WorkerId, u32)> {
    let random = rng.next_u64();
    let loads = router.loads().map(|(worker, load)| (load.total(), key_of(worker.0 as u32) ^ random, worker));
    loads.min().map(|(load, _, worker)| (worker, load))
}

/// The holder of a key that has the fewest requests, and at most `most`.
fn holder(router: &Router, key: u64, most: u32) -> Option<WorkerId> {
    let holders = router.holders(key).filter_map(|worker| Some((router.load(worker)?.total(), worker)));
    holders.filter(|(load, _)| *load <= most).min().map(|(_, worker)| worker)
}
