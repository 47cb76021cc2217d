//! Jobs in an object store: how commands reach them, and what they say of a plan.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use anyhow::Result;
use refrain::store::{Objects, RemoteOptions};
use refrain_jobs::{Failed, Job, Plan, Planned, ShardSize, repeat};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::kind::nouns;
use super::runner::Runner;
use crate::args::JobUrl;
use crate::documents::{UnreadFile, unread};
use crate::output::{Exit, STOPPED, count, print, print_json, warn};
use crate::settings::Context;

/// The least time that a request for an object of a job may take: nobody waits for a single one.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The objects at the URL of a job.
fn objects(context: &Context, url: &str) -> Result<Objects> {
    let mut options = RemoteOptions::new(url);
    options.timeout = context.global.remote_timeout.max(TIMEOUT);
    Ok(Objects::open(&options)?)
}

pub(super) fn open(context: &Context, url: &JobUrl) -> Result<Job> {
    Ok(Job::open(objects(context, &url.url)?)?)
}

/// The job of a runner, which waits for the object store for as long as its options say.
pub(super) fn open_patiently(context: &Context, runner: &Runner<'_>) -> Result<Job> {
    let objects = objects(context, runner.url)?;
    let mut is_told = false;
    let open = || {
        Job::open(objects.clone()).map_err(|error| {
            if objects.down().is_none() || runner.stop.load(Relaxed) {
                return Failed::Lasting(error);
            }
            if !std::mem::replace(&mut is_told, true) {
                warn(&format!("waiting for the object store of the job: {error}"));
            }
            Failed::Passing(error)
        })
    };
    match repeat(runner.options.patience, open) {
        Ok(job) => Ok(job.with_patience(runner.options.patience, &runner.stop)),
        Err(_) if runner.stop.load(Relaxed) => Err(Exit(STOPPED).into()),
        Err(error) => Err(error.into()),
    }
}

pub(super) fn new_plan(context: &Context, url: &JobUrl, size: ShardSize) -> Result<Plan> {
    Ok(Plan::new(objects(context, &url.url)?, size)?)
}

/// Settings as a manifest has them.
pub(super) fn to_map(settings: &impl Serialize) -> Result<Map<String, Value>> {
    match serde_json::to_value(settings)? {
        Value::Object(map) => Ok(map),
        _ => Ok(Map::new()),
    }
}

/// Says what was planned.
pub(super) fn tell(
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
