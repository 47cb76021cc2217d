//! Tasks by name: the samples of a matrix.

use std::collections::HashSet;
use std::path::Path;

use refrain::model::{Specials, Tokenizer};
use serde::{Deserialize, Serialize};

use super::file::{DataFile, spread};
use super::needle::{self, Needle, NeedleStyle};
use super::ruler::{self, Ruler, RulerOptions};
use super::{Protocol, TaskData, TokenText, longbench, longgen, longwriter, rag};
use crate::{Error, Matrix, Result, Sample, Scoring, TaskInfo, TaskSpec};

/// Lengths of generated contexts, where none are given.
const LENGTHS: [usize; 1] = [4096];
/// Samples of a generated task, where no limit is given.
const GENERATED: usize = 50;
/// Tokens that a chat template may take.
const TEMPLATE: usize = 128;
/// Depths of the needle, where none are given.
const DEPTHS: usize = 10;

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

/// The properties of a model that samples depend on.
#[derive(Clone, Copy, Debug)]
pub struct TaskModel<'a> {
    /// The model's tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// Its context.
    pub context: usize,
    /// Tokens of a chunk.
    pub chunk_tokens: usize,
}

impl TokenText for TaskModel<'_> {
    fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let ids = self.tokenizer.encode(text, Specials::Plain);
        ids.map_err(|error| Error::Engine(error.into()))
    }

    fn decode(&self, ids: &[u32]) -> String {
        self.tokenizer.decode(ids, true)
    }
}

impl TaskModel<'_> {
    fn count(&self, text: &str) -> usize {
        self.encode(text).map_or(usize::MAX / 2, |ids| ids.len())
    }

    /// Tokens that a LongBench prompt is cut to: somewhat under the window, as the benchmark's own configurations have it.
    fn prompt_tokens(&self) -> usize {
        let windows = [(32_768, 31_500), (16_384, 15_500), (8192, 7500), (4096, 3500)];
        let fits = windows.iter().find(|(window, _)| self.context >= *window);
        // Answers have up to 512 tokens.
        fits.map_or(self.context.saturating_sub(512 + TEMPLATE), |(_, tokens)| *tokens)
    }
}

/// Long outputs: names, the sets that they are read from, and whose settings.
const LONG_OUTPUTS: [(&str, &str, Protocol, &str); 8] = [
    ("longgenbench/short", "short", Protocol::Own, "LongGenBench, the 16K setting"),
    ("longgenbench/long", "long", Protocol::Own, "the 32K setting"),
    (
        "longgenbench/morphkv",
        "short",
        Protocol::MorphKv,
        "MorphKV's 40 prompts of the 16K setting; its judge is asked in the benchmark's own words",
    ),
    ("longwriter/en", "longbench_write_en", Protocol::Own, "LongBench-Write, English"),
    ("longwriter/all", "longbench_write", Protocol::Own, "LongBench-Write, English and Chinese"),
    ("longwriter/ruler", "longwrite_ruler", Protocol::Own, "LongWrite-Ruler, of which only lengths count"),
    ("longwriter/morphkv", "longbench_write_en", Protocol::MorphKv, "with MorphKV's limit of new tokens"),
    ("longwriter/morphkv_ruler", "longwrite_ruler", Protocol::MorphKv, "the same of LongWrite-Ruler"),
];

/// Names of all tasks and suites, each with a description.
pub fn names() -> Vec<(String, String)> {
    let mut names = vec![
        ("needle".to_owned(), "needle in a haystack: lengths × depths, generated".to_owned()),
        ("ruler".to_owned(), "all 11 generated tasks of RULER".to_owned()),
    ];
    names.extend(ruler::TASKS.iter().map(|task| (format!("ruler/{}", task.name), String::new())));
    names.push((
        "ruler/qa".to_owned(),
        "questions of a file (`file`), padded with its other documents".to_owned(),
    ));
    for (suite, tasks) in longbench::SUITES {
        names.push((format!("longbench/{suite}"), tasks.join(", ")));
    }
    names.push(("longbench/all".to_owned(), "all 21 tasks of LongBench".to_owned()));
    let editions = "; NAME_e: of LongBench-E; NAME_short: a derived set";
    for (index, task) in longbench::TASKS.iter().enumerate() {
        let what = if index == 0 { format!("one of LongBench{editions}") } else { String::new() };
        names.push((format!("longbench/{}", task.name), what));
    }
    let rag = "questions with separate documents: rag/NAME.jsonl of the data, or `file`";
    names.push(("rag/NAME".to_owned(), rag.to_owned()));
    names.extend(LONG_OUTPUTS.iter().map(|(name, _, _, what)| ((*name).to_owned(), (*what).to_owned())));
    names
}

/// The jobs of all tasks of a matrix for a model, and the names of the tasks of its suites that the data lack.
///
/// # Errors
/// If a task does not exist, its data are missing or malformed, or it is named twice with different options.
pub fn load(matrix: &Matrix, model: &TaskModel<'_>) -> Result<(Vec<LoadedTask>, Vec<String>)> {
    let mut jobs: Vec<(&TaskSpec, LoadedTask)> = Vec::new();
    let mut missing = Vec::new();
    for spec in &matrix.tasks {
        for job in (TaskLoader { matrix, spec, model }).jobs(&mut missing)? {
            let same = |known: &&(&TaskSpec, LoadedTask)| known.1.about.same_as(&job.about);
            let Some((known, _)) = jobs.iter().find(same) else {
                jobs.push((spec, job));
                continue;
            };
            if (TaskSpec { name: String::new(), ..(*known).clone() })
                != (TaskSpec { name: String::new(), ..spec.clone() })
            {
                let task = job.about.label();
                return Err(Error::Invalid(format!("{task} is asked for twice, with other options")));
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
    Ok((jobs, missing))
}

struct TaskLoader<'a> {
    matrix: &'a Matrix,
    spec: &'a TaskSpec,
    model: &'a TaskModel<'a>,
}

impl TaskLoader<'_> {
    fn jobs(&self, missing: &mut Vec<String>) -> Result<Vec<LoadedTask>> {
        let (benchmark, task) = self.spec.name.split_once('/').unwrap_or((&self.spec.name, ""));
        match (benchmark, task) {
            ("needle", "") => self.needle(),
            ("ruler", "") => self.ruler(ruler::TASKS),
            ("ruler", "qa") => self.questions(),
            ("ruler", task) => match ruler::TASKS.iter().position(|known| known.name == task) {
                Some(index) => self.ruler(&ruler::TASKS[index..=index]),
                None => Err(self.unknown()),
            },
            ("longbench", "all") => {
                let tasks: Vec<&str> = longbench::TASKS.iter().map(|task| task.name).collect();
                self.suite(&tasks, missing)
            }
            ("longbench", task) if !task.is_empty() => {
                match longbench::SUITES.iter().find(|(suite, _)| *suite == task) {
                    Some((_, tasks)) => self.suite(tasks, missing),
                    None => Ok(vec![self.longbench(task)?]),
                }
            }
            ("rag", task) if !task.is_empty() => Ok(vec![self.rag(task)?]),
            _ => match LONG_OUTPUTS.iter().find(|(name, ..)| *name == self.spec.name) {
                Some((_, set, protocol, _)) => Ok(vec![self.long_output(task, set, *protocol)?]),
                None => Err(self.unknown()),
            },
        }
    }

    fn unknown(&self) -> Error {
        let name = &self.spec.name;
        Error::Invalid(format!("there is no task {name:?}; `refrain eval tasks` lists them"))
    }

    fn limit(&self) -> Option<usize> {
        self.spec.limit.or(self.matrix.limit)
    }

    fn max_tokens(&self) -> Option<usize> {
        self.spec.max_tokens.or(self.matrix.max_tokens)
    }

    fn lengths(&self) -> &[usize] {
        if self.spec.lengths.is_empty() { &LENGTHS } else { &self.spec.lengths }
    }

    /// A folder of the data, if it exists; generated tasks do without.
    fn folder(&self, name: &str) -> Option<std::path::PathBuf> {
        Some(self.matrix.data.as_ref()?.join(name)).filter(|folder| folder.is_dir())
    }

    /// The data's folder.
    fn data(&self) -> Result<&Path> {
        self.matrix.data.as_deref().ok_or_else(|| {
            let name = &self.spec.name;
            Error::Invalid(format!(
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
            ..TaskInfo::default()
        };
        LoadedTask { about, scoring, first_line: false, temperature: 0.0, top_p: 1.0, samples }
    }

    /// A job a length.
    fn needle(&self) -> Result<Vec<LoadedTask>> {
        let folder = self.folder("needle");
        let needle = Needle::open(folder.as_deref())?;
        let style = match self.spec.style.as_deref() {
            None | Some("kv_papers") => NeedleStyle::KvPapers,
            Some("kvpress") => NeedleStyle::Kvpress,
            Some("kamradt") => NeedleStyle::Kamradt,
            Some(other) => {
                let known = "kv_papers, kvpress and kamradt";
                return Err(Error::Invalid(format!(
                    "needle: there is no style {other:?}; there are {known}"
                )));
            }
        };
        let job = |length: &usize| {
            let depths = needle::depths(self.spec.depths.unwrap_or(DEPTHS));
            let sample = |depth| {
                let mut sample = needle.sample(*length, depth, self.model, style)?;
                sample.max_tokens = self.max_tokens().unwrap_or(sample.max_tokens);
                Ok(sample)
            };
            let chosen = spread(depths.len(), self.limit()).map(|index| depths[index]);
            let samples = chosen.map(sample).collect::<Result<_>>()?;
            let mut job = self.job("needle", Scoring::Needle, samples);
            job.about.length = Some(*length);
            self.note(&mut job, needle.source());
            if let Some(style) = &self.spec.style {
                self.note(&mut job, &format!("style {style}"));
            }
            Ok(job)
        };
        self.lengths().iter().map(job).collect()
    }

    fn ruler(&self, tasks: &[ruler::Task]) -> Result<Vec<LoadedTask>> {
        let folder = self.folder("ruler");
        let ruler = Ruler::open(folder.as_deref())?;
        let options = RulerOptions { max_tokens: self.max_tokens(), chat: true };
        let (count, model) = (self.limit().unwrap_or(GENERATED), self.model);
        let mut jobs = Vec::new();
        for length in self.lengths() {
            for task in tasks {
                let tokens = |text: &str| model.count(text);
                let (fits, seed) = (self.fitting(*length), self.matrix.seed);
                let samples = ruler.samples(task.name, fits, count, seed, &tokens, &options)?;
                jobs.push(self.generated(task.name, task.scoring, samples, *length, &ruler.source()));
            }
        }
        Ok(jobs)
    }

    fn questions(&self) -> Result<Vec<LoadedTask>> {
        let file = self.spec.file.as_deref().ok_or_else(|| {
            Error::Invalid("ruler/qa needs a file of questions with their documents: `file = ...`".to_owned())
        })?;
        let questions = ruler::Questions::open(file)?;
        let options = RulerOptions { max_tokens: self.max_tokens(), chat: true };
        let count = self.limit().unwrap_or(GENERATED);
        let job = |length: &usize| {
            let tokens = |text: &str| self.model.count(text);
            let (fits, seed) = (self.fitting(*length), self.matrix.seed);
            let samples = questions.samples(fits, count, seed, &tokens, &options)?;
            let name = file.file_name().unwrap_or_default().to_string_lossy();
            let mut job = self.generated("qa", ruler::QA.scoring, samples, *length, &name);
            job.about.data = Some(DataFile::open(file)?.hash());
            Ok(job)
        };
        self.lengths().iter().map(job).collect()
    }

    /// RULER's length without the chat template, which must fit the context as well.
    fn fitting(&self, length: usize) -> usize {
        length.min(self.model.context.saturating_sub(TEMPLATE))
    }

    /// A job of samples that were fitted to `length`.
    fn generated(
        &self,
        task: &str,
        scoring: Scoring,
        mut samples: Vec<Sample>,
        length: usize,
        source: &str,
    ) -> LoadedTask {
        samples.iter_mut().for_each(|sample| sample.length = Some(length));
        let mut job = self.job(task, scoring, samples);
        job.about.length = Some(length);
        self.note(&mut job, source);
        if self.fitting(length) < length {
            let fits =
                format!("fitted to {} tokens, so that the chat template fits too", self.fitting(length));
            self.note(&mut job, &fits);
        }
        if let Some(most) = self.max_tokens() {
            self.note(&mut job, &format!("at most {most} new tokens"));
        }
        job
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
        if let Some(most) = self.max_tokens() {
            self.note(&mut job, &format!("at most {most} new tokens"));
        }
        if self.spec.by_tokens {
            self.note(&mut job, &format!("cut every {} tokens", self.model.chunk_tokens));
        }
        job
    }

    fn longbench(&self, name: &str) -> Result<LoadedTask> {
        let options = longbench::LongBenchOptions {
            max_prompt_tokens: self.matrix.max_prompt_tokens.unwrap_or(self.model.prompt_tokens()),
            chunk_tokens: self.model.chunk_tokens,
            split: if self.spec.by_tokens { longbench::Split::Tokens } else { longbench::Split::Marked },
        };
        longbench::task(name).map_err(|_| self.unknown())?;
        Ok(self.of(name, longbench::samples(name, self.data()?, self.limit(), &options, self.model)?))
    }

    /// The tasks of LongBench whose files exist.
    fn suite(&self, tasks: &[&str], missing: &mut Vec<String>) -> Result<Vec<LoadedTask>> {
        let mut jobs = Vec::new();
        for task in tasks {
            if longbench::is_there(task, self.data()?) {
                jobs.push(self.longbench(task)?);
            } else {
                missing.push(format!("longbench/{task}"));
            }
        }
        // All of them missing is a wrong folder.
        if jobs.is_empty() { self.longbench(tasks[0]).map(|job| vec![job]) } else { Ok(jobs) }
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
