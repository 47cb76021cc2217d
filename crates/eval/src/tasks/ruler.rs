//! RULER (NVIDIA/RULER @c3f5e3b): synthetic tasks of any length.
//!
//! Each task is a recipe that makes a prompt of so many units (words, lines, documents); its length is fitted
//! in units, then every sample is drawn anew. Samples are RULER's in distribution, not byte by byte: its generator's
//! random numbers are Python's.

mod draw;
mod fit;
mod lexicon;
mod niah;
mod qa;
mod vt;
mod words;

use std::path::Path;

use self::draw::Draw;
use self::fit::{Budget, Recipe};
use self::lexicon::Lexicon;
pub use self::qa::Questions;
use super::haystack::Essays;
use crate::{Error, Result, Sample, Scoring};

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

/// The task made of a file of [`Questions`].
pub const QA: Task = Task { name: "qa", scoring: Scoring::MatchPart, tokens_to_generate: 32 };

/// What may differ from RULER's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RulerOptions {
    /// New tokens of every task (papers on KV caches: 64); each task's own if there is none.
    pub max_tokens: Option<usize>,
    /// Whether the chat template goes around the prompt. It does not count into the length.
    pub chat: bool,
}

/// Makes samples of [`TASKS`].
#[derive(Clone, Debug)]
pub struct Ruler {
    lexicon: Lexicon,
    essays: Essays,
    /// The essays' words.
    words: Vec<String>,
}

impl Ruler {
    /// With the word lists and essays of a folder (`wonderwords/*list.txt`, `PaulGrahamEssays.json`), or with built-in ones.
    ///
    /// # Errors
    /// If one of them is missing or malformed.
    pub fn open(data: Option<&Path>) -> Result<Ruler> {
        let (lexicon, essays) = match data {
            Some(folder) => (
                Lexicon::read(&folder.join("wonderwords"))?,
                Essays::from_json(&folder.join("PaulGrahamEssays.json"))?,
            ),
            None => (Lexicon::built_in(), Essays::built_in()),
        };
        let words = essays.text.split_whitespace().map(String::from).collect();
        Ok(Ruler { lexicon, essays, words })
    }

    /// Which essays and words these are, for a report.
    pub fn source(&self) -> String {
        format!("{}; {}", self.essays.source, self.lexicon.source)
    }

    /// The first `count` samples of a task: each of at most `length` tokens, those of the answer among them. `tokens` counts
    /// a text's. A sample depends on seed, task, length and its number only, and on what counts tokens.
    ///
    /// # Errors
    /// If there is no such task or the length is too short for it.
    pub fn samples(
        &self,
        task: &str,
        length: usize,
        count: usize,
        seed: u64,
        tokens: &dyn Fn(&str) -> usize,
        options: &RulerOptions,
    ) -> Result<Vec<Sample>> {
        let task = TASKS.iter().find(|known| known.name == task).ok_or_else(|| {
            let names: Vec<&str> = TASKS.iter().map(|task| task.name).collect();
            Error::Asked(format!("ruler: no task {task:?}; there are {}", names.join(", ")))
        })?;
        let budget = Budget::new(task, length, seed, tokens, options);
        let recipe: Box<dyn Recipe + '_> = match task.name {
            "vt" => Box::new(vt::Tracking::new(&budget)),
            "cwe" => Box::new(words::Common { lexicon: &self.lexicon, length }),
            "fwe" => Box::new(words::Frequent { room: length.saturating_sub(budget.max_tokens) }),
            name => Box::new(niah::Niah {
                needles: niah::Needles::of(name),
                essay: &self.words,
                lexicon: &self.lexicon,
            }),
        };
        let units = budget.units(&*recipe)?;
        (0..count).map(|index| budget.sample(&*recipe, units, index)).collect()
    }
}

/// A template's text with its `{place}`s filled in.
fn fill(template: &str, places: &[(&str, &str)]) -> String {
    places.iter().fold(template.into(), |text: String, (place, value)| text.replace(place, value))
}

#[cfg(test)]
mod tests;
