//! A client of one object store: requests with time limits, and whether the object store answers.
//!
//! An object store that fails or hangs is left alone for a while, longer each time that it fails again.

use std::collections::HashMap;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use object_store::path::Path as ObjectPath;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};
use serde::Serialize;
use tokio::sync::{Mutex as AsyncMutex, Notify, Semaphore};
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};

use crate::Problem;

/// Objects that are fetched at once.
pub(super) const MAX_CONCURRENT: usize = 8;
/// How long a failed object store is left alone at first, and at most.
pub(super) const FIRST_PAUSE: Duration = Duration::from_secs(1);
pub(super) const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// How long an object that was not there is not asked for again.
const ABSENT_FOR: Duration = Duration::from_secs(5);
/// Most absent objects that are remembered.
const MAX_ABSENT: usize = 1 << 16;
/// An object that need not be there: the caller learns whether the object store answers.
const PROBE: &str = "refrain-probe";

/// Counts of an object store since the store was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct RemoteStats {
    /// Objects brought from there, and their bytes.
    pub fetched: u64,
    /// Bytes of them.
    pub fetched_bytes: u64,
    /// Objects that were not there.
    pub absent: u64,
    /// Objects brought there.
    pub sent: u64,
    /// Bytes of them.
    pub sent_bytes: u64,
    /// Requests that failed or took too long.
    pub failures: u64,
    /// Objects that were not asked for because it had just failed.
    pub skipped: u64,
    /// Objects that were broken, and removed there.
    pub broken: u64,
    /// Chunks that are still to be brought there.
    pub pending: u64,
    /// Why it last failed, if it has not answered since.
    pub down: Option<String>,
    /// Why something could not be brought there, if nothing has been since: it may answer and refuse.
    pub stuck: Option<String>,
}

#[derive(Debug, Default)]
struct Counters {
    fetched: AtomicU64,
    fetched_bytes: AtomicU64,
    absent: AtomicU64,
    sent: AtomicU64,
    sent_bytes: AtomicU64,
    failures: AtomicU64,
    skipped: AtomicU64,
    broken: AtomicU64,
}

/// Whether the object store answers.
#[derive(Debug, Default)]
struct Health {
    /// When it may be asked again, if it has failed, and why it has.
    until: Option<(Instant, String)>,
    pause: Duration,
}

#[derive(Debug)]
pub(super) struct Client {
    pub(super) objects: Arc<dyn ObjectStore>,
    pub(super) prefix: ObjectPath,
    pub(super) timeout: Duration,
    health: Mutex<Health>,
    pub(super) stuck: Mutex<Option<String>>,
    counters: Counters,
    /// When objects were found absent.
    pub(super) absent: Mutex<HashMap<String, Instant>>,
    pub(super) wake: Notify,
    /// [`MAX_CONCURRENT`] of them.
    pub(super) turns: Semaphore,
    /// Held while a chunk's files are read and uploaded, and while chunks are deleted.
    pub(super) uploading: AsyncMutex<()>,
}

/// Receiver of an object's bytes. When it is dropped nothing comes any more.
pub(crate) trait ObjectSink: Send {
    /// Most bytes that the object can have.
    fn most(&self) -> u64;

    /// Takes the bytes that come next, of an object that says it has `size` of them.
    ///
    /// # Errors
    /// If the object is broken.
    fn take(&mut self, size: u64, bytes: &[u8]) -> Result<(), Problem>;

    /// All bytes have been taken.
    ///
    /// # Errors
    /// If the object is broken.
    fn end(&mut self) -> Result<(), Problem>;
}

/// Why an object did not come, or go.
pub(super) enum Failure {
    Absent,
    Broken(Problem),
    /// The object store answers, and does not take it; or something here is in the way.
    Refused(String),
    /// It does not answer, or not as it should.
    Failed(String),
}

impl Client {
    pub(super) fn new(objects: Arc<dyn ObjectStore>, prefix: ObjectPath, timeout: Duration) -> Client {
        Client {
            objects,
            prefix,
            timeout,
            health: Mutex::new(Health { until: None, pause: FIRST_PAUSE }),
            stuck: Mutex::default(),
            counters: Counters::default(),
            absent: Mutex::default(),
            wake: Notify::new(),
            turns: Semaphore::new(MAX_CONCURRENT),
            uploading: AsyncMutex::default(),
        }
    }

    pub(super) fn stats(&self) -> RemoteStats {
        let c = &self.counters;
        RemoteStats {
            fetched: c.fetched.load(Relaxed),
            fetched_bytes: c.fetched_bytes.load(Relaxed),
            absent: c.absent.load(Relaxed),
            sent: c.sent.load(Relaxed),
            sent_bytes: c.sent_bytes.load(Relaxed),
            failures: c.failures.load(Relaxed),
            skipped: c.skipped.load(Relaxed),
            broken: c.broken.load(Relaxed),
            pending: 0,
            down: self.health().until.as_ref().map(|(_, why)| why.clone()),
            stuck: self.stuck().clone(),
        }
    }

    fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn stuck(&self) -> MutexGuard<'_, Option<String>> {
        self.stuck.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_down(&self) -> bool {
        self.health().until.is_some()
    }

    pub(super) fn failed(&self, why: &str) {
        self.counters.failures.fetch_add(1, Relaxed);
        let mut health = self.health();
        // Requests under way when it failed do not make the pause longer.
        if health.until.as_ref().is_none_or(|(until, _)| *until <= Instant::now()) {
            health.until = Some((Instant::now() + health.pause, why.to_owned()));
            health.pause = (health.pause * 2).min(LONGEST_PAUSE);
        }
        drop(health);
        self.wake.notify_one();
    }

    pub(super) fn answered(&self) {
        *self.health() = Health { until: None, pause: FIRST_PAUSE };
    }

    pub(super) fn path(&self, name: &str) -> ObjectPath {
        name.split('/').fold(self.prefix.clone(), |path, part| path.join(part))
    }

    /// Result of a request, within this time.
    pub(super) async fn within<T>(
        &self,
        time: Duration,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, Failure> {
        use object_store::Error;
        match timeout(time, request).await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(Error::NotFound { .. })) => Err(Failure::Absent),
            Ok(Err(error @ (Error::PermissionDenied { .. } | Error::Unauthenticated { .. }))) => {
                Err(Failure::Refused(error.to_string()))
            }
            Ok(Err(error)) => Err(Failure::Failed(error.to_string())),
            Err(_) => Err(Failure::Failed(format!("no answer within {time:?}"))),
        }
    }

    /// How long an object may take: a MiB a second is the least, for all that travel at once together.
    pub(super) fn longest(&self, bytes: u64) -> Duration {
        self.timeout + Duration::from_secs((bytes >> 20) * MAX_CONCURRENT as u64)
    }

    /// Brings an object to its sink.
    pub(super) async fn fetch(self: Arc<Self>, name: String, mut sink: Box<dyn ObjectSink>) {
        let Ok(_turn) = self.turns.acquire().await else { return };
        if self.is_down() {
            self.counters.skipped.fetch_add(1, Relaxed);
            return;
        }
        let absent = |absent: &Mutex<HashMap<String, Instant>>| {
            let absent = absent.lock().unwrap_or_else(PoisonError::into_inner);
            absent.get(&name).is_some_and(|since| since.elapsed() < ABSENT_FOR)
        };
        if absent(&self.absent) {
            return;
        }
        match self.get(&name, sink.as_mut()).await {
            Ok(bytes) => {
                self.counters.fetched.fetch_add(1, Relaxed);
                self.counters.fetched_bytes.fetch_add(bytes, Relaxed);
                // It may write to the disk.
                let ended = spawn_blocking(move || (sink.end(), sink)).await;
                if let Ok((Err(problem), _taker)) = ended {
                    self.discard(&name, &problem).await;
                }
            }
            Err(Failure::Broken(problem)) => self.discard(&name, &problem).await,
            // Where a key may not be listed, one that is missing is refused.
            Err(Failure::Absent | Failure::Refused(_)) => {
                self.counters.absent.fetch_add(1, Relaxed);
                let mut absent = self.absent.lock().unwrap_or_else(PoisonError::into_inner);
                if absent.len() >= MAX_ABSENT {
                    absent.clear();
                }
                absent.insert(name, Instant::now());
            }
            Err(Failure::Failed(why)) => self.failed(&why),
        }
    }

    /// Removes an object that is broken, so that a whole one can take its place. What a newer program wrote is its own.
    pub(super) async fn discard(&self, name: &str, problem: &Problem) {
        if problem.is_permanent() {
            self.counters.broken.fetch_add(1, Relaxed);
            let _ = timeout(self.timeout, self.objects.delete(&self.path(name))).await;
        }
    }

    /// Hands an object over as it comes, and says its bytes.
    pub(super) async fn get(&self, name: &str, sink: &mut dyn ObjectSink) -> Result<u64, Failure> {
        let found = self.within(self.timeout, self.objects.get(&self.path(name))).await?;
        let size = found.meta.size;
        let longest = self.longest(size.min(sink.most()));
        // The size that it states is not believed: memory is taken as bytes come.
        let (mut bytes, mut pieces) = (0, found.into_stream());
        let all = async {
            while let Some(piece) =
                self.within(self.timeout, async { pieces.next().await.transpose() }).await?
            {
                bytes += piece.len() as u64;
                sink.take(size, &piece).map_err(Failure::Broken)?;
            }
            Ok(bytes)
        };
        let late = |_| Failure::Failed(format!("not all of it came within {longest:?}"));
        timeout(longest, all).await.map_err(late)?
    }

    /// Brings an object there, unless it is there: what a name holds follows from it.
    pub(super) async fn send(&self, name: &str, bytes: Vec<u8>) -> Result<(), Failure> {
        let (path, size) = (self.path(name), bytes.len() as u64);
        match self.within(self.timeout, self.objects.head(&path)).await {
            Ok(_) => return Ok(()),
            Err(Failure::Absent) => {}
            Err(failure) => return Err(failure),
        }
        self.within(self.longest(size), self.objects.put(&path, PutPayload::from(bytes))).await?;
        self.counters.sent.fetch_add(1, Relaxed);
        self.counters.sent_bytes.fetch_add(size, Relaxed);
        self.absent.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
        Ok(())
    }

    /// Waits until the object store may be asked, and asks whether it answers.
    pub(super) async fn recover(&self) {
        loop {
            let until = self.health().until.as_ref().map(|(until, _)| *until);
            let Some(until) = until else { return };
            sleep(until.saturating_duration_since(Instant::now())).await;
            match self.within(self.timeout, self.objects.head(&self.path(PROBE))).await {
                Err(Failure::Failed(why)) => self.failed(&why),
                _ => self.answered(),
            }
        }
    }
}
