//! The interface of document stores, and the local one as an implementation of it.

use std::time::SystemTime;

use refrain_store::ChunkKey;

use crate::cut::NewDocument;
use crate::error::Result;
use crate::local::LocalDocuments;
use crate::notes::now;
use crate::tables::StoredDocument;

/// Documents by namespace, on this machine alone or on several that share them. A document's id follows from its title and text.
///
/// Each machine has a replica of all documents, and every read is a read of that replica. What other machines change comes there by
/// [`sync`](DocumentStore::sync), and a document that is asked for before it has come by [`find`](DocumentStore::find).
pub trait DocumentStore: Send + Sync {
    /// The documents as this machine has them.
    fn local(&self) -> &LocalDocuments;

    /// Stores documents in order, up to the first that cannot be stored, whose error comes beside those before it. One that is there
    /// already keeps its time of creation and its pin, and the chunk keys of both are its own. `segmentation` names the tokenizer and
    /// chunk size that cut them.
    ///
    /// A document that cannot be shared now is stored here and shared later: [`StoredDocument::published`] tells it.
    fn put(
        &self,
        namespace: &str,
        documents: &[NewDocument],
        segmentation: &str,
    ) -> (Vec<StoredDocument>, Result<()>);

    /// Pins or unpins a document.
    ///
    /// # Errors
    /// If the namespace has no such document.
    fn set_pinned(&self, namespace: &str, id: &str, pinned: bool) -> Result<StoredDocument>;

    /// Removes a document, and remembers which chunks remain to be deleted, those of the `further` keys included, until the removal is
    /// [finished](DocumentStore::finish_removal). Repeating an unfinished removal is safe, on any machine.
    ///
    /// # Errors
    /// If the namespace has no such document, and none whose removal is unfinished.
    fn remove(&self, namespace: &str, id: &str, further: &[ChunkKey]) -> Result<Removal>;

    /// Forgets a removal after all chunks of `keys` are deleted, unless the document has been removed again with others meanwhile.
    ///
    /// # Errors
    /// If it cannot be forgotten everywhere. Finishing it again is safe.
    fn finish_removal(&self, namespace: &str, id: &str, keys: &[ChunkKey]) -> Result<()>;

    /// Looks elsewhere for a document that the replica lacks, and says whether the replica has it now. It is not cut.
    ///
    /// # Errors
    /// If that cannot be told now.
    fn find(&self, namespace: &str, id: &str) -> Result<bool> {
        self.local().contains(namespace, id)
    }

    /// Tells the other machines what they have not been told, and brings what they have changed into the replica. `applied` gets the
    /// changes as they come, and `keys_of` gives further chunk keys of documents that are removed. Without `keys_of` a document that
    /// other machines have removed stays in the replica, and is told again the next time.
    ///
    /// # Errors
    /// If some of it is left to be done. The next call does it.
    fn sync(&self, _keys_of: Option<&KeysOf<'_>>, _applied: &mut Applied<'_>) -> Result<()> {
        Ok(())
    }

    /// Brings what other machines have changed into the replica as [`sync`](DocumentStore::sync) does, and tells them nothing.
    ///
    /// # Errors
    /// If some of it is left to be done. The next call does it.
    fn pull(&self, _keys_of: Option<&KeysOf<'_>>, _applied: &mut Applied<'_>) -> Result<()> {
        Ok(())
    }

    /// Removals that [`sync`](DocumentStore::sync) has found, or whose end was interrupted: namespaces, ids, and keys of the chunks that
    /// are to be deleted before the removal is finished.
    ///
    /// # Errors
    /// If they cannot be read.
    fn unfinished_removals(&self) -> Result<Vec<(String, String, Vec<ChunkKey>)>> {
        self.local().removals(false)
    }

    /// The state of sharing; none where documents are not shared.
    fn sharing(&self) -> Option<SharingStats> {
        None
    }

    /// Ends with an error what waits for other machines, now and hereafter.
    fn close(&self) {}
}

/// Keys under which questions may have stored chunks of a document, by its namespace and the token ids of its chunks.
pub type KeysOf<'a> = dyn Fn(&str, Vec<Vec<u32>>) -> Result<Vec<ChunkKey>> + Sync + 'a;

/// Takes changes of the replica.
pub type Applied<'a> = dyn FnMut(Vec<Change>) -> Result<()> + 'a;

/// A change of a replica that another machine has made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Namespace of the document.
    pub namespace: String,
    /// Its id.
    pub id: String,
    /// The change.
    pub kind: ChangeKind,
    /// Keys of the document's chunks, where one is removed that was pinned: no other pinned document may have them.
    pub unpinned: Vec<ChunkKey>,
}

impl Change {
    /// A change that unpins no chunk.
    pub(crate) fn new(namespace: impl Into<String>, id: impl Into<String>, kind: ChangeKind) -> Change {
        Change { namespace: namespace.into(), id: id.into(), kind, unpinned: Vec::new() }
    }
}

/// The kind of a [`Change`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ChangeKind {
    /// The document is there. It is not cut.
    Put,
    /// The document is pinned, or is not any more.
    Pinned(bool),
    /// The document is removed.
    Removed,
}

/// A document's removal that has begun.
#[derive(Debug)]
pub struct Removal {
    /// Keys of the document's chunks that no other document of the namespace has.
    pub keys: Vec<ChunkKey>,
    /// Keys of the document's chunks, if it was pinned: no other pinned document may have them.
    pub unpinned: Vec<ChunkKey>,
    /// Whether the document is out of sight of the other machines as well.
    pub withdrawn: Result<()>,
}

/// The state of documents that machines share.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SharingStats {
    /// Documents with changes that the object store has not been told.
    pub unsent: u64,
    /// Times that the replica was brought in line, wholly or in part, since the store was opened.
    pub syncs: u64,
    /// Syncs that left something to be done.
    pub failures: u64,
    /// Objects that are no documents, or not those of their names, each time that one was met.
    pub broken: u64,
    /// When the replica was last in line with the object store.
    pub last_sync: Option<SystemTime>,
    /// Why the last time left something to be done, if it did.
    pub trouble: Option<String>,
}

impl DocumentStore for LocalDocuments {
    fn local(&self) -> &LocalDocuments {
        self
    }

    fn put(
        &self,
        namespace: &str,
        documents: &[NewDocument],
        segmentation: &str,
    ) -> (Vec<StoredDocument>, Result<()>) {
        let mut stored = Vec::with_capacity(documents.len());
        // Documents that come together have one time, whatever the transactions take.
        let created = now().as_secs();
        for new in documents {
            match LocalDocuments::put(self, namespace, new, segmentation, created) {
                Ok(document) => stored.push(document),
                Err(error) => return (stored, Err(error)),
            }
        }
        (stored, Ok(()))
    }

    fn set_pinned(&self, namespace: &str, id: &str, pinned: bool) -> Result<StoredDocument> {
        LocalDocuments::set_pinned(self, namespace, id, pinned)?;
        self.get(namespace, id)
    }

    fn remove(&self, namespace: &str, id: &str, further: &[ChunkKey]) -> Result<Removal> {
        LocalDocuments::remove(self, namespace, id, further)
    }

    fn finish_removal(&self, namespace: &str, id: &str, keys: &[ChunkKey]) -> Result<()> {
        self.finish_removal_here(namespace, id, keys)
    }

    fn unfinished_removals(&self) -> Result<Vec<(String, String, Vec<ChunkKey>)>> {
        self.removals(true)
    }
}
