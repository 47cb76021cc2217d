//! Requests that concern the chunks of every worker: a document that is removed, pinned, or let go again.

use std::time::Duration;

use axum::body::Body;
use axum::http::{Method, Response, StatusCode};
use futures_util::future::join_all;
use refrain_server::ApiError;
use tokio::time::timeout;

use super::Gateway;
use super::proxy::{Outgoing, Whole, whole};
use crate::cluster::Lost;

/// Most time that a worker may take: it deletes files and asks the object store.
const BROADCAST_TIMEOUT: Duration = Duration::from_secs(30);

/// Whether every worker has to do what a request asks for.
pub(super) fn is_for_all(method: &Method, path: &str) -> bool {
    let document = path.strip_prefix("/v1/documents/").filter(|rest| !rest.is_empty());
    match *method {
        Method::DELETE => document.is_some_and(|rest| !rest.contains('/')),
        Method::POST => document.is_some_and(|rest| rest.ends_with("/pin")),
        _ => false,
    }
}

/// What all workers together answer: the worst of their answers, where one that does not know the document leaves it to the others.
fn worst(answers: Vec<Whole>) -> Option<Whole> {
    let rank = |answer: &Whole| match answer.status {
        StatusCode::NOT_FOUND => 0,
        status if status.is_success() => 1,
        status if status.is_client_error() => 2,
        _ => 3,
    };
    answers.into_iter().max_by_key(rank)
}

impl Gateway {
    /// Has every worker answer a request, all at once: those that take no requests now as well, which keep their chunks. A worker that left the
    /// cluster and ends its last requests cannot be asked.
    ///
    /// # Errors
    /// If no worker is known, or one is away, lost or silent: the request is to be sent again then, which is safe.
    pub(super) async fn broadcast(&self, request: &Outgoing) -> Result<Response<Body>, ApiError> {
        let unavailable =
            |message: String| ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code("no_worker");
        let mut workers = self.0.fleet.known();
        workers.retain(|worker| self.0.cluster.has(*worker));
        workers.extend(self.0.cluster.members());
        workers.sort_unstable();
        workers.dedup();
        let ask = |worker| async move {
            let sent = async {
                whole(self.0.cluster.dispatch(worker, request.request()?).await.map_err(lost)?)
                    .await
                    .map_err(lost)
            };
            let silent = |_| Err(lost(Lost(format!("{worker}: no answer within {BROADCAST_TIMEOUT:?}"))));
            timeout(BROADCAST_TIMEOUT, sent).await.unwrap_or_else(silent)
        };
        let answers = join_all(workers.into_iter().map(ask)).await;
        // All have been asked by now, and what one of them failed to do can be repeated.
        worst(answers.into_iter().collect::<Result<_, _>>()?)
            .map(Whole::response)
            .ok_or_else(|| unavailable("no worker takes requests".to_owned()))
    }
}

fn lost(error: Lost) -> ApiError {
    let message =
        format!("{error}, and may still hold what is to be removed: send the request again, which is safe");
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code("worker_lost")
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderMap;
    use bytes::Bytes;

    use super::*;

    #[test]
    fn removals_and_pins_concern_all_workers() {
        for (method, path, wanted) in [
            (Method::DELETE, "/v1/documents/doc-1", true),
            (Method::POST, "/v1/documents/doc-1/pin", true),
            (Method::GET, "/v1/documents/doc-1", false),
            (Method::POST, "/v1/documents", false),
            (Method::DELETE, "/v1/documents/", false),
        ] {
            assert_eq!(is_for_all(&method, path), wanted, "{method} {path}");
        }
    }

    #[test]
    fn the_worst_answer_is_that_of_all() {
        let answers = |statuses: &[u16]| {
            let whole = |status: &u16| Whole {
                status: StatusCode::from_u16(*status).unwrap(),
                headers: HeaderMap::new(),
                body: Bytes::new(),
            };
            worst(statuses.iter().map(whole).collect()).map(|answer| answer.status.as_u16())
        };
        assert_eq!(answers(&[404, 200, 404]), Some(200));
        assert_eq!(answers(&[404, 404]), Some(404));
        assert_eq!(answers(&[200, 503, 200]), Some(503));
        assert_eq!(answers(&[200, 401, 404]), Some(401));
        assert_eq!(answers(&[]), None);
    }
}
