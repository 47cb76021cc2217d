//! One runner's work on one shard.
//!
//! An item that fails is tried again, and then listed as failed; the shard goes on. Work is kept once in every renewal's time, and the claim says
//! up to which item, so that the next runner goes on there. It tries listed items behind that once more: their partial results were lost with the
//! runner before. An item that ends the process, by using up the machine's memory for example,
//! leaves no word: where runners have died since work was last kept, the claim names each item before it begins, and one at which
//! several runners died is listed as failed as well, and not tried again.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use crate::claim::Held;
use crate::item::{self, Item};
use crate::job::{Done, FailedItem, Job, done_name, failed_name};
use crate::progress::{RunProgress, Tally};
use crate::work::{Control, Undone, Work};
use crate::{Error, Result};

/// Most characters of a reason, and of an item's name, that are kept.
const MAX_REASON: usize = 4000;
const MAX_NAME: usize = 200;
/// Items of which is asked together whether they were done before.
const ASKED: usize = 4;

/// The work on a claimed shard.
pub(crate) struct ShardRun<'a> {
    pub(crate) job: &'a Job,
    pub(crate) shard: usize,
    pub(crate) runner: &'a str,
    pub(crate) tries: u32,
    pub(crate) held: &'a Held,
    pub(crate) control: Control<'a>,
    pub(crate) tally: &'a mut Tally,
    pub(crate) progress: &'a mut RunProgress,
    pub(crate) tell: &'a mut dyn FnMut(RunProgress),
}

/// How the work on a shard ended.
pub(crate) enum Ended {
    Done,
    /// The runner stops, or another has the shard.
    Left,
    /// The shard cannot be read.
    Broken(String),
}

/// What became of an item.
enum Outcome {
    Done,
    GivenUp,
    Interrupted,
}

impl ShardRun<'_> {
    pub(crate) fn run<W: Work>(&mut self, work: &mut W) -> Result<Ended> {
        let began = Instant::now();
        let shard = &self.job.manifest.shards[self.shard];
        let items: Vec<Item<W::Body>> = match item::read(&self.job.objects, shard) {
            Ok(items) => items,
            Err(Error::Broken { name, reason }) => return Ok(Ended::Broken(format!("{name}: {reason}"))),
            Err(error) => return Err(error),
        };
        let Some(failed) = self.items(work, &items)? else { return Ok(Ended::Left) };
        let Some(result) = unless_interrupted(work.finish())? else { return Ok(Ended::Left) };
        let done = Done {
            manifest: self.job.hash.clone(),
            runner: self.runner.to_owned(),
            seconds: began.elapsed().as_secs_f64(),
            items: items.len() - failed,
            failed,
            deaths: self.held.deaths,
            result,
        };
        let name = done_name(self.shard);
        let bytes = serde_json::to_vec(&done).map_err(|error| Error::broken(&name, error))?;
        // Where another runner was quicker, its result is as good.
        self.job.objects.create(&name, bytes)?;
        Ok(Ended::Done)
    }

    /// Does the items that were not kept before, and gives how many of all are given up; none if the work is to end before.
    fn items<W: Work>(&mut self, work: &mut W, items: &[Item<W::Body>]) -> Result<Option<usize>> {
        let listed = self.job.failed_ids()?;
        let is_listed = |item: &Item<W::Body>| listed.binary_search(&item.id).is_ok();
        if unless_interrupted(work.begin())?.is_none() {
            return Ok(None);
        }
        let (before, rest) = items.split_at(self.held.history.kept.min(items.len()));
        let mut failed = before.iter().filter(|item| is_listed(item)).count();
        self.progress.weight = before.iter().map(|item| item.weight).sum();
        let (mut unkept, mut kept_at) = (Vec::new(), Instant::now());
        let mut asked = VecDeque::new();
        for (index, item) in rest.iter().enumerate() {
            self.say(before.len() + index);
            if self.control.is_over() {
                return Ok(None);
            }
            if index % ASKED == 0 {
                let next = &rest[index..rest.len().min(index + ASKED)];
                let Some(done) = self.done_before(work, next)? else { return Ok(None) };
                asked = done.into();
            }
            let outcome = match asked.pop_front() {
                _ if is_listed(item) => self.listed(work, item)?,
                Some(true) => Outcome::Done,
                known => self.item(work, item, known.is_none(), self.tries)?,
            };
            match outcome {
                Outcome::Done => unkept.push(item),
                Outcome::GivenUp => failed += 1,
                Outcome::Interrupted => return Ok(None),
            }
            self.progress.weight = self.progress.weight.saturating_add(item.weight);
            let is_last = index + 1 == rest.len();
            if is_last || kept_at.elapsed() >= self.held.pace {
                if self.names_items() {
                    self.held.at(None)?;
                }
                let kept = unless_interrupted(work.keep(&unkept, &self.control))?;
                let Some(is_kept) = kept else { return Ok(None) };
                if is_kept {
                    unkept.clear();
                    self.held.kept(before.len() + index + 1)?;
                }
                kept_at = Instant::now();
            }
        }
        self.say(items.len());
        Ok(Some(failed))
    }

    /// Of each item, whether it was done before; nothing where items are to be asked about one by one, since one of them may have
    /// ended a runner, or makes the question panic.
    fn done_before<W: Work>(&self, work: &mut W, items: &[Item<W::Body>]) -> Result<Option<Vec<bool>>> {
        if self.names_items() {
            return Ok(Some(Vec::new()));
        }
        let asked = catch_unwind(AssertUnwindSafe(|| work.are_done(items, &self.control)));
        asked.map_or(Ok(Some(Vec::new())), unless_interrupted)
    }

    /// Whether a runner died at an item that may be among those to be done.
    fn names_items(&self) -> bool {
        self.held.history.deaths > 0
    }

    /// Tells how far the shard is.
    fn say(&mut self, items: usize) {
        self.progress.rate = self.tally.rate();
        self.held.progress(items, self.progress.weight, self.progress.rate);
        (self.tell)(*self.progress);
    }

    /// Tries once more an item that another runner has listed as failed, unless runners died at it.
    fn listed<W: Work>(&mut self, work: &mut W, item: &Item<W::Body>) -> Result<Outcome> {
        if self.job.failed_item(&item.id)?.died {
            return Ok(Outcome::GivenUp);
        }
        let outcome = self.item(work, item, true, 1)?;
        if matches!(outcome, Outcome::Done) {
            self.job.objects.delete(&failed_name(&item.id))?;
        }
        Ok(outcome)
    }

    /// Does an item in so many tries, if it `may_be_done` after asking whether it was done before.
    fn item<W: Work>(
        &mut self,
        work: &mut W,
        item: &Item<W::Body>,
        may_be_done: bool,
        tries: u32,
    ) -> Result<Outcome> {
        let deaths = self.held.history.at.get(&item.id).copied().unwrap_or(0);
        if deaths >= self.tries {
            let reason =
                format!("{deaths} runners ended without a word while they did it: killed, or out of memory");
            return self.give_up(work.name(item), item, &reason, true);
        }
        if self.names_items() {
            self.held.at(Some(&item.id))?;
        }
        let began = Instant::now();
        let mut reason = String::new();
        for _ in 0..tries {
            // What a panic leaves half-done is done again, or the item is given up.
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                if may_be_done && work.are_done(std::slice::from_ref(item), &self.control)? == [true] {
                    return Ok(false);
                }
                work.item(item, &self.control).map(|()| true)
            }));
            match outcome {
                Ok(Ok(false)) => return Ok(Outcome::Done),
                Ok(Ok(true)) => {
                    self.tally.items += 1;
                    self.tally.weight += item.weight;
                    self.tally.busy += began.elapsed();
                    return Ok(Outcome::Done);
                }
                Ok(Err(Undone::Item(why))) => reason = why,
                Ok(Err(Undone::Runner(error))) => return Err(Error::Work(error)),
                Ok(Err(Undone::Interrupted)) => return Ok(Outcome::Interrupted),
                Err(panic) => reason = format!("it panicked: {}", message(panic.as_ref())),
            }
            // An item that failed since the machine has is not at fault.
            if let Some(failure) = work.failure() {
                return Err(Error::Work(failure));
            }
        }
        self.tally.busy += began.elapsed();
        self.give_up(work.name(item), item, &reason, false)
    }

    /// Lists an item as failed. `died`: runners died at it.
    fn give_up<T>(&self, name: String, item: &Item<T>, reason: &str, died: bool) -> Result<Outcome> {
        let reason = reason.chars().take(MAX_REASON).collect();
        let name = name.chars().take(MAX_NAME).collect();
        let failed = FailedItem { id: item.id.clone(), name, shard: self.shard, reason, died };
        let object = failed_name(&item.id);
        let bytes = serde_json::to_vec(&failed).map_err(|error| Error::broken(&object, error))?;
        self.job.objects.create(&object, bytes)?;
        Ok(Outcome::GivenUp)
    }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a word")
}

/// The result of work on the shard; none if it was interrupted.
fn unless_interrupted<T>(result: Result<T, Undone>) -> Result<Option<T>> {
    match result {
        Ok(done) => Ok(Some(done)),
        Err(Undone::Interrupted) => Ok(None),
        Err(Undone::Runner(error)) => Err(Error::Work(error)),
        Err(Undone::Item(reason)) => Err(Error::Work(reason.into())),
    }
}
