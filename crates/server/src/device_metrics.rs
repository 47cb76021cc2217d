//! Metrics of the device, and of loading keys and values into its memory.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use refrain::engine::{Engine, RequestStats};

use crate::metric_declarations::{metrics, set_count};

/// Seconds, summed up.
type Seconds = Counter<f64, AtomicU64>;

metrics! {
    /// The metrics of a device. A clone counts into the same metrics.
    struct DeviceMetrics {
        total: Gauge, "device_memory_bytes", "Bytes of memory of the device, if it has its own";
        free: Gauge, "device_memory_free_bytes", "Bytes of the device's memory that are free";
        failed: Gauge, "device_failed", "1 if the device computes no more until a restart";
        chunk_bytes: Gauge, "device_chunk_cache_bytes", "Bytes of chunks in the device's own memory";
        chunk_hits: Counter, "device_chunk_cache_hits", "Layers of chunks that the device's own memory had";
        chunk_misses: Counter, "device_chunk_cache_misses", "Layers of chunks that the device's own memory had not";
        copied: Counter, "device_copied_bytes", "Bytes of keys and values copied to the device's own memory";
        hidden: Seconds, "load_hidden_seconds", "Time in which keys and values were loaded while the computing thread did not wait for them";
        waited: Seconds, "load_wait_seconds", "Time in which the computing thread did nothing but wait for keys and values";
    }
}

impl DeviceMetrics {
    /// Counts the loading of a request up to its first token.
    pub(crate) fn first_token(&self, stats: &RequestStats) {
        self.copied.inc_by(stats.device_bytes_copied);
        self.hidden.inc_by(stats.load_hidden_seconds);
        self.waited.inc_by(stats.load_wait_seconds);
    }

    /// Reads what the engine's device holds.
    pub(crate) fn read(&self, engine: &Engine) {
        let device = engine.decoder().device();
        if let Some(memory) = device.memory() {
            self.total.set(memory.total.try_into().unwrap_or(i64::MAX));
            self.free.set(memory.free.try_into().unwrap_or(i64::MAX));
        }
        self.failed.set(device.failure().is_some().into());
        let stats = engine.device_chunk_stats();
        self.chunk_bytes.set(stats.bytes as i64);
        set_count(&self.chunk_hits, stats.hits);
        set_count(&self.chunk_misses, stats.misses);
    }
}
