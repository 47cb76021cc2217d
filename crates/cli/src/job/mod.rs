//! `refrain job`: ingest and evaluation on many machines, over shards in an object store.

mod eval;
mod ingest;
mod runner;
mod settings;
mod status;

use std::time::Duration;

use anyhow::Result;
use refrain::store::{Objects, RemoteOptions};
use refrain_jobs::{Job, Plan, Planned, ShardSize};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::args::{Job as Command, JobPlan, JobUrl};
use crate::documents::{UnreadFile, unread};
use crate::output::{count, print, print_json};
use crate::settings::Context;

/// The kinds of work, as manifests name them.
const INGEST: &str = "ingest";
const EVAL: &str = "eval";
/// The least time that a request for an object of a job may take: nobody waits for a single one.
const TIMEOUT: Duration = Duration::from_secs(10);

/// `refrain job`
pub(crate) fn run(context: &Context, command: &Command) -> Result<()> {
    match command {
        Command::Plan(JobPlan::Ingest(args)) => ingest::plan(context, args),
        Command::Plan(JobPlan::Eval(args)) => eval::plan(context, args),
        Command::Run(args) => runner::run(context, args),
        Command::Status(args) => status::run(context, args),
        Command::Results(args) => eval::results(context, args),
    }
}

/// The objects at the URL of a job.
fn objects(context: &Context, url: &JobUrl) -> Result<Objects> {
    let mut options = RemoteOptions::new(&url.url);
    options.timeout = context.global.remote_timeout.max(TIMEOUT);
    Ok(Objects::open(&options)?)
}

fn open(context: &Context, url: &JobUrl) -> Result<Job> {
    Ok(Job::open(objects(context, url)?)?)
}

fn new_plan(context: &Context, url: &JobUrl, size: ShardSize) -> Result<Plan> {
    Ok(Plan::new(objects(context, url)?, size)?)
}

/// Settings as a manifest has them.
fn to_map(settings: &impl Serialize) -> Result<Map<String, Value>> {
    match serde_json::to_value(settings)? {
        Value::Object(map) => Ok(map),
        _ => Ok(Map::new()),
    }
}

/// What the items and the work of a kind of job are called.
fn nouns(kind: &str) -> (&'static str, &'static str) {
    if kind == EVAL { ("sample", "answer") } else { ("document", "token") }
}

/// Says what was planned.
fn tell(
    context: &Context,
    url: &JobUrl,
    planned: &Planned,
    failures: &[UnreadFile],
    duplicates: usize,
) -> Result<()> {
    let manifest = planned.job.manifest();
    let (shards, items, weight) = (manifest.shards.len(), manifest.items(), manifest.weight());
    if context.json {
        return print_json(&json!({
            "job": url.url, "new": planned.is_new, "shards": shards, "items": items, "weight": weight,
            "duplicates": duplicates, "failures": failures,
        }));
    }
    let (item, unit) = nouns(&manifest.kind);
    let before = if planned.is_new { "planned" } else { "was planned before" };
    let twice = if duplicates > 0 { format!(", {duplicates} more that are the same") } else { String::new() };
    print(&format!(
        "{before}: {} with {} in {}{twice}{}\n",
        count(items, item),
        count(usize::try_from(weight).unwrap_or(usize::MAX), unit),
        count(shards, "shard"),
        unread(failures.len()),
    ))?;
    context.say(&format!("on each machine: refrain job run --job {}", url.url));
    Ok(())
}
