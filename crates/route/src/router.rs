//! The fleet as one gateway sees it, and the choice.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::sync::Arc;

use crate::booking::{Booking, Own};
use crate::cost::{Costs, Demand, Estimate, Request};
use crate::index::{ChunkIndex, Slot};
use crate::rendezvous::{mix, weight};
use crate::sequence::Sequence;
use crate::state::{Load, Rates, Snapshot, State, Update, WorkerId};

/// Workers whose rates say what is expected of one that joins; in a larger fleet these stand for all.
const SAMPLE: usize = 64;

/// How a worker is chosen; the crate's docs have the formulas.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Rule {
    /// The least expected time to the first token; where all workers have requests waiting, the time that the request takes from those
    /// counts as well.
    #[default]
    Cost,
    /// Most tokens held, among workers that have at most `slack` requests more than the least loaded one.
    Tessera {
        /// Requests.
        slack: u32,
    },
}

/// The parameters of a router.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// The rule.
    pub rule: Rule,
    /// Bytes of keys and values that a token takes in a chunk file, over all layers.
    pub bytes_per_token: u64,
    /// Rates of a worker that has not told any yet, where the others have not either. Its figures must be finite and above zero.
    pub rates: Rates,
}

/// More workers than a router has numbers for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a router has room for 65,536 workers and no more: give part of the fleet another router")]
#[non_exhaustive]
pub struct TooManyWorkers;

/// A chosen worker.
#[derive(Debug)]
pub struct Choice {
    /// The worker.
    pub worker: WorkerId,
    /// Its place there.
    pub booking: Booking,
    /// Its expected time there, as of the choice.
    pub estimate: Estimate,
}

/// A worker as the router knows it.
#[derive(Debug)]
struct Worker {
    id: WorkerId,
    sequence: Sequence,
    /// Requests that others have sent, as of its latest state.
    others: Load,
    rates: Rates,
    costs: Costs,
    own: Arc<Own>,
}

impl Worker {
    fn load(&self) -> Load {
        let own = self.own.load();
        Load {
            running: self.others.running.saturating_add(own.running),
            waiting: self.others.waiting.saturating_add(own.waiting),
        }
    }

    /// Seconds until the turn of a request that comes now.
    fn wait(&self, now: f64) -> f64 {
        self.own.wait(now) + f64::from(self.others.waiting) * self.rates.service
    }

    fn take_load(&mut self, state: &State, bytes_per_token: u64) {
        self.own.take_reported(state.own.unwrap_or(state.load));
        self.others = state.load.without(state.own.unwrap_or_else(|| self.own.load()));
        self.rates = self.rates.updated(state.rates);
        self.costs = Costs::new(&self.rates, bytes_per_token);
    }
}

/// The order of workers: less cost, then more tokens held, then less load.
#[derive(Clone, Copy, Debug)]
struct Score {
    cost: f64,
    held: u64,
    load: u32,
}

impl Score {
    fn compare(&self, other: &Score) -> Ordering {
        let cost = self.cost.total_cmp(&other.cost);
        cost.then(other.held.cmp(&self.held)).then(self.load.cmp(&other.load))
    }
}

/// The workers of one model, with what they hold and how much they have to do.
#[derive(Debug)]
pub struct Router {
    settings: Settings,
    index: ChunkIndex,
    workers: Vec<Option<Worker>>,
    slots: HashMap<WorkerId, Slot>,
    /// Slots of removed workers.
    free: Vec<Slot>,
    /// Of the request at hand, by slot: the tokens held. Kept for the next choice.
    held: Vec<u64>,
    tied: Vec<Slot>,
}

impl Router {
    /// A router of no workers.
    pub fn new(settings: Settings) -> Router {
        Router {
            settings,
            index: ChunkIndex::default(),
            workers: Vec::new(),
            slots: HashMap::new(),
            free: Vec::new(),
            held: Vec::new(),
            tied: Vec::new(),
        }
    }

    /// Adds a worker that discovery has found; false if it is there already. It may be chosen from now on.
    ///
    /// # Errors
    /// If there are 65,536 workers.
    pub fn add(&mut self, worker: WorkerId) -> Result<bool, TooManyWorkers> {
        if self.slots.contains_key(&worker) {
            return Ok(false);
        }
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                let slot = Slot::try_from(self.workers.len()).map_err(|_| TooManyWorkers)?;
                self.workers.push(None);
                self.index.reserve(slot);
                slot
            }
        };
        self.slots.insert(worker, slot);
        let rates = self.expected_rates();
        self.workers[usize::from(slot)] = Some(Worker {
            id: worker,
            sequence: Sequence::default(),
            others: Load::default(),
            rates,
            costs: Costs::new(&rates, self.settings.bytes_per_token),
            own: Arc::default(),
        });
        Ok(true)
    }

    /// The rates of a worker that has told none: the mean of those that others have measured.
    fn expected_rates(&self) -> Rates {
        let known = self.workers.iter().flatten().take(SAMPLE).map(|worker| worker.rates);
        let measured: Vec<Rates> = known.filter(|rates| *rates != self.settings.rates).collect();
        Rates::mean(&measured).unwrap_or(self.settings.rates)
    }

    /// Removes a worker that discovery has lost, with its keys and its load; false if it is not there.
    pub fn remove(&mut self, worker: WorkerId) -> bool {
        let Some(slot) = self.slots.remove(&worker) else { return false };
        self.index.replace(slot, []);
        self.workers[usize::from(slot)] = None;
        self.free.push(slot);
        true
    }

    /// Takes over a worker's state.
    pub fn state(&mut self, worker: WorkerId, state: &State) -> Update {
        let Some(slot) = self.slots.get(&worker) else { return Update::UnknownWorker };
        let Some(worker) = &mut self.workers[usize::from(*slot)] else { return Update::UnknownWorker };
        let update = worker.sequence.state(state, &mut self.index, *slot);
        if update != Update::Stale {
            worker.take_load(state, self.settings.bytes_per_token);
        }
        update
    }

    /// Takes over the list of a worker's keys, after [`Update::SnapshotNeeded`].
    pub fn snapshot(&mut self, worker: WorkerId, snapshot: &Snapshot) -> Update {
        let Some(slot) = self.slots.get(&worker) else { return Update::UnknownWorker };
        let Some(worker) = &mut self.workers[usize::from(*slot)] else { return Update::UnknownWorker };
        worker.sequence.snapshot(snapshot, &mut self.index, *slot)
    }

    /// Chooses a worker for a request and books it there; none if no worker may be chosen. `random` decides between workers that are
    /// equally good; the same router, request and `random` give the same worker.
    pub fn choose(&mut self, request: &Request, random: u64) -> Option<Choice> {
        self.count_held(request);
        let demand = Demand::new(request);
        let mut tied = std::mem::take(&mut self.tied);
        self.best(request, &demand, &mut tied);
        let slot = self.settle(&tied, request, random);
        self.tied = tied;
        self.book_at(slot?, &demand, request.now)
    }

    /// Fills `tied` with the workers that the rule puts first.
    fn best(&self, request: &Request, demand: &Demand, tied: &mut Vec<Slot>) {
        tied.clear();
        let loads = self.eligible(request).map(|(_, worker)| worker.load());
        let least = loads.fold((u32::MAX, u32::MAX), |(total, waiting), load| {
            (total.min(load.total()), waiting.min(load.waiting))
        });
        let (least_total, least_waiting) = least;
        let mut best: Option<Score> = None;
        for (slot, worker) in self.eligible(request) {
            let (held, load) = (self.held[usize::from(slot)], worker.load().total());
            let score = match self.settings.rule {
                Rule::Cost => {
                    let wait = worker.wait(request.now);
                    if best.is_some_and(|best| wait > best.cost) {
                        continue;
                    }
                    let work = demand.work(&worker.costs, held);
                    Score { cost: wait + (1.0 + f64::from(least_waiting)) * work, held, load }
                }
                Rule::Tessera { slack } if load > least_total.saturating_add(slack) => continue,
                // Those that hold nothing are equal, whatever their load.
                Rule::Tessera { .. } => Score { cost: 0.0, held, load: if held == 0 { 0 } else { load } },
            };
            match best.map_or(Ordering::Less, |best| score.compare(&best)) {
                Ordering::Less => {
                    best = Some(score);
                    tied.clear();
                    tied.push(slot);
                }
                Ordering::Equal => tied.push(slot),
                Ordering::Greater => {}
            }
        }
    }

    /// Books a request at a worker that was chosen in another way; none if it is not there.
    pub fn book(&mut self, worker: WorkerId, request: &Request) -> Option<Choice> {
        let slot = *self.slots.get(&worker)?;
        self.count_held(request);
        self.book_at(slot, &Demand::new(request), request.now)
    }

    fn book_at(&self, slot: Slot, demand: &Demand, now: f64) -> Option<Choice> {
        let worker = self.workers[usize::from(slot)].as_ref()?;
        let held = self.held[usize::from(slot)];
        let (wait, work) = (worker.wait(now), demand.work(&worker.costs, held));
        let estimate = Estimate { wait, work, held, missing: demand.tokens - held };
        Some(Choice { worker: worker.id, booking: worker.own.book(now, estimate.work), estimate })
    }

    /// Counts the tokens of a request's chunks that each worker holds.
    fn count_held(&mut self, request: &Request) {
        self.held.clear();
        self.held.resize(self.workers.len(), 0);
        for chunk in request.chunks {
            for slot in self.index.holders(chunk.key) {
                self.held[usize::from(*slot)] += u64::from(chunk.tokens);
            }
        }
    }

    /// The workers that a request may be sent to.
    fn eligible<'a>(&'a self, request: &'a Request) -> impl Iterator<Item = (Slot, &'a Worker)> {
        let workers = self.workers.iter().enumerate();
        let workers = workers.filter_map(|(slot, worker)| Some((slot as Slot, worker.as_ref()?)));
        workers.filter(|(_, worker)| !request.exclude.contains(&worker.id))
    }

    /// One of the workers that are equally good: the smallest key that none of them holds ranks them, so that equal misses meet at one
    /// worker; where there is no such key, chance does.
    fn settle(&self, tied: &[Slot], request: &Request, random: u64) -> Option<Slot> {
        if tied.len() < 2 {
            return tied.first().copied();
        }
        let id = |slot: &Slot| self.workers[usize::from(*slot)].as_ref().map(|worker| worker.id);
        let mut is_tied = vec![false; self.workers.len()];
        tied.iter().for_each(|slot| is_tied[usize::from(*slot)] = true);
        let is_missing = |key: &u64| !self.index.holders(*key).iter().any(|slot| is_tied[usize::from(*slot)]);
        let missing = request.chunks.iter().map(|chunk| chunk.key).filter(is_missing).min();
        let rank = |worker: WorkerId| match missing {
            Some(key) => weight(key, worker),
            None => mix(mix(worker.0) ^ random),
        };
        tied.iter().copied().max_by_key(|slot| id(slot).map(rank))
    }

    /// The workers and the requests that they have.
    pub fn loads(&self) -> impl Iterator<Item = (WorkerId, Load)> {
        self.workers.iter().flatten().map(|worker| (worker.id, worker.load()))
    }

    /// The requests of a worker: those that others have sent as of its latest state, and this gateway's own.
    pub fn load(&self, worker: WorkerId) -> Option<Load> {
        let slot = self.slots.get(&worker)?;
        self.workers[usize::from(*slot)].as_ref().map(Worker::load)
    }

    /// The workers that hold a key, in no order.
    pub fn holders(&self, key: u64) -> impl Iterator<Item = WorkerId> {
        let worker = |slot: &Slot| self.workers[usize::from(*slot)].as_ref().map(|worker| worker.id);
        self.index.holders(key).iter().filter_map(worker)
    }

    /// The keys that a worker holds, ascending; none for a worker that is not there.
    pub fn keys(&self, worker: WorkerId) -> impl Iterator<Item = u64> {
        self.slots.get(&worker).into_iter().flat_map(|slot| self.index.keys(*slot))
    }

    /// Pairs of a key and a worker that holds it.
    pub fn pairs(&self) -> usize {
        self.index.pairs()
    }

    /// Keys that at least one worker holds.
    pub fn distinct_keys(&self) -> usize {
        self.index.distinct()
    }
}
