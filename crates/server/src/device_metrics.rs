//! Metrics of the device that computes, which are read from it when metrics are requested.

use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use refrain::kernels::Device;

/// A device's memory, where it has its own, and whether it has failed.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeviceMetrics {
    total: Gauge,
    free: Gauge,
    failed: Gauge,
}

impl DeviceMetrics {
    pub(crate) fn register(registry: &mut Registry) -> DeviceMetrics {
        let metrics = DeviceMetrics::default();
        for (name, help, gauge) in [
            ("memory_bytes", "Bytes of memory of the device, if it has its own", &metrics.total),
            ("memory_free_bytes", "Bytes of the device's memory that are free", &metrics.free),
            ("failed", "1 if the device computes no more until a restart", &metrics.failed),
        ] {
            registry.register(format!("refrain_device_{name}"), help, gauge.clone());
        }
        metrics
    }

    pub(crate) fn read(&self, device: &dyn Device) {
        if let Some(memory) = device.memory() {
            self.total.set(memory.total.try_into().unwrap_or(i64::MAX));
            self.free.set(memory.free.try_into().unwrap_or(i64::MAX));
        }
        self.failed.set(device.failure().is_some().into());
    }
}
