//! Which chunks a request needs. A worker is asked, which has tokenizer, template, settings, documents and search: a gateway of its own
//! would have to be given all of them alike, and one that differs would find no chunk.

use std::time::Duration;

use axum::http::{HeaderValue, Request, StatusCode, header};
use bytes::Bytes;
use refrain_server::{ChunkPlan, TENANT_HEADER};
use tokio::time::timeout;

use super::Gateway;
use super::fleet::Wanted;
use super::proxy::whole;

/// Most time that a plan may take before a request is sent without one.
const PLAN_TIMEOUT: Duration = Duration::from_secs(2);

/// The chunks of a request, and the fingerprint of the model whose keys they have.
#[derive(Debug, Default)]
pub(super) struct Planned {
    pub(super) plan: ChunkPlan,
    pub(super) fingerprint: Option<String>,
}

/// The route of a worker that plans a request to `path`; none for paths that answer nothing.
pub(super) fn route(path: &str) -> Option<&'static str> {
    match path {
        "/v1/chat/completions" => Some("/internal/plan/chat"),
        "/v1/completions" => Some("/internal/plan/completion"),
        "/v1/responses" => Some("/internal/plan/response"),
        _ => None,
    }
}

impl Gateway {
    /// The chunks of a request with this body for the model `name`, of which the worker's `route` tells. Where no worker tells them, the request is sent without: the choice is then by
    /// load alone, and the worker that gets the request answers what is wrong with it.
    pub(super) async fn plan(
        &self,
        route: &'static str,
        tenant: &HeaderValue,
        (name, body): (Option<&str>, &Bytes),
    ) -> Planned {
        let started = std::time::Instant::now();
        let mut tried = Vec::new();
        // The second try is for a worker that has just gone, or has no room.
        while tried.len() < 2 {
            let wanted = Wanted { name, ..Wanted::default() };
            let Some(booking) = self.0.fleet.choose(&ChunkPlan::default(), wanted, &tried) else { break };
            tried.push(booking.worker);
            let fingerprint = Some(booking.kind.fingerprint.clone());
            let request = Request::post(route)
                .header(header::CONTENT_TYPE, "application/json")
                .header(TENANT_HEADER, tenant.clone())
                .body(body.clone());
            let Ok(request) = request else { break };
            let asked = async { whole(self.0.cluster.dispatch(booking.worker, request).await?).await };
            let answered = tokio::select! {
                answered = timeout(PLAN_TIMEOUT, asked) => answered,
                () = booking.gone.cancelled() => continue,
            };
            let Ok(Ok(answer)) = answered else { continue };
            if answer.is_refused() {
                continue;
            }
            if answer.status != StatusCode::OK {
                break;
            }
            if let Ok(plan) = serde_json::from_slice(&answer.body) {
                self.0.metrics.planned(started.elapsed());
                return Planned { plan, fingerprint };
            }
        }
        Planned::default()
    }
}
