//! The reports of a GPU's measurements in one: what was aimed at beside what was measured.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde::Serialize;
use serde_json::{Value, json};

use crate::numbers::number;

/// Least share of the peak of tensor cores that a prefill reaches.
const PREFILL: f64 = 0.6;
/// Least share of its bound by arithmetic that A³ reaches.
const A3: f64 = 0.9;
/// Least share of the bus's peak at which reused keys and values come.
const REUSE: f64 = 0.8;
/// Most seconds of A³'s first token at a prompt of [`A3_TOKENS`] tokens or less than a tenth more, on a GPU of this name.
const A3_SECONDS: (f64, &str) = (1.15 * 0.044, "H200");
const A3_TOKENS: u64 = 6000;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// JSON of `refrain-bench kernels`
    #[arg(long, value_name = "FILE")]
    kernels: PathBuf,
    /// JSON of `refrain bench ttft`
    #[arg(long, value_name = "FILE")]
    ttft: Option<PathBuf>,
    /// JSON of `refrain bench decode`; may be given several times
    #[arg(long, value_name = "FILE")]
    decode: Vec<PathBuf>,
    /// JSON of tools/gpu_torch.py
    #[arg(long, value_name = "FILE")]
    torch: Option<PathBuf>,
    /// Lines of what was checked, which begin with `passed: ` or `FAILED: `
    #[arg(long, value_name = "FILE")]
    checks: Option<PathBuf>,
    /// Writes all of it as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// A measured value, and what was aimed at.
#[derive(Debug, PartialEq, Serialize)]
struct Row {
    what: String,
    measured: f64,
    /// `share`, `seconds` or `times`.
    unit: &'static str,
    /// None where nothing was aimed at.
    target: Option<f64>,
    /// Whether the target is reached.
    reached: Option<bool>,
}

impl Row {
    fn share(what: String, measured: f64, least: Option<f64>) -> Row {
        Row { what, measured, unit: "share", target: least, reached: least.map(|least| measured >= least) }
    }

    fn line(&self) -> String {
        let text = |x: f64| match self.unit {
            "share" => format!("{:.1} %", 100.0 * x),
            "seconds" => format!("{} ms", number(1e3 * x)),
            _ => format!("{x:.2}x"),
        };
        let bound = if self.unit == "seconds" { "at most" } else { "at least" };
        let target = self.target.map_or_else(|| "–".to_owned(), |target| format!("{bound} {}", text(target)));
        let verdict = self.reached.map_or("–", |reached| if reached { "pass" } else { "miss" });
        format!("| {} | {} | {target} | {verdict} |\n", self.what, text(self.measured))
    }
}

/// Prints the table.
pub(crate) fn run(options: &Options) -> Result<()> {
    let kernels = read(&options.kernels)?;
    let read = |path: &Option<PathBuf>| path.as_deref().map_or(Ok(Value::Null), read);
    let decode = options.decode.iter().map(|path| self::read(path)).collect::<Result<Vec<Value>>>()?;
    let (ttft, torch) = (read(&options.ttft)?, read(&options.torch)?);
    let rows = rows(&kernels, &ttft, &decode, &torch);
    let device = kernels["about"]["device"].as_str().unwrap_or("the CPU");
    println!("{device}\n\n| what | measured | aimed at | |\n| --- | ---: | ---: | --- |");
    rows.iter().for_each(|row| print!("{}", row.line()));
    if let Some(path) = &options.json {
        let all = json!({
            "device": device,
            "checks": checks(options.checks.as_deref())?,
            "targets": rows,
            "kernels": kernels,
            "ttft": ttft,
            "decode": decode,
            "torch": torch,
        });
        std::fs::write(path, format!("{all:#}\n"))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn read(path: &Path) -> Result<Value> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{} is no report in JSON", path.display()))
}

fn checks(path: Option<&Path>) -> Result<Value> {
    let Some(path) = path else { return Ok(Value::Null) };
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let check = |line: &str| {
        let (verdict, what) = line.split_once(": ")?;
        Some(json!({ "what": what, "passed": verdict == "passed" }))
    };
    Ok(text.lines().filter_map(check).collect())
}

/// The results of a report; none if it is missing.
fn results(report: &Value) -> impl Iterator<Item = &Value> {
    report["results"].as_array().into_iter().flatten()
}

fn rows(kernels: &Value, ttft: &Value, decode: &[Value], torch: &Value) -> Vec<Row> {
    let peak = |name: &str| kernels["peaks"][name].as_f64().unwrap_or(f64::NAN);
    let device = kernels["about"]["device"].as_str().unwrap_or_default();
    let mut rows = Vec::new();
    for timing in results(ttft) {
        let (method, length) = (timing["method"].as_str().unwrap_or_default(), &timing["length"]);
        let of = |name: &str| timing[name].as_f64().unwrap_or(f64::NAN);
        let seconds = timing["memory_ttft"]["median"].as_f64().unwrap_or(f64::NAN);
        let what = |of: &str| format!("{method} at {length} tokens: {of}");
        rows.push(Row {
            what: what("TTFT"),
            measured: seconds,
            unit: "seconds",
            target: None,
            reached: None,
        });
        match method.split(':').next() {
            Some("vanilla") => {
                let share = of("operations") / seconds / peak("bf16_flops");
                rows.push(Row::share(what("of the peak of bf16"), share, Some(PREFILL)));
            }
            Some("pie" | "full_reuse") => {
                let share = of("bytes_loaded") / seconds / peak("bus_bytes");
                rows.push(Row::share(what("of the bus"), share, Some(REUSE)));
            }
            Some("a3") => {
                rows.push(Row::share(what("of its bound by arithmetic"), of("share_of_bound"), Some(A3)));
                if let (Some(row), true) = (rows.iter_mut().rev().nth(1), is_timed(device, length.as_u64())) {
                    (row.target, row.reached) = (Some(A3_SECONDS.0), Some(seconds <= A3_SECONDS.0));
                }
            }
            _ => {}
        }
    }
    for (about, answer) in decode.iter().flat_map(|report| results(report).map(|row| (&report["about"], row)))
    {
        let number = |name: &str| about[name].as_f64().unwrap_or(f64::NAN);
        let bytes = number("weight_bytes") + number("token_bytes") * number("prompt_tokens");
        let policy = answer["policy"].as_str().unwrap_or_default();
        let last = answer["curve"].as_array().and_then(|curve| curve.last());
        let seconds = last.and_then(|point| point[1].as_f64()).unwrap_or(f64::NAN);
        let what = |of: &str| format!("a token after {} tokens, {policy}: {of}", about["prompt_tokens"]);
        rows.push(Row {
            what: what("time"),
            measured: seconds,
            unit: "seconds",
            target: None,
            reached: None,
        });
        rows.push(Row::share(what("of the GPU's memory"), bytes / peak("memory_bytes") / seconds, None));
    }
    for theirs in results(torch) {
        let same = |ours: &&Value| ours["kernel"] == theirs["kernel"] && ours["shape"] == theirs["shape"];
        let Some(ours) = results(kernels).find(same) else { continue };
        let seconds = |of: &Value| of["median_seconds"].as_f64().unwrap_or(f64::NAN);
        let text = |name: &str| ours[name].as_str().unwrap_or_default().to_owned();
        let what = format!("{}, {}: torch's time over ours", text("kernel"), text("shape"));
        let measured = seconds(theirs) / seconds(ours);
        rows.push(Row { what, measured, unit: "times", target: None, reached: None });
    }
    rows
}

/// Whether the time of A³'s first token is aimed at for this GPU and prompt.
fn is_timed(device: &str, tokens: Option<u64>) -> bool {
    device.contains(A3_SECONDS.1) && tokens.is_some_and(|n| (A3_TOKENS..A3_TOKENS * 11 / 10).contains(&n))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reports(device: &str, tokens: u64) -> Vec<Row> {
        let kernels = json!({
            "about": { "device": device },
            "peaks": { "bf16_flops": 1e12, "memory_bytes": 1e9, "bus_bytes": 1e8 },
            "results": [{ "kernel": "attention", "shape": "1×2", "median_seconds": 2.0 }],
        });
        let timing = |method: &str, seconds: f64| {
            json!({
                "method": method, "length": tokens, "memory_ttft": { "median": seconds }, "operations": 5e11,
                "bytes_loaded": 8.5e6, "share_of_bound": 0.89,
            })
        };
        let ttft =
            json!({ "results": [timing("vanilla", 0.8), timing("pie", 0.1), timing("a3:ratio=0.15", 0.05)] });
        let decode = json!({
            "about": { "weight_bytes": 4e6, "token_bytes": 1e3, "prompt_tokens": 1000 },
            "results": [{ "policy": "full attention", "curve": [[10, 0.5], [20, 0.01]] }],
        });
        let torch = json!({ "results": [
            { "kernel": "attention", "shape": "1×2", "median_seconds": 1.0 },
            { "kernel": "attention", "shape": "other", "median_seconds": 1.0 },
        ] });
        rows(&kernels, &ttft, &[decode], &torch)
    }

    fn of<'a>(rows: &'a [Row], what: &str) -> &'a Row {
        rows.iter().find(|row| row.what.contains(what)).unwrap()
    }

    #[test]
    fn measured_values_stand_beside_targets() {
        let rows = reports("NVIDIA H200", 6144);
        let is = |what: &str, measured: f64, reached: Option<bool>| {
            let row = of(&rows, what);
            assert!((row.measured - measured).abs() < 1e-9 && row.reached == reached, "{row:?}");
        };
        is("of the peak of bf16", 0.625, Some(true));
        is("pie at 6144 tokens: of the bus", 0.85, Some(true));
        is("of its bound", 0.89, Some(false));
        is("a3:ratio=0.15 at 6144 tokens: TTFT", 0.05, Some(true));
        is("vanilla at 6144 tokens: TTFT", 0.8, None);
        is("a token after 1000 tokens, full attention: of the GPU's memory", 0.5, None);
        is("torch's time over ours", 0.5, None);
        assert_eq!(rows.iter().filter(|row| row.unit == "times").count(), 1);
        let line = of(&rows, "of its bound").line();
        assert_eq!(
            line,
            "| a3:ratio=0.15 at 6144 tokens: of its bound by arithmetic | 89.0 % | at least 90.0 % | miss |\n"
        );
    }

    #[test]
    fn the_time_is_aimed_at_for_one_gpu_and_length() {
        for (device, tokens) in [("NVIDIA H100", 6144), ("NVIDIA H200", 32768), ("NVIDIA H200", 600)] {
            assert_eq!(of(&reports(device, tokens), "a3:ratio=0.15 at").reached, None, "{device} {tokens}");
        }
    }

    #[test]
    fn what_was_not_measured_is_no_target_that_is_reached() {
        let ttft = json!({ "results": [{ "method": "vanilla", "length": 6144 }] });
        let rows = rows(&Value::Null, &ttft, &[], &Value::Null);
        assert_eq!(of(&rows, "of the peak").reached, Some(false));
    }
}
