//! Evaluation as a job: samples are planned with all that their prompts hold, so that runners need no data but the model.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;

use anyhow::{Context as _, Result};
use refrain::engine::Engine;
use refrain::model::{ModelFiles, Tokenizer};
use refrain::store::hex;
use refrain_eval::run::{Run, merge, read};
use refrain_eval::tasks::{LoadedTask, TaskModel, TokenText};
use refrain_eval::{Judge, Matrix, Record, RunInfo, Scorer, Variant};
use refrain_jobs::{Control, Error as JobError, Failed, Item, Job, ShardSize, Undone, Work, repeat};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use super::kind::EVAL;
use super::planned::{new_plan, open, tell, to_map};
use super::runner::Runner;
use super::settings::Computing;

use crate::args;
use crate::eval::{
    about, is_graded, is_sam_kv, judge, judge_template, layers_text, matrix, prefix_texts, samples, variants,
};
use crate::output::{Fail, count, json_path, one_line, print, print_json, warn};
use crate::settings::Context;

/// The settings of an evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct EvalSettings {
    #[serde(flatten)]
    computing: Computing,
    /// Fingerprints of the models, by name.
    models: BTreeMap<String, String>,
    matrix: Matrix,
    judge: Option<String>,
    judge_model: Option<String>,
    /// The prompt of LongWriter's judge.
    quality: Option<String>,
    /// SHA-256 of each file that is a prefix, by the prefix.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    prefix_texts: BTreeMap<String, String>,
    /// Stable layers of the models that SamKV answers with, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    stable_layers: BTreeMap<String, String>,
}

/// A sample, with those who answer it.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct EvalItem {
    model: String,
    /// The first variant of the matrix that answers, and the one after the last.
    variants: (usize, usize),
    /// Its task, with this sample alone.
    task: LoadedTask,
}

/// What a shard came to.
#[derive(Debug, Serialize, Deserialize)]
struct Outcome {
    about: Option<RunInfo>,
    records: Vec<Record>,
}

/// `refrain job plan eval`
pub(super) fn plan(context: &Context, args: &args::PlanEval) -> Result<()> {
    let matrix = resolved(context, matrix(context, &args.selection)?)?;
    let variants = variants(context, &matrix)?;
    let (number, prefix_texts) = (variants.len(), prefix_texts(&variants)?);
    let block = args.shard_methods.map_or(number, |most| most as usize);
    let judge = args.judge.judge.as_ref().map(|url| judge(url, &args.judge.judge_model));
    let size = ShardSize { items: args.shard_samples as usize, weight: u64::MAX };
    let mut plan = new_plan(context, &args.job, size)?;
    let (mut models, mut stable_layers, mut quality) = (BTreeMap::new(), BTreeMap::new(), None);
    for model in &matrix.models {
        let mut context = context.clone();
        context.global.model.clone_from(model);
        let jobs = unloaded_samples(&context, &matrix, judge.as_ref())?;
        let identity = context.model_identity()?;
        if is_sam_kv(&variants) {
            let layers = unloaded_layers(&context, &hex::encode(&identity[..8]))?;
            stable_layers.insert(model.clone(), layers);
        }
        models.insert(model.clone(), hex::encode(&identity));
        quality = quality.or(judge_template(judge.as_ref(), &matrix, &jobs)?);
        for (job, first) in
            jobs.iter().flat_map(|job| (0..number).step_by(block).map(move |first| (job, first)))
        {
            let variants = (first, number.min(first + block));
            let group = format!("{model}\n{}\n{first}", job.about.label());
            for sample in &job.samples {
                let task = LoadedTask { samples: vec![sample.clone()], ..job.clone() };
                let body = EvalItem { model: model.clone(), variants, task };
                let weight = (variants.1 - variants.0) as u64;
                plan.add(&group, &Item { id: id(&body)?, weight, body })?;
            }
        }
    }
    let judge_model = judge.as_ref().map(|judge| judge.model().to_owned());
    let settings = EvalSettings {
        computing: Computing::of(context),
        models,
        matrix: without_paths(matrix),
        judge: args.judge.judge.clone(),
        judge_model,
        quality,
        prefix_texts,
        stable_layers,
    };
    let planned = plan.finish(EVAL, to_map(&settings)?)?;
    tell(context, &args.job, &planned, &[], 0)
}

/// The matrix with what options leave open, so that it says all.
fn resolved(context: &Context, mut matrix: Matrix) -> Result<Matrix> {
    matrix.check()?;
    if matrix.store_dtype.is_empty() {
        matrix.store_dtype = vec![context.global.store_dtype.to_string()];
    }
    if matrix.prefix.is_empty() {
        matrix.prefix = vec![crate::eval::default_prefix(context)?.to_string()];
    }
    Ok(matrix)
}

/// The matrix without the files of this machine, whose content is in the items.
fn without_paths(mut matrix: Matrix) -> Matrix {
    matrix.data = None;
    matrix.tasks.iter_mut().for_each(|task| task.file = None);
    matrix
}

/// Names an item by all that it holds.
fn id(item: &EvalItem) -> Result<String> {
    let hash = hex::encode(&Sha256::digest(serde_json::to_vec(item)?));
    Ok(format!("sample-{}", &hash[..24]))
}

/// The tasks of a matrix for the model that the options name, which is not loaded.
fn unloaded_samples(context: &Context, matrix: &Matrix, judge: Option<&Judge>) -> Result<Vec<LoadedTask>> {
    let name = context.global.model.as_str();
    let files = ModelFiles::open(refrain::resolve(name, &context.models)?)?;
    let tokenizer = Tokenizer::open(&files)?;
    let most = files.config().context;
    let chunk_tokens = context.global.chunk_tokens.min(most.saturating_sub(1).max(1));
    samples(context, matrix, &TaskModel { name, tokenizer: &tokenizer, context: most, chunk_tokens }, judge)
}

/// The stable layers of the model that the options name, which is not loaded and has this fingerprint.
fn unloaded_layers(context: &Context, fingerprint: &str) -> Result<String> {
    let files = ModelFiles::open(refrain::resolve(&context.global.model, &context.models)?)?;
    let (given, data) = (context.global.calibration.as_deref(), context.data_folder.as_deref());
    let model = (fingerprint, files.config().num_layers());
    let warn = &mut |warning: &str| context.console.warn(warning);
    Ok(layers_text(refrain::stable_layers(given, data, model, warn)?))
}

/// `refrain job run` of an evaluation.
pub(super) fn run(context: &Context, job: &Job, runner: &Runner<'_>) -> Result<()> {
    let planned: EvalSettings = job.settings(EVAL)?;
    let mut context = context.clone();
    planned.computing.apply(&mut context)?;
    let computing = Computing::of(&context);
    let variants = variants(&context, &planned.matrix)?;
    let own = EvalSettings { computing, prefix_texts: prefix_texts(&variants)?, ..planned.clone() };
    job.manifest().check_settings(EVAL, &to_map(&own)?)?;
    let judge =
        planned.judge.as_ref().zip(planned.judge_model.as_ref()).map(|(url, model)| judge(url, model));
    let judge = judge.filter(|_| is_graded(&planned.matrix));
    let folder = tempfile::tempdir().context("cannot create a folder for answers")?;
    let settings = &planned;
    let mut work = EvalWork { context: &context, settings, variants, judge, runner, engine: None, folder };
    runner.run(&context, job, &mut work)
}

/// The outcome of a sample.
enum Answered {
    Whole,
    /// The work is to end before.
    Interrupted,
    /// An answer failed.
    Failed(String),
    /// All answers are there, and the judge has not graded one.
    Ungraded(String),
}

/// Answers samples, each shard in a folder of its own.
struct EvalWork<'a> {
    context: &'a Context,
    settings: &'a EvalSettings,
    variants: Vec<Variant>,
    /// The judge, where a task asks one.
    judge: Option<Judge>,
    runner: &'a Runner<'a>,
    /// The model that answered last.
    engine: Option<(String, Context, Engine)>,
    folder: TempDir,
}

impl EvalWork<'_> {
    /// Opens the model of this name, unless it is open.
    fn open(&mut self, name: &str) -> Result<(&Context, &Engine)> {
        if self.engine.as_ref().is_none_or(|(open, ..)| open != name) {
            // Two models at a time may be too much.
            self.engine = None;
            let mut context = self.context.clone();
            // Where the job has one model, --model says where it is here.
            if self.settings.models.len() > 1 || !context.is_given("model") {
                name.clone_into(&mut context.global.model);
            }
            let engine = context.memory_engine()?;
            let found = hex::encode(&engine.fingerprint());
            if self.settings.models.get(name) != Some(&found) {
                return Err(JobError::OtherMachine(format!(
                    "{} here is not the model that the job was planned with: fetch that one, or give its place with --model",
                    context.global.model
                ))
                .into());
            }
            let stable = layers_text(engine.stable_layers().map(|layers| layers.range()));
            if let Some(planned) = self.settings.stable_layers.get(name).filter(|planned| **planned != stable)
            {
                return Err(JobError::OtherMachine(format!(
                    "stable layers of SamKV on {name} are {planned} in the job and {stable} here: give the planner's calibration with --calibration"
                ))
                .into());
            }
            self.engine = Some((name.to_owned(), context, engine));
        }
        match &self.engine {
            Some((_, context, engine)) => Ok((context, engine)),
            None => Err(Fail::new("no model is open").into()),
        }
    }

    /// Waits until the judge replies, if there is one: for as long as the runner's patience says, or until it is to stop.
    fn wait_for_judge(&self) -> Result<(), Undone> {
        let Some(judge) = &self.judge else { return Ok(()) };
        let (is_stopped, mut is_told) = (|| self.runner.stop.load(Relaxed), false);
        let replies = repeat(self.runner.options.patience, || {
            judge.check().map_err(|error| match error {
                refrain_eval::Error::Judge { passing: true, .. } if !is_stopped() => {
                    if !std::mem::replace(&mut is_told, true) {
                        self.context.console.warn(&format!("waiting for the judge: {error}"));
                    }
                    Failed::Passing(error)
                }
                error => Failed::Lasting(error),
            })
        });
        replies.map_err(|error| match is_stopped() {
            true => Undone::Interrupted,
            false => {
                let advice = "check OPENAI_API_KEY, and the --judge and --judge-model of the plan";
                Undone::Runner(format!("the judge does not reply: {error}; {advice}").into())
            }
        })
    }

    /// Answers a sample by all its variants that have not answered it.
    fn answer(&mut self, item: &EvalItem, control: &Control<'_>) -> Result<Answered> {
        let folder = self.folder.path().to_owned();
        let (settings, (first, end)) = (self.settings, item.variants);
        self.open(&item.model)?;
        let Some((name, context, engine)) = &self.engine else { return Ok(Answered::Interrupted) };
        let variants = self.variants.get(first..end).unwrap_or_default();
        let jobs = std::slice::from_ref(&item.task);
        let mut run = Run::open(&folder, about(context, name, &settings.matrix, variants, engine, jobs)?)?;
        let model = TaskModel::of(name, engine);
        let encode = |text: &str| model.encode(text).unwrap_or_default();
        let scorer =
            Scorer { judge: self.judge.as_ref(), quality: settings.quality.as_deref(), encode: &encode };
        let options = settings.matrix.run_options(None);
        let mut failed = 0;
        let is_whole = run.answer((name, engine), jobs, variants, &options, &scorer, |step| {
            failed = step.failed;
            !control.is_over()
        })?;
        if !is_whole {
            return Ok(Answered::Interrupted);
        }
        if failed == 0 {
            return Ok(Answered::Whole);
        }
        // Records of earlier samples and tries stand before.
        let records = read(&folder)?.1.into_iter().rev();
        let failed: Vec<Record> = records.filter(|record| record.failure().is_some()).take(failed).collect();
        let error = failed.iter().find_map(|record| record.error.clone());
        let ungraded = || failed.iter().find_map(Record::failure).unwrap_or_default();
        Ok(error.map_or_else(|| Answered::Ungraded(ungraded()), Answered::Failed))
    }
}

impl Work for EvalWork<'_> {
    type Body = EvalItem;

    fn name(&self, item: &Item<EvalItem>) -> String {
        let sample = item.body.task.samples.first().map_or("", |sample| sample.id.as_str());
        format!("{} of {} on {}", sample, item.body.task.about.label(), item.body.model)
    }

    fn begin(&mut self) -> Result<(), Undone> {
        self.folder = tempfile::tempdir()?;
        // Answers are made once the judge replies, which grades them.
        self.wait_for_judge()
    }

    fn item(&mut self, item: &Item<EvalItem>, control: &Control<'_>) -> Result<(), Undone> {
        match self.answer(&item.body, control) {
            Ok(Answered::Whole) => Ok(()),
            Ok(Answered::Interrupted) => Err(Undone::Interrupted),
            Ok(Answered::Failed(error)) => Err(Undone::Item(error)),
            // A judge that replies now is asked for the grades again, and the answer is at fault if it fails then.
            Ok(Answered::Ungraded(error)) => self.wait_for_judge().and(Err(Undone::Item(error))),
            Err(error) => Err(Undone::Runner(match error.downcast::<JobError>() {
                Ok(error) => error.into(),
                Err(error) => error.into(),
            })),
        }
    }

    fn finish(&mut self) -> Result<Value, Undone> {
        let folder = self.folder.path();
        if !folder.join("about.json").exists() {
            return Ok(json!(Outcome { about: None, records: Vec::new() }));
        }
        let (about, records) = read(folder)?;
        Ok(json!(Outcome { about: Some(about), records }))
    }
}

/// `refrain job results`
pub(super) fn results(context: &Context, args: &args::JobResults) -> Result<()> {
    let job = open(context, &args.job)?;
    if job.manifest().kind != EVAL {
        let kind = one_line(&job.manifest().kind);
        return Err(Fail::new(format!("{} is a job of {kind} and has no answers", args.job.url)).into());
    }
    let _: EvalSettings = job.settings(EVAL)?;
    let (mut parts, mut answers) = (Vec::new(), 0);
    let done = job.results()?;
    let (shards, all) = (done.len(), job.manifest().shards.len());
    for (shard, done) in done {
        let outcome: Outcome = serde_json::from_value(done.result)
            .with_context(|| format!("the answers of shard {shard} cannot be read"))?;
        answers += outcome.records.iter().filter(|record| record.error.is_none()).count();
        parts.extend(outcome.about.map(|about| (about, outcome.records)));
    }
    if parts.is_empty() {
        return Err(Fail::new("no shard has an answer yet").hint("`refrain job run` makes some").into());
    }
    for change in merge(&args.out, parts)? {
        warn(&change);
    }
    let failed = job.failed()?.len();
    if context.json {
        let run = json_path(&args.out);
        return print_json(
            &json!({ "run": run, "answers": answers, "failed": failed, "shards": all, "done": shards }),
        );
    }
    let without = if failed > 0 { format!(" ({} failed)", count(failed, "sample")) } else { String::new() };
    print(&format!(
        "{}{without} of {shards} of {} in {}\n",
        count(answers, "answer"),
        count(all, "shard"),
        args.out.display()
    ))?;
    context.say(&format!("tables and pictures: refrain eval report {}", args.out.display()));
    Ok(())
}
