//! Whose turn it is: one thread computes, for all requests.
//!
//! Requests wait in a queue of bounded length. The first of it is begun as soon as its keys and values fit beside those of
//! the answers under way: its documents and its prompt are computed layer by layer, and between two layers the answers
//! under way get a token each, so that nobody's answer stands still for long. Then it is one of them.

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

use crate::TEXTS;
use crate::error::{Problem, Result};
use crate::metrics::Metrics;
use crate::work::{Asked, Event, Limits, Work, cut_off, send};

/// Work with what it needs.
struct Job {
    engine: Engine,
    work: Work,
    events: UnboundedSender<Event>,
    came: Instant,
    deadline: Instant,
    /// Bytes of keys and values that it will hold.
    bytes: usize,
    /// The request's, and that of its time in the queue.
    span: Span,
    waits: Span,
}

/// An answer under way.
struct Running {
    ongoing: Ongoing,
    events: UnboundedSender<Event>,
    deadline: Instant,
    bytes: usize,
    /// When its last token was written.
    last: Option<Instant>,
    /// The request's, and that of its decoding.
    span: Span,
    decodes: Span,
}

/// The queue and the thread behind it. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Scheduler(Arc<Shared>);

struct Shared {
    limits: Limits,
    metrics: Metrics,
    queue: Mutex<Queue>,
    changed: Condvar,
    running: Mutex<Batch>,
    /// Nobody waits any longer for answers to end.
    abandon: AtomicBool,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// Whether one is computed now that is not yet among the answers under way.
    beginning: bool,
    closed: bool,
    /// Seconds that a request took lately, from its turn to its first token.
    seconds: f64,
}

#[derive(Default)]
struct Batch {
    answers: Vec<Running>,
    steps: Steps,
    /// When the last step ended, and how long it took.
    last: Option<(Instant, Duration)>,
}

/// While a prompt is computed, a step comes after this many times its own length: a quarter of the time is for answers.
const SHARE: u32 = 3;

/// How long there is nothing to do before memory is given back.
const REST: Duration = Duration::from_secs(1);

impl Scheduler {
    /// Starts the thread.
    pub(crate) fn start(limits: Limits, metrics: Metrics) -> std::io::Result<Scheduler> {
        let shared = Arc::new(Shared {
            limits,
            metrics,
            queue: Mutex::default(),
            changed: Condvar::new(),
            running: Mutex::default(),
            abandon: AtomicBool::new(false),
        });
        let own = shared.clone();
        thread::Builder::new().name("compute".to_owned()).spawn(move || own.run())?;
        Ok(Scheduler(shared))
    }

    /// Refuses what has too many tokens.
    ///
    /// # Errors
    /// If it has.
    pub(crate) fn bound_tokens(&self, tokens: usize) -> Result<()> {
        let most = self.0.limits.tokens;
        if tokens <= most {
            return Ok(());
        }
        let message = format!("{tokens} tokens are asked for, and a request may have {most}");
        Err(Problem::too_large(message))
    }

    /// Puts work into the queue; `deadline` is how long it may take, if that is not as usual.
    ///
    /// # Errors
    /// If it can never fit, the queue is full, or the server is shutting down.
    pub(crate) fn submit(
        &self,
        engine: Engine,
        work: Work,
        events: UnboundedSender<Event>,
        deadline: Option<Duration>,
    ) -> Result<()> {
        let deadline = deadline.unwrap_or(self.0.limits.deadline);
        let kv_bytes = self.0.limits.kv_bytes;
        let bytes = match &work {
            Work::Ingest { .. } => 0,
            Work::Answer(asked) => {
                self.bound_tokens(asked.prompt.len().saturating_add(asked.sampling.max_tokens))?;
                engine.kv_bytes(&asked.prompt, asked.sampling.max_tokens, &asked.eviction)?
            }
        };
        if bytes > kv_bytes {
            let message = format!(
                "the answer may take {bytes} bytes of keys and values, and all answers together have {kv_bytes}: send less, \
                 ask for a lower max_tokens, or bound it with refrain.evict"
            );
            return Err(Problem::too_large(message));
        }
        let mut queue = self.0.queue();
        self.admit(&mut queue)?;
        let (came, span) = (Instant::now(), Span::current());
        let waits = info_span!(parent: &span, "queue", ahead = queue.jobs.len());
        let deadline = came + deadline;
        queue.jobs.push_back(Job { engine, work, events, came, deadline, bytes, span, waits });
        self.0.metrics.waiting.set(queue.jobs.len() as i64);
        drop(queue);
        self.0.changed.notify_all();
        Ok(())
    }

    /// Refuses early what [`Scheduler::submit`] would refuse for want of a place.
    ///
    /// # Errors
    /// If the queue is full, or the server is shutting down.
    pub(crate) fn has_room(&self) -> Result<()> {
        self.admit(&mut self.0.queue())
    }

    fn admit(&self, queue: &mut Queue) -> Result<()> {
        let most = self.0.limits.queue;
        if queue.closed {
            return Err(Problem::stopping());
        }
        if queue.jobs.len() >= most {
            // Whoever has gone needs no place.
            let all = queue.jobs.len();
            queue.jobs.retain(|job| !job.events.is_closed());
            self.0.metrics.cancelled.inc_by((all - queue.jobs.len()) as u64);
        }
        if queue.jobs.len() >= most {
            self.0.metrics.rejected.inc();
            let seconds = queue.seconds * queue.jobs.len() as f64;
            let message = format!("{most} requests are waiting already");
            let problem =
                Problem { code: Some("queue_full"), ..Problem::new(StatusCode::TOO_MANY_REQUESTS, message) };
            return Err(Problem { retry_after: Some(seconds.ceil().clamp(1.0, 600.0) as u64), ..problem });
        }
        Ok(())
    }

    /// Takes no more work, and waits until what is there is done, or for so long; what is not done then is cut off.
    pub(crate) fn drain(&self, most: Duration) {
        let mut queue = self.0.queue();
        queue.closed = true;
        self.0.changed.notify_all();
        let busy = |queue: &mut Queue| {
            !queue.jobs.is_empty() || queue.beginning || !self.0.running().answers.is_empty()
        };
        let waited = self.0.changed.wait_timeout_while(queue, most, busy);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        self.end();
    }

    /// Cuts off what is under way, and ends the thread.
    pub(crate) fn end(&self) {
        self.0.queue().closed = true;
        self.0.abandon.store(true, Relaxed);
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

    /// The thread: begins what fits, and else steps.
    fn run(self: Arc<Self>) {
        let mut worked = None;
        while !self.abandon.load(Relaxed) || !self.running().answers.is_empty() {
            // Whatever happens, there is a next request.
            let turn = AssertUnwindSafe(|| self.turn(&mut worked));
            if catch_unwind(turn).is_err() {
                tracing::error!("a turn of the schedule panicked");
            }
        }
        // Who still waits is told why there is no answer.
        for job in self.queue().jobs.drain(..) {
            let _ = job.events.send(cut_off(job.deadline));
        }
    }

    /// `worked` is when there was something to do; none once it was tidied up after.
    fn turn(self: &Arc<Self>, worked: &mut Option<Instant>) {
        match self.next() {
            Some(job) => self.begin(job),
            None if self.running().answers.is_empty() => {
                self.wait();
                if worked.is_some_and(|worked| worked.elapsed() > REST) {
                    *worked = None;
                    refrain_engine::release_free_memory();
                }
                return;
            }
            None => {}
        }
        *worked = Some(Instant::now());
        self.step();
    }

    /// Waits for work.
    fn wait(&self) {
        let idle = |queue: &mut Queue| queue.jobs.is_empty() && !self.abandon.load(Relaxed);
        // Whoever has gone meanwhile is found some time.
        let pause = Duration::from_millis(200);
        let waited = self.changed.wait_timeout_while(self.queue(), pause, idle);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// The first job of the queue, if there is room for it. Those that nobody wants any more are dropped.
    fn next(&self) -> Option<Job> {
        let (answers, bytes) = {
            let running = self.running();
            (running.answers.len(), running.answers.iter().map(|answer| answer.bytes).sum::<usize>())
        };
        let mut queue = self.queue();
        while let Some(job) = queue.jobs.front() {
            let late = job.deadline <= Instant::now();
            if job.events.is_closed() || late || self.abandon.load(Relaxed) {
                let _ = job.events.send(cut_off(job.deadline));
                self.metrics.cancelled.inc();
                queue.jobs.pop_front();
                continue;
            }
            let fits = answers < self.limits.answers && bytes + job.bytes <= self.limits.kv_bytes;
            let job = if fits { queue.jobs.pop_front() } else { None };
            queue.beginning = job.is_some();
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
    fn begin(self: &Arc<Self>, job: Job) {
        let Job { engine, work, events, came, deadline, bytes, span, waits } = job;
        drop(waits);
        let began = Instant::now();
        self.metrics.queue_seconds.observe((began - came).as_secs_f64());
        let engine = {
            let (shared, events) = (self.clone(), events.clone());
            engine.pausing(move || {
                shared.step_if_due();
                !events.is_closed() && deadline > Instant::now() && !shared.abandon.load(Relaxed)
            })
        };
        let begun = catch_unwind(AssertUnwindSafe(|| match work {
            Work::Ingest { documents, method } => {
                let told = |progress: IngestProgress| _ = events.send(Event::Ingested(progress));
                let ingests = info_span!(parent: &span, "ingest", documents = documents.len());
                let report = ingests.in_scope(|| engine.ingest_for(&documents, method.as_ref(), told))?;
                let _ = events.send(Event::Kept(Box::new(report)));
                Ok(None)
            }
            Work::Answer(asked) => {
                let Asked { prompt, method, eviction, sampling, explain } = *asked;
                let request =
                    Request { eviction: &eviction, explain, ..Request::new(method.as_ref(), &sampling) };
                let prefills = info_span!(parent: &span, "prefill", tokens = prompt.len());
                let ongoing = prefills.in_scope(|| engine.start(&prompt, &request))?;
                self.metrics.first_token(came.elapsed(), ongoing.account());
                Ok(Some(ongoing))
            }
        }));
        match begun {
            Ok(Ok(None)) => {}
            Ok(Ok(Some(ongoing))) => {
                let decodes = info_span!(parent: &span, "decode");
                let running = Running { ongoing, events, deadline, bytes, last: None, span, decodes };
                self.running().answers.push(running);
            }
            Ok(Err(EngineError::Cancelled)) => {
                self.metrics.cancelled.inc();
                let _ = events.send(cut_off(deadline));
            }
            Ok(Err(error)) => _ = events.send(Event::Failed(error.into())),
            Err(_) => _ = events.send(Event::Failed(Problem::internal(&"a computation panicked"))),
        }
        let mut queue = self.queue();
        queue.beginning = false;
        queue.seconds = 0.8 * queue.seconds + 0.2 * began.elapsed().as_secs_f64();
        drop(queue);
        self.changed.notify_all();
    }

    /// A step, if prompts have had their share of the time since the last one.
    fn step_if_due(&self) {
        let due = |last: &(Instant, Duration)| last.0.elapsed() >= last.1 * SHARE;
        if self.running().last.as_ref().is_none_or(due) {
            self.step();
        }
    }

    /// A token for every answer under way. Those that end leave.
    fn step(&self) {
        let mut running = self.running();
        let Batch { answers, steps, last } = &mut *running;
        if answers.is_empty() {
            *last = None;
            return;
        }
        let started = Instant::now();
        let mut left = Vec::with_capacity(answers.len());
        for mut answer in answers.drain(..) {
            let events = answer.events.clone();
            let written = catch_unwind(AssertUnwindSafe(|| match self.write(&mut answer) {
                None => Some(answer),
                Some(finish) => {
                    self.end(answer, finish);
                    None
                }
            }));
            match written {
                Ok(answer) => left.extend(answer),
                Err(_) => _ = events.send(Event::Failed(Problem::internal(&"an answer panicked"))),
            }
        }
        *answers = left;
        let stepped = catch_unwind(AssertUnwindSafe(|| {
            step(&mut answers.iter_mut().map(|answer| &mut answer.ongoing).collect::<Vec<_>>(), steps)
        }));
        let problem = match stepped {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(Problem::from(error)),
            Err(_) => Some(Problem::internal(&"a step panicked")),
        };
        if let Some(problem) = problem {
            answers.drain(..).for_each(|answer| _ = answer.events.send(Event::Failed(problem.clone())));
            *steps = Steps::default();
        }
        *last = Some((Instant::now(), started.elapsed()));
        self.metrics.running.set(answers.len() as i64);
        let bytes: usize = answers.iter().map(|answer| answer.bytes).sum();
        self.metrics.kv_usage.set(bytes as f64 / self.limits.kv_bytes.max(1) as f64);
        drop(running);
        self.changed.notify_all();
    }

    /// Writes the token that is chosen, and says why the answer ends, if it does.
    fn write(&self, answer: &mut Running) -> Option<Finish> {
        let Running { ongoing, events, deadline, last, .. } = answer;
        let late = *deadline <= Instant::now() || self.abandon.load(Relaxed);
        let mut told = true;
        let finish = ongoing.write(&mut |progress| {
            told = send(events, &progress);
            told && !late
        });
        self.metrics.token(last.replace(Instant::now()).map(|last| last.elapsed()));
        if !told { Some(Finish::Cancelled) } else { finish }
    }

    fn end(&self, answer: Running, finish: Finish) {
        let Running { ongoing, events, deadline, span, decodes, .. } = answer;
        drop(decodes);
        let _within = span.entered();
        if finish == Finish::Cancelled {
            self.metrics.cancelled.inc();
            let _ = events.send(cut_off(deadline));
            return;
        }
        let answer = ongoing.finish(finish, &mut |progress| send(&events, &progress));
        self.metrics.answers.inc();
        let Account { prompt_tokens, cached_tokens, recomputed_tokens, ttft, tpot, .. } = answer.account;
        let tokens = answer.tokens.len();
        tracing::info!(prompt_tokens, cached_tokens, recomputed_tokens, tokens, ttft, tpot, "answered");
        tracing::trace!(target: TEXTS, answer = answer.text);
        let _ = events.send(Event::Done(Box::new(answer)));
    }
}
