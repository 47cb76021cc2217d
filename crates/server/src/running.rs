//! The pieces of work that are under way, and what becomes of a sequence: its tokens, and its end.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain::engine::{
    DecodeWorkspace, Error as EngineError, FinishReason, Ingest, Prefill, Prompt, RequestStats, Sequence,
    decode_step,
};
use tokio::sync::mpsc::UnboundedSender;
use tracing::Span;

use crate::TEXT_LOG;
use crate::api_error::{ApiError, Result};
use crate::job::{Event, send_token};
use crate::metrics::Metrics;
use crate::queue::{JobBytes, Shared};
use crate::request_span::tell_failure;

/// The request behind a piece of work.
pub(crate) struct Client {
    /// The namespace of its key.
    pub(crate) key: String,
    pub(crate) events: UnboundedSender<Event>,
    pub(crate) deadline: Instant,
    /// Field of the request that its grammar is of.
    pub(crate) grammar_field: &'static str,
    /// The span of the request.
    pub(crate) span: Span,
}

/// A computation that has panicked.
pub(crate) struct Panicked;

impl From<Panicked> for ApiError {
    fn from(_: Panicked) -> ApiError {
        ApiError::internal(&"a computation panicked")
    }
}

impl Client {
    /// Ends the request by an error: it is counted, told, and logged within the request's span, as is the reason that a client is not told.
    pub(crate) fn fail(&self, metrics: &Metrics, error: impl Into<ApiError>) {
        self.span.in_scope(|| {
            let error: ApiError = error.into();
            tell_failure(&self.span, metrics, &error);
            let _ = self.events.send(Event::Failed(error));
        });
    }

    /// Ends the request after so many tokens of its answer, since its client has left, its time is over, or the server aborts.
    fn cancel(&self, shared: &Shared, tokens: usize) {
        shared.cancel(&self.span, (&self.events, self.deadline), tokens);
    }

    /// Whether the request's work is to end, which it is told: its client has disconnected, its time is over, or the server aborts.
    pub(crate) fn is_over(&self, shared: &Shared) -> bool {
        let late = self.deadline <= Instant::now() || shared.is_aborted();
        if !late && !self.events.is_closed() {
            return false;
        }
        self.cancel(shared, 0);
        true
    }
}

/// A prompt that is being computed.
pub(crate) struct RunningPrefill {
    pub(crate) client: Client,
    pub(crate) prefill: Prefill,
    /// The prompt, which the other answers of a request share.
    pub(crate) prompt: Arc<Prompt>,
    pub(crate) arrived: Instant,
    /// Time that its steps took, without those that only waited.
    pub(crate) took: Duration,
    /// The part of `took` in which it was computed: steps may wait a moment for a layer.
    pub(crate) computed: Duration,
    /// Whether its last step only waited for keys and values, or it waits for another answer to its prompt.
    pub(crate) waits: bool,
    pub(crate) bytes: JobBytes,
    pub(crate) prefill_span: Span,
}

/// Documents that are being prefilled.
pub(crate) struct RunningIngest {
    pub(crate) client: Client,
    pub(crate) ingest: Ingest,
    /// Whether its last step only waited for a disk or an object store.
    pub(crate) waits: bool,
    pub(crate) ingest_span: Span,
}

/// A sequence that is being decoded.
pub(crate) struct RunningSequence {
    pub(crate) client: Client,
    pub(crate) sequence: Sequence,
    pub(crate) kv_bytes: usize,
    /// The time of its last token.
    pub(crate) last_token: Option<Instant>,
    pub(crate) decode_span: Span,
}

/// Decodes the next tokens of sequences.
pub(crate) fn step(sequences: &mut [RunningSequence], workspace: &mut DecodeWorkspace) -> Result<()> {
    let stepped = catch_unwind(AssertUnwindSafe(|| {
        let mut batch: Vec<_> = sequences.iter_mut().map(|running| &mut running.sequence).collect();
        decode_step(&mut batch, workspace)
    }));
    match stepped {
        Ok(stepped) => Ok(stepped?),
        Err(_) => Err(Panicked.into()),
    }
}

/// Sends the tokens that were chosen for a sequence and not yet sent, and its complete answer if it ends with one. Gives the sequence back
/// if it goes on.
pub(crate) fn emit(shared: &Shared, mut running: RunningSequence) -> Option<RunningSequence> {
    if !running.sequence.has_next_token() {
        return Some(running);
    }
    let reason = match catch_unwind(AssertUnwindSafe(|| emit_token(shared, &mut running))) {
        Ok(None) => return Some(running),
        Ok(Some(reason)) => Some(reason),
        Err(_) => None,
    };
    let RunningSequence { sequence, client, decode_span, .. } = running;
    drop(decode_span);
    let finish = |reason| catch_unwind(AssertUnwindSafe(|| finish(shared, sequence, &client, reason))).ok();
    if reason.and_then(finish).is_none() {
        client.fail(&shared.metrics, Panicked);
    }
    None
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
fn finish(shared: &Shared, mut sequence: Sequence, client: &Client, reason: FinishReason) {
    if reason == FinishReason::Cancelled {
        return client.cancel(shared, sequence.answer_tokens());
    }
    let Client { events, grammar_field, span, .. } = client;
    let _entered = span.enter();
    if let Some(failure) = sequence.take_failure() {
        let grammar = matches!(failure, EngineError::Grammar { .. });
        let mut error = ApiError::from(failure);
        if grammar {
            error.param = Some((*grammar_field).to_owned());
        }
        return client.fail(&shared.metrics, error);
    }
    let answer = sequence.finish(reason, &mut |event| send_token(events, &event));
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
