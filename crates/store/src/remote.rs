//! Chunks that several machines share, in any object store.
//!
//! Reading: what neither memory nor the folder has is fetched, several objects at once, verified like any file, a layer at a
//! time, and put into the folder; layers are used while later ones still travel. Writing: what is put into the folder is noted in the index as not yet there, in the same transaction, and a task in
//! the background brings it there. The notes are the queue, so nothing is lost with a process and no queue grows in memory.
//!
//! What is expected to be computed sooner than fetched, by what fetching took until now, is not asked for, and what comes much later than
//! expected is computed.
//!
//! An object store that fails or hangs is left alone after a time, longer each time it fails again, and asked again by the
//! background task alone: a request waits for it at most once.

mod client;
mod delete;
mod download;
mod known_objects;
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

use object_store::ObjectStore;
use object_store::path::Path as ObjectPath;
use tokio::runtime::Runtime;

use self::client::Client;
pub(crate) use self::download::ObjectSink;
pub use self::objects::{ListedObject, Objects, WrittenObject};
pub use self::options::RemoteOptions;
pub use self::stats::RemoteStats;
use crate::disk::Disk;
use crate::{ChunkKey, Result, StoreError};

/// Computing is taken to last so long at least: it takes the time of other requests as well, and less is not told from noise.
const LEAST_COMPUTE: Duration = Duration::from_millis(50);

/// Which of fetching and computing chunks is expected to take less time.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Choice {
    /// Fetching. At that time they are late by as long as computing takes, and are computed; without it they are waited for.
    Fetch(Option<Instant>),
    /// Computing. One of them is fetched beside it where the measurements are old.
    Compute { measure: bool },
}

#[derive(Debug)]
pub(crate) struct Remote {
    /// Taken when it is dropped.
    runtime: Option<Runtime>,
    client: Arc<Client>,
    /// For errors.
    url: String,
}

impl Remote {
    /// Begins to bring what `disk` notes there.
    pub(crate) fn open(options: &RemoteOptions, disk: &Arc<Disk>) -> Result<Remote> {
        let (objects, prefix) = options.connect()?;
        Remote::with(objects, prefix, options, disk)
    }

    /// Begins to bring what `disk` notes to `objects`.
    pub(crate) fn with(
        objects: Arc<dyn ObjectStore>,
        prefix: ObjectPath,
        options: &RemoteOptions,
        disk: &Arc<Disk>,
    ) -> Result<Remote> {
        let runtime = options.runtime()?;
        let client = Arc::new(Client::new(objects, prefix, options.timeout));
        runtime.spawn(upload::send_all(client.clone(), Arc::downgrade(disk)));
        Ok(Remote { runtime: Some(runtime), client, url: options.url.clone() })
    }

    /// There is something new to be brought there.
    pub(crate) fn wake(&self) {
        self.client.wake.notify_one();
    }

    /// Has an object of so many bytes, as far as they are known, brought to `sink`, which is dropped when nothing comes any more.
    pub(crate) fn fetch(&self, name: String, bytes: u64, sink: Box<dyn ObjectSink>) {
        let Some(runtime) = &self.runtime else { return };
        let client = self.client.clone();
        client.link.asked(bytes);
        runtime.spawn(async move {
            client.clone().fetch(name, sink).await;
            client.link.ended(bytes);
        });
    }

    /// Whether `chunks` chunks, of which so many objects of so many bytes are missing here, are fetched or computed, which takes so long
    /// where it is known. Those that are computed are counted.
    pub(crate) fn choose(
        &self,
        chunks: usize,
        objects: usize,
        bytes: u64,
        compute: Option<Duration>,
    ) -> Choice {
        let (client, now) = (&self.client, Instant::now());
        let expected = if client.is_down() { None } else { client.link.expected(objects, bytes) };
        let (Some(expected), Some(compute)) = (expected, compute.map(|time| time.max(LEAST_COMPUTE))) else {
            return Choice::Fetch(None);
        };
        if expected > compute {
            client.counters.passed_over.fetch_add(chunks as u64, Relaxed);
            return Choice::Compute { measure: client.link.is_stale(now) };
        }
        Choice::Fetch(client.link.has_rate().then(|| now + expected + compute))
    }

    /// Counts a chunk that is computed because it has not come.
    pub(crate) fn count_late(&self) {
        self.client.counters.late.fetch_add(1, Relaxed);
    }

    /// The last measurement of fetching was made at this time.
    #[cfg(test)]
    pub(crate) fn was_measured(&self, at: Instant) {
        self.client.link.was_measured(at);
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
