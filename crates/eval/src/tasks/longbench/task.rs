//! A task of LongBench.

use super::divide::Marker;
use crate::sample::Scoring;

/// A task of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Task {
    /// Its name.
    pub name: &'static str,
    /// How it is scored.
    pub scoring: Scoring,
    /// New tokens, unless [`LongBenchOptions`](super::LongBenchOptions) say otherwise.
    pub max_tokens: usize,
    /// Language of its contexts.
    pub language: Language,
    /// Samples that the benchmark has of it.
    pub samples: usize,
    /// Structure of its contexts.
    pub context: Context,
    /// Its prompt, with the places `{context}` and `{input}`.
    pub prompt: &'static str,
}

/// The language of a task's contexts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Language {
    /// English.
    English,
    /// Chinese.
    Chinese,
    /// Programs.
    Code,
}

/// The structure of a task's contexts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Context {
    /// Documents, each begun by a marker: each is a unit of reuse.
    Documents(Marker),
    /// Solved examples, each begun by a marker. They are short: as many as fit a chunk are one unit.
    Examples(Marker),
    /// One text.
    Whole,
}

impl Task {
    /// Whether the chat template goes around the prompt.
    pub fn chat(&self) -> bool {
        !self.first_line() && self.language != Language::Code
    }

    /// Whether only the first line of an answer is scored: a model that was shown examples writes more of them.
    pub fn first_line(&self) -> bool {
        matches!(self.context, Context::Examples(_))
    }
}
