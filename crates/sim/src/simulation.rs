//! The loop over events: requests come, have their turn and their first token, and workers tell of themselves.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::iter::Peekable;

use anyhow::{Context as _, Result};
use refrain_route::{Booking, Load, State, Update, WorkerId};

use crate::gateway::{Gateway, key_of};
use crate::scenario::{Case, Scenario};
use crate::statistics::{Finished, Statistics};
use crate::traffic::{Arrival, Corpus, Traffic};
use crate::worker::{Sources, Timing, Worker};

/// The kinds of events.
#[derive(Debug)]
enum What {
    /// A request's keys and values are there.
    Ready { worker: usize, request: usize },
    /// A request's first token is there.
    FirstToken { worker: usize },
    /// A worker's regular state is due.
    Report { worker: usize },
    /// A state reaches the gateways; beside it, the requests of each.
    State { worker: usize, state: Box<State>, own: Vec<Load> },
}

/// An event at a time. Of events at one time, the one that was made first is first.
#[derive(Debug)]
struct Event {
    time: f64,
    number: u64,
    what: What,
}

impl PartialEq for Event {
    fn eq(&self, other: &Event) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Event {}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Event) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Event {
    /// The heap's greatest event is the next one.
    fn cmp(&self, other: &Event) -> Ordering {
        other.time.total_cmp(&self.time).then(other.number.cmp(&self.number))
    }
}

/// A request between gateway and first token.
#[derive(Debug)]
struct InFlight {
    arrival: Arrival,
    measured: bool,
    compute: f64,
    sources: Sources,
    booking: Booking,
}

/// A fleet under a rule.
pub(crate) struct Simulation<'a> {
    scenario: &'a Scenario,
    timing: Timing,
    delay: f64,
    gateways: Vec<Gateway>,
    workers: Vec<Worker>,
    traffic: Peekable<Traffic<'a>>,
    events: BinaryHeap<Event>,
    numbers: u64,
    requests: Vec<Option<InFlight>>,
    /// Places of `requests` that are free again.
    free: Vec<usize>,
    arrived: u64,
    warmup: u64,
    statistics: Statistics,
}

impl<'a> Simulation<'a> {
    /// # Errors
    /// If there are more workers than a router has room for.
    pub(crate) fn new(scenario: &'a Scenario, case: &Case, corpus: &'a Corpus) -> Result<Simulation<'a>> {
        let timing = Timing::new(scenario);
        let workers = case.workers;
        let gateway = |number| Gateway::new(scenario, case, number, &timing);
        let total = scenario.requests * workers as u64;
        let mut simulation = Simulation {
            scenario,
            delay: case.delay,
            gateways: (0..scenario.gateways).map(gateway).collect::<Result<_>>()?,
            workers: (0..workers).map(|_| Worker::new(scenario, &timing)).collect(),
            traffic: Traffic::new(scenario, workers, case.rate, corpus).peekable(),
            events: BinaryHeap::new(),
            numbers: 0,
            requests: Vec::new(),
            free: Vec::new(),
            arrived: 0,
            warmup: (total as f64 * scenario.warmup) as u64,
            statistics: Statistics::new(workers),
            timing,
        };
        if scenario.report > 0.0 {
            for worker in 0..workers {
                let first = scenario.report * worker as f64 / workers as f64;
                simulation.at(first, What::Report { worker });
            }
        }
        Ok(simulation)
    }

    /// Runs to the last request's first token. `progress` is told the requests that have come, now and then.
    ///
    /// # Errors
    /// If a gateway finds no worker: a fault of the simulator.
    pub(crate) fn run(mut self, progress: &mut dyn FnMut(u64)) -> Result<(Statistics, Vec<Gateway>)> {
        self.run_on(progress)?;
        Ok((self.statistics, self.gateways))
    }

    fn run_on(&mut self, progress: &mut dyn FnMut(u64)) -> Result<()> {
        loop {
            let next = self.events.peek().map_or(f64::INFINITY, |event| event.time);
            match self.traffic.peek() {
                // What is due at the time of a request comes before it.
                Some(arrival) if arrival.time < next => self.arrive(progress)?,
                None if self.free.len() == self.requests.len() => return Ok(()),
                _ => self.step()?,
            }
        }
    }

    fn at(&mut self, time: f64, what: What) {
        self.numbers += 1;
        self.events.push(Event { time, number: self.numbers, what });
    }

    /// The next request comes, and is sent to a worker.
    fn arrive(&mut self, progress: &mut dyn FnMut(u64)) -> Result<()> {
        let Some(arrival) = self.traffic.next() else { return Ok(()) };
        let (now, gateway) = (arrival.time, arrival.gateway);
        let measured = self.arrived >= self.warmup;
        if self.arrived == self.warmup {
            self.statistics.start(now);
        }
        self.arrived += 1;
        if self.arrived.is_multiple_of(1024) {
            progress(self.arrived);
        }
        let choice =
            self.gateways[gateway].choose(&arrival.chunks, now).context("a gateway has no worker")?;
        let worker = choice.worker.0 as usize;
        let (compute, sources) = (0.0, Sources::default());
        let request = InFlight { arrival, measured, compute, sources, booking: choice.booking };
        let id = self.free.pop().unwrap_or(self.requests.len());
        match self.requests.get_mut(id) {
            Some(place) => *place = Some(request),
            None => self.requests.push(Some(request)),
        }
        self.workers[worker].enqueue(id, gateway);
        self.turn(worker, now)?;
        self.changed(worker, now);
        if self.traffic.peek().is_none() {
            self.statistics.stop(now);
        }
        Ok(())
    }

    fn step(&mut self) -> Result<()> {
        let Event { time: now, what, .. } = self.events.pop().context("requests wait for nothing")?;
        match what {
            What::Ready { worker, request } => {
                self.workers[worker].ready.push_back(request);
                self.turn(worker, now)
            }
            What::FirstToken { worker } => {
                let (id, _) = self.workers[worker].computing.take().context("nothing was computed")?;
                let mut request = self.requests[id].take().context("a request ends twice")?;
                self.free.push(id);
                self.workers[worker].first_token(request.arrival.gateway);
                if request.measured {
                    self.statistics.finished(&Finished {
                        worker,
                        ttft: now - request.arrival.time,
                        sources: request.sources,
                    });
                }
                // Answers of one token: the place is free after the first.
                request.booking.first_token();
                drop(request);
                self.turn(worker, now)?;
                self.changed(worker, now);
                Ok(())
            }
            What::Report { worker } => {
                self.publish(worker, now);
                self.at(now + self.scenario.report, What::Report { worker });
                Ok(())
            }
            What::State { worker, state, own } => self.deliver(worker, *state, &own),
        }
    }

    /// Lets a worker go on: the next request that can be computed, or else the next one of its queue, which begins to load.
    fn turn(&mut self, at: usize, now: f64) -> Result<()> {
        while self.workers[at].computing.is_none() {
            let worker = &mut self.workers[at];
            if let Some(id) = worker.ready.pop_front() {
                let request = self.requests[id].as_ref().context("a request is ready after its end")?;
                let end = now + request.compute;
                worker.computing = Some((id, end));
                self.statistics.computes(now, end);
                self.at(end, What::FirstToken { worker: at });
            } else if let Some(id) = worker.queue.pop_front() {
                let request = self.requests[id].as_mut().context("a request has its turn after its end")?;
                let plan = worker.begin(&request.arrival, now, &self.timing);
                (request.compute, request.sources) = (plan.compute, plan.sources);
                if plan.ready > now {
                    self.at(plan.ready, What::Ready { worker: at, request: id });
                } else {
                    worker.ready.push_back(id);
                }
            } else {
                break;
            }
        }
        Ok(())
    }

    /// A worker has changed: where states are not regular, one is due.
    fn changed(&mut self, worker: usize, now: f64) {
        if self.scenario.report == 0.0 {
            self.publish(worker, now);
        }
    }

    fn publish(&mut self, at: usize, now: f64) {
        let worker = &mut self.workers[at];
        worker.seq += 1;
        let (came, left) = worker.tiers.take_changes();
        let keys = |chunks: Vec<u32>| chunks.into_iter().map(key_of).collect();
        let loads: Vec<(Load, Load)> = (0..self.gateways.len()).map(|gateway| worker.load(gateway)).collect();
        let state = State {
            epoch: 1,
            seq: worker.seq,
            added: keys(came),
            removed: keys(left),
            load: loads[0].1,
            own: None,
            rates: worker.rates(&self.timing),
        };
        let own = loads.into_iter().map(|(own, _)| own).collect();
        self.at(now + self.delay, What::State { worker: at, state: Box::new(state), own });
    }

    fn deliver(&mut self, worker: usize, mut state: State, own: &[Load]) -> Result<()> {
        for (gateway, own) in self.gateways.iter_mut().zip(own) {
            state.own = self.scenario.own.then_some(*own);
            let update = gateway.router.state(WorkerId(worker as u64), &state);
            anyhow::ensure!(update == Update::Applied, "a state of a worker was lost: {update:?}");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::tests::scenario;

    /// Where states come at every change, each gateway's index is what the workers hold, under requests that keep evicting.
    #[test]
    fn the_index_is_what_workers_hold() {
        let scenario = scenario(&[
            "--workers=4",
            "--requests=400",
            "--corpus=300",
            "--memory=20",
            "--disk=50",
            "--report=0",
            "--gateways=2",
        ]);
        let corpus = Corpus::new(&scenario, 4);
        let case = Case { delay: 0.5, ..scenario.cases(4).last().unwrap() };
        let mut simulation = Simulation::new(&scenario, &case, &corpus).unwrap();
        simulation.run_on(&mut |_| {}).unwrap();
        while !simulation.events.is_empty() {
            simulation.step().unwrap();
        }
        for (at, worker) in simulation.workers.iter_mut().enumerate() {
            let held: BTreeSet<u64> =
                (0..300).filter(|chunk| worker.tiers.find(*chunk).is_some()).map(key_of).collect();
            assert_eq!(held.len(), 50, "the disk is full");
            for gateway in &simulation.gateways {
                assert_eq!(gateway.router.keys(WorkerId(at as u64)).collect::<BTreeSet<u64>>(), held);
                assert_eq!(gateway.router.load(WorkerId(at as u64)).unwrap().total(), 0);
            }
        }
    }
}
