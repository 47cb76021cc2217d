//! Streams of server-sent events. Where the worker of one is lost after it has begun, another worker of its kind answers the request again and
//! goes on where the first broke off; where none can, the stream ends with a clear error. Before the first text, a worker of any kind does.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::Response;
use bytes::Bytes;
use futures_util::stream::unfold;
use refrain_server::SERVER_FAILURES;
use serde_json::{Value, json};
use tokio::time::timeout;
use tracing::{Instrument as _, Span};

use super::Gateway;
use super::events::{Events, data};
use super::fleet::{Booking, Wanted};
use super::metrics::Replay;
use super::proxy::{Asked, MAX_TRIES, end_to_end};
use super::transcript::{Differs, Transcript};
use crate::cluster::{BodyStream, Lost, WorkerId};

/// Most time without an event: workers send a comment every 15 seconds at least.
const MAX_SILENCE: Duration = Duration::from_secs(45);

/// The interface that a stream belongs to, which says how it tells of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    /// `/v1/chat/completions`, `/v1/completions` and `/v1/documents`: an object with `error`, then `[DONE]`.
    Completion,
    /// `/v1/responses`: an event `error`.
    Response,
}

/// A stream's last bytes where its answer is incomplete.
fn error_event(style: Style, (code, reason): (&str, &str)) -> Bytes {
    let message = format!("{reason}, and the answer is incomplete: send the request again");
    let text = match style {
        Style::Completion => {
            let error = json!({ "message": message, "type": "server_error", "param": null, "code": code });
            format!("data: {}\n\ndata: [DONE]\n\n", json!({ "error": error }))
        }
        Style::Response => {
            let error = json!({ "type": "error", "code": code, "message": message, "param": null });
            format!("event: error\ndata: {error}\n\n")
        }
    };
    text.into()
}

/// Whether an event tells of an error that lies in its worker alone, so that another one may go on.
fn is_failure(event: &[u8]) -> bool {
    let Some(data) = data(event) else { return false };
    // Nearly no event has one of these words, and only those that have are read.
    let has = |code: &str| data.windows(code.len()).any(|part| part == code.as_bytes());
    if !SERVER_FAILURES.into_iter().any(has) {
        return false;
    }
    let value: Value = serde_json::from_slice(data).unwrap_or_default();
    let is_code =
        |value: &Value| value["error"]["code"].as_str().is_some_and(|code| SERVER_FAILURES.contains(&code));
    is_code(&value) || is_code(&value["response"])
}

/// A stream that has begun.
pub(super) struct Begun {
    head: Response<()>,
    first: Bytes,
    events: Events,
    booking: Booking,
}

impl Begun {
    /// Waits for the first event of a worker's stream. With it the worker has computed a prompt, unless the stream is that of an ingest.
    ///
    /// # Errors
    /// If the worker is lost before it.
    pub(super) async fn new(
        response: Response<BodyStream>,
        mut booking: Booking,
        is_ingest: bool,
    ) -> Result<Begun, Lost> {
        let (head, pieces) = response.into_parts();
        let mut events = Events::new(pieces);
        let first = events.next().await?.ok_or_else(|| Lost("its stream had no event".to_owned()))?;
        if !is_ingest {
            booking.first_token();
        }
        let mut response = Response::new(());
        (*response.status_mut(), *response.headers_mut()) = (head.status, end_to_end(head.headers));
        Ok(Begun { head: response, first, events, booking })
    }
}

/// The state of a stream that is passed on.
struct Passing {
    gateway: Gateway,
    asked: Arc<Asked>,
    /// An event that was read and not looked at.
    first: Option<Bytes>,
    events: Events,
    /// The worker's place, which the stream holds to its end.
    booking: Booking,
    /// None where the answer does not follow from the request.
    transcript: Option<Transcript>,
    /// Workers that were lost during the stream, and the present one.
    tried: Vec<WorkerId>,
    /// Whether the present worker repeats what the client has.
    is_repeating: bool,
    /// The span of the request.
    span: Span,
}

/// The end of a stream.
enum End {
    Complete,
    /// Its worker was lost, and no other one can go on.
    Broken,
    /// The gateway stops.
    Stopped,
}

impl End {
    /// Code and reason of an end before that of the answer.
    fn error(&self) -> Option<(&'static str, &'static str)> {
        match self {
            End::Complete => None,
            End::Broken => Some(("worker_lost", "the worker was lost while it answered")),
            End::Stopped => Some(("shutting_down", "the gateway is shutting down")),
        }
    }
}

impl Gateway {
    /// The response to a client once a worker's stream has begun.
    pub(super) fn forward(&self, asked: &Arc<Asked>, begun: Begun) -> Response<Body> {
        let Begun { head, first, events, booking } = begun;
        let passing = Passing {
            gateway: self.clone(),
            asked: asked.clone(),
            first: Some(first),
            events,
            tried: vec![booking.worker],
            booking,
            transcript: asked.is_repeatable.then(Transcript::default),
            is_repeating: false,
            span: Span::current(),
        };
        let events = unfold(Some(passing), |passing| async move {
            let mut passing = passing?;
            let (stopping, span) = (passing.gateway.0.stopping.clone(), passing.span.clone());
            let next = tokio::select! {
                biased;
                () = stopping.cancelled() => Err(End::Stopped),
                next = passing.next().instrument(span) => next,
            };
            match next {
                Ok(event) => Some((Ok::<_, Lost>(event), Some(passing))),
                Err(end) => Some((Ok(error_event(passing.asked.style(), end.error()?)), None)),
            }
        });
        head.map(|()| Body::from_stream(events))
    }
}

impl Passing {
    /// The next event for the client.
    async fn next(&mut self) -> Result<Bytes, End> {
        loop {
            let event = match self.first.take() {
                Some(first) => Ok(Some(first)),
                None => timeout(MAX_SILENCE, self.events.next())
                    .await
                    .unwrap_or_else(|_| Err(Lost("its worker is silent".to_owned()))),
            };
            let Some(transcript) = &mut self.transcript else {
                return match event {
                    Ok(event) => event.ok_or(End::Complete),
                    Err(Lost(reason)) => {
                        self.gateway.0.metrics.replayed(Replay::NotRepeatable);
                        Err(broken(&reason))
                    }
                };
            };
            match event {
                Ok(Some(event)) if is_failure(&event) => {
                    self.replay("its worker stops, or its device has failed").await?;
                }
                Ok(Some(event)) => {
                    let event = transcript.take(event);
                    let has_caught_up = transcript.has_caught_up();
                    let event = event.map_err(|Differs| self.differs())?;
                    if self.is_repeating && has_caught_up {
                        self.is_repeating = false;
                        self.gateway.0.metrics.replayed(Replay::Continued);
                    }
                    if let Some(event) = event {
                        return Ok(event);
                    }
                }
                Ok(None) if transcript.has_caught_up() => return Err(End::Complete),
                Ok(None) => return Err(self.differs()),
                // Nothing of the answer is missing.
                Err(_) if transcript.is_over => return Err(End::Complete),
                Err(Lost(reason)) => self.replay(&reason).await?,
            }
        }
    }

    fn differs(&self) -> End {
        self.gateway.0.metrics.replayed(Replay::Differed);
        broken("another worker gave another answer")
    }

    /// Has another worker answer the request again: one of the same kind, or where nothing of the answer was sent, any one of its model.
    async fn replay(&mut self, reason: &str) -> Result<(), End> {
        let Passing { gateway, asked, booking, tried, transcript, .. } = self;
        let is_answered = transcript.as_ref().is_some_and(|transcript| transcript.is_answered);
        gateway.0.fleet.suspect(booking.worker);
        tracing::warn!(worker = %booking.worker, reason, "a stream goes on at another worker");
        while tried.len() < MAX_TRIES {
            let (fleet, plan) = (&gateway.0.fleet, &asked.planned.plan);
            let wanted = Wanted { fingerprint: Some(&booking.kind.fingerprint), ..Wanted::default() };
            let next = match is_answered {
                true => fleet.choose_alike(plan, &booking.kind, tried),
                false => fleet.choose(plan, wanted, tried),
            };
            let Some(next) = next else { break };
            let worker = next.worker;
            tried.push(worker);
            match gateway.begin(asked, next).await {
                Ok(Some(begun)) => {
                    (self.first, self.events, self.booking) =
                        (Some(begun.first), begun.events, begun.booking);
                    transcript.iter_mut().for_each(Transcript::replay);
                    self.is_repeating = true;
                    return Ok(());
                }
                Ok(None) => tracing::warn!(%worker, "a worker does not repeat a stream"),
                Err(Lost(reason)) => {
                    gateway.0.fleet.suspect(worker);
                    tracing::warn!(%worker, reason, "a stream goes on at another worker");
                }
            }
        }
        gateway.0.metrics.replayed(Replay::NoWorker);
        Err(broken("no worker is left that can go on with it"))
    }
}

fn broken(reason: &str) -> End {
    tracing::warn!(reason, "a stream broke off");
    End::Broken
}
