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

/// File of the essays and folder of the word lists, in RULER's folder of the data.
const ESSAYS: &str = "PaulGrahamEssays.json";
const WORDS: &str = "wonderwords";

/// Makes samples of [`TASKS`].
#[derive(Clone, Debug)]
pub struct Ruler {
    lexicon: Lexicon,
    essays: Essays,
    /// The essays' words.
    words: Vec<String>,
}

impl Ruler {
    /// With the word lists (`wonderwords/*list.txt`) and essays (`PaulGrahamEssays.json`) of a folder, or built-in ones where it lacks them.
    ///
    /// # Errors
    /// If one of the lists is missing or the data is malformed.
    pub fn open(data: Option<&Path>) -> Result<Ruler> {
        let part = |name| data.map(|folder| folder.join(name)).filter(|path| path.exists());
        let lexicon = part(WORDS).map_or_else(|| Ok(Lexicon::built_in()), |folder| Lexicon::read(&folder))?;
        let essays = part(ESSAYS).map_or_else(|| Ok(Essays::built_in()), |file| Essays::from_json(&file))?;
        let words = essays.text.split_whitespace().map(String::from).collect();
        Ok(Ruler { lexicon, essays, words })
    }

    /// Which essays and words these are, for a report.
    pub fn source(&self) -> String {
        format!("{}; {}", self.essays.source, self.lexicon.source)
    }

    /// Parts of the folder that built-in text stands in for.
    pub(crate) fn missing(&self) -> Vec<&'static str> {
        let parts = [(ESSAYS, &self.essays.hash), (WORDS, &self.lexicon.hash)];
        parts.into_iter().filter(|(_, hash)| hash.is_none()).map(|(part, _)| part).collect()
    }

    /// BLAKE3 of essays and words, hexadecimal, unless both are built in.
    pub(crate) fn hash(&self) -> Option<String> {
        let hashes: Vec<&str> =
            [&self.essays.hash, &self.lexicon.hash].into_iter().flatten().map(String::as_str).collect();
        (!hashes.is_empty()).then(|| blake3::hash(hashes.concat().as_bytes()).to_hex().to_string())
    }

    /// The first `count` samples of a task: each of at most `length` tokens (fewer where [`RulerOptions::room`] is less), those of the answer
    /// among them. `tokens` counts a text's. A sample depends on seed, task, length and its number only, and on what counts tokens.
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
