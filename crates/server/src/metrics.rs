//! What the server measures of itself, for Prometheus. Names are vLLM's where it has one, after `refrain:`.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use refrain_engine::Account;
use refrain_store::Store;

/// vLLM's buckets, in seconds.
const FIRST_TOKEN: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];
const BETWEEN_TOKENS: [f64; 17] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0];

/// Everything that is measured. Cheap to clone; clones count together.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    registry: Arc<Registry>,
    pub(crate) running: Gauge,
    pub(crate) waiting: Gauge,
    pub(crate) kv_usage: Gauge<f64, AtomicU64>,
    pub(crate) queue_seconds: Histogram,
    pub(crate) cancelled: Counter,
    pub(crate) rejected: Counter,
    first_token_seconds: Histogram,
    token_seconds: Histogram,
    prompt_tokens: Counter,
    generation_tokens: Counter,
    cache_queries: Counter,
    cache_hits: Counter,
    recomputed_tokens: Counter,
    repaired_chunks: Counter,
    bytes_loaded: Counter,
    pub(crate) answers: Counter,
    store: StoreMetrics,
    memory: Gauge,
}

/// What the store says when it is asked.
#[derive(Clone, Debug, Default)]
struct StoreMetrics {
    memory_bytes: Gauge,
    disk_bytes: Gauge,
    memory_hits: Gauge,
    disk_hits: Gauge,
    misses: Gauge,
    failures: Gauge,
    evictions: Gauge,
    #[cfg(feature = "remote")]
    pending: Gauge,
}

impl Metrics {
    pub(crate) fn new() -> Metrics {
        let mut registry = Registry::default();
        macro_rules! metric {
            ($name:expr, $help:expr, $made:expr) => {{
                let metric = $made;
                registry.register(concat!("refrain:", $name), $help, metric.clone());
                metric
            }};
        }
        let store = StoreMetrics {
            memory_bytes: metric!("store_memory_bytes", "Bytes of chunks in memory", Gauge::default()),
            disk_bytes: metric!("store_disk_bytes", "Bytes of chunks in the folder", Gauge::default()),
            memory_hits: metric!("store_memory_hits", "Chunks that memory had", Gauge::default()),
            disk_hits: metric!("store_disk_hits", "Chunks that the folder had", Gauge::default()),
            misses: metric!("store_misses", "Chunks that neither had", Gauge::default()),
            failures: metric!(
                "store_load_failures",
                "Chunk files that were broken or unreadable",
                Gauge::default()
            ),
            evictions: metric!(
                "store_evictions",
                "Chunks that went to make room, or in time",
                Gauge::default()
            ),
            #[cfg(feature = "remote")]
            pending: metric!(
                "store_remote_pending",
                "Chunks still to be brought to the object store",
                Gauge::default()
            ),
        };
        let memory = Gauge::default();
        registry.register(
            "process_resident_memory_bytes",
            "Bytes of memory that the process holds",
            memory.clone(),
        );
        Metrics {
            running: metric!("num_requests_running", "Answers under way", Gauge::default()),
            waiting: metric!("num_requests_waiting", "Requests in the queue", Gauge::default()),
            kv_usage: metric!(
                "kv_cache_usage_perc",
                "Share of the bytes of keys and values that answers may take, 1 is all",
                Gauge::default()
            ),
            queue_seconds: metric!(
                "request_queue_time_seconds",
                "Time in the queue",
                Histogram::new(FIRST_TOKEN)
            ),
            cancelled: metric!(
                "request_cancelled",
                "Requests whose client went away, or that took too long",
                Counter::default()
            ),
            rejected: metric!("request_rejected", "Requests that met a full queue", Counter::default()),
            first_token_seconds: metric!(
                "time_to_first_token_seconds",
                "Time from request to first token, queue and loading included",
                Histogram::new(FIRST_TOKEN)
            ),
            token_seconds: metric!(
                "inter_token_latency_seconds",
                "Time between tokens of an answer",
                Histogram::new(BETWEEN_TOKENS)
            ),
            prompt_tokens: metric!("prompt_tokens", "Tokens of prompts", Counter::default()),
            generation_tokens: metric!("generation_tokens", "Tokens of answers", Counter::default()),
            cache_queries: metric!(
                "prefix_cache_queries",
                "Prompt tokens that could be cached",
                Counter::default()
            ),
            cache_hits: metric!(
                "prefix_cache_hits",
                "Prompt tokens that came from the cache",
                Counter::default()
            ),
            recomputed_tokens: metric!(
                "recomputed_tokens",
                "Cached document tokens that were computed again at the deepest layer",
                Counter::default()
            ),
            repaired_chunks: metric!(
                "repaired_chunks",
                "Chunks that were prefilled for an answer",
                Counter::default()
            ),
            bytes_loaded: metric!(
                "kv_loaded_bytes",
                "Bytes of keys and values brought in",
                Counter::default()
            ),
            answers: metric!("request_success", "Answers that ended", Counter::default()),
            store,
            memory,
            registry: Arc::new(registry),
        }
    }

    pub(crate) fn first_token(&self, time: Duration, account: &Account) {
        self.first_token_seconds.observe(time.as_secs_f64());
        self.prompt_tokens.inc_by(account.prompt_tokens as u64);
        self.cache_queries.inc_by(account.prompt_tokens as u64);
        self.cache_hits.inc_by(account.cached_tokens as u64);
        self.recomputed_tokens.inc_by(account.recomputed_tokens as u64);
        self.repaired_chunks.inc_by(account.repaired_chunks as u64);
        self.bytes_loaded.inc_by(account.bytes_loaded);
    }

    /// A token was written, so long after the one before, if there is one.
    pub(crate) fn token(&self, since: Option<Duration>) {
        if let Some(since) = since {
            self.token_seconds.observe(since.as_secs_f64());
        }
        self.generation_tokens.inc();
    }

    /// In Prometheus' text format.
    pub(crate) fn text(&self, store: &Store) -> String {
        let (stats, own) = (store.stats(), &self.store);
        for (gauge, value) in [
            (&own.memory_bytes, stats.memory_bytes),
            (&own.disk_bytes, stats.disk_bytes),
            (&own.memory_hits, stats.memory_hits),
            (&own.disk_hits, stats.disk_hits),
            (&own.misses, stats.misses),
            (&own.failures, stats.removed + stats.unusable),
            (&own.evictions, stats.evicted),
        ] {
            gauge.set(value as i64);
        }
        if let Some(bytes) = resident() {
            self.memory.set(bytes);
        }
        #[cfg(feature = "remote")]
        if let Some(remote) = store.remote_stats() {
            own.pending.set(remote.pending as i64);
        }
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

/// Bytes of memory that this process holds, where the system tells.
fn resident() -> Option<i64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<i64>().ok().map(|kib| kib * 1024)
}
