//! The evaluation harness: the quality of methods and policies on the papers' benchmarks.
//!
//! The [`tasks`] make [`Sample`]s of a benchmark's data or generate them. A [`run`] answers each sample by every [`Variant`],
//! and appends a line with the [`Record`] to a file. A [`report`] shows the records as tables and pictures.

mod calendar;
mod csv;
mod error;
mod judge;
mod matrix;
pub mod metrics;
mod record;
pub mod report;
pub mod run;
mod run_info;
mod sample;
mod sample_run;
mod scoring;
pub mod tasks;
mod variant;

pub use calendar::utc;
pub use csv::csv_line;
pub use error::{Error, Result};
pub use judge::{Judge, JudgeOptions};
pub use matrix::{Matrix, TaskSpec};
pub use record::{Cost, Fidelity, Record, VanillaCost};
pub use run_info::{MachineInfo, ModelInfo, RunInfo, TaskInfo};
pub use sample::{Gold, Sample, Scoring};
pub use scoring::Scorer;
pub use variant::{RunOptions, Variant};
