//! Each call of a layer on a GPU beside the GPU's own measured peaks.
//!
//! A call can do no better than the slowest of three: its operations at the peak of tensor cores, its bytes (weights, keys and values,
//! activations, each moved once) at the peak of the GPU's memory, and what comes from the host at the peak of the bus. Calls are queued one behind
//! the other and waited for together, except those that tell the host something.

use std::time::Instant;

use anyhow::Result;
use refrain_cuda::{PeakWork, Peaks};
use refrain_kernels::{Device, DeviceFailure};
use serde::Serialize;

use crate::gpu_cases::{Call, GpuCase, Shapes, gpu_cases};
use crate::numbers::{self, microseconds, number};

/// The GPU's peaks: operations a second on tensor cores, bytes a second of its memory and from the host.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct GpuPeaks {
    pub(crate) bf16_flops: f64,
    pub(crate) memory_bytes: f64,
    pub(crate) bus_bytes: f64,
}

impl GpuPeaks {
    fn measure(device: &dyn Peaks, work: PeakWork) -> Result<GpuPeaks> {
        Ok(GpuPeaks {
            bf16_flops: device.peak_bf16(work)?,
            memory_bytes: device.peak_memory(work)?,
            bus_bytes: device.peak_bus(work)?,
        })
    }

    fn line(&self) -> String {
        let [bf16, memory, bus] =
            [self.bf16_flops / 1e12, self.memory_bytes / 1e9, self.bus_bytes / 1e9].map(number);
        format!(
            "Peaks: bf16 {bf16} TFLOP/s, memory {memory} GB/s, from pinned memory of the host {bus} GB/s."
        )
    }
}

/// One case, measured.
#[derive(Debug, Serialize)]
pub(crate) struct GpuRow {
    pub(crate) kernel: &'static str,
    pub(crate) shape: String,
    /// Seconds of a call, of several runs of calls.
    pub(crate) median_seconds: f64,
    pub(crate) flops: f64,
    pub(crate) bytes_per_second: f64,
    /// The bound of the call: `bf16`, `memory` or `bus`.
    pub(crate) bound: &'static str,
    /// Seconds that the bound alone would take.
    pub(crate) bound_seconds: f64,
    /// `bound_seconds` over the median.
    pub(crate) share: f64,
}

impl GpuRow {
    fn new(case: &GpuCase, median: f64, peaks: &GpuPeaks) -> GpuRow {
        let bounds = [
            ("bf16", case.operations / peaks.bf16_flops),
            ("memory", case.bytes / peaks.memory_bytes),
            ("bus", case.bus_bytes / peaks.bus_bytes),
        ];
        let (bound, seconds) = bounds.into_iter().fold(("bf16", 0.0), |a, b| if b.1 > a.1 { b } else { a });
        GpuRow {
            kernel: case.kernel,
            shape: case.shape.clone(),
            median_seconds: median,
            flops: case.operations / median,
            bytes_per_second: (case.bytes + case.bus_bytes) / median,
            bound,
            bound_seconds: seconds,
            share: seconds / median,
        }
    }

    fn line(&self) -> String {
        format!(
            "| {} | {} | {} | {} | {} | {} | {} | {:.0} % |",
            self.kernel,
            self.shape,
            microseconds(self.median_seconds),
            number(self.flops / 1e12),
            number(self.bytes_per_second / 1e9),
            microseconds(self.bound_seconds),
            self.bound,
            100.0 * self.share,
        )
    }
}

/// The work of a measurement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    pub(crate) peaks: PeakWork,
    pub(crate) shapes: Shapes,
    /// Runs of each case.
    pub(crate) runs: usize,
    /// Least seconds of the calls of a run.
    pub(crate) run_seconds: f64,
}

impl Effort {
    /// Shapes of Llama 3 8B.
    pub(crate) fn whole(runs: usize) -> Effort {
        Effort { peaks: PeakWork::default(), shapes: Shapes::llama_8b(), runs, run_seconds: 1e-2 }
    }

    /// Small shapes, each called a few times: for emulated threads.
    pub(crate) fn tiny() -> Effort {
        let peaks = PeakWork { blocks: 2, rounds: 2, bytes: 1 << 20, runs: 2 };
        Effort { peaks, shapes: Shapes::tiny(), runs: 2, run_seconds: 0.0 }
    }
}

/// Measures the peaks and all cases; `each` is told the row that was measured last.
pub(crate) fn measure(
    device: &dyn Peaks,
    effort: &Effort,
    mut each: impl FnMut(&GpuRow),
) -> Result<(GpuPeaks, Vec<GpuRow>)> {
    let peaks = GpuPeaks::measure(device, effort.peaks)?;
    let mut rows = Vec::new();
    for mut case in gpu_cases(&effort.shapes) {
        let prepare = std::mem::replace(&mut case.prepare, Box::new(|_| Box::new(|_| ())));
        let mut call = DeviceFailure::catch(|| prepare(device))?;
        let row = GpuRow::new(&case, median(device, &mut call, effort)?, &peaks);
        each(&row);
        rows.push(row);
    }
    Ok((peaks, rows))
}

/// Median seconds of a call over the runs. The first run warms up, and the next ones find how many calls a run takes.
fn median(device: &dyn Peaks, call: &mut Call, effort: &Effort) -> Result<f64> {
    let mut run = |calls: u32| {
        DeviceFailure::catch(|| {
            let start = Instant::now();
            (0..calls).for_each(|_| call(device));
            device.wait();
            start.elapsed().as_secs_f64()
        })
    };
    run(1)?;
    let mut calls = 1;
    while run(calls)? < effort.run_seconds {
        calls *= 2;
    }
    let mut times = Vec::new();
    for _ in 0..effort.runs {
        times.push(run(calls)? / f64::from(calls));
    }
    Ok(numbers::median(times))
}

/// The table in Markdown.
pub(crate) fn markdown(device: &dyn Device, peaks: &GpuPeaks, rows: &[GpuRow], runs: usize) -> String {
    let head = "| kernel | shape | median µs | TFLOP/s | GB/s | bound µs | bound | share |";
    let lines: String = rows.iter().map(|row| row.line() + "\n").collect();
    format!(
        "{}; median of {runs} runs of each.\n{}\n\n{head}\n| --- | --- | ---: | ---: | ---: | ---: | --- | ---: |\n{lines}",
        device.name(),
        peaks.line(),
    )
}

#[cfg(all(test, feature = "emulate"))]
mod tests {
    use refrain_cuda::{CudaDevice, Emulated};

    use super::*;

    #[test]
    fn the_table_has_every_case_with_a_share_of_its_bound() {
        let device = CudaDevice::new(Emulated::new(2), 1).unwrap();
        let (peaks, rows) = measure(&device, &Effort::tiny(), |_| ()).unwrap();
        for peak in [peaks.bf16_flops, peaks.memory_bytes, peaks.bus_bytes] {
            assert!(peak.is_finite() && peak > 0.0, "{peaks:?}");
        }
        let of = |kernel: &str| rows.iter().filter(|row| row.kernel.starts_with(kernel)).count();
        let kernels =
            ["product, q k v", "products, output", "attention, prefill", "attention, one row"].map(of);
        assert_eq!(kernels, [4, 8, 2, 2]);
        assert_eq!(["attention, 15", "placing", "attention mass"].map(of), [1, 2, 2]);
        assert_eq!(rows.len(), 21);
        for row in &rows {
            let numbers = [row.median_seconds, row.bytes_per_second, row.bound_seconds, row.share];
            assert!(numbers.iter().all(|x| x.is_finite() && *x > 0.0), "{row:?}");
        }
        // The selected rows are as many as are told, and end with the last.
        let selected = rows.iter().find(|row| row.kernel == "attention, 15 % of rows").unwrap();
        assert_eq!(selected.shape, "9×60, 4/2 heads of 64");
        let table = markdown(&device, &peaks, &rows, 2);
        assert_eq!(table.lines().filter(|line| line.starts_with("| ")).count(), rows.len() + 2, "{table}");
        assert!(table.starts_with("emulated CUDA; median of 2 runs"), "{table}");
    }

    #[test]
    fn the_slowest_of_operations_memory_and_bus_is_the_bound() {
        let peaks = GpuPeaks { bf16_flops: 100.0, memory_bytes: 10.0, bus_bytes: 1.0 };
        let row = |operations, bytes, bus_bytes| {
            let prepare = Box::new(|_: &dyn Device| -> Call { Box::new(|_| ()) });
            let (kernel, shape) = ("k", String::new());
            let case = GpuCase { kernel, shape, operations, bytes, bus_bytes, prepare };
            let row = GpuRow::new(&case, 8.0, &peaks);
            (row.bound, row.share)
        };
        assert_eq!(row(400.0, 20.0, 1.0), ("bf16", 0.5));
        assert_eq!(row(100.0, 20.0, 1.0), ("memory", 0.25));
        assert_eq!(row(100.0, 20.0, 4.0), ("bus", 0.5));
    }
}
