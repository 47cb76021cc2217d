//! The compute thread: `admit; advance; decode; publish`, over and over.
//!
//! All prefills, ingests and sequences under way belong to this thread. One turn takes jobs from the queue as far as there is room,
//! computes at most one layer, or a part of a long one, of one prefill or ingest, decodes a token of every running sequence if one is due, and tells
//! the others what is under way.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain::engine::{Advance, DecodeWorkspace, GenerateRequest};
use tracing::info_span;

use crate::api_error::ApiError;
use crate::job::{Event, GenerateJob, Job};
use crate::queue::{QueuedJob, Shared, UnderWay};
use crate::running::{Client, Panicked, RunningIngest, RunningPrefill, RunningSequence, emit, step};
use crate::shares::Shares;

/// While prompts or ingests compute, a decode step is due after this many times its own duration: a quarter of the time goes
/// to decoding.
const PREFILL_SHARE: u32 = 3;

/// While a key without a running answer waits for its first token, decode steps rest this many times their own duration, for at most
/// [`NEWCOMER`] of the prompt's time.
const NEWCOMER_SHARE: u32 = 12;

/// The time after which a prompt is no newcomer's.
const NEWCOMER: Duration = Duration::from_secs(1);

/// The time that the first step of work that has to wait may take. A layer from memory or a fast disk comes within it; a turn that ended sooner
/// would decode a token of each running answer before the layer is used.
const FIRST_PATIENCE: Duration = Duration::from_millis(10);

/// The time of a turn that may go to work that waits on, for a slow disk or an object store: running answers wait as long for each of their tokens.
const PATIENCE: Duration = Duration::from_millis(1);

/// Time without work after which unused memory is given back to the system.
const IDLE_BEFORE_TRIM: Duration = Duration::from_secs(1);

/// Everything that is under way.
pub(crate) struct Compute {
    shared: Arc<Shared>,
    prefills: VecDeque<RunningPrefill>,
    ingests: VecDeque<RunningIngest>,
    sequences: Vec<RunningSequence>,
    shares: Shares,
    workspace: DecodeWorkspace,
    /// The end of the last decode step, and its duration.
    last_step: Option<(Instant, Duration)>,
    /// The time of the last turn with work; none once unused memory was given back.
    last_work: Option<Instant>,
}

impl Compute {
    pub(crate) fn new(shared: Arc<Shared>) -> Compute {
        Compute {
            shared,
            prefills: VecDeque::new(),
            ingests: VecDeque::new(),
            sequences: Vec::new(),
            shares: Shares::default(),
            workspace: DecodeWorkspace::default(),
            last_step: None,
            last_work: None,
        }
    }

    /// Works until the server aborts.
    pub(crate) fn run(mut self) {
        while !self.shared.is_aborted() || self.is_busy() {
            // A panic must not end the thread: other requests follow.
            if catch_unwind(AssertUnwindSafe(|| self.turn())).is_err() {
                tracing::error!("a turn of the compute thread panicked");
            }
        }
        self.shared.abort_queue();
    }

    fn turn(&mut self) {
        self.drop_over();
        self.admit();
        self.advance();
        self.decode();
        self.publish();
    }

    fn is_busy(&self) -> bool {
        !(self.prefills.is_empty() && self.ingests.is_empty() && self.sequences.is_empty())
    }

    /// The key, and the bytes of the memory for requests, of every prefill and sequence under way.
    fn held(&self) -> impl Iterator<Item = (&str, usize)> {
        let prefills =
            self.prefills.iter().map(|prefill| (prefill.client.key.as_str(), prefill.bytes.most()));
        let sequences =
            self.sequences.iter().map(|sequence| (sequence.client.key.as_str(), sequence.kv_bytes));
        prefills.chain(sequences)
    }

    /// Ends prefills and ingests whose client has disconnected or whose time is over, wherever they stand, so that others have their room.
    fn drop_over(&mut self) {
        let shared = &self.shared;
        self.prefills.retain(|running| !running.client.is_over(shared));
        self.ingests.retain(|running| !running.client.is_over(shared));
    }

    /// Takes jobs from the queue as far as there is room; waits for one where nothing is under way.
    fn admit(&mut self) {
        if !self.is_busy() {
            self.shared.wait();
            if self.last_work.is_some_and(|time| time.elapsed() > IDLE_BEFORE_TRIM) {
                self.last_work = None;
                refrain::engine::release_free_memory();
            }
        }
        loop {
            let held: Vec<(&str, usize)> = self.held().collect();
            let ingesting: Vec<&str> =
                self.ingests.iter().map(|running| running.client.key.as_str()).collect();
            let used = |key: &str| self.shares.used(key);
            let Some(job) = self.shared.take(&held, &ingesting, used) else { return };
            self.start(job);
        }
    }

    /// Begins a job.
    fn start(&mut self, queued: QueuedJob) {
        let QueuedJob { engine, job, events, arrived, queued, deadline, bytes, span, queue_span } = queued;
        drop(queue_span);
        let key = engine.settings().namespace.clone();
        let grammar_field = if let Job::Generate(job) = &job { job.grammar_field } else { "" };
        let (client, started) = (Client { key, events, deadline, grammar_field, span }, Instant::now());
        self.shared.metrics.requests.queue_seconds.observe((started - queued).as_secs_f64());
        match job {
            Job::Ingest(ingest) => {
                let ingest_span = info_span!(parent: &client.span, "ingest");
                self.ingests.push_back(RunningIngest { client, ingest: *ingest, waits: false, ingest_span });
            }
            Job::Generate(job) => {
                let GenerateJob { prompt, request, .. } = *job;
                let prefill_span = info_span!(parent: &client.span, "prefill", tokens = prompt.len());
                let speculative_tokens = self.shared.limits.num_speculative_tokens;
                let request = GenerateRequest { speculative_tokens, ..request };
                let begun = catch_unwind(AssertUnwindSafe(|| engine.prefill(&prompt, request)));
                match begun {
                    Ok(Ok(prefill)) => self.prefills.push_back(RunningPrefill {
                        client,
                        prefill,
                        arrived,
                        took: Duration::ZERO,
                        computed: Duration::ZERO,
                        waits: self.prefills.iter().any(|earlier| Arc::ptr_eq(&earlier.prompt, &prompt)),
                        prompt,
                        bytes,
                        prefill_span,
                    }),
                    Ok(Err(error)) => client.fail(&self.shared.metrics, error),
                    Err(_) => client.fail(&self.shared.metrics, Panicked),
                }
            }
        }
    }

    /// Computes at most one layer: of the first prefill of the key whose work has taken the least time so far, or of its ingest. Work that
    /// waits for its keys and values is passed over, and keeps its place.
    fn advance(&mut self) {
        let keys = self.prefills.iter().map(|prefill| &prefill.client);
        let keys = keys.chain(self.ingests.iter().map(|ingest| &ingest.client));
        let keys: Vec<String> = keys.map(|client| client.key.clone()).collect();
        let decoding = self.sequences.iter().map(|sequence| sequence.client.key.as_str());
        let now = Instant::now();
        self.shares.set_active(keys.iter().map(String::as_str).chain(decoding), now);
        let mut order: Vec<&String> = keys.iter().collect();
        order.sort_by_key(|key| (self.shares.used(key), *key));
        order.dedup();
        let until = now + PATIENCE;
        for key in order {
            let ingest_first = self.shares.ingest_is_due(key);
            for is_ingest in [ingest_first, !ingest_first] {
                let has_computed = if is_ingest {
                    self.advance_ingest(key, until)
                } else {
                    self.advance_prefill(key, until)
                };
                if has_computed {
                    return;
                }
            }
        }
    }

    /// The time that a step of work may wait, which `waits` already or does not: none if other work has something to compute, and otherwise to
    /// the end of the turn's time for waiting.
    fn patience(&self, waits: bool, until: Instant) -> Duration {
        match self.computing() - usize::from(!waits) {
            0 if waits => until.saturating_duration_since(Instant::now()),
            0 => FIRST_PATIENCE,
            _ => Duration::ZERO,
        }
    }

    /// Whether it is the turn of a prefill, as far as its key is concerned: the first answer to a prompt leaves its keys and values to the others.
    fn is_due(&self, index: usize, key: &str) -> bool {
        let prefill = &self.prefills[index];
        let is_first = |earlier: &RunningPrefill| !Arc::ptr_eq(&earlier.prompt, &prefill.prompt);
        prefill.client.key == key && self.prefills.iter().take(index).all(is_first)
    }

    /// A step of the first prefill of a key that has something to compute; false if there is none.
    fn advance_prefill(&mut self, key: &str, until: Instant) -> bool {
        let mut next = 0;
        while let Some(index) = (next..self.prefills.len()).find(|index| self.is_due(*index, key)) {
            let (started, patience) = (Instant::now(), self.patience(self.prefills[index].waits, until));
            let running = &mut self.prefills[index];
            let waited = running.prefill.waited();
            let advance = || running.prefill_span.in_scope(|| running.prefill.advance_within(patience));
            let advanced = catch_unwind(AssertUnwindSafe(advance));
            running.waits = matches!(advanced, Ok(Ok(Advance::Waiting)));
            if running.waits {
                next = index + 1;
                continue;
            }
            let step = started.elapsed();
            self.shares.charge_prefill(key, step, running.took);
            running.took += step;
            running.computed += step.saturating_sub(running.prefill.waited().saturating_sub(waited));
            if !matches!(advanced, Ok(Ok(Advance::Progress)))
                && let Some(running) = self.prefills.remove(index)
            {
                match advanced {
                    Ok(Ok(_)) => self.first_token(running),
                    Ok(Err(error)) => running.client.fail(&self.shared.metrics, error),
                    Err(_) => running.client.fail(&self.shared.metrics, Panicked),
                }
            }
            return true;
        }
        false
    }

    /// A prefill at its end becomes a running sequence, whose first token is sent at once: the next decode step may be far off. The next prompt
    /// of its key then finds its keys and values in the prefix cache.
    fn first_token(&mut self, running: RunningPrefill) {
        let RunningPrefill { client, prefill, arrived, computed, bytes, prefill_span, .. } = running;
        let finished = catch_unwind(AssertUnwindSafe(|| prefill.finish()));
        drop(prefill_span);
        let Ok(Some(sequence)) = finished else {
            return client.fail(&self.shared.metrics, Panicked);
        };
        self.shared.metrics.first_token(arrived.elapsed(), sequence.stats());
        self.shared.count_prefill(computed, sequence.stats());
        let decode_span = info_span!(parent: &client.span, "decode");
        let kv_bytes = bytes.kv;
        let running = RunningSequence { client, sequence, kv_bytes, last_token: None, decode_span };
        self.sequences.extend(emit(&self.shared, running));
    }

    /// A step of the first ingest of a key that has something to compute, which is the last one then; false if there is none.
    fn advance_ingest(&mut self, key: &str, until: Instant) -> bool {
        let mut next = 0;
        let is_due = |ingest: &RunningIngest| ingest.client.key == key;
        while let Some(index) = (next..self.ingests.len()).find(|index| is_due(&self.ingests[*index])) {
            let (started, patience) = (Instant::now(), self.patience(self.ingests[index].waits, until));
            let running = &mut self.ingests[index];
            let advance = || running.ingest_span.in_scope(|| running.ingest.advance_within(patience));
            let advanced = catch_unwind(AssertUnwindSafe(advance));
            running.waits = matches!(advanced, Ok(Ok(Advance::Waiting)));
            if let Some(progress) = running.ingest.new_progress() {
                let _ = running.client.events.send(Event::Progress(progress));
            }
            if running.waits {
                next = index + 1;
                continue;
            }
            self.shares.charge_ingest(key, started.elapsed());
            let Some(running) = self.ingests.remove(index) else { return true };
            match advanced {
                Ok(Ok(Advance::Done)) => {
                    let report = running.ingest.finish();
                    let _ = running.client.events.send(Event::Ingested(Box::new(report)));
                }
                Ok(Ok(_)) => self.ingests.push_back(running),
                Ok(Err(error)) => running.client.fail(&self.shared.metrics, error),
                Err(_) => running.client.fail(&self.shared.metrics, Panicked),
            }
            return true;
        }
        false
    }

    /// Prompts and ingests that have something to compute, and do not wait for a disk or an object store.
    fn computing(&self) -> usize {
        let prefills = self.prefills.iter().filter(|running| !running.waits).count();
        prefills + self.ingests.iter().filter(|running| !running.waits).count()
    }

    /// Whether a key without a running answer has a short prompt to compute.
    fn has_newcomer(&self) -> bool {
        let is_new = |prefill: &RunningPrefill| {
            let key = &prefill.client.key;
            !prefill.waits
                && prefill.took < NEWCOMER
                && self.sequences.iter().all(|running| running.client.key != *key)
        };
        self.prefills.iter().any(is_new)
    }

    /// Sends the tokens that were chosen for each running sequence, and decodes the next ones, if a step is due. Finished sequences
    /// leave.
    fn decode(&mut self) {
        if self.sequences.is_empty() {
            self.last_step = None;
            return;
        }
        let share = if self.has_newcomer() { NEWCOMER_SHARE } else { PREFILL_SHARE };
        let rests = |(end, took): &(Instant, Duration)| end.elapsed() < *took * share;
        if self.computing() > 0 && self.last_step.as_ref().is_some_and(rests) {
            return;
        }
        let started = Instant::now();
        let sequences = std::mem::take(&mut self.sequences).into_iter();
        self.sequences = sequences.filter_map(|running| emit(&self.shared, running)).collect();
        if let Err(error) = step(&mut self.sequences, &mut self.workspace) {
            self.step_alone(&error);
        }
        let took = started.elapsed();
        let each = took / self.sequences.len().max(1) as u32;
        self.sequences.iter().for_each(|running| self.shares.charge_decode(&running.client.key, each));
        self.last_step = Some((Instant::now(), took));
    }

    /// Decodes each running sequence alone, after a step of all of them has failed by `error`, so that one that cannot go on ends alone.
    fn step_alone(&mut self, error: &ApiError) {
        tracing::error!("a step of {} sequences failed; each goes on alone", self.sequences.len());
        let goes_on = |mut running: RunningSequence| {
            self.workspace = DecodeWorkspace::default();
            if running.sequence.has_next_token() {
                return Some(running);
            }
            let stepped = match running.sequence.undo_step() {
                true => {
                    let span = running.client.span.clone();
                    span.in_scope(|| step(std::slice::from_mut(&mut running), &mut self.workspace))
                }
                false => Err(error.clone()),
            };
            stepped
                .map_err(|error| running.client.fail(&self.shared.metrics, error))
                .is_ok()
                .then_some(running)
        };
        self.sequences = std::mem::take(&mut self.sequences).into_iter().filter_map(goes_on).collect();
        self.workspace = DecodeWorkspace::default();
    }

    /// Tells metrics and those who wait what is under way.
    fn publish(&mut self) {
        if self.is_busy() {
            self.last_work = Some(Instant::now());
        }
        let prefilled = self.prefills.len() + self.ingests.len();
        let under_way = UnderWay { prefilled, decoded: self.sequences.len() };
        let kv_bytes = self.held().map(|(_, bytes)| bytes).sum();
        self.shared.publish(under_way, kv_bytes);
    }
}

#[cfg(test)]
mod tests;
