//! The workers as the gateway knows them, and the choice of one for a request, which `refrain_route` makes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use refrain_route::{Chunk, Load, Request, Router, Rule, Settings, Snapshot, State, Update};
use refrain_server::{ChunkPlan, HeldChunks, ModelCard, Report};
use tokio_util::sync::CancellationToken;

use crate::cluster::{WorkerEvent, WorkerId};

/// Rates of a worker that has measured none yet: a small model on two cores, with a local disk and an object store near by. Each decides until a
/// worker has measured it: those of the object store until one has downloaded from it.
const RATES: refrain_route::Rates =
    refrain_route::Rates { prefill: 3000.0, local: 1e9, remote: 100e6, remote_latency: 0.02, service: 0.1 };

/// All workers, and which of them take requests. A clone is cheap and shares everything.
#[derive(Clone)]
pub(crate) struct Fleet(Arc<Mutex<Inner>>);

struct Inner {
    rule: Rule,
    started: Instant,
    workers: BTreeMap<WorkerId, Worker>,
    /// A router for the workers of each model, by its fingerprint: keys of one model's chunks mean nothing to another.
    routers: BTreeMap<String, Router>,
    /// Decides between workers that are equally good.
    random: u64,
}

struct Worker {
    model: ModelCard,
    /// Reports that the router has taken.
    taken: u64,
    /// Whether it takes requests.
    is_open: bool,
    /// Whether a request was lost there since the last report.
    is_suspect: bool,
    /// Is cancelled when the worker leaves.
    gone: CancellationToken,
}

/// A worker that was chosen for a request, and counts it until this is dropped.
pub(crate) struct Booking {
    pub(crate) worker: WorkerId,
    /// Tokens of the request's chunks that the worker holds.
    pub(crate) local_tokens: u64,
    /// Is cancelled when the worker leaves.
    pub(crate) gone: CancellationToken,
    /// What the worker's answers depend on.
    pub(crate) kind: Kind,
    place: refrain_route::Booking,
}

/// The model that a request is to be answered by, and the chat that it belongs to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wanted<'a> {
    /// Its name in requests. Where no worker has it, all may be chosen: the one that is says that there is no such model.
    pub(crate) name: Option<&'a str>,
    /// Its fingerprint.
    pub(crate) fingerprint: Option<&'a str>,
    /// The number of the chat, which decides between workers that are equally good in place of chance: the beginning of the
    /// prompt may be kept at one of them.
    pub(crate) chat: Option<u64>,
}

/// What the text of an answer depends on beside its request. Workers of one kind give the same one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    /// Fingerprint of the model.
    pub(crate) fingerprint: String,
    /// Precision and kernels; empty where the worker does not tell them.
    pub(crate) numerics: String,
}

impl Kind {
    fn of(model: &ModelCard) -> Kind {
        Kind { fingerprint: model.fingerprint.clone(), numerics: model.numerics.clone() }
    }
}

impl Booking {
    /// The first token came: the request keeps nobody waiting from now on.
    pub(crate) fn first_token(&mut self) {
        self.place.first_token();
    }
}

/// What is told of a worker.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub(crate) struct WorkerStatus {
    /// Chunks that it holds.
    pub(crate) chunks: usize,
    /// Requests that it has, as far as this gateway knows.
    pub(crate) requests: u32,
    /// Digest of the keys that it holds: equal in all gateways that know the same.
    pub(crate) digest: String,
    pub(crate) model: ModelCard,
}

impl Fleet {
    /// A fleet without workers, whose choices follow this rule.
    pub(crate) fn new(rule: Rule) -> Fleet {
        let (workers, routers) = (BTreeMap::new(), BTreeMap::new());
        let mut random = [0; 8];
        // Without random bits all gateways prefer the same workers among equals.
        let _ = getrandom::fill(&mut random);
        let (started, random) = (Instant::now(), u64::from_le_bytes(random));
        Fleet(Arc::new(Mutex::new(Inner { rule, started, workers, routers, random })))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes over what became known of a worker.
    pub(crate) fn apply(&self, event: WorkerEvent) {
        match event {
            WorkerEvent::Closed(worker) => self.inner().close(worker),
            WorkerEvent::Left(worker) => self.inner().leave(worker),
            WorkerEvent::Reported(worker, report) => self.inner().report(worker, *report),
        }
    }

    /// Takes note that a request was lost at a worker, which is not chosen before its next report while there are others.
    pub(crate) fn suspect(&self, worker: WorkerId) {
        if let Some(worker) = self.inner().workers.get_mut(&worker) {
            worker.is_suspect = true;
        }
    }

    /// The best worker for a request with these chunks, none of `tried`.
    pub(crate) fn choose(&self, plan: &ChunkPlan, wanted: Wanted<'_>, tried: &[WorkerId]) -> Option<Booking> {
        let mut inner = self.inner();
        let mut exclude = tried.to_vec();
        exclude.extend(wanted.name.map_or_else(Vec::new, |name| inner.others(name)));
        let suspects = inner.workers.iter().filter(|(_, worker)| worker.is_suspect).map(|(id, _)| *id);
        let careful: Vec<WorkerId> = exclude.iter().copied().chain(suspects).collect();
        inner.choose(plan, wanted, &careful).or_else(|| inner.choose(plan, wanted, &exclude))
    }

    /// The best worker of a kind for a request with these chunks, none of `tried`. None where the kind is not known whole.
    pub(crate) fn choose_alike(&self, plan: &ChunkPlan, kind: &Kind, tried: &[WorkerId]) -> Option<Booking> {
        if kind.numerics.is_empty() {
            return None;
        }
        let mut exclude = tried.to_vec();
        let is_other = |worker: &Worker| Kind::of(&worker.model) != *kind;
        exclude.extend(self.inner().workers.iter().filter(|(_, worker)| is_other(worker)).map(|(id, _)| *id));
        let wanted = Wanted { fingerprint: Some(&kind.fingerprint), ..Wanted::default() };
        self.choose(plan, wanted, &exclude)
    }

    /// Names of the models of all workers that take requests.
    pub(crate) fn models(&self) -> BTreeSet<String> {
        let inner = self.inner();
        let open = inner.workers.values().filter(|worker| worker.is_open);
        open.map(|worker| worker.model.name.clone()).collect()
    }

    /// All workers that take requests.
    pub(crate) fn ids(&self) -> Vec<WorkerId> {
        let inner = self.inner();
        inner.workers.iter().filter(|(_, worker)| worker.is_open).map(|(id, _)| *id).collect()
    }

    /// All workers that have not left, whether they take requests or not.
    pub(crate) fn known(&self) -> Vec<WorkerId> {
        self.inner().workers.keys().copied().collect()
    }

    /// Model, chunks and requests of each worker that takes requests.
    pub(crate) fn status(&self) -> BTreeMap<String, WorkerStatus> {
        let inner = self.inner();
        let status = |(worker, known): (&WorkerId, &Worker)| {
            let router = inner.routers.get(&known.model.fingerprint)?;
            let (mut digest, mut chunks) = (blake3::Hasher::new(), 0);
            for key in router.keys(*worker) {
                digest.update(&key.to_le_bytes());
                chunks += 1;
            }
            let status = WorkerStatus {
                chunks,
                requests: router.load(*worker).unwrap_or_default().total(),
                digest: digest.finalize().to_hex()[..16].to_owned(),
                model: known.model.clone(),
            };
            Some((worker.to_string(), status))
        };
        inner.workers.iter().filter(|(_, worker)| worker.is_open).filter_map(status).collect()
    }
}

impl Inner {
    /// The workers of other models than the one of this name, where a worker has that one.
    fn others(&self, name: &str) -> Vec<WorkerId> {
        let is_other = |(_, worker): &(&WorkerId, &Worker)| worker.model.name != name;
        let others: Vec<WorkerId> = self.workers.iter().filter(is_other).map(|(id, _)| *id).collect();
        if others.len() < self.workers.len() { others } else { Vec::new() }
    }

    /// Takes a worker out of the choice. The requests that it has go on.
    fn close(&mut self, worker: WorkerId) {
        let Some(known) = self.workers.get_mut(&worker).filter(|known| known.is_open) else { return };
        known.is_open = false;
        tracing::info!(%worker, "a worker takes no more requests");
        let fingerprint = known.model.fingerprint.clone();
        if let Some(router) = self.routers.get_mut(&fingerprint) {
            router.remove(worker);
        }
        if !self.workers.values().any(|other| other.is_open && other.model.fingerprint == fingerprint) {
            self.routers.remove(&fingerprint);
        }
    }

    fn leave(&mut self, worker: WorkerId) {
        self.close(worker);
        let Some(known) = self.workers.remove(&worker) else { return };
        known.gone.cancel();
        tracing::info!(%worker, "a worker left");
    }

    fn report(&mut self, worker: WorkerId, report: Report) {
        // A worker that came back with another model, or as another version, is another worker.
        if self.workers.get(&worker).is_some_and(|known| known.model != report.model) {
            self.leave(worker);
        }
        let rule = self.rule;
        let router = self.routers.entry(report.model.fingerprint.clone()).or_insert_with(|| {
            let bytes_per_token = report.model.kv_bytes_per_token as u64;
            Router::new(Settings { rule, bytes_per_token, rates: RATES })
        });
        if let Err(error) = router.add(worker) {
            tracing::error!(%error, %worker, "a worker is not used");
            return;
        }
        let known = self.workers.entry(worker).or_insert_with(|| {
            tracing::info!(%worker, model = report.model.name, "a worker joined");
            Worker {
                model: report.model.clone(),
                taken: 0,
                is_open: true,
                is_suspect: false,
                gone: CancellationToken::new(),
            }
        });
        (known.is_open, known.is_suspect) = (true, false);
        let (added, removed) = match report.chunks {
            HeldChunks::Changed { added, removed } => (added, removed),
            HeldChunks::All(keys) => {
                known.taken += 1;
                let snapshot = Snapshot { epoch: report.epoch, seq: known.taken, keys };
                note(worker, router.snapshot(worker, &snapshot));
                Default::default()
            }
        };
        // The cluster tells every change and in order, so that its reports are numbered here, those without a change as well.
        known.taken += 1;
        let load = |requests: usize| u32::try_from(requests).unwrap_or(u32::MAX);
        let state = State {
            epoch: report.epoch,
            seq: known.taken,
            added,
            removed,
            load: Load { running: load(report.running), waiting: load(report.waiting) },
            own: None,
            rates: refrain_route::Rates {
                prefill: report.rates.tokens_per_second,
                local: report.rates.bytes_per_second,
                remote: report.rates.remote_bytes_per_second,
                // 0 is one that is not known, which would be taken for a latency.
                remote_latency: Some(report.rates.remote_latency).filter(|it| *it > 0.0).unwrap_or(f64::NAN),
                service: report.rates.seconds,
            },
        };
        note(worker, router.state(worker, &state));
    }

    fn choose(&mut self, plan: &ChunkPlan, wanted: Wanted<'_>, exclude: &[WorkerId]) -> Option<Booking> {
        let chunk = |(key, tokens): &(u64, usize)| Chunk {
            key: *key,
            tokens: u32::try_from(*tokens).unwrap_or(u32::MAX),
        };
        let chunks: Vec<Chunk> = plan.chunks.iter().map(chunk).collect();
        let tokens: usize = plan.chunks.iter().map(|(_, tokens)| tokens).sum();
        let request = Request {
            chunks: &chunks,
            question: u32::try_from(plan.prompt_tokens.saturating_sub(tokens)).unwrap_or(u32::MAX),
            charge: plan.charge,
            exclude,
            now: self.started.elapsed().as_secs_f64(),
        };
        // A request without chunks is placed by load alone; its question counts only once it is booked.
        let by_load = Request { question: 0, ..request };
        self.random = self.random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let random = wanted.chat.unwrap_or(self.random);
        let is_wanted = |fingerprint: &str| wanted.fingerprint.is_none_or(|wanted| wanted == fingerprint);
        // Without a wanted model, the one with the least loaded worker is asked.
        let least = |router: &Router| {
            let free = router.loads().filter(|(worker, _)| !exclude.contains(worker));
            free.map(|(_, load)| load.total()).min()
        };
        let routers = self.routers.iter_mut().filter(|(fingerprint, _)| is_wanted(fingerprint));
        let routers = routers.filter_map(|(_, router)| Some((least(router)?, router)));
        let (_, router) = routers.min_by_key(|(load, _)| *load)?;
        let choice = match chunks.is_empty() {
            false => router.choose(&request, random)?,
            true => {
                let worker = router.choose(&by_load, random)?.worker;
                router.book(worker, &request)?
            }
        };
        let worker = choice.worker;
        let known = self.workers.get(&worker)?;
        let (gone, kind) = (known.gone.clone(), Kind::of(&known.model));
        Some(Booking { worker, local_tokens: choice.estimate.held, gone, kind, place: choice.booking })
    }
}

/// Notes what the router did not take over, which the order of the cluster's reports rules out.
fn note(worker: WorkerId, update: Update) {
    if update != Update::Applied {
        tracing::warn!(%worker, ?update, "a report was not taken over");
    }
}
