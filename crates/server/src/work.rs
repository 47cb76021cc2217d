//! What is computed for a request, how much of it there may be, and what the request hears of it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use refrain_engine::{Answer, Document, IngestProgress, IngestReport, Progress, Prompt, Sampling};
use refrain_eviction::Eviction;
use refrain_fusion::FusionMethod;
use tokio::sync::mpsc::UnboundedSender;

use crate::error::Problem;

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
    /// Tokens of a request: of its documents, or of its prompt and answer.
    pub tokens: usize,
    /// How long a request may take, from when it came.
    pub deadline: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            answers: 32,
            queue: 256,
            kv_bytes: 4 << 30,
            tokens: 1 << 20,
            deadline: Duration::from_secs(600),
        }
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

/// Whether anybody listens.
pub(crate) fn send(events: &UnboundedSender<Event>, progress: &Progress<'_>) -> bool {
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
pub(crate) fn cut_off(deadline: Instant) -> Event {
    Event::Failed(if deadline <= Instant::now() {
        let message = "the request took too long";
        Problem { code: Some("deadline"), ..Problem::new(StatusCode::GATEWAY_TIMEOUT, message) }
    } else {
        Problem::stopping()
    })
}
