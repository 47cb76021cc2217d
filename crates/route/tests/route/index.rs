//! The index equals the lists of the workers after any losses, repetitions and reorderings of their states.

use std::collections::{BTreeSet, HashSet, VecDeque};

use crate::common::{Member, RATES, first_state, fleet, router};
use proptest::prelude::*;
use refrain_route::{Load, Router, Rule, Snapshot, State, Update, WorkerId};

const WORKERS: usize = 4;

fn id(worker: usize) -> WorkerId {
    WorkerId(worker as u64)
}

/// A worker that changes and publishes.
#[derive(Debug, Default)]
struct Publisher {
    epoch: u64,
    seq: u64,
    held: BTreeSet<u64>,
    published: BTreeSet<u64>,
}

impl Publisher {
    fn state(&mut self) -> State {
        self.seq += 1;
        let state = State {
            epoch: self.epoch,
            seq: self.seq,
            added: self.held.difference(&self.published).copied().collect(),
            removed: self.published.difference(&self.held).copied().collect(),
            load: Load::default(),
            own: None,
            rates: RATES,
        };
        self.published = self.held.clone();
        state
    }

    fn snapshot(&self) -> Snapshot {
        Snapshot { epoch: self.epoch, seq: self.seq, keys: self.published.iter().copied().collect() }
    }

    fn restart(&mut self, kept: u64) {
        *self = Publisher {
            epoch: self.epoch + 1,
            held: self.held.iter().copied().filter(|key| key % 3 == kept % 3).collect(),
            ..Publisher::default()
        };
    }
}

/// An event of a worker, its states, or the snapshots that are on their way.
#[derive(Clone, Debug)]
enum Step {
    Hold(usize, u64),
    Drop(usize, u64),
    Publish(usize),
    Restart(usize, u64),
    /// The oldest state on its way comes in, is lost, comes twice, or changes places with the next.
    Deliver(usize),
    Lose(usize),
    Twice(usize),
    Overtake(usize),
    AskSnapshot(usize),
    DeliverSnapshot(usize),
    Leave(usize),
    Join(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let worker = 0..WORKERS;
    let step = prop_oneof![
        6 => (worker.clone(), 0..16_u64).prop_map(|(w, key)| Step::Hold(w, key)),
        4 => (worker.clone(), 0..16_u64).prop_map(|(w, key)| Step::Drop(w, key)),
        6 => worker.clone().prop_map(Step::Publish),
        1 => (worker.clone(), 0..3_u64).prop_map(|(w, kept)| Step::Restart(w, kept)),
        6 => worker.clone().prop_map(Step::Deliver),
        2 => worker.clone().prop_map(Step::Lose),
        1 => worker.clone().prop_map(Step::Twice),
        1 => worker.clone().prop_map(Step::Overtake),
        2 => worker.clone().prop_map(Step::AskSnapshot),
        2 => worker.clone().prop_map(Step::DeliverSnapshot),
        1 => worker.clone().prop_map(Step::Leave),
        1 => worker.prop_map(Step::Join),
    ];
    prop::collection::vec(step, 0..120)
}

/// Workers, and the messages that are on their way from each.
#[derive(Debug, Default)]
struct World {
    workers: Vec<Publisher>,
    states: Vec<VecDeque<State>>,
    snapshots: Vec<VecDeque<Snapshot>>,
    present: HashSet<usize>,
}

impl World {
    fn new() -> World {
        let each = || (0..WORKERS).map(|_| ());
        World {
            workers: each().map(|()| Publisher { epoch: 1, ..Publisher::default() }).collect(),
            states: each().map(|()| VecDeque::new()).collect(),
            snapshots: each().map(|()| VecDeque::new()).collect(),
            present: HashSet::new(),
        }
    }

    fn take(&mut self, router: &mut Router, step: &Step) {
        match *step {
            Step::Hold(w, key) => _ = self.workers[w].held.insert(key),
            Step::Drop(w, key) => _ = self.workers[w].held.remove(&key),
            Step::Publish(w) => {
                let state = self.workers[w].state();
                self.states[w].push_back(state);
            }
            Step::Restart(w, kept) => self.workers[w].restart(kept),
            Step::Lose(w) => _ = self.states[w].pop_front(),
            Step::Overtake(w) if self.states[w].len() > 1 => self.states[w].swap(0, 1),
            Step::Overtake(_) => {}
            Step::AskSnapshot(w) => {
                let snapshot = self.workers[w].snapshot();
                self.snapshots[w].push_back(snapshot);
            }
            Step::Leave(w) => assert_eq!(router.remove(id(w)), self.present.remove(&w)),
            Step::Join(w) => assert_eq!(router.add(id(w)), Ok(self.present.insert(w))),
            Step::Twice(w) => {
                let state = self.states[w].front().cloned();
                self.told(w, state.map(|state| router.state(id(w), &state)));
            }
            Step::Deliver(w) => {
                let state = self.states[w].pop_front();
                self.told(w, state.map(|state| router.state(id(w), &state)));
            }
            Step::DeliverSnapshot(w) => {
                let snapshot = self.snapshots[w].pop_front();
                self.told(w, snapshot.map(|snapshot| router.snapshot(id(w), &snapshot)));
            }
        }
    }

    /// Workers that are not there are told apart from others.
    fn told(&self, worker: usize, update: Option<Update>) {
        if let Some(update) = update {
            assert_eq!(update == Update::UnknownWorker, !self.present.contains(&worker));
        }
    }

    /// One more state of each worker comes in, and a snapshot where one is asked for.
    fn settle(&mut self, router: &mut Router) {
        for w in self.present.iter().copied() {
            let worker = &mut self.workers[w];
            match router.state(id(w), &worker.state()) {
                Update::SnapshotNeeded => {
                    assert_eq!(router.snapshot(id(w), &worker.snapshot()), Update::Applied);
                }
                update => assert_eq!(update, Update::Applied),
            }
        }
    }
}

/// An index made anew of the workers' lists.
fn rebuilt(world: &World) -> Router {
    let members: Vec<Member> = world
        .present
        .iter()
        .map(|w| Member { id: *w as u64, keys: world.workers[*w].held.iter().copied().collect(), waiting: 0 })
        .collect();
    fleet(Rule::Cost, &members)
}

/// A router's pairs of key and worker, from both sides.
fn pairs(router: &Router) -> (Vec<BTreeSet<WorkerId>>, Vec<Vec<u64>>, usize, usize) {
    let holders = (0..16).map(|key| router.holders(key).collect()).collect();
    let keys = (0..WORKERS).map(|worker| router.keys(id(worker)).collect()).collect();
    (holders, keys, router.pairs(), router.distinct_keys())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn after_any_events_the_index_is_that_of_the_workers(steps in steps()) {
        let (mut router, mut world) = (router(Rule::Cost), World::new());
        steps.iter().for_each(|step| world.take(&mut router, step));
        world.settle(&mut router);
        prop_assert_eq!(pairs(&router), pairs(&rebuilt(&world)));
    }
}

/// A state without keys but for those that are given.
fn state(epoch: u64, seq: u64, added: &[u64], removed: &[u64]) -> State {
    State { epoch, seq, removed: removed.to_vec(), ..first_state(added, 0) }
}

fn held(router: &Router) -> Vec<u64> {
    router.keys(WorkerId(1)).collect()
}

fn alone() -> Router {
    let mut router = router(Rule::Cost);
    router.add(WorkerId(1)).unwrap();
    router
}

#[test]
fn states_that_are_whole_need_no_snapshot() {
    let mut router = alone();
    let mut apply = |state: State| router.state(WorkerId(1), &state);
    assert_eq!(apply(state(1, 1, &[1, 2, 3], &[])), Update::Applied);
    assert_eq!(apply(state(1, 2, &[4, 1], &[1, 2, 9])), Update::Applied);
    assert_eq!(apply(state(1, 2, &[7], &[])), Update::Stale);
    // A new start begins with no keys.
    assert_eq!(apply(state(2, 1, &[8], &[])), Update::Applied);
    assert_eq!(apply(state(2, 0, &[9], &[])), Update::Stale);
    assert_eq!(held(&router), [8]);
}

#[test]
fn a_gap_asks_for_a_snapshot_until_one_fills_it() {
    let mut router = alone();
    let id = WorkerId(1);
    assert_eq!(router.state(id, &state(1, 1, &[1], &[])), Update::Applied);
    assert_eq!(router.state(id, &state(1, 3, &[3], &[])), Update::SnapshotNeeded);
    assert_eq!(held(&router), [1, 3], "the keys of later states are used meanwhile");
    assert_eq!(router.state(id, &state(1, 4, &[4], &[1])), Update::SnapshotNeeded);
    let snapshot = |seq, keys: &[u64]| Snapshot { epoch: 1, seq, keys: keys.to_vec() };
    assert_eq!(router.snapshot(id, &snapshot(0, &[])), Update::SnapshotNeeded, "older than what was right");
    assert_eq!(held(&router), [3, 4]);
    assert_eq!(router.snapshot(id, &snapshot(1, &[1])), Update::SnapshotNeeded, "it ends before the gap");
    // The snapshot is of the time of state 2; states 3 and 4 are applied to it again.
    assert_eq!(router.snapshot(id, &snapshot(2, &[1, 2])), Update::Applied);
    assert_eq!(held(&router), [2, 3, 4]);
    assert_eq!(router.state(id, &state(1, 5, &[5], &[])), Update::Applied);
    assert_eq!(router.snapshot(id, &snapshot(3, &[])), Update::Stale);
    assert_eq!(held(&router), [2, 3, 4, 5]);
}

#[test]
fn a_snapshot_may_be_ahead_of_the_states() {
    let mut router = alone();
    let id = WorkerId(1);
    assert_eq!(
        router.state(id, &state(9, 7, &[1], &[])),
        Update::SnapshotNeeded,
        "the states before are not known"
    );
    let snapshot = Snapshot { epoch: 9, seq: 9, keys: vec![2, 2, 3] };
    assert_eq!(router.snapshot(id, &snapshot), Update::Applied);
    assert_eq!(router.state(id, &state(9, 8, &[1], &[])), Update::Stale);
    assert_eq!(router.state(id, &state(9, 10, &[], &[3])), Update::Applied);
    assert_eq!(held(&router), [2]);
}

/// While no snapshot comes, as many states are kept as an answer may take, and no more: a snapshot older than those is not enough.
#[test]
fn states_that_wait_for_a_snapshot_are_bounded() {
    let mut router = alone();
    let id = WorkerId(1);
    for seq in 2..=100 {
        assert_eq!(router.state(id, &state(1, seq, &[seq], &[])), Update::SnapshotNeeded);
    }
    let snapshot = |seq: u64| Snapshot { epoch: 1, seq, keys: (1..=seq).collect() };
    assert_eq!(router.snapshot(id, &snapshot(20)), Update::SnapshotNeeded);
    assert_eq!(router.snapshot(id, &snapshot(40)), Update::Applied);
    assert_eq!(held(&router), (1..=100).collect::<Vec<u64>>());
}

/// Numbers at the end of their range come from outside as well.
#[test]
fn the_last_numbers_overflow_nothing() {
    let mut router = alone();
    let id = WorkerId(1);
    assert_eq!(router.state(id, &state(1, u64::MAX, &[1], &[])), Update::SnapshotNeeded);
    let snapshot = Snapshot { epoch: u64::MAX, seq: u64::MAX, keys: vec![u64::MAX, 0] };
    assert_eq!(router.snapshot(id, &snapshot), Update::Applied);
    assert_eq!(router.state(id, &state(u64::MAX, u64::MAX, &[1], &[])), Update::Stale);
    assert_eq!(held(&router), [0, u64::MAX]);
}
