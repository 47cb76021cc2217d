//! The tasks of RULER, their options, and the filling of their templates.

use crate::sample::Scoring;

/// A task of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Task {
    /// Its name.
    pub name: &'static str,
    /// How it is scored.
    pub scoring: Scoring,
    /// New tokens, unless [`RulerOptions`] say otherwise.
    pub tokens_to_generate: usize,
}

impl Task {
    const fn new(name: &'static str, tokens_to_generate: usize) -> Task {
        Task { name, scoring: Scoring::MatchAll, tokens_to_generate }
    }
}

/// The tasks that need no data.
pub const TASKS: &[Task] = &[
    Task::new("niah_single_1", 128),
    Task::new("niah_single_2", 128),
    Task::new("niah_single_3", 128),
    Task::new("niah_multikey_1", 128),
    Task::new("niah_multikey_2", 128),
    Task::new("niah_multikey_3", 128),
    Task::new("niah_multivalue", 128),
    Task::new("niah_multiquery", 128),
    Task::new("vt", 30),
    Task::new("cwe", 120),
    Task::new("fwe", 50),
];

/// The task made of a file of [`Questions`](super::qa::Questions).
pub const QA: Task = Task { name: "qa", scoring: Scoring::MatchPart, tokens_to_generate: 32 };

/// Options of RULER's samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RulerOptions {
    /// New tokens of every task (papers on KV caches: 64); each task's own if there is none.
    pub max_tokens: Option<usize>,
    /// Most tokens of prompt and answer, where the model's context leaves fewer than the length. A task's parameters are those of the length.
    pub room: Option<usize>,
}

/// A template with its `{place}`s filled in.
pub(super) fn fill(template: &str, places: &[(&str, &str)]) -> String {
    places.iter().fold(template.into(), |text: String, (place, value)| text.replace(place, value))
}
