//! Tasks by name: the samples of a matrix.

mod generated;
mod model;

use std::collections::HashSet;
use std::path::Path;

use serde::{Deserialize, Serialize};

pub use self::model::TaskModel;
use super::names::LONG_OUTPUTS;
use super::{Protocol, TaskData, longbench, longgen, longwriter, rag, ruler};
use crate::matrix::MIN_PROMPT_TOKENS;
use crate::{Error, Matrix, Result, Sample, Scoring, TaskInfo, TaskSpec};

/// A task with its samples, ready to be answered.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LoadedTask {
    /// For the report.
    pub about: TaskInfo,
    /// How answers are scored.
    pub scoring: Scoring,
    /// Whether only the first line of an answer counts.
    pub first_line: bool,
    /// Softmax temperature; 0 takes the likeliest token.
    pub temperature: f64,
    /// Its nucleus; 1 for all.
    pub top_p: f64,
    /// In order.
    pub samples: Vec<Sample>,
}

/// Parts of a matrix that have no samples, and warnings about those that have.
#[derive(Clone, Debug, Default)]
pub struct LoadNotes {
    /// Tasks, lengths and questions that are left out, each with the reason: the data lack one of a suite, or the model's context is too short.
    pub left_out: Vec<String>,
    /// Whole sentences on data that built-in text stands in for.
    pub warnings: Vec<String>,
}

/// The jobs of all tasks of a matrix for a model, and what is told beside them.
///
/// # Errors
/// If a task does not exist, its data are missing or malformed, or it is named twice with different options.
pub fn load(matrix: &Matrix, model: &TaskModel<'_>) -> Result<(Vec<LoadedTask>, LoadNotes)> {
    let mut jobs: Vec<(&TaskSpec, LoadedTask)> = Vec::new();
    let mut notes = LoadNotes::default();
    for spec in &matrix.tasks {
        for job in (TaskLoader { matrix, spec, model }).jobs(&mut notes)? {
            let same = |known: &&(&TaskSpec, LoadedTask)| known.1.about.same_as(&job.about);
            let Some((known, _)) = jobs.iter().find(same) else {
                jobs.push((spec, job));
                continue;
            };
            if (TaskSpec { name: String::new(), ..(*known).clone() })
                != (TaskSpec { name: String::new(), ..spec.clone() })
            {
                let task = job.about.label();
                return Err(Error::Usage(format!("{task} is asked for twice, with other options")));
            }
        }
    }
    let mut jobs: Vec<LoadedTask> = jobs.into_iter().map(|(_, job)| job).collect();
    for job in &mut jobs {
        let mut seen = HashSet::new();
        for (index, sample) in job.samples.iter_mut().enumerate() {
            sample.chat &= matrix.chat;
            if !seen.insert(sample.id.clone()) {
                sample.id = format!("{}#{index}", sample.id);
            }
        }
    }
    Ok((jobs, notes))
}

struct TaskLoader<'a> {
    matrix: &'a Matrix,
    spec: &'a TaskSpec,
    model: &'a TaskModel<'a>,
}

impl TaskLoader<'_> {
    fn jobs(&self, notes: &mut LoadNotes) -> Result<Vec<LoadedTask>> {
        let (benchmark, task) = self.spec.name.split_once('/').unwrap_or((&self.spec.name, ""));
        match (benchmark, task) {
            ("needle", "") => self.needle(notes),
            ("ruler", "") => self.ruler(ruler::TASKS, notes),
            ("ruler", "qa") => self.questions(notes),
            ("ruler", task) => match ruler::TASKS.iter().position(|known| known.name == task) {
                Some(index) => self.ruler(&ruler::TASKS[index..=index], notes),
                None => Err(self.spec.unknown()),
            },
            ("longbench", "all") => {
                let tasks: Vec<&str> = longbench::TASKS.iter().map(|task| task.name).collect();
                self.suite(&tasks, notes)
            }
            ("longbench", task) if !task.is_empty() => {
                match longbench::SUITES.iter().find(|(suite, _)| *suite == task) {
                    Some((_, tasks)) => self.suite(tasks, notes),
                    None => Ok(self.longbench(task, notes)?.into_iter().collect()),
                }
            }
            ("rag", task) if !task.is_empty() => Ok(vec![self.rag(task)?]),
            _ => match LONG_OUTPUTS.iter().find(|(name, ..)| *name == self.spec.name) {
                Some((_, set, protocol, _)) => Ok(vec![self.long_output(task, set, *protocol)?]),
                None => Err(self.spec.unknown()),
            },
        }
    }

    fn limit(&self) -> Option<usize> {
        self.spec.limit.or(self.matrix.limit)
    }

    fn max_tokens(&self) -> Option<usize> {
        self.spec.max_tokens.or(self.matrix.max_tokens)
    }

    /// The data's folder.
    fn data(&self) -> Result<&Path> {
        self.matrix.data.as_deref().ok_or_else(|| {
            let name = &self.spec.name;
            Error::Usage(format!(
                "{name} needs data: give --data FOLDER (`refrain eval fetch` says where it comes from)"
            ))
        })
    }

    fn job(&self, task: &str, scoring: Scoring, samples: Vec<Sample>) -> LoadedTask {
        let benchmark = self.spec.name.split('/').next().unwrap_or_default().to_owned();
        let metric = scoring.name().to_owned();
        let scale = if scoring == Scoring::Needle { 10.0 } else { 100.0 };
        let about = TaskInfo {
            benchmark,
            task: task.to_owned(),
            metric,
            scale,
            samples: samples.len(),
            model_samples: [(self.model.name.to_owned(), samples.len())].into(),
            ..TaskInfo::default()
        };
        LoadedTask { about, scoring, first_line: false, temperature: 0.0, top_p: 1.0, samples }
    }

    /// Notes the limit of new tokens, where it is not the benchmark's.
    fn note_limit(&self, job: &mut LoadedTask) {
        if let Some(most) = self.max_tokens() {
            self.note(job, &format!("at most {most} new tokens"));
        }
    }

    /// Adds to the differences from the benchmark.
    fn note(&self, job: &mut LoadedTask, more: &str) {
        let note = &mut job.about.note;
        if !note.is_empty() && !more.is_empty() {
            note.push_str("; ");
        }
        note.push_str(more);
    }

    /// A job of data.
    fn of(&self, task: &str, mut loaded: TaskData) -> LoadedTask {
        if let Some(most) = self.max_tokens() {
            loaded.samples.iter_mut().for_each(|sample| sample.max_tokens = most);
        }
        let mut job = self.job(task, loaded.scoring, loaded.samples);
        (job.first_line, job.temperature, job.top_p) = (loaded.first_line, loaded.temperature, loaded.top_p);
        (job.about.of, job.about.note, job.about.data) = (loaded.of, loaded.note, Some(loaded.hash));
        self.note_limit(&mut job);
        if self.spec.by_tokens {
            self.note(&mut job, &format!("cut every {} tokens", self.model.chunk_tokens));
        }
        job
    }

    /// None where the model's context leaves no room for a prompt.
    fn longbench(&self, name: &str, notes: &mut LoadNotes) -> Result<Option<LoadedTask>> {
        let options = longbench::LongBenchOptions {
            max_prompt_tokens: self
                .matrix
                .max_prompt_tokens
                .unwrap_or_else(|| self.model.prompt_tokens(self.max_tokens())),
            chunk_tokens: self.model.chunk_tokens,
            split: if self.spec.by_tokens { longbench::Split::Tokens } else { longbench::Split::Marked },
        };
        longbench::task(name).map_err(|_| self.spec.unknown())?;
        let data = self.data()?;
        if options.max_prompt_tokens < MIN_PROMPT_TOKENS {
            let context = self.model.context;
            let why = format!("the context of {context} tokens leaves no room for prompts beside answers");
            notes.left_out.push(format!("longbench/{name} ({why}; `max_prompt_tokens` sets their length)"));
            return Ok(None);
        }
        let samples = longbench::samples(name, data, self.limit(), &options, self.model)?;
        Ok(Some(self.of(name, samples)))
    }

    /// The tasks of LongBench whose files exist. A task of LongBench-E that the data lack is taken from LongBench.
    fn suite(&self, tasks: &[&str], notes: &mut LoadNotes) -> Result<Vec<LoadedTask>> {
        let (mut jobs, mut missing) = (Vec::new(), 0);
        for task in tasks {
            let data = self.data()?;
            let sets = [*task, longbench::without_edition(task)];
            match sets.into_iter().find(|set| longbench::is_there(set, data)) {
                Some(set) => {
                    let mut job = self.longbench(set, notes)?;
                    if let Some(job) = job.as_mut().filter(|_| set != *task) {
                        self.note(job, "LongBench's set, where the paper has LongBench-E's");
                    }
                    jobs.extend(job);
                }
                None => {
                    missing += 1;
                    notes.left_out.push(format!("longbench/{task} (not in the data)"));
                }
            }
        }
        // All of them missing is a wrong folder.
        if missing == tasks.len() {
            jobs.extend(self.longbench(tasks[0], notes)?);
        }
        Ok(jobs)
    }

    fn rag(&self, name: &str) -> Result<LoadedTask> {
        let file = self.spec.file.clone().map_or_else(|| rag::find(name, self.data()?), Ok)?;
        Ok(self.of(name, rag::samples(&file, self.limit())?))
    }

    fn long_output(&self, task: &str, set: &str, protocol: Protocol) -> Result<LoadedTask> {
        let loaded = match self.spec.name.split('/').next() {
            Some("longwriter") => longwriter::samples(set, self.data()?, self.limit(), protocol)?,
            _ => longgen::samples(set, self.data()?, self.limit(), protocol)?,
        };
        Ok(self.of(task, loaded))
    }
}

#[cfg(test)]
mod tests;
