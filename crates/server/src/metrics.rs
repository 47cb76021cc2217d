//! Metrics for Prometheus. A metric that vLLM has as well has vLLM's name, with the prefix `refrain_`.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, UNIX_EPOCH};

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use refrain::corpus::Corpus;
use refrain::engine::{Engine, RequestStats};
#[cfg(feature = "remote")]
use refrain::store::RemoteStats;

use crate::device_metrics::DeviceMetrics;

/// vLLM's buckets of the time to the first token, in seconds.
const FIRST_TOKEN: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];
/// vLLM's buckets of the time between tokens, in seconds.
const BETWEEN_TOKENS: [f64; 17] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0];

/// The metrics of a server. A clone is cheap and counts into the same metrics.
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
    cached_tokens: Counter,
    prefix_cache_bytes: Gauge,
    recomputed_tokens: Counter,
    prefilled_chunks: Counter,
    unfetched_chunks: Counter,
    bytes_loaded: Counter,
    request_success: Counter,
    draft_tokens: Counter,
    accepted_tokens: Counter,
    device: DeviceMetrics,
    store: StoreMetrics,
    documents: DocumentMetrics,
    memory: Gauge,
}

/// Metrics of the chunk store, which are read from it when metrics are requested.
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
    remote: RemoteMetrics,
}

/// Metrics of the object store.
#[cfg(feature = "remote")]
#[derive(Clone, Debug, Default)]
struct RemoteMetrics {
    pending: Gauge,
    fetched: Gauge,
    fetched_bytes: Gauge,
    sent: Gauge,
    sent_bytes: Gauge,
    already_there: Gauge,
    failures: Gauge,
    broken: Gauge,
    replaced: Gauge,
    passed_over: Gauge,
    races_won: Gauge,
    races_lost: Gauge,
}

#[cfg(feature = "remote")]
impl RemoteMetrics {
    fn set(&self, stats: &RemoteStats) {
        for (gauge, value) in [
            (&self.pending, stats.pending),
            (&self.fetched, stats.fetched),
            (&self.fetched_bytes, stats.fetched_bytes),
            (&self.sent, stats.sent),
            (&self.sent_bytes, stats.sent_bytes),
            (&self.already_there, stats.already_there),
            (&self.failures, stats.failures),
            (&self.broken, stats.broken),
            (&self.replaced, stats.replaced),
            (&self.passed_over, stats.passed_over),
            (&self.races_won, stats.races_won),
            (&self.races_lost, stats.races_lost),
        ] {
            gauge.set(value as i64);
        }
    }
}

/// Metrics of the stored documents, which are read from their store when metrics are requested.
#[derive(Clone, Debug, Default)]
struct DocumentMetrics {
    count: Gauge,
    unsent: Gauge,
    syncs: Gauge,
    failures: Gauge,
    broken: Gauge,
    last_sync: Gauge<f64, AtomicU64>,
}

impl DocumentMetrics {
    fn read(&self, corpus: &Corpus) {
        self.count.set(corpus.documents().count().unwrap_or_default() as i64);
        let Some(sharing) = corpus.sharing() else { return };
        self.unsent.set(sharing.unsent as i64);
        self.syncs.set(sharing.syncs as i64);
        self.failures.set(sharing.failures as i64);
        self.broken.set(sharing.broken as i64);
        let since_1970 = sharing.last_sync.and_then(|last| last.duration_since(UNIX_EPOCH).ok());
        self.last_sync.set(since_1970.unwrap_or_default().as_secs_f64());
    }
}

impl Metrics {
    /// Metrics of an engine of these numerics, on the device of this name.
    pub(crate) fn new(numerics: &str, device: &str) -> Metrics {
        let mut registry = Registry::default();
        let engine = Info::new(vec![("numerics", numerics.to_owned())]);
        registry.register("refrain_engine", "Precision and kernels of the engine", engine);
        let device = DeviceMetrics::register(&mut registry, device);
        macro_rules! metric {
            ($name:expr, $help:expr, $metric:expr) => {{
                let metric = $metric;
                registry.register(concat!("refrain_", $name), $help, metric.clone());
                metric
            }};
        }
        let store = StoreMetrics {
            memory_bytes: metric!("store_memory_bytes", "Bytes of chunks in memory", Gauge::default()),
            disk_bytes: metric!("store_disk_bytes", "Bytes of chunks in the folder", Gauge::default()),
            memory_hits: metric!(
                "store_memory_hits",
                "Lookups that found their chunk in memory",
                Gauge::default()
            ),
            disk_hits: metric!(
                "store_disk_hits",
                "Lookups that found their chunk in the folder",
                Gauge::default()
            ),
            misses: metric!("store_misses", "Lookups that found no chunk", Gauge::default()),
            failures: metric!(
                "store_load_failures",
                "Chunk files that were broken or unreadable",
                Gauge::default()
            ),
            evictions: metric!(
                "store_evictions",
                "Chunks evicted for want of room, or expired",
                Gauge::default()
            ),
            #[cfg(feature = "remote")]
            remote: RemoteMetrics {
                pending: metric!(
                    "store_remote_pending",
                    "Chunks not yet uploaded to the object store",
                    Gauge::default()
                ),
                fetched: metric!(
                    "store_remote_fetched",
                    "Objects fetched from the object store",
                    Gauge::default()
                ),
                fetched_bytes: metric!(
                    "store_remote_fetched_bytes",
                    "Bytes of the objects fetched from the object store",
                    Gauge::default()
                ),
                sent: metric!("store_remote_sent", "Objects uploaded to the object store", Gauge::default()),
                sent_bytes: metric!(
                    "store_remote_sent_bytes",
                    "Bytes of the objects uploaded to the object store",
                    Gauge::default()
                ),
                already_there: metric!(
                    "store_remote_already_there",
                    "Objects that were to be uploaded and were in the object store",
                    Gauge::default()
                ),
                failures: metric!(
                    "store_remote_failures",
                    "Requests to the object store that failed or timed out",
                    Gauge::default()
                ),
                broken: metric!(
                    "store_remote_broken",
                    "Objects of the object store that were broken",
                    Gauge::default()
                ),
                replaced: metric!(
                    "store_remote_replaced",
                    "Broken objects replaced by whole ones",
                    Gauge::default()
                ),
                passed_over: metric!(
                    "store_remote_passed_over",
                    "Chunks not fetched because computing them was expected to take less time",
                    Gauge::default()
                ),
                races_won: metric!(
                    "store_remote_races_won",
                    "Chunks that came later than expected, and before they were computed beside that",
                    Gauge::default()
                ),
                races_lost: metric!(
                    "store_remote_races_lost",
                    "Chunks that came later than expected, and were computed first",
                    Gauge::default()
                ),
            },
        };
        let documents = DocumentMetrics {
            count: metric!(
                "documents",
                "Documents of all namespaces that this server knows",
                Gauge::default()
            ),
            unsent: metric!(
                "documents_unsent",
                "Documents with changes that the object store has not been told",
                Gauge::default()
            ),
            syncs: metric!(
                "documents_syncs",
                "Times that the documents were brought in line with other servers",
                Gauge::default()
            ),
            failures: metric!(
                "documents_sync_failures",
                "Times that this left something to be done",
                Gauge::default()
            ),
            broken: metric!(
                "documents_broken_objects",
                "Objects met that are not the documents of their names",
                Gauge::default()
            ),
            last_sync: metric!(
                "documents_last_sync_timestamp_seconds",
                "When the documents were last in line with the object store, seconds since 1970; 0 where they never were",
                Gauge::default()
            ),
        };
        let memory = Gauge::default();
        registry.register(
            "process_resident_memory_bytes",
            "Resident memory of the process in bytes",
            memory.clone(),
        );
        Metrics {
            running: metric!(
                "num_requests_running",
                "Requests being computed: prompts, ingests and answers",
                Gauge::default()
            ),
            waiting: metric!("num_requests_waiting", "Requests in the queue", Gauge::default()),
            kv_usage: metric!(
                "kv_cache_usage_perc",
                "Used share of the KV cache memory; 1 is all of it",
                Gauge::default()
            ),
            queue_seconds: metric!(
                "request_queue_time_seconds",
                "Time that requests spent in the queue",
                Histogram::new(FIRST_TOKEN)
            ),
            cancelled: metric!(
                "request_cancelled",
                "Requests whose client disconnected, or that timed out",
                Counter::default()
            ),
            rejected: metric!(
                "request_rejected",
                "Requests refused because the queue was full",
                Counter::default()
            ),
            first_token_seconds: metric!(
                "time_to_first_token_seconds",
                "Time from the arrival of a request to its first token",
                Histogram::new(FIRST_TOKEN)
            ),
            token_seconds: metric!(
                "inter_token_latency_seconds",
                "Time between two tokens of an answer",
                Histogram::new(BETWEEN_TOKENS)
            ),
            prompt_tokens: metric!("prompt_tokens", "Tokens of prompts", Counter::default()),
            generation_tokens: metric!("generation_tokens", "Tokens of answers", Counter::default()),
            cache_queries: metric!(
                "prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache",
                Counter::default()
            ),
            cache_hits: metric!(
                "prefix_cache_hits",
                "Prompt tokens taken over from the prefix cache",
                Counter::default()
            ),
            cached_tokens: metric!(
                "cached_tokens",
                "Prompt tokens whose keys and values came from the prefix cache or from stored chunks",
                Counter::default()
            ),
            prefix_cache_bytes: metric!(
                "prefix_cache_bytes",
                "Bytes of keys and values in the prefix cache",
                Gauge::default()
            ),
            recomputed_tokens: metric!(
                "recomputed_tokens",
                "Document tokens recomputed at the deepest layer",
                Counter::default()
            ),
            prefilled_chunks: metric!(
                "prefilled_chunks",
                "Chunks and system parts that were prefilled alone before an answer",
                Counter::default()
            ),
            unfetched_chunks: metric!(
                "unfetched_chunks",
                "Chunks and system parts that were prefilled alone because fetching them would take longer, or did",
                Counter::default()
            ),
            bytes_loaded: metric!(
                "kv_loaded_bytes",
                "Bytes of keys and values loaded from the chunk store",
                Counter::default()
            ),
            request_success: metric!("request_success", "Requests answered", Counter::default()),
            draft_tokens: metric!(
                "spec_decode_num_draft_tokens",
                "Tokens proposed from what was said before, and verified",
                Counter::default()
            ),
            accepted_tokens: metric!(
                "spec_decode_num_accepted_tokens",
                "Proposed tokens that were right",
                Counter::default()
            ),
            device,
            store,
            documents,
            memory,
            registry: Arc::new(registry),
        }
    }

    /// Counts a request whose first token came `time` after its arrival.
    pub(crate) fn first_token(&self, time: Duration, stats: &RequestStats) {
        self.first_token_seconds.observe(time.as_secs_f64());
        self.prompt_tokens.inc_by(stats.prompt_tokens as u64);
        self.cache_queries.inc_by(stats.prompt_tokens as u64);
        self.cache_hits.inc_by(stats.prefix_tokens as u64);
        self.cached_tokens.inc_by(stats.found_tokens() as u64);
        self.recomputed_tokens.inc_by(stats.recomputed_tokens as u64);
        self.prefilled_chunks.inc_by(stats.prefilled_chunks as u64);
        self.unfetched_chunks.inc_by(stats.unfetched_chunks as u64);
        self.bytes_loaded.inc_by(stats.bytes_loaded);
        self.device.first_token(stats);
    }

    /// Counts a request that was answered.
    pub(crate) fn finished(&self, stats: &RequestStats) {
        self.request_success.inc();
        self.draft_tokens.inc_by(stats.draft_tokens as u64);
        self.accepted_tokens.inc_by(stats.accepted_draft_tokens as u64);
    }

    /// Counts a token; `latency` is the time since the answer's token before it.
    pub(crate) fn token(&self, latency: Option<Duration>) {
        if let Some(latency) = latency {
            self.token_seconds.observe(latency.as_secs_f64());
        }
        self.generation_tokens.inc();
    }

    /// All metrics in the text format of OpenMetrics.
    pub(crate) fn text(&self, engine: &Engine, corpus: &Corpus) -> String {
        self.documents.read(corpus);
        self.device.read(engine);
        let (stats, own) = (engine.store().stats(), &self.store);
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
        self.prefix_cache_bytes.set(engine.prefix_cache_bytes() as i64);
        if let Some(bytes) = resident_memory() {
            self.memory.set(bytes);
        }
        #[cfg(feature = "remote")]
        if let Some(remote) = engine.store().remote_stats() {
            own.remote.set(&remote);
        }
        let mut text = String::new();
        // A write to a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

/// Resident memory of this process in bytes, where the system tells it.
fn resident_memory() -> Option<i64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<i64>().ok().map(|kib| kib * 1024)
}
