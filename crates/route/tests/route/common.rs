//! Fleets for tests.

use refrain_route::{Chunk, Load, Rates, Request, Router, Rule, Settings, State, Update, WorkerId};

/// SmolLM2-135M on two cores with a slow object store: of 512 tokens 171 ms to compute, 5.9 ms to read, 118 ms to fetch.
pub(crate) const RATES: Rates =
    Rates { prefill: 3000.0, local: 2e9, remote: 1e8, remote_latency: 0.03, service: 0.2 };

pub(crate) const TESSERA: Rule = Rule::Tessera { slack: 1 };

/// A worker with its keys and the requests of other gateways that wait at it.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    pub(crate) id: u64,
    pub(crate) keys: Vec<u64>,
    pub(crate) waiting: u32,
}

pub(crate) fn router(rule: Rule) -> Router {
    Router::new(Settings { rule, bytes_per_token: 23_040, rates: RATES })
}

/// The first state of a worker.
pub(crate) fn first_state(keys: &[u64], waiting: u32) -> State {
    State {
        epoch: 1,
        seq: 1,
        added: keys.to_vec(),
        removed: Vec::new(),
        load: Load { running: 0, waiting },
        own: None,
        rates: RATES,
    }
}

pub(crate) fn add(router: &mut Router, member: &Member) {
    assert_eq!(router.add(WorkerId(member.id)), Ok(true));
    let state = first_state(&member.keys, member.waiting);
    assert_eq!(router.state(WorkerId(member.id), &state), Update::Applied);
}

pub(crate) fn fleet(rule: Rule, members: &[Member]) -> Router {
    let mut router = router(rule);
    members.iter().for_each(|member| add(&mut router, member));
    router
}

/// Chunks of 512 tokens.
pub(crate) fn chunks(keys: &[u64]) -> Vec<Chunk> {
    keys.iter().map(|key| Chunk { key: *key, tokens: 512 }).collect()
}

/// A request for an answer by a3.
pub(crate) fn request<'a>(chunks: &'a [Chunk], exclude: &'a [WorkerId]) -> Request<'a> {
    Request { chunks, question: 90, charge: 0.15, exclude, now: 0.0 }
}

/// The worker of a request whose booking is given back at once.
pub(crate) fn chosen(router: &mut Router, keys: &[u64], random: u64) -> Option<u64> {
    let chunks = chunks(keys);
    router.choose(&request(&chunks, &[]), random).map(|choice| choice.worker.0)
}
