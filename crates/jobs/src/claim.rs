//! Claims: who works on a shard.
//!
//! The n-th runner on a shard is the one that creates the object `<shard>.<n>`, which an object store lets one alone do. It renews the claim by
//! writing it again. A claim that nobody else saw change for its own time is dead, and a runner that saw that may create the
//! next one. Times are those that one runner measures between two of its own looks: clocks of machines are never compared, and time in which the
//! object store does not answer is left out.
//!
//! A runner that ends in good order deletes its claim, so that the claims before the last one are those of runners that died. Where there are
//! such it marks its claim as given back instead: without it their last claim would have to die again. Creating
//! is all that has to be exclusive, which every object store and shared folder can do; two runners on one shard cost time alone.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::job::{CLAIMS, Job, ListedClaim, Look, done_name};
use crate::objects::JobObjects;
use crate::{Error, Result};

/// A claim is renewed so many times within the time after which it is dead.
const RENEWALS: u32 = 5;
/// Most bytes of a claim.
const MAX_CLAIM: u64 = 64 << 10;
/// The longest time that a claim may ask for before it counts as dead.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// A runner's claim of a shard.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Claim {
    /// The runner: host, process, and digits of its own.
    pub runner: String,
    /// When it was made, in seconds since 1970 by the runner's clock: for people.
    pub since: u64,
    /// Seconds without a change after which it is dead.
    pub timeout: f64,
    /// Counts the times that it was written, so that each changes the object.
    pub renewed: u64,
    /// The item under way, where runners have died since work was last kept: the one at which runners die again and again is given up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub item: Option<String>,
    /// What the runners before, and this one, have left.
    #[serde(default)]
    pub history: History,
    /// Whether the runner has ended in good order, so that another may have the shard at once.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub given_back: bool,
    /// Items of the shard that are done or given up.
    pub items: usize,
    /// Their work.
    pub weight: u64,
    /// Work a second that the runner does, over all its shards.
    pub rate: f64,
}

/// What is known of a shard, handed on from claim to claim.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct History {
    /// Items at its beginning whose work is where everyone finds it.
    pub kept: usize,
    /// Runners that have died since.
    pub deaths: u32,
    /// Of them, those that were at an item, by its id.
    pub at: BTreeMap<String, u32>,
}

impl History {
    /// What the next runner knows after this claim's runner has died.
    fn after(claim: &Claim) -> History {
        let mut history = claim.history.clone();
        history.deaths = history.deaths.saturating_add(1);
        if let Some(item) = &claim.item {
            let at = history.at.entry(item.clone()).or_default();
            *at = at.saturating_add(1);
        }
        history
    }
}

fn name(shard: usize, generation: u32) -> String {
    format!("{CLAIMS}/{shard:06}.{generation}")
}

fn read(objects: &JobObjects, shard: usize, generation: u32) -> Result<Option<Claim>> {
    match objects.get(&name(shard, generation), MAX_CLAIM) {
        // A claim that cannot be read is one whose owner is not known.
        Err(Error::Broken { .. }) => Ok(Some(Claim::default())),
        found => Ok(found?.map(|bytes| serde_json::from_slice(&bytes).unwrap_or_default())),
    }
}

impl Job {
    /// The last claim of a shard, as it stands now; none if it was given back meanwhile.
    pub(crate) fn last_claim(&self, shard: usize, claims: &[ListedClaim]) -> Result<Option<Claim>> {
        claims.last().map_or(Ok(None), |last| read(&self.objects, shard, last.generation))
    }
}

/// The last claims of shards as one runner saw them, and since when each has not changed.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    seen: HashMap<usize, (u32, String, Instant)>,
    /// For how long in all the object store had not answered until the last look.
    silence: Duration,
}

impl Watch {
    /// Takes in what was seen. No runner can renew its claim while the object store does not answer: that time does not count.
    pub(crate) fn see(&mut self, look: &Look) {
        let silence = look.silence.saturating_sub(self.silence);
        self.silence = look.silence;
        self.seen.values_mut().for_each(|(.., since)| *since += silence);
        self.seen.retain(|shard, _| look.claims.contains_key(shard));
        for (shard, claims) in &look.claims {
            let Some(last) = claims.last() else { continue };
            let is_same = |(generation, version, _): &(u32, String, Instant)| {
                (*generation, version) == (last.generation, &last.version)
            };
            if !self.seen.get(shard).is_some_and(is_same) {
                self.seen.insert(*shard, (last.generation, last.version.clone(), Instant::now()));
            }
        }
    }

    /// How long the last claim of a shard has not changed.
    fn unchanged(&self, shard: usize) -> Duration {
        self.seen.get(&shard).map_or(Duration::ZERO, |(_, _, since)| since.elapsed())
    }
}

/// A claim that is held, and renewed by a thread of its own until it is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    shared: Arc<Shared>,
    renewer: Option<JoinHandle<()>>,
    /// Runners that died on the shard before.
    pub(crate) deaths: usize,
    /// What they have left.
    pub(crate) history: History,
    /// The time between two renewals.
    pub(crate) pace: Duration,
}

#[derive(Debug)]
struct Shared {
    objects: JobObjects,
    shard: usize,
    generation: u32,
    claim: Mutex<Claim>,
    /// Held while the claim is written, so that nothing is written after its deletion.
    writing: Mutex<()>,
    lost: AtomicBool,
    ended: Mutex<bool>,
    wake: Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Held {
    /// Claims a shard of which these claims were seen; none if another runner has it.
    pub(crate) fn acquire(
        job: &Job,
        shard: usize,
        seen: &[ListedClaim],
        watch: &Watch,
        (runner, timeout): (&str, Duration),
    ) -> Result<Option<Held>> {
        let last = seen.last().map_or(0, |last| last.generation);
        let (mut history, mut given_back) = (History::default(), None);
        if last > 0 {
            // A claim with none before it is deleted where it is given back.
            if watch.unchanged(shard) < timeout && seen.len() == 1 {
                return Ok(None);
            }
            // One that was given back since is seen as such at the next look.
            let Some(held) = job.last_claim(shard, seen)? else { return Ok(None) };
            if held.given_back {
                (history, given_back) = (held.history, Some(last));
            } else if watch.unchanged(shard) < timeout.max(seconds(held.timeout).min(LONGEST_TIMEOUT)) {
                return Ok(None);
            } else {
                history = History::after(&held);
            }
        }
        let Some(generation) = last.checked_add(1) else { return Ok(None) };
        let claim = Claim {
            runner: runner.to_owned(),
            since: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
            timeout: timeout.as_secs_f64(),
            history: history.clone(),
            ..Claim::default()
        };
        let created = job.objects.create(&name(shard, generation), to_bytes(&claim))?;
        // A request that was repeated finds the claim that it has made itself.
        if !created && read(&job.objects, shard, generation)?.is_none_or(|found| found.runner != runner) {
            return Ok(None);
        }
        // The claims that stay are those of the dead.
        if let Some(given_back) = given_back {
            job.objects.delete(&name(shard, given_back))?;
        }
        let deaths = seen.len() - usize::from(given_back.is_some());
        let shared = Arc::new(Shared {
            objects: job.objects.clone(),
            shard,
            generation,
            claim: Mutex::new(claim),
            writing: Mutex::default(),
            lost: AtomicBool::new(false),
            ended: Mutex::new(false),
            wake: Condvar::new(),
        });
        let (renewed, pace) = (shared.clone(), timeout / RENEWALS);
        let renewer = std::thread::Builder::new().name("claim".to_owned()).spawn(move || renewed.keep(pace));
        let renewer = renewer.map_err(|error| Error::Work(error.into()))?;
        Ok(Some(Held { shared, renewer: Some(renewer), deaths, history, pace }))
    }

    /// Set once another runner has taken the shard over, or ended it.
    pub(crate) fn lost(&self) -> &AtomicBool {
        &self.shared.lost
    }

    /// What is done, to be told when the claim is renewed next.
    pub(crate) fn progress(&self, items: usize, weight: u64, rate: f64) {
        let mut claim = lock(&self.shared.claim);
        (claim.items, claim.weight, claim.rate) = (items, weight, rate);
    }

    /// Says at once which item is under way.
    pub(crate) fn at(&self, item: Option<&str>) -> Result<()> {
        lock(&self.shared.claim).item = item.map(str::to_owned);
        self.shared.write()
    }

    /// Says at once that the work of so many items at the beginning is kept.
    pub(crate) fn kept(&self, items: usize) -> Result<()> {
        lock(&self.shared.claim).history = History { kept: items, ..History::default() };
        self.shared.write()
    }

    /// Gives the claim back, so that another runner may have the shard at once, and with `all` deletes those of the dead before it as well: the
    /// shard is done.
    pub(crate) fn release(mut self, seen: &[ListedClaim], all: bool) -> Result<()> {
        self.stop();
        let Shared { objects, shard, generation, .. } = &*self.shared;
        if all {
            for earlier in seen {
                objects.delete(&name(*shard, earlier.generation))?;
            }
        } else if self.deaths > 0 && !self.lost().load(Relaxed) {
            {
                let mut claim = lock(&self.shared.claim);
                (claim.item, claim.given_back) = (None, true);
            }
            return self.shared.write();
        }
        objects.delete(&name(*shard, *generation))
    }

    fn stop(&mut self) {
        *lock(&self.shared.ended) = true;
        self.shared.wake.notify_all();
        if let Some(renewer) = self.renewer.take() {
            // A renewer that panicked has ended as well.
            let _ = renewer.join();
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    /// Renews the claim until it ends or is lost. An object store that does not answer is asked again.
    fn keep(&self, pause: Duration) {
        loop {
            let ended = lock(&self.ended);
            let waited = self.wake.wait_timeout_while(ended, pause, |ended| !*ended);
            if *waited.unwrap_or_else(PoisonError::into_inner).0 {
                return;
            }
            match self.is_superseded() {
                Ok(true) => return self.lost.store(true, Relaxed),
                Ok(false) => _ = self.write(),
                Err(_) => {}
            }
        }
    }

    fn is_superseded(&self) -> Result<bool> {
        let next = name(self.shard, self.generation.saturating_add(1));
        Ok(self.objects.exists(&next)? || self.objects.exists(&done_name(self.shard))?)
    }

    fn write(&self) -> Result<()> {
        let _writing = lock(&self.writing);
        let bytes = {
            let mut claim = lock(&self.claim);
            claim.renewed += 1;
            to_bytes(&claim)
        };
        self.objects.put(&name(self.shard, self.generation), bytes)
    }
}

/// A claim has no value that JSON lacks, but for rates that are not finite.
fn to_bytes(claim: &Claim) -> Vec<u8> {
    serde_json::to_vec(claim).unwrap_or_default()
}

/// Seconds that another machine states.
fn seconds(stated: f64) -> Duration {
    Duration::try_from_secs_f64(stated).unwrap_or_default()
}
