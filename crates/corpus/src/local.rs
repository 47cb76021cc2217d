//! The documents as this machine has them, in a redb database.
//!
//! A document's id follows from its title and text. A document belongs to a namespace and is invisible in all others. No
//! operation on one document reads the text of another, and listing reads metadata alone (see [`tables`](super::tables)).

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use redb::backends::InMemoryBackend;
use redb::{
    Builder, Database, DatabaseError, MultimapTableHandle, ReadTransaction, ReadableTable,
    ReadableTableMetadata, TableHandle, WriteTransaction,
};
use refrain_engine::Document;
use refrain_store::{ChunkKey, DOCUMENTS, make_private_folder};

use crate::cut::NewDocument;
use crate::database::{Failure, ReopeningDatabase, Transacted, open_file, open_or_make};
use crate::error::{Error, Result};
use crate::migration;
use crate::notes::{self, Note};
use crate::purge::mark_earlier_file;
use crate::tables::{
    CHUNK_KEYS, CHUNK_USERS, METADATA, REMOVALS, STORED_BYTES, Segmented, StoredDocument, TEXTS, TOKENS,
    UNPURGED, create_tables, document_id, insert, parsed, stored_bytes, token_ids, write_chunks,
};

/// How long an opening waits for another program that has the documents' file open, and the pause between two tries.
const LONGEST_WAIT: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(50);

/// Documents by namespace, in a file that one program at a time has open. Every change is one transaction, the count of bytes included.
pub struct LocalDocuments {
    pub(super) database: ReopeningDatabase,
    /// Most bytes of a namespace's titles and texts.
    quota: u64,
    /// Whether the documents are shared through an object store.
    is_shared: bool,
    /// Whether changes are noted for an object store, the next one if there is none now.
    pub(super) takes_notes: bool,
}

impl LocalDocuments {
    /// Opens the documents of a folder, or an empty store in memory. `quota` bounds the bytes of a namespace's titles and texts.
    ///
    /// # Errors
    /// If the file cannot be opened, or another program has it open for some seconds.
    pub fn open(folder: Option<&Path>, quota: u64) -> Result<LocalDocuments> {
        LocalDocuments::open_for(folder, quota, false)
    }

    /// Opens the documents' file of a folder, to read it at once: a program that has it open is not waited for, and removed documents are
    /// not purged.
    ///
    /// # Errors
    /// If the file cannot be opened, or another program has it open.
    pub fn open_at_once(folder: &Path) -> Result<LocalDocuments> {
        let path = folder.join(DOCUMENTS);
        let file = path.clone();
        LocalDocuments::with(move || open_file(&path), Some(&file), u64::MAX, false)
    }

    /// [`LocalDocuments::open`]; if `is_shared`, for documents whose changes an object store is told.
    pub(crate) fn open_for(folder: Option<&Path>, quota: u64, is_shared: bool) -> Result<LocalDocuments> {
        let Some(folder) = folder else {
            let in_memory = || Builder::new().create_with_backend(InMemoryBackend::new());
            return LocalDocuments::with(in_memory, None, quota, is_shared);
        };
        let path = folder.join(DOCUMENTS);
        if let Err(error) = make_private_folder(folder) {
            return Err(Error::Open { path, reason: error.to_string() });
        }
        let file = path.clone();
        let began = Instant::now();
        let store = loop {
            let path = path.clone();
            match LocalDocuments::with(move || open_or_make(&path), Some(&file), quota, is_shared) {
                // A command has the file for a moment, such as one that ingests.
                Err(Error::InUse { .. }) if began.elapsed() < LONGEST_WAIT => thread::sleep(PAUSE),
                opened => break opened?,
            }
        };
        // What an interrupted removal has left. Where it cannot be purged now, the next removal does it.
        if let Err(error) = store.purge() {
            tracing::warn!(%error, "removed documents cannot be purged from the documents' file");
        }
        Ok(store)
    }

    fn with(
        open: impl Fn() -> Result<Database, DatabaseError> + Send + Sync + 'static,
        file: Option<&Path>,
        quota: u64,
        is_shared: bool,
    ) -> Result<LocalDocuments> {
        let database = ReopeningDatabase::new(file, open)?;
        let create = |transaction: &WriteTransaction| {
            mark_earlier_file(transaction)?;
            create_tables(transaction)?;
            notes::takes_notes(transaction, is_shared)
        };
        // A file that is as it should be is not written to, so that its documents can be read while the disk is full.
        let as_it_is = |transaction: &ReadTransaction| {
            if lacks_tables(transaction)? {
                return Ok(None);
            }
            Ok(Some(notes::was_shared(transaction)?).filter(|was_shared| *was_shared || !is_shared))
        };
        let opened = match database.read(as_it_is) {
            Ok(None) => database.write(create),
            opened => opened.map(Option::unwrap_or_default),
        };
        let takes_notes = opened.map_err(|error| match error {
            Error::Database(error) => {
                let path = file.unwrap_or(Path::new(DOCUMENTS)).to_owned();
                Error::Open { path, reason: error.to_string() }
            }
            error => error,
        })?;
        Ok(LocalDocuments { database, quota, is_shared, takes_notes })
    }

    /// Stores a document of the time `created`, seconds since 1970, whose chunks the tokenizer and chunk size of `segmentation` have cut. One
    /// that is there already keeps its time of creation and its pin, and the chunk keys of both are its own.
    ///
    /// # Errors
    /// If the namespace's quota has no room for a new document, or the transaction fails.
    pub(crate) fn put(
        &self,
        namespace: &str,
        new: &NewDocument,
        segmentation: &str,
        created: u64,
    ) -> Result<StoredDocument> {
        self.database.write(|transaction| {
            let segmented = segmented(new, segmentation);
            let quota = Some(self.quota);
            let stored = insert(transaction, namespace, &new.document, &segmented, quota, created)?;
            if self.takes_notes {
                notes::note(transaction, namespace, &stored.id, Note::PUT)?;
            }
            Ok(StoredDocument { published: self.is_shared.then_some(false), ..stored })
        })
    }

    /// Checks, before documents are prefilled, whether the namespace's quota has room for those of them that it does not have.
    ///
    /// # Errors
    /// If the quota has no room for all of them, or the documents cannot be read.
    pub fn check_room(&self, namespace: &str, documents: &[NewDocument]) -> Result<()> {
        let by_id = documents.iter().map(|new| (document_id(&new.document), stored_bytes(&new.document)));
        let by_id: BTreeMap<String, u64> = by_id.collect();
        self.database.read(|transaction| {
            let metadata = transaction.open_table(METADATA)?;
            let mut new = 0;
            for (id, bytes) in &by_id {
                new += if metadata.get((namespace, id.as_str()))?.is_none() { *bytes } else { 0 };
            }
            let row = transaction.open_table(STORED_BYTES)?.get(namespace)?;
            let (stored, quota) = (row.map_or(0, |row| row.value()), self.quota);
            // Documents that came from other machines may exceed it.
            if new > 0 && stored + new > quota {
                return Err(Error::QuotaExceeded { stored, quota, new }.into());
            }
            Ok(())
        })
    }

    /// Replaces the chunks of a document, which another tokenizer or chunk size had cut. Earlier chunk keys stay, for as
    /// long as the document does, and new ones are noted for the object store.
    pub(crate) fn replace_chunks(
        &self,
        namespace: &str,
        id: &str,
        new: &NewDocument,
        segmentation: &str,
    ) -> Result<StoredDocument> {
        self.database.write(|transaction| {
            let mut metadata = transaction.open_table(METADATA)?;
            let known: Option<StoredDocument> = parsed(metadata.get((namespace, id))?)?;
            let mut known = known.ok_or_else(|| Error::NotFound(id.to_owned()))?;
            let earlier_keys = known.chunk_keys;
            write_chunks(transaction, namespace, &mut known, &segmented(new, segmentation))?;
            metadata.insert((namespace, id), serde_json::to_vec(&known)?.as_slice())?;
            if self.takes_notes && known.chunk_keys > earlier_keys {
                // Chunks that no document names there are deleted as garbage. A removal by another machine holds all the same.
                notes::note(transaction, namespace, id, Note { before: true, ..Note::PUT })?;
            }
            Ok(known)
        })
    }

    /// Whether the namespace has the document.
    pub(crate) fn contains(&self, namespace: &str, id: &str) -> Result<bool> {
        self.database
            .read(|transaction| Ok(transaction.open_table(METADATA)?.get((namespace, id))?.is_some()))
    }

    /// Number of documents of all namespaces.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn count(&self) -> Result<u64> {
        self.database.read(|transaction| Ok(transaction.open_table(METADATA)?.len()?))
    }

    /// Whether a document is in the object store; none where documents are not shared.
    fn published(
        &self,
        transaction: &ReadTransaction,
        namespace: &str,
        id: &str,
    ) -> Transacted<Option<bool>> {
        match self.is_shared {
            true => Ok(Some(!notes::is_unsent(transaction, namespace, id)?)),
            false => Ok(None),
        }
    }

    /// A document's metadata.
    ///
    /// # Errors
    /// If the namespace has no such document.
    pub fn get(&self, namespace: &str, id: &str) -> Result<StoredDocument> {
        self.database.read(|transaction| {
            let found: Option<StoredDocument> =
                parsed(transaction.open_table(METADATA)?.get((namespace, id))?)?;
            let found = found.ok_or_else(|| Error::NotFound(id.to_owned()))?;
            Ok(StoredDocument { published: self.published(transaction, namespace, id)?, ..found })
        })
    }

    /// A document's title and text.
    ///
    /// # Errors
    /// If the namespace has no such document, or the text is not the one that was stored.
    pub fn document(&self, namespace: &str, id: &str) -> Result<Document> {
        self.database.read(|transaction| {
            let found: Option<Document> = parsed(transaction.open_table(TEXTS)?.get((namespace, id))?)?;
            let found = found.ok_or_else(|| Error::NotFound(id.to_owned()))?;
            if document_id(&found) != id {
                return Err(Failure::Damaged(format!("the text of {id} is not the one that was stored")));
            }
            Ok(found)
        })
    }

    /// Token ids of one chunk of a document.
    ///
    /// # Errors
    /// If the namespace has no such document, or the document no such chunk.
    pub fn chunk(&self, namespace: &str, id: &str, index: u32) -> Result<Vec<u32>> {
        self.database.read(|transaction| {
            let found = transaction.open_table(TOKENS)?.get((namespace, id, index))?;
            let tokens = found.map(|row| token_ids(row.value()));
            tokens.ok_or_else(|| Error::NotFound(id.to_owned()).into())
        })
    }

    /// Token ids of all chunks of a document, in order; none of a document that is not there.
    pub fn chunks(&self, namespace: &str, id: &str) -> Result<Vec<Vec<u32>>> {
        self.database.read(|transaction| {
            let table = transaction.open_table(TOKENS)?;
            let rows = table.range((namespace, id, 0)..=(namespace, id, u32::MAX))?;
            rows.map(|row| Ok(token_ids(row?.1.value()))).collect()
        })
    }

    /// Keys of a document's chunks, ascending.
    pub fn chunk_keys(&self, namespace: &str, id: &str) -> Result<Vec<ChunkKey>> {
        self.database.read(|transaction| {
            let keys = transaction.open_multimap_table(CHUNK_KEYS)?.get((namespace, id))?;
            keys.map(|key| Ok(ChunkKey(*key?.value()))).collect()
        })
    }

    /// At most `limit` documents of a namespace, ascending by id, from the first after `after` on; and whether more
    /// follow.
    pub fn list(&self, namespace: &str, after: &str, limit: usize) -> Result<(Vec<StoredDocument>, bool)> {
        self.database.read(|transaction| {
            let table = transaction.open_table(METADATA)?;
            let mut listed = Vec::new();
            for row in table.range((namespace, after)..)? {
                let (key, value) = row?;
                let (of, id) = key.value();
                if of != namespace {
                    break;
                }
                if id == after {
                    continue;
                }
                if listed.len() == limit {
                    return Ok((listed, true));
                }
                let found: StoredDocument = serde_json::from_slice(value.value())?;
                listed.push(StoredDocument { published: self.published(transaction, of, id)?, ..found });
            }
            Ok((listed, false))
        })
    }

    /// Metadata of all documents, with their namespaces.
    pub(crate) fn all(&self) -> Result<Vec<(String, StoredDocument)>> {
        self.database.read(|transaction| {
            let table = transaction.open_table(METADATA)?;
            let row = |row: Result<_, redb::StorageError>| -> Transacted<_> {
                let (key, value): (redb::AccessGuard<'_, (&str, &str)>, redb::AccessGuard<'_, &[u8]>) = row?;
                Ok((key.value().0.to_owned(), serde_json::from_slice(value.value())?))
            };
            table.iter()?.map(row).collect()
        })
    }

    /// Ids of the documents of the namespace that have any of these chunks.
    pub(crate) fn users(&self, namespace: &str, keys: &[ChunkKey]) -> Result<BTreeSet<String>> {
        self.database.read(|transaction| {
            let users = transaction.open_multimap_table(CHUNK_USERS)?;
            let mut ids = BTreeSet::new();
            for key in keys {
                for user in users.get((namespace, &key.0))? {
                    ids.insert(user?.value().to_owned());
                }
            }
            Ok(ids)
        })
    }

    /// Chunks, among these, that a pinned document of the namespace has.
    pub(crate) fn pinned_keys(&self, namespace: &str, keys: &[ChunkKey]) -> Result<BTreeSet<ChunkKey>> {
        self.database.read(|transaction| {
            let metadata = transaction.open_table(METADATA)?;
            let users = transaction.open_multimap_table(CHUNK_USERS)?;
            let mut pinned = BTreeSet::new();
            for key in keys {
                for user in users.get((namespace, &key.0))? {
                    let user: Option<StoredDocument> = parsed(metadata.get((namespace, user?.value()))?)?;
                    if user.is_some_and(|user| user.pinned) {
                        pinned.insert(*key);
                        break;
                    }
                }
            }
            Ok(pinned)
        })
    }

    /// Pins or unpins a document.
    ///
    /// # Errors
    /// If the namespace has no such document.
    pub(crate) fn set_pinned(&self, namespace: &str, id: &str, pinned: bool) -> Result<()> {
        self.database.write(|transaction| {
            let mut metadata = transaction.open_table(METADATA)?;
            let found: Option<StoredDocument> = parsed(metadata.get((namespace, id))?)?;
            let found = found.ok_or_else(|| Error::NotFound(id.to_owned()))?;
            let changed = StoredDocument { pinned, ..found };
            metadata.insert((namespace, id), serde_json::to_vec(&changed)?.as_slice())?;
            if self.takes_notes {
                notes::note(transaction, namespace, id, Note::PIN)?;
            }
            Ok(())
        })
    }
}

/// Whether a file is new, or that of an earlier version.
fn lacks_tables(transaction: &ReadTransaction) -> Transacted<bool> {
    let mut missing = BTreeSet::from([
        REMOVALS.name(),
        UNPURGED.name(),
        METADATA.name(),
        TEXTS.name(),
        TOKENS.name(),
        CHUNK_KEYS.name(),
        CHUNK_USERS.name(),
        STORED_BYTES.name(),
        notes::UNSENT.name(),
        notes::SHARING.name(),
    ]);
    for table in transaction.list_tables()? {
        if table.name() == migration::TABLE.name() {
            return Ok(true);
        }
        missing.remove(table.name());
    }
    transaction.list_multimap_tables()?.for_each(|table| _ = missing.remove(table.name()));
    Ok(!missing.is_empty())
}

/// The chunks of a new document.
fn segmented<'a>(new: &'a NewDocument, segmentation: &'a str) -> Segmented<'a> {
    let chunks = new.chunks.iter().map(Vec::as_slice).collect();
    Segmented { chunks, keys: &new.keys, segmentation }
}

#[cfg(test)]
#[path = "opening_tests.rs"]
mod opening_tests;
#[cfg(test)]
#[path = "local_tests.rs"]
pub(crate) mod tests;
