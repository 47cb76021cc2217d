//! The seam between the gateway and what connects it with its workers. All else is written against [`Cluster`].

use async_trait::async_trait;
use axum::http::{Request, Response};
use bytes::Bytes;
use futures_util::stream::BoxStream;
pub(crate) use refrain_route::WorkerId;
use refrain_server::Report;

/// What becomes known of a worker.
#[derive(Clone, Debug)]
pub(crate) enum WorkerEvent {
    /// The worker takes requests. The first report after it joined has all its chunks, and each later one the difference to the one before
    /// or all of them again.
    Reported(WorkerId, Box<Report>),
    /// The worker takes no more requests, and ends those that it has or breaks their connections off.
    Closed(WorkerId),
    /// The worker is silent or gone, so that what it has is not waited for.
    Left(WorkerId),
}

/// The connection to a worker broke, or could not be made.
#[derive(Clone, Debug, thiserror::Error)]
#[error("a worker was lost: {0}")]
pub(crate) struct Lost(pub(crate) String);

/// The bytes of a response as they come. An error is its last item.
pub(crate) type BodyStream = BoxStream<'static, Result<Bytes, Lost>>;

/// Workers, and the way to them.
#[async_trait]
pub(crate) trait Cluster: Send + Sync {
    /// What becomes known of the workers, from now on: each call gives events of its own.
    fn state_events(&self) -> BoxStream<'static, WorkerEvent>;

    /// Workers that belong to the cluster whether they are there or not.
    fn members(&self) -> Vec<WorkerId> {
        Vec::new()
    }

    /// Whether a worker of which reports were heard may be sent requests still.
    fn has(&self, _worker: WorkerId) -> bool {
        true
    }

    /// Completes when the cluster cannot be used any more, and the program has to be started anew.
    async fn stopped(&self) {
        std::future::pending().await
    }

    /// Sends a request to a worker, and gives its response as soon as its head is there. Dropping the response, or this future, has the
    /// worker end its work.
    ///
    /// # Errors
    /// If the worker cannot be reached, or breaks off before the response's head. What it did of the request is not known then.
    async fn dispatch(&self, worker: WorkerId, request: Request<Bytes>)
    -> Result<Response<BodyStream>, Lost>;
}
