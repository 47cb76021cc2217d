//! The messages of workers.

use std::fmt;

/// A worker's name: the instance id of a discovery service, or any number that a list of workers gives. A worker that starts again may
/// keep it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId(pub u64);

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

/// Requests that a worker has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests whose answer is being decoded.
    pub running: u32,
    /// Requests that have no first token yet: in the queue, or being prefilled.
    pub waiting: u32,
}

impl Load {
    /// All requests.
    pub fn total(self) -> u32 {
        self.running.saturating_add(self.waiting)
    }

    /// What is left of it without `other`, never below nothing.
    pub(crate) fn without(self, other: Load) -> Load {
        Load {
            running: self.running.saturating_sub(other.running),
            waiting: self.waiting.saturating_sub(other.waiting),
        }
    }
}

/// The measured speed of a worker. A figure that is not finite or not above zero is ignored, and the one before it stays; a latency may be
/// zero.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Tokens a second that it computes of a prompt.
    pub prefill: f64,
    /// Bytes a second of chunks out of its memory and its disk, mixed as it reads them.
    pub local: f64,
    /// Bytes a second of chunks out of the object store.
    pub remote: f64,
    /// Seconds until the object store's first byte.
    pub remote_latency: f64,
    /// Seconds of its time that a request takes until the first token: the mean of the latest ones.
    pub service: f64,
}

impl Rates {
    /// The mean of each figure; none of no rates.
    pub(crate) fn mean(all: &[Rates]) -> Option<Rates> {
        let of = |figure: fn(&Rates) -> f64| all.iter().map(figure).sum::<f64>() / all.len() as f64;
        (!all.is_empty()).then(|| Rates {
            prefill: of(|rates| rates.prefill),
            local: of(|rates| rates.local),
            remote: of(|rates| rates.remote),
            remote_latency: of(|rates| rates.remote_latency),
            service: of(|rates| rates.service),
        })
    }

    /// The figures of `newer`, and the old ones in place of those that are ignored.
    pub(crate) fn updated(self, newer: Rates) -> Rates {
        let either = |old: f64, new: f64| if new.is_finite() && new > 0.0 { new } else { old };
        Rates {
            prefill: either(self.prefill, newer.prefill),
            local: either(self.local, newer.local),
            remote: either(self.remote, newer.remote),
            remote_latency: if newer.remote_latency == 0.0 {
                0.0
            } else {
                either(self.remote_latency, newer.remote_latency)
            },
            service: either(self.service, newer.service),
        }
    }
}

/// A worker's regular message: its load, and the changes of its keys since the message before.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    /// A number of the worker's own start that no other start of it has, such as the time.
    pub epoch: u64,
    /// The number of the state in this start, from 1. The first begins from an empty list of keys.
    pub seq: u64,
    /// Keys that are held now and were not. A key is the first 8 bytes of a chunk's key; two chunks that share them cost time, never a
    /// wrong answer.
    pub added: Vec<u64>,
    /// Keys that were held and are not any more. A key that is in both lists is held.
    pub removed: Vec<u64>,
    /// All requests that the worker has.
    pub load: Load,
    /// The requests among them that the reader of this state has sent, if the worker tells its gateways apart. Without it, the reader's
    /// bookings at the arrival of the state are taken for it, which is right as long as states are not late.
    pub own: Option<Load>,
    /// Its measured speed.
    pub rates: Rates,
}

/// All keys that a worker holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The start that it is of.
    pub epoch: u64,
    /// The number of the last state before it.
    pub seq: u64,
    /// The keys, in any order.
    pub keys: Vec<u64>,
}

/// The effect of a state or a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Update {
    /// The keys are those of the worker as of this state.
    Applied,
    /// It is older than the newest one, and changed nothing.
    Stale,
    /// States are missing before it: the keys are a guess until a snapshot comes. Every state says so until then.
    SnapshotNeeded,
    /// The worker is not in the fleet, and nothing was kept.
    UnknownWorker,
}
