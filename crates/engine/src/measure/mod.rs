//! Measurements: methods held against vanilla, and bare times of the model.

mod agreement;
mod beside;
mod compare;
mod fidelity;
mod oracle;
mod timing;

pub use agreement::Agreement;
pub use compare::Comparison;
pub use fidelity::{Fidelity, Hits, Reference};
pub use oracle::Oracle;
pub use timing::{AnswerTimes, DecodeTimes};
