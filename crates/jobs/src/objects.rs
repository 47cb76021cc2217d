//! The objects of a job, with patience: a request that the object store does not answer is repeated, so that one that is away for
//! minutes ends no runner.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use refrain::store::{ListedObject, Objects, StoreError};

use crate::patience::{Failed, repeat};
use crate::{Error, Result};

/// How long a request of a runner that is to stop is repeated, at most: its claim dies by itself where it cannot be given back.
const STOP_PATIENCE: Duration = Duration::from_secs(2);

/// Objects that are asked for again and again.
#[derive(Clone, Debug)]
pub(crate) struct JobObjects {
    objects: Objects,
    /// How long a request is repeated.
    patience: Duration,
    /// Set when the runner is to stop.
    stop: Arc<AtomicBool>,
    silence: Arc<Mutex<Silence>>,
}

/// The time in which requests of this program were not answered.
#[derive(Debug, Default)]
struct Silence {
    total: Duration,
    /// The beginning and the end of its last part.
    last: Option<(Instant, Instant)>,
}

impl Silence {
    /// Counts the time from `began` until now, once if several requests waited for it.
    fn add(&mut self, began: Instant) {
        let now = Instant::now();
        let (from, until) = self.last.filter(|(_, until)| began <= *until).unwrap_or((now, now));
        self.total += from.saturating_duration_since(began) + now.saturating_duration_since(until);
        self.last = Some((from.min(began), now));
    }
}

impl JobObjects {
    pub(crate) fn new(objects: Objects, patience: Duration) -> JobObjects {
        JobObjects { objects, patience, stop: Arc::default(), silence: Arc::default() }
    }

    /// A handle on these objects with a patience of its own, which ends soon after `stop` is set.
    pub(crate) fn with_patience(&self, patience: Duration, stop: &Arc<AtomicBool>) -> JobObjects {
        JobObjects { patience, stop: stop.clone(), ..self.clone() }
    }

    /// Whether the object store did not answer the last request.
    pub(crate) fn is_down(&self) -> bool {
        self.objects.down().is_some()
    }

    pub(crate) fn url(&self) -> &str {
        self.objects.url()
    }

    fn repeat<T>(&self, request: impl Fn() -> Result<T, StoreError>) -> Result<T> {
        let (began, mut is_silent) = (Instant::now(), false);
        let answered = repeat(self.patience, || {
            request().map_err(|error| match self.is_down() {
                true => {
                    is_silent = true;
                    match self.stop.load(Relaxed) && began.elapsed() >= STOP_PATIENCE {
                        true => Failed::Lasting(error),
                        false => Failed::Passing(error),
                    }
                }
                // An object store that answers and refuses will do so again.
                false => Failed::Lasting(error),
            })
        });
        if is_silent {
            self.silence.lock().unwrap_or_else(PoisonError::into_inner).add(began);
        }
        Ok(answered?)
    }

    /// For how long in all the object store has not answered this program.
    pub(crate) fn silence(&self) -> Duration {
        self.silence.lock().unwrap_or_else(PoisonError::into_inner).total
    }

    /// The bytes of an object; none if it is not there.
    pub(crate) fn get(&self, name: &str, most: u64) -> Result<Option<Vec<u8>>> {
        match self.repeat(|| self.objects.get(name, most)) {
            Err(Error::Objects(StoreError::ObjectTooLarge { .. })) => {
                Err(Error::broken(name, format!("it has more than {most} bytes")))
            }
            found => found,
        }
    }

    pub(crate) fn exists(&self, name: &str) -> Result<bool> {
        self.repeat(|| self.objects.exist(vec![name.to_owned()])).map(|exists| exists == [true])
    }

    /// Writes an object where there is none, and says whether there was none. An object that is found by a request that was
    /// repeated may be the one that it wrote the first time.
    pub(crate) fn create(&self, name: &str, bytes: impl AsRef<[u8]>) -> Result<bool> {
        self.repeat(|| self.objects.create(name, bytes.as_ref().to_vec())).map(|created| created.is_some())
    }

    /// Writes an object over what is there.
    pub(crate) fn put(&self, name: &str, bytes: impl AsRef<[u8]>) -> Result<()> {
        self.repeat(|| self.objects.put(name, bytes.as_ref().to_vec())).map(drop)
    }

    /// Deletes an object, if it is there.
    pub(crate) fn delete(&self, name: &str) -> Result<()> {
        self.repeat(|| self.objects.delete(name))
    }

    /// The objects in a folder, by their names in it.
    pub(crate) fn list(&self, folder: &str) -> Result<Vec<ListedObject>> {
        let mut found = self.repeat(|| self.objects.list(folder, None))?;
        for object in &mut found {
            if let Some(name) = object.name.rsplit('/').next() {
                object.name = name.to_owned();
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_that_several_requests_met_counts_once() {
        let (mut silence, began) = (Silence::default(), Instant::now());
        std::thread::sleep(Duration::from_millis(20));
        let later = Instant::now();
        std::thread::sleep(Duration::from_millis(20));
        silence.add(later);
        silence.add(began);
        silence.add(later);
        let whole = began.elapsed();
        assert!(silence.total >= Duration::from_millis(40) && silence.total <= whole, "{silence:?}");
        silence.add(Instant::now());
        assert!(silence.total <= began.elapsed());
    }
}
