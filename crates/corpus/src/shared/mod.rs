//! Documents that machines share through an object store, each with a replica of all of them.
//!
//! A document is an object that is created once; its pin and further chunk keys are objects beside it, and a removal deletes them.
//! No object is ever changed, so that writers need no lock and none overwrites what another wrote. Every read of the request path is
//! a read of the replica. A change is noted in the replica first, in one transaction with the change itself, and the note goes when
//! the object store has confirmed it: what it cannot be told now it is told later.
//!
//! Other machines learn of a change from an object named by its time, which says where to look; what they find there counts, so that
//! neither order nor loss of these objects matters. Once in a while each machine compares all names with its replica.

mod follow;
mod garbage;
mod listing;
mod look;
mod objects;
mod parallel;
mod parts;
mod send;
#[cfg(test)]
mod tests;
mod withdraw;

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use refrain_store::{ChunkKey, Objects};

pub use self::garbage::{Collector, GarbageOptions, GarbageReport};
pub use self::objects::check_shareable;
use self::objects::{Place, is_id, place_of};
use crate::cut::NewDocument;
use crate::document_store::{Applied, DocumentStore, KeysOf, Removal, SharingStats};
use crate::error::{Error, Result};
use crate::local::LocalDocuments;
use crate::tables::StoredDocument;

/// Locks of documents. Two documents may have one lock.
const TURNS: usize = 64;

/// Documents that machines share through an object store.
pub struct SharedDocuments {
    local: LocalDocuments,
    objects: Objects,
    /// Held while this machine changes the objects of a document, or brings the replica in line with them.
    turns: [Mutex<()>; TURNS],
    hasher: RandomState,
    /// Changes that were followed, of those that are listed again. Held while the replica is brought in line.
    followed: Mutex<HashSet<String>>,
    stats: Mutex<SharingStats>,
}

impl SharedDocuments {
    /// Opens the replica in a folder, or an empty one in memory, of the documents in an object store, which is not asked yet. `quota`
    /// bounds the bytes of a namespace's titles and texts that are put here.
    ///
    /// # Errors
    /// If the replica's file cannot be opened, or another program has it open.
    pub fn open(folder: Option<&Path>, quota: u64, objects: Objects) -> Result<SharedDocuments> {
        Ok(SharedDocuments {
            local: LocalDocuments::open_for(folder, quota, true)?,
            objects,
            turns: std::array::from_fn(|_| Mutex::default()),
            hasher: RandomState::new(),
            followed: Mutex::default(),
            stats: Mutex::default(),
        })
    }

    /// The turn of this machine's threads at the objects of a document.
    fn turn(&self, place: &Place) -> MutexGuard<'_, ()> {
        let index = self.hasher.hash_one(place) as usize % TURNS;
        self.turns[index].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stats(&self) -> MutexGuard<'_, SharingStats> {
        self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether an error is that of one document, which does not concern the others.
    fn is_of_one(&self, error: &Error) -> bool {
        let is_cut_off = self.objects.down().is_some() || self.objects.is_closed();
        !is_cut_off && matches!(error, Error::ObjectStore(_) | Error::Sharing(_))
    }

    /// Counts an object that is not used, and says so in the log.
    fn unusable(&self, name: &str, why: &dyn std::fmt::Display) {
        self.stats().broken += 1;
        tracing::warn!(%why, "the object {name} of {} is not used", self.objects.url());
    }
}

impl DocumentStore for SharedDocuments {
    fn local(&self) -> &LocalDocuments {
        &self.local
    }

    fn put(
        &self,
        namespace: &str,
        documents: &[NewDocument],
        segmentation: &str,
    ) -> (Vec<StoredDocument>, Result<()>) {
        let mut checked = Ok(());
        let is_shareable = |new: &&NewDocument| {
            checked = check_shareable(&new.document);
            checked.is_ok()
        };
        let first = documents.iter().take_while(is_shareable).count();
        let (mut stored, outcome) =
            DocumentStore::put(&self.local, namespace, &documents[..first], segmentation);
        let outcome = outcome.and(checked);
        let noted: Vec<_> =
            stored.iter().map(|document| (namespace.to_owned(), document.id.clone())).collect();
        if let Err(error) = self.send(&noted) {
            tracing::warn!(%error, "documents are stored here, and shared later");
        }
        for document in &mut stored {
            // Other machines may have stored the document before, with another time of creation. One that was removed meanwhile is told as it was put.
            if let Ok(now) = self.local.get(namespace, &document.id) {
                *document = now;
            }
        }
        (stored, outcome)
    }

    fn set_pinned(&self, namespace: &str, id: &str, pinned: bool) -> Result<StoredDocument> {
        self.local.set_pinned(namespace, id, pinned)?;
        if let Err(error) = self.send(&[(namespace.to_owned(), id.to_owned())]) {
            tracing::warn!(%error, "a pin counts here, and is shared later");
        }
        self.local.get(namespace, id)
    }

    fn remove(&self, namespace: &str, id: &str, further: &[ChunkKey]) -> Result<Removal> {
        let unpinned = match self.local.remove(namespace, id, further) {
            Ok(removal) => removal.unpinned,
            Err(Error::NotFound(_)) if is_id(id) && self.has_objects(&place_of(namespace, id))? => {
                self.local.begin_removal(namespace, id, further)?;
                Vec::new()
            }
            Err(error) => return Err(error),
        };
        let withdrawn = self.send(&[(namespace.to_owned(), id.to_owned())]);
        // Other machines may have stored chunks under keys that are not known here.
        let keys = self.local.extend_removal(namespace, id, &[])?;
        Ok(Removal { keys, unpinned, withdrawn })
    }

    fn finish_removal(&self, namespace: &str, id: &str, keys: &[ChunkKey]) -> Result<()> {
        self.delete_removals(namespace, id, keys)?;
        self.local.finish_removal(namespace, id, keys)
    }

    fn find(&self, namespace: &str, id: &str) -> Result<bool> {
        if is_id(id) {
            self.look_for(namespace, id)?;
        }
        self.local.contains(namespace, id)
    }

    fn sync(&self, keys_of: Option<&KeysOf<'_>>, applied: &mut Applied<'_>) -> Result<()> {
        self.follow(true, keys_of, applied)
    }

    fn pull(&self, keys_of: Option<&KeysOf<'_>>, applied: &mut Applied<'_>) -> Result<()> {
        self.follow(false, keys_of, applied)
    }

    fn unfinished_removals(&self) -> Result<Vec<(String, String, Vec<ChunkKey>)>> {
        let mut begun = self.local.removals(false)?;
        let mut unfinished = Vec::with_capacity(begun.len());
        for removal in begun.drain(..) {
            // The object store is told of it first, so that no machine brings the document back.
            let note = self.local.note_of(&removal.0, &removal.1)?;
            unfinished.extend((!note.is_some_and(|unsent| unsent.note.removal)).then_some(removal));
        }
        Ok(unfinished)
    }

    fn sharing(&self) -> Option<SharingStats> {
        let unsent = self.local.count_unsent().unwrap_or_default();
        Some(SharingStats { unsent, ..self.stats().clone() })
    }

    fn close(&self) {
        self.objects.close();
    }
}
