//! The compute thread: `admit; advance; decode; publish`, over and over.
//!
//! All prefills, ingests and sequences under way belong to this thread. One turn takes jobs from the queue as far as there is room,
//! computes at most one layer, or a part of a long one, of one prefill or ingest, decodes a token of every running sequence if one is due, and tells
//! the others what is under way.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain::engine::{
    Advance, DecodeWorkspace, FinishReason, GenerateRequest, Ingest, Prefill, RequestStats, Sequence,
    decode_step,
};
use tokio::sync::mpsc::UnboundedSender;
use tracing::{Span, info_span};

use crate::TEXT_LOG;
use crate::api_error::{ApiError, Result};
use crate::job::{Event, GenerateJob, Job, aborted, send_token};
use crate::queue::{JobBytes, QueuedJob, Shared};
use crate::shares::Shares;

/// While there are prompts to compute, a decode step is due after this many times its own duration: a quarter of the time goes
/// to decoding.
const PREFILL_SHARE: u32 = 3;

/// While a key without a running answer waits for its first token, decode steps rest this many times their own duration, for at most
/// [`NEWCOMER`] of the prompt's time.
const NEWCOMER_SHARE: u32 = 12;

/// The time after which a prompt is no newcomer's.
const NEWCOMER: Duration = Duration::from_secs(1);

/// Time without work after which unused memory is given back to the system.
const IDLE_BEFORE_TRIM: Duration = Duration::from_secs(1);

/// The request behind a piece of work.
struct Client {
    /// The namespace of its key.
    key: String,
    events: UnboundedSender<Event>,
    deadline: Instant,
    /// The span of the request.
    span: Span,
}

impl Client {
    fn fail(&self, error: ApiError) {
        let _ = self.events.send(Event::Failed(error));
    }
}

/// A prompt that is being computed.
struct RunningPrefill {
    client: Client,
    prefill: Prefill,
    arrived: Instant,
    started: Instant,
    /// Time that it was computed for.
    took: Duration,
    bytes: JobBytes,
    prefill_span: Span,
}

/// Documents that are being prefilled.
struct RunningIngest {
    client: Client,
    ingest: Ingest,
    ingest_span: Span,
}

/// A sequence that is being decoded.
struct RunningSequence {
    client: Client,
    sequence: Sequence,
    kv_bytes: usize,
    /// The time of its last token.
    last_token: Option<Instant>,
    decode_span: Span,
}

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
        let QueuedJob { engine, job, events, arrived, deadline, bytes, span, queue_span } = queued;
        drop(queue_span);
        let key = engine.settings().namespace.clone();
        let (client, started) = (Client { key, events, deadline, span }, Instant::now());
        self.shared.metrics.queue_seconds.observe((started - arrived).as_secs_f64());
        match job {
            Job::Ingest(ingest) => {
                let ingest_span = info_span!(parent: &client.span, "ingest");
                self.ingests.push_back(RunningIngest { client, ingest: *ingest, ingest_span });
            }
            Job::Generate(job) => {
                let GenerateJob { prompt, method, eviction, sampling, grammar, explain } = *job;
                let prefill_span = info_span!(parent: &client.span, "prefill", tokens = prompt.len());
                let request = GenerateRequest {
                    eviction,
                    grammar,
                    speculative_tokens: self.shared.limits.num_speculative_tokens,
                    explain,
                    ..GenerateRequest::new(method, sampling)
                };
                let begun = catch_unwind(AssertUnwindSafe(|| engine.prefill(&prompt, request)));
                match begun {
                    Ok(Ok(prefill)) => self.prefills.push_back(RunningPrefill {
                        client,
                        prefill,
                        arrived,
                        started,
                        took: Duration::ZERO,
                        bytes,
                        prefill_span,
                    }),
                    Ok(Err(error)) => client.fail(error.into()),
                    Err(_) => client.fail(ApiError::internal(&"a computation panicked")),
                }
            }
        }
    }

    /// Computes at most one layer: of the first prefill of the key whose work has taken the least time so far, or of its ingest. Work that
    /// waits for its keys and values is passed over.
    fn advance(&mut self) {
        let keys = self.prefills.iter().map(|prefill| &prefill.client);
        let keys = keys.chain(self.ingests.iter().map(|ingest| &ingest.client));
        let keys: Vec<String> = keys.map(|client| client.key.clone()).collect();
        let decoding = self.sequences.iter().map(|sequence| sequence.client.key.as_str());
        self.shares.set_active(keys.iter().map(String::as_str).chain(decoding), Instant::now());
        let mut order: Vec<&String> = keys.iter().collect();
        order.sort_by_key(|key| (self.shares.used(key), *key));
        order.dedup();
        for key in order {
            let ingest_first = self.shares.ingest_is_due(key);
            for is_ingest in [ingest_first, !ingest_first] {
                let advanced = if is_ingest { self.advance_ingest(key) } else { self.advance_prefill(key) };
                match advanced {
                    Some(true) => return,
                    // A call that waited took some milliseconds: running sequences are not to wait for all of them.
                    Some(false) if !self.sequences.is_empty() => return,
                    Some(false) | None => {}
                }
            }
        }
    }

    /// A step of the first prefill of a key; none if there is none, false if it waits, and is the last one then.
    fn advance_prefill(&mut self, key: &str) -> Option<bool> {
        let index = self.prefills.iter().position(|prefill| prefill.client.key == key)?;
        let mut running = self.prefills.remove(index)?;
        if self.is_over(&running.client) {
            return Some(true);
        }
        let (span, started) = (running.prefill_span.clone(), Instant::now());
        let advanced = catch_unwind(AssertUnwindSafe(|| span.in_scope(|| running.prefill.advance())));
        let step = started.elapsed();
        self.shares.charge_prefill(key, step, running.took);
        running.took += step;
        match advanced {
            Ok(Ok(Advance::Progress)) => self.prefills.insert(index, running),
            Ok(Ok(Advance::Waiting)) => {
                self.prefills.push_back(running);
                return Some(false);
            }
            Ok(Ok(Advance::Done)) => self.first_token(running),
            Ok(Err(error)) => running.client.fail(error.into()),
            Err(_) => running.client.fail(ApiError::internal(&"a computation panicked")),
        }
        Some(true)
    }

    /// A prefill at its end becomes a running sequence.
    fn first_token(&mut self, running: RunningPrefill) {
        let RunningPrefill { client, prefill, arrived, started, bytes, prefill_span, .. } = running;
        let finished = catch_unwind(AssertUnwindSafe(|| prefill.finish()));
        drop(prefill_span);
        let Ok(Some(sequence)) = finished else {
            return client.fail(ApiError::internal(&"a computation panicked"));
        };
        self.shared.metrics.first_token(arrived.elapsed(), sequence.stats());
        self.shared.count_prefill(started.elapsed(), sequence.stats());
        let decode_span = info_span!(parent: &client.span, "decode");
        let kv_bytes = bytes.kv;
        self.sequences.push(RunningSequence { client, sequence, kv_bytes, last_token: None, decode_span });
    }

    /// A step of the first ingest of a key, which is the last one then; none if there is none, false if it waits.
    fn advance_ingest(&mut self, key: &str) -> Option<bool> {
        let index = self.ingests.iter().position(|ingest| ingest.client.key == key)?;
        let mut running = self.ingests.remove(index)?;
        if self.is_over(&running.client) {
            return Some(true);
        }
        let (span, started) = (running.ingest_span.clone(), Instant::now());
        let advanced = catch_unwind(AssertUnwindSafe(|| span.in_scope(|| running.ingest.advance())));
        self.shares.charge_ingest(key, started.elapsed());
        if let Some(progress) = running.ingest.new_progress() {
            let _ = running.client.events.send(Event::Progress(progress));
        }
        match advanced {
            Ok(Ok(Advance::Progress)) => self.ingests.push_back(running),
            Ok(Ok(Advance::Waiting)) => {
                self.ingests.push_back(running);
                return Some(false);
            }
            Ok(Ok(Advance::Done)) => {
                let report = running.ingest.finish();
                let _ = running.client.events.send(Event::Ingested(Box::new(report)));
            }
            Ok(Err(error)) => running.client.fail(error.into()),
            Err(_) => running.client.fail(ApiError::internal(&"a computation panicked")),
        }
        Some(true)
    }

    /// Whether a request's work is to end: its client has disconnected, its time is over, or the server aborts.
    fn is_over(&self, client: &Client) -> bool {
        let late = client.deadline <= Instant::now() || self.shared.is_aborted();
        if !late && !client.events.is_closed() {
            return false;
        }
        self.shared.metrics.cancelled.inc();
        let _ = client.events.send(aborted(client.deadline));
        true
    }

    /// Whether a key without a running answer has a short prompt under way.
    fn has_newcomer(&self) -> bool {
        let is_new = |prefill: &RunningPrefill| {
            let key = &prefill.client.key;
            prefill.took < NEWCOMER && self.sequences.iter().all(|running| running.client.key != *key)
        };
        self.prefills.iter().any(is_new)
    }

    /// Emits the token that was chosen for each running sequence, and decodes the next one, if a step is due. Finished sequences
    /// leave.
    fn decode(&mut self) {
        if self.sequences.is_empty() {
            self.last_step = None;
            return;
        }
        let computing = !(self.prefills.is_empty() && self.ingests.is_empty());
        let share = if self.has_newcomer() { NEWCOMER_SHARE } else { PREFILL_SHARE };
        let rests = |(end, took): &(Instant, Duration)| end.elapsed() < *took * share;
        if computing && self.last_step.as_ref().is_some_and(rests) {
            return;
        }
        let started = Instant::now();
        let shared = self.shared.clone();
        let mut unfinished = Vec::with_capacity(self.sequences.len());
        for mut running in self.sequences.drain(..) {
            let events = running.client.events.clone();
            let emitted = catch_unwind(AssertUnwindSafe(|| match emit_token(&shared, &mut running) {
                None => Some(running),
                Some(reason) => {
                    finish(&shared, running, reason);
                    None
                }
            }));
            match emitted {
                Ok(running) => unfinished.extend(running),
                Err(_) => _ = events.send(Event::Failed(ApiError::internal(&"a sequence panicked"))),
            }
        }
        self.sequences = unfinished;
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
                true => step(std::slice::from_mut(&mut running), &mut self.workspace),
                false => Err(error.clone()),
            };
            stepped.map_err(|error| running.client.fail(error)).is_ok().then_some(running)
        };
        self.sequences = std::mem::take(&mut self.sequences).into_iter().filter_map(goes_on).collect();
        self.workspace = DecodeWorkspace::default();
    }

    /// Tells metrics and those who wait what is under way.
    fn publish(&mut self) {
        if self.is_busy() {
            self.last_work = Some(Instant::now());
        }
        let under_way = self.prefills.len() + self.ingests.len() + self.sequences.len();
        let kv_bytes = self.held().map(|(_, bytes)| bytes).sum();
        self.shared.publish(under_way, self.sequences.len(), kv_bytes);
    }
}

/// Decodes the next tokens of sequences.
fn step(sequences: &mut [RunningSequence], workspace: &mut DecodeWorkspace) -> Result<()> {
    let stepped = catch_unwind(AssertUnwindSafe(|| {
        let mut batch: Vec<_> = sequences.iter_mut().map(|running| &mut running.sequence).collect();
        decode_step(&mut batch, workspace)
    }));
    match stepped {
        Ok(stepped) => Ok(stepped?),
        Err(_) => Err(ApiError::internal(&"a step panicked")),
    }
}

/// Sends the token that was chosen, and gives the reason if the sequence ends with it.
fn emit_token(shared: &Shared, running: &mut RunningSequence) -> Option<FinishReason> {
    let RunningSequence { sequence, client: Client { events, deadline, .. }, last_token, .. } = running;
    let late = *deadline <= Instant::now() || shared.is_aborted();
    let (mut received, before) = (true, sequence.answer_tokens());
    let reason = sequence.push_tokens(&mut |event| {
        received = send_token(events, &event);
        received && !late
    });
    // Tokens of one step share its time.
    let tokens = (sequence.answer_tokens() - before) as u32;
    let latency = last_token.replace(Instant::now()).map(|last| last.elapsed() / tokens.max(1));
    (0..tokens).for_each(|_| shared.metrics.token(latency));
    if received { reason } else { Some(FinishReason::Cancelled) }
}

/// Says once that prompts have another system part than their chunks.
static OTHER_PREFIX: std::sync::Once = std::sync::Once::new();

/// Sends the complete answer of a sequence, or an error if it was cancelled.
fn finish(shared: &Shared, running: RunningSequence, reason: FinishReason) {
    let RunningSequence { mut sequence, client: Client { events, deadline, span, .. }, decode_span, .. } =
        running;
    drop(decode_span);
    let _entered = span.entered();
    if reason == FinishReason::Cancelled {
        shared.metrics.cancelled.inc();
        let _ = events.send(aborted(deadline));
        return;
    }
    if let Some(failure) = sequence.take_failure() {
        let _ = events.send(Event::Failed(failure.into()));
        return;
    }
    let answer = sequence.finish(reason, &mut |event| send_token(&events, &event));
    shared.metrics.finished(&answer.stats);
    let RequestStats { prompt_tokens, cached_tokens, recomputed_tokens, ttft, tpot, .. } = answer.stats;
    let tokens = answer.tokens.len();
    if answer.stats.other_prefix_chunks > 0 {
        OTHER_PREFIX.call_once(|| {
            tracing::warn!("chunks are prefilled behind another system part than this request's: answers are less exact; \
                            the account of each request counts such chunks (other_prefix_chunks)");
        });
    }
    tracing::info!(prompt_tokens, cached_tokens, recomputed_tokens, tokens, ttft, tpot, "answered");
    tracing::trace!(target: TEXT_LOG, answer = answer.text);
    let _ = events.send(Event::Finished(Box::new(answer)));
}
