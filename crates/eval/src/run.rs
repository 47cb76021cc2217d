//! A run: every sample answered by every variant, a line of `results.jsonl` each. A stopped run goes on where it stopped.

use std::collections::{HashMap, HashSet};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use refrain::engine::Engine;

use crate::error::{Error, Result};
use crate::record::Record;
use crate::run_info::RunInfo;
use crate::sample::Sample;
use crate::sample_run::SampleRun;
use crate::scoring::Scorer;
use crate::tasks::LoadedTask;
use crate::variant::{RunOptions, Variant};

/// Progress of a run.
#[derive(Clone, Copy, Debug)]
pub struct RunProgress<'a> {
    /// Work done, in bytes of prompts; a new token counts as some bytes.
    pub done: usize,
    /// All work, in the same unit.
    pub total: usize,
    /// Answers that failed, or that the judge failed to grade.
    pub failed: usize,
    /// The current task.
    pub task: &'a str,
    /// The current method.
    pub method: &'a str,
}

/// The folder of a run, open and locked for more records.
#[derive(Debug)]
pub struct Run {
    folder: PathBuf,
    about: RunInfo,
    /// None where the run has no task and its folder is not made: settings of a run of nothing must not bind later ones.
    results: Option<Results>,
    /// Records that have an answer and its scores.
    done: HashSet<Key>,
    /// Records with an answer that could not be scored, or that the judge has not graded yet.
    unscored: HashMap<Key, Record>,
    /// Changes since the run was begun that its times depend on, in words.
    changes: Vec<String>,
    opened: Instant,
}

/// Model, benchmark, task, length, sample, method, policy.
type Key = (String, String, String, Option<usize>, String, String, String);

fn key(record: &Record) -> Key {
    let Record { model, benchmark, task, length, sample, method, policy, .. } = record.clone();
    (model, benchmark, task, length, sample, method, policy)
}

/// Reads the folder of a run for a report.
///
/// # Errors
/// If there is no run, or a line other than the last is broken.
pub fn read(folder: &Path) -> Result<(RunInfo, Vec<Record>)> {
    let about = read_about(folder)?;
    let path = folder.join("results.jsonl");
    let results = path.exists().then(|| File::open(&path).map_err(|error| Error::data(&path, error)));
    let records = results.transpose()?.map(|mut file| read_records(&mut file, &path)).transpose()?;
    Ok((about, records.map_or_else(Vec::new, |(records, _)| records)))
}

fn read_about(folder: &Path) -> Result<RunInfo> {
    let path = folder.join("about.json");
    let text = std::fs::read_to_string(&path)
        .map_err(|error| Error::data(&path, format!("{error}; is this the folder of a run?")))?;
    serde_json::from_str(&text).map_err(|error| Error::data(&path, error))
}

/// `results.jsonl` of a run before it is locked. It has no way to be read: another run may still append to it.
struct UnlockedResults {
    file: File,
    path: PathBuf,
}

/// `results.jsonl` of a run, locked for as long as it lives.
#[derive(Debug)]
struct Results {
    file: File,
    path: PathBuf,
}

impl UnlockedResults {
    fn open(folder: &Path) -> Result<UnlockedResults> {
        let path = folder.join("results.jsonl");
        let file = OpenOptions::new().create(true).read(true).append(true).open(&path);
        let file = file.map_err(|error| Error::data(&path, error))?;
        Ok(UnlockedResults { file, path })
    }

    fn lock(self) -> Result<Results> {
        let UnlockedResults { file, path } = self;
        file.try_lock().map_err(|error| not_locked(&path, error))?;
        Ok(Results { file, path })
    }
}

/// The error of a file that cannot be locked: another run has the lock, or the file system has no locks.
fn not_locked(path: &Path, error: TryLockError) -> Error {
    match error {
        TryLockError::WouldBlock => Error::data(path, "another run is writing here; wait for it to end"),
        TryLockError::Error(error) => {
            Error::data(path, format!("cannot lock it: {error}; give a folder on a file system with locks"))
        }
    }
}

impl Results {
    /// The whole records. Part of a line at the end, left by a killed run, is cut off.
    fn records(&mut self) -> Result<Vec<Record>> {
        let (records, whole) = read_records(&mut self.file, &self.path)?;
        self.file.set_len(whole).map_err(|error| Error::data(&self.path, error))?;
        Ok(records)
    }

    fn append(&mut self, record: &Record) -> Result<()> {
        let mut line = serde_json::to_vec(record).map_err(|error| Error::data(&self.path, error))?;
        line.push(b'\n');
        self.file.write_all(&line).map_err(|error| Error::data(&self.path, error))
    }
}

/// The whole records of a file, and the bytes that they take: a killed run may leave part of a line at the end.
fn read_records(file: &mut File, path: &Path) -> Result<(Vec<Record>, u64)> {
    let fail = |error: std::io::Error| Error::data(path, error);
    file.rewind().map_err(fail)?;
    let mut reader = BufReader::new(file);
    let (mut records, mut bytes, mut line) = (Vec::new(), 0, Vec::new());
    loop {
        line.clear();
        let read = reader.read_until(b'\n', &mut line).map_err(fail)?;
        if read == 0 || line.last() != Some(&b'\n') {
            return Ok((records, bytes));
        }
        let record = serde_json::from_slice(&line)
            .map_err(|error| Error::data(path, format!("line {}: {error}", records.len() + 1)))?;
        records.push(record);
        bytes += read as u64;
    }
}

/// Writes a run that was made in parts, elsewhere or at other times, to a folder, as if one run had made all of it. What the folder has
/// already is not written again. Returns the changes between parts that times depend on, such as another machine, in words.
///
/// # Errors
/// If there is no part, parts were made with different settings, models or data, or the folder cannot be written.
pub fn merge(folder: &Path, parts: impl IntoIterator<Item = (RunInfo, Vec<Record>)>) -> Result<Vec<String>> {
    let (mut records, mut changes) = (Vec::new(), Vec::new());
    let mut whole: Option<RunInfo> = None;
    for (mut about, part) in parts {
        let seconds = about.seconds;
        if let Some(known) = whole.take() {
            for change in about.continue_from(&known).map_err(Error::Invalid)? {
                if !changes.contains(&change) {
                    changes.push(change);
                }
            }
            about.seconds = known.seconds + seconds;
            about.started = known.started.min(about.started);
        }
        whole = Some(about);
        records.extend(part);
    }
    let about = whole.ok_or_else(|| Error::Invalid("there is no part of a run yet".to_owned()))?;
    let mut run = Run::open(folder, about.clone())?;
    // The time was spent elsewhere, not on merging.
    run.about.seconds = about.seconds;
    for record in records {
        if !run.done.contains(&key(&record)) {
            run.append(record)?;
        }
    }
    run.write_about()?;
    Ok(changes)
}

impl Run {
    /// Opens the folder of a run, or makes it, unless the run has no task. Answers that the folder already has are not made again. Those that a judge
    /// has yet to grade are only graded.
    ///
    /// # Errors
    /// If the folder cannot be written, another run is writing there, or its results were made with other settings.
    pub fn open(folder: &Path, mut about: RunInfo) -> Result<Run> {
        let is_made = folder.join("about.json").exists();
        let mut results = None;
        if is_made || !about.tasks.is_empty() {
            std::fs::create_dir_all(folder).map_err(|error| Error::data(folder, error))?;
            results = Some(UnlockedResults::open(folder)?.lock()?);
        }
        let records = results.as_mut().map_or_else(|| Ok(Vec::new()), Results::records)?;
        let changes = if is_made {
            let mut known = read_about(folder)?;
            known.keep_judges_of(&records);
            about.continue_from(&known).map_err(|reason| Error::data(folder, reason))?
        } else {
            Vec::new()
        };
        let (good, bad): (Vec<Record>, _) =
            records.into_iter().partition(|record| record.error.is_none() && about.is_graded(record));
        let unscored = bad.into_iter().filter(|record| record.cost.is_some());
        let run = Run {
            folder: folder.to_owned(),
            about,
            results,
            done: good.iter().map(key).collect(),
            unscored: unscored.map(|record| (key(&record), record)).collect(),
            changes,
            opened: Instant::now(),
        };
        run.write_about()?;
        Ok(run)
    }

    /// Changes since the run was begun that its times depend on, such as another machine, in words.
    pub fn changes(&self) -> &[String] {
        &self.changes
    }

    /// Number of a model's answers that need not be made again.
    pub fn known(&self, model: &str) -> usize {
        self.done.iter().filter(|key| key.0 == model).count()
    }

    /// Writes `about.json`, with the time that the run has taken so far, unless the run has no task.
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub fn write_about(&self) -> Result<()> {
        if self.results.is_none() {
            return Ok(());
        }
        let path = self.folder.join("about.json");
        let about = RunInfo {
            seconds: self.about.seconds + self.opened.elapsed().as_secs_f64(),
            ..self.about.clone()
        };
        let text = serde_json::to_string_pretty(&about).map_err(|error| Error::data(&path, error))?;
        let part = self.folder.join("about.json.part");
        let written = std::fs::write(&part, text).and_then(|()| std::fs::rename(&part, &path));
        written.map_err(|error| Error::data(&path, error))
    }

    /// Answers the samples of all jobs by all variants, the first samples of every job first, so that a stopped run has
    /// some of each. `progress` is called before every batch of answers, and at the end; if it returns false the run stops. Returns
    /// whether all is done.
    ///
    /// # Errors
    /// If the folder cannot be written, or the device has failed. An error of a sample, such as memory that runs out, is in its record.
    pub fn answer(
        &mut self,
        (name, engine): (&str, &Engine),
        jobs: &[LoadedTask],
        variants: &[Variant],
        options: &RunOptions,
        scorer: &Scorer<'_>,
        mut progress: impl FnMut(RunProgress<'_>) -> bool,
    ) -> Result<bool> {
        let device = engine.decoder().device();
        let all = jobs.iter().flat_map(|job| &job.samples);
        let total = all.map(weight).sum();
        let (mut done, mut failed) = (0, 0);
        let most = jobs.iter().map(|job| job.samples.len()).max().unwrap_or(0);
        for index in 0..most {
            for job in jobs.iter().filter(|job| index < job.samples.len()) {
                let sample = &job.samples[index];
                let left: Vec<&Variant> = variants
                    .iter()
                    .filter(|variant| !self.done.contains(&key(&blank(name, job, sample, variant))))
                    .collect();
                if !left.is_empty() && options.until.is_some_and(|until| Instant::now() >= until) {
                    progress(RunProgress { done, total, failed, task: "", method: "" });
                    return Ok(false);
                }
                let mut sample_run = SampleRun::new(engine, job, sample, variants, options, scorer);
                for variants in left.chunks(options.batch.max(1)) {
                    let task = job.about.label();
                    let method = &variants[0].method;
                    if !progress(RunProgress { done, total, failed, task: &task, method }) {
                        return Ok(false);
                    }
                    let mut blank = |variant| {
                        let blank = blank(name, job, sample, variant);
                        (variant, self.unscored.remove(&key(&blank)).unwrap_or(blank))
                    };
                    let blanks = variants.iter().map(|variant| blank(variant)).collect();
                    let mut records = sample_run.answer(blanks);
                    let failure = device.failure();
                    if failure.is_some() {
                        // A missing answer is the device's failure and not one of its sample.
                        records.retain(|record| record.cost.is_some());
                    }
                    for record in records {
                        failed += usize::from(record.failure().is_some());
                        self.append(record)?;
                    }
                    if let Some(failure) = failure {
                        self.write_about()?;
                        return Err(Error::Device(failure));
                    }
                }
                done += weight(sample);
            }
            self.write_about()?;
        }
        progress(RunProgress { done, total, failed, task: "", method: "" });
        Ok(true)
    }

    fn append(&mut self, record: Record) -> Result<()> {
        let Some(results) = &mut self.results else {
            return Err(Error::data(&self.folder, "a run without a task takes no answer"));
        };
        results.append(&record)?;
        if record.error.is_none() && self.about.is_graded(&record) {
            self.done.insert(key(&record));
        }
        Ok(())
    }
}

/// Work of a sample: bytes of its prompt, and those that its new tokens count as.
fn weight(sample: &Sample) -> usize {
    const NEW_TOKEN: usize = 40;
    let documents: usize = sample.documents.iter().map(String::len).sum();
    sample.before.len() + documents + sample.question.len() + NEW_TOKEN * sample.max_tokens
}

/// The record of an answer to come.
fn blank(model: &str, job: &LoadedTask, sample: &Sample, variant: &Variant) -> Record {
    Record {
        model: model.to_owned(),
        benchmark: job.about.benchmark.clone(),
        task: job.about.task.clone(),
        length: sample.length,
        depth: sample.depth,
        context_words: sample.context_words,
        sample: sample.id.clone(),
        method: variant.method.clone(),
        policy: variant.policy.clone(),
        ..Record::default()
    }
}

/// The time that is left when a share of the work is done.
pub fn left(done: usize, total: usize, elapsed: Duration) -> Option<Duration> {
    (done > 0).then(|| elapsed.mul_f64((total - done.min(total)) as f64 / done as f64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TaskInfo;

    #[test]
    fn a_run_without_a_task_makes_no_folder() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("run");
        let about = |seed, tasks| RunInfo { seed, tasks, ..RunInfo::default() };
        Run::open(&folder, about(42, Vec::new())).unwrap().write_about().unwrap();
        assert!(!folder.exists());
        drop(Run::open(&folder, about(7, vec![TaskInfo::default()])).unwrap());
        let error = Run::open(&folder, about(42, Vec::new())).unwrap_err();
        assert!(error.to_string().contains("seed 7, not 42"), "{error}");
    }

    #[test]
    fn a_file_system_without_locks_is_not_told_as_another_run() {
        let no_locks = std::io::Error::from(std::io::ErrorKind::Unsupported);
        let told = |error| not_locked(Path::new("r/results.jsonl"), error).to_string();
        let said = told(TryLockError::Error(no_locks));
        assert!(
            said.starts_with("r/results.jsonl: cannot lock it: ") && !said.contains("another run"),
            "{said}"
        );
        assert!(told(TryLockError::WouldBlock).contains("another run is writing here"));
    }

    /// A run that read before it had the lock would miss what the other appended in between, and cut it off.
    #[test]
    fn a_line_appended_between_opening_and_locking_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let record = |sample: &str| Record { sample: sample.to_owned(), ..Record::default() };
        let about = || RunInfo { tasks: vec![TaskInfo::default()], ..RunInfo::default() };
        let append = |sample| {
            Run::open(folder.path(), about()).unwrap().append(record(sample)).unwrap();
        };
        append("first");
        let late = UnlockedResults::open(folder.path()).unwrap();
        append("second");
        let mut late = late.lock().unwrap();
        let error = Run::open(folder.path(), about()).unwrap_err();
        assert!(error.to_string().contains("another run is writing here"), "{error}");
        let samples =
            |records: Vec<Record>| records.into_iter().map(|record| record.sample).collect::<Vec<_>>();
        assert_eq!(samples(late.records().unwrap()), ["first", "second"]);
        drop(late);
        assert_eq!(samples(read(folder.path()).unwrap().1), ["first", "second"]);
    }
}
