//! Metrics of the device, and of loading keys and values into its memory.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use refrain::engine::{Engine, RequestStats};

/// Seconds, summed up.
type Seconds = Counter<f64, AtomicU64>;

/// The metrics of a device. A clone counts into the same metrics.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeviceMetrics {
    /// The device's memory, where it has its own.
    total: Gauge,
    free: Gauge,
    failed: Gauge,
    chunk_bytes: Gauge,
    chunk_hits: Gauge,
    chunk_misses: Gauge,
    copied: Counter,
    hidden: Seconds,
    waited: Seconds,
}

impl DeviceMetrics {
    /// Metrics of the device of this name, registered.
    pub(crate) fn register(registry: &mut Registry, name: &str) -> DeviceMetrics {
        let metrics = DeviceMetrics::default();
        let device = Info::new(vec![("name", name.to_owned())]);
        registry.register("refrain_device", "The device that computes", device);
        for (name, help, gauge) in [
            ("memory_bytes", "Bytes of memory of the device, if it has its own", &metrics.total),
            ("memory_free_bytes", "Bytes of the device's memory that are free", &metrics.free),
            ("failed", "1 if the device computes no more until a restart", &metrics.failed),
        ] {
            registry.register(format!("refrain_device_{name}"), help, gauge.clone());
        }
        let gauges = [
            ("bytes", "Bytes of chunks in the device's own memory", &metrics.chunk_bytes),
            ("hits", "Layers of chunks that the device's own memory had", &metrics.chunk_hits),
            ("misses", "Layers of chunks that the device's own memory had not", &metrics.chunk_misses),
        ];
        for (name, help, gauge) in gauges {
            registry.register(format!("refrain_device_chunk_cache_{name}"), help, gauge.clone());
        }
        registry.register(
            "refrain_device_copied_bytes",
            "Bytes of keys and values copied to the device's own memory",
            metrics.copied.clone(),
        );
        registry.register(
            "refrain_load_hidden_seconds",
            "Time in which keys and values were loaded while the computing thread did not wait for them",
            metrics.hidden.clone(),
        );
        registry.register(
            "refrain_load_wait_seconds",
            "Time in which the computing thread did nothing but wait for keys and values",
            metrics.waited.clone(),
        );
        metrics
    }

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
        self.chunk_hits.set(stats.hits as i64);
        self.chunk_misses.set(stats.misses as i64);
    }
}
