//! `refrain job status`

use std::thread::sleep;
use std::time::Duration;

use anyhow::Result;
use refrain_jobs::{ClaimedShard, Job, Status};
use serde_json::json;

use super::kind::nouns;
use super::planned::open;
use super::runner::{failed, failures};
use crate::args;
use crate::output::{age, count, number, one_line, percent, print, print_json, warn};
use crate::settings::Context;
use crate::table::Table;

/// The pause between two looks of `--watch`.
const PAUSE: Duration = Duration::from_secs(2);

/// `refrain job status`
pub(super) fn run(context: &Context, args: &args::JobStatus) -> Result<()> {
    let job = open(context, &args.job)?;
    loop {
        let status = match job.status() {
            Err(error) if args.watch && job.is_down() => {
                warn(&format!("waiting for the object store of the job: {error}"));
                sleep(PAUSE);
                continue;
            }
            status => status?,
        };
        if context.json {
            let mut value = json!(status);
            value["job"] = json!(args.job.url);
            value["complete"] = json!(status.is_complete());
            print_json(&value)?;
        } else {
            print(&text(&job, &status))?;
        }
        if !args.watch || status.is_complete() {
            return Ok(());
        }
        sleep(PAUSE);
        if !context.json {
            print("\n")?;
        }
    }
}

fn text(job: &Job, status: &Status) -> String {
    let (item, unit) = nouns(&status.kind);
    let share = |part: u64, whole: u64| percent(part as usize, whole as usize);
    let mut lines = format!(
        "{}: {} of {} done, {} claimed, {} open\n{} of {}{}, {} of all {unit}s{}\n",
        one_line(&status.kind),
        status.done,
        count(status.shards, "shard"),
        status.claimed.len(),
        status.open,
        status.items_done.saturating_sub(status.failed.len()),
        count(status.items, item),
        failed(status.failed.len()),
        share(status.weight_done, status.weight),
        speed(status, unit),
    );
    if !status.claimed.is_empty() {
        let mut table = Table::new(&["shard", "<runner", "since", "renewed", "done", "rate", "<"]);
        for claimed in &status.claimed {
            let of = job.manifest().shards.get(claimed.shard).map_or(0, |shard| shard.weight);
            table.push(vec![
                claimed.shard.to_string(),
                one_line(&claimed.runner),
                age(claimed.seconds),
                format!("{} ago", age(claimed.renewed)),
                share(claimed.weight, of),
                format!("{}/s", number(claimed.rate)),
                remark(claimed),
            ]);
        }
        lines.push_str(&table.text());
    }
    lines + &failures(item, &status.failed, usize::MAX)
}

fn speed(status: &Status, unit: &str) -> String {
    if status.rate == 0.0 {
        return String::new();
    }
    let left = status.seconds_left.map(|left| format!(", about {} left", age(left as u64)));
    format!(", {} {unit}s/s{}", number(status.rate), left.unwrap_or_default())
}

/// What is unusual about a claim.
fn remark(claimed: &ClaimedShard) -> String {
    let silent = (!claimed.alive).then(|| "seems dead".to_owned());
    let deaths = (claimed.deaths > 0).then(|| format!("{} died on it", count(claimed.deaths, "runner")));
    let item = claimed.item.as_deref().map(|item| format!("at {}", one_line(item)));
    silent.into_iter().chain(deaths).chain(item).collect::<Vec<_>>().join(", ")
}
