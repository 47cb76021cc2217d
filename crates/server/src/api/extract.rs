//! Extractors of requests: the tenant, and a body within the server's limits, of JSON or as it is.

use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use serde::de::DeserializeOwned;

use crate::api_error::{ApiError, Result};
use crate::app::App;
use crate::body;
pub(super) use crate::body::HeldBytes;
use crate::tenant::Tenant;

/// Most bytes of a body that is parsed on the thread that received it.
const SMALL_BODY: usize = 64 << 10;

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

/// A body of JSON, within the server's limits on bytes and time. The bytes that it takes, its values included, count among those in flight until the
/// request is preprocessed: they go with its work.
pub(super) struct Json<T>(pub(super) T, pub(super) HeldBytes);

impl<T: DeserializeOwned + Send + 'static> FromRequest<App> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request<Body>, app: &App) -> Result<Json<T>> {
        // A browser lets pages of other origins send other content types without a preflight.
        if !has_type(request.headers(), "application/json") {
            let message = "the body must be application/json, and its content-type say so";
            return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
        }
        let tenant = app.tenant(request.headers())?;
        let (bytes, mut held) = receive(request, app, &tenant).await?;
        let (is_small, deadline) = (bytes.len() <= SMALL_BODY, app.deadline(held.since()));
        // The parsed value may take many times the bytes of the body.
        let parse = move || {
            held.resize_to_parsed(&bytes)?;
            Ok(Json(parse(&bytes)?, held))
        };
        if is_small { parse() } else { app.preprocess(tenant.namespace(), deadline, parse).await }
    }
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| {
        let message = format!("the body is not what this route takes: {error}");
        ApiError { code: Some("invalid_json"), ..ApiError::new(StatusCode::BAD_REQUEST, message) }
    })
}

/// Whether the content type is this one, whatever its parameters.
pub(super) fn has_type(headers: &HeaderMap, wanted: &str) -> bool {
    let given = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    given.is_some_and(|given| given.to_ascii_lowercase().starts_with(wanted))
}

/// The bytes of a tenant's body, within the server's limits on bytes and time. They count among those in flight.
///
/// # Errors
/// If the body is too large, breaks off or arrives too slowly, or too many bytes are arriving.
pub(super) async fn receive(
    request: Request<Body>,
    app: &App,
    tenant: &Tenant,
) -> Result<(Vec<u8>, HeldBytes)> {
    let held = app.state.bytes_in_flight.held_by(tenant.namespace());
    body::receive(request, &app.state.options, held).await
}
