//! The documents that callers have brought: their texts, so that they can be listed, searched and cited.
//!
//! A document's id follows from its title and text. It belongs to a namespace, and no other sees it.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::http::StatusCode;
use redb::backends::InMemoryBackend;
use redb::{Builder, Database, ReadableDatabase, ReadableTable, TableDefinition};
use refrain_engine::Document;
use serde::{Deserialize, Serialize};

use crate::error::{Problem, Result};

/// File of the documents in the server's folder.
const FILE: &str = "documents.redb";
/// `NAMESPACE/ID` to the document as JSON.
const TABLE: TableDefinition<&str, &[u8]> = TableDefinition::new("documents, version 1");

/// A document that is kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Kept {
    pub(crate) id: String,
    pub(crate) document: Document,
    /// Seconds since 1970.
    pub(crate) created: u64,
    pub(crate) pinned: bool,
    /// Tokens of all chunks.
    pub(crate) tokens: usize,
    /// Its chunks' names in the store.
    pub(crate) chunks: Vec<String>,
}

/// Documents by namespace.
#[derive(Debug)]
pub(crate) struct Library {
    database: Database,
    /// Most bytes of a namespace's texts, and how many there are.
    most: u64,
    held: Mutex<HashMap<String, u64>>,
}

/// Why the library cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot open {path}: {why}")]
#[non_exhaustive]
pub struct LibraryError {
    path: String,
    why: String,
}

/// The id of a document.
pub(crate) fn id_of(document: &Document) -> String {
    let mut hasher = blake3::Hasher::new_derive_key("refrain document, version 1");
    hasher.update(&(document.title.len() as u64).to_le_bytes());
    hasher.update(document.title.as_bytes()).update(document.text.as_bytes());
    format!("doc-{}", &hasher.finalize().to_hex()[..24])
}

fn failed(error: impl Into<redb::Error>) -> Problem {
    Problem::internal(&error.into())
}

impl Library {
    /// Opens the library of a folder, or one in memory, and gives every document with its namespace.
    pub(crate) fn open(
        folder: Option<&Path>,
        most: u64,
    ) -> std::result::Result<(Library, Vec<(String, Kept)>), LibraryError> {
        let path = folder.map(|folder| folder.join(FILE));
        let fail = |why: String| LibraryError {
            path: path.as_ref().map_or(FILE.to_owned(), |path| path.display().to_string()),
            why,
        };
        let database = match &path {
            None => Builder::new().create_with_backend(InMemoryBackend::new()),
            Some(path) => {
                if let Some(folder) = path.parent() {
                    std::fs::create_dir_all(folder).map_err(|error| fail(error.to_string()))?;
                }
                Database::create(path)
            }
        };
        let database = database.map_err(|error| match error {
            redb::DatabaseError::DatabaseAlreadyOpen => {
                fail("another server has it open; give this one another --store".to_owned())
            }
            error => fail(error.to_string()),
        })?;
        let library = Library { database, most, held: Mutex::default() };
        library.write(|_| Ok(())).map_err(|problem| fail(problem.message))?;
        let all = library.all().map_err(|problem| fail(problem.message))?;
        for (namespace, kept) in &all {
            *library.held().entry(namespace.clone()).or_default() += bytes(&kept.document);
        }
        Ok((library, all))
    }

    fn write<T>(&self, work: impl FnOnce(&mut redb::Table<'_, &str, &[u8]>) -> Result<T>) -> Result<T> {
        let transaction = self.database.begin_write().map_err(failed)?;
        let done = work(&mut transaction.open_table(TABLE).map_err(failed)?)?;
        transaction.commit().map_err(failed)?;
        Ok(done)
    }

    fn read<T>(
        &self,
        work: impl FnOnce(&redb::ReadOnlyTable<&'static str, &'static [u8]>) -> Result<T>,
    ) -> Result<T> {
        let transaction = self.database.begin_read().map_err(failed)?;
        work(&transaction.open_table(TABLE).map_err(failed)?)
    }

    /// Keeps a document. One that is there keeps its time and its pin.
    pub(crate) fn put(
        &self,
        namespace: &str,
        document: &Document,
        (tokens, chunks): (usize, Vec<String>),
    ) -> Result<Kept> {
        let id = id_of(document);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        self.write(|table| {
            let known = table.get(key(namespace, &id).as_str()).map_err(failed)?;
            let known: Option<Kept> = known.map(|known| parse(known.value())).transpose()?;
            if known.is_none() {
                self.make_room(namespace, document)?;
            }
            let mut kept = Kept {
                id: id.clone(),
                document: document.clone(),
                created: now,
                pinned: false,
                tokens,
                chunks,
            };
            if let Some(known) = known {
                // It may have been brought for another method, or cut otherwise.
                kept.chunks.extend(known.chunks);
                kept.chunks.sort_unstable();
                kept.chunks.dedup();
                (kept.created, kept.pinned) = (known.created, known.pinned);
            }
            let json = serde_json::to_vec(&kept).map_err(|error| Problem::internal(&error))?;
            table.insert(key(namespace, &id).as_str(), json.as_slice()).map_err(failed)?;
            Ok(kept)
        })
    }

    pub(crate) fn get(&self, namespace: &str, id: &str) -> Result<Kept> {
        let found = self.read(|table| {
            let found = table.get(key(namespace, id).as_str()).map_err(failed)?;
            found.map(|found| parse(found.value())).transpose()
        })?;
        found.ok_or_else(|| Problem::not_found("document", id))
    }

    /// Tells the documents of a namespace, ascending by id, from the first after `after` on, until it is enough; whether
    /// these were all.
    pub(crate) fn each(
        &self,
        namespace: &str,
        after: &str,
        mut told: impl FnMut(Kept) -> bool,
    ) -> Result<bool> {
        // `0` follows `/`.
        let (from, to) = (key(namespace, after), format!("{namespace}0"));
        self.read(|table| {
            for entry in table.range(from.as_str()..to.as_str()).map_err(failed)? {
                let kept: Kept = parse(entry.map_err(failed)?.1.value())?;
                if kept.id != after && !told(kept) {
                    return Ok(false);
                }
            }
            Ok(true)
        })
    }

    /// Every document with its namespace.
    fn all(&self) -> Result<Vec<(String, Kept)>> {
        self.read(|table| {
            let entries = table.iter().map_err(failed)?;
            let entry = |entry: std::result::Result<_, redb::StorageError>| {
                let (key, value): (redb::AccessGuard<'_, &str>, redb::AccessGuard<'_, &[u8]>) =
                    entry.map_err(failed)?;
                let namespace = key.value().rsplit_once('/').map_or("", |(namespace, _)| namespace);
                Ok((namespace.to_owned(), parse(value.value())?))
            };
            entries.map(entry).collect()
        })
    }

    pub(crate) fn pin(&self, namespace: &str, id: &str, pinned: bool) -> Result<Kept> {
        self.write(|table| {
            let found = table.get(key(namespace, id).as_str()).map_err(failed)?;
            let found = found.map(|found| parse(found.value())).transpose()?;
            let kept = Kept { pinned, ..found.ok_or_else(|| Problem::not_found("document", id))? };
            let json = serde_json::to_vec(&kept).map_err(|error| Problem::internal(&error))?;
            table.insert(key(namespace, id).as_str(), json.as_slice()).map_err(failed)?;
            Ok(kept)
        })
    }

    /// Removes a document, and says which of its chunks, and of those in `own`, are no other's of this namespace.
    pub(crate) fn remove(&self, namespace: &str, kept: Kept, mut own: Vec<String>) -> Result<Vec<String>> {
        self.write(|table| {
            let there = table.remove(key(namespace, &kept.id).as_str()).map_err(failed)?.is_some();
            there.then_some(()).ok_or_else(|| Problem::not_found("document", &kept.id))
        })?;
        if let Some(held) = self.held().get_mut(namespace) {
            *held = held.saturating_sub(bytes(&kept.document));
        }
        own.extend(kept.chunks);
        self.each(namespace, "", |other| {
            own.retain(|chunk| !other.chunks.contains(chunk));
            !own.is_empty()
        })?;
        Ok(own)
    }

    fn held(&self) -> MutexGuard<'_, HashMap<String, u64>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a new document, if there is room for it.
    fn make_room(&self, namespace: &str, document: &Document) -> Result<()> {
        let mut held = self.held();
        let held = held.entry(namespace.to_owned()).or_default();
        if *held + bytes(document) > self.most {
            let message = format!(
                "the documents kept have {held} bytes, and may have {}: remove some of them first",
                self.most
            );
            return Err(Problem {
                code: Some("library_full"),
                ..Problem::new(StatusCode::INSUFFICIENT_STORAGE, message)
            });
        }
        *held += bytes(document);
        Ok(())
    }
}

fn bytes(document: &Document) -> u64 {
    (document.title.len() + document.text.len()) as u64
}

fn key(namespace: &str, id: &str) -> String {
    format!("{namespace}/{id}")
}

fn parse(json: &[u8]) -> Result<Kept> {
    serde_json::from_slice(json).map_err(|error| Problem::internal(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(title: &str, text: &str) -> Document {
        Document { title: title.to_owned(), text: text.to_owned() }
    }

    fn list(library: &Library, namespace: &str) -> Vec<Kept> {
        let mut all = Vec::new();
        library
            .each(namespace, "", |kept| {
                all.push(kept);
                true
            })
            .unwrap();
        all
    }

    #[test]
    fn documents_are_kept_apart_by_namespace_and_over_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let (library, none) = Library::open(Some(folder.path()), 15).unwrap();
        assert!(none.is_empty());
        let put = |namespace, document: &Document, chunks: &[&str]| {
            let chunks = chunks.iter().map(|chunk| (*chunk).to_owned()).collect();
            library.put(namespace, document, (7, chunks)).unwrap()
        };
        let (one, two) = (document("a", "bc"), document("ab", "c"));
        let (first, second) = (put("x", &one, &["1", "2"]), put("x", &two, &["2", "3"]));
        assert_ne!(first.id, second.id, "a title is no text");
        put("", &one, &["9"]);
        put("xy", &one, &["8"]);
        assert!(library.pin("x", &first.id, true).unwrap().pinned);
        let again = put("x", &one, &["1", "2"]);
        assert_eq!((again.pinned, again.created), (true, first.created));
        assert_eq!(library.get("y", &first.id).unwrap_err().status, 404);
        assert_eq!(list(&library, "x").len(), 2);
        let first_two = list(&library, "x");
        let mut after = Vec::new();
        assert!(!library.each("x", "", |_| false).unwrap());
        assert!(
            library
                .each("x", &first_two[0].id, |kept| {
                    after.push(kept);
                    true
                })
                .unwrap()
        );
        assert_eq!(after, first_two[1..]);
        assert_eq!(library.all().unwrap().len(), 4);
        assert!(Library::open(Some(folder.path()), 15).unwrap_err().to_string().contains("another server"));
        drop(library);
        let (library, all) = Library::open(Some(folder.path()), 6).unwrap();
        assert_eq!(all, library.all().unwrap());
        // Brought for another method, it has the chunks of both.
        library.put("x", &one, (7, vec!["4".to_owned()])).unwrap();
        let full = library.put("x", &document("", "d"), (1, Vec::new())).unwrap_err();
        assert_eq!((full.status.as_u16(), full.code), (507, Some("library_full")));
        let first = library.get("x", &first.id).unwrap();
        let own = library.remove("x", first.clone(), vec!["5".to_owned()]).unwrap();
        assert_eq!((&first.document, own), (&one, ["5", "1", "4"].map(str::to_owned).to_vec()));
        assert_eq!(library.remove("x", first, Vec::new()).unwrap_err().status, 404);
        library.put("x", &document("", "d"), (1, Vec::new())).unwrap();
        assert_eq!((list(&library, "x").len(), list(&library, "").len()), (2, 1));
        assert_eq!(list(&library, "xy")[0].chunks, ["8"]);
    }
}
