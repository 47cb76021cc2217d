//! The queue between requests and the compute thread.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use refrain::engine::{Engine, RequestStats};
use tokio::sync::mpsc::UnboundedSender;
use tracing::{Span, info_span};

use crate::api_error::{ApiError, Result};
use crate::averages::Averages;
use crate::job::{Event, Job};
use crate::metrics::Metrics;
use crate::options::Limits;
use crate::request_span::mark_failed;

/// Ingests that are under way at a time; further ones wait in the queue without standing in the way of questions.
pub(crate) const MAX_INGESTS: usize = 4;

/// The reason for which a request ends whose client has left.
const CLIENT_LEFT: &str = "client_left";

/// The time for which questions that have room pass one that has none. From then on its room is kept free.
const PASSED: Duration = Duration::from_secs(5);

/// Bytes that a job takes of the memory for requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct JobBytes {
    /// Keys and values, and what an eviction policy keeps beside them.
    pub(crate) kv: usize,
    /// Memory of the prompt until its first token, on a device with memory of its own.
    pub(crate) prompt: usize,
}

impl JobBytes {
    /// Most bytes that it takes at a time.
    pub(crate) fn most(self) -> usize {
        self.kv.saturating_add(self.prompt)
    }
}

/// A job in the queue.
pub(crate) struct QueuedJob {
    pub(crate) engine: Engine,
    pub(crate) job: Job,
    pub(crate) events: UnboundedSender<Event>,
    /// The time of the request.
    pub(crate) arrived: Instant,
    /// The time since which it waits in the queue.
    pub(crate) queued: Instant,
    pub(crate) deadline: Instant,
    pub(crate) bytes: JobBytes,
    /// The span of the request.
    pub(crate) span: Span,
    /// The span of its time in the queue.
    pub(crate) queue_span: Span,
}

impl QueuedJob {
    /// The namespace of the job's key.
    fn key(&self) -> &str {
        &self.engine.settings().namespace
    }

    /// Ends a request that waits.
    fn cancel(&self, shared: &Shared) {
        shared.cancel(&self.span, (&self.events, self.deadline), 0);
    }
}

/// The state that requests and the compute thread share.
pub(crate) struct Shared {
    pub(crate) limits: Limits,
    pub(crate) metrics: Metrics,
    /// The namespace of requests without a key.
    own: String,
    queue: Mutex<Queue>,
    changed: Condvar,
    /// Whether everything under way is to be aborted.
    abort: AtomicBool,
}

/// Numbers of requests that the compute thread works on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct UnderWay {
    /// Prefills and ingests.
    pub(crate) prefilled: usize,
    /// Sequences.
    pub(crate) decoded: usize,
}

impl UnderWay {
    fn all(self) -> usize {
        self.prefilled + self.decoded
    }
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<QueuedJob>,
    under_way: UnderWay,
    closed: bool,
    averages: Averages,
}

impl Shared {
    pub(crate) fn new(limits: Limits, metrics: Metrics, own: String) -> Shared {
        Shared {
            limits,
            metrics,
            own,
            queue: Mutex::default(),
            changed: Condvar::new(),
            abort: AtomicBool::new(false),
        }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The part of a limit that the key of a namespace may take. Requests without a key are the server's own, whose part is all.
    fn of_key(&self, key: &str, limit: usize) -> usize {
        if key == self.own { limit } else { self.limits.of_key(limit) }
    }

    /// Puts the jobs of a request, with the bytes that each takes, into the queue, all of them or none. They are late a `timeout` after it arrived.
    ///
    /// # Errors
    /// If the queue has no room for all of them, or the server is shutting down.
    pub(crate) fn push(
        &self,
        engine: &Engine,
        jobs: Vec<(Job, UnboundedSender<Event>, JobBytes)>,
        (arrived, timeout): (Instant, Duration),
    ) -> Result<()> {
        let key = &engine.settings().namespace;
        let limit = self.of_key(key, self.limits.max_queued_requests);
        if jobs.len() > limit {
            let message = format!("{} answers are asked for, and {limit} may wait at a time", jobs.len());
            return Err(ApiError::field("n", message));
        }
        let mut queue = self.queue();
        self.admit(&mut queue, jobs.len())?;
        let waiting = queue.jobs.iter().filter(|job| job.key() == key).count();
        if waiting + jobs.len() > limit {
            let message = match jobs.len() {
                1 => format!("{limit} requests of this key are waiting already"),
                more => format!(
                    "{waiting} requests of this key are waiting, and with {more} answers it has more than {limit}"
                ),
            };
            return Err(self.full(&queue, message));
        }
        let (deadline, queued) = (arrived + timeout, Instant::now());
        for (job, events, bytes) in jobs {
            let (engine, span) = (engine.clone(), Span::current());
            let queue_span = info_span!(parent: &span, "queue", ahead = queue.jobs.len());
            let queued =
                QueuedJob { engine, job, events, arrived, queued, deadline, bytes, span, queue_span };
            queue.jobs.push_back(queued);
        }
        self.metrics.requests.waiting.set(queue.jobs.len() as i64);
        drop(queue);
        self.changed.notify_all();
        Ok(())
    }

    /// Checks whether the queue takes a job.
    ///
    /// # Errors
    /// If the queue is full, or the server is shutting down.
    pub(crate) fn check_room(&self) -> Result<()> {
        self.admit(&mut self.queue(), 1)
    }

    fn admit(&self, queue: &mut Queue, jobs: usize) -> Result<()> {
        let limit = self.limits.max_queued_requests;
        if queue.closed {
            return Err(ApiError::shutting_down());
        }
        if queue.jobs.len() + jobs > limit {
            // Jobs of disconnected clients leave the queue.
            queue.jobs.retain(|job| {
                let is_closed = job.events.is_closed();
                if is_closed {
                    job.cancel(self);
                }
                !is_closed
            });
        }
        if queue.jobs.len() + jobs > limit {
            let waiting = queue.jobs.len();
            return Err(self.full(queue, format!("{waiting} requests are waiting already, and {limit} may")));
        }
        Ok(())
    }

    /// The refusal of a request for which the queue has no room.
    fn full(&self, queue: &Queue, message: String) -> ApiError {
        self.metrics.requests.rejected.inc();
        let seconds = queue.averages.seconds * queue.jobs.len() as f64;
        let error =
            ApiError { code: Some("queue_full"), ..ApiError::new(StatusCode::TOO_MANY_REQUESTS, message) };
        ApiError { retry_after: Some(seconds.ceil().clamp(1.0, 600.0) as u64), ..error }
    }

    /// The next job of the queue that may start beside those under way: of prefills and sequences `held` has the key and the bytes, of ingests
    /// `ingesting` the key. Of the keys that ask a question, the one that has `used` the least time goes first. Where there is no room for its
    /// question, those that have room pass it until it has waited for [`PASSED`], and wait behind it then. An ingest, which holds no cache, stands
    /// in no question's way, and goes in the same order among ingests. Jobs that are late, or whose client has disconnected, are dropped.
    pub(crate) fn take(
        &self,
        held: &[(&str, usize)],
        ingesting: &[&str],
        used: impl Fn(&str) -> Duration,
    ) -> Option<QueuedJob> {
        let mut queue = self.queue();
        queue.jobs.retain(|job| {
            let over = job.events.is_closed() || job.deadline <= Instant::now() || self.is_aborted();
            if over {
                job.cancel(self);
            }
            !over
        });
        let is_ingest = |job: &QueuedJob| matches!(job.job, Job::Ingest(_));
        let of_own = |job: &QueuedJob| held.iter().filter(|(key, _)| *key == job.key()).count();
        // A key whose share is full lets others go first.
        let may_start = |job: &QueuedJob| of_own(job) < self.of_key(job.key(), self.limits.max_num_seqs);
        let questions = || queue.jobs.iter().enumerate().filter(|(_, job)| !is_ingest(job) && may_start(job));
        let by_share = |(_, job): &(usize, &QueuedJob)| (used(job.key()), of_own(job));
        let bytes: usize = held.iter().map(|(_, bytes)| bytes).sum();
        let fits = |job: &QueuedJob| {
            held.len() < self.limits.max_num_seqs
                && bytes + job.bytes.most() <= self.limits.kv_cache_memory_bytes
        };
        let first = questions().min_by_key(by_share);
        let question = match first.filter(|(_, job)| fits(job) || job.queued.elapsed() >= PASSED) {
            Some(first) => Some(first).filter(|(_, job)| fits(job)),
            None => questions().filter(|(_, job)| fits(job)).min_by_key(by_share),
        };
        let question = question.map(|(index, _)| index);
        let running = |job: &QueuedJob| ingesting.iter().filter(|key| **key == job.key()).count();
        let may_ingest = |job: &QueuedJob| {
            ingesting.len() < MAX_INGESTS && running(job) < self.of_key(job.key(), MAX_INGESTS)
        };
        let ingests = queue.jobs.iter().enumerate().filter(|(_, job)| is_ingest(job) && may_ingest(job));
        let ingest = ingests.min_by_key(|(_, job)| (used(job.key()), running(job))).map(|(index, _)| index);
        let job = question.or(ingest).and_then(|index| queue.jobs.remove(index));
        queue.under_way.prefilled += usize::from(job.is_some());
        self.metrics.requests.waiting.set(queue.jobs.len() as i64);
        job
    }

    /// Waits for a job.
    pub(crate) fn wait(&self) {
        let idle = |queue: &mut Queue| queue.jobs.is_empty() && !self.is_aborted();
        // The timeout bounds the time until jobs of disconnected clients are noticed.
        let timeout = Duration::from_millis(200);
        let waited = self.changed.wait_timeout_while(self.queue(), timeout, idle);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Counts a job that was computed for `time` up to its first token.
    pub(crate) fn count_prefill(&self, time: Duration, stats: &RequestStats) {
        self.queue().averages.count(time, stats);
    }

    /// Sequences, jobs that have no token yet, and what the latest ones took. Routers take a prompt under way for one that keeps others waiting.
    pub(crate) fn load(&self) -> (usize, usize, Averages) {
        let queue = self.queue();
        let UnderWay { prefilled, decoded } = queue.under_way;
        (decoded, queue.jobs.len() + prefilled, queue.averages)
    }

    /// Tells metrics and those who wait how much is under way.
    pub(crate) fn publish(&self, under_way: UnderWay, kv_bytes: usize) {
        self.metrics.requests.running.set(under_way.all() as i64);
        self.metrics.requests.kv_usage.set(kv_bytes as f64 / self.limits.kv_cache_memory_bytes.max(1) as f64);
        let mut queue = self.queue();
        let changed = queue.under_way != under_way;
        queue.under_way = under_way;
        drop(queue);
        if changed {
            self.changed.notify_all();
        }
    }

    /// Takes no more jobs, and waits for those that are there, for at most `timeout`.
    pub(crate) fn drain(&self, timeout: Duration) {
        let mut queue = self.queue();
        queue.closed = true;
        self.changed.notify_all();
        let busy = |queue: &mut Queue| !queue.jobs.is_empty() || queue.under_way.all() > 0;
        let waited = self.changed.wait_timeout_while(queue, timeout, busy);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Aborts everything under way.
    pub(crate) fn abort(&self) {
        self.queue().closed = true;
        self.abort.store(true, Relaxed);
        self.changed.notify_all();
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.abort.load(Relaxed)
    }

    /// Sends an error to the requests in the queue.
    pub(crate) fn abort_queue(&self) {
        for job in self.queue().jobs.drain(..) {
            job.cancel(self);
        }
    }

    /// Ends a request whose client has left, whose time is over, or that the server's end aborts, after so many tokens of its answer: it is counted,
    /// told, and logged within its span.
    pub(crate) fn cancel(
        &self,
        span: &Span,
        (events, deadline): (&UnboundedSender<Event>, Instant),
        tokens: usize,
    ) {
        self.metrics.requests.cancelled.inc();
        let (error, reason) = self.end(events, deadline);
        span.in_scope(|| tracing::info!(reason, tokens, "cancelled"));
        if reason != CLIENT_LEFT {
            mark_failed(span);
        }
        let _ = events.send(Event::Failed(error));
    }

    /// The error by which a request ends, and its reason. The first of a request's answers whose time is over closes the events of the others.
    fn end(&self, events: &UnboundedSender<Event>, deadline: Instant) -> (ApiError, &'static str) {
        let is_late = deadline <= Instant::now();
        let error = if is_late { ApiError::timeout() } else { ApiError::shutting_down() };
        let has_left = events.is_closed() && !is_late && !self.is_aborted();
        let reason = if has_left { CLIENT_LEFT } else { error.word() };
        (error, reason)
    }
}

#[cfg(test)]
mod tests {
    use refrain::engine::Document;
    use refrain::fusion::METHODS;
    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    use super::*;
    use crate::testing::{question, tiny_engine};

    /// A queue of a server with API keys, and what keeps its jobs from being dropped.
    struct Waiting {
        engine: Engine,
        shared: Shared,
        events: Vec<UnboundedReceiver<Event>>,
    }

    impl Waiting {
        /// Ingests of these keys, in this order.
        fn ingests(keys: &[&str]) -> Waiting {
            let engine = tiny_engine();
            let limits = Limits { has_keys: true, ..Limits::default() };
            let shared = Shared::new(limits, Metrics::new(engine.numerics(), "none"), String::new());
            let mut waiting = Waiting { engine, shared, events: Vec::new() };
            keys.iter().for_each(|key| waiting.push(key));
            waiting
        }

        fn push(&mut self, key: &str) {
            let (engine, method) =
                (self.engine.in_namespace(key, None), METHODS.select("pie").unwrap().built);
            let document = Document { title: String::new(), text: "A bolt.".to_owned() };
            let ingest = engine.start_ingest(&[document], &method).unwrap();
            let (sender, events) = unbounded_channel();
            self.events.push(events);
            let jobs = vec![(Job::Ingest(Box::new(ingest)), sender, JobBytes::default())];
            self.shared.push(&engine, jobs, (Instant::now(), Duration::from_secs(3600))).unwrap();
        }

        /// The keys of the ingests that start until none may, where keys have used so many seconds.
        fn started(&self, used: impl Fn(&str) -> u64) -> Vec<String> {
            let mut started: Vec<String> = Vec::new();
            let seconds = |key: &str| Duration::from_secs(used(key));
            loop {
                let ingesting: Vec<&str> = started.iter().map(String::as_str).collect();
                let Some(job) = self.shared.take(&[], &ingesting, seconds) else { return started };
                started.push(job.key().to_owned());
            }
        }
    }

    #[test]
    fn a_crowd_of_one_keys_ingests_leaves_a_place_to_another_key() {
        let mut waiting = Waiting::ingests(&["many"; 10]);
        assert_eq!(waiting.started(|_| 0), ["many"; 3]);
        waiting.push("other");
        let ingesting = ["many"; 3];
        let next = waiting.shared.take(&[], &ingesting, |_| Duration::ZERO).map(|job| job.key().to_owned());
        assert_eq!(next.as_deref(), Some("other"));
    }

    #[test]
    fn ingests_go_by_the_time_of_their_key_and_then_by_how_many_of_it_are_under_way() {
        let keys = ["heavy", "heavy", "heavy", "light", "light", "light", "light"];
        let started = Waiting::ingests(&keys).started(|key| u64::from(key == "heavy"));
        assert_eq!(started, ["light", "light", "light", "heavy"]);
        let started = Waiting::ingests(&keys).started(|_| 5);
        assert_eq!(started, ["heavy", "light", "heavy", "light"]);
    }

    /// A question of `large` has no room beside what is under way, and one of `small` has.
    #[test]
    fn a_question_without_room_is_passed_for_a_while_and_then_waited_for() {
        let mut waiting = Waiting::ingests(&[]);
        waiting.shared.limits.kv_cache_memory_bytes = 100;
        for (key, kv) in [("large", 80), ("small", 40), ("small", 40)] {
            let engine = waiting.engine.in_namespace(key, None);
            let (sender, events) = unbounded_channel();
            waiting.events.push(events);
            let jobs = vec![(Job::Generate(Box::new(question(&engine))), sender, JobBytes { kv, prompt: 0 })];
            waiting.shared.push(&engine, jobs, (Instant::now(), Duration::from_secs(3600))).unwrap();
        }
        let used = |key: &str| Duration::from_secs(u64::from(key == "small"));
        let take =
            |held: &[(&str, usize)]| waiting.shared.take(held, &[], used).map(|job| job.key().to_owned());
        assert_eq!(take(&[("other", 50)]).as_deref(), Some("small"));
        waiting.shared.queue().jobs[0].queued = Instant::now().checked_sub(PASSED).unwrap();
        assert_eq!(take(&[("other", 50)]), None);
        assert_eq!(take(&[]).as_deref(), Some("large"));
    }

    #[test]
    fn the_servers_own_requests_may_take_all_of_a_limit() {
        assert_eq!(Waiting::ingests(&[""; 10]).started(|_| 0), [""; 4]);
    }

    /// A client has left, or has got the error of another answer of its request.
    #[test]
    fn an_answer_without_a_reader_is_left_only_before_its_time_is_over() {
        let shared = Waiting::ingests(&[]).shared;
        let (events, reader) = unbounded_channel();
        drop(reader);
        let reason = |late: bool| {
            let now = Instant::now();
            shared.end(&events, if late { now } else { now + Duration::from_secs(3600) }).1
        };
        assert_eq!((reason(false), reason(true)), (CLIENT_LEFT, "timeout"));
        shared.abort();
        assert_eq!((reason(false), reason(true)), ("shutting_down", "timeout"));
    }

    #[test]
    fn the_answers_of_a_request_are_queued_all_or_none() {
        let engine = tiny_engine();
        let limits = Limits { max_queued_requests: 3, ..Limits::default() };
        let shared = Shared::new(limits, Metrics::new(engine.numerics(), "none"), String::new());
        let method = METHODS.select("pie").unwrap().built;
        let mut clients = Vec::new();
        let mut push = |number: usize| {
            let document = Document { title: String::new(), text: "A bolt.".to_owned() };
            let jobs = (0..number).map(|_| {
                let (sender, events) = unbounded_channel();
                clients.push(events);
                let ingest = engine.start_ingest(std::slice::from_ref(&document), &method).unwrap();
                (Job::Ingest(Box::new(ingest)), sender, JobBytes::default())
            });
            let time = (Instant::now(), Duration::from_secs(3600));
            let pushed = shared.push(&engine, jobs.collect(), time);
            pushed.map_err(|error| (error.status.as_u16(), error.param))
        };
        push(2).unwrap();
        assert_eq!(push(2), Err((429, None)));
        assert_eq!(push(4), Err((400, Some("n".to_owned()))), "it would never have room");
        push(1).unwrap();
        assert_eq!(shared.load().1, 3);
        assert_eq!(shared.metrics.requests.cancelled.get(), 0);
    }
}
