//! LongBench v1 (THUDM/LongBench @2e00731): questions, summaries, few-shot learning and code over long contexts.

mod divide;
mod prompt;
mod table;
mod task;

use std::path::Path;

use serde::Deserialize;

pub use self::divide::Marker;
use self::prompt::Prompt;
pub(crate) use self::table::MULTI_HOP;
pub use self::table::{A3, MORPHKV, SAMKV, SUITES, TASKS, suite};
pub use self::task::{Context, Language, Task};
use super::file::{DataFile, spread};
use super::{TaskData, TokenText};
use crate::{Error, Gold, Result, Sample, Scoring};

/// Options of LongBench's samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LongBenchOptions {
    /// Most tokens of a prompt, chat template aside: of a longer one the middle is left out.
    pub max_prompt_tokens: usize,
    /// Most tokens of solved examples that make one unit of reuse.
    pub chunk_tokens: usize,
    /// Where contexts are cut.
    pub split: Split,
}

/// Where contexts are cut into units of reuse.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Split {
    /// Before each document or solved example, where the task has them.
    #[default]
    Marked,
    /// Nowhere: the run cuts every chunk size of tokens (A3's protocol).
    Tokens,
}

/// The task of a set's name: its own, or that with `_e` (LongBench-E) or `_short` (a derived set).
///
/// # Errors
/// If there is none.
pub fn task(name: &str) -> Result<&'static Task> {
    find(name).map(|(task, _)| task)
}

/// The name of LongBench's set of a task whose name may be that of LongBench-E's.
pub(crate) fn without_edition(name: &str) -> &str {
    name.strip_suffix("_e").unwrap_or(name)
}

/// Where a set may lie in the data's folder.
fn places(name: &str) -> [String; 3] {
    ["longbench/", "longbench_derived/", ""].map(|place| format!("{place}{name}.jsonl"))
}

/// Whether a folder has a set.
pub fn is_there(name: &str, folder: &Path) -> bool {
    places(name).iter().any(|place| folder.join(place).is_file())
}

/// Samples of a set: a task's name, with `_e` for its part of LongBench-E or `_short` for a set of shorter contexts
/// in its form. The file is looked for in the folder's `longbench` and `longbench_derived`, then in the folder
/// itself. `limit` takes samples spread evenly over the file.
///
/// # Errors
/// If the task or the file does not exist, or the file is malformed.
pub fn samples(
    name: &str,
    folder: &Path,
    limit: Option<usize>,
    options: &LongBenchOptions,
    text: &dyn TokenText,
) -> Result<TaskData> {
    let (task, edition) = find(name)?;
    let file = DataFile::find(folder, &places(name))?;
    let lines: Vec<Line> = file.checked_lines(|line: &Line| {
        let classes = line.all_classes.as_ref().is_some_and(|classes| !classes.is_empty());
        match task.scoring {
            _ if line.answers.is_empty() => Some("`answers` is empty: there is nothing to score by"),
            Scoring::Classification if !classes => {
                Some("`all_classes` is missing or empty: there is nothing to score by")
            }
            _ => None,
        }
    })?;
    let taken = spread(lines.len(), limit).map(|index| &lines[index]);
    Ok(TaskData {
        samples: taken.map(|line| sample(task, line, options, text)).collect::<Result<_>>()?,
        scoring: task.scoring,
        first_line: task.first_line(),
        temperature: 0.0,
        top_p: 1.0,
        of: (edition == Edition::V1).then_some(task.samples),
        note: edition.note(task, &lines),
        hash: file.hash(),
    })
}

/// The edition of a task that a set is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Edition {
    V1,
    E,
    Derived,
}

impl Edition {
    fn note(self, task: &Task, lines: &[Line]) -> String {
        match self {
            Edition::V1 => {
                let even = lines.iter().filter(|line| line.dataset.ends_with("_e")).count();
                let fewer = lines.len() < task.samples;
                let count = fewer.then(|| format!("{} of {} records", lines.len(), task.samples));
                let from_e = (even > 0).then(|| format!("{even} of LongBench-E"));
                [count, from_e].into_iter().flatten().collect::<Vec<_>>().join(", ")
            }
            Edition::E => "LongBench-E".into(),
            Edition::Derived => format!("derived from the data of {}, not LongBench", task.name),
        }
    }
}

fn find(name: &str) -> Result<(&'static Task, Edition)> {
    let named = |name: &str| TASKS.iter().find(|task| task.name == name);
    let of = |suffix: &str| name.strip_suffix(suffix).and_then(named);
    named(name)
        .map(|task| (task, Edition::V1))
        .or_else(|| of("_e").map(|task| (task, Edition::E)))
        .or_else(|| of("_short").map(|task| (task, Edition::Derived)))
        .ok_or_else(|| {
            let names: Vec<&str> = TASKS.iter().map(|task| task.name).collect();
            Error::Invalid(format!(
                "longbench: no task {name:?}; there are {}, each also with `_e` or `_short` where there is such a file",
                names.join(", ")
            ))
        })
}

/// A record of the benchmark.
#[derive(Deserialize)]
struct Line {
    #[serde(rename = "_id")]
    id: String,
    input: String,
    context: String,
    answers: Vec<String>,
    all_classes: Option<Vec<String>>,
    #[serde(default)]
    dataset: String,
    /// Words of the context, or characters of a Chinese one.
    length: Option<usize>,
}

fn sample(task: &Task, line: &Line, options: &LongBenchOptions, text: &dyn TokenText) -> Result<Sample> {
    let prompt = Prompt::new(task.prompt, &line.context, &line.input);
    let prompt = prompt.without_middle(options.max_prompt_tokens, text)?;
    let documents = match (options.split, task.context) {
        (Split::Marked, Context::Documents(marker)) => owned(&marker.parts(&prompt.context)),
        (Split::Marked, Context::Examples(marker)) => {
            divide::pack(&marker.parts(&prompt.context), options.chunk_tokens, text)?
        }
        _ if prompt.context.is_empty() => Vec::new(),
        _ => vec![prompt.context],
    };
    // A summary is one line, and never empty.
    let samsum = task.name == "samsum";
    Ok(Sample {
        id: line.id.clone(),
        before: prompt.before,
        documents,
        question: prompt.question,
        chat: task.chat(),
        max_tokens: task.max_tokens,
        min_tokens: usize::from(samsum),
        stop: if samsum { vec!["\n".into()] } else { Vec::new() },
        context_words: line.length,
        gold: Gold {
            answers: line.answers.clone(),
            classes: line.all_classes.clone().unwrap_or_default(),
            ..Gold::default()
        },
        ..Sample::default()
    })
}

fn owned(parts: &[&str]) -> Vec<String> {
    parts.iter().map(|part| (*part).into()).collect()
}

#[cfg(test)]
mod tests;
