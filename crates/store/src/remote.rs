//! Chunks that several machines share, in any object store.
//!
//! Reading: what neither memory nor the folder has is fetched, several objects at once, verified like any file, a layer at a
//! time, and put into the folder; layers are used while later ones still travel. Writing: what is put into the folder is noted in the index as not yet there, in the same transaction, and a task in
//! the background brings it there. The notes are the queue, so nothing is lost with a process and no queue grows in memory.
//!
//! An object store that fails or hangs is left alone after a time, longer each time it fails again, and asked again by the
//! background task alone: a request waits for it at most once.

mod sending;

use std::collections::HashMap;
use std::ffi::OsString;
use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use object_store::path::Path as ObjectPath;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload, parse_url_opts};
use serde::Serialize;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Notify, Semaphore};
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};

use crate::disk::Disk;
use crate::{Problem, Result, StoreError};

/// Objects that are fetched at once.
const AT_ONCE: usize = 8;
/// How long a failed object store is left alone at first, and at most.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// How long an object that was not there is not asked for again.
const ABSENT: Duration = Duration::from_secs(5);
/// Most absent objects that are remembered.
const ABSENTS: usize = 1 << 16;
/// The client's own limit to a request.
const LONGEST_REQUEST: &str = "1 hour";
/// An object that need not be there: whoever asks for it learns whether the object store answers.
const PROBE: &str = "refrain-probe";

/// Where chunks are shared.
#[derive(Clone)]
#[non_exhaustive]
pub struct RemoteOptions {
    /// `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix` or `file:///folder`.
    pub url: String,
    /// What the object store needs besides, by the names it has in the environment: `AWS_ENDPOINT`, `AWS_ACCESS_KEY_ID`, ….
    pub options: Vec<(String, String)>,
    /// How long it may be silent before it counts as failed.
    pub timeout: Duration,
}

impl RemoteOptions {
    /// With what the environment says about object stores.
    pub fn new(url: impl Into<String>) -> RemoteOptions {
        let ours = |name: &str| ["AWS_", "AZURE_", "GOOGLE_"].iter().any(|prefix| name.starts_with(prefix));
        let text =
            |(name, value): (OsString, OsString)| Some((name.into_string().ok()?, value.into_string().ok()?));
        let options = std::env::vars_os().filter_map(text).filter(|(name, _)| ours(name)).collect();
        RemoteOptions { url: url.into(), options, timeout: Duration::from_secs(2) }
    }
}

/// Secrets are not shown.
impl fmt::Debug for RemoteOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteOptions").field("url", &self.url).finish_non_exhaustive()
    }
}

/// What an object store has done since the store was opened.
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
pub(crate) struct Remote {
    /// Taken when it is dropped.
    runtime: Option<Runtime>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    objects: Arc<dyn ObjectStore>,
    prefix: ObjectPath,
    timeout: Duration,
    health: Mutex<Health>,
    stuck: Mutex<Option<String>>,
    counters: Counters,
    /// When objects were found absent.
    absent: Mutex<HashMap<String, Instant>>,
    wake: Notify,
    /// [`AT_ONCE`] of them.
    turns: Semaphore,
}

/// What an object's bytes are for. When it is dropped nothing comes any more.
pub(crate) trait Taker: Send {
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
enum Failure {
    Absent,
    Broken(Problem),
    /// The object store answers, and does not take it; or something here is in the way.
    Refused(String),
    /// It does not answer, or not as it should.
    Failed(String),
}

impl Remote {
    /// Begins to bring what `disk` notes there.
    pub(crate) fn open(options: &RemoteOptions, disk: &Arc<Disk>) -> Result<Remote> {
        let failed = |why: String| StoreError::Remote { url: options.url.clone(), why };
        let url = url::Url::parse(&options.url).map_err(|error| failed(error.to_string()))?;
        // How long a request may take follows from its size: the client's own limit is only the last.
        let longest = [("timeout", LONGEST_REQUEST.to_owned())];
        let given = options.options.iter().map(|(name, value)| (name.as_str(), value.clone())).chain(longest);
        // Somebody else may have chosen already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let (objects, prefix) = parse_url_opts(&url, given).map_err(|error| failed(error.to_string()))?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("remote")
            .enable_all()
            .build()
            .map_err(|error| failed(error.to_string()))?;
        let shared = Arc::new(Shared {
            objects: objects.into(),
            prefix,
            timeout: options.timeout,
            health: Mutex::new(Health { until: None, pause: FIRST_PAUSE }),
            stuck: Mutex::default(),
            counters: Counters::default(),
            absent: Mutex::default(),
            wake: Notify::new(),
            turns: Semaphore::new(AT_ONCE),
        });
        runtime.spawn(sending::send_all(shared.clone(), Arc::downgrade(disk)));
        Ok(Remote { runtime: Some(runtime), shared })
    }

    /// There is something new to be brought there.
    pub(crate) fn wake(&self) {
        self.shared.wake.notify_one();
    }

    /// Has an object brought to `taker`, which is dropped when nothing comes any more.
    pub(crate) fn fetch(&self, name: String, taker: Box<dyn Taker>) {
        if let Some(runtime) = &self.runtime {
            runtime.spawn(self.shared.clone().fetch(name, taker));
        }
    }

    pub(crate) fn stats(&self) -> RemoteStats {
        let c = &self.shared.counters;
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
            down: self.shared.health().until.as_ref().map(|(_, why)| why.clone()),
            stuck: self.shared.stuck().clone(),
        }
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // What is under way is noted in the index, and done by whoever opens the store next.
            runtime.shutdown_background();
        }
    }
}

impl Shared {
    fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stuck(&self) -> MutexGuard<'_, Option<String>> {
        self.stuck.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_down(&self) -> bool {
        self.health().until.is_some()
    }

    fn failed(&self, why: &str) {
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

    fn answered(&self) {
        *self.health() = Health { until: None, pause: FIRST_PAUSE };
    }

    fn path(&self, name: &str) -> ObjectPath {
        name.split('/').fold(self.prefix.clone(), |path, part| path.join(part))
    }

    /// What comes of a request, within this time.
    async fn within<T>(
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
    fn longest(&self, bytes: u64) -> Duration {
        self.timeout + Duration::from_secs((bytes >> 20) * AT_ONCE as u64)
    }

    /// Brings an object to its taker.
    async fn fetch(self: Arc<Self>, name: String, mut taker: Box<dyn Taker>) {
        let Ok(_turn) = self.turns.acquire().await else { return };
        if self.is_down() {
            self.counters.skipped.fetch_add(1, Relaxed);
            return;
        }
        let absent = |absent: &Mutex<HashMap<String, Instant>>| {
            let absent = absent.lock().unwrap_or_else(PoisonError::into_inner);
            absent.get(&name).is_some_and(|since| since.elapsed() < ABSENT)
        };
        if absent(&self.absent) {
            return;
        }
        match self.get(&name, taker.as_mut()).await {
            Ok(bytes) => {
                self.counters.fetched.fetch_add(1, Relaxed);
                self.counters.fetched_bytes.fetch_add(bytes, Relaxed);
                // It may write to the disk.
                let ended = spawn_blocking(move || (taker.end(), taker)).await;
                if let Ok((Err(problem), _taker)) = ended {
                    self.discard(&name, &problem).await;
                }
            }
            Err(Failure::Broken(problem)) => self.discard(&name, &problem).await,
            // Where a key may not be listed, one that is missing is refused.
            Err(Failure::Absent | Failure::Refused(_)) => {
                self.counters.absent.fetch_add(1, Relaxed);
                let mut absent = self.absent.lock().unwrap_or_else(PoisonError::into_inner);
                if absent.len() >= ABSENTS {
                    absent.clear();
                }
                absent.insert(name, Instant::now());
            }
            Err(Failure::Failed(why)) => self.failed(&why),
        }
    }

    /// Removes an object that is broken, so that a whole one can take its place. What a newer program wrote is its own.
    async fn discard(&self, name: &str, problem: &Problem) {
        if problem.is_permanent() {
            self.counters.broken.fetch_add(1, Relaxed);
            let _ = timeout(self.timeout, self.objects.delete(&self.path(name))).await;
        }
    }

    /// Hands an object over as it comes, and says its bytes.
    async fn get(&self, name: &str, taker: &mut dyn Taker) -> Result<u64, Failure> {
        let found = self.within(self.timeout, self.objects.get(&self.path(name))).await?;
        let size = found.meta.size;
        let longest = self.longest(size.min(taker.most()));
        // What it says about its size is not believed: memory is taken as bytes come.
        let (mut bytes, mut pieces) = (0, found.into_stream());
        let all = async {
            while let Some(piece) =
                self.within(self.timeout, async { pieces.next().await.transpose() }).await?
            {
                bytes += piece.len() as u64;
                taker.take(size, &piece).map_err(Failure::Broken)?;
            }
            Ok(bytes)
        };
        let late = |_| Failure::Failed(format!("not all of it came within {longest:?}"));
        timeout(longest, all).await.map_err(late)?
    }

    /// Brings an object there, unless it is there: what a name holds follows from it.
    async fn send(&self, name: &str, bytes: Vec<u8>) -> Result<(), Failure> {
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
    async fn recover(&self) {
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
