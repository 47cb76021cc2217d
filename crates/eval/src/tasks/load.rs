//! Tasks by name: the samples of a matrix.

use std::collections::HashSet;
use std::path::Path;

use refrain::model::{Specials, Tokenizer};
use serde::{Deserialize, Serialize};

use super::file::{DataFile, spread};
use super::names::LONG_OUTPUTS;
use super::needle::{self, Needle, NeedleStyle};
use super::ruler::{self, Ruler, RulerOptions};
use super::{Protocol, TaskData, TokenText, longbench, longgen, longwriter, rag};
use crate::{Error, Matrix, Result, Sample, Scoring, TaskInfo, TaskSpec};

/// Lengths of generated contexts, where none are given.
const LENGTHS: [usize; 1] = [4096];
/// Samples of a generated task, where no limit is given.
const GENERATED: usize = 50;
/// Samples that RULER itself has of a task.
const RULER_SAMPLES: usize = 500;
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
    /// The name that records have.
    pub name: &'a str,
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

    /// Tokens that a LongBench prompt is cut to: somewhat under the window, as the benchmark's own configurations have it, which leaves room
    /// for its answers of up to 512 tokens. Longer answers take room from the prompt, down to half of the context.
    fn prompt_tokens(&self, max_tokens: Option<usize>) -> usize {
        let windows = [(32_768, 31_500), (16_384, 15_500), (8192, 7500), (4096, 3500)];
        let fits = windows.iter().find(|(window, _)| self.context >= *window);
        let beside = |answer: usize| self.context.saturating_sub(answer.saturating_add(TEMPLATE));
        let own = fits.map_or(beside(512), |(_, tokens)| *tokens);
        max_tokens.map_or(own, |most| own.min(beside(most).max(self.context / 2)))
    }
}

/// The jobs of all tasks of a matrix for a model, and the tasks that are left out, each with the reason: the data lack one of a suite, or the
/// model's context is shorter than the length.
///
/// # Errors
/// If a task does not exist, its data are missing or malformed, or it is named twice with different options.
pub fn load(matrix: &Matrix, model: &TaskModel<'_>) -> Result<(Vec<LoadedTask>, Vec<String>)> {
    let mut jobs: Vec<(&TaskSpec, LoadedTask)> = Vec::new();
    let mut left_out = Vec::new();
    for spec in &matrix.tasks {
        for job in (TaskLoader { matrix, spec, model }).jobs(&mut left_out)? {
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
    Ok((jobs, left_out))
}

struct TaskLoader<'a> {
    matrix: &'a Matrix,
    spec: &'a TaskSpec,
    model: &'a TaskModel<'a>,
}

impl TaskLoader<'_> {
    fn jobs(&self, left_out: &mut Vec<String>) -> Result<Vec<LoadedTask>> {
        let (benchmark, task) = self.spec.name.split_once('/').unwrap_or((&self.spec.name, ""));
        match (benchmark, task) {
            ("needle", "") => self.needle(),
            ("ruler", "") => self.ruler(ruler::TASKS, left_out),
            ("ruler", "qa") => self.questions(left_out),
            ("ruler", task) => match ruler::TASKS.iter().position(|known| known.name == task) {
                Some(index) => self.ruler(&ruler::TASKS[index..=index], left_out),
                None => Err(self.unknown()),
            },
            ("longbench", "all") => {
                let tasks: Vec<&str> = longbench::TASKS.iter().map(|task| task.name).collect();
                self.suite(&tasks, left_out)
            }
            ("longbench", task) if !task.is_empty() => {
                match longbench::SUITES.iter().find(|(suite, _)| *suite == task) {
                    Some((_, tasks)) => self.suite(tasks, left_out),
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
            self.note_limit(&mut job);
            Ok(job)
        };
        self.lengths().iter().map(job).collect()
    }

    fn ruler(&self, tasks: &[ruler::Task], left_out: &mut Vec<String>) -> Result<Vec<LoadedTask>> {
        let folder = self.folder("ruler");
        let ruler = Ruler::open(folder.as_deref())?;
        let options = RulerOptions { max_tokens: self.max_tokens(), chat: true };
        let (count, model) = (self.limit().unwrap_or(GENERATED), self.model);
        let mut jobs = Vec::new();
        for length in self.lengths_within_context(left_out) {
            for task in tasks {
                let tokens = |text: &str| model.count(text);
                let (fits, seed) = (self.fitting(length), self.matrix.seed);
                let samples = ruler.samples(task.name, fits, count, seed, &tokens, &options)?;
                let mut job = self.generated(task.name, task.scoring, samples, length, &ruler.source());
                job.about.of = Some(RULER_SAMPLES);
                jobs.push(job);
            }
        }
        Ok(jobs)
    }

    fn questions(&self, left_out: &mut Vec<String>) -> Result<Vec<LoadedTask>> {
        let file = self.spec.file.as_deref().ok_or_else(|| {
            Error::Invalid("ruler/qa needs a file of questions with their documents: `file = ...`".to_owned())
        })?;
        let questions = ruler::Questions::open(file)?;
        let options = RulerOptions { max_tokens: self.max_tokens(), chat: true };
        let count = self.limit().unwrap_or(GENERATED);
        let job = |length: usize| {
            let tokens = |text: &str| self.model.count(text);
            let (fits, seed) = (self.fitting(length), self.matrix.seed);
            let samples = questions.samples(fits, count, seed, &tokens, &options)?;
            let name = file.file_name().unwrap_or_default().to_string_lossy();
            let mut job = self.generated("qa", ruler::QA.scoring, samples, length, &name);
            job.about.data = Some(DataFile::open(file)?.hash());
            Ok(job)
        };
        self.lengths_within_context(left_out).into_iter().map(job).collect()
    }

    /// The lengths that the model's context has room for. Of the others no sample is made: a shorter one measures another length.
    fn lengths_within_context(&self, left_out: &mut Vec<String>) -> Vec<usize> {
        let context = self.model.context;
        let (within, beyond): (Vec<usize>, Vec<usize>) =
            self.lengths().iter().copied().partition(|length| *length <= context);
        let name = &self.spec.name;
        let why = |length| format!("{name} at {length} (longer than the context of {context} tokens)");
        left_out.extend(beyond.into_iter().map(why));
        within
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
            job.about.model_notes.insert(self.model.name.to_owned(), fits);
        }
        self.note_limit(&mut job);
        job
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

    fn longbench(&self, name: &str) -> Result<LoadedTask> {
        let options = longbench::LongBenchOptions {
            max_prompt_tokens: self
                .matrix
                .max_prompt_tokens
                .unwrap_or_else(|| self.model.prompt_tokens(self.max_tokens())),
            chunk_tokens: self.model.chunk_tokens,
            split: if self.spec.by_tokens { longbench::Split::Tokens } else { longbench::Split::Marked },
        };
        longbench::task(name).map_err(|_| self.unknown())?;
        Ok(self.of(name, longbench::samples(name, self.data()?, self.limit(), &options, self.model)?))
    }

    /// The tasks of LongBench whose files exist.
    fn suite(&self, tasks: &[&str], left_out: &mut Vec<String>) -> Result<Vec<LoadedTask>> {
        let mut jobs = Vec::new();
        for task in tasks {
            if longbench::is_there(task, self.data()?) {
                jobs.push(self.longbench(task)?);
            } else {
                left_out.push(format!("longbench/{task} (not in the data)"));
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

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use refrain::model::ModelFiles;

    use super::*;

    /// Tasks, and those left out, of a matrix of one task on a tiny model with this context.
    fn loaded(task: TaskSpec, context: usize) -> (Vec<LoadedTask>, Vec<String>) {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
        let tokenizer = Tokenizer::open(&ModelFiles::open(path).unwrap()).unwrap();
        let matrix = Matrix { tasks: vec![task], limit: Some(1), ..Matrix::default() };
        load(&matrix, &TaskModel { name: "tiny", tokenizer: &tokenizer, context, chunk_tokens: 64 }).unwrap()
    }

    fn task(name: &str, lengths: &[usize]) -> TaskSpec {
        TaskSpec { name: name.to_owned(), lengths: lengths.to_vec(), ..TaskSpec::default() }
    }

    #[test]
    fn lengths_beyond_the_context_are_left_out() {
        let (jobs, left_out) = loaded(task("ruler/niah_single_1", &[512, 1024, 4096]), 1024);
        assert_eq!(left_out, ["ruler/niah_single_1 at 4096 (longer than the context of 1024 tokens)"]);
        let lengths: Vec<_> = jobs.iter().map(|job| (job.about.length, job.about.of)).collect();
        assert_eq!(lengths, [(Some(512), Some(500)), (Some(1024), Some(500))]);
        // Within the room of the chat template the length is fitted, which is a matter of the model.
        assert!(
            jobs.iter().all(|job| !job.about.note.contains("fitted")) && jobs[0].about.model_notes.is_empty()
        );
        assert_eq!(
            jobs[1].about.model_notes["tiny"],
            "fitted to 896 tokens, so that the chat template fits too"
        );
    }

    #[test]
    fn a_limit_of_new_tokens_is_noted_of_every_task() {
        for name in ["needle", "ruler/niah_single_1"] {
            let (jobs, _) = loaded(TaskSpec { max_tokens: Some(9), ..task(name, &[400]) }, 512);
            assert!(jobs[0].about.note.ends_with("; at most 9 new tokens"), "{}", jobs[0].about.note);
            assert_eq!(jobs[0].samples[0].max_tokens, 9);
        }
    }

    #[test]
    fn long_answers_take_room_from_longbench_prompts() {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
        let tokenizer = Tokenizer::open(&ModelFiles::open(path).unwrap()).unwrap();
        let tokens = |context, most| {
            TaskModel { name: "tiny", tokenizer: &tokenizer, context, chunk_tokens: 64 }.prompt_tokens(most)
        };
        assert_eq!((tokens(4096, None), tokens(4096, Some(64)), tokens(1000, None)), (3500, 3500, 360));
        assert_eq!((tokens(4096, Some(1000)), tokens(4096, Some(4000))), (2968, 2048));
    }
}
