//! Jobs over shards in an object store, for any number of machines and no service beside it.
//!
//! A [`Plan`] writes items (documents, samples) as shards, and a manifest with the settings that all runners share. Runners, started by whatever
//! starts programs, claim shards and do them ([`Job::run`]); what a shard came to stands in its [`Done`] object. Everything is
//! done by the existence of objects, so that a job is resumed by running it again, and two runners on one shard cost time alone.
//!
//! What is done to an item is a [`Work`]: the job does not know what an item is.

mod claim;
mod error;
mod ingest;
mod item;
mod job;
mod manifest;
mod objects;
mod patience;
mod plan;
mod progress;
mod run;
mod shard_run;
mod status;
#[cfg(test)]
mod tests;
mod work;

pub use claim::{Claim, History};
pub use error::{Error, Result};
pub use ingest::IngestWork;
pub use item::Item;
pub use job::{Done, FailedItem, Job};
pub use manifest::{Manifest, Shard};
pub use patience::{Failed, repeat};
pub use plan::{Plan, Planned, ShardSize};
pub use progress::{RunProgress, Tally};
pub use run::{RunOptions, RunReport};
pub use status::{ClaimedShard, Status};
pub use work::{Control, RunnerError, Undone, Work};
