//! How far a runner is.

use std::time::Duration;

/// The state of a runner, told while it works.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RunProgress {
    /// Shards of the job.
    pub shards: usize,
    /// Shards that are done, as far as this runner knows.
    pub done: usize,
    /// The shard that it works on; none while it waits for others.
    pub shard: Option<usize>,
    /// Work of that shard that is done or given up.
    pub weight: u64,
    /// Work of that shard.
    pub of: u64,
    /// Work a second of this runner.
    pub rate: f64,
}

/// What a runner has done.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tally {
    /// Items.
    pub items: usize,
    /// Their work.
    pub weight: u64,
    /// Time that it took, with that of items that failed.
    pub busy: Duration,
}

impl Tally {
    /// Work a second.
    pub fn rate(&self) -> f64 {
        if self.busy.is_zero() { 0.0 } else { self.weight as f64 / self.busy.as_secs_f64() }
    }
}
