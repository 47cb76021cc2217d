//! Metrics for Prometheus. A metric that vLLM has as well has vLLM's name, with the prefix `refrain_`.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, UNIX_EPOCH};

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use refrain::corpus::Corpus;
use refrain::engine::{Engine, RequestStats};
#[cfg(feature = "remote")]
use refrain::store::RemoteStats;

use crate::device_metrics::DeviceMetrics;
use crate::metric_declarations::{metrics, set_count};

/// vLLM's buckets of the time to the first token, in seconds.
const FIRST_TOKEN: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];
/// vLLM's buckets of the time between tokens, in seconds.
const BETWEEN_TOKENS: [f64; 17] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0];

/// Numbers of requests by the status of their responses.
pub(crate) type ByStatus = Family<[(&'static str, u16); 1], Counter>;
/// Numbers of requests by the code of their errors.
type ByCode = Family<[(&'static str, &'static str); 1], Counter>;

metrics! {
    /// Metrics of requests.
    struct RequestMetrics {
        pub(crate) running: Gauge, "num_requests_running", "Requests being computed: prompts, ingests and answers";
        pub(crate) waiting: Gauge, "num_requests_waiting", "Requests in the queue";
        pub(crate) kv_usage: Gauge<f64, AtomicU64>, "kv_cache_usage_perc", "Used share of the KV cache memory; 1 is all of it";
        pub(crate) queue_seconds: Histogram = Histogram::new(FIRST_TOKEN), "request_queue_time_seconds", "Time that requests spent in the queue";
        pub(crate) cancelled: Counter, "request_cancelled", "Requests whose client disconnected, or that timed out";
        pub(crate) rejected: Counter, "request_rejected", "Requests refused because the queue was full";
        failed: ByCode, "request_failed", "Requests whose computation failed, or whose documents could not be stored, by the code of the error";
        pub(crate) responses: ByStatus, "http_requests", "Requests by the status of their responses, without those of probes and gateways; 499 if the client left before";
        first_token_seconds: Histogram = Histogram::new(FIRST_TOKEN), "time_to_first_token_seconds", "Time from the arrival of a request to its first token";
        token_seconds: Histogram = Histogram::new(BETWEEN_TOKENS), "inter_token_latency_seconds", "Time between two tokens of an answer";
        prompt_tokens: Counter, "prompt_tokens", "Tokens of prompts";
        generation_tokens: Counter, "generation_tokens", "Tokens of answers";
        cache_queries: Counter, "prefix_cache_queries", "Prompt tokens looked up in the prefix cache";
        cache_hits: Counter, "prefix_cache_hits", "Prompt tokens taken over from the prefix cache";
        cached_tokens: Counter, "cached_tokens", "Prompt tokens whose keys and values came from the prefix cache or from stored chunks";
        prefix_cache_bytes: Gauge, "prefix_cache_bytes", "Bytes of keys and values in the prefix cache";
        recomputed_tokens: Counter, "recomputed_tokens", "Document tokens recomputed at the deepest layer";
        prefilled_chunks: Counter, "prefilled_chunks", "Chunks and system parts that were prefilled alone before an answer";
        unfetched_chunks: Counter, "unfetched_chunks", "Chunks and system parts that were prefilled alone because fetching them would take longer, or did";
        bytes_loaded: Counter, "kv_loaded_bytes", "Bytes of keys and values loaded from the chunk store";
        request_success: Counter, "request_success", "Requests answered";
        draft_tokens: Counter, "spec_decode_num_draft_tokens", "Tokens proposed from what was said before, and verified";
        accepted_tokens: Counter, "spec_decode_num_accepted_tokens", "Proposed tokens that were right";
    }
}

metrics! {
    /// Metrics of the chunk store, which are read from it when metrics are requested.
    struct StoreMetrics {
        memory_bytes: Gauge, "store_memory_bytes", "Bytes of chunks in memory";
        disk_bytes: Gauge, "store_disk_bytes", "Bytes of chunks in the folder";
        memory_hits: Counter, "store_memory_hits", "Lookups that found their chunk in memory";
        disk_hits: Counter, "store_disk_hits", "Lookups that found their chunk in the folder";
        misses: Counter, "store_misses", "Lookups that found no chunk";
        failures: Counter, "store_load_failures", "Chunk files that were broken or unreadable";
        not_stored: Counter, "store_not_stored", "Chunks that could not be written to the folder, as on a full disk";
        evictions: Counter, "store_evictions", "Chunks evicted for want of room, or expired";
    }
}

#[cfg(feature = "remote")]
metrics! {
    /// Metrics of the object store.
    struct RemoteMetrics {
        pending: Gauge, "store_remote_pending", "Chunks not yet uploaded to the object store";
        fetched: Counter, "store_remote_fetched", "Objects fetched from the object store";
        fetched_bytes: Counter, "store_remote_fetched_bytes", "Bytes of the objects fetched from the object store";
        sent: Counter, "store_remote_sent", "Objects uploaded to the object store";
        sent_bytes: Counter, "store_remote_sent_bytes", "Bytes of the objects uploaded to the object store";
        already_there: Counter, "store_remote_already_there", "Objects that were to be uploaded and were in the object store";
        failures: Counter, "store_remote_failures", "Requests to the object store that failed or timed out";
        broken: Counter, "store_remote_broken", "Objects of the object store that were broken";
        replaced: Counter, "store_remote_replaced", "Broken objects replaced by whole ones";
        passed_over: Counter, "store_remote_passed_over", "Chunks not fetched because computing them was expected to take less time";
        races_won: Counter, "store_remote_races_won", "Chunks that came later than expected, and before they were computed beside that";
        races_lost: Counter, "store_remote_races_lost", "Chunks that came later than expected, and were computed first";
    }
}

metrics! {
    /// Metrics of the stored documents, which are read from their store when metrics are requested.
    struct DocumentMetrics {
        count: Gauge, "documents", "Documents of all namespaces that this server knows";
        unsent: Gauge, "documents_unsent", "Documents with changes that the object store has not been told";
        syncs: Counter, "documents_syncs", "Times that the documents were brought in line with other servers";
        failures: Counter, "documents_sync_failures", "Times that this left something to be done";
        sync_interval: Gauge<f64, AtomicU64>, "documents_sync_interval_seconds", "Time between two looks for changes of other servers; 0 where documents are not shared";
        broken: Counter, "documents_broken_objects", "Objects met that are not the documents of their names";
        last_sync: Gauge<f64, AtomicU64>, "documents_last_sync_timestamp_seconds", "When the documents were last in line with the object store, seconds since 1970; 0 where they never were";
    }
}

/// The metrics of a server. A clone is cheap and counts into the same metrics.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    registry: Arc<Registry>,
    pub(crate) requests: RequestMetrics,
    device: DeviceMetrics,
    store: StoreMetrics,
    #[cfg(feature = "remote")]
    remote: RemoteMetrics,
    documents: DocumentMetrics,
    memory: Gauge,
}

#[cfg(feature = "remote")]
impl RemoteMetrics {
    fn set(&self, stats: &RemoteStats) {
        self.pending.set(stats.pending as i64);
        for (counter, count) in [
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
            set_count(counter, count);
        }
    }
}

impl DocumentMetrics {
    fn read(&self, corpus: &Corpus) {
        self.count.set(corpus.documents().count().unwrap_or_default() as i64);
        let Some(sharing) = corpus.sharing() else { return };
        self.unsent.set(sharing.unsent as i64);
        set_count(&self.syncs, sharing.syncs);
        set_count(&self.failures, sharing.failures);
        set_count(&self.broken, sharing.broken);
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
        let device_info = Info::new(vec![("name", device.to_owned())]);
        registry.register("refrain_device", "The device that computes", device_info);
        let memory = Gauge::default();
        let help = "Resident memory of the process in bytes";
        registry.register("process_resident_memory_bytes", help, memory.clone());
        Metrics {
            requests: RequestMetrics::register(&mut registry),
            device: DeviceMetrics::register(&mut registry),
            store: StoreMetrics::register(&mut registry),
            #[cfg(feature = "remote")]
            remote: RemoteMetrics::register(&mut registry),
            documents: DocumentMetrics::register(&mut registry),
            memory,
            registry: Arc::new(registry),
        }
    }

    /// Tells how often the documents are brought in line with other servers.
    pub(crate) fn set_sync_interval(&self, interval: Option<Duration>) {
        self.documents.sync_interval.set(interval.unwrap_or_default().as_secs_f64());
    }

    /// Counts a request whose first token came `time` after its arrival.
    pub(crate) fn first_token(&self, time: Duration, stats: &RequestStats) {
        let requests = &self.requests;
        requests.first_token_seconds.observe(time.as_secs_f64());
        requests.prompt_tokens.inc_by(stats.prompt_tokens as u64);
        requests.cache_queries.inc_by(stats.prompt_tokens as u64);
        requests.cache_hits.inc_by(stats.prefix_tokens as u64);
        requests.cached_tokens.inc_by(stats.found_tokens() as u64);
        requests.recomputed_tokens.inc_by(stats.recomputed_tokens as u64);
        requests.prefilled_chunks.inc_by(stats.prefilled_chunks as u64);
        requests.unfetched_chunks.inc_by(stats.unfetched_chunks as u64);
        requests.bytes_loaded.inc_by(stats.bytes_loaded);
        self.device.first_token(stats);
    }

    /// Counts a request whose computation failed, or whose documents could not be stored, by an error of this code.
    pub(crate) fn failed(&self, code: &'static str) {
        self.requests.failed.get_or_create(&[("code", code)]).inc();
    }

    /// Counts a request that was answered.
    pub(crate) fn finished(&self, stats: &RequestStats) {
        self.requests.request_success.inc();
        self.requests.draft_tokens.inc_by(stats.draft_tokens as u64);
        self.requests.accepted_tokens.inc_by(stats.accepted_draft_tokens as u64);
    }

    /// Counts a token; `latency` is the time since the answer's token before it.
    pub(crate) fn token(&self, latency: Option<Duration>) {
        if let Some(latency) = latency {
            self.requests.token_seconds.observe(latency.as_secs_f64());
        }
        self.requests.generation_tokens.inc();
    }

    /// All metrics in the text format of OpenMetrics.
    pub(crate) fn text(&self, engine: &Engine, corpus: &Corpus) -> String {
        self.documents.read(corpus);
        self.device.read(engine);
        let (stats, own) = (engine.store().stats(), &self.store);
        own.memory_bytes.set(stats.memory_bytes as i64);
        own.disk_bytes.set(stats.disk_bytes as i64);
        for (counter, count) in [
            (&own.memory_hits, stats.memory_hits),
            (&own.disk_hits, stats.disk_hits),
            (&own.misses, stats.misses),
            (&own.failures, stats.removed + stats.unusable),
            (&own.not_stored, stats.not_stored),
            (&own.evictions, stats.evicted),
        ] {
            set_count(counter, count);
        }
        self.requests.prefix_cache_bytes.set(engine.prefix_cache_bytes() as i64);
        if let Some(bytes) = refrain::system_bytes("/proc/self/status", "VmRSS:") {
            self.memory.set(bytes as i64);
        }
        #[cfg(feature = "remote")]
        if let Some(remote) = engine.store().remote_stats() {
            self.remote.set(&remote);
        }
        let mut text = String::new();
        // A write to a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}
