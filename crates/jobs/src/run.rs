//! A runner: claims shards, one after the other, until all are done.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::claim::{Held, Watch};
use crate::job::{Job, ListedClaim};
use crate::progress::{RunProgress, Tally};
use crate::shard_run::{Ended, ShardRun};
use crate::work::{Control, Work};
use crate::{Error, Result};

/// How often a shard that others work on is looked at, at most and at least.
const SHORTEST_POLL: Duration = Duration::from_millis(100);
const LONGEST_POLL: Duration = Duration::from_secs(15);

/// How a runner works.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RunOptions {
    /// Number of the runner among those of the job. Runners of different numbers begin at shards far from each other.
    pub index: u64,
    /// Names the runner to people.
    pub host: String,
    /// Time without a renewal after which a claim is dead.
    pub claim_timeout: Duration,
    /// How long the runner waits for an object store that does not answer.
    pub patience: Duration,
    /// How often an item is tried, and how many runners may die on it, before it is given up.
    pub tries: u32,
}

impl Default for RunOptions {
    fn default() -> Self {
        RunOptions {
            index: 0,
            host: String::new(),
            claim_timeout: Duration::from_secs(300),
            patience: Duration::from_secs(600),
            tries: 3,
        }
    }
}

/// The end of a runner.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunReport {
    /// Whether the whole job is done; if not, the runner was stopped.
    pub complete: bool,
    /// Shards that this runner ended.
    pub shards: usize,
    /// What it did, of these shards and others.
    pub tally: Tally,
    /// Shards that cannot be read, and why: they are not done.
    pub broken: BTreeMap<usize, String>,
}

impl Job {
    /// Works on shards until all of the job are done, by this runner or others, or `stop` is set.
    ///
    /// # Errors
    /// If the object store does not answer for long, or the work cannot go on on this machine. Its claim is given back.
    pub fn run<W: Work>(
        &self,
        work: &mut W,
        options: &RunOptions,
        stop: &Arc<AtomicBool>,
        mut progress: impl FnMut(RunProgress),
    ) -> Result<RunReport> {
        let job = self.clone().with_patience(options.patience, stop);
        let mut runner = Runner {
            job: &job,
            name: runner_name(&options.host)?,
            options,
            stop,
            watch: Watch::default(),
            report: RunReport::default(),
            progress: RunProgress { shards: self.manifest.shards.len(), ..RunProgress::default() },
            tell: &mut progress,
        };
        runner.run(work)?;
        Ok(runner.report)
    }
}

/// The name of a runner that no other one has.
pub(crate) fn runner_name(host: &str) -> Result<String> {
    let mut random = [0; 4];
    getrandom::fill(&mut random).map_err(|error| Error::Work(error.to_string().into()))?;
    let host = if host.is_empty() { "runner" } else { host };
    Ok(format!("{host}:{}:{:08x}", std::process::id(), u32::from_le_bytes(random)))
}

/// The shard at which a runner begins. Multiples of the golden ratio lie far from each other, however many runners there are.
fn first_shard(index: u64, shards: usize) -> usize {
    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
    let part = u128::from(index.wrapping_mul(GOLDEN));
    ((part * shards as u128) >> 64) as usize
}

struct Runner<'a> {
    job: &'a Job,
    name: String,
    options: &'a RunOptions,
    stop: &'a AtomicBool,
    watch: Watch,
    report: RunReport,
    progress: RunProgress,
    tell: &'a mut dyn FnMut(RunProgress),
}

impl Runner<'_> {
    fn run<W: Work>(&mut self, work: &mut W) -> Result<()> {
        let shards = self.job.manifest.shards.len();
        let first = first_shard(self.options.index, shards);
        loop {
            let look = self.job.look()?;
            self.watch.see(&look);
            self.progress.done = look.done.iter().filter(|done| **done).count();
            let open: Vec<usize> = (0..shards)
                .map(|shard| (first + shard) % shards)
                .filter(|shard| !look.done[*shard] && !self.report.broken.contains_key(shard))
                .collect();
            if open.is_empty() {
                self.report.complete = self.report.broken.is_empty();
                (self.progress.shard, self.progress.weight, self.progress.of) = (None, 0, 0);
                (self.tell)(self.progress);
                return Ok(());
            }
            let mut has_worked = false;
            for shard in open {
                if self.stop.load(Relaxed) {
                    return Ok(());
                }
                let seen = look.claims.get(&shard).map_or(&[][..], Vec::as_slice);
                has_worked = self.claim(shard, seen, work)?;
                // The work took time in which claims were renewed, so that the others are looked at again.
                if has_worked {
                    break;
                }
            }
            if !has_worked {
                self.wait();
            }
        }
    }

    /// Waits a moment for those that have the open shards.
    fn wait(&mut self) {
        (self.progress.shard, self.progress.weight, self.progress.of) = (None, 0, 0);
        (self.tell)(self.progress);
        let pause = (self.options.claim_timeout / 5).clamp(SHORTEST_POLL, LONGEST_POLL);
        let began = Instant::now();
        while began.elapsed() < pause && !self.stop.load(Relaxed) {
            std::thread::sleep(SHORTEST_POLL);
        }
    }

    /// Claims a shard and works on it. False if another runner has it.
    fn claim<W: Work>(&mut self, shard: usize, seen: &[ListedClaim], work: &mut W) -> Result<bool> {
        let who = (self.name.as_str(), self.options.claim_timeout);
        let Some(held) = Held::acquire(self.job, shard, seen, &self.watch, who)? else { return Ok(false) };
        // It may have been done since it was looked at.
        if self.job.is_done(shard)? {
            held.release(seen, true)?;
            return Ok(true);
        }
        (self.progress.shard, self.progress.weight) = (Some(shard), 0);
        self.progress.of = self.job.manifest.shards[shard].weight;
        let mut run = ShardRun {
            job: self.job,
            shard,
            runner: &self.name,
            tries: self.options.tries.max(1),
            held: &held,
            control: Control { stop: self.stop, lost: held.lost() },
            tally: &mut self.report.tally,
            progress: &mut self.progress,
            tell: &mut *self.tell,
        };
        let ended = run.run(work);
        let released = held.release(seen, matches!(ended, Ok(Ended::Done)));
        match ended? {
            Ended::Done => {
                self.report.shards += 1;
                self.progress.done += 1;
            }
            Ended::Left => {}
            Ended::Broken(reason) => _ = self.report.broken.insert(shard, reason),
        }
        released.map(|()| true)
    }
}

#[cfg(test)]
mod tests {
    use super::first_shard;

    #[test]
    fn runners_begin_far_from_each_other() {
        for (runners, shards) in [(4, 20), (10, 1000), (100, 1000)] {
            let mut first: Vec<usize> = (0..runners).map(|index| first_shard(index, shards)).collect();
            first.sort_unstable();
            let gaps = first.windows(2).map(|pair| pair[1] - pair[0]);
            let fair = shards / runners as usize;
            assert!(gaps.clone().min() >= Some(fair / 3), "{first:?}");
            assert!(gaps.max() <= Some(3 * fair), "{first:?}");
        }
        assert_eq!((first_shard(7, 1), first_shard(u64::MAX, 3) < 3), (0, true));
    }
}
