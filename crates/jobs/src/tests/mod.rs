//! Tests of jobs. Their work notes what is done to each item; what they share is here.

mod broken;
mod crash;
mod ingest;
mod patience;
mod plan;
mod poison;
mod run;
mod status;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use refrain::store::{Objects, RemoteOptions};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::{Claim, Control, Item, Job, Plan, RunOptions, RunReport, ShardSize, Undone, Work};

const MINUTE: Duration = Duration::from_secs(60);

/// An item of the tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
enum Body {
    #[default]
    Good,
    /// Fails each time.
    Bad,
    /// Fails each time, and leaves a part of its result.
    Partial,
    Panics,
    /// Panics where it is asked whether it was done.
    PanicsEarly,
    /// Fails the first time.
    Flaky,
    /// Ends the process.
    Kills,
    /// The machine is at fault.
    Machine,
    /// Panics since the machine has failed for good.
    Breaks,
}

/// Work that notes how often each item was done.
#[derive(Debug, Default)]
struct Notes {
    done: BTreeMap<String, usize>,
    tried: BTreeMap<String, usize>,
    /// Items that count as done before.
    before: Vec<String>,
    pause: Duration,
    /// Whether work is kept before a shard ends.
    keeps: bool,
    /// Whether the machine has failed for good.
    is_broken: bool,
    /// Ids of the items of the shard that were done.
    result: Vec<String>,
    /// Ids of those that failed and left a part.
    partial: BTreeSet<String>,
}

impl Work for Notes {
    type Body = Body;

    fn name(&self, item: &Item<Body>) -> String {
        format!("item {}", item.id)
    }

    fn are_done(&mut self, items: &[Item<Body>], _: &Control<'_>) -> Result<Vec<bool>, Undone> {
        if items.iter().any(|item| item.body == Body::PanicsEarly) {
            panic!("before it began");
        }
        Ok(items.iter().map(|item| self.before.contains(&item.id)).collect())
    }

    fn begin(&mut self) -> Result<(), Undone> {
        self.result.clear();
        self.partial.clear();
        Ok(())
    }

    fn item(&mut self, item: &Item<Body>, control: &Control<'_>) -> Result<(), Undone> {
        let tried = self.tried.entry(item.id.clone()).or_default();
        *tried += 1;
        std::thread::sleep(self.pause);
        control.check()?;
        match item.body {
            Body::Bad => return Err(Undone::Item("it is bad".to_owned())),
            Body::Partial => {
                self.partial.insert(item.id.clone());
                return Err(Undone::Item("a part of it is bad".to_owned()));
            }
            Body::Flaky if *tried == 1 => return Err(Undone::Item("not the first time".to_owned())),
            Body::Panics => panic!("of {}", item.id),
            Body::Kills => std::process::abort(),
            Body::Machine => return Err("the disk is full".into()),
            Body::Breaks => {
                self.is_broken = true;
                panic!("of {}", item.id);
            }
            Body::Good | Body::Flaky | Body::PanicsEarly => {}
        }
        *self.done.entry(item.id.clone()).or_default() += 1;
        Ok(())
    }

    fn failure(&self) -> Option<crate::RunnerError> {
        self.is_broken.then(|| "the GPU has failed".into())
    }

    fn keep(&mut self, items: &[&Item<Body>], _: &Control<'_>) -> Result<bool, Undone> {
        let new = items.iter().map(|item| item.id.clone());
        if self.keeps {
            self.result.extend(new);
        } else {
            self.result = new.collect();
        }
        Ok(self.keeps)
    }

    fn finish(&mut self) -> Result<Value, Undone> {
        let partial = std::mem::take(&mut self.partial).into_iter();
        Ok(json!(partial.chain(std::mem::take(&mut self.result)).collect::<Vec<_>>()))
    }
}

fn in_memory() -> Objects {
    Objects::open(&RemoteOptions::new("memory:///job")).unwrap()
}

fn items(number: usize) -> Vec<Item<Body>> {
    (0..number).map(|n| Item { id: format!("i{n:03}"), weight: 10, body: Body::Good }).collect()
}

fn settings(compute: &str) -> Map<String, Value> {
    let json = json!({ "compute": compute, "chunk_tokens": 512, "system": null });
    json.as_object().unwrap().clone()
}

/// A job of these items, `size` a shard.
fn planned(objects: &Objects, items: &[Item<Body>], size: usize) -> Job {
    let mut plan = Plan::new(objects.clone(), ShardSize { items: size, weight: u64::MAX }).unwrap();
    items.iter().for_each(|item| assert!(plan.add("", item).unwrap()));
    plan.finish("test", settings("q8")).unwrap().job
}

fn options() -> RunOptions {
    RunOptions { host: "here".to_owned(), claim_timeout: Duration::from_millis(400), ..RunOptions::default() }
}

fn stop_flag(is_set: bool) -> Arc<AtomicBool> {
    Arc::new(AtomicBool::new(is_set))
}

fn run(job: &Job, work: &mut Notes) -> RunReport {
    job.run(work, &options(), &stop_flag(false), |_| ()).unwrap()
}

/// Ids of all items that results hold, in the order of shards.
fn in_results(job: &Job) -> Vec<String> {
    let ids = |result: Value| serde_json::from_value::<Vec<String>>(result).unwrap();
    job.results().unwrap().into_iter().flat_map(|(_, done)| ids(done.result)).collect()
}

fn ids(items: &[Item<Body>]) -> Vec<String> {
    items.iter().map(|item| item.id.clone()).collect()
}

/// The names of a folder's objects.
fn names(job: &Job, folder: &str) -> Vec<String> {
    job.objects.list(folder).unwrap().into_iter().map(|object| object.name).collect()
}

/// Waits for something, a minute at most.
fn wait_for(what: &str, mut is_there: impl FnMut() -> bool) {
    let began = std::time::Instant::now();
    while !is_there() {
        assert!(began.elapsed() < Duration::from_secs(60), "{what} never came");
        std::thread::sleep(Duration::from_millis(10));
    }
}
