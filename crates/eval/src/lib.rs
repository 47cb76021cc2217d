//! The evaluation harness: what each method costs in quality, on the benchmarks of the papers.
//!
//! A [`tasks`] module makes [`Sample`]s of a benchmark's data (or generates them), a run answers each with every method and
//! policy and appends a [`Record`] a line, and [`report`] makes tables and pictures of them.

mod error;
mod judge;
mod matrix;
pub mod metrics;
mod record;
pub mod report;
pub mod run;
mod sample;
mod scoring;
pub mod tasks;

pub use error::{Error, Result};
pub use judge::{Asking, Judge};
pub use matrix::{Matrix, TaskSpec};
pub use record::{About, Cost, Fidelity, Machine, ModelAbout, Record, TaskAbout};
pub use sample::{Gold, Sample, Scoring};
pub use scoring::Scorer;
