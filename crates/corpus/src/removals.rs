//! Removing documents from this machine.
//!
//! A removal is remembered with the keys of the document's chunks until these are deleted everywhere, so that it can be finished after
//! an interruption.

use redb::{ReadableMultimapTable, ReadableTable, WriteTransaction};
use refrain_store::ChunkKey;

use crate::database::Transacted;
use crate::document_store::Removal;
use crate::error::{Error, Result};
use crate::local::LocalDocuments;
use crate::notes::{self, Note};
use crate::purge::{copy_all, is_unpurged, mark_unpurged};
use crate::tables::{
    CHUNK_KEYS, CHUNK_USERS, METADATA, REMOVALS, STORED_BYTES, StoredDocument, TEXTS, parsed, remove_tokens,
    removed_keys,
};

impl LocalDocuments {
    /// Removes a document. Gives those of its chunk keys, and of `further`, that no other document of the namespace has, and
    /// remembers them until the removal is [finished](LocalDocuments::finish_removal). Until then a repeated removal gives them
    /// again, except those that a document has got meanwhile.
    ///
    /// # Errors
    /// If the namespace has no such document.
    pub(crate) fn remove(&self, namespace: &str, id: &str, further: &[ChunkKey]) -> Result<Removal> {
        self.database.write(|transaction| {
            let is_begun = transaction.open_table(REMOVALS)?.get((namespace, id))?.is_some();
            let removed = remove_rows(transaction, namespace, id)?;
            if !is_begun && removed.is_none() {
                return Err(Error::NotFound(id.to_owned()).into());
            }
            if self.takes_notes {
                notes::note(transaction, namespace, id, Note::REMOVAL)?;
            }
            let RemovedRows { keys, unpinned } = removed.unwrap_or_default();
            let keys = enter_removal(transaction, namespace, id, [further, &keys].concat())?;
            Ok(Removal { keys, unpinned, withdrawn: Ok(()) })
        })
    }

    /// Begins the removal of a document that only other machines have.
    #[cfg(feature = "remote")]
    pub(crate) fn begin_removal(&self, namespace: &str, id: &str, further: &[ChunkKey]) -> Result<()> {
        self.database.write(|transaction| {
            notes::note(transaction, namespace, id, Note::REMOVAL)?;
            enter_removal(transaction, namespace, id, further.to_vec()).map(drop)
        })
    }

    /// Removes a document that was removed on another machine, unless what is noted of it here [stands against that](notes::may_go).
    /// Gives the keys of its chunks, none unless it was pinned, if it is removed.
    #[cfg(feature = "remote")]
    pub(crate) fn remove_withdrawn(
        &self,
        namespace: &str,
        id: &str,
        further: &[ChunkKey],
    ) -> Result<Option<Vec<ChunkKey>>> {
        self.database.write(|transaction| {
            if !notes::may_go(notes::noted(transaction, namespace, id)?) {
                return Ok(None);
            }
            notes::forget(transaction, namespace, id)?;
            let RemovedRows { keys, unpinned } = remove_rows(transaction, namespace, id)?.unwrap_or_default();
            enter_removal(transaction, namespace, id, [further, &keys].concat())?;
            Ok(Some(unpinned))
        })
    }

    /// Adds chunk keys to those of a removed document. Gives all that no document of the namespace has.
    pub(crate) fn extend_removal(
        &self,
        namespace: &str,
        id: &str,
        keys: &[ChunkKey],
    ) -> Result<Vec<ChunkKey>> {
        self.database.write(|transaction| enter_removal(transaction, namespace, id, keys.to_vec()))
    }

    /// The removals that are not finished: namespace, id, and the chunk keys that no document of the namespace has. With `here` those are
    /// left out whose chunks are deleted on this machine, and of which the object store has not been told.
    pub(crate) fn removals(&self, here: bool) -> Result<Vec<(String, String, Vec<ChunkKey>)>> {
        let begun: Vec<(String, String)> = self.database.read(|transaction| {
            let mut begun = Vec::new();
            for row in transaction.open_table(REMOVALS)?.iter()? {
                let (key, _) = row?;
                let (namespace, id) = key.value();
                if !here || !notes::is_deleted(transaction, namespace, id)? {
                    begun.push((namespace.to_owned(), id.to_owned()));
                }
            }
            Ok(begun)
        })?;
        let with_keys = |(namespace, id): (String, String)| {
            let keys = self.extend_removal(&namespace, &id, &[])?;
            Ok((namespace, id, keys))
        };
        begun.into_iter().map(with_keys).collect()
    }

    /// [`LocalDocuments::finish_removal`] of a program without the object store. In a folder that was shared, the removal stays for the next
    /// program that has it: chunks of the document may be there.
    pub(crate) fn finish_removal_here(&self, namespace: &str, id: &str, keys: &[ChunkKey]) -> Result<()> {
        let is_untold = || self.database.write(|transaction| notes::note_deleted(transaction, namespace, id));
        if self.takes_notes && is_untold()? { Ok(()) } else { self.finish_removal(namespace, id, keys) }
    }

    /// Forgets the keys of a removed document, whose chunks are deleted everywhere, unless it has been removed again with
    /// others meanwhile.
    pub(crate) fn finish_removal(&self, namespace: &str, id: &str, keys: &[ChunkKey]) -> Result<()> {
        self.database.write(|transaction| {
            let mut removals = transaction.open_table(REMOVALS)?;
            let row = removals.get((namespace, id))?.map(|row| removed_keys(row.value()));
            if row.is_some_and(|row| row.iter().all(|key| keys.contains(key))) {
                removals.remove((namespace, id))?;
            }
            Ok(())
        })
    }

    /// Makes the file anew if it holds bytes of removed documents. Reading goes on meanwhile, and changes wait.
    ///
    /// # Errors
    /// If there is no room for a second file, or it cannot be written.
    pub(crate) fn purge(&self) -> Result<()> {
        self.database.rewrite_if(is_unpurged, copy_all)
    }
}

/// Keys of a removed document's chunks.
#[derive(Default)]
struct RemovedRows {
    keys: Vec<ChunkKey>,
    /// All of them if the document was pinned, else none.
    unpinned: Vec<ChunkKey>,
}

/// Removes the rows of a document; none if there is no such document.
fn remove_rows(transaction: &WriteTransaction, namespace: &str, id: &str) -> Transacted<Option<RemovedRows>> {
    let removed: Option<StoredDocument> = parsed(transaction.open_table(METADATA)?.remove((namespace, id))?)?;
    let Some(removed) = removed else { return Ok(None) };
    mark_unpurged(transaction)?;
    transaction.open_table(TEXTS)?.remove((namespace, id))?;
    remove_tokens(transaction, namespace, id)?;
    let mut bytes = transaction.open_table(STORED_BYTES)?;
    let stored = bytes.get(namespace)?.map_or(0, |row| row.value());
    bytes.insert(namespace, stored.saturating_sub(removed.stored_bytes))?;
    let mut users = transaction.open_multimap_table(CHUNK_USERS)?;
    let mut keys = Vec::new();
    for key in transaction.open_multimap_table(CHUNK_KEYS)?.remove_all((namespace, id))? {
        let key = *key?.value();
        users.remove((namespace, &key), id)?;
        keys.push(ChunkKey(key));
    }
    let unpinned = if removed.pinned { keys.clone() } else { Vec::new() };
    Ok(Some(RemovedRows { keys, unpinned }))
}

/// Remembers chunk keys of a removed document beside those that are remembered. Gives all that no document of the namespace has.
fn enter_removal(
    transaction: &WriteTransaction,
    namespace: &str,
    id: &str,
    mut keys: Vec<ChunkKey>,
) -> Transacted<Vec<ChunkKey>> {
    let mut removals = transaction.open_table(REMOVALS)?;
    let begun = removals.get((namespace, id))?.map(|row| removed_keys(row.value()));
    keys.extend(begun.unwrap_or_default());
    keys.sort_unstable();
    keys.dedup();
    let users = transaction.open_multimap_table(CHUNK_USERS)?;
    let mut unused = Vec::with_capacity(keys.len());
    for key in keys {
        let is_used = users.get((namespace, &key.0))?.next().is_some();
        unused.extend((!is_used).then_some(key));
    }
    removals.insert((namespace, id), bytes_of(&unused).as_slice())?;
    Ok(unused)
}

/// A row of [`REMOVALS`].
fn bytes_of(keys: &[ChunkKey]) -> Vec<u8> {
    keys.iter().flat_map(|key| key.0).collect()
}
