//! The scheduler: one thread computes for all requests, which wait for it in a queue of bounded length.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use refrain::engine::Engine;
use tokio::sync::mpsc::UnboundedSender;

use crate::api_error::{ApiError, Result};
use crate::averages::Averages;
use crate::compute::Compute;
use crate::job::{Event, Job};
use crate::metrics::Metrics;
use crate::options::Limits;
use crate::queue::{JobBytes, Shared};

/// The queue and the compute thread. A clone is cheap and shares both.
#[derive(Clone)]
pub(crate) struct Scheduler(Arc<Shared>);

impl Scheduler {
    /// Starts the compute thread. `own` is the namespace of requests without a key.
    pub(crate) fn start(limits: Limits, metrics: Metrics, own: String) -> std::io::Result<Scheduler> {
        let shared = Arc::new(Shared::new(limits, metrics, own));
        let compute = Compute::new(shared.clone());
        thread::Builder::new().name("compute".to_owned()).spawn(move || compute.run())?;
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

    /// Puts the jobs of a request into the queue, all of them or none. `arrived` is the time of the request; `timeout` replaces
    /// [`Limits::request_timeout`].
    ///
    /// # Errors
    /// If a job exceeds a limit, the queue has no room for all, or the server is shutting down.
    pub(crate) fn submit(
        &self,
        engine: &Engine,
        jobs: Vec<(Job, UnboundedSender<Event>)>,
        arrived: Instant,
        timeout: Option<Duration>,
    ) -> Result<()> {
        let timeout = timeout.unwrap_or(self.0.limits.request_timeout);
        let with_bytes = |(job, events)| {
            let bytes = self.bytes(engine, &job)?;
            Ok((job, events, bytes))
        };
        let jobs = jobs.into_iter().map(with_bytes).collect::<Result<Vec<_>>>()?;
        self.0.push(engine, jobs, (arrived, timeout))
    }

    /// The bytes that a job takes.
    ///
    /// # Errors
    /// If the job exceeds a limit.
    fn bytes(&self, engine: &Engine, job: &Job) -> Result<JobBytes> {
        let Job::Generate(job) = job else { return Ok(JobBytes::default()) };
        self.check_tokens(job.prompt.len().saturating_add(job.sampling.max_tokens))?;
        let bytes = JobBytes {
            kv: engine.max_kv_bytes(&job.prompt, job.sampling.max_tokens, &job.eviction)?,
            prompt: engine.prompt_bytes(&job.prompt, &*job.method, &job.eviction),
        };
        let limit = self.0.limits.kv_cache_memory_bytes;
        if bytes.most() > limit {
            let JobBytes { kv, prompt } = bytes;
            let prompt = if prompt > 0 { format!(" and {prompt} for its prompt") } else { String::new() };
            let message = format!(
                "the request may need {kv} bytes of keys and values{prompt}, and all requests together have {limit}: send less, \
                 ask for a lower max_tokens, or bound the cache with refrain.evict"
            );
            return Err(ApiError::too_large(message));
        }
        Ok(bytes)
    }

    /// Checks, before a request is tokenised, whether the queue takes it.
    ///
    /// # Errors
    /// If the queue is full, or the server is shutting down.
    pub(crate) fn check_queue(&self) -> Result<()> {
        self.0.check_room()
    }

    /// Jobs that are computed, jobs that wait, and what the latest ones took.
    pub(crate) fn load(&self) -> (usize, usize, Averages) {
        self.0.load()
    }

    /// Takes no more jobs, waits for those that are there, for at most `timeout`, and aborts the rest.
    pub(crate) fn drain(&self, timeout: Duration) {
        self.0.drain(timeout);
        self.abort();
    }

    /// Aborts all jobs, and ends the compute thread.
    pub(crate) fn abort(&self) {
        self.0.abort();
    }
}
