//! Tasks: samples of each benchmark.

mod file;
mod haystack;
mod load;
pub mod longbench;
pub mod longgen;
pub mod longwriter;
mod names;
pub mod needle;
pub mod rag;
pub mod ruler;

pub use load::{LoadNotes, LoadedTask, TaskModel, load};
pub(crate) use names::is_known;
pub use names::names;

use crate::{Result, Sample, Scoring};

/// Text to tokens and back, by a model's tokenizer; no BOS, no special tokens.
pub trait TokenText {
    /// # Errors
    /// If the vocabulary has no way to write the text.
    fn encode(&self, text: &str) -> Result<Vec<u32>>;

    /// The text of tokens.
    fn decode(&self, ids: &[u32]) -> String;
}

/// Samples read from a file, and the properties that they share.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskData {
    /// The samples.
    pub samples: Vec<Sample>,
    /// How they are scored.
    pub scoring: Scoring,
    /// Whether only the first line of an answer is scored.
    pub first_line: bool,
    /// Temperature that the benchmark samples with; 0 is greedy.
    pub temperature: f64,
    /// Its nucleus.
    pub top_p: f64,
    /// Samples of the benchmark itself, where that is known.
    pub of: Option<usize>,
    /// Differences from the benchmark, or empty.
    pub note: String,
    /// BLAKE3 of the file, hexadecimal.
    pub hash: String,
}

/// Whose settings a benchmark of long outputs is run with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    /// The benchmark's own.
    #[default]
    Own,
    /// MorphKV's (ghadiaravi13/MorphKV @8903d2a), which wants fewer samples and tokens.
    MorphKv,
}

#[cfg(test)]
mod testing;
