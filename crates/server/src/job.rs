//! Jobs of the compute thread, and the events that their requests receive.

use std::sync::Arc;

use refrain::engine::{Answer, GenerateRequest, Ingest, IngestProgress, IngestReport, Prompt, TokenEvent};
use tokio::sync::mpsc::UnboundedSender;

use crate::api_error::ApiError;

/// A job of the compute thread.
pub(crate) enum Job {
    /// Prefill documents into the chunk store.
    Ingest(Box<Ingest>),
    /// Answer a prompt.
    Generate(Box<GenerateJob>),
}

/// A prompt to answer.
#[derive(Clone, Debug)]
pub(crate) struct GenerateJob {
    /// The prompt, which all answers of a request share.
    pub(crate) prompt: Arc<Prompt>,
    pub(crate) request: GenerateRequest,
    /// Field of the client's request that the grammar is of.
    pub(crate) grammar_field: &'static str,
}

/// An event that a request receives about its job.
#[derive(Debug)]
pub(crate) enum Event {
    /// Progress of an ingest.
    Progress(IngestProgress),
    /// The ingest is done.
    Ingested(Box<IngestReport>),
    /// A token of the answer.
    Token(Token),
    /// The answer is complete.
    Finished(Box<Answer>),
    /// The job failed.
    Failed(ApiError),
}

/// A token of an answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Token {
    /// Text that is complete with this token.
    pub(crate) text: String,
    /// The token's id; `None` with text that was held back until the end.
    pub(crate) id: Option<u32>,
    pub(crate) logprobs: Option<refrain::engine::TokenLogprobs>,
    /// Tokens whose keys and values each head's cache holds.
    pub(crate) retained: usize,
    /// Bytes of the cache.
    pub(crate) kv_bytes: usize,
}

/// Sends a token to its request, and says whether the request still receives.
pub(crate) fn send_token(events: &UnboundedSender<Event>, event: &TokenEvent<'_>) -> bool {
    let token = Token {
        text: event.text.to_owned(),
        id: event.token,
        logprobs: event.logprobs.cloned(),
        retained: event.retained,
        kv_bytes: event.kv_bytes,
    };
    events.send(Event::Token(token)).is_ok()
}
