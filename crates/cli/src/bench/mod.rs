//! `refrain bench`: what its measurements have in common.

mod chart;
mod decode;
mod kernels;
mod memory;
mod policies;
mod precision;
mod roofline;
mod serve;
mod store;
mod ttft;
mod work;

use refrain_kernels::Cpu;
use serde::Serialize;

pub(crate) use decode::run as decode;
pub(crate) use kernels::run as kernels;
pub(crate) use memory::run as memory;
pub(crate) use precision::run as precision;
pub(crate) use serve::run as serve;
pub(crate) use store::run as store;
pub(crate) use ttft::run as ttft;

use crate::machine;
use crate::output::{count, seconds};

/// Seconds of several runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

impl Spread {
    fn of(mut values: Vec<f64>) -> Spread {
        values.sort_by(f64::total_cmp);
        let (low, high) = ((values.len() - 1) / 2, values.len() / 2);
        let median = (values[low] + values[high]) / 2.0;
        Spread { median, min: values[0], max: values[values.len() - 1] }
    }

    fn text(&self) -> String {
        format!("{} ({}–{})", seconds(self.median), seconds(self.min), seconds(self.max))
    }
}

/// What was measured on, when and how.
#[derive(Debug, Serialize)]
struct About {
    date: String,
    cpu: String,
    threads: usize,
    isa: String,
    runs: u32,
    command: String,
    version: &'static str,
}

impl About {
    fn new(cpu: &Cpu, runs: u32) -> About {
        About {
            date: machine::today(),
            cpu: machine::cpu_name(),
            threads: cpu.threads(),
            isa: cpu.isa().to_string(),
            runs,
            command: machine::command(),
            version: env!("CARGO_PKG_VERSION"),
        }
    }

    /// When and on what.
    fn machine(&self) -> String {
        format!("{}, {}, {}, {}", self.date, self.cpu, count(self.threads, "thread"), self.isa)
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
