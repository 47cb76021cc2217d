//! Tasks that are generated at any length.

use std::path::PathBuf;

use super::model::TEMPLATE;
use super::{LoadNotes, LoadedTask, TaskLoader};
use crate::tasks::file::{DataFile, spread};
use crate::tasks::needle::{self, Needle, NeedleStyle};
use crate::tasks::ruler::{self, Ruler, RulerOptions};
use crate::{Error, Result, Sample, Scoring};

/// Lengths of generated contexts, where none are given.
const LENGTHS: [usize; 1] = [4096];
/// Samples of a generated task, where no limit is given.
const GENERATED: usize = 50;
/// Samples that RULER itself has of a task.
const RULER_SAMPLES: usize = 500;
/// Depths of the needle, where none are given.
const DEPTHS: usize = 10;

impl TaskLoader<'_> {
    /// Lengths of the contexts that are asked for.
    fn lengths(&self) -> &[usize] {
        if self.spec.lengths.is_empty() { &LENGTHS } else { &self.spec.lengths }
    }

    /// A generated task's folder of the data. The task does without it, and without parts of it.
    fn folder(&self, name: &str) -> Option<PathBuf> {
        Some(self.matrix.data.as_ref()?.join(name))
    }

    /// Notes the parts of a folder that are missing and that built-in text stands in for. Without a folder nothing is missing.
    fn note_missing(&self, folder: Option<PathBuf>, missing: &[&str], notes: &mut LoadNotes) {
        for path in folder.iter().flat_map(|folder| missing.iter().map(move |part| folder.join(part))) {
            let what = format!("{} is missing: built-in text stands in for it", path.display());
            let warning = format!("{what} (`refrain eval fetch` explains where data comes from)");
            if !notes.warnings.contains(&warning) {
                notes.warnings.push(warning);
            }
        }
    }

    /// A job a length.
    pub(super) fn needle(&self, notes: &mut LoadNotes) -> Result<Vec<LoadedTask>> {
        let folder = self.folder("needle");
        let needle = Needle::open(folder.as_deref())?;
        self.note_missing(folder, needle.missing(), notes);
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
        let job = |length: usize| {
            let depths = needle::depths(self.spec.depths.unwrap_or(DEPTHS));
            let sample = |depth| {
                let mut sample = needle.sample(length, depth, self.model, style)?;
                sample.max_tokens = self.max_tokens().unwrap_or(sample.max_tokens);
                Ok(sample)
            };
            let chosen = spread(depths.len(), self.limit()).map(|index| depths[index]);
            let samples = chosen.map(sample).collect::<Result<_>>()?;
            let mut job = self.job("needle", Scoring::Needle, samples);
            job.about.length = Some(length);
            job.about.data = needle.hash();
            self.note(&mut job, needle.source());
            if let Some(style) = &self.spec.style {
                self.note(&mut job, &format!("style {style}"));
            }
            self.note_limit(&mut job);
            Ok(job)
        };
        self.lengths_within_context(notes).into_iter().map(job).collect()
    }

    pub(super) fn ruler(&self, tasks: &[ruler::Task], notes: &mut LoadNotes) -> Result<Vec<LoadedTask>> {
        let folder = self.folder("ruler");
        let ruler = Ruler::open(folder.as_deref())?;
        self.note_missing(folder, &ruler.missing(), notes);
        let (count, model) = (self.limit().unwrap_or(GENERATED), self.model);
        let mut jobs = Vec::new();
        for length in self.lengths_within_context(notes) {
            let options = self.ruler_options(length);
            for task in tasks {
                let tokens = |text: &str| model.count(text);
                let seed = self.matrix.seed;
                let samples = ruler.samples(task.name, length, count, seed, &tokens, &options)?;
                let mut job = self.generated(task.name, task.scoring, samples, length, &ruler.source());
                (job.about.of, job.about.data) = (Some(RULER_SAMPLES), ruler.hash());
                jobs.push(job);
            }
        }
        Ok(jobs)
    }

    pub(super) fn questions(&self, notes: &mut LoadNotes) -> Result<Vec<LoadedTask>> {
        let file = self.spec.file.as_deref().ok_or_else(|| {
            Error::Invalid("ruler/qa needs a file of questions with their documents: `file = ...`".to_owned())
        })?;
        let questions = ruler::Questions::open(file)?;
        let (count, seed) = (self.limit().unwrap_or(GENERATED), self.matrix.seed);
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let tokens = |text: &str| self.model.count(text);
        let mut jobs = Vec::new();
        for length in self.lengths_within_context(notes) {
            let options = self.ruler_options(length);
            let samples = questions.samples(length, count, seed, &tokens, &options);
            let (samples, too_long) = samples.map_err(|error| Error::data(file, error))?;
            if !too_long.is_empty() {
                let numbers = too_long.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
                notes.left_out.push(format!("ruler/qa at {length} of {name}: question {numbers} (too long)"));
            }
            let all = samples.iter().filter(|sample| sample.documents.len() == questions.documents()).count();
            let mut job = self.generated("qa", ruler::QA.scoring, samples, length, &name);
            if all > 0 {
                let short = format!("{all} of {} samples hold all documents of {name}", job.samples.len());
                // The number depends on the tokenizer and on the limit, and a run goes on with others.
                job.about.note_of_model(self.model.name, &format!("{short} and may be shorter"));
                let mend = "a file of more documents gives longer ones";
                notes
                    .warnings
                    .push(format!("ruler/qa at {length}: {short} and may be shorter than that; {mend}"));
            }
            job.about.data = Some(DataFile::open(file)?.hash());
            jobs.push(job);
        }
        Ok(jobs)
    }

    /// The lengths that the model's context has room for. Of the others no sample is made: a shorter one measures another length.
    fn lengths_within_context(&self, notes: &mut LoadNotes) -> Vec<usize> {
        let context = self.model.context;
        let (within, beyond): (Vec<usize>, Vec<usize>) =
            self.lengths().iter().copied().partition(|length| *length <= context);
        let name = &self.spec.name;
        let why = |length| format!("{name} at {length} (longer than the context of {context} tokens)");
        notes.left_out.extend(beyond.into_iter().map(why));
        within
    }

    /// RULER's length without the chat template, which must fit the context as well.
    fn fitting(&self, length: usize) -> usize {
        length.min(self.model.context.saturating_sub(TEMPLATE))
    }

    fn ruler_options(&self, length: usize) -> RulerOptions {
        RulerOptions { max_tokens: self.max_tokens(), room: Some(self.fitting(length)) }
    }

    /// A job of samples that were fitted to `length`.
    fn generated(
        &self,
        task: &str,
        scoring: Scoring,
        samples: Vec<Sample>,
        length: usize,
        source: &str,
    ) -> LoadedTask {
        let mut job = self.job(task, scoring, samples);
        job.about.length = Some(length);
        self.note(&mut job, source);
        if self.fitting(length) < length {
            let fits =
                format!("fitted to {} tokens, so that the chat template fits too", self.fitting(length));
            job.about.note_of_model(self.model.name, &fits);
        }
        self.note_limit(&mut job);
        job
    }
}
