//! The scheduler: one thread computes for all requests, which wait for it in a queue of bounded length.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use refrain::engine::{Engine, GenerateRequest, Prompt};
use refrain::eviction::Eviction;
use refrain::fusion::FusionMethod;
use tokio::sync::mpsc::UnboundedSender;

use crate::api_error::{ApiError, Result};
use crate::averages::Averages;
use crate::compute::Compute;
use crate::job::{Event, Job};
use crate::metrics::Metrics;
use crate::options::Limits;
use crate::queue::{JobBytes, Shared};

/// Tokens that an answer may have, though the sequence then takes more than its part of the memory.
pub(crate) const LEAST_DEFAULT_TOKENS: usize = 2048;

/// Bytes of a text that a token stands for at most, on average over all that a request may have: texts of languages and of programs have 2 to 6. A
/// text of more bytes is refused before it is tokenised, which takes a hundred times its memory.
const BYTES_PER_TOKEN: usize = 8;

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

    /// Checks the bytes of a request's texts before they are tokenised.
    ///
    /// # Errors
    /// If they are more than [`BYTES_PER_TOKEN`] for each of [`Limits::max_tokens_per_request`].
    pub(crate) fn check_text(&self, bytes: usize) -> Result<()> {
        let tokens = self.0.limits.max_tokens_per_request;
        let limit = tokens.saturating_mul(BYTES_PER_TOKEN);
        if bytes <= limit {
            return Ok(());
        }
        let message = format!(
            "the request has {bytes} bytes of text, and may have {tokens} tokens and no more than {limit} bytes of text: send less"
        );
        Err(ApiError::too_large(message))
    }

    /// Most tokens of the answer to a prompt for which the request gives no number, as [`Limits::default_max_tokens`] says. They follow from the
    /// prompt and the limits alone: the same request has the same answer, whatever else is computed. A request whose answer is bounded by the
    /// memory for all requests is not refused for it.
    pub(crate) fn default_tokens(
        &self,
        engine: &Engine,
        prompt: &Prompt,
        (method, eviction): (&dyn FusionMethod, &Eviction),
    ) -> usize {
        let limits = &self.0.limits;
        let most = engine.decoder().config().context.min(limits.max_tokens_per_request);
        // Memory is reserved for the whole answer.
        let within = |bytes: usize| {
            let (mut fits, mut exceeds) = (0, most.saturating_sub(prompt.len()) + 1);
            while exceeds - fits > 1 {
                let tokens = (fits + exceeds) / 2;
                match engine.max_kv_bytes(prompt, tokens, eviction) {
                    Ok(taken) if taken <= bytes => fits = tokens,
                    _ => exceeds = tokens,
                }
            }
            fits
        };
        let all = limits.kv_cache_memory_bytes;
        let part = || within(all / limits.max_num_seqs.max(1)).max(LEAST_DEFAULT_TOKENS);
        let wanted = limits.default_max_tokens.unwrap_or_else(part);
        let beside = engine.prompt_bytes(prompt, method, eviction);
        within(all.saturating_sub(beside)).min(wanted).max(1)
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
        let GenerateRequest { method, eviction, sampling, .. } = &job.request;
        self.check_tokens(job.prompt.len().saturating_add(sampling.max_tokens))?;
        let bytes = JobBytes {
            kv: engine.max_kv_bytes(&job.prompt, sampling.max_tokens, eviction)?,
            prompt: engine.prompt_bytes(&job.prompt, &**method, eviction),
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

    /// Jobs whose answer is decoded, jobs that have no token yet, and what the latest ones took.
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

#[cfg(test)]
mod tests {
    use refrain::engine::Parts;
    use refrain::eviction::POLICIES;
    use refrain::fusion::METHODS;

    use super::*;
    use crate::testing::tiny_engine;

    /// Without a number an answer goes on to the end of the context, as far as its part of the memory goes.
    #[test]
    fn answers_without_a_number_end_with_the_context_or_their_part_of_the_memory() {
        let engine = tiny_engine();
        let method = METHODS.select("vanilla").unwrap().built;
        let full = POLICIES.select("full").unwrap().built;
        let prompt = engine.compose(&Parts { question: "How tight is a bolt?", ..Parts::default() }).unwrap();
        let (length, context) = (prompt.len(), engine.decoder().config().context);
        let tokens = |limits: Limits| {
            let metrics = Metrics::new(engine.numerics(), "none");
            let scheduler = Scheduler::start(limits, metrics, String::new()).unwrap();
            let tokens = scheduler.default_tokens(&engine, &prompt, (&*method, &full));
            scheduler.abort();
            tokens
        };
        let default = Limits::default;
        assert_eq!(tokens(default()), context - length);
        assert_eq!(tokens(Limits { max_tokens_per_request: length + 9, ..default() }), 9);
        assert_eq!(tokens(Limits { max_tokens_per_request: 2, ..default() }), 1);
        assert_eq!(tokens(Limits { default_max_tokens: Some(7), ..default() }), 7);
        assert_eq!(tokens(Limits { default_max_tokens: Some(usize::MAX), ..default() }), context - length);
        let bytes = |tokens| engine.max_kv_bytes(&prompt, tokens, &full).unwrap();
        let all = Limits { kv_cache_memory_bytes: bytes(20), max_num_seqs: 1, ..default() };
        assert_eq!(tokens(all.clone()), 20, "no more than there is");
        assert_eq!(tokens(Limits { max_num_seqs: 32, ..all.clone() }), 20, "the least is more than the part");
        assert_eq!(tokens(Limits { default_max_tokens: Some(21), ..all }), 20);
    }
}
