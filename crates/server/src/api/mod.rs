//! The routes, and what all of them share: a check of the host, a span and an id for each request, and CORS.

mod answer;
mod completions;
mod details;
mod documents;
mod events;
mod extract;
mod files;
mod gateway;
mod info;
mod logprobs;
mod messages;
mod openapi;
mod page;
mod parts;
mod request;
mod response;
mod responses;
mod sources;
mod tokenize;
mod upload;

use std::time::Instant;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, StatusCode, Uri};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use tracing::Instrument as _;

use crate::REQUEST_ID;
use crate::api_error::ApiError;
use crate::app::App;
use crate::random::random_id;

/// All routes of a server.
pub fn router(app: App) -> Router {
    let router = Router::new()
        .route("/v1/chat/completions", post(completions::chat))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/responses", post(responses::respond))
        .route("/v1/embeddings", post(tokenize::embeddings))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/v1/models", get(info::models))
        .route("/v1/models/{*model}", get(info::model))
        .route("/v1/documents", get(documents::list).post(documents::add))
        .route("/v1/documents/{id}", get(documents::show).delete(documents::remove))
        .route("/v1/documents/{id}/pin", post(documents::pin))
        .route("/v1/methods", get(info::methods))
        .route("/health", get(info::health))
        .route("/ready", get(info::ready))
        .route("/metrics", get(info::metrics))
        .route("/openapi.json", get(openapi::openapi))
        .route("/internal/report", get(gateway::report))
        .route("/internal/plan/chat", post(gateway::plan_chat))
        .route("/internal/plan/completion", post(gateway::plan_completion))
        .route("/internal/plan/response", post(responses::plan_response))
        .merge(page::routes())
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed);
    let router = match app.state.options.cors() {
        Some(cors) => router.layer(cors),
        None => router,
    };
    router.layer(from_fn_with_state(app.clone(), trace_request)).with_state(app)
}

async fn not_found(uri: Uri) -> ApiError {
    ApiError::not_found("path", uri.path())
}

async fn method_not_allowed(method: Method, uri: Uri) -> ApiError {
    let message = format!("{} takes no {method}", uri.path());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message)
}

/// Gives a request an id and a span, and logs its status and time. The log has no content of the request.
async fn trace_request(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let started = Instant::now();
    let is_valid = |id: &HeaderValue| {
        let is_allowed = |b: &u8| b.is_ascii_alphanumeric() || b"-_.".contains(b);
        (1..=64).contains(&id.len()) && id.as_bytes().iter().all(is_allowed)
    };
    let id = request.headers().get(REQUEST_ID).filter(|id| is_valid(id)).cloned();
    let id = id.unwrap_or_else(|| {
        HeaderValue::from_str(&random_id("req-")).unwrap_or(HeaderValue::from_static("req"))
    });
    request.headers_mut().insert(REQUEST_ID, id.clone());
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let tenant = app.tenant(request.headers()).map_or_else(|_| "?".to_owned(), |tenant| tenant.name);
    // What gateways ask comes several times a second.
    let is_internal = path.starts_with("/internal/");
    let id_text = id.to_str().unwrap_or_default();
    let span = match is_internal {
        true => tracing::debug_span!("request", id = id_text, tenant, %method, path),
        false => tracing::info_span!("request", id = id_text, tenant, %method, path),
    };
    // A gateway has checked the name that its client gave.
    let checked = match app.signed_tenant(request.headers()) {
        Ok(_) => Ok(()),
        Err(_) => app.state.options.check_host(request.headers()),
    };
    let mut response = match checked {
        Ok(()) => next.run(request).instrument(span.clone()).await,
        Err(error) => error.into_response(),
    };
    let (status, ms) = (response.status().as_u16(), started.elapsed().as_millis() as u64);
    // The body of a stream is still to come.
    span.in_scope(|| match is_internal {
        true => tracing::debug!(status, ms, "responded"),
        false => tracing::info!(status, ms, "responded"),
    });
    response.headers_mut().insert(REQUEST_ID, id);
    response
}
