//! Which chunks a request needs. A worker is asked, which has tokenizer, template, settings, documents and search: a gateway of its own
//! would have to be given all of them alike, and one that differs would find no chunk.

use std::time::Duration;

use axum::http::{HeaderValue, Request, StatusCode, header};
use bytes::Bytes;
use refrain_server::{ChunkPlan, TENANT_HEADER};
use tokio::time::timeout;

use super::Gateway;
use super::proxy::{Whole, whole};

/// Most time that a plan may take before a request is sent without one.
const PLAN_TIMEOUT: Duration = Duration::from_secs(2);

/// The chunks of a request, and the fingerprint of the model whose keys they have.
#[derive(Debug, Default)]
pub(super) struct Planned {
    pub(super) plan: ChunkPlan,
    pub(super) fingerprint: Option<String>,
}

/// The route of a worker that plans a request to `path`; none for requests that need no chunks.
pub(super) fn route(path: &str) -> Option<&'static str> {
    match path {
        "/v1/chat/completions" => Some("/internal/plan/chat"),
        "/v1/completions" => Some("/internal/plan/completion"),
        "/v1/responses" => Some("/internal/plan/response"),
        _ => None,
    }
}

impl Gateway {
    /// The chunks of a request to `path` with this body. Where no worker tells them, the request is sent without: the choice is then by
    /// load alone, and the worker that gets the request answers what is wrong with it.
    pub(super) async fn plan(&self, path: &str, tenant: &HeaderValue, body: &Bytes) -> Planned {
        // A request without documents has no chunks but the system part.
        let Some(route) = route(path).filter(|_| has_documents(body)) else { return Planned::default() };
        let started = std::time::Instant::now();
        let mut tried = Vec::new();
        // The second try is for a worker that has just gone.
        while tried.len() < 2 {
            let Some(booking) = self.0.fleet.choose(&ChunkPlan::default(), None, &tried) else { break };
            tried.push(booking.worker);
            let fingerprint = self.0.fleet.fingerprint(booking.worker);
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
            let Ok(Ok(Whole { status, body, .. })) = answered else { continue };
            if status != StatusCode::OK {
                break;
            }
            if let Ok(plan) = serde_json::from_slice(&body) {
                self.0.metrics.planned(started.elapsed());
                return Planned { plan, fingerprint };
            }
        }
        Planned::default()
    }
}

/// Whether a request's body has documents. The parser skips all other values.
fn has_documents(body: &[u8]) -> bool {
    #[derive(serde::Deserialize)]
    struct Request {
        #[serde(default)]
        documents: Option<serde::de::IgnoredAny>,
    }
    serde_json::from_slice::<Request>(body).is_ok_and(|request| request.documents.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_with_documents_are_planned() {
        for (body, wanted) in [
            (r#"{"documents": [{"id": "a"}]}"#, true),
            (r#"{"messages": [], "documents": "search"}"#, true),
            (r#"{"documents": null}"#, false),
            (r#"{"messages": [{"documents": []}]}"#, false),
            ("no JSON", false),
        ] {
            assert_eq!(has_documents(body.as_bytes()), wanted, "{body}");
        }
    }
}
