//! The tenants' documents in a redb database.
//!
//! A document's id follows from its title and text. A document belongs to a namespace and is invisible in all others. No
//! operation on one document reads the text of another, and listing reads metadata alone (see [`tables`](super::tables)).

use std::path::{Path, PathBuf};

use redb::backends::InMemoryBackend;
use redb::{Builder, Database, DatabaseError, ReadableMultimapTable, ReadableTable, WriteTransaction};
use refrain_engine::Document;
use refrain_store::ChunkKey;

use crate::database::{ReopeningDatabase, Transacted};
use crate::error::{Error, Result};
use crate::purge::{copy_all, is_unpurged, mark_earlier_file, mark_unpurged};
use crate::tables::{
    CHUNK_KEYS, CHUNK_USERS, METADATA, REMOVALS, STORED_BYTES, Segmented, StoredDocument, TEXTS, TOKENS,
    create_tables, insert, parsed, remove_tokens, removed_keys, token_ids, write_chunks,
};

/// File of the documents in the server's folder.
const FILE: &str = "documents.redb";
/// Documents by namespace. Every change is one transaction, the count of bytes included.
pub struct DocumentStore {
    database: ReopeningDatabase,
    /// The database's file; none in memory.
    file: Option<PathBuf>,
    /// Most bytes of a namespace's titles and texts.
    quota: u64,
}

impl DocumentStore {
    /// Opens the documents of a folder, or an empty store in memory. `quota` bounds the bytes of a namespace's titles and texts.
    ///
    /// # Errors
    /// If the file cannot be opened, or another program has it open.
    pub fn open(folder: Option<&Path>, quota: u64) -> Result<DocumentStore> {
        let Some(folder) = folder else {
            let in_memory = || Builder::new().create_with_backend(InMemoryBackend::new());
            return DocumentStore::with(in_memory, Path::new(FILE), quota);
        };
        let path = folder.join(FILE);
        if let Err(error) = std::fs::create_dir_all(folder) {
            return Err(Error::Open { path, reason: error.to_string() });
        }
        let file = path.clone();
        let store = DocumentStore::with(move || Database::create(&path), &file, quota)?;
        let store = DocumentStore { file: Some(file), ..store };
        // What an interrupted removal has left. Where it cannot be purged now, the next removal does it.
        if let Err(error) = store.purge() {
            tracing::warn!(%error, "removed documents cannot be purged from the documents' file");
        }
        Ok(store)
    }

    fn with(
        open: impl Fn() -> Result<Database, DatabaseError> + Send + Sync + 'static,
        path: &Path,
        quota: u64,
    ) -> Result<DocumentStore> {
        let path = path.to_owned();
        let database = match ReopeningDatabase::new(open) {
            Ok(database) => database,
            Err(DatabaseError::DatabaseAlreadyOpen) => return Err(Error::InUse { path }),
            Err(error) => return Err(Error::Open { path, reason: error.to_string() }),
        };
        let create = |transaction: &WriteTransaction| {
            mark_earlier_file(transaction)?;
            create_tables(transaction)
        };
        database.write(create).map_err(|error| Error::Open { path, reason: error.to_string() })?;
        Ok(DocumentStore { database, file: None, quota })
    }

    /// Stores a document. One that is there already keeps its time of creation and its pin, and the chunk keys of both
    /// are its own.
    ///
    /// # Errors
    /// If the namespace's quota has no room for a new document, or the transaction fails.
    pub(crate) fn put(
        &self,
        namespace: &str,
        document: &Document,
        segmented: &Segmented<'_>,
    ) -> Result<StoredDocument> {
        self.database
            .write(|transaction| insert(transaction, namespace, document, segmented, Some(self.quota)))
    }

    /// Replaces the chunks of a document, which another tokenizer or chunk size had cut. Earlier chunk keys stay, for as
    /// long as the document does.
    pub(crate) fn replace_chunks(
        &self,
        namespace: &str,
        id: &str,
        segmented: &Segmented<'_>,
    ) -> Result<StoredDocument> {
        self.database.write(|transaction| {
            let mut metadata = transaction.open_table(METADATA)?;
            let known: Option<StoredDocument> = parsed(metadata.get((namespace, id))?)?;
            let mut known = known.ok_or_else(|| Error::NotFound(id.to_owned()))?;
            write_chunks(transaction, namespace, &mut known, segmented)?;
            metadata.insert((namespace, id), serde_json::to_vec(&known)?.as_slice())?;
            Ok(known)
        })
    }

    /// A document's metadata.
    ///
    /// # Errors
    /// If the namespace has no such document.
    pub fn get(&self, namespace: &str, id: &str) -> Result<StoredDocument> {
        self.database.read(|transaction| {
            let found = parsed(transaction.open_table(METADATA)?.get((namespace, id))?)?;
            found.ok_or_else(|| Error::NotFound(id.to_owned()).into())
        })
    }

    /// A document's title and text.
    ///
    /// # Errors
    /// If the namespace has no such document.
    pub fn document(&self, namespace: &str, id: &str) -> Result<Document> {
        self.database.read(|transaction| {
            let found = parsed(transaction.open_table(TEXTS)?.get((namespace, id))?)?;
            found.ok_or_else(|| Error::NotFound(id.to_owned()).into())
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
                listed.push(serde_json::from_slice(value.value())?);
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

    /// Keys of a document's chunks that no other pinned document of the namespace has.
    pub fn keys_to_unpin(&self, namespace: &str, id: &str) -> Result<Vec<ChunkKey>> {
        self.database.read(|transaction| {
            let metadata = transaction.open_table(METADATA)?;
            let users = transaction.open_multimap_table(CHUNK_USERS)?;
            let mut keys = Vec::new();
            for key in transaction.open_multimap_table(CHUNK_KEYS)?.get((namespace, id))? {
                let key = *key?.value();
                let mut is_pinned = false;
                for user in users.get((namespace, &key))? {
                    let user = user?;
                    if user.value() != id {
                        let other: Option<StoredDocument> = parsed(metadata.get((namespace, user.value()))?)?;
                        is_pinned |= other.is_some_and(|other| other.pinned);
                    }
                }
                keys.extend((!is_pinned).then_some(ChunkKey(key)));
            }
            Ok(keys)
        })
    }

    /// Pins or unpins a document.
    ///
    /// # Errors
    /// If the namespace has no such document.
    pub fn set_pinned(&self, namespace: &str, id: &str, pinned: bool) -> Result<StoredDocument> {
        self.database.write(|transaction| {
            let mut metadata = transaction.open_table(METADATA)?;
            let found: Option<StoredDocument> = parsed(metadata.get((namespace, id))?)?;
            let found = found.ok_or_else(|| Error::NotFound(id.to_owned()))?;
            let changed = StoredDocument { pinned, ..found };
            metadata.insert((namespace, id), serde_json::to_vec(&changed)?.as_slice())?;
            Ok(changed)
        })
    }

    /// Removes a document. Gives those of its chunk keys, and of `further`, that no other document of the namespace has, and
    /// remembers them until the removal is [finished](DocumentStore::finish_removal). Until then a repeated removal gives them
    /// again, except those that a document has got meanwhile.
    ///
    /// # Errors
    /// If the namespace has no such document.
    pub(crate) fn remove(&self, namespace: &str, id: &str, further: &[ChunkKey]) -> Result<Vec<ChunkKey>> {
        self.database.write(|transaction| {
            let mut removals = transaction.open_table(REMOVALS)?;
            let begun = removals.get((namespace, id))?.map(|row| removed_keys(row.value()));
            let removed = remove_rows(transaction, namespace, id)?;
            if begun.is_none() && removed.is_none() {
                return Err(Error::NotFound(id.to_owned()).into());
            }
            let mut keys =
                [further.to_vec(), begun.unwrap_or_default(), removed.unwrap_or_default()].concat();
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
        })
    }

    /// Forgets the keys of a removed document, whose chunks are deleted everywhere, unless it has been removed again with
    /// others meanwhile.
    pub(crate) fn finish_removal(&self, namespace: &str, id: &str, keys: &[ChunkKey]) -> Result<()> {
        self.database.write(|transaction| {
            let mut removals = transaction.open_table(REMOVALS)?;
            let is_same = removals.get((namespace, id))?.is_some_and(|row| row.value() == bytes_of(keys));
            if is_same {
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
        match &self.file {
            Some(file) => self.database.rewrite_if(file, is_unpurged, copy_all),
            None => Ok(()),
        }
    }
}

/// Removes the rows of a document, and gives its chunk keys; none if there is no such document.
fn remove_rows(
    transaction: &WriteTransaction,
    namespace: &str,
    id: &str,
) -> Transacted<Option<Vec<ChunkKey>>> {
    let removed: Option<StoredDocument> = parsed(transaction.open_table(METADATA)?.remove((namespace, id))?)?;
    let Some(removed) = removed else { return Ok(None) };
    mark_unpurged(transaction)?;
    transaction.open_table(TEXTS)?.remove((namespace, id))?;
    remove_tokens(transaction, namespace, &removed)?;
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
    Ok(Some(keys))
}

/// A row of [`REMOVALS`].
fn bytes_of(keys: &[ChunkKey]) -> Vec<u8> {
    keys.iter().flat_map(|key| key.0).collect()
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
