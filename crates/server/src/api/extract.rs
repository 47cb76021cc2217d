//! Extractors of requests: the tenant, and a body of JSON within the server's limits.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
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

impl<T: DeserializeOwned + Send + 'static> FromRequest<App> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request<Body>, app: &App) -> Result<Json<T>> {
        let (limit, timeout) = (app.state.options.max_body, app.state.options.body_timeout);
        let too_large = || ApiError::too_large(format!("the body may have {limit} bytes"));
        // A browser lets pages of other origins send other content types without a preflight.
        let content_type = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        if !content_type.is_some_and(|of| of.to_ascii_lowercase().starts_with("application/json")) {
            let message = "the body must be application/json, and its content-type say so";
            return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
        }
        let length = request.headers().get(header::CONTENT_LENGTH);
        let length = length.and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
        if length.is_some_and(|length| length > limit as u64) {
            return Err(too_large());
        }
        let mut received = PartialBody { bytes_in_flight: &app.state.bytes_in_flight, bytes: Vec::new() };
        let max_in_flight = MAX_BYTES_IN_FLIGHT.max(2 * limit);
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
                    let message = "too many large requests are arriving";
                    let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message);
                    return Err(ApiError { retry_after: Some(1), ..error });
                }
            }
            Ok(())
        };
        let late = |_| {
            ApiError::new(StatusCode::REQUEST_TIMEOUT, format!("the body did not arrive within {timeout:?}"))
        };
        tokio::time::timeout(timeout, receive).await.map_err(late)??;
        let parse = |bytes: &[u8]| {
            serde_json::from_slice(bytes).map(Json).map_err(|error| ApiError {
                code: Some("invalid_json"),
                ..ApiError::new(
                    StatusCode::BAD_REQUEST,
                    format!("the body is not what this route takes: {error}"),
                )
            })
        };
        if received.bytes.len() <= SMALL_BODY {
            return parse(&received.bytes);
        }
        // The parsed value may take many times the bytes of the body.
        let bytes = received.release();
        app.preprocess(move || parse(&bytes)).await
    }
}
