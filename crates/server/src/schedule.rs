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
    Answer, Document, Engine, Error as EngineError, Finish, IngestProgress, IngestReport, Ongoing, Progress,
    Prompt, Request, Sampling, Steps, step,
};
use refrain_eviction::Eviction;
use refrain_fusion::FusionMethod;
use tokio::sync::mpsc::UnboundedSender;

use crate::error::{Problem, Result};
use crate::metrics::Metrics;

/// How much there may be at once.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Limits {
    /// Answers decoded together.
    pub answers: usize,
    /// Requests that wait.
    pub queue: usize,
    /// Bytes of keys and values of the answers under way.
    pub kv_bytes: usize,
    /// How long a request may take, from when it came.
    pub deadline: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { answers: 32, queue: 256, kv_bytes: 4 << 30, deadline: Duration::from_secs(600) }
    }
}

/// What is to be computed.
pub(crate) enum Work {
    /// Documents to keep.
    Ingest { documents: Vec<Document>, method: Arc<dyn FusionMethod> },
    /// A prompt to answer.
    Answer(Box<Asked>),
}

/// A prompt to answer, and how.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) prompt: Prompt,
    pub(crate) method: Arc<dyn FusionMethod>,
    pub(crate) eviction: Eviction,
    pub(crate) sampling: Sampling,
    pub(crate) explain: bool,
}

/// What a request hears of its work.
#[derive(Debug)]
pub(crate) enum Event {
    /// Tokens of documents that are computed.
    Ingested(IngestProgress),
    /// Documents are kept.
    Kept(Box<IngestReport>),
    /// A token.
    Token(Token),
    /// The answer is whole.
    Done(Box<Answer>),
    /// There is none.
    Failed(Problem),
}

/// A token of an answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Token {
    /// Text that can be shown now.
    pub(crate) text: String,
    /// Its id; none with text that was held back until the end.
    pub(crate) id: Option<u32>,
    pub(crate) likely: Option<refrain_engine::Likely>,
    /// Tokens that each head's cache holds, and bytes of it.
    pub(crate) retained: usize,
    pub(crate) kv_bytes: usize,
}

/// Work with what it needs.
struct Job {
    engine: Engine,
    work: Work,
    events: UnboundedSender<Event>,
    came: Instant,
    deadline: Instant,
    /// Bytes of keys and values that it will hold.
    bytes: usize,
}

/// An answer under way.
struct Running {
    ongoing: Ongoing,
    events: UnboundedSender<Event>,
    deadline: Instant,
    bytes: usize,
    last: Instant,
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

    /// Puts work into the queue.
    ///
    /// # Errors
    /// If it can never fit, the queue is full, or the server is shutting down.
    pub(crate) fn submit(&self, engine: Engine, work: Work, events: UnboundedSender<Event>) -> Result<()> {
        self.submit_within(engine, work, events, self.0.limits.deadline)
    }

    /// The same with a time of its own.
    pub(crate) fn submit_within(
        &self,
        engine: Engine,
        work: Work,
        events: UnboundedSender<Event>,
        deadline: Duration,
    ) -> Result<()> {
        let Limits { queue: most, kv_bytes, .. } = self.0.limits;
        let bytes = match &work {
            Work::Ingest { .. } => 0,
            Work::Answer(asked) => {
                asked.sampling.check()?;
                engine.kv_bytes(&asked.prompt, asked.sampling.max_tokens, &asked.eviction)?
            }
        };
        if bytes > kv_bytes {
            let message = format!(
                "the answer may take {bytes} bytes of keys and values, and all answers together have {kv_bytes}: send less, \
                 ask for a lower max_tokens, or bound it with refrain.evict"
            );
            return Err(Problem {
                code: Some("too_large"),
                ..Problem::new(StatusCode::PAYLOAD_TOO_LARGE, message)
            });
        }
        let mut queue = self.0.queue();
        if queue.closed {
            let message = "the server is shutting down";
            return Err(Problem {
                retry_after: Some(5),
                ..Problem::new(StatusCode::SERVICE_UNAVAILABLE, message)
            });
        }
        if queue.jobs.len() >= most {
            // Whoever has gone needs no place.
            queue.jobs.retain(|job| !job.events.is_closed());
        }
        if queue.jobs.len() >= most {
            self.0.metrics.rejected.inc();
            let seconds = queue.seconds * queue.jobs.len() as f64;
            let message = format!("{most} requests are waiting already");
            let problem =
                Problem { code: Some("queue_full"), ..Problem::new(StatusCode::TOO_MANY_REQUESTS, message) };
            return Err(Problem { retry_after: Some(seconds.ceil().clamp(1.0, 600.0) as u64), ..problem });
        }
        let came = Instant::now();
        queue.jobs.push_back(Job { engine, work, events, came, deadline: came + deadline, bytes });
        self.0.metrics.waiting.set(queue.jobs.len() as i64);
        drop(queue);
        self.0.changed.notify_all();
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
        while !self.abandon.load(Relaxed) || !self.running().answers.is_empty() {
            // Whatever happens, there is a next request.
            let turn = AssertUnwindSafe(|| self.turn());
            if catch_unwind(turn).is_err() {
                tracing::error!("a turn of the schedule panicked");
            }
        }
    }

    fn turn(self: &Arc<Self>) {
        match self.next() {
            Some(job) => self.begin(job),
            None if self.running().answers.is_empty() => self.wait(),
            None => {}
        }
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
        let Job { engine, work, events, came, deadline, bytes } = job;
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
                let report = engine.ingest_for(&documents, method.as_ref(), told)?;
                let _ = events.send(Event::Kept(Box::new(report)));
                Ok(None)
            }
            Work::Answer(asked) => {
                let Asked { prompt, method, eviction, sampling, explain } = *asked;
                let request =
                    Request { eviction: &eviction, explain, ..Request::new(method.as_ref(), &sampling) };
                let ongoing = engine.start(&prompt, &request)?;
                self.metrics.first_token(came.elapsed(), ongoing.account());
                Ok(Some(ongoing))
            }
        }));
        let now = Instant::now();
        match begun {
            Ok(Ok(None)) => {}
            Ok(Ok(Some(ongoing))) => {
                self.running().answers.push(Running { ongoing, events, deadline, bytes, last: now });
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
            match self.write(&mut answer) {
                None => left.push(answer),
                Some(finish) => self.end(answer, finish),
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
        self.metrics.token(last.elapsed());
        *last = Instant::now();
        if !told { Some(Finish::Cancelled) } else { finish }
    }

    fn end(&self, answer: Running, finish: Finish) {
        let Running { ongoing, events, deadline, .. } = answer;
        if finish == Finish::Cancelled {
            self.metrics.cancelled.inc();
            let _ = events.send(cut_off(deadline));
            return;
        }
        let answer = ongoing.finish(finish, &mut |progress| send(&events, &progress));
        self.metrics.answered(&answer);
        let _ = events.send(Event::Done(Box::new(answer)));
    }
}

/// Whether anybody listens.
fn send(events: &UnboundedSender<Event>, progress: &Progress<'_>) -> bool {
    let token = Token {
        text: progress.text.to_owned(),
        id: progress.token,
        likely: progress.likely.cloned(),
        retained: progress.retained,
        kv_bytes: progress.kv_bytes,
    };
    events.send(Event::Token(token)).is_ok()
}

/// Why there is no answer to what had until `deadline`: that was over, or the server stops.
fn cut_off(deadline: Instant) -> Event {
    Event::Failed(if deadline <= Instant::now() {
        let message = "the request took too long";
        Problem { code: Some("deadline"), ..Problem::new(StatusCode::GATEWAY_TIMEOUT, message) }
    } else {
        let message = "the server is shutting down";
        Problem { retry_after: Some(5), ..Problem::new(StatusCode::SERVICE_UNAVAILABLE, message) }
    })
}
