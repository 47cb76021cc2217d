//! A request's way to a worker, and to another one where the first fails before its response has begun.

use std::sync::Arc;

use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use axum::response::IntoResponse as _;
use bytes::Bytes;
use futures_util::StreamExt as _;
use refrain_server::{ApiError, ChunkPlan, HeldBytes};

use super::Gateway;
use super::fleet::{Booking, Wanted};
use super::plan::Planned;
use super::stream::{Begun, Style};
use crate::cluster::{BodyStream, Lost, WorkerId};

/// Workers that a request is sent to before it fails: the chosen one and two others.
pub(super) const MAX_TRIES: usize = 3;

/// Path of the documents that workers have.
pub(super) const DOCUMENTS: &str = "/v1/documents";

/// A response that is not a stream of events.
#[derive(Debug)]
pub(super) struct Whole {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
}

impl Whole {
    pub(super) fn response(self) -> Response<Body> {
        (self.status, self.headers, self.body).into_response()
    }

    /// Whether another worker may take the request: this one has no room for it, or stops.
    pub(super) fn is_refused(&self) -> bool {
        [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE].contains(&self.status)
    }
}

/// The whole of a response.
///
/// # Errors
/// If the worker breaks off.
pub(super) async fn whole(response: Response<BodyStream>) -> Result<Whole, Lost> {
    let (head, mut pieces) = response.into_parts();
    let mut body = Vec::new();
    while let Some(piece) = pieces.next().await {
        body.extend_from_slice(&piece?);
    }
    Ok(Whole { status: head.status, headers: end_to_end(head.headers), body: body.into() })
}

/// The headers that belong to the message and not to the connection that it came by.
pub(super) fn end_to_end(mut headers: HeaderMap) -> HeaderMap {
    for name in [
        header::CONNECTION,
        header::CONTENT_LENGTH,
        header::PROXY_AUTHENTICATE,
        header::PROXY_AUTHORIZATION,
        header::TE,
        header::TRAILER,
        header::TRANSFER_ENCODING,
        header::UPGRADE,
    ] {
        headers.remove(name);
    }
    headers.remove("keep-alive");
    headers
}

/// A request as it is sent to workers, however many.
#[derive(Clone, Debug)]
pub(super) struct Outgoing {
    pub(super) method: Method,
    /// Path and query.
    pub(super) target: String,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
    /// Counts the body for as long as a worker may be sent it.
    pub(super) _held: Arc<HeldBytes>,
}

impl Outgoing {
    /// Whether documents are ingested. Events of such a stream tell how far it is, and not that a token was computed.
    pub(super) fn is_ingest(&self) -> bool {
        self.method == Method::POST && self.target.split('?').next() == Some(DOCUMENTS)
    }

    pub(super) fn request(&self) -> Result<Request<Bytes>, ApiError> {
        let request =
            Request::builder().method(self.method.clone()).uri(&self.target).body(self.body.clone());
        let mut request = request.map_err(|error| {
            ApiError::new(StatusCode::BAD_REQUEST, format!("the request's path: {error}"))
        })?;
        request.headers_mut().clone_from(&self.headers);
        let length = HeaderValue::from(self.body.len());
        request.headers_mut().insert(header::CONTENT_LENGTH, length);
        Ok(request)
    }
}

/// A request for which a worker is sought.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) request: Outgoing,
    /// Name of the model that is to answer.
    pub(super) model: Option<String>,
    /// The number of the chat that it is a turn of.
    pub(super) chat: Option<u64>,
    pub(super) planned: Planned,
    /// Whether the request is answered by a stream whose text follows from it, so that another worker can go on with it.
    pub(super) is_repeatable: bool,
}

impl Asked {
    /// The form of errors in the streams of this request's route.
    pub(super) fn style(&self) -> Style {
        if self.request.target.starts_with("/v1/responses") { Style::Response } else { Style::Completion }
    }
}

/// What became of a request at one worker.
enum Attempt {
    Answered(Whole),
    /// A stream that has begun.
    Begun(Box<Begun>),
    /// The worker has no room, or stops.
    Refused(Whole),
    Lost(Lost),
}

impl Gateway {
    /// Has a worker answer a request: the best one for its chunks, or another one where a worker is lost before its response has begun or
    /// takes no more. Every request that comes here may be computed twice: answers are functions of their requests, and documents are named by their content.
    pub(super) async fn answer(&self, asked: &Arc<Asked>) -> Result<Response<Body>, ApiError> {
        let (mut tried, mut refused) = (Vec::new(), None);
        while tried.len() < MAX_TRIES {
            let Some(booking) = self.choose(asked, &tried) else { break };
            let (worker, local_tokens) = (booking.worker, booking.local_tokens);
            if !tried.is_empty() {
                self.0.metrics.retried();
            }
            tried.push(worker);
            let attempt = self.attempt(asked, asked.request.request()?, booking).await;
            if let Attempt::Answered(_) | Attempt::Begun(_) = attempt {
                let tokens = asked.planned.plan.chunks.iter().map(|(_, tokens)| *tokens as u64).sum();
                self.0.metrics.answered(local_tokens, tokens);
            }
            match attempt {
                Attempt::Answered(whole) => return Ok(whole.response()),
                Attempt::Begun(begun) => return Ok(self.forward(asked, *begun)),
                Attempt::Refused(response) => {
                    // A worker that refuses for another reason than a full queue refuses the next request as well.
                    if response.status == StatusCode::SERVICE_UNAVAILABLE {
                        self.0.fleet.suspect(worker);
                    }
                    refused = Some(response);
                }
                Attempt::Lost(Lost(reason)) => {
                    self.0.fleet.suspect(worker);
                    tracing::warn!(%worker, reason, "a request goes to another worker")
                }
            }
        }
        if let Some(refused) = refused {
            return Ok(refused.response());
        }
        let message = match tried.len() {
            0 => "no worker takes requests".to_owned(),
            lost => format!("{lost} workers were lost while they answered; send the request again"),
        };
        Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code("no_worker"))
    }

    /// The best worker for a request, or where none with the model of its plan is left, any.
    fn choose(&self, asked: &Asked, tried: &[WorkerId]) -> Option<Booking> {
        let (fleet, planned) = (&self.0.fleet, &asked.planned);
        let any = Wanted { name: asked.model.as_deref(), fingerprint: None, chat: asked.chat };
        let wanted = Wanted { fingerprint: planned.fingerprint.as_deref(), ..any };
        let booking = fleet.choose(&planned.plan, wanted, tried);
        // Its chunks have other keys there.
        let prompt_tokens = planned.plan.prompt_tokens;
        booking.or_else(|| fleet.choose(&ChunkPlan { prompt_tokens, ..ChunkPlan::default() }, any, tried))
    }

    /// Has a worker begin the stream that answers a request; none where its answer is no stream.
    ///
    /// # Errors
    /// If the worker is lost before the first event.
    pub(super) async fn begin(&self, asked: &Asked, booking: Booking) -> Result<Option<Begun>, Lost> {
        let request = asked.request.request().map_err(|error| Lost(error.to_string()))?;
        match self.attempt(asked, request, booking).await {
            Attempt::Begun(begun) => Ok(Some(*begun)),
            Attempt::Answered(_) | Attempt::Refused(_) => Ok(None),
            Attempt::Lost(lost) => Err(lost),
        }
    }

    async fn attempt(&self, asked: &Asked, request: Request<Bytes>, booking: Booking) -> Attempt {
        let gone = booking.gone.clone();
        let answered = async {
            let response = self.0.cluster.dispatch(booking.worker, request).await?;
            let kind = response.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
            if response.status() == StatusCode::OK
                && kind.is_some_and(|kind| kind.starts_with("text/event-stream"))
            {
                return Ok(Attempt::Begun(Box::new(
                    Begun::new(response, booking, asked.request.is_ingest()).await?,
                )));
            }
            let whole = whole(response).await?;
            Ok(if whole.is_refused() { Attempt::Refused(whole) } else { Attempt::Answered(whole) })
        };
        let answered: Result<Attempt, Lost> = tokio::select! {
            answered = answered => answered,
            () = gone.cancelled() => Err(Lost("it left".to_owned())),
        };
        answered.unwrap_or_else(Attempt::Lost)
    }
}
