//! The tenants' documents: stored, and searched by their chunks.

use std::mem;
use std::path::{self, Path};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use refrain_engine::{Document, Engine};
use refrain_store::{ChunkKey, StoreError};

use crate::cut::{NewDocument, segmentation};
use crate::document_store::{Change, ChangeKind, DocumentStore, Removal, SharingStats};
use crate::error::{Error, Result};
use crate::local::LocalDocuments;
use crate::notes;
use crate::search::{Hit, SearchIndex};
use crate::tables::{METADATA, REMOVALS, StoredDocument};

/// Documents that are indexed in one commit when a corpus is opened.
const BATCH: usize = 256;

/// Bytes of chunks that go on a full disk beside four times those of new documents. The database's pages are of powers of two bytes, and it copies rows
/// that stand beside new ones.
const ROOM: u64 = 16 << 20;

/// The document store and the search index over its replica, which hold the same documents whenever no change is under way.
pub struct Corpus {
    pub(crate) store: Box<dyn DocumentStore>,
    index: SearchIndex,
    /// Held while the index is brought in line with the replica. The replica alone says whether a document is there, so that a
    /// removal between the two halves of an insertion leaves no hits of a document that is gone.
    indexing: Mutex<()>,
    /// Held while chunks are pinned and unpinned as the documents stand.
    pub(crate) pinning: Mutex<()>,
    /// The tokenizer and chunk size that cut the documents.
    segmentation: String,
    is_synced: AtomicBool,
    /// Changes of the replica that could not be applied. No sync tells them again, since the replica has them.
    unapplied: Mutex<Vec<Change>>,
}

impl Corpus {
    /// The documents of a store's replica, all of them indexed.
    ///
    /// # Errors
    /// If a document cannot be read.
    pub fn open(engine: &Engine, documents: Box<dyn DocumentStore>) -> Result<Corpus> {
        let corpus = Corpus::unindexed(engine, documents)?;
        let all = corpus.documents().all()?;
        for batch in all.chunks(BATCH) {
            corpus.index_by(engine, batch)?;
        }
        corpus.pin_anew(engine, &all)?;
        Ok(corpus)
    }

    /// The documents of a store's replica, none of them indexed: a search finds those alone that are put later.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn unindexed(engine: &Engine, documents: Box<dyn DocumentStore>) -> Result<Corpus> {
        let corpus = Corpus::to_put(engine, documents)?;
        corpus.finish_local_removals(engine);
        Ok(corpus)
    }

    /// The documents of a store's replica, none of them indexed, before [interrupted removals](Corpus::finish_local_removals) are finished.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub(crate) fn to_put(engine: &Engine, documents: Box<dyn DocumentStore>) -> Result<Corpus> {
        Corpus::new(documents, segmentation(engine)?)
    }

    /// Deletes what interrupted removals of local documents have left: no sync does it for them.
    pub(crate) fn finish_local_removals(&self, engine: &Engine) {
        if self.sharing().is_none()
            && let Err(error) = self.finish_removals(engine)
        {
            tracing::warn!(%error, "what is left of removed documents is deleted later");
        }
    }

    fn new(store: Box<dyn DocumentStore>, segmentation: String) -> Result<Corpus> {
        let is_synced = AtomicBool::new(store.sharing().is_none());
        let (indexing, pinning, unapplied) = (Mutex::default(), Mutex::default(), Mutex::default());
        let index = SearchIndex::new()?;
        Ok(Corpus { store, index, indexing, pinning, segmentation, is_synced, unapplied })
    }

    /// Indexes documents of the replica, cut and decoded by an engine.
    fn index_by(&self, engine: &Engine, documents: &[(String, StoredDocument)]) -> Result<()> {
        let cut = |namespace: &str, document| {
            NewDocument::cut(&engine.in_namespace(namespace, None), document, false)
        };
        self.index(documents, &cut, &|tokens| engine.tokenizer().decode(tokens, false))
    }

    /// Indexes documents of the replica. Their chunks come from there; `cut` cuts a document again that another tokenizer or chunk size
    /// had cut, or none. `text` decodes a chunk.
    ///
    /// # Errors
    /// If the replica cannot be read or written.
    fn index(
        &self,
        documents: &[(String, StoredDocument)],
        cut: &dyn Fn(&str, Document) -> Result<NewDocument>,
        text: &dyn Fn(&[u32]) -> String,
    ) -> Result<()> {
        let mut recut = Vec::new();
        for (namespace, stored) in documents.iter().filter(|(_, stored)| !self.is_cut(stored)) {
            let document = match self.documents().document(namespace, &stored.id) {
                Err(Error::NotFound(_)) => continue,
                document => document?,
            };
            match cut(namespace, document) {
                Ok(new) => recut.push((namespace.as_str(), stored.id.as_str(), new)),
                // The other documents are of use without it.
                Err(error) => {
                    tracing::error!(%error, "document {} cannot be cut, and is not found", stored.id)
                }
            }
        }
        let _indexing = self.indexing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut entries = Vec::with_capacity(documents.len());
        for (namespace, id, new) in recut {
            match self.documents().replace_chunks(namespace, id, &new, &self.segmentation) {
                // It was removed meanwhile.
                Err(Error::NotFound(_)) => {}
                replaced => {
                    replaced?;
                    entries.push((namespace.to_owned(), id.to_owned(), new.chunk_texts));
                }
            }
        }
        for (namespace, stored) in documents.iter().filter(|(_, stored)| self.is_cut(stored)) {
            if self.documents().contains(namespace, &stored.id)? {
                let chunks = self.documents().chunks(namespace, &stored.id)?;
                let texts = chunks.iter().map(|tokens| text(tokens)).collect();
                entries.push((namespace.clone(), stored.id.clone(), texts));
            }
        }
        self.index.add(entries)
    }

    /// Whether the document's chunks are those of this corpus's tokenizer and chunk size.
    pub(crate) fn is_cut(&self, stored: &StoredDocument) -> bool {
        stored.segmentation == self.segmentation
    }

    /// Takes a document out of the index that is not in the replica any more.
    fn unindex(&self, namespace: &str, id: &str) -> Result<()> {
        let _indexing = self.indexing.lock().unwrap_or_else(PoisonError::into_inner);
        if self.documents().contains(namespace, id)? { Ok(()) } else { self.index.remove(namespace, id) }
    }

    /// Stores and indexes documents in an engine's namespace, in order, up to the first that cannot be stored. Those before it stay. On a full disk the
    /// least recently used chunks that are not pinned go.
    ///
    /// # Errors
    /// If the namespace's quota has no room for a document, or a change fails.
    pub fn put(&self, engine: &Engine, documents: Vec<NewDocument>) -> Result<Vec<StoredDocument>> {
        let namespace = &engine.settings().namespace;
        let mut stored = Vec::with_capacity(documents.len());
        let write = || {
            let (further, outcome) =
                self.store.put(namespace, &documents[stored.len()..], &self.segmentation);
            stored.extend(further);
            outcome
        };
        let bytes: u64 = documents.iter().map(NewDocument::bytes).sum();
        let chunks = engine.store();
        // Chunks in another folder than the documents make no room for these.
        let folder_of = |file: &Path| file.parent().and_then(|folder| path::absolute(folder).ok());
        let is_full = |error: &Error| matches!(error, Error::DiskFull { path, .. } if folder_of(path).as_deref() == chunks.folder());
        let outcome = chunks.write_beside(4 * bytes + ROOM, write, is_full);
        let _indexing = self.indexing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut entries = Vec::with_capacity(stored.len());
        for (document, new) in stored.iter().zip(documents) {
            if self.documents().contains(namespace, &document.id)? {
                entries.push((namespace.to_owned(), document.id.clone(), new.chunk_texts));
            }
        }
        self.index.add(entries)?;
        outcome.map(|()| stored)
    }

    /// A document of the engine's namespace, which is looked for on the other machines if this one lacks it.
    ///
    /// # Errors
    /// If the namespace has no such document, or that cannot be told now.
    pub fn get(&self, engine: &Engine, id: &str) -> Result<StoredDocument> {
        let namespace = &engine.settings().namespace;
        let is_here = match self.documents().get(namespace, id) {
            Ok(stored) if self.is_cut(&stored) => return Ok(stored),
            Err(Error::NotFound(_)) => self.store.find(namespace, id)?,
            found => found.map(|_| true)?,
        };
        if is_here {
            self.apply(engine, vec![Change::new(namespace, id, ChangeKind::Put)])?;
        }
        self.documents().get(namespace, id)
    }

    /// Removes a document of an engine's namespace from answers and searches, and its chunks that no other document of the namespace
    /// has, from memory, disk and the object store. For a document whose removal was incomplete, deletes what is left.
    ///
    /// # Errors
    /// If the namespace has no such document, a change fails, or a place still has bytes of it.
    pub fn remove(&self, engine: &Engine, id: &str) -> Result<()> {
        let namespace = &engine.settings().namespace;
        let looked_for = self.get(engine, id);
        // Other removals may have the writer for long: it is not waited for where nothing is to be removed.
        if self.sharing().is_none() && !self.is_known(engine, namespace, id)? {
            return looked_for.and(Err(Error::NotFound(id.to_owned())));
        }
        let chunks = engine.whole_document(self.documents().chunks(namespace, id)?);
        // A question may have stored chunks for another method, or under other settings, than the document was ingested for.
        let Removal { keys, unpinned, withdrawn } =
            match self.store.remove(namespace, id, &engine.keys_of(&chunks, true)) {
                // The reason is that the document could not be looked for on the other machines, if that failed.
                Err(Error::NotFound(_)) => {
                    return Err(looked_for.err().unwrap_or(Error::NotFound(id.to_owned())));
                }
                removal => removal?,
            };
        self.unindex(namespace, id)?;
        self.pin_here(engine, namespace, id, &unpinned)?;
        let deleted = self.delete_chunks(engine, namespace, &keys).map_err(|error| {
            let is_remote = matches!(error, StoreError::NotDeleted { .. });
            incomplete(if is_remote { OBJECT_STORE } else { "the chunk store's folder" }, &error)
        });
        self.documents().purge().map_err(|error| incomplete("the documents' file", &error))?;
        deleted?;
        let finished = withdrawn.and_then(|()| self.store.finish_removal(namespace, id, &keys));
        finished.map_err(|error| incomplete(OBJECT_STORE, &error))
    }

    /// Whether the replica has the document, or its removal has something left to delete. For a program without the object store that is
    /// nothing once the chunks are deleted here: the removal is only kept for the next program that has it.
    fn is_known(&self, engine: &Engine, namespace: &str, id: &str) -> Result<bool> {
        let fetches = engine.store().fetches();
        self.documents().database.read(|transaction| {
            let is_there = transaction.open_table(METADATA)?.get((namespace, id))?.is_some();
            let is_begun = transaction.open_table(REMOVALS)?.get((namespace, id))?.is_some();
            Ok(is_there || is_begun && (fetches || !notes::is_deleted(transaction, namespace, id)?))
        })
    }

    /// Brings the documents in line with those of the other machines, if they are shared: tells what they have not been told, takes up
    /// what they have changed, and deletes what is left of removed documents. Must not be called by a thread of an asynchronous runtime,
    /// since it waits.
    ///
    /// # Errors
    /// If some of it is left to be done. The next call does it.
    pub fn sync(&self, engine: &Engine) -> Result<()> {
        let keys_of = |namespace: &str, chunks| Ok(keys_of(engine, namespace, chunks));
        let synced = self.store.sync(Some(&keys_of), &mut |changes| self.apply(engine, changes));
        self.is_synced.store(true, Relaxed);
        synced.and(self.apply_the_rest(engine)).and(self.finish_removals(engine))
    }

    /// Takes up what the other machines have changed and deletes what is left of removed documents, as [`sync`](Corpus::sync) does,
    /// and sends no document.
    ///
    /// # Errors
    /// If some of it is left to be done. The next call does it.
    pub fn pull(&self, engine: &Engine) -> Result<()> {
        let keys_of = |namespace: &str, chunks| Ok(keys_of(engine, namespace, chunks));
        let pulled = self.store.pull(Some(&keys_of), &mut |changes| self.apply(engine, changes));
        pulled.and(self.apply_the_rest(engine)).and(self.finish_removals(engine))
    }

    /// Whether the documents were compared with those of the other machines, or that was tried, since the corpus was opened.
    pub fn is_synced(&self) -> bool {
        self.is_synced.load(Relaxed)
    }

    /// The state of sharing; none where documents are not shared.
    pub fn sharing(&self) -> Option<SharingStats> {
        self.store.sharing()
    }

    /// Ends with an error what waits for other machines, now and hereafter.
    pub(crate) fn close(&self) {
        self.store.close();
    }

    /// Indexes what has come into the replica, takes out what has gone, and pins chunks as the other machines do. A change that fails keeps no other
    /// one from being applied, and is applied again by the next call.
    pub(crate) fn apply(&self, engine: &Engine, changes: Vec<Change>) -> Result<()> {
        let (mut put, mut failed, mut outcome) = (Vec::new(), Vec::new(), Ok(()));
        let earlier = mem::take(&mut *self.unapplied());
        for change in earlier.into_iter().chain(changes) {
            let Change { namespace, id, kind, unpinned } = &change;
            let applied = match kind {
                ChangeKind::Put => {
                    put.push(change);
                    continue;
                }
                ChangeKind::Pinned(_) => self.documents().chunk_keys(namespace, id),
                ChangeKind::Removed => self.unindex(namespace, id).map(|()| unpinned.clone()),
            };
            let applied = applied.and_then(|keys| self.pin_here(engine, namespace, id, &keys));
            if applied.is_err() {
                failed.push(change);
                outcome = outcome.and(applied);
            }
        }
        let applied = self.apply_put(engine, &put);
        if applied.is_err() {
            failed.extend(put);
        }
        let mut unapplied = self.unapplied();
        for change in failed {
            if !unapplied.contains(&change) {
                unapplied.push(change);
            }
        }
        outcome.and(applied)
    }

    /// Indexes documents that have come into the replica, in one commit.
    fn apply_put(&self, engine: &Engine, changes: &[Change]) -> Result<()> {
        let mut put = Vec::with_capacity(changes.len());
        for Change { namespace, id, .. } in changes {
            match self.documents().get(namespace, id) {
                Err(Error::NotFound(_)) => {}
                stored => put.push((namespace.clone(), stored?)),
            }
        }
        self.index_by(engine, &put)?;
        for (namespace, stored) in put {
            // They may have been removed here before.
            let chunks = self.documents().chunks(&namespace, &stored.id)?;
            engine.store().admit(|| keys_of(engine, &namespace, chunks));
            if stored.pinned {
                let keys = self.documents().chunk_keys(&namespace, &stored.id)?;
                self.pin_here(engine, &namespace, &stored.id, &keys)?;
            }
        }
        Ok(())
    }

    /// Applies the changes that could not be applied, if there are any.
    fn apply_the_rest(&self, engine: &Engine) -> Result<()> {
        let is_done = self.unapplied().is_empty();
        if is_done { Ok(()) } else { self.apply(engine, Vec::new()) }
    }

    fn unapplied(&self) -> MutexGuard<'_, Vec<Change>> {
        self.unapplied.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Deletes chunks of a removed document from memory, disk and the object store, and has the prefix cache forget the namespace's prompts. Those
    /// that a document has got meanwhile go as well, and are stored again when they are computed next.
    fn delete_chunks(
        &self,
        engine: &Engine,
        namespace: &str,
        keys: &[ChunkKey],
    ) -> refrain_store::Result<()> {
        let deleted = engine.store().delete(keys);
        // A prompt that begins from here on finds its chunks deleted. One that began before is forgotten.
        engine.in_namespace(namespace, None).forget_prefixes();
        let readmitted = self.documents().users(namespace, keys).map(|users| {
            for id in users {
                // It may have been removed again.
                if let Ok(chunks) = self.documents().chunks(namespace, &id) {
                    engine.store().admit(|| keys_of(engine, namespace, chunks));
                }
            }
        });
        if let Err(error) = readmitted {
            tracing::error!(%error, "chunks that a document has got during a removal are not kept until it is put again");
        }
        deleted
    }

    /// Deletes what is left of documents that are out of sight of all machines.
    fn finish_removals(&self, engine: &Engine) -> Result<()> {
        let unfinished = self.store.unfinished_removals()?;
        if unfinished.is_empty() {
            return Ok(());
        }
        // This machine may have brought chunks to the object store since another deleted them there.
        let delete = |(namespace, _, keys): &(String, String, Vec<ChunkKey>)| {
            self.delete_chunks(engine, namespace, keys)
        };
        let deleted: Vec<_> = unfinished.iter().map(delete).collect();
        self.documents().purge()?;
        let mut outcome = Ok(());
        for ((namespace, id, keys), deleted) in unfinished.iter().zip(deleted) {
            let finished = deleted.map_err(Error::from);
            let finished = finished.and_then(|()| self.store.finish_removal(namespace, id, keys));
            outcome = outcome.and(finished);
        }
        outcome
    }

    /// The documents as this machine has them, to read.
    pub fn documents(&self) -> &LocalDocuments {
        self.store.local()
    }

    /// The `limit` chunks of a namespace that match a question best, best first.
    ///
    /// # Errors
    /// If the index fails.
    pub fn search(&self, namespace: &str, question: &str, limit: usize) -> Result<Vec<Hit>> {
        self.index.search(namespace, question, limit)
    }
}

/// Keys under which questions store chunks of a document.
pub(crate) fn keys_of(engine: &Engine, namespace: &str, chunks: Vec<Vec<u32>>) -> Vec<ChunkKey> {
    let engine = engine.in_namespace(namespace, None);
    engine.keys_of(&engine.whole_document(chunks), true)
}

/// Name of a place that may have bytes of a removed document.
const OBJECT_STORE: &str = "the object store";

/// The error where bytes of a removed document are left in `tier`.
fn incomplete(tier: &'static str, reason: &dyn std::fmt::Display) -> Error {
    Error::RemovalIncomplete { tier, reason: reason.to_string() }
}

#[cfg(test)]
#[path = "full_disk_tests.rs"]
mod full_disk_tests;

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeSet;
    use std::path::PathBuf;
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;

    use refrain_engine::Settings;
    use refrain_store::{Scope, Store};

    use super::*;
    use crate::error::Error;
    use crate::library::Library;
    use crate::local::tests::Disk;
    use crate::tables::document_id;

    pub(super) fn new_document(index: usize) -> NewDocument {
        let text = format!("bolt number {index}");
        NewDocument {
            document: Document { title: String::new(), text: text.clone() },
            chunks: vec![vec![index as u32]],
            chunk_texts: vec![text],
            keys: vec![ChunkKey([index as u8; 32])],
        }
    }

    pub(crate) fn corpus(documents: LocalDocuments, segmentation: &str) -> Corpus {
        Corpus::new(Box::new(documents), segmentation.to_owned()).unwrap()
    }

    fn unlist(corpus: &Corpus, id: &str) -> Result<Vec<ChunkKey>> {
        let keys = corpus.store.remove("", id, &[])?.keys;
        corpus.unindex("", id)?;
        Ok(keys)
    }

    fn index_all(
        corpus: &Corpus,
        cut: &dyn Fn(&str, Document) -> Result<NewDocument>,
        text: &dyn Fn(&[u32]) -> String,
    ) {
        corpus.index(&corpus.documents().all().unwrap(), cut, text).unwrap();
    }

    /// A removal that comes between the storing and the indexing of its document leaves no hit behind. The document is the
    /// first of many that are stored before any is indexed, so that there is time for it.
    #[test]
    fn every_hit_of_a_search_is_a_stored_document() {
        let folder = tempfile::tempdir().unwrap();
        let (engine, _) = with_a_chunk(folder.path());
        let corpus = corpus(LocalDocuments::open(None, 1 << 20).unwrap(), "test");
        for round in 0..4 {
            let batch: Vec<NewDocument> = (50 * round..50 * (round + 1)).map(new_document).collect();
            let id = document_id(&batch[0].document);
            std::thread::scope(|scope| {
                scope.spawn(|| corpus.put(&engine, batch).unwrap());
                scope.spawn(|| while unlist(&corpus, &id).is_err() {});
            });
        }
        let stored = corpus.documents().list("", "", 1000).unwrap().0;
        let stored: BTreeSet<String> = stored.into_iter().map(|document| document.id).collect();
        let found = corpus.search("", "bolt", 1000).unwrap();
        let found: BTreeSet<String> = found.into_iter().map(|hit| hit.document).collect();
        assert_eq!(stored.len(), 4 * 49);
        assert_eq!(found, stored);
    }

    /// An engine whose store has the only chunk of a document.
    pub(crate) fn with_a_chunk(folder: &Path) -> (Engine, Document) {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
        let store = Store::open(folder, 1 << 26).unwrap();
        let engine = Engine::open(&path, store, Settings::default(), |_, _| ()).unwrap();
        let document = Document { title: String::new(), text: "A stem bolt is tightened.".to_owned() };
        engine.ingest(std::slice::from_ref(&document), |_| ()).unwrap();
        (engine, document)
    }

    /// The document was put again while the object store was asked to delete its chunks.
    #[test]
    fn a_document_that_is_put_during_its_removal_has_its_chunks_stored_again() {
        let folder = tempfile::tempdir().unwrap();
        let (engine, document) = with_a_chunk(folder.path());
        let documents = LocalDocuments::open(None, 1 << 20).unwrap();
        let corpus = Corpus::unindexed(&engine, Box::new(documents)).unwrap();
        let new = || NewDocument::cut(&engine, document.clone(), false).unwrap();
        let ingest = || engine.ingest(std::slice::from_ref(&document), |_| ()).unwrap();
        let chunks = || engine.store().list(Scope::All).unwrap().chunks.len();
        let keys = new().keys;
        corpus.delete_chunks(&engine, "", &keys).unwrap();
        ingest();
        assert_eq!(chunks(), 0, "no document has the chunk");
        corpus.put(&engine, vec![new()]).unwrap();
        corpus.delete_chunks(&engine, "", &keys).unwrap();
        assert_eq!(chunks(), 0);
        ingest();
        assert_eq!(chunks(), 1);
    }

    /// One document has come from another machine and cannot be cut, since the disk is full; another one was removed there.
    #[test]
    fn a_change_that_cannot_be_applied_holds_up_no_other_and_is_applied_later() {
        let folder = tempfile::tempdir().unwrap();
        let (engine, document) = with_a_chunk(folder.path());
        let disk = Disk::default();
        let corpus = Corpus::unindexed(&engine, Box::new(disk.open(1 << 20))).unwrap();
        let new = NewDocument::cut(&engine, document, false).unwrap();
        let gone = corpus.put(&engine, vec![new_document(7)]).unwrap().remove(0).id;
        let come = corpus.documents().put("", &new, "", 1).unwrap().id;
        let found = |question: &str| !corpus.search("", question, 9).unwrap().is_empty();
        corpus.store.remove("", &gone, &[]).unwrap();
        assert!(found("number") && !found("stem"));
        disk.is_full.store(true, Relaxed);
        let change = |id: &str, kind| Change::new("", id, kind);
        let changes = vec![change(&come, ChangeKind::Put), change(&gone, ChangeKind::Removed)];
        corpus.apply(&engine, changes).unwrap_err();
        assert!(!found("number") && !found("stem"));
        disk.is_full.store(false, Relaxed);
        // The first attempt may find the database as the full disk had left it.
        let synced = corpus.sync(&engine).or_else(|_| corpus.sync(&engine));
        synced.unwrap();
        assert!(found("stem"));
        assert!(corpus.unapplied().is_empty());
    }

    /// A program was ended between the removal of a document and that of its chunks. No other one is asked to remove it.
    #[test]
    fn a_removal_that_was_interrupted_is_finished_when_the_documents_are_opened() {
        let folder = tempfile::tempdir().unwrap();
        let (engine, document) = with_a_chunk(folder.path());
        let open = || Box::new(LocalDocuments::open(Some(folder.path()), 1 << 20).unwrap());
        let corpus = Corpus::unindexed(&engine, open()).unwrap();
        let new = NewDocument::cut(&engine, document.clone(), false).unwrap();
        let id = corpus.put(&engine, vec![new]).unwrap().remove(0).id;
        corpus.store.remove("", &id, &[]).unwrap();
        drop(corpus);
        let chunks = || engine.store().list(Scope::All).unwrap().chunks.len();
        // A document that is kept again has its chunks, which were prefilled before.
        Library::keep(&engine, open(), std::slice::from_ref(&document)).unwrap();
        assert_eq!(chunks(), 1);
        let corpus = Corpus::unindexed(&engine, open()).unwrap();
        assert_eq!(chunks(), 1);
        corpus.store.remove("", &id, &[]).unwrap();
        drop(corpus);
        let corpus = Corpus::unindexed(&engine, open()).unwrap();
        assert_eq!(chunks(), 0);
        assert!(matches!(corpus.remove(&engine, &id), Err(Error::NotFound(_))));
    }

    /// The removal is kept for the next program that has the object store, which a program without it has nothing to do with.
    #[test]
    fn a_removal_that_waits_for_the_object_store_is_not_repeated_without_it() {
        let folder = tempfile::tempdir().unwrap();
        let (engine, document) = with_a_chunk(folder.path());
        let was_shared = LocalDocuments::open_for(None, 1 << 20, true).unwrap();
        let corpus = Corpus::unindexed(&engine, Box::new(was_shared)).unwrap();
        let put = || corpus.put(&engine, vec![NewDocument::cut(&engine, document.clone(), false).unwrap()]);
        for _ in 0..2 {
            let id = put().unwrap().remove(0).id;
            corpus.remove(&engine, &id).unwrap();
            assert_eq!(corpus.documents().removals(false).unwrap().len(), 1, "it is kept");
            assert!(matches!(corpus.remove(&engine, &id), Err(Error::NotFound(_))));
        }
    }

    /// Another removal has the writer for as long as the documents' file is made anew.
    #[test]
    fn a_removal_of_nothing_waits_for_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let (engine, _) = with_a_chunk(folder.path());
        let documents = LocalDocuments::open(None, 1 << 20).unwrap();
        let corpus = Corpus::unindexed(&engine, Box::new(documents)).unwrap();
        let (sender, removed) = channel();
        thread::scope(|scope| {
            let told = corpus.documents().database.write(|_| {
                scope.spawn(|| sender.send(corpus.remove(&engine, "doc-0")).unwrap());
                Ok(removed.recv_timeout(Duration::from_secs(10)))
            });
            let told = told.unwrap().expect("it waits for the writer");
            assert!(matches!(told, Err(Error::NotFound(_))), "{told:?}");
        });
    }

    #[test]
    fn documents_before_one_without_room_are_stored_and_found() {
        let folder = tempfile::tempdir().unwrap();
        let (engine, _) = with_a_chunk(folder.path());
        let corpus = corpus(LocalDocuments::open(None, 30).unwrap(), "test");
        let error = corpus.put(&engine, (0..5).map(new_document).collect()).unwrap_err();
        assert!(matches!(error, Error::QuotaExceeded { quota: 30, .. }), "{error}");
        assert_eq!(corpus.search("", "bolt", 100).unwrap().len(), 2);
        assert_eq!(corpus.documents().list("", "", 10).unwrap().0.len(), 2);
    }

    #[test]
    fn chunks_are_cut_again_only_where_another_segmentation_cut_them() {
        let folder = tempfile::tempdir().unwrap();
        let (engine, _) = with_a_chunk(&folder.path().join("chunks"));
        let open = |segmentation: &str| {
            corpus(LocalDocuments::open(Some(folder.path()), 1 << 20).unwrap(), segmentation)
        };
        let id = document_id(&new_document(7).document);
        open("first").put(&engine, vec![new_document(7)]).unwrap();
        let untouched = |_: &str, _: Document| -> Result<NewDocument> { panic!("it is cut already") };
        let corpus = open("first");
        index_all(&corpus, &untouched, &|tokens| format!("word{}", tokens[0]));
        assert_eq!(corpus.search("", "word7", 9).unwrap()[0].document, id);
        drop(corpus);
        let cut = |_: &str, document: Document| {
            Ok(NewDocument {
                chunks: vec![vec![1], vec![2]],
                chunk_texts: vec!["one".to_owned(), "two".to_owned()],
                document,
                keys: vec![ChunkKey([9; 32])],
            })
        };
        let corpus = open("second");
        index_all(&corpus, &cut, &|_| panic!("its chunks are of another size"));
        assert_eq!(corpus.search("", "two", 9).unwrap()[0].chunk, 1);
        assert_eq!(corpus.documents().chunk("", &id, 1).unwrap(), [2]);
        // The keys of both are removed with the document.
        assert_eq!(unlist(&corpus, &id).unwrap(), [7, 9].map(|byte| ChunkKey([byte; 32])));
        assert!(matches!(corpus.documents().chunk("", &id, 1), Err(Error::NotFound(_))));
    }
}
