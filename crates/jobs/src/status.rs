//! The status of a job, as its objects tell it to anyone.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::Result;
use crate::job::{FailedItem, Job};

/// The status of a job at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Status {
    /// The kind of its work.
    pub kind: String,
    /// Shards in all.
    pub shards: usize,
    /// Shards that are done.
    pub done: usize,
    /// Shards that nobody works on.
    pub open: usize,
    /// The others.
    pub claimed: Vec<ClaimedShard>,
    /// Items in all.
    pub items: usize,
    /// Items that are done or given up, as far as runners have told.
    pub items_done: usize,
    /// Work of all items.
    pub weight: u64,
    /// Work of those that are done or given up.
    pub weight_done: u64,
    /// Work a second of all runners that are alive.
    pub rate: f64,
    /// Seconds until all is done at that rate; none where nobody works.
    pub seconds_left: Option<f64>,
    /// Items that failed.
    pub failed: Vec<FailedItem>,
}

/// A shard that a runner has claimed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClaimedShard {
    /// Its index.
    pub shard: usize,
    /// The runner.
    pub runner: String,
    /// Seconds since it was claimed, between the runner's clock and this one.
    pub seconds: u64,
    /// Seconds since the claim was renewed, between the object store's clock and this one.
    pub renewed: u64,
    /// Whether it was renewed within the time after which it counts as dead. Runners go by claims that they see change, and not by this.
    pub alive: bool,
    /// Runners that died on it before.
    pub deaths: usize,
    /// The item under way, where a runner died on the shard before.
    pub item: Option<String>,
    /// Items of it that are done or given up.
    pub items: usize,
    /// Their work.
    pub weight: u64,
    /// Work a second of its runner.
    pub rate: f64,
}

impl Status {
    /// Whether every shard is done.
    pub fn is_complete(&self) -> bool {
        self.done == self.shards
    }
}

impl Job {
    /// The status of the job now.
    ///
    /// # Errors
    /// If the object store does not answer.
    pub fn status(&self) -> Result<Status> {
        let look = self.look()?;
        let shards = &self.manifest.shards;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let mut status = Status {
            kind: self.manifest.kind.clone(),
            shards: shards.len(),
            items: self.manifest.items(),
            weight: self.manifest.weight(),
            failed: self.failed()?,
            ..Status::default()
        };
        for (shard, _) in shards.iter().zip(&look.done).filter(|(_, done)| **done) {
            status.done += 1;
            status.items_done += shard.items;
            status.weight_done += shard.weight;
        }
        for (shard, claims) in &look.claims {
            let claim = self.last_claim(*shard, claims)?.filter(|claim| !claim.given_back);
            let Some((last, claim)) = claims.last().zip(claim) else { continue };
            let renewed = SystemTime::now().duration_since(last.written).map_or(0, |time| time.as_secs());
            let of = &shards[*shard];
            status.claimed.push(ClaimedShard {
                shard: *shard,
                runner: claim.runner,
                seconds: now.saturating_sub(claim.since),
                renewed,
                alive: (renewed as f64) <= claim.timeout,
                deaths: claims.len() - 1,
                item: claim.item,
                // Another machine's numbers: no more than there is.
                items: claim.items.min(of.items),
                weight: claim.weight.min(of.weight),
                rate: if claim.rate.is_finite() { claim.rate.max(0.0) } else { 0.0 },
            });
        }
        status.open = status.shards - status.done - status.claimed.len();
        status.items_done += status.claimed.iter().map(|claimed| claimed.items).sum::<usize>();
        status.weight_done += status.claimed.iter().map(|claimed| claimed.weight).sum::<u64>();
        let alive = status.claimed.iter().filter(|claimed| claimed.alive);
        status.rate = alive.map(|claimed| claimed.rate).fold(0.0, |sum, rate| sum + rate);
        let left = status.weight.saturating_sub(status.weight_done);
        status.seconds_left = (status.rate > 0.0 && left > 0).then(|| left as f64 / status.rate);
        Ok(status)
    }
}
