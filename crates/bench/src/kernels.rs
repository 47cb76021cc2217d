//! Each kernel beside what this machine reaches at best.
//!
//! Rates are those of the fastest run, as the peaks are. A kernel's share is of the peak that is measured right after it,
//! since a machine does not reach the same at all times. A kernel can do no better than the slower of its operations at the
//! peak of its precision and its bytes (weights, keys and values, activations, each moved once) at the peak of memory.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use refrain_cuda::Peaks;
use refrain_engine::DeviceChoice;
use refrain_kernels::{Cpu, cpu_name, processors};
use serde::Serialize;
use serde_json::json;

use crate::cases::{Case, Group, Prepared, cases};
use crate::gpu::{self, Effort, GpuRow};
use crate::numbers::{median, microseconds, number};

/// Least seconds of the calls of one run: as long as a round of the peaks, so that both share interruptions alike.
const RUN: f64 = 1e-3;
/// Least seconds of all runs of a case.
const RUNS: f64 = 0.1;
/// Bytes of weights, or of keys and values, that the one-row cases rotate through.
const ROTATION: u64 = 1 << 30;
/// Cases that touch more bytes than this in a call need [`ROOM`].
const LARGE: usize = 256 << 20;
/// Free memory for the large cases; the peaks need half of it.
const ROOM: u64 = 2 << 30;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Device that is measured: cpu, cuda, cuda:N or auto. Of a GPU the calls of a layer of Llama 3 8B are
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceChoice::Cpu)]
    device: DeviceChoice,
    /// Small shapes, for emulated threads
    #[arg(long, hide = true)]
    tiny: bool,
    /// Threads; 0 for one a core
    #[arg(long, value_name = "N", default_value_t = 0)]
    threads: usize,
    /// Least runs of each case
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Groups of kernels of the CPU
    #[arg(long, value_name = "GROUPS", value_delimiter = ',', default_value = "products,attention,ops")]
    only: Vec<Group>,
    /// Write all numbers as JSON, for tools/plot.py
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The machine's peaks: operations a second, and bytes a second.
#[derive(Clone, Copy, Serialize)]
struct Peak {
    f32_flops: f64,
    bf16_flops: f64,
    read_bytes: f64,
    copy_bytes: f64,
}

impl Peak {
    fn measure(cpu: &Cpu, threads: usize) -> Peak {
        Peak {
            f32_flops: cpu.peak_f32(threads),
            bf16_flops: cpu.peak_bf16(threads),
            read_bytes: cpu.peak_read(threads),
            copy_bytes: cpu.peak_copy(threads),
        }
    }

    /// This peak with the part that bounds a kernel measured anew.
    fn again(&self, cpu: &Cpu, threads: usize, bound: &str) -> Peak {
        match bound {
            "f32" => Peak { f32_flops: cpu.peak_f32(threads), ..*self },
            "bf16" => Peak { bf16_flops: cpu.peak_bf16(threads), ..*self },
            _ => Peak { read_bytes: cpu.peak_read(threads), copy_bytes: cpu.peak_copy(threads), ..*self },
        }
    }

    fn max(&self, other: &Peak) -> Peak {
        Peak {
            f32_flops: self.f32_flops.max(other.f32_flops),
            bf16_flops: self.bf16_flops.max(other.bf16_flops),
            read_bytes: self.read_bytes.max(other.read_bytes),
            copy_bytes: self.copy_bytes.max(other.copy_bytes),
        }
    }

    fn line(&self, threads: usize) -> String {
        let [f32, bf16, read, copy] = [self.f32_flops, self.bf16_flops, self.read_bytes, self.copy_bytes]
            .map(|rate| number(rate / 1e9));
        format!(
            "Peaks of {threads} threads: f32 {f32} GFLOP/s, bf16 {bf16} GFLOP/s, memory read {read} GB/s, copied {copy} GB/s."
        )
    }
}

/// One case, measured.
#[derive(Serialize)]
struct Measurement {
    kernel: &'static str,
    shape: String,
    /// Seconds of a call: the median and the least.
    median_seconds: f64,
    best_seconds: f64,
    /// Operations per byte.
    intensity: f64,
    flops: f64,
    bytes_per_second: f64,
    /// The bound of the kernel: `f32`, `bf16` or `memory`.
    bound: &'static str,
    /// Seconds that the bound alone would take over the seconds taken.
    share: f64,
    /// Whether all operands may lie in the caches, where memory is no bound.
    cached: bool,
    one_thread: bool,
}

impl Measurement {
    fn new(
        case: &Case,
        operands: &Prepared,
        [median, best]: [f64; 2],
        peak: &Peak,
        cache: Option<u64>,
    ) -> Measurement {
        let (unit, flops) = if case.bf16 { ("bf16", peak.bf16_flops) } else { ("f32", peak.f32_flops) };
        let (read, written) = (operands.read as f64, operands.written as f64);
        let computing = case.operations / flops;
        // Bytes that are read beside bytes that are written move at the rate of a copy.
        let moving = written / peak.copy_bytes + (read - written).max(0.0) / peak.read_bytes;
        Measurement {
            kernel: case.kernel,
            shape: case.shape.clone(),
            median_seconds: median,
            best_seconds: best,
            intensity: case.operations / (read + written),
            flops: case.operations / best,
            bytes_per_second: (read + written) / best,
            bound: if computing > moving { unit } else { "memory" },
            share: computing.max(moving) / best,
            cached: cache.is_none_or(|cache| (operands.span as u64) < 2 * cache),
            one_thread: case.one_thread,
        }
    }

    /// Whether the caches may serve a kernel that memory bounds, so that its share can pass 100 %.
    fn may_exceed_bound(&self) -> bool {
        self.cached && self.bound == "memory"
    }

    fn row(&self) -> String {
        let star = if self.may_exceed_bound() { " \\*" } else { "" };
        format!(
            "| {} | {} | {} | {} | {} | {} | {} | {} | {:.0} %{star} |",
            self.kernel,
            self.shape,
            microseconds(self.median_seconds),
            microseconds(self.best_seconds),
            number(self.flops / 1e9),
            number(self.bytes_per_second / 1e9),
            number(self.intensity),
            self.bound,
            100.0 * self.share,
        )
    }
}

/// Measures and prints a Markdown table.
pub(crate) fn run(options: &Options) -> Result<()> {
    if let Some(path) = &options.json {
        // A path that cannot be written fails before the measurements.
        std::fs::write(path, "").with_context(|| format!("cannot write {}", path.display()))?;
    }
    match options.device {
        DeviceChoice::Cpu => measure_cpu(options),
        DeviceChoice::Cuda(index) => {
            measure_gpu(options, &*refrain_cuda::open_measured(index, options.threads)?)
        }
        DeviceChoice::Auto => match refrain_cuda::open_measured(0, options.threads) {
            Ok(gpu) => measure_gpu(options, &*gpu),
            Err(_) => measure_cpu(options),
        },
    }
}

fn measure_gpu(options: &Options, device: &dyn Peaks) -> Result<()> {
    let effort = if options.tiny { Effort::tiny() } else { Effort::whole(options.runs as usize) };
    let each = |row: &GpuRow| eprintln!("{} {}", row.kernel, row.shape);
    let (peaks, rows) = gpu::measure(device, &effort, each)?;
    if let Some(path) = &options.json {
        let threads = device.threads();
        let (isa, device) = processors(device);
        let about = json!({ "device": device, "cpu": cpu_name(), "threads": threads, "isa": isa, "runs": effort.runs });
        let all = json!({ "about": about, "peaks": peaks, "results": rows });
        std::fs::write(path, format!("{all:#}\n"))?;
    }
    print!("{}", gpu::markdown(device, &peaks, &rows, effort.runs));
    Ok(())
}

fn measure_cpu(options: &Options) -> Result<()> {
    let free = free_memory().unwrap_or(u64::MAX);
    if free < ROOM / 2 {
        bail!("the peaks need 1 GiB of free memory: end other programs");
    }
    let cpu = Cpu::new(options.threads)?;
    let mut peaks = [cpu.threads(), 1].map(|threads| Peak::measure(&cpu, threads));
    let (mut measured, mut skipped) = (Vec::new(), Vec::new());
    for case in cases().into_iter().filter(|case| options.only.contains(&case.group)) {
        if free < ROOM && case.size > LARGE {
            skipped.push(format!("{} {}", case.kernel, case.shape));
            continue;
        }
        let (peak, threads) =
            if case.one_thread { (&mut peaks[1], 1) } else { (&mut peaks[0], cpu.threads()) };
        let mut operands = case.prepare(&cpu, ROTATION.min(free / 4) as usize);
        let times = measure(&cpu, &mut operands, options.runs as usize);
        let row = |peak: &Peak| Measurement::new(&case, &operands, times, peak, cache_bytes());
        let again = peak.again(&cpu, threads, row(peak).bound);
        measured.push(row(&again));
        *peak = peak.max(&again);
        eprintln!("{} {}", case.kernel, case.shape);
    }
    let isa = format!("{:?}", cpu.isa()).to_lowercase();
    let about = json!({ "cpu": cpu_name(), "threads": cpu.threads(), "isa": isa, "runs": options.runs });
    if let Some(path) = &options.json {
        let peaks = json!({ "all_threads": peaks[0], "one_thread": peaks[1] });
        let all = json!({ "about": about, "peaks": peaks, "results": measured, "skipped": skipped });
        std::fs::write(path, format!("{all:#}\n"))?;
    }
    println!(
        "{}, {} threads, {isa}; {} runs or more of each kernel.",
        cpu_name(),
        cpu.threads(),
        options.runs
    );
    println!("{}\n{}\n", peaks[0].line(cpu.threads()), peaks[1].line(1));
    println!("| kernel | shape | median µs | best µs | GFLOP/s | GB/s | FLOP/byte | bound | share |");
    println!("| --- | --- | ---: | ---: | ---: | ---: | ---: | --- | ---: |");
    measured.iter().for_each(|row| println!("{}", row.row()));
    if measured.iter().any(Measurement::may_exceed_bound) {
        println!("\n\\* All operands may lie in the caches; the share of memory can then pass 100 %.");
    }
    if !skipped.is_empty() {
        println!("\nLeft out with less than 2 GiB of free memory: {}.", skipped.join(", "));
    }
    Ok(())
}

/// Median and least seconds of a call. The first run warms up and finds how many calls a run takes.
fn measure(cpu: &Cpu, operands: &mut Prepared, runs: usize) -> [f64; 2] {
    let mut run = |calls: u32| {
        let start = Instant::now();
        for _ in 0..calls {
            (operands.call)(cpu);
        }
        start.elapsed().as_secs_f64()
    };
    let mut calls = 1;
    while run(calls) < RUN {
        calls *= 2;
    }
    let (start, mut times) = (Instant::now(), Vec::new());
    while times.len() < runs || start.elapsed().as_secs_f64() < RUNS {
        times.push(run(calls) / f64::from(calls));
    }
    let best = times.iter().copied().fold(f64::INFINITY, f64::min);
    [median(times), best]
}

/// The value of a line `NAME: VALUE` of a system file, where the system has it.
fn entry(file: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// Bytes of memory that a program can still take.
fn free_memory() -> Option<u64> {
    let free = entry("/proc/meminfo", "MemAvailable")?;
    free.strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib << 10)
}

/// Bytes of the first core's largest cache.
fn cache_bytes() -> Option<u64> {
    let size = |index: u32| {
        let path = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size");
        std::fs::read_to_string(path).ok()?.trim().strip_suffix('K')?.parse::<u64>().ok()
    };
    (0..8).map_while(size).max().map(|kib| kib << 10)
}
