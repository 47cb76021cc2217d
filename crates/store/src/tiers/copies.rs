//! Copies of chunks that others keep.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::key::ChunkKey;

/// Copies of chunks outside of the store, such as those in a GPU's memory. They are verified as they are read, and are to go with the chunk.
pub trait ChunkCopies: Debug + Send + Sync {
    /// Drops what is copied of a chunk.
    fn forget(&self, key: &ChunkKey);

    /// Drops all.
    fn forget_all(&self);
}

/// Those who keep copies and are still there.
#[derive(Debug, Default)]
pub(crate) struct Keepers(Mutex<Vec<Weak<dyn ChunkCopies>>>);

impl Keepers {
    fn lock(&self) -> MutexGuard<'_, Vec<Weak<dyn ChunkCopies>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, copies: Weak<dyn ChunkCopies>) {
        let mut keepers = self.lock();
        keepers.retain(|keeper| keeper.strong_count() > 0);
        keepers.push(copies);
    }

    pub(crate) fn each(&self, tell: impl Fn(&dyn ChunkCopies)) {
        let keepers: Vec<Arc<dyn ChunkCopies>> = self.lock().iter().filter_map(Weak::upgrade).collect();
        keepers.iter().for_each(|keeper| tell(&**keeper));
    }
}
