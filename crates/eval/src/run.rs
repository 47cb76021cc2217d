//! A run: every sample answered in every way, a line of `results.jsonl` each, going on where it was stopped.

use std::collections::{HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use refrain_engine::{Answer, Closeness, Engine, Parts, Prompt, Reference, Request, Sampling};
use refrain_eviction::Eviction;
use refrain_fusion::FusionMethod;
use refrain_store::KvQuantization;

use crate::scoring::Scorer;
use crate::tasks::Job;
use crate::{About, Cost, Error, Fidelity, Record, Result, Sample};

/// A method with a policy, and how documents lie in the store, by the names that records have.
#[derive(Clone, Debug)]
pub struct Way {
    /// As it was asked for.
    pub method: String,
    /// The method.
    pub fusion: Arc<dyn FusionMethod>,
    /// How the documents lie in the store.
    pub store_dtype: KvQuantization,
    /// As it was asked for.
    pub policy: String,
    /// The policy.
    pub eviction: Eviction,
}

impl Way {
    /// Whether it is what others are held against.
    fn is_reference(&self) -> bool {
        self.method == "vanilla" && self.policy == "full"
    }
}

/// How a run goes.
#[derive(Clone, Debug)]
pub struct Going {
    /// Tokens of vanilla's answer that others are forced to.
    pub forced: usize,
    /// Whether attention is compared as well.
    pub maps: bool,
    /// Seed of sampled answers.
    pub seed: u64,
    /// When no further sample is begun.
    pub until: Option<Instant>,
}

/// Where a run is.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// Work that is done, in bytes of prompts and what weighs like them.
    pub done: usize,
    /// Work in all.
    pub total: usize,
    /// Answers that failed.
    pub failed: usize,
    /// The task at hand.
    pub task: &'a str,
    /// The method at hand.
    pub method: &'a str,
}

/// A run's folder, open for more records.
#[derive(Debug)]
pub struct Run {
    folder: PathBuf,
    about: About,
    results: File,
    /// What needs not be done again.
    done: HashSet<Key>,
    /// Answers that could not be scored.
    unscored: HashMap<Key, Record>,
    since: Instant,
}

/// Model, benchmark, task, length, sample, method, policy.
type Key = (String, String, String, Option<usize>, String, String, String);

fn key(record: &Record) -> Key {
    let Record { model, benchmark, task, length, sample, method, policy, .. } = record.clone();
    (model, benchmark, task, length, sample, method, policy)
}

/// Reads a run's folder for a report.
///
/// # Errors
/// If there is no run, or a line of it is broken that is not the last.
pub fn read(folder: &Path) -> Result<(About, Vec<Record>)> {
    let path = folder.join("about.json");
    let text = std::fs::read_to_string(&path)
        .map_err(|error| Error::data(&path, format!("{error}; is this the folder of a run?")))?;
    let about = serde_json::from_str(&text).map_err(|error| Error::data(&path, error))?;
    let path = folder.join("results.jsonl");
    let records = if path.exists() { records(&path)?.0 } else { Vec::new() };
    Ok((about, records))
}

/// Whole records of a file, and the bytes that they take: a run that was killed may leave part of a line at the end.
fn records(path: &Path) -> Result<(Vec<Record>, u64)> {
    let fail = |error: std::io::Error| Error::data(path, error);
    let mut reader = BufReader::new(File::open(path).map_err(fail)?);
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

impl Run {
    /// Opens a run's folder, or makes it. One that is there already goes on: what it has is not done again.
    ///
    /// # Errors
    /// If the folder cannot be written, or its results were made with other settings.
    pub fn open(folder: &Path, mut about: About) -> Result<Run> {
        std::fs::create_dir_all(folder).map_err(|error| Error::data(folder, error))?;
        let path = folder.join("results.jsonl");
        let (mut done, mut unscored) = (HashSet::new(), HashMap::new());
        let mut whole = 0;
        if folder.join("about.json").exists() {
            let (known, _) = read(folder)?;
            about.goes_on(&known).map_err(|reason| Error::data(folder, reason))?;
        }
        if path.exists() {
            let (records, bytes) = records(&path)?;
            let (good, bad): (Vec<Record>, _) =
                records.into_iter().partition(|record| record.error.is_none());
            done.extend(good.iter().map(key));
            let kept = |record: Record| record.cost.is_some().then(|| (key(&record), record));
            unscored.extend(bad.into_iter().filter_map(kept));
            whole = bytes;
        }
        let fail = |error: std::io::Error| Error::data(&path, error);
        let results = OpenOptions::new().create(true).append(true).open(&path).map_err(fail)?;
        results
            .try_lock()
            .map_err(|_| Error::data(folder, "another run is writing here; wait for it to end"))?;
        results.set_len(whole).map_err(fail)?;
        let since = Instant::now();
        let run = Run { folder: folder.to_owned(), about, results, done, unscored, since };
        run.keep_about()?;
        Ok(run)
    }

    /// Answers of a model that need not be made again.
    pub fn known(&self, model: &str) -> usize {
        self.done.iter().filter(|key| key.0 == model).count()
    }

    /// Writes what was run, with the time that it has taken so far.
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub fn keep_about(&self) -> Result<()> {
        let path = self.folder.join("about.json");
        let about =
            About { seconds: self.about.seconds + self.since.elapsed().as_secs_f64(), ..self.about.clone() };
        let text = serde_json::to_string_pretty(&about).map_err(|error| Error::data(&path, error))?;
        let part = self.folder.join("about.json.part");
        let written = std::fs::write(&part, text).and_then(|()| std::fs::rename(&part, &path));
        written.map_err(|error| Error::data(&path, error))
    }

    /// Answers the samples of all jobs in all ways, the first samples of every job first: a run that is stopped has some
    /// of each. `progress` is told of every answer; if it returns false the run stops there. Returns whether all is done.
    ///
    /// # Errors
    /// If the folder cannot be written. What goes wrong with a sample is in its record.
    pub fn answer(
        &mut self,
        (name, engine): (&str, &Engine),
        jobs: &[Job],
        ways: &[Way],
        going: &Going,
        scorer: &Scorer<'_>,
        mut progress: impl FnMut(Step<'_>) -> bool,
    ) -> Result<bool> {
        let all = jobs.iter().flat_map(|job| &job.samples);
        let total = all.map(weight).sum();
        let (mut done, mut failed) = (0, 0);
        let most = jobs.iter().map(|job| job.samples.len()).max().unwrap_or(0);
        for index in 0..most {
            for job in jobs.iter().filter(|job| index < job.samples.len()) {
                let sample = &job.samples[index];
                let left: Vec<&Way> = ways
                    .iter()
                    .filter(|way| !self.done.contains(&key(&blank(name, job, sample, way))))
                    .collect();
                if !left.is_empty() && going.until.is_some_and(|until| Instant::now() >= until) {
                    return Ok(false);
                }
                let mut asking = Asking { engine, job, sample, ways, going, scorer, reference: None };
                for way in left {
                    let task = job.about.label();
                    if !progress(Step { done, total, failed, task: &task, method: &way.method }) {
                        return Ok(false);
                    }
                    let blank = blank(name, job, sample, way);
                    let record = asking.answer(way, self.unscored.remove(&key(&blank)).unwrap_or(blank));
                    failed += usize::from(record.error.is_some());
                    self.keep(record)?;
                }
                done += weight(sample);
            }
            self.keep_about()?;
        }
        progress(Step { done, total, failed, task: "", method: "" });
        Ok(true)
    }

    fn keep(&mut self, record: Record) -> Result<()> {
        let path = || self.folder.join("results.jsonl");
        let mut line = serde_json::to_vec(&record).map_err(|error| Error::data(path(), error))?;
        line.push(b'\n');
        self.results.write_all(&line).map_err(|error| Error::data(path(), error))?;
        if record.error.is_none() {
            self.done.insert(key(&record));
        }
        Ok(())
    }
}

/// About what a sample takes: bytes of its prompt, and what a new token costs beside one of them.
fn weight(sample: &Sample) -> usize {
    const NEW_TOKEN: usize = 40;
    let documents: usize = sample.documents.iter().map(String::len).sum();
    sample.before.len() + documents + sample.question.len() + NEW_TOKEN * sample.max_tokens
}

/// A record of what is to be answered.
fn blank(model: &str, job: &Job, sample: &Sample, way: &Way) -> Record {
    Record {
        model: model.to_owned(),
        benchmark: job.about.benchmark.clone(),
        task: job.about.task.clone(),
        length: sample.length,
        depth: sample.depth,
        sample: sample.id.clone(),
        method: way.method.clone(),
        policy: way.policy.clone(),
        ..Record::default()
    }
}

/// One sample, answered in several ways.
struct Asking<'a> {
    engine: &'a Engine,
    job: &'a Job,
    sample: &'a Sample,
    ways: &'a [Way],
    going: &'a Going,
    scorer: &'a Scorer<'a>,
    /// The prompt and vanilla's answer, once they are there.
    reference: Option<(Prompt, Reference)>,
}

impl Asking<'_> {
    /// A record with its answer, or with why there is none. One that could not be scored keeps its answer, and is only
    /// scored the next time.
    fn answer(&mut self, way: &Way, blank: Record) -> Record {
        let mut record = Record { error: None, ..blank };
        if record.cost.is_none() {
            match self.try_answer(way) {
                Ok((answer, fidelity)) => {
                    let config = self.engine.decoder().config();
                    record.cost = Some(Cost::of(&answer.account, config.heads / config.kv_heads));
                    (record.answer, record.fidelity) = (answer.text, Some(fidelity));
                }
                Err(error) => record.error = Some(error.to_string()),
            }
        }
        if record.error.is_none() {
            let Job { scoring, first_line, .. } = *self.job;
            match self.scorer.scores(scoring, first_line, self.sample, &record.answer) {
                Ok(scores) => record.scores = scores,
                Err(error) => record.error = Some(error.to_string()),
            }
        }
        record.finished = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        record
    }

    fn try_answer(&mut self, way: &Way) -> Result<(Answer, Fidelity)> {
        let sampling = self.sampling();
        if self.reference.is_none() {
            let prompt = self.prompt()?;
            // A greedy answer to a sampled task is nothing but what the others are forced to.
            let greedy = sampling.temperature == 0.0;
            let most = if greedy { sampling.max_tokens } else { sampling.max_tokens.min(self.going.forced) };
            let asked = Sampling { max_tokens: most, ..sampling.clone() };
            let reference = self.engine.reference(&prompt, &asked, self.going.forced, self.going.maps)?;
            for encoding in KvQuantization::ALL {
                let ways = self.ways.iter().filter(|way| way.store_dtype == encoding);
                let methods: Vec<_> = ways.map(|way| way.fusion.as_ref()).collect();
                self.engine.store_dtype(encoding).ingest_prompt(&prompt, &methods)?;
            }
            self.reference = Some((prompt, reference));
        }
        let Some((prompt, reference)) = &self.reference else {
            return Err(Error::Asked("vanilla has not answered".to_owned()));
        };
        let (answer, fidelity) = if way.is_reference() && sampling.temperature == 0.0 {
            let positions = reference.positions(self.engine);
            let fidelity = Fidelity { top1: 1.0, positions, ..Fidelity::default() };
            (reference.answer.clone(), fidelity)
        } else {
            let request = Request { eviction: &way.eviction, ..Request::new(way.fusion.as_ref(), &sampling) };
            let (answer, close) =
                self.engine.store_dtype(way.store_dtype).answer_beside(prompt, &request, reference)?;
            (answer, fidelity(close))
        };
        if !fidelity.kl.is_finite() || fidelity.attention_l2.iter().any(|l2| !l2.is_finite()) {
            return Err(Error::Asked("the model's logits or attention are not numbers".to_owned()));
        }
        Ok((answer, fidelity))
    }

    fn prompt(&self) -> Result<Prompt> {
        let Sample { before, documents, question, answer_prefix, chat, .. } = self.sample;
        Ok(self.engine.compose(&Parts {
            before,
            documents,
            // One text has no bounds of its own.
            apart: documents.len() == 1,
            question,
            answer_prefix,
            chat: *chat,
        })?)
    }

    fn sampling(&self) -> Sampling {
        Sampling {
            temperature: self.job.temperature as f32,
            top_p: self.job.top_p as f32,
            max_tokens: self.sample.max_tokens,
            min_tokens: self.sample.min_tokens,
            stop: self.sample.stop.clone(),
            seed: self.going.seed,
            ..Sampling::default()
        }
    }
}

fn fidelity(close: Closeness) -> Fidelity {
    Fidelity {
        kl: close.agreement.kl,
        top1: close.agreement.top1,
        positions: close.agreement.positions,
        attention_l2: close.attention_l2,
        hit_rate_40: close.hits.map(|hits| hits.best),
        hit_rate: close.hits.map(|hits| hits.as_many),
    }
}

/// Seconds left, when a share of the work is done.
pub fn left(done: usize, total: usize, elapsed: Duration) -> Option<Duration> {
    (done > 0).then(|| elapsed.mul_f64((total - done.min(total)) as f64 / done as f64))
}
