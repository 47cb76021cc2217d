//! `refrain job run`: the runner, whatever its work.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context as _, Result};
use indicatif::ProgressBar;
use refrain_jobs::{FailedItem, Job, RunOptions, RunProgress, RunReport, Work};
use serde_json::json;

use super::kind::nouns;
use crate::args;
use crate::machine::host_name;
use crate::output::{
    Exit, Fail, LASTING, SOME_FAILED, STOPPED, count, number, one_line, print, print_result, seconds,
};
use crate::settings::Context;
use crate::signals::stop_flag;

/// Failed items that are shown at the end.
const MOST_SHOWN: usize = 20;

/// How a runner works, and when it is to stop.
pub(super) struct Runner<'a> {
    pub(super) url: &'a str,
    pub(super) options: RunOptions,
    /// Set when the runner is to stop.
    pub(super) stop: Arc<AtomicBool>,
}

/// The index that a launcher gives: a Kubernetes Indexed Job or a Slurm array.
fn launched_index() -> Option<u64> {
    let index = |name| std::env::var(name).ok()?.parse().ok();
    index("JOB_COMPLETION_INDEX").or_else(|| index("SLURM_ARRAY_TASK_ID"))
}

/// An index that follows from host and process.
fn own_index() -> u64 {
    let mut hasher = DefaultHasher::new();
    (host_name(), std::process::id()).hash(&mut hasher);
    hasher.finish()
}

impl Runner<'_> {
    /// A runner with the options of the command line, which stops at a signal.
    pub(super) fn new(args: &args::JobRun) -> Result<Runner<'_>> {
        let mut options = RunOptions::default();
        options.host = host_name();
        options.index = args.index.or_else(launched_index).unwrap_or_else(own_index);
        (options.claim_timeout, options.patience, options.tries) =
            (args.claim_timeout, args.patience, args.tries);
        Ok(Runner { url: &args.job.url, options, stop: stop_flag().context("cannot wait for signals")? })
    }

    /// Works until the job is done, and says what came of it.
    pub(super) fn run<W: Work>(&self, context: &Context, job: &Job, work: &mut W) -> Result<()> {
        let unit = nouns(&job.manifest().kind).1;
        let bar = context.console.message_bar();
        let mut done = None;
        let report = job.run(work, &self.options, &self.stop, |step| {
            show(&bar, unit, step);
            if done.replace(step.done).is_some_and(|before| before < step.done) {
                bar.suspend(|| context.say(&line(unit, step)));
            }
        });
        bar.finish_and_clear();
        let report = report?;
        let failed = job.failed()?;
        // The status below tells of failures where nobody reads the output, too.
        let broken = if report.complete { 0 } else { report.broken.len() };
        let outcome = match broken {
            0 => Ok(()),
            _ => Err(Fail::new(format!("{} cannot be read and are not done", count(broken, "shard")))
                .hint("give another --job, and plan the same again")
                .status(LASTING)
                .into()),
        };
        let told = if context.json {
            let result = json!({
                "job": self.url, "complete": report.complete, "shards": report.shards,
                "items": report.tally.items, "weight": report.tally.weight,
                "seconds": report.tally.busy.as_secs_f64(), "failed": failed, "broken": report.broken,
            });
            print_result(result, outcome)
        } else {
            let printed = print(&self.end(job, &report, &failed));
            outcome.and(printed)
        };
        match report.complete {
            _ if broken > 0 => told,
            true if failed.is_empty() => told,
            true => Err(Exit(SOME_FAILED).into()),
            false => Err(Exit(STOPPED).into()),
        }
    }

    /// The last lines of a runner.
    fn end(&self, job: &Job, report: &RunReport, listed: &[FailedItem]) -> String {
        let manifest = job.manifest();
        let (item, unit) = nouns(&manifest.kind);
        let own = format!(
            "this runner did {} of {} in {} ({} {unit}s/s)",
            count(report.tally.items, item),
            count(report.shards, "shard"),
            seconds(report.tally.busy.as_secs_f64()),
            number(report.tally.rate()),
        );
        let mut lines = if report.complete {
            let (items, shards) = (count(manifest.items(), item), count(manifest.shards.len(), "shard"));
            match manifest.items().saturating_sub(listed.len()) {
                _ if listed.is_empty() => format!("done: {items} in {shards}; {own}\n"),
                good => format!("done: {good} of {items}{} in {shards}; {own}\n", failed(listed.len())),
            }
        } else {
            format!("not done yet; {own}; the same command goes on\n")
        };
        for (shard, reason) in &report.broken {
            lines.push_str(&format!("shard {shard} cannot be read: {}\n", one_line(reason)));
        }
        lines + &failures(item, listed, MOST_SHOWN)
    }
}

/// The part of a line that counts the items that failed; empty where none did.
pub(super) fn failed(items: usize) -> String {
    if items > 0 { format!(", {items} failed") } else { String::new() }
}

/// The items that failed, at most so many of them.
pub(super) fn failures(item: &str, failed: &[FailedItem], most: usize) -> String {
    if failed.is_empty() {
        return String::new();
    }
    let mut lines = format!("{} failed:\n", count(failed.len(), item));
    for FailedItem { id, name, reason, .. } in failed.iter().take(most) {
        lines.push_str(&format!("  {}\n", one_line(&format!("{id}  {name}: {reason}"))));
    }
    if failed.len() > most {
        lines.push_str(&format!("  and {} more: refrain job status --json\n", failed.len() - most));
    }
    lines
}

/// What a runner is at.
fn line(unit: &str, step: RunProgress) -> String {
    let RunProgress { shards, done, rate, .. } = step;
    format!("{done} of {shards} shards done, {} {unit}s/s here", number(rate))
}

fn show(bar: &ProgressBar, unit: &str, step: RunProgress) {
    let at = match step.shard {
        Some(shard) => format!("of shard {shard}"),
        None => "waiting for others".to_owned(),
    };
    bar.set_length(step.of.max(1));
    bar.set_position(step.weight);
    bar.set_message(format!("{at}  {}", line(unit, step)));
}
