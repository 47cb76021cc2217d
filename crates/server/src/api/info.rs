//! The model, the methods, and the state of the server.

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use refrain::eviction::POLICIES;
use refrain::fusion::METHODS;
use refrain::registry::{Entry, Registry};
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::extract::PathText;
use super::request::check_model;
use crate::api_error::{ErrorResponse, Result};
use crate::app::App;
use crate::blocking::spawn_blocking;
use crate::tenant::Tenant;

#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ModelResponse {
    id: String,
    /// `model`
    object: &'static str,
    /// Seconds since 1970 at which the server started.
    created: u64,
    /// `refrain`
    owned_by: &'static str,
    /// The model's context in tokens.
    max_model_len: usize,
    refrain: ModelDefaults,
}

/// What the server computes with, and the defaults of requests that name no method and no policy.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ModelDefaults {
    /// Fusion method with its options.
    method: String,
    /// Why that one.
    method_reason: String,
    /// Tokens that stand before every chunk while it is prefilled: `none`, `bos`, `system`, `averaged` over several, or `text` for one of its own.
    prefix: String,
    /// Eviction policy with its options.
    evict: String,
    /// Precision and kernels, such as `bf16-avx512`. Servers of the same compute the same bits of a chunk.
    numerics: String,
    /// Whether only chunks of these numerics are used.
    strict_numerics: bool,
    /// Most bytes of a request's body.
    max_body_bytes: usize,
}

#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ModelListResponse {
    /// `list`
    object: &'static str,
    data: Vec<ModelResponse>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(super) struct StatusResponse {
    /// `ok`, `ready`, `syncing`, `stopping` or `failed`.
    status: &'static str,
    /// Why the device computes no more, if it has failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

impl StatusResponse {
    /// The status of a server whose device has failed for good.
    fn of_failure(app: &App) -> Option<Response> {
        let failure = app.state.engine.decoder().device().failure()?;
        Some(StatusResponse { status: "failed", reason: Some(failure.to_string()) }.unavailable())
    }

    fn of(status: &'static str) -> StatusResponse {
        StatusResponse { status, reason: None }
    }

    fn unavailable(self) -> Response {
        (StatusCode::SERVICE_UNAVAILABLE, axum::Json(self)).into_response()
    }
}

fn model_response(app: &App) -> ModelResponse {
    let (options, engine) = (&app.state.options, &app.state.engine);
    let refrain = ModelDefaults {
        method: options.method.clone(),
        method_reason: options.method_reason.clone(),
        prefix: options.prefix.clone(),
        evict: options.evict.clone(),
        numerics: engine.numerics().to_owned(),
        strict_numerics: engine.settings().strict_numerics,
        max_body_bytes: options.max_body,
    };
    ModelResponse {
        refrain,
        id: options.served_model_name.clone(),
        object: "model",
        created: app.state.started,
        owned_by: "refrain",
        max_model_len: engine.decoder().config().context,
    }
}

/// List the model.
#[utoipa::path(
    get, path = "/v1/models",
    responses(
        (status = 200, description = "The model", body = ModelListResponse),
        (status = "4XX", description = "The request is refused", body = ErrorResponse),
    ),
)]
pub(super) async fn models(State(app): State<App>, _: Tenant) -> Response {
    axum::Json(ModelListResponse { object: "list", data: vec![model_response(&app)] }).into_response()
}

/// Show the model.
#[utoipa::path(
    get, path = "/v1/models/{model}", params(("model" = String, Path)),
    responses(
        (status = 200, description = "The model", body = ModelResponse),
        (status = "4XX", description = "The request is refused", body = ErrorResponse),
    ),
)]
pub(super) async fn model(State(app): State<App>, _: Tenant, PathText(model): PathText) -> Result<Response> {
    check_model(Some(&model), &app.state.options.served_model_name)?;
    Ok(axum::Json(model_response(&app)).into_response())
}

/// List fusion methods and eviction policies with their options.
#[utoipa::path(
    get, path = "/v1/methods", security(()),
    responses((status = 200, description = "Methods, policies, and the server's defaults", body = Object)),
)]
pub(super) async fn methods(State(app): State<App>) -> Response {
    fn entries<T>(registry: &Registry<T>) -> Vec<Value> {
        registry.entries.iter().map(Entry::to_json).collect()
    }
    let value = json!({
        "methods": entries(&METHODS), "policies": entries(&POLICIES),
        "default_method": app.state.options.method, "default_evict": app.state.options.evict,
    });
    axum::Json(value).into_response()
}

/// Whether the process answers, and can compute: if not, it is to be started again.
#[utoipa::path(
    get, path = "/health", security(()),
    responses(
        (status = 200, description = "It does", body = StatusResponse),
        (status = 503, description = "The device that computes has failed for good", body = StatusResponse),
    ),
)]
pub(super) async fn health(State(app): State<App>) -> Response {
    StatusResponse::of_failure(&app).unwrap_or_else(|| axum::Json(StatusResponse::of("ok")).into_response())
}

/// Whether the server takes requests.
#[utoipa::path(
    get, path = "/ready", security(()),
    responses(
        (status = 200, description = "It does", body = StatusResponse),
        (status = 503, description = "It is shutting down, has not yet compared its documents with those of other machines, or its device has failed", body = StatusResponse),
    ),
)]
pub(super) async fn ready(State(app): State<App>) -> Response {
    if let Some(failed) = StatusResponse::of_failure(&app) {
        return failed;
    }
    match (app.is_stopping(), app.state.corpus.is_synced()) {
        (true, _) => StatusResponse::of("stopping").unavailable(),
        (false, false) => StatusResponse::of("syncing").unavailable(),
        (false, true) => axum::Json(StatusResponse::of("ready")).into_response(),
    }
}

/// Metrics for Prometheus. With `--metrics-auth` they need an API key.
#[utoipa::path(
    get, path = "/metrics", security((), ("api_key" = [])),
    responses(
        (status = 200, description = "Metrics in the text format of OpenMetrics", body = String, content_type = "application/openmetrics-text"),
        (status = "4XX", description = "The request is refused", body = ErrorResponse),
        (status = "5XX", description = "The server failed", body = ErrorResponse),
    ),
)]
pub(super) async fn metrics(State(app): State<App>, headers: HeaderMap) -> Result<Response> {
    if app.state.options.metrics_auth {
        app.tenant(&headers)?;
    }
    let text =
        spawn_blocking(move || Ok(app.state.metrics.text(&app.state.engine, &app.state.corpus))).await?;
    let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, content_type)], text).into_response())
}
