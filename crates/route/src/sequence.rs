//! The order of a worker's states: a missing state is noticed, and a snapshot makes up for it.

use std::collections::VecDeque;

use crate::index::{ChunkIndex, Slot};
use crate::state::{Snapshot, State, Update};

/// States that are kept while a snapshot is awaited. A snapshot that is older than the oldest of them cannot be brought up to date, and
/// another one is asked for.
const MAX_PENDING: usize = 64;

/// The changes of keys in a state.
#[derive(Debug)]
struct Change {
    seq: u64,
    added: Vec<u64>,
    removed: Vec<u64>,
}

/// How far the states of one worker were followed.
#[derive(Debug, Default)]
pub(crate) struct Sequence {
    /// The start of the worker that its states are of; none before the first.
    epoch: Option<u64>,
    /// The newest state or snapshot of this start.
    seq: u64,
    /// The keys are right as of this one: `seq`, unless states are missing.
    whole: u64,
    /// States after a missing one, oldest first; empty where none is missing.
    pending: VecDeque<Change>,
}

impl Sequence {
    fn begin(epoch: u64) -> Sequence {
        Sequence { epoch: Some(epoch), ..Sequence::default() }
    }

    /// Takes a state's keys over. Those behind a missing state are taken over as well: only the missing changes are wrong then.
    pub(crate) fn state(&mut self, state: &State, index: &mut ChunkIndex, slot: Slot) -> Update {
        let Some(before) = state.seq.checked_sub(1) else { return Update::Stale };
        if self.epoch != Some(state.epoch) {
            index.replace(slot, []);
            *self = Sequence::begin(state.epoch);
        }
        if before < self.seq {
            return Update::Stale;
        }
        apply(&state.added, &state.removed, index, slot);
        let follows = self.pending.is_empty() && before == self.seq;
        self.seq = state.seq;
        if follows {
            self.whole = state.seq;
            return Update::Applied;
        }
        if self.pending.len() == MAX_PENDING {
            self.pending.pop_front();
        }
        self.pending.push_back(Change {
            seq: state.seq,
            added: state.added.clone(),
            removed: state.removed.clone(),
        });
        Update::SnapshotNeeded
    }

    /// Takes a snapshot over, and the states behind it once more.
    pub(crate) fn snapshot(&mut self, snapshot: &Snapshot, index: &mut ChunkIndex, slot: Slot) -> Update {
        if self.epoch != Some(snapshot.epoch) {
            *self = Sequence::begin(snapshot.epoch);
        } else if snapshot.seq < self.whole {
            return if self.pending.is_empty() { Update::Stale } else { Update::SnapshotNeeded };
        }
        index.replace(slot, snapshot.keys.iter().copied());
        self.whole = snapshot.seq;
        self.seq = self.seq.max(snapshot.seq);
        self.pending.retain(|change| change.seq > snapshot.seq);
        for change in &self.pending {
            apply(&change.added, &change.removed, index, slot);
        }
        while self.pending.front().is_some_and(|change| change.seq - 1 == self.whole) {
            self.pending.pop_front();
            self.whole += 1;
        }
        if self.pending.is_empty() { Update::Applied } else { Update::SnapshotNeeded }
    }
}

fn apply(added: &[u64], removed: &[u64], index: &mut ChunkIndex, slot: Slot) {
    removed.iter().for_each(|key| index.remove(slot, *key));
    added.iter().for_each(|key| index.insert(slot, *key));
}
