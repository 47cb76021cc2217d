//! Extractors of requests: the tenant, and a body within the server's limits, of JSON or as it is.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use futures_util::StreamExt as _;
use serde::de::DeserializeOwned;

use crate::api_error::{ApiError, Result};
use crate::app::App;
use crate::tenant::Tenant;

/// Most bytes of a body that is parsed on the thread that received it.
const SMALL_BODY: usize = 64 << 10;
/// Most bytes of all bodies that are being received; twice the limit of one body where that is more.
const MAX_BYTES_IN_FLIGHT: usize = 256 << 20;

impl FromRequestParts<App> for Tenant {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Tenant> {
        app.tenant(&parts.headers)
    }
}

/// The text in the path of a route.
pub(super) struct PathText(pub(super) String);

impl FromRequestParts<App> for PathText {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<PathText> {
        // A path may hold bytes that are no UTF-8.
        let text = Path::<String>::from_request_parts(parts, app).await;
        text.map(|Path(text)| PathText(text))
            .map_err(|error| ApiError::new(error.status(), error.body_text()))
    }
}

/// The received part of a body, which counts among the bytes in flight until it is released or dropped.
struct PartialBody<'a> {
    bytes_in_flight: &'a AtomicUsize,
    bytes: Vec<u8>,
}

impl PartialBody<'_> {
    /// Appends a piece, and gives the bytes of all bodies in flight.
    fn push(&mut self, piece: &[u8]) -> usize {
        self.bytes.extend_from_slice(piece);
        self.bytes_in_flight.fetch_add(piece.len(), Relaxed) + piece.len()
    }

    /// The bytes, which are no longer counted.
    fn release(&mut self) -> Vec<u8> {
        self.bytes_in_flight.fetch_sub(self.bytes.len(), Relaxed);
        std::mem::take(&mut self.bytes)
    }
}

impl Drop for PartialBody<'_> {
    fn drop(&mut self) {
        self.release();
    }
}

/// A body of JSON, within the server's limits on bytes and time.
pub(super) struct Json<T>(pub(super) T);

/// Bytes of a received body that count among those in flight until this is dropped.
pub(super) struct HeldBytes {
    app: App,
    bytes: usize,
}

impl HeldBytes {
    /// # Errors
    /// If there are too many bytes in flight.
    pub(super) fn new(app: &App, bytes: usize) -> Result<HeldBytes> {
        let held = HeldBytes { app: app.clone(), bytes };
        match app.state.bytes_in_flight.fetch_add(bytes, Relaxed) + bytes > max_in_flight(app) {
            true => Err(busy()),
            false => Ok(held),
        }
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.app.state.bytes_in_flight.fetch_sub(self.bytes, Relaxed);
    }
}

fn max_in_flight(app: &App) -> usize {
    MAX_BYTES_IN_FLIGHT.max(2 * app.state.options.max_body)
}

fn busy() -> ApiError {
    let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "too many large requests are arriving");
    ApiError { retry_after: Some(1), ..error }
}

impl<T: DeserializeOwned + Send + 'static> FromRequest<App> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request<Body>, app: &App) -> Result<Json<T>> {
        // A browser lets pages of other origins send other content types without a preflight.
        if !has_type(request.headers(), "application/json") {
            let message = "the body must be application/json, and its content-type say so";
            return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
        }
        let bytes = receive(request, app).await?;
        let parse = |bytes: &[u8]| {
            serde_json::from_slice(bytes).map(Json).map_err(|error| ApiError {
                code: Some("invalid_json"),
                ..ApiError::new(
                    StatusCode::BAD_REQUEST,
                    format!("the body is not what this route takes: {error}"),
                )
            })
        };
        if bytes.len() <= SMALL_BODY {
            return parse(&bytes);
        }
        // The parsed value may take many times the bytes of the body.
        app.preprocess(move || parse(&bytes)).await
    }
}

/// Whether the content type is this one, whatever its parameters.
pub(super) fn has_type(headers: &HeaderMap, wanted: &str) -> bool {
    let given = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    given.is_some_and(|given| given.to_ascii_lowercase().starts_with(wanted))
}

/// The bytes of a body, within the server's limits on bytes and time.
///
/// # Errors
/// If the body is too large, breaks off or arrives too slowly, or too many bytes are arriving.
pub(super) async fn receive(request: Request<Body>, app: &App) -> Result<Vec<u8>> {
    let (limit, timeout) = (app.state.options.max_body, app.state.options.body_timeout);
    let too_large = || ApiError::too_large(format!("the body may have {limit} bytes"));
    let length = request.headers().get(header::CONTENT_LENGTH);
    let length = length.and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if length.is_some_and(|length| length > limit as u64) {
        return Err(too_large());
    }
    let mut received = PartialBody { bytes_in_flight: &app.state.bytes_in_flight, bytes: Vec::new() };
    let max_in_flight = max_in_flight(app);
    let receive = async {
        let mut body = request.into_body().into_data_stream();
        while let Some(piece) = body.next().await {
            let piece = piece.map_err(|error| {
                ApiError::new(StatusCode::BAD_REQUEST, format!("the body broke off: {error}"))
            })?;
            if received.bytes.len() + piece.len() > limit {
                return Err(too_large());
            }
            if received.push(&piece) > max_in_flight {
                return Err(busy());
            }
        }
        Ok(())
    };
    let late =
        |_| ApiError::new(StatusCode::REQUEST_TIMEOUT, format!("the body did not arrive within {timeout:?}"));
    tokio::time::timeout(timeout, receive).await.map_err(late)??;
    Ok(received.release())
}
