//! A client of one object store: requests with time limits, and whether the object store answers.
//!
//! An object store that fails or hangs is left alone for a while, longer each time that it fails again.

use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use object_store::path::Path as ObjectPath;
use object_store::{ObjectStore, ObjectStoreExt, UpdateVersion};
use tokio::sync::{Mutex as AsyncMutex, Notify, Semaphore};
use tokio::time::{sleep, timeout};

use super::known_objects::KnownObjects;
use super::link::{Link, MAX_CONCURRENT};
use super::options::RemoteOptions;
use super::stats::{Counters, RemoteStats};
use crate::{Problem, Result};

/// How long a failed object store is left alone at first, and at most.
pub(super) const FIRST_PAUSE: Duration = Duration::from_secs(1);
pub(super) const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// An object that need not be there: the caller learns whether the object store answers.
const PROBE: &str = "refrain-probe";

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
    /// Whether objects are files of a folder.
    pub(super) is_folder: bool,
    /// Whether objects are files of a file system that was found to have no hard links, so that none is created by condition.
    pub(super) lacks_links: AtomicBool,
    pub(super) timeout: Duration,
    health: Mutex<Health>,
    pub(super) stuck: Mutex<Option<String>>,
    pub(super) counters: Counters,
    pub(super) known: KnownObjects,
    pub(super) link: Link,
    pub(super) wake: Notify,
    /// [`MAX_CONCURRENT`] of them.
    pub(super) turns: Semaphore,
    /// Held while a chunk's files are read and uploaded, and while chunks are deleted.
    pub(super) uploading: AsyncMutex<()>,
}

/// Why an object did not come, or go.
pub(super) enum Failure {
    Absent,
    Broken(Problem, UpdateVersion),
    /// A conditional request found another object than it names, or one where it names none.
    Conflict,
    /// The object store has no conditional requests of this kind.
    Unsupported,
    /// The object has more bytes than are taken.
    TooLarge,
    /// The object store answers, and does not take it; or something here is in the way.
    Refused(String),
    /// It does not answer, or not as it should.
    Failed(String),
}

impl Failure {
    pub(super) fn of(error: object_store::Error) -> Failure {
        use object_store::Error;
        match error {
            // An object that is still the broken one counts as absent.
            Error::NotFound { .. } | Error::NotModified { .. } => Failure::Absent,
            Error::AlreadyExists { .. } | Error::Precondition { .. } => Failure::Conflict,
            Error::NotImplemented { .. } => Failure::Unsupported,
            Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => {
                Failure::Refused(error.to_string())
            }
            error => Failure::Failed(error.to_string()),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Absent => f.write_str("there is no such bucket"),
            Failure::Broken(problem, _) => problem.fmt(f),
            Failure::Conflict => f.write_str("another machine writes or deletes the object at the same time"),
            Failure::Unsupported => f.write_str("the object store has no conditional requests"),
            Failure::TooLarge => f.write_str("the object is too large"),
            Failure::Refused(why) | Failure::Failed(why) => f.write_str(why),
        }
    }
}

impl Client {
    /// A client of the object store that the options name. Whether it answers is not asked.
    pub(super) fn new(options: &RemoteOptions) -> Result<Client> {
        let (objects, prefix) = options.connect()?;
        Ok(Client {
            objects,
            prefix,
            is_folder: options.is_folder(),
            lacks_links: AtomicBool::new(false),
            timeout: options.timeout,
            health: Mutex::new(Health { until: None, pause: FIRST_PAUSE }),
            stuck: Mutex::default(),
            counters: Counters::default(),
            known: KnownObjects::default(),
            link: Link::new(),
            wake: Notify::new(),
            turns: Semaphore::new(MAX_CONCURRENT),
            uploading: AsyncMutex::default(),
        })
    }

    pub(super) fn stats(&self) -> RemoteStats {
        RemoteStats {
            down: self.health().until.as_ref().map(|(_, why)| why.clone()),
            stuck: self.stuck().clone(),
            ..self.counters.stats()
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
        match timeout(time, request).await {
            Ok(done) => done.map_err(Failure::of),
            Err(_) => Err(Failure::Failed(format!("no answer within {time:?}"))),
        }
    }

    /// How long an object may take: a MiB a second is the least, for all that travel at once together.
    pub(super) fn longest(&self, bytes: u64) -> Duration {
        self.timeout + Duration::from_secs((bytes >> 20) * MAX_CONCURRENT as u64)
    }

    /// Waits until the object store may be asked, and asks whether it answers.
    pub(super) async fn recover(&self) {
        loop {
            let until = self.health().until.as_ref().map(|(until, _)| *until);
            let Some(until) = until else { return };
            sleep(until.saturating_duration_since(Instant::now())).await;
            match self.probe().await {
                Err(why) => self.failed(&why),
                Ok(()) => self.answered(),
            }
        }
    }

    /// Asks whether the object store answers.
    ///
    /// # Errors
    /// Why it does not.
    pub(super) async fn probe(&self) -> Result<(), String> {
        match self.head(&self.path(PROBE)).await {
            Err(Failure::Failed(why)) => Err(why),
            _ => Ok(()),
        }
    }

    pub(super) async fn head(&self, path: &ObjectPath) -> Result<(), Failure> {
        self.within(self.timeout, self.objects.head(path)).await.map(drop)
    }
}
