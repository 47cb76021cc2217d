//! The scheduler: one thread computes for all requests.
//!
//! Requests wait in a queue of bounded length. The first one starts as soon as its keys and values fit beside those of the
//! running sequences. Its documents and its prompt are prefilled layer by layer, and between two layers every running
//! sequence gets a token, so that no answer pauses for long. After its prefill it is a running sequence itself.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use refrain_engine::{
    Account, Engine, Error as EngineError, Finish, IngestProgress, Ongoing, Request, Steps, step,
};
use tokio::sync::mpsc::UnboundedSender;
use tracing::{Span, info_span};

use crate::TEXT_LOG;
use crate::api_error::{ApiError, Result};
use crate::job::{Event, GenerateJob, Job, aborted, send_token};
use crate::metrics::Metrics;
use crate::options::Limits;

/// A job in the queue.
struct QueuedJob {
    engine: Engine,
    job: Job,
    events: UnboundedSender<Event>,
    arrived: Instant,
    deadline: Instant,
    /// Bytes of keys and values that it will need.
    kv_bytes: usize,
    /// The span of the request.
    span: Span,
    /// The span of its time in the queue.
    queue_span: Span,
}

/// A sequence that is being decoded.
struct RunningSequence {
    sequence: Ongoing,
    events: UnboundedSender<Event>,
    deadline: Instant,
    kv_bytes: usize,
    /// The time of its last token.
    last_token: Option<Instant>,
    /// The span of the request.
    span: Span,
    /// The span of its decoding.
    decode_span: Span,
}

/// The queue and the compute thread. A clone is cheap and shares both.
#[derive(Clone)]
pub(crate) struct Scheduler(Arc<Shared>);

struct Shared {
    limits: Limits,
    metrics: Metrics,
    queue: Mutex<Queue>,
    changed: Condvar,
    running: Mutex<Batch>,
    /// Whether running requests are to be aborted.
    abort: AtomicBool,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<QueuedJob>,
    /// Whether a job of the queue is being prefilled.
    prefilling: bool,
    closed: bool,
    /// Moving average of the seconds from a job's start to its first token.
    prefill_seconds: f64,
}

#[derive(Default)]
struct Batch {
    sequences: Vec<RunningSequence>,
    steps: Steps,
    /// The end of the last decode step, and its duration.
    last_step: Option<(Instant, Duration)>,
}

/// During a prefill, a decode step is due after this many times its own duration: a quarter of the time goes to decoding.
const PREFILL_SHARE: u32 = 3;

/// Time without work after which unused memory is given back to the system.
const IDLE_BEFORE_TRIM: Duration = Duration::from_secs(1);

impl Scheduler {
    /// Starts the compute thread.
    pub(crate) fn start(limits: Limits, metrics: Metrics) -> std::io::Result<Scheduler> {
        let shared = Arc::new(Shared {
            limits,
            metrics,
            queue: Mutex::default(),
            changed: Condvar::new(),
            running: Mutex::default(),
            abort: AtomicBool::new(false),
        });
        let own = shared.clone();
        thread::Builder::new().name("compute".to_owned()).spawn(move || own.run())?;
        Ok(Scheduler(shared))
    }

    /// Checks the number of tokens of a request.
    ///
    /// # Errors
    /// If they exceed [`Limits::max_tokens_per_request`].
    pub(crate) fn check_tokens(&self, tokens: usize) -> Result<()> {
        let limit = self.0.limits.max_tokens_per_request;
        if tokens <= limit {
            return Ok(());
        }
        let message = format!("the request has {tokens} tokens, and may have {limit}");
        Err(ApiError::too_large(message))
    }

    /// Puts a job into the queue. `timeout` replaces [`Limits::request_timeout`].
    ///
    /// # Errors
    /// If the job exceeds a limit, the queue is full, or the server is shutting down.
    pub(crate) fn submit(
        &self,
        engine: Engine,
        job: Job,
        events: UnboundedSender<Event>,
        timeout: Option<Duration>,
    ) -> Result<()> {
        let timeout = timeout.unwrap_or(self.0.limits.request_timeout);
        let limit = self.0.limits.kv_cache_memory_bytes;
        let kv_bytes = match &job {
            Job::Ingest { .. } => 0,
            Job::Generate(job) => {
                self.check_tokens(job.prompt.len().saturating_add(job.sampling.max_tokens))?;
                engine.kv_bytes(&job.prompt, job.sampling.max_tokens, &job.eviction)?
            }
        };
        if kv_bytes > limit {
            let message = format!(
                "the request may need {kv_bytes} bytes of keys and values, and all requests together have {limit}: send less, \
                 ask for a lower max_tokens, or bound the cache with refrain.evict"
            );
            return Err(ApiError::too_large(message));
        }
        let mut queue = self.0.queue();
        self.admit(&mut queue)?;
        let (arrived, span) = (Instant::now(), Span::current());
        let queue_span = info_span!(parent: &span, "queue", ahead = queue.jobs.len());
        let deadline = arrived + timeout;
        let queued = QueuedJob { engine, job, events, arrived, deadline, kv_bytes, span, queue_span };
        queue.jobs.push_back(queued);
        self.0.metrics.waiting.set(queue.jobs.len() as i64);
        drop(queue);
        self.0.changed.notify_all();
        Ok(())
    }

    /// Checks, before a request is tokenised, whether the queue takes it.
    ///
    /// # Errors
    /// If the queue is full, or the server is shutting down.
    pub(crate) fn check_queue(&self) -> Result<()> {
        self.admit(&mut self.0.queue())
    }

    fn admit(&self, queue: &mut Queue) -> Result<()> {
        let limit = self.0.limits.max_queued_requests;
        if queue.closed {
            return Err(ApiError::shutting_down());
        }
        if queue.jobs.len() >= limit {
            // Jobs of disconnected clients leave the queue.
            let all = queue.jobs.len();
            queue.jobs.retain(|job| !job.events.is_closed());
            self.0.metrics.cancelled.inc_by((all - queue.jobs.len()) as u64);
        }
        if queue.jobs.len() >= limit {
            self.0.metrics.rejected.inc();
            let seconds = queue.prefill_seconds * queue.jobs.len() as f64;
            let message = format!("{limit} requests are waiting already");
            let error = ApiError {
                code: Some("queue_full"),
                ..ApiError::new(StatusCode::TOO_MANY_REQUESTS, message)
            };
            return Err(ApiError { retry_after: Some(seconds.ceil().clamp(1.0, 600.0) as u64), ..error });
        }
        Ok(())
    }

    /// Takes no more jobs, waits for those that are there, for at most `timeout`, and aborts the rest.
    pub(crate) fn drain(&self, timeout: Duration) {
        let mut queue = self.0.queue();
        queue.closed = true;
        self.0.changed.notify_all();
        let busy = |queue: &mut Queue| {
            !queue.jobs.is_empty() || queue.prefilling || !self.0.running().sequences.is_empty()
        };
        let waited = self.0.changed.wait_timeout_while(queue, timeout, busy);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        self.abort();
    }

    /// Aborts all jobs, and ends the compute thread.
    pub(crate) fn abort(&self) {
        self.0.queue().closed = true;
        self.0.abort.store(true, Relaxed);
        self.0.changed.notify_all();
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn running(&self) -> MutexGuard<'_, Batch> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The compute thread.
    fn run(self: Arc<Self>) {
        let mut last_work = None;
        while !self.abort.load(Relaxed) || !self.running().sequences.is_empty() {
            // A panic must not end the thread: other requests follow.
            let iteration = AssertUnwindSafe(|| self.iterate(&mut last_work));
            if catch_unwind(iteration).is_err() {
                tracing::error!("an iteration of the scheduler panicked");
            }
        }
        // Requests in the queue receive an error.
        for job in self.queue().jobs.drain(..) {
            let _ = job.events.send(aborted(job.deadline));
        }
    }

    /// Prefills the next job, if one fits, and decodes a token of each running sequence. `last_work` is the time of the last
    /// iteration that had work, and `None` once unused memory was given back.
    fn iterate(self: &Arc<Self>, last_work: &mut Option<Instant>) {
        match self.next() {
            Some(job) => self.prefill(job),
            None if self.running().sequences.is_empty() => {
                self.wait();
                if last_work.is_some_and(|time| time.elapsed() > IDLE_BEFORE_TRIM) {
                    *last_work = None;
                    refrain_engine::give_back();
                }
                return;
            }
            None => {}
        }
        *last_work = Some(Instant::now());
        self.step();
    }

    /// Waits for a job.
    fn wait(&self) {
        let idle = |queue: &mut Queue| queue.jobs.is_empty() && !self.abort.load(Relaxed);
        // The timeout bounds the time until jobs of disconnected clients are noticed.
        let timeout = Duration::from_millis(200);
        let waited = self.changed.wait_timeout_while(self.queue(), timeout, idle);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// The first job of the queue, if the KV cache memory has room for it. Jobs that are late, or whose client has
    /// disconnected, are dropped.
    fn next(&self) -> Option<QueuedJob> {
        let (num_seqs, kv_bytes) = {
            let running = self.running();
            let bytes = running.sequences.iter().map(|sequence| sequence.kv_bytes).sum::<usize>();
            (running.sequences.len(), bytes)
        };
        let mut queue = self.queue();
        while let Some(job) = queue.jobs.front() {
            let late = job.deadline <= Instant::now();
            if job.events.is_closed() || late || self.abort.load(Relaxed) {
                let _ = job.events.send(aborted(job.deadline));
                self.metrics.cancelled.inc();
                queue.jobs.pop_front();
                continue;
            }
            let fits = num_seqs < self.limits.max_num_seqs
                && kv_bytes + job.kv_bytes <= self.limits.kv_cache_memory_bytes;
            let job = if fits { queue.jobs.pop_front() } else { None };
            queue.prefilling = job.is_some();
            self.metrics.waiting.set(queue.jobs.len() as i64);
            drop(queue);
            self.changed.notify_all();
            return job;
        }
        self.metrics.waiting.set(0);
        drop(queue);
        self.changed.notify_all();
        None
    }

    /// Computes a job up to the first token of its answer.
    fn prefill(self: &Arc<Self>, queued: QueuedJob) {
        let QueuedJob { engine, job, events, arrived, deadline, kv_bytes, span, queue_span } = queued;
        drop(queue_span);
        let started = Instant::now();
        self.metrics.queue_seconds.observe((started - arrived).as_secs_f64());
        let engine = {
            let (shared, events) = (self.clone(), events.clone());
            engine.pausing(move || {
                shared.step_if_due();
                !events.is_closed() && deadline > Instant::now() && !shared.abort.load(Relaxed)
            })
        };
        let prefilled = catch_unwind(AssertUnwindSafe(|| match job {
            Job::Ingest { documents, method } => {
                let progress = |progress: IngestProgress| _ = events.send(Event::Progress(progress));
                let ingest_span = info_span!(parent: &span, "ingest", documents = documents.len());
                let ingest = || engine.ingest_for(&documents, method.as_ref(), progress);
                let report = ingest_span.in_scope(ingest)?;
                let _ = events.send(Event::Ingested(Box::new(report)));
                Ok(None)
            }
            Job::Generate(job) => {
                let GenerateJob { prompt, method, eviction, sampling, explain } = *job;
                let request =
                    Request { eviction: &eviction, explain, ..Request::new(method.as_ref(), &sampling) };
                let prefill_span = info_span!(parent: &span, "prefill", tokens = prompt.len());
                let sequence = prefill_span.in_scope(|| engine.start(&prompt, &request))?;
                self.metrics.first_token(arrived.elapsed(), sequence.account());
                Ok(Some(sequence))
            }
        }));
        match prefilled {
            Ok(Ok(None)) => {}
            Ok(Ok(Some(sequence))) => {
                let decode_span = info_span!(parent: &span, "decode");
                let running = RunningSequence {
                    sequence,
                    events,
                    deadline,
                    kv_bytes,
                    last_token: None,
                    span,
                    decode_span,
                };
                self.running().sequences.push(running);
            }
            Ok(Err(EngineError::Cancelled)) => {
                self.metrics.cancelled.inc();
                let _ = events.send(aborted(deadline));
            }
            Ok(Err(error)) => _ = events.send(Event::Failed(error.into())),
            Err(_) => _ = events.send(Event::Failed(ApiError::internal(&"a computation panicked"))),
        }
        let mut queue = self.queue();
        queue.prefilling = false;
        queue.prefill_seconds = 0.8 * queue.prefill_seconds + 0.2 * started.elapsed().as_secs_f64();
        drop(queue);
        self.changed.notify_all();
    }

    /// A decode step, if the prefill has had its share of the time since the last one.
    fn step_if_due(&self) {
        let due = |last: &(Instant, Duration)| last.0.elapsed() >= last.1 * PREFILL_SHARE;
        if self.running().last_step.as_ref().is_none_or(due) {
            self.step();
        }
    }

    /// Emits the token that was chosen for each running sequence, and decodes the next one. Finished sequences leave.
    fn step(&self) {
        let mut running = self.running();
        let Batch { sequences, steps, last_step } = &mut *running;
        if sequences.is_empty() {
            *last_step = None;
            return;
        }
        let started = Instant::now();
        let mut unfinished = Vec::with_capacity(sequences.len());
        for mut sequence in sequences.drain(..) {
            let events = sequence.events.clone();
            let emitted = catch_unwind(AssertUnwindSafe(|| match self.emit_token(&mut sequence) {
                None => Some(sequence),
                Some(reason) => {
                    self.finish(sequence, reason);
                    None
                }
            }));
            match emitted {
                Ok(sequence) => unfinished.extend(sequence),
                Err(_) => _ = events.send(Event::Failed(ApiError::internal(&"a sequence panicked"))),
            }
        }
        *sequences = unfinished;
        let stepped = catch_unwind(AssertUnwindSafe(|| {
            let mut batch: Vec<_> = sequences.iter_mut().map(|running| &mut running.sequence).collect();
            step(&mut batch, steps)
        }));
        let error = match stepped {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(ApiError::from(error)),
            Err(_) => Some(ApiError::internal(&"a step panicked")),
        };
        if let Some(error) = error {
            sequences.drain(..).for_each(|running| _ = running.events.send(Event::Failed(error.clone())));
            *steps = Steps::default();
        }
        *last_step = Some((Instant::now(), started.elapsed()));
        self.metrics.running.set(sequences.len() as i64);
        let bytes: usize = sequences.iter().map(|running| running.kv_bytes).sum();
        self.metrics.kv_usage.set(bytes as f64 / self.limits.kv_cache_memory_bytes.max(1) as f64);
        drop(running);
        self.changed.notify_all();
    }

    /// Sends the token that was chosen, and gives the reason if the sequence ends with it.
    fn emit_token(&self, running: &mut RunningSequence) -> Option<Finish> {
        let RunningSequence { sequence, events, deadline, last_token, .. } = running;
        let late = *deadline <= Instant::now() || self.abort.load(Relaxed);
        let mut received = true;
        let reason = sequence.write(&mut |progress| {
            received = send_token(events, &progress);
            received && !late
        });
        self.metrics.token(last_token.replace(Instant::now()).map(|last| last.elapsed()));
        if received { reason } else { Some(Finish::Cancelled) }
    }

    /// Sends the complete answer of a sequence, or an error if it was cancelled.
    fn finish(&self, running: RunningSequence, reason: Finish) {
        let RunningSequence { sequence, events, deadline, span, decode_span, .. } = running;
        drop(decode_span);
        let _entered = span.entered();
        if reason == Finish::Cancelled {
            self.metrics.cancelled.inc();
            let _ = events.send(aborted(deadline));
            return;
        }
        let answer = sequence.finish(reason, &mut |progress| send_token(&events, &progress));
        self.metrics.request_success.inc();
        let Account { prompt_tokens, cached_tokens, recomputed_tokens, ttft, tpot, .. } = answer.account;
        let tokens = answer.tokens.len();
        tracing::info!(prompt_tokens, cached_tokens, recomputed_tokens, tokens, ttft, tpot, "answered");
        tracing::trace!(target: TEXT_LOG, answer = answer.text);
        let _ = events.send(Event::Finished(Box::new(answer)));
    }
}
