//! What was learned of single objects: which were absent lately, and which are broken.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use object_store::UpdateVersion;

/// How long an object that was absent is not asked for again.
const ABSENT_FOR: Duration = Duration::from_secs(5);
/// Most absent objects that are remembered, and most broken ones.
const MAX_REMEMBERED: usize = 1 << 16;

/// Objects by name. What is forgotten is learned again by a request.
#[derive(Debug, Default)]
pub(super) struct KnownObjects {
    /// When objects were found absent.
    absent: Mutex<HashMap<String, Instant>>,
    /// Versions of objects that were found broken.
    broken: Mutex<HashMap<String, UpdateVersion>>,
}

impl KnownObjects {
    pub(super) fn is_absent(&self, name: &str) -> bool {
        lock(&self.absent).get(name).is_some_and(|since| since.elapsed() < ABSENT_FOR)
    }

    pub(super) fn found_absent(&self, name: String) {
        remember(&self.absent, name, Instant::now());
    }

    /// The version of the object that was found broken.
    pub(super) fn broken(&self, name: &str) -> Option<UpdateVersion> {
        lock(&self.broken).get(name).cloned()
    }

    pub(super) fn found_broken(&self, name: String, version: UpdateVersion) {
        remember(&self.broken, name, version);
    }

    /// A whole object has this name now.
    pub(super) fn found_whole(&self, name: &str) {
        lock(&self.absent).remove(name);
        lock(&self.broken).remove(name);
    }
}

fn lock<T>(objects: &Mutex<HashMap<String, T>>) -> MutexGuard<'_, HashMap<String, T>> {
    objects.lock().unwrap_or_else(PoisonError::into_inner)
}

fn remember<T>(objects: &Mutex<HashMap<String, T>>, name: String, what: T) {
    let mut objects = lock(objects);
    if objects.len() >= MAX_REMEMBERED {
        objects.clear();
    }
    objects.insert(name, what);
}
