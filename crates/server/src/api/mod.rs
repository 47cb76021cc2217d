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

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode, Uri};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use tracing::Instrument as _;

use crate::api_error::ApiError;
use crate::app::App;
use crate::request_id::{REQUEST_ID, request_id};
use crate::request_span::RequestSpan;

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

/// Gives a request an id and a span, and counts and logs its status and time. The log has no content of the request.
async fn trace_request(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let id = request_id(request.headers());
    request.headers_mut().insert(REQUEST_ID, id.clone());
    let tenant = app.tenant(request.headers()).map_or_else(|_| "?".to_owned(), |tenant| tenant.name);
    let responses = app.state.metrics.requests.responses.clone();
    let target = (request.method(), request.uri().path());
    let under_way = RequestSpan::new(id.to_str().unwrap_or_default(), &tenant, target, responses);
    if let Some(set_parent) = app.state.options.set_parent {
        set_parent(&under_way.span, request.headers());
    }
    // A gateway has checked the name that its client gave.
    let checked = match app.signed_tenant(request.headers()) {
        Ok(_) => Ok(()),
        Err(_) => app.state.options.check_host(request.headers()),
    };
    let mut response = match checked {
        Ok(()) => next.run(request).instrument(under_way.span.clone()).await,
        Err(error) => error.into_response(),
    };
    under_way.respond(response.status().as_u16());
    response.headers_mut().insert(REQUEST_ID, id);
    response
}
