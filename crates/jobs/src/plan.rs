//! Planning: items are written as shards, and then the manifest that names them.
//!
//! A shard's object is named by its bytes, so that planning again writes nothing twice, and a plan that was stopped half-way leaves
//! nothing that a later one could take for its own.

use std::collections::HashSet;

use refrain::store::Objects;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::item::{self, Item};
use crate::job::{CLAIMS, DONE, FAILED, Job, SHORT_PATIENCE};
use crate::manifest::{MANIFEST, Manifest, Shard};
use crate::objects::JobObjects;
use crate::{Error, Result};

/// The size of shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardSize {
    /// Most items.
    pub items: usize,
    /// Most work; an item of more is a shard of its own.
    pub weight: u64,
}

/// A plan in the making.
#[derive(Debug)]
pub struct Plan {
    objects: JobObjects,
    size: ShardSize,
    /// The job that was planned there before. Then nothing is written, and the plan compared.
    known: Option<(Manifest, Vec<u8>)>,
    ids: HashSet<String>,
    shards: Vec<Shard>,
    /// The shard that is being filled.
    lines: Vec<u8>,
    items: usize,
    weight: u64,
    group: String,
}

impl Plan {
    /// Begins a plan.
    ///
    /// # Errors
    /// If the object store does not answer, the manifest there is broken, or a job without its manifest has left something there.
    pub fn new(objects: Objects, size: ShardSize) -> Result<Plan> {
        let objects = JobObjects::new(objects, SHORT_PATIENCE);
        let known = Manifest::read(&objects)?;
        if known.is_none() {
            for folder in [CLAIMS, DONE, FAILED] {
                if !objects.list(folder)?.is_empty() {
                    return Err(Error::Leftovers { folder: folder.to_owned() });
                }
            }
        }
        let size = ShardSize { items: size.items.max(1), weight: size.weight.max(1) };
        Ok(Plan {
            objects,
            size,
            known,
            ids: HashSet::new(),
            shards: Vec::new(),
            lines: Vec::new(),
            items: 0,
            weight: 0,
            group: String::new(),
        })
    }

    /// Adds an item, and says whether it is new: one whose id is known already is passed over.
    ///
    /// Items of different groups are in different shards.
    ///
    /// # Errors
    /// If a shard cannot be written, or the id has other characters than letters, digits, `-`, `_` and `.`.
    pub fn add<T: Serialize>(&mut self, group: &str, item: &Item<T>) -> Result<bool> {
        if !item::is_id(&item.id) {
            return Err(Error::Item(format!("{:?} cannot be the id of an item", item.id)));
        }
        if !self.ids.insert(item.id.clone()) {
            return Ok(false);
        }
        let is_full = self.items >= self.size.items
            || self.weight.saturating_add(item.weight) > self.size.weight
            || self.group != group;
        if is_full {
            self.end_shard()?;
            group.clone_into(&mut self.group);
        }
        serde_json::to_writer(&mut self.lines, item).map_err(|error| Error::Item(error.to_string()))?;
        self.lines.push(b'\n');
        self.items += 1;
        self.weight = self.weight.saturating_add(item.weight);
        Ok(true)
    }

    fn end_shard(&mut self) -> Result<()> {
        let (items, weight) = (std::mem::take(&mut self.items), std::mem::take(&mut self.weight));
        if items == 0 {
            return Ok(());
        }
        let lines = std::mem::take(&mut self.lines);
        let shard = Shard { hash: blake3::hash(&lines).to_hex().to_string(), items, weight };
        if self.known.is_none() {
            self.objects.create(&item::name(&shard), lines)?;
        }
        self.shards.push(shard);
        Ok(())
    }

    /// Writes the manifest, and gives the job. Where the same was planned before, nothing is written.
    ///
    /// # Errors
    /// If there is no item, another job was planned there, or the object store does not answer.
    pub fn finish(mut self, kind: &str, settings: Map<String, Value>) -> Result<Planned> {
        self.end_shard()?;
        let manifest = Manifest::new(kind, settings, self.shards);
        let is_new = self.known.is_none();
        if is_new {
            if manifest.shards.is_empty() {
                return Err(Error::Empty("items"));
            }
            self.objects.create(MANIFEST, manifest.bytes()?)?;
            self.known = Manifest::read(&self.objects)?;
        }
        // Another planner may have been quicker.
        let (known, bytes) = self.known.ok_or_else(|| Error::NoJob(self.objects.url().to_owned()))?;
        known.check_same(&manifest)?;
        Ok(Planned { job: Job::new(self.objects, known, &bytes), is_new })
    }
}

/// A job that was planned.
#[derive(Debug)]
pub struct Planned {
    /// The job.
    pub job: Job,
    /// Whether it was planned now, and not before.
    pub is_new: bool,
}
