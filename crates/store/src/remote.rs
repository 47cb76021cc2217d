//! Chunks that several machines share, in any object store.
//!
//! Reading: what neither memory nor the folder has is fetched, several objects at once, verified like any file, a layer at a
//! time, and put into the folder; layers are used while later ones still travel. Writing: what is put into the folder is noted in the index as not yet there, in the same transaction, and a task in
//! the background brings it there. The notes are the queue, so nothing is lost with a process and no queue grows in memory.
//!
//! What is expected to be computed sooner than fetched is not asked for, and what comes later than expected is computed while it still
//! travels: [`patience`] decides.
//!
//! An object store that fails or hangs is left alone after a time, longer each time it fails again, and asked again by the
//! background task alone: a request waits for it at most once.

mod client;
mod delete;
mod download;
mod known_objects;
mod leftovers;
mod link;
mod objects;
mod options;
mod stats;
mod upload;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;

use self::client::Client;
pub(crate) use self::download::ObjectSink;
use self::link::OnDrop;
pub use self::objects::{ListedObject, Objects, WrittenObject};
pub use self::options::{FetchPolicy, RemoteOptions, UnknownFetchPolicy};
pub use self::stats::RemoteStats;
use crate::disk::Disk;
use crate::{ChunkKey, LinkSpeed, Result, StoreError};

/// The time that computing is taken to last before a prefill was measured.
const UNKNOWN_COMPUTE: Duration = Duration::from_secs(1);

/// Whether chunks are fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// Chunks are fetched. At that time they are late; without it they never are.
    Fetch(Option<Instant>),
    /// Chunks are computed. One of them is fetched beside it where measurements are old.
    Compute { measure: bool },
}

/// How long chunks are waited for that are expected to take `fetch` to come and `compute` to be computed, before computing them begins beside
/// their fetch; none where they are computed at once.
///
/// It is twice as long as expected, at least a tenth of `compute` and at most all of it. So an object store that stops answering costs a request
/// a tenth of its prefill where it was fast, and never more than its prefill. What is not measured yet is measured by fetching.
fn patience(fetch: Option<Duration>, compute: Option<Duration>) -> Option<Duration> {
    if fetch.zip(compute).is_some_and(|(fetch, compute)| fetch > compute) {
        return None;
    }
    let compute = compute.unwrap_or(UNKNOWN_COMPUTE);
    Some(fetch.map_or(compute, |fetch| (2 * fetch).clamp(compute / 10, compute)))
}

/// Chunks of which something is neither here nor on its way.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Missing {
    pub(crate) chunks: usize,
    /// Their objects that are not here, and the bytes of those.
    pub(crate) objects: usize,
    pub(crate) bytes: u64,
    /// Time that computing them takes; none where it is not known.
    pub(crate) compute: Option<Duration>,
}

#[derive(Debug)]
pub(crate) struct Remote {
    /// Taken when it is dropped.
    runtime: Option<Runtime>,
    client: Arc<Client>,
    policy: FetchPolicy,
    /// For errors.
    url: String,
}

impl Remote {
    /// Begins to bring what `disk` notes there.
    pub(crate) fn open(options: &RemoteOptions, disk: &Arc<Disk>) -> Result<Remote> {
        options.prepare_folder()?;
        let client = Arc::new(Client::new(options)?);
        let runtime = options.runtime()?;
        runtime.spawn(upload::send_all(client.clone(), Arc::downgrade(disk)));
        Ok(Remote { runtime: Some(runtime), client, policy: options.policy, url: options.url.clone() })
    }

    /// There is something new to be brought there.
    pub(crate) fn wake(&self) {
        self.client.wake.notify_one();
    }

    /// Has an object of so many bytes, as far as they are known, brought to `sink`, which is dropped when nothing comes any more.
    pub(crate) fn fetch(&self, name: String, bytes: u64, sink: Box<dyn ObjectSink>) {
        let Some(runtime) = &self.runtime else { return };
        let (client, queued) = (self.client.clone(), self.client.clone());
        queued.link.queue(bytes);
        let queued = OnDrop(move || queued.link.done(bytes));
        runtime.spawn(async move {
            let _queued = queued;
            client.fetch(name, sink).await;
        });
    }

    /// Whether chunks are fetched, all of them or none: they share the link, and the processor. Those that are not are counted.
    pub(crate) fn choose(&self, missing: Missing, now: Instant) -> Choice {
        let link = &self.client.link;
        let choice = match self.policy {
            FetchPolicy::Fetch => Choice::Fetch(None),
            FetchPolicy::Compute => Choice::Compute { measure: false },
            FetchPolicy::Auto => {
                // One that is left alone says at once that nothing comes.
                let up = !self.client.is_down();
                let fetch = link.expected(missing.objects, missing.bytes, now).filter(|_| up);
                match patience(fetch, missing.compute) {
                    Some(patience) => Choice::Fetch(Some(now + patience)),
                    None => Choice::Compute { measure: link.is_stale(now) },
                }
            }
        };
        if let Choice::Compute { measure } = choice {
            let passed_over = missing.chunks - usize::from(measure).min(missing.chunks);
            self.client.counters.passed_over.fetch_add(passed_over as u64, Relaxed);
        }
        choice
    }

    /// Counts a chunk that came late: before it was computed, or after that.
    pub(crate) fn count_race(&self, won: bool) {
        let counters = &self.client.counters;
        let races = if won { &counters.races_won } else { &counters.races_lost };
        races.fetch_add(1, Relaxed);
    }

    /// A request was answered at that time, after this latency.
    #[cfg(test)]
    pub(crate) fn has_measured(&self, latency: Duration, at: Instant) {
        let asked = at.checked_sub(latency).unwrap_or(at);
        self.client.link.ask(asked);
        self.client.link.answered(asked, at, true);
    }

    /// Deletes the objects of chunks whose files are gone, and returns when the object store has confirmed each. Must not be
    /// called by a thread of an asynchronous runtime, since it waits.
    ///
    /// # Errors
    /// If the object store refuses, or does not answer.
    pub(crate) fn delete(&self, keys: BTreeSet<ChunkKey>) -> Result<()> {
        let Some(runtime) = &self.runtime else { return Ok(()) };
        let (sender, deleted) = channel();
        let client = self.client.clone();
        runtime.spawn(async move {
            // Nobody may be waiting any more.
            let _ = sender.send(client.delete(&keys).await);
        });
        let outcome = deleted.recv().unwrap_or_else(|error| Err(error.to_string()));
        outcome.map_err(|why| StoreError::NotDeleted { url: self.url.clone(), why })
    }

    pub(crate) fn stats(&self) -> RemoteStats {
        self.client.stats()
    }

    pub(crate) fn link_speed(&self) -> LinkSpeed {
        self.client.link.speed(Instant::now())
    }

    /// Objects below the same prefix.
    pub(crate) fn objects(&self) -> Option<Objects> {
        let runtime = self.runtime.as_ref()?.handle().clone();
        Some(Objects::new(self.client.clone(), runtime, &self.url))
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Uploads under way are noted in the index; the process that opens the store next does them.
            runtime.shutdown_background();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread::sleep;

    use object_store::memory::InMemory;

    use super::*;
    use crate::{Limits, Problem};

    /// A receiver that panics at an object's first bytes.
    struct Panics;

    impl ObjectSink for Panics {
        fn most(&self) -> u64 {
            1 << 20
        }

        fn take(&mut self, _: u64, _: &[u8]) -> Result<(), Problem> {
            panic!("a receiver fails")
        }

        fn end(&mut self) -> Result<(), Problem> {
            Ok(())
        }
    }

    /// An object that was under way for ever would make every later one seem slow.
    #[test]
    fn an_object_whose_receiver_panics_is_under_way_no_longer() {
        let folder = tempfile::tempdir().unwrap();
        let mut options = RemoteOptions::new("memory:///library");
        options.objects = Some(Arc::new(InMemory::new()));
        let disk = Arc::new(Disk::open(folder.path(), Limits::memory(0), true).unwrap());
        let remote = Remote::open(&options, &disk).unwrap();
        remote.objects().unwrap().put("object", vec![1; 1 << 20]).unwrap();
        remote.fetch("object".to_owned(), 1 << 20, Box::new(Panics));
        let (link, began, later) =
            (&remote.client.link, Instant::now(), Instant::now() + Duration::from_secs(3600));
        while !link.is_stale(later) {
            assert!(began.elapsed() < Duration::from_secs(60), "it is still under way");
            sleep(Duration::from_millis(1));
        }
        let expected = link.expected(1, 1 << 20, later).unwrap();
        assert!(expected < Duration::from_secs(60), "{expected:?}");
    }

    fn seconds(fetch: impl Into<Option<f64>>, compute: impl Into<Option<f64>>) -> Option<f64> {
        let [fetch, compute] = [fetch.into(), compute.into()].map(|time| time.map(Duration::from_secs_f64));
        patience(fetch, compute).map(|patience| patience.as_secs_f64())
    }

    #[test]
    fn what_is_computed_sooner_is_not_waited_for() {
        assert_eq!(seconds(1.1, 1.0), None);
        assert_eq!(seconds(1.0, 1.0), Some(1.0));
    }

    #[test]
    fn a_fetch_is_late_at_twice_its_expected_time_between_a_tenth_of_the_prefill_and_all_of_it() {
        assert_eq!(seconds(0.3, 1.0), Some(0.6));
        assert_eq!(seconds(0.6, 1.0), Some(1.0));
        assert_eq!(seconds(0.001, 1.0), Some(0.1));
    }

    #[test]
    fn what_was_not_measured_is_fetched() {
        assert_eq!(seconds(None, 0.2), Some(0.2));
        assert_eq!(seconds(None, None), Some(1.0));
        assert_eq!(seconds(0.2, None), Some(0.4));
        assert_eq!(seconds(60.0, None), Some(1.0));
    }
}
