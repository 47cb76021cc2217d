//! A planned job, and where its objects are.
//!
//! | object | written | holds |
//! |---|---|---|
//! | `manifest.json` | once, by the planner | [`Manifest`] |
//! | `shards/<BLAKE3>.jsonl` | once, by the planner | the items of a shard, one a line |
//! | `claims/<shard>.<n>` | by the runner that made it | [`Claim`](crate::Claim): the n-th runner on the shard |
//! | `done/<shard>.json` | once, by the first runner that ends the shard | [`Done`] |
//! | `failed/<item>.json` | once, and deleted where a later runner does the item | [`FailedItem`] |

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime};

use refrain::store::Objects;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::manifest::Manifest;
use crate::objects::JobObjects;
use crate::{Error, Result};

pub(crate) const CLAIMS: &str = "claims";
pub(crate) const DONE: &str = "done";
pub(crate) const FAILED: &str = "failed";
/// How long a command for people waits for an object store that does not answer.
pub(crate) const SHORT_PATIENCE: Duration = Duration::from_secs(10);
/// Most bytes of what one shard came to.
const MAX_DONE: u64 = 1 << 30;
/// Most bytes of the reason for which an item failed, with its names.
const MAX_FAILED: u64 = 64 << 10;

/// A planned job.
#[derive(Clone, Debug)]
pub struct Job {
    pub(crate) objects: JobObjects,
    pub(crate) manifest: Manifest,
    /// Of the manifest.
    pub(crate) hash: String,
}

/// The end of a shard.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Done {
    /// Hash of the job's manifest.
    pub(crate) manifest: String,
    /// The runner.
    pub runner: String,
    /// Seconds that it worked on the shard.
    pub seconds: f64,
    /// Items that were done, before this runner or by it.
    pub items: usize,
    /// Items that failed.
    pub failed: usize,
    /// Runners that died on the shard before.
    pub deaths: usize,
    /// What the work came to.
    pub result: Value,
}

/// An item that could not be done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedItem {
    /// Its id.
    pub id: String,
    /// Its name for people: a document's title, a sample's task.
    #[serde(default)]
    pub name: String,
    /// Index of its shard.
    pub shard: usize,
    /// The reason.
    pub reason: String,
    /// Whether runners died while they did it, so that no other one is to try.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub died: bool,
}

/// The state of a job's shards at one moment.
#[derive(Debug, Default)]
pub(crate) struct Look {
    /// Of each shard, whether it is done.
    pub(crate) done: Vec<bool>,
    /// The claims of shards that are not done, oldest first.
    pub(crate) claims: BTreeMap<usize, Vec<ListedClaim>>,
    /// For how long in all the object store had not answered until then.
    pub(crate) silence: Duration,
}

/// A claim as a listing shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ListedClaim {
    pub(crate) generation: u32,
    pub(crate) version: String,
    pub(crate) written: SystemTime,
}

/// The object that says that a shard is done.
pub(crate) fn done_name(shard: usize) -> String {
    format!("{DONE}/{shard:06}.json")
}

pub(crate) fn failed_name(id: &str) -> String {
    format!("{FAILED}/{id}.json")
}

impl Job {
    pub(crate) fn new(objects: JobObjects, manifest: Manifest, bytes: &[u8]) -> Job {
        Job { objects, manifest, hash: Manifest::hash(bytes) }
    }

    /// The job at a URL.
    ///
    /// # Errors
    /// If nothing was planned there, its manifest is broken, or the object store does not answer.
    pub fn open(objects: Objects) -> Result<Job> {
        let objects = JobObjects::new(objects, SHORT_PATIENCE);
        let (manifest, bytes) =
            Manifest::read(&objects)?.ok_or_else(|| Error::NoJob(objects.url().to_owned()))?;
        Ok(Job::new(objects, manifest, &bytes))
    }

    /// The job with another patience than that of a command for people, which ends soon after `stop` is set.
    pub fn with_patience(self, patience: Duration, stop: &Arc<AtomicBool>) -> Job {
        Job { objects: self.objects.with_patience(patience, stop), ..self }
    }

    /// Whether the object store did not answer the last request.
    pub fn is_down(&self) -> bool {
        self.objects.is_down()
    }

    /// Its manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Asserts that the job is of a kind, and gives its settings.
    ///
    /// # Errors
    /// If it is of another, or a setting is missing or wrong.
    pub fn settings<T: DeserializeOwned>(&self, kind: &str) -> Result<T> {
        if self.manifest.kind != kind {
            let reason = format!("it is of a job of the kind {}, not {kind}", self.manifest.kind);
            return Err(Error::broken(crate::manifest::MANIFEST, reason));
        }
        serde_json::from_value(Value::Object(self.manifest.settings.clone()))
            .map_err(|error| Error::broken(crate::manifest::MANIFEST, error))
    }

    /// The state of all shards now.
    pub(crate) fn look(&self) -> Result<Look> {
        let shards = self.manifest.shards.len();
        let mut look = Look { done: vec![false; shards], ..Look::default() };
        // Claims are read first: those of shards that end meanwhile are left out.
        let claims = self.objects.list(CLAIMS)?;
        for object in self.objects.list(DONE)? {
            let index = object.name.strip_suffix(".json").and_then(|index| index.parse::<usize>().ok());
            if let Some(done) = index.and_then(|index| look.done.get_mut(index)) {
                *done = true;
            }
        }
        for object in claims {
            let place = object.name.split_once('.');
            let place = place.and_then(|(shard, generation)| {
                Some((shard.parse::<usize>().ok()?, generation.parse::<u32>().ok()?))
            });
            let Some((shard, generation)) = place.filter(|(shard, _)| look.done.get(*shard) == Some(&false))
            else {
                continue;
            };
            let claim = ListedClaim { generation, version: object.version(), written: object.written };
            look.claims.entry(shard).or_default().push(claim);
        }
        look.silence = self.objects.silence();
        look.claims.values_mut().for_each(|claims| claims.sort_by_key(|claim| claim.generation));
        Ok(look)
    }

    /// Whether a shard is done.
    pub(crate) fn is_done(&self, shard: usize) -> Result<bool> {
        self.objects.exists(&done_name(shard))
    }

    /// The ends of all shards that are done, by shard.
    ///
    /// # Errors
    /// If one is broken, or is of a job that was planned otherwise.
    pub fn results(&self) -> Result<Vec<(usize, Done)>> {
        let look = self.look()?;
        let shards = (0..look.done.len()).filter(|shard| look.done[*shard]);
        shards.map(|shard| Ok((shard, self.result(shard)?))).collect()
    }

    fn result(&self, shard: usize) -> Result<Done> {
        let name = done_name(shard);
        let bytes =
            self.objects.get(&name, MAX_DONE)?.ok_or_else(|| Error::broken(&name, "it is missing"))?;
        let done: Done = serde_json::from_slice(&bytes).map_err(|error| Error::broken(&name, error))?;
        if done.manifest != self.hash {
            return Err(Error::broken(&name, "it is of a job with another manifest"));
        }
        Ok(done)
    }

    /// Ids of the items that failed, ascending.
    pub(crate) fn failed_ids(&self) -> Result<Vec<String>> {
        let listed = self.objects.list(FAILED)?.into_iter();
        let ids = listed.filter_map(|object| object.name.strip_suffix(".json").map(str::to_owned));
        let mut ids: Vec<String> = ids.collect();
        // The order of names is another: `a-b.json` comes before `a.json`.
        ids.sort_unstable();
        Ok(ids)
    }

    /// The items that failed, of whatever shards, by id.
    ///
    /// # Errors
    /// If the object store does not answer. A broken entry is one whose reason is not known.
    pub fn failed(&self) -> Result<Vec<FailedItem>> {
        self.failed_ids()?.iter().map(|id| self.failed_item(id)).collect()
    }

    /// The entry of an item that failed.
    pub(crate) fn failed_item(&self, id: &str) -> Result<FailedItem> {
        let bytes = match self.objects.get(&failed_name(id), MAX_FAILED) {
            Err(Error::Broken { .. }) => None,
            found => found?,
        };
        let found = bytes.and_then(|bytes| serde_json::from_slice::<FailedItem>(&bytes).ok());
        let unknown = || FailedItem {
            id: id.to_owned(),
            name: String::new(),
            shard: 0,
            reason: "its entry is broken".to_owned(),
            died: false,
        };
        Ok(found.filter(|found| found.id == id).unwrap_or_else(unknown))
    }
}
