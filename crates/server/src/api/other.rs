//! What says how the server is, and what it can do.

use std::sync::LazyLock;

use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use refrain_eviction::POLICIES;
use refrain_fusion::METHODS;
use refrain_registry::{Entry, Registry};
use serde_json::{Value, json};

use super::{aside, json as answer_json};
use crate::app::{App, Caller};
use crate::error::{Problem, Result};

/// The OpenAPI document without the schemas of methods and policies.
const OPENAPI: &str = include_str!("../openapi.json");

fn told(app: &App) -> Value {
    let config = app.0.engine.decoder().config();
    json!({
        "id": app.0.options.model, "object": "model", "created": app.0.started, "owned_by": "refrain",
        "max_model_len": config.context,
    })
}

/// `GET /v1/models`
pub(super) async fn models(State(app): State<App>, _: Caller) -> Response {
    answer_json(json!({ "object": "list", "data": [told(&app)] }))
}

/// `GET /v1/models/{model}`
pub(super) async fn model(State(app): State<App>, _: Caller, Path(name): Path<String>) -> Result<Response> {
    if name == app.0.options.model {
        Ok(answer_json(told(&app)))
    } else {
        Err(Problem::not_found("model", &name))
    }
}

/// `GET /v1/methods`: fusion methods and eviction policies, with their options.
pub(super) async fn methods(State(app): State<App>) -> Response {
    fn entries<T>(registry: &Registry<T>) -> Vec<Value> {
        registry.entries.iter().map(Entry::to_json).collect()
    }
    answer_json(json!({
        "methods": entries(&METHODS), "policies": entries(&POLICIES),
        "default_method": app.0.options.method, "default_evict": app.0.options.evict,
    }))
}

/// `GET /health`: the process answers.
pub(super) async fn health() -> Response {
    answer_json(json!({ "status": "ok" }))
}

/// `GET /ready`: work is taken.
pub(super) async fn ready(State(app): State<App>) -> Response {
    match app.is_stopping() {
        false => answer_json(json!({ "status": "ready" })),
        true => {
            (StatusCode::SERVICE_UNAVAILABLE, answer_json(json!({ "status": "stopping" }))).into_response()
        }
    }
}

/// `GET /metrics`
pub(super) async fn metrics(State(app): State<App>) -> Result<Response> {
    let text = aside(move || Ok(app.0.metrics.text(app.0.engine.store()))).await?;
    Ok(([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text)
        .into_response())
}

/// `GET /openapi.json`
pub(super) async fn openapi() -> Response {
    static DOCUMENT: LazyLock<String> = LazyLock::new(|| {
        let mut document: Value = serde_json::from_str(OPENAPI).unwrap_or_default();
        let schemas = &mut document["components"]["schemas"];
        (schemas["FusionMethod"], schemas["EvictionPolicy"]) = (METHODS.schema(), POLICIES.schema());
        document.to_string()
    });
    ([(header::CONTENT_TYPE, "application/json")], DOCUMENT.as_str()).into_response()
}

/// What the page may load and do: its own style and script, and requests to this server.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; \
                      img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// `GET /`: the playground.
pub(super) async fn page() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    (headers, include_str!("../page/index.html")).into_response()
}

/// `GET /page.css`
pub(super) async fn style() -> Response {
    ([(header::CONTENT_TYPE, "text/css; charset=utf-8")], include_str!("../page/page.css")).into_response()
}

/// `GET /page.js`
pub(super) async fn script() -> Response {
    ([(header::CONTENT_TYPE, "text/javascript; charset=utf-8")], include_str!("../page/page.js"))
        .into_response()
}
