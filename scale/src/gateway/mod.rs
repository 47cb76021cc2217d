//! The gateway: Refrain's HTTP interface before many workers. It checks API keys, and sends each request to the worker that holds its
//! chunks.

mod broadcast;
mod events;
mod fleet;
mod metrics;
mod models;
mod peek;
mod plan;
mod proxy;
mod routes;
mod stream;
#[cfg(test)]
mod tests;
mod transcript;

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use prometheus_client::metrics::counter::Counter;
use refrain::store::NamespaceKey;
use refrain_route::Rule;
use refrain_server::{BytesInFlight, Options};
use tokio_util::sync::CancellationToken;

use self::fleet::Fleet;
use self::metrics::Metrics;
pub(crate) use self::routes::router;
use crate::cluster::Cluster;

/// A gateway without a socket. A clone is cheap and shares everything.
#[derive(Clone)]
pub(crate) struct Gateway(Arc<State>);

struct State {
    cluster: Arc<dyn Cluster>,
    fleet: Fleet,
    options: Options,
    key: NamespaceKey,
    metrics: Metrics,
    /// Bytes of bodies that are being received, or whose requests are under way.
    bytes_in_flight: BytesInFlight,
    /// Is cancelled when requests are to end before their answers.
    stopping: CancellationToken,
}

impl Gateway {
    /// A gateway before the workers of a cluster, which it chooses by `rule`. `key` is the namespace key that it shares with them.
    pub(crate) fn new(
        cluster: Arc<dyn Cluster>,
        mut options: Options,
        key: NamespaceKey,
        rule: Rule,
    ) -> Gateway {
        options.limits.has_keys = !options.api_keys.is_empty();
        let (fleet, metrics) = (Fleet::new(rule), Metrics::new());
        let bytes_in_flight = BytesInFlight::new(&options, &options.limits);
        let stopping = CancellationToken::new();
        Gateway(Arc::new(State { cluster, fleet, options, key, metrics, bytes_in_flight, stopping }))
    }

    /// The number of requests that are refused for now.
    pub(crate) fn refusals(&self) -> Counter {
        self.0.metrics.requests.get_or_create_owned(&[("status", 503)])
    }

    /// Follows the workers for ever.
    pub(crate) async fn follow(self) {
        let mut events = self.0.cluster.state_events();
        while let Some(event) = events.next().await {
            self.0.fleet.apply(event);
        }
    }

    /// Waits until no request is under way, for at most `limit`. Those that are under way then end with an error.
    pub(crate) async fn drain(&self, limit: Duration) {
        let idle = async {
            while self.0.metrics.under_way() > 0 {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        if tokio::time::timeout(limit, idle).await.is_err() {
            self.0.stopping.cancel();
        }
    }
}
