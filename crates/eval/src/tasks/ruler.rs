//! RULER (NVIDIA/RULER @c3f5e3b): synthetic tasks of any length.
//!
//! Each task is a recipe that makes a prompt of any number of units (words, lines, documents); its length is fitted
//! in units, then every sample is drawn anew. Samples are RULER's in distribution, not byte by byte: its generator's
//! random numbers are Python's.

mod fit;
mod lexicon;
mod niah;
mod qa;
mod random;
mod task;
mod vt;
mod words;

use std::path::Path;

use self::fit::{LengthBudget, Recipe};
use self::lexicon::Lexicon;
pub use self::qa::Questions;
pub use self::task::{QA, RulerOptions, TASKS, Task};
use super::haystack::Essays;
use crate::{Error, Result, Sample};

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
    /// If the task does not exist or the length is too short for it.
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
            Error::Invalid(format!("ruler: no task {task:?}; there are {}", names.join(", ")))
        })?;
        let budget = LengthBudget::new(task, length, seed, tokens, options);
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

#[cfg(test)]
mod tests;
