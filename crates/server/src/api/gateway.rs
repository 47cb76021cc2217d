//! Routes for a gateway before several servers, which shows by its signature that it has their namespace key.

use axum::extract::rejection::QueryRejection;
use axum::extract::{FromRequestParts, Query, State};
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use refrain::store::hex;
use serde::Deserialize;

use super::answer::{Input, plan};
use super::extract::Json;
use super::request::CompletionRequest;
use crate::api_error::{ApiError, Result};
use crate::app::App;
use crate::averages::Averages;
use crate::blocking::spawn_blocking;
use crate::gateway::{ModelCard, Rates, Report, short_key};
use crate::tenant::Tenant;

/// The tenant whom a gateway has signed a request of.
pub(super) struct Signed(pub(super) Tenant);

impl FromRequestParts<App> for Signed {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Signed> {
        app.signed_tenant(&parts.headers).map(Signed)
    }
}

/// The report that the gateway saw last.
#[derive(Debug, Deserialize)]
pub(super) struct ReportQuery {
    epoch: Option<u64>,
    sequence: Option<u64>,
}

/// Which chunks the server holds, as the difference to the last report where it can be told, and how busy it is.
pub(super) async fn report(
    State(app): State<App>,
    _: Signed,
    query: std::result::Result<Query<ReportQuery>, QueryRejection>,
) -> Result<Response> {
    let Query(query) = query.map_err(|error| ApiError::field("epoch", error.body_text()))?;
    let report = spawn_blocking(move || report_of(&app, query.epoch.zip(query.sequence))).await?;
    Ok(axum::Json(report).into_response())
}

/// The report for a reader that has seen the one of this epoch and sequence number.
fn report_of(app: &App, seen: Option<(u64, u64)>) -> Result<Report> {
    let (engine, options) = (&app.state.engine, &app.state.options);
    let held = || {
        let held = engine.store().held().map_err(|error| ApiError::internal(&error))?;
        Ok::<_, ApiError>(held.iter().map(short_key).collect())
    };
    let (epoch, sequence, chunks) = app.state.held.report(seen, held)?;
    let (running, waiting, averages) = app.state.scheduler.load();
    let Averages { seconds, bytes_per_second, .. } = averages;
    let link = engine.store().link_speed();
    let rates = Rates {
        seconds,
        tokens_per_second: averages.tokens_per_second(),
        bytes_per_second,
        remote_bytes_per_second: link.bytes_per_second.unwrap_or_default(),
        remote_latency: link.latency.unwrap_or_default(),
    };
    let model = ModelCard {
        name: options.served_model_name.clone(),
        fingerprint: hex::encode(&engine.fingerprint()),
        kv_bytes_per_token: engine.stored_token_bytes(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        numerics: engine.numerics().to_owned(),
    };
    let ready = app.state.corpus.is_synced() && engine.decoder().device().failure().is_none();
    let stopping = app.is_stopping();
    Ok(Report { epoch, sequence, chunks, running, waiting, rates, stopping, ready, model })
}

/// The chunks of the prompt of a request to `/v1/chat/completions`.
pub(super) async fn plan_chat(
    State(app): State<App>,
    Signed(tenant): Signed,
    Json(request, held): Json<CompletionRequest>,
) -> Result<Response> {
    Ok(axum::Json(plan(&app, tenant, (request, held), Input::Messages).await?).into_response())
}

/// The chunks of the prompt of a request to `/v1/completions`.
pub(super) async fn plan_completion(
    State(app): State<App>,
    Signed(tenant): Signed,
    Json(request, held): Json<CompletionRequest>,
) -> Result<Response> {
    Ok(axum::Json(plan(&app, tenant, (request, held), Input::Prompt).await?).into_response())
}
