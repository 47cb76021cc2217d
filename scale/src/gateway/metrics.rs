//! Metrics of the gateway for Prometheus. Workers have their own.

use std::sync::Arc;
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::fleet::Fleet;

/// Buckets of times, in seconds, up to those of a request's default timeout.
const SECONDS: [f64; 17] =
    [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0, 120.0, 300.0, 600.0];

/// What became of a stream whose worker was lost after its first event.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Replay {
    /// Another worker goes on with it.
    Continued,
    /// Another worker gave another answer.
    Differed,
    /// No worker of its kind was left.
    NoWorker,
    /// The rest of the stream does not follow from its request.
    NotRepeatable,
}

type ByOutcome = Family<[(&'static str, &'static str); 1], Counter>;
pub(crate) type ByStatus = Family<[(&'static str, u16); 1], Counter>;

/// The metrics of a gateway. A clone is cheap and counts into the same metrics.
#[derive(Clone)]
pub(crate) struct Metrics {
    registry: Arc<Registry>,
    under_way: Gauge,
    /// Requests by the status of their responses.
    pub(crate) requests: ByStatus,
    retries: Counter,
    replays: ByOutcome,
    chunk_tokens: Counter,
    local_tokens: Counter,
    plan_seconds: Histogram,
    first_byte_seconds: Histogram,
    workers: Gauge,
}

/// A request that counts as under way until this is dropped.
pub(crate) struct UnderWay(Gauge);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.dec();
    }
}

impl Metrics {
    pub(crate) fn new() -> Metrics {
        let mut registry = Registry::with_prefix("refrain_gateway");
        macro_rules! metric {
            ($name:expr, $help:expr, $metric:expr) => {{
                let metric = $metric;
                registry.register($name, $help, metric.clone());
                metric
            }};
        }
        Metrics {
            under_way: metric!("num_requests", "Requests under way", Gauge::default()),
            requests: metric!(
                "requests",
                "Requests by the status of their responses, without those of probes; 499 if the client left before",
                ByStatus::default()
            ),
            retries: metric!(
                "retries",
                "Times that a request was sent to a further worker",
                Counter::default()
            ),
            replays: metric!(
                "replays",
                "Streams whose worker was lost after their first event, by what became of them",
                ByOutcome::default()
            ),
            chunk_tokens: metric!(
                "chunk_tokens",
                "Tokens of chunks of requests that a worker answered",
                Counter::default()
            ),
            local_tokens: metric!(
                "local_chunk_tokens",
                "Tokens of chunks that the worker which answered held",
                Counter::default()
            ),
            plan_seconds: metric!(
                "plan_seconds",
                "Time until a worker told the chunks of a request",
                Histogram::new(SECONDS)
            ),
            first_byte_seconds: metric!(
                "time_to_first_byte_seconds",
                "Time from the arrival of a request to the first byte of its response",
                Histogram::new(SECONDS)
            ),
            workers: metric!("workers", "Workers that take requests", Gauge::default()),
            registry: Arc::new(registry),
        }
    }

    pub(crate) fn begin(&self) -> UnderWay {
        self.under_way.inc();
        UnderWay(self.under_way.clone())
    }

    pub(crate) fn under_way(&self) -> i64 {
        self.under_way.get()
    }

    /// Counts a response that begins `time` after its request arrived.
    pub(crate) fn responded(&self, time: Duration) {
        self.first_byte_seconds.observe(time.as_secs_f64());
    }

    pub(crate) fn retried(&self) {
        self.retries.inc();
    }

    pub(crate) fn replayed(&self, outcome: Replay) {
        let outcome = match outcome {
            Replay::Continued => "continued",
            Replay::Differed => "differed",
            Replay::NoWorker => "no_worker",
            Replay::NotRepeatable => "not_repeatable",
        };
        self.replays.get_or_create(&[("outcome", outcome)]).inc();
    }

    /// Counts the tokens of a request's chunks, and those that the worker which answers it holds.
    pub(crate) fn answered(&self, local_tokens: u64, chunk_tokens: u64) {
        self.local_tokens.inc_by(local_tokens);
        self.chunk_tokens.inc_by(chunk_tokens);
    }

    pub(crate) fn planned(&self, time: Duration) {
        self.plan_seconds.observe(time.as_secs_f64());
    }

    /// All metrics in the text format of OpenMetrics.
    pub(crate) fn text(&self, fleet: &Fleet) -> String {
        self.workers.set(fleet.ids().len() as i64);
        let mut text = String::new();
        // A write to a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}
