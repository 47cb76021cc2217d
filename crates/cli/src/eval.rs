//! `refrain eval`: benchmarks run, and reported.

mod about;
mod judge;
mod sources;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use indicatif::ProgressBar;
use refrain::engine::{Oracle, Prefix};
use refrain::registry::append;
use refrain::store::KvQuantization;
use refrain_eval::Judge;
use refrain_eval::Scorer;
use refrain_eval::run::{Run, RunProgress, left, read};
use refrain_eval::tasks::{LoadedTask, TaskModel, TokenText, load, names};
use refrain_eval::{Matrix, Record, RunInfo, TaskSpec, Variant};
use serde_json::json;

use crate::args::{self, PrefixArg};
use crate::methods;
use crate::output::{
    self, Exit, Fail, SOME_FAILED, age, count, json_path, json_paths, one_line, print, print_json, seconds,
};
use crate::settings::Context;
use crate::table::Table;
use refrain::folders::tilde;

pub(crate) use self::about::{about, is_sam_kv, layers_text, prefix_texts};
use self::judge::name_judge;
pub(crate) use self::judge::{is_graded, judge, judge_template};
pub(crate) use self::sources::fetch;

/// Distinct errors of answers that are told one by one.
const MOST_ERRORS: usize = 20;

/// The outcome of one model's part of a run, or of all of them.
#[derive(Default)]
struct ModelOutcome {
    whole: bool,
    tasks: usize,
    answers: usize,
    failed: usize,
    /// How many answers failed with each error.
    errors: BTreeMap<String, usize>,
}

/// `refrain eval run`
pub(crate) fn run(context: &Context, args: &args::EvalRun) -> Result<()> {
    let matrix = matrix(context, &args.selection)?;
    matrix.check()?;
    let variants = variants(context, &matrix)?;
    // A file that is missing is told before a model is opened.
    prefix_texts(&variants)?;
    let folder = args.out.clone().unwrap_or_else(|| {
        let stem = args.selection.matrix.as_ref().and_then(|path| path.file_stem());
        PathBuf::from(format!("eval-{}", stem.map_or("run".into(), |stem| stem.to_string_lossy())))
    });
    let judge = args.judge.judge.as_ref().map(|url| judge(url, &args.judge.judge_model));
    if let Some(judge) = judge.as_ref().filter(|_| is_graded(&matrix)) {
        let fail =
            || Fail::new("the judge does not reply").hint("check --judge, --judge-model and OPENAI_API_KEY");
        judge.check().with_context(fail)?;
    }
    let started = Instant::now();
    let mut all = ModelOutcome { whole: true, ..ModelOutcome::default() };
    for (index, model) in matrix.models.iter().enumerate() {
        let mut context = context.clone();
        context.global.model.clone_from(model);
        // The remaining time is shared out among the remaining models.
        let share = |budget: Duration| {
            budget.saturating_sub(started.elapsed()) / (matrix.models.len() - index) as u32
        };
        let until = args.time_budget.map(|budget| Instant::now() + share(budget));
        let part = one(&context, &matrix, &variants, &folder, judge.as_ref(), until)?;
        all.whole &= part.whole;
        all.tasks += part.tasks;
        all.answers += part.answers;
        all.failed += part.failed;
        part.errors.into_iter().for_each(|(error, failed)| *all.errors.entry(error).or_default() += failed);
    }
    if all.tasks == 0 {
        let hint = "give shorter --lengths, or a model with a longer context";
        return Err(Fail::new("no task is left to run: all are left out").hint(hint).into());
    }
    let told = told(context, &folder, &all, started.elapsed());
    // The status tells of failures where nobody reads the output, too.
    if all.failed > 0 { Err(Exit(SOME_FAILED).into()) } else { told }
}

/// Says what came of all parts of a run.
fn told(context: &Context, folder: &Path, outcome: &ModelOutcome, took: Duration) -> Result<()> {
    let ModelOutcome { whole, answers, failed, ref errors, .. } = *outcome;
    if context.json {
        let failure = |(error, answers)| json!({ "error": error, "answers": answers });
        return print_json(&json!({
            "run": json_path(folder), "complete": whole && failed == 0, "answers": answers, "failed": failed,
            "failures": errors.iter().map(failure).collect::<Vec<_>>(), "seconds": took.as_secs_f64(),
        }));
    }
    for (error, failed) in errors.iter().take(MOST_ERRORS) {
        output::warn(&format!("{} failed: {}", count(*failed, "answer"), one_line(error)));
    }
    if errors.len() > MOST_ERRORS {
        let more = count(errors.len() - MOST_ERRORS, "more error");
        output::warn(&format!("{more} in {}", folder.join("results.jsonl").display()));
    }
    let state = match (whole, failed) {
        (true, 0) => "complete",
        (true, _) => "complete but for these; the same command tries them again",
        (false, _) => "stopped by --time-budget; the same command goes on",
    };
    context.say(&format!(
        "{}, {failed} failed, in {}: {state}",
        count(answers, "answer"),
        seconds(took.as_secs_f64())
    ));
    context.say(&format!("tables and pictures: refrain eval report {}", folder.display()));
    Ok(())
}

fn read_matrix(path: &Path) -> Result<Matrix> {
    let hint = "a matrix is a file in TOML; tasks are named by --tasks, as in `--tasks needle` (`refrain eval tasks` lists them)";
    let fail = || Fail::new(format!("cannot read the matrix {}", path.display())).hint(hint);
    Matrix::read(path).with_context(fail)
}

/// The matrix, with the options of the command line.
pub(crate) fn matrix(context: &Context, args: &args::Selection) -> Result<Matrix> {
    let mut matrix = args.matrix.as_deref().map_or_else(|| Ok(Matrix::default()), read_matrix)?;
    fn given<T: Clone>(into: &mut Vec<T>, list: &[T]) {
        if !list.is_empty() {
            *into = list.to_vec();
        }
    }
    given(&mut matrix.models, &args.on);
    given(&mut matrix.methods, &args.methods);
    given(&mut matrix.policies, &args.policies);
    if matrix.models.is_empty() {
        matrix.models = vec![context.global.model.clone()];
    }
    if !args.tasks.is_empty() {
        let spec = |name: &String| TaskSpec { name: name.clone(), ..TaskSpec::default() };
        matrix.tasks = args.tasks.iter().map(spec).collect();
    }
    if !args.lengths.is_empty() {
        // A matrix without a task that has lengths refuses them.
        let any = matrix.tasks.iter().any(TaskSpec::has_lengths);
        let sized = matrix.tasks.iter_mut().filter(|task| !any || task.has_lengths());
        sized.for_each(|task| task.lengths.clone_from(&args.lengths));
    }
    if args.limit.is_some() {
        matrix.limit = args.limit;
        matrix.tasks.iter_mut().for_each(|task| task.limit = None);
    }
    if let Some(tokens) = args.max_tokens {
        matrix.max_tokens = Some(tokens as usize);
        matrix.tasks.iter_mut().for_each(|task| task.max_tokens = None);
    }
    matrix.data = args.data.clone().or(matrix.data);
    matrix.max_prompt_tokens = args.max_prompt_tokens.map(|n| n as usize).or(matrix.max_prompt_tokens);
    matrix.seed = args.seed.unwrap_or(matrix.seed);
    Ok(matrix)
}

/// The prefix where the matrix has none. A benchmark holds methods against each other as their papers have them, unless one is asked for.
///
/// # Errors
/// If it is given as auto, which is another one for each model and method.
pub(crate) fn default_prefix(context: &Context) -> Result<Prefix> {
    match &context.global.prefix {
        PrefixArg::Is(prefix) => Ok(prefix.clone()),
        PrefixArg::Auto if context.is_given("prefix") => {
            let fail = Fail::usage("an evaluation names the prefix of its chunks, and auto is none");
            Err(fail.hint("--prefix averaged is what `ask` and `serve` take for drift").into())
        }
        PrefixArg::Auto => Ok(Prefix::None),
    }
}

/// Methods × policies × encodings, vanilla with full attention first.
pub(crate) fn variants(context: &Context, matrix: &Matrix) -> Result<Vec<Variant>> {
    let first = |list: &[String], name: &str| {
        let mut all = vec![name.to_owned()];
        all.extend(list.iter().filter(|spec| *spec != name).cloned());
        all
    };
    let methods = methods::methods(&first(&matrix.methods, "vanilla"))?;
    let policies = methods::policies(&first(&matrix.policies, "full"))?;
    let mut store_dtype = Vec::new();
    for name in &matrix.store_dtype {
        store_dtype.push(name.parse::<KvQuantization>()?);
    }
    if store_dtype.is_empty() {
        store_dtype.push(context.global.store_dtype);
    }
    let mut prefixes: Vec<Prefix> = Vec::new();
    for text in &matrix.prefix {
        prefixes.push(text.parse().map_err(|reason: String| Fail::usage(reason))?);
    }
    if prefixes.is_empty() {
        prefixes.push(default_prefix(context)?);
    }
    let mut oracles = vec![None];
    for text in &matrix.oracle {
        oracles.push(Some(text.parse::<Oracle>().map_err(Fail::usage)?));
    }
    let mut variants = Vec::new();
    for (policy, method) in
        policies.iter().flat_map(|policy| methods.iter().map(move |method| (policy, method)))
    {
        // A method that reuses nothing reads no stored document.
        let (exact, alone) = ([KvQuantization::Exact], [Prefix::None]);
        let (store_dtype, prefixes) = match method.built.reuses() {
            true => (store_dtype.as_slice(), prefixes.as_slice()),
            false => (exact.as_slice(), alone.as_slice()),
        };
        for (prefix, store_dtype) in prefixes
            .iter()
            .flat_map(|prefix| store_dtype.iter().map(move |store_dtype| (prefix, store_dtype)))
        {
            let stored =
                (*store_dtype != KvQuantization::Exact).then(|| format!("store_dtype={store_dtype}"));
            let behind = (*prefix != Prefix::None).then(|| format!("prefix={}", prefix_name(prefix)));
            let options = stored.into_iter().chain(behind);
            let name = options.fold(method.spec.clone(), |name, option| append(&name, &option));
            // Oracles know nothing of parts of whole documents, which methods with statistics select, nor of other orders of chunks.
            let known =
                method.built.reuses() && method.built.statistics().is_empty() && !method.built.reorders();
            for oracle in oracles.iter().copied().filter(|oracle| known || oracle.is_none()) {
                let name = match oracle {
                    Some(oracle) => append(&name, &format!("oracle={oracle}")),
                    None => name.clone(),
                };
                variants.push(Variant {
                    method: name,
                    fusion: method.built.clone(),
                    store_dtype: *store_dtype,
                    prefix: prefix.clone(),
                    oracle,
                    policy: policy.spec.clone(),
                    eviction: policy.built.clone(),
                });
            }
        }
    }
    Ok(variants)
}

/// A prefix as the value of an option. A file's name may have the characters that part options, and methods from policies.
fn prefix_name(prefix: &Prefix) -> String {
    prefix.to_string().replace('%', "%25").replace(',', "%2C").replace('+', "%2B")
}

/// One model's part of a run.
fn one(
    context: &Context,
    matrix: &Matrix,
    variants: &[Variant],
    folder: &Path,
    judge: Option<&Judge>,
    until: Option<Instant>,
) -> Result<ModelOutcome> {
    let engine = context.memory_engine()?;
    let name = context.global.model.as_str();
    let model = TaskModel::of(name, &engine);
    let jobs = samples(context, matrix, &model, judge)?;
    let mut run = Run::open(folder, about(context, name, matrix, variants, &engine, &jobs)?)?;
    run.changes().iter().for_each(|change| output::warn(change));
    let before = run.known(name);
    if before > 0 {
        context.say(&format!("{} goes on: {} of {name} there", folder.display(), count(before, "answer")));
    }
    let encode = |text: &str| model.encode(text).unwrap_or_default();
    let quality = judge_template(judge, matrix, &jobs)?;
    let scorer = Scorer { judge, quality: quality.as_deref(), encode: &encode };
    let options = matrix.run_options(until);
    let bar = context.console.message_bar();
    let started = Instant::now();
    let (mut first, mut failed) = (None, 0);
    let whole = run.answer((name, &engine), &jobs, variants, &options, &scorer, |step| {
        failed = step.failed;
        show(&bar, name, step, *first.get_or_insert(step.done), started);
        true
    })?;
    bar.finish_and_clear();
    run.write_about()?;
    let mut errors = BTreeMap::new();
    if failed > 0 {
        // Those of earlier commands stand before.
        let found = read(folder)?.1.into_iter().rev().filter_map(|record| record.failure());
        found.take(failed).for_each(|error| *errors.entry(error).or_default() += 1);
    }
    Ok(ModelOutcome { whole, tasks: jobs.len(), answers: run.known(name) - before, failed, errors })
}

/// The tasks of a matrix for a model, with warnings of what is left out of them.
pub(crate) fn samples(
    context: &Context,
    matrix: &Matrix,
    model: &TaskModel<'_>,
    judge: Option<&Judge>,
) -> Result<Vec<LoadedTask>> {
    let spinner = context.spinner("making the samples");
    let (mut jobs, notes) = load(matrix, model)?;
    spinner.finish_and_clear();
    if !notes.left_out.is_empty() {
        output::warn(&format!("left out of {}'s tasks: {}", model.name, notes.left_out.join(", ")));
    }
    notes.warnings.iter().for_each(|warning| output::warn(warning));
    jobs.iter_mut().for_each(|job| name_judge(job, judge));
    Ok(jobs)
}

/// Where a run is, and the time left by the characters that are answered.
pub(crate) fn show(bar: &ProgressBar, model: &str, step: RunProgress<'_>, first: usize, started: Instant) {
    let RunProgress { done, total, failed, task, method } = step;
    let rest = left(done - first, total - first, started.elapsed());
    let rest = rest.map_or(String::new(), |rest| format!(", {} left", age(rest.as_secs())));
    let failed = if failed > 0 { format!(", {failed} failed") } else { String::new() };
    bar.set_length(total as u64);
    bar.set_position(done as u64);
    bar.set_message(format!("{model}{rest}{failed}  {task}  {method}"));
}

/// `refrain eval report`
pub(crate) fn report(context: &Context, args: &args::EvalReport) -> Result<()> {
    let (about, records) = read(&args.run)?;
    if records.is_empty() {
        return Err(Fail::new(format!("{} holds no answer yet", args.run.display()))
            .hint("`refrain eval run` makes some")
            .into());
    }
    let written = write_report(args.out.as_deref().unwrap_or(&args.run), &about, &records)?;
    if context.json {
        let files = json_paths(&written);
        return print_json(&json!({ "run": json_path(&args.run), "answers": records.len(), "files": files }));
    }
    print(&written.iter().map(|path| format!("{}\n", tilde(path))).collect::<String>())
}

/// Writes a run's report into a folder, the page first.
pub(crate) fn write_report(folder: &Path, about: &RunInfo, records: &[Record]) -> Result<Vec<PathBuf>> {
    let report = refrain_eval::report::report(about, records);
    std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let mut written = Vec::new();
    let files = [("report.html", report.html), ("report.md", report.markdown), ("report.csv", report.csv)];
    for (name, text) in files.into_iter().chain(report.front.map(|front| ("front.svg", front))) {
        let path = folder.join(name);
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        written.push(path);
    }
    Ok(written)
}

/// `refrain eval tasks`
pub(crate) fn tasks(context: &Context) -> Result<()> {
    let names = names();
    if context.json {
        let task = |(name, what): &(String, String)| json!({ "name": name, "about": what });
        return print_json(&names.iter().map(task).collect::<Vec<_>>());
    }
    let mut table = Table::new(&["<task or suite", "<what it is"]);
    names.into_iter().for_each(|(name, what)| table.push(vec![name, what]));
    print(&table.text())
}
