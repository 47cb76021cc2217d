//! Streams of server-sent events: passed on as they come, with a clear error where their worker is lost after they have begun.

use std::time::Duration;

use axum::body::Body;
use axum::http::Response;
use bytes::Bytes;
use futures_util::stream::{StreamExt as _, unfold};
use serde_json::json;
use tokio::time::timeout;

use super::fleet::Booking;
use super::proxy::end_to_end;
use crate::cluster::{BodyStream, Lost};

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

/// A stream's last bytes where its worker is lost. The blank line before them ends an event that was cut off, which no client then reads as
/// whole, since its data is no JSON.
fn error_event(style: Style) -> Bytes {
    let message =
        "the worker was lost while it answered, and the answer is incomplete: send the request again";
    let text = match style {
        Style::Completion => {
            let error =
                json!({ "message": message, "type": "server_error", "param": null, "code": "worker_lost" });
            format!("\n\ndata: {}\n\ndata: [DONE]\n\n", json!({ "error": error }))
        }
        Style::Response => {
            let error = json!({ "type": "error", "code": "worker_lost", "message": message, "param": null });
            format!("\n\nevent: error\ndata: {error}\n\n")
        }
    };
    text.into()
}

/// The state of a stream that is passed on.
struct Passing {
    pieces: BodyStream,
    style: Style,
    /// The worker's place, which the stream holds to its end.
    _booking: Booking,
}

/// The response to a client once a worker's stream has begun.
///
/// # Errors
/// If the worker is lost before its first event.
pub(super) async fn forward(
    response: Response<BodyStream>,
    style: Style,
    mut booking: Booking,
) -> Result<Response<Body>, Lost> {
    let (head, mut pieces) = response.into_parts();
    let first = pieces.next().await.ok_or_else(|| Lost("its stream had no event".to_owned()))??;
    booking.first_token();
    let passing = Some(Passing { pieces, style, _booking: booking });
    let rest = unfold(passing, |passing| async move {
        let mut passing = passing?;
        let next = timeout(MAX_SILENCE, passing.pieces.next()).await;
        let lost = |reason: String| {
            tracing::warn!(reason, "a stream broke off");
            Some((Ok(error_event(passing.style)), None))
        };
        match next {
            Ok(Some(Ok(piece))) => Some((Ok::<_, Lost>(piece), Some(passing))),
            Ok(None) => None,
            Ok(Some(Err(Lost(reason)))) => lost(reason),
            Err(_) => lost("its worker is silent".to_owned()),
        }
    });
    let body = futures_util::stream::once(async { Ok(first) }).chain(rest);
    let mut response = Response::new(Body::from_stream(body));
    (*response.status_mut(), *response.headers_mut()) = (head.status, end_to_end(head.headers));
    Ok(response)
}
