//! How long a choice takes on this machine.

use std::time::Instant;

use serde::Serialize;

use crate::gateway::Gateway;
use crate::scenario::{Case, Scenario};
use crate::traffic::{Corpus, Traffic};

/// Measurements of which least and median are told.
const ROUNDS: usize = 15;

/// Microseconds a choice, booking and release included: the mean of a measurement's choices, of several measurements.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct ChoiceTime {
    pub(crate) least: f64,
    pub(crate) median: f64,
    /// Pairs of key and worker that the index has meanwhile.
    pub(crate) pairs: usize,
}

/// Chooses workers for requests like those of the simulation, over and over. A quarter of the workers has a request meanwhile.
pub(crate) fn choices(
    gateway: &mut Gateway,
    scenario: &Scenario,
    case: &Case,
    corpus: &Corpus,
    choices: u32,
) -> ChoiceTime {
    let other =
        Scenario { seed: scenario.seed.wrapping_add(1), requests: u64::from(choices), ..scenario.clone() };
    let requests: Vec<Vec<u32>> = Traffic::new(&other, case.workers, case.rate, corpus)
        .take(choices as usize)
        .map(|arrival| arrival.chunks)
        .collect();
    let kept: Vec<_> =
        requests.iter().take(case.workers / 4).map(|chunks| gateway.choose(chunks, 0.0)).collect();
    let measure = |_| {
        let started = Instant::now();
        requests.iter().for_each(|chunks| _ = std::hint::black_box(gateway.choose(chunks, 0.0)));
        started.elapsed().as_secs_f64() * 1e6 / f64::from(choices)
    };
    let mut times: Vec<f64> = (0..ROUNDS).map(measure).collect();
    drop(kept);
    times.sort_by(f64::total_cmp);
    ChoiceTime { least: times[0], median: times[ROUNDS / 2], pairs: gateway.router.pairs() }
}
