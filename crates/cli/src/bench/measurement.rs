//! Spread of repeated measurements, and the setup that every report names.

use std::io;

use refrain::engine::Engine;
use refrain::kernels::{Device, cpu_name, processors};
use serde::Serialize;

use crate::machine;
use crate::output::{broken, count, seconds};
use crate::settings::Context;
use crate::table::Table;

/// Seconds of several runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(super) min: f64,
    pub(super) max: f64,
}

impl Spread {
    /// `values` has one at least.
    pub(crate) fn of(mut values: Vec<f64>) -> Spread {
        values.sort_by(f64::total_cmp);
        let (low, high) = ((values.len() - 1) / 2, values.len() / 2);
        let median = (values[low] + values[high]) / 2.0;
        Spread { median, min: values[0], max: values[values.len() - 1] }
    }

    pub(super) fn text(&self) -> String {
        format!("{} ({}–{})", seconds(self.median), seconds(self.min), seconds(self.max))
    }
}

/// Machine, date, command and version of a measurement.
#[derive(Debug, Serialize)]
pub(super) struct Setup {
    pub(super) date: String,
    pub(super) cpu: String,
    pub(super) threads: usize,
    /// Instruction set of the CPU's kernels.
    pub(super) isa: String,
    /// Processor that computed, where that is not the CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) device: Option<String>,
    pub(super) runs: u32,
    pub(super) command: String,
    pub(super) version: &'static str,
}

impl Setup {
    pub(super) fn new(device: &dyn Device, runs: u32) -> Setup {
        let threads = device.threads();
        let (isa, device) = processors(device);
        Setup {
            date: machine::today(),
            cpu: cpu_name(),
            threads,
            isa,
            device,
            runs,
            command: machine::command(),
            version: env!("CARGO_PKG_VERSION"),
        }
    }

    /// Date and machine in one line.
    pub(super) fn machine(&self) -> String {
        let device = self.device.as_ref().map_or_else(String::new, |device| format!("{device}, "));
        format!("{}, {device}{}, {}, {}", self.date, self.cpu, count(self.threads, "thread"), self.isa)
    }
}

/// A measurement's machine and model.
#[derive(Debug, Serialize)]
pub(super) struct ModelSetup {
    #[serde(flatten)]
    machine: Setup,
    model: String,
    compute: String,
    kv: String,
}

impl ModelSetup {
    pub(super) fn new(context: &Context, engine: &Engine, runs: u32) -> ModelSetup {
        ModelSetup {
            machine: Setup::new(&**engine.decoder().device(), runs),
            model: context.global.model.clone(),
            compute: engine.decoder().precision().to_string(),
            kv: context.global.kv.to_string(),
        }
    }

    /// The model and its precisions.
    pub(super) fn model_line(&self) -> String {
        format!("{}, weights {}, KV {}", self.model, self.compute, self.kv)
    }

    /// The runs that every value is the median of.
    pub(super) fn runs(&self) -> String {
        count(self.machine.runs as usize, "run")
    }

    /// The report: machine, model and settings (`what`), a table and the note below it; in Markdown with the command too.
    pub(super) fn page(&self, what: &str, table: &Table, note: &str, markdown: bool) -> String {
        let (machine, Setup { command, version, .. }) = (self.machine.machine(), &self.machine);
        let note = if note.is_empty() { String::new() } else { format!("\n{note}") };
        match markdown {
            true => format!(
                "{machine}; {what}, refrain {version}:\n\n```sh\n{command}\n```\n\n{}{note}",
                table.markdown()
            ),
            false => {
                let about = format!("{machine}\n{what}, refrain {version}");
                format!("{}\n\n{}{note}", broken(&about, &io::stdout()), table.text())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Spread;

    #[test]
    fn the_median_is_the_middle_or_the_mean_of_both() {
        assert_eq!(Spread::of(vec![3.0, 1.0, 2.0]), Spread { median: 2.0, min: 1.0, max: 3.0 });
        assert_eq!(Spread::of(vec![4.0, 1.0, 2.0, 3.0]).median, 2.5);
    }
}
