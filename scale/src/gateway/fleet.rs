//! The workers as the gateway knows them, and the choice of one for a request.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use refrain_server::{ChunkPlan, HeldChunks, ModelCard, Report};
use tokio_util::sync::CancellationToken;

use crate::cluster::{WorkerEvent, WorkerId};

/// All workers that take requests. A clone is cheap and shares everything.
#[derive(Clone, Default)]
pub(crate) struct Fleet(Arc<Mutex<BTreeMap<WorkerId, Worker>>>);

struct Worker {
    held: HashSet<u64>,
    model: ModelCard,
    /// Requests that the worker had at its last report.
    reported: usize,
    /// Requests of this gateway that the worker had at its last report, and has now.
    own_then: usize,
    own: usize,
    /// Is cancelled when the worker leaves.
    gone: CancellationToken,
}

/// A worker that was chosen for a request, and counts it until this is dropped.
pub(crate) struct Booking {
    pub(crate) worker: WorkerId,
    /// Tokens of the request's chunks that the worker holds.
    pub(crate) local_tokens: usize,
    /// Is cancelled when the worker leaves.
    pub(crate) gone: CancellationToken,
    fleet: Fleet,
}

impl Drop for Booking {
    fn drop(&mut self) {
        if let Some(worker) = self.fleet.workers().get_mut(&self.worker) {
            worker.own = worker.own.saturating_sub(1);
        }
    }
}

/// What is told of a worker.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub(crate) struct WorkerStatus {
    /// Chunks that it holds.
    pub(crate) chunks: usize,
    /// Requests that it has, as far as this gateway knows.
    pub(crate) requests: usize,
    /// Digest of the keys that it holds: equal in all gateways that know the same.
    pub(crate) digest: String,
    pub(crate) model: ModelCard,
}

impl Worker {
    /// Requests that the worker has now: those that it reported, and those that this gateway has sent or seen end since then.
    fn load(&self) -> usize {
        (self.reported + self.own).saturating_sub(self.own_then)
    }

    fn local_tokens(&self, plan: &ChunkPlan) -> usize {
        plan.chunks.iter().filter(|(key, _)| self.held.contains(key)).map(|(_, tokens)| tokens).sum()
    }
}

impl Fleet {
    fn workers(&self) -> MutexGuard<'_, BTreeMap<WorkerId, Worker>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes over what became known of a worker.
    pub(crate) fn apply(&self, event: WorkerEvent) {
        match event {
            WorkerEvent::Left(id) => {
                if let Some(worker) = self.workers().remove(&id) {
                    worker.gone.cancel();
                    tracing::info!(worker = %id, "a worker left");
                }
            }
            WorkerEvent::Reported(id, report) => self.report(id, *report),
        }
    }

    fn report(&self, id: WorkerId, report: Report) {
        let mut workers = self.workers();
        let worker = workers.entry(id).or_insert_with(|| {
            tracing::info!(worker = %id, model = report.model.name, "a worker joined");
            Worker {
                held: HashSet::new(),
                model: report.model.clone(),
                reported: 0,
                own_then: 0,
                own: 0,
                gone: CancellationToken::new(),
            }
        });
        match report.chunks {
            HeldChunks::All(keys) => worker.held = keys.into_iter().collect(),
            HeldChunks::Changed { added, removed } => {
                removed.iter().for_each(|key| _ = worker.held.remove(key));
                worker.held.extend(added);
            }
        }
        (worker.reported, worker.own_then, worker.model) =
            (report.running + report.waiting, worker.own, report.model);
    }

    /// The worker for a request with these chunks, none of `tried`: of those that are within one request of the least loaded, one that
    /// holds most of their tokens. With `model`, workers of another fingerprint are out, since the keys of their chunks are others.
    pub(crate) fn choose(
        &self,
        plan: &ChunkPlan,
        model: Option<&str>,
        tried: &[WorkerId],
    ) -> Option<Booking> {
        let mut workers = self.workers();
        let may = |(id, worker): &(&WorkerId, &Worker)| {
            !tried.contains(id) && model.is_none_or(|model| worker.model.fingerprint == model)
        };
        let least = workers.iter().filter(may).map(|(_, worker)| worker.load()).min()?;
        // Equal requests that no worker holds a chunk of meet at one worker.
        let first = plan.chunks.iter().map(|(key, _)| *key).min().unwrap_or_default();
        let meeting = |id: &WorkerId| blake3::hash(&[first.to_le_bytes(), id.0.to_le_bytes()].concat());
        let near = workers.iter().filter(may).filter(|(_, worker)| worker.load() <= least + 1);
        let (id, local_tokens, _) = near
            .map(|(id, worker)| (*id, worker.local_tokens(plan), worker.load()))
            .max_by(|(a, held_a, load_a), (b, held_b, load_b)| {
                let meet = || meeting(a).as_bytes().cmp(meeting(b).as_bytes());
                let loads = if plan.chunks.is_empty() || held_a + held_b > 0 {
                    load_b.cmp(load_a)
                } else {
                    std::cmp::Ordering::Equal
                };
                held_a.cmp(held_b).then(loads).then_with(meet)
            })?;
        let worker = workers.get_mut(&id)?;
        worker.own += 1;
        Some(Booking { worker: id, local_tokens, gone: worker.gone.clone(), fleet: self.clone() })
    }

    /// The model's fingerprint of a worker that is there.
    pub(crate) fn fingerprint(&self, id: WorkerId) -> Option<String> {
        self.workers().get(&id).map(|worker| worker.model.fingerprint.clone())
    }

    /// All workers that take requests.
    pub(crate) fn ids(&self) -> Vec<WorkerId> {
        self.workers().keys().copied().collect()
    }

    /// What is known of all workers.
    pub(crate) fn status(&self) -> BTreeMap<String, WorkerStatus> {
        let status = |(id, worker): (&WorkerId, &Worker)| {
            let mut keys: Vec<u64> = worker.held.iter().copied().collect();
            keys.sort_unstable();
            let mut digest = blake3::Hasher::new();
            keys.iter().for_each(|key| _ = digest.update(&key.to_le_bytes()));
            let status = WorkerStatus {
                chunks: keys.len(),
                requests: worker.load(),
                digest: digest.finalize().to_hex()[..16].to_owned(),
                model: worker.model.clone(),
            };
            (id.to_string(), status)
        };
        self.workers().iter().map(status).collect()
    }
}
