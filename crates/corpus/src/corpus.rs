//! The tenants' documents: stored, and searched by their chunks.

use std::sync::{Mutex, PoisonError};

use refrain_engine::{Document, Engine};
use refrain_store::{ChunkKey, StoreError};

use crate::cut::{NewDocument, segmentation};
use crate::error::{Error, Result};
use crate::search::{Hit, SearchIndex};
use crate::store::DocumentStore;
use crate::tables::{Segmented, StoredDocument};

/// Documents that are indexed in one commit when a corpus is opened.
const BATCH: usize = 256;

/// The document store and the search index over it, which hold the same documents whenever no change is under way.
pub struct Corpus {
    store: DocumentStore,
    index: SearchIndex,
    /// Held while store and index change together: a removal between the two halves of an insertion would leave hits of a
    /// document that is gone.
    changing: Mutex<()>,
    /// The tokenizer and chunk size that cut the documents.
    segmentation: String,
}

impl Corpus {
    /// The stored documents, all of them indexed.
    ///
    /// # Errors
    /// If a document cannot be read, or cut again.
    pub fn open(engine: &Engine, documents: DocumentStore) -> Result<Corpus> {
        let corpus = Corpus::unindexed(engine, documents)?;
        let cut = |namespace: &str, document: Document| {
            let engine = engine.in_namespace(namespace, None);
            NewDocument::cut(&engine, document, false)
        };
        corpus.index_all(cut, |tokens| engine.tokenizer().decode(tokens, false))?;
        Ok(corpus)
    }

    /// The stored documents, none of them indexed: a search finds those alone that are put later.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn unindexed(engine: &Engine, documents: DocumentStore) -> Result<Corpus> {
        Corpus::new(documents, segmentation(engine)?)
    }

    fn new(store: DocumentStore, segmentation: String) -> Result<Corpus> {
        Ok(Corpus { store, index: SearchIndex::new()?, changing: Mutex::default(), segmentation })
    }

    /// Indexes every stored document. Chunks come from the store; `cut` cuts a document again that another tokenizer or
    /// chunk size had cut. `text` decodes a chunk.
    ///
    /// # Errors
    /// If the store cannot be read or written, or `cut` fails.
    fn index_all(
        &self,
        cut: impl Fn(&str, Document) -> Result<NewDocument>,
        text: impl Fn(&[u32]) -> String,
    ) -> Result<()> {
        for batch in self.store.all()?.chunks(BATCH) {
            let mut entries = Vec::with_capacity(batch.len());
            for (namespace, stored) in batch {
                let texts = if stored.segmentation == self.segmentation {
                    let chunks = self.store.chunks(namespace, &stored.id)?;
                    chunks.iter().map(|tokens| text(tokens)).collect()
                } else {
                    let new = cut(namespace, self.store.document(namespace, &stored.id)?)?;
                    self.store.replace_chunks(namespace, &stored.id, &self.segmented(&new))?;
                    new.chunk_texts
                };
                entries.push((namespace.clone(), stored.id.clone(), texts));
            }
            self.index.add(entries)?;
        }
        Ok(())
    }

    fn segmented<'a>(&'a self, new: &'a NewDocument) -> Segmented<'a> {
        Segmented {
            chunks: new.chunks.iter().map(Vec::as_slice).collect(),
            keys: &new.keys,
            segmentation: &self.segmentation,
        }
    }

    /// Stores and indexes documents, in order, up to the first that cannot be stored. Those before it stay.
    ///
    /// # Errors
    /// If the namespace's quota has no room for a document, or a change fails.
    pub fn put(&self, namespace: &str, documents: Vec<NewDocument>) -> Result<Vec<StoredDocument>> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut stored, mut entries) = (Vec::new(), Vec::new());
        let mut outcome = Ok(());
        for new in documents {
            match self.store.put(namespace, &new.document, &self.segmented(&new)) {
                Ok(document) => {
                    entries.push((namespace.to_owned(), document.id.clone(), new.chunk_texts));
                    stored.push(document);
                }
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
        }
        self.index.add(entries)?;
        outcome.map(|()| stored)
    }

    /// Removes a document of an engine's namespace from answers and searches, and its chunks that no other document of the namespace
    /// has, from memory, disk and the object store. For a document whose removal was incomplete, deletes what is left.
    ///
    /// # Errors
    /// If the namespace has no such document, a change fails, or a place still has bytes of it.
    pub fn remove(&self, engine: &Engine, id: &str) -> Result<()> {
        let namespace = &engine.settings().namespace;
        let chunks = engine.whole_document(self.store.chunks(namespace, id)?);
        // A question may have stored chunks for another method, or under other settings, than the document was ingested for.
        let keys = self.unlist(namespace, id, &engine.keys_of(&chunks, true))?;
        engine.forget_prefixes();
        let deleted = engine.store().delete(&keys).map_err(|error| {
            let is_remote = matches!(error, StoreError::NotDeleted { .. });
            incomplete(if is_remote { "the object store" } else { "the chunk store's folder" }, &error)
        });
        self.store.purge().map_err(|error| incomplete("the documents' file", &error))?;
        deleted?;
        self.store.finish_removal(namespace, id, &keys)
    }

    /// Removes a document from store and index. Gives those of its chunk keys, and of `further`, that no other document of
    /// the namespace has; again for a document whose removal is not finished.
    fn unlist(&self, namespace: &str, id: &str, further: &[ChunkKey]) -> Result<Vec<ChunkKey>> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let unused = self.store.remove(namespace, id, further)?;
        self.index.remove(namespace, id)?;
        Ok(unused)
    }

    /// The stored documents, to read and pin.
    pub fn documents(&self) -> &DocumentStore {
        &self.store
    }

    /// The `limit` chunks of a namespace that match a question best, best first.
    ///
    /// # Errors
    /// If the index fails.
    pub fn search(&self, namespace: &str, question: &str, limit: usize) -> Result<Vec<Hit>> {
        self.index.search(namespace, question, limit)
    }
}

/// The error where bytes of a removed document are left in `tier`.
fn incomplete(tier: &'static str, reason: &dyn std::fmt::Display) -> Error {
    Error::RemovalIncomplete { tier, reason: reason.to_string() }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::error::Error;
    use crate::tables::document_id;

    fn new_document(index: usize) -> NewDocument {
        let text = format!("bolt number {index}");
        NewDocument {
            document: Document { title: String::new(), text: text.clone() },
            chunks: vec![vec![index as u32]],
            chunk_texts: vec![text],
            keys: vec![ChunkKey([index as u8; 32])],
        }
    }

    /// A removal that comes between the storing and the indexing of its document leaves no hit behind. The document is the
    /// first of many that are stored before any is indexed, so that there is time for it.
    #[test]
    fn every_hit_of_a_search_is_a_stored_document() {
        let corpus = Corpus::new(DocumentStore::open(None, 1 << 20).unwrap(), "test".to_owned()).unwrap();
        for round in 0..4 {
            let batch: Vec<NewDocument> = (50 * round..50 * (round + 1)).map(new_document).collect();
            let id = document_id(&batch[0].document);
            std::thread::scope(|scope| {
                scope.spawn(|| corpus.put("", batch).unwrap());
                scope.spawn(|| while corpus.unlist("", &id, &[]).is_err() {});
            });
        }
        let stored = corpus.documents().list("", "", 1000).unwrap().0;
        let stored: BTreeSet<String> = stored.into_iter().map(|document| document.id).collect();
        let found = corpus.search("", "bolt", 1000).unwrap();
        let found: BTreeSet<String> = found.into_iter().map(|hit| hit.document).collect();
        assert_eq!(stored.len(), 4 * 49);
        assert_eq!(found, stored);
    }

    #[test]
    fn documents_before_one_without_room_are_stored_and_found() {
        let corpus = Corpus::new(DocumentStore::open(None, 30).unwrap(), "test".to_owned()).unwrap();
        let error = corpus.put("", (0..5).map(new_document).collect()).unwrap_err();
        assert!(matches!(error, Error::QuotaExceeded { quota: 30, .. }), "{error}");
        assert_eq!(corpus.search("", "bolt", 100).unwrap().len(), 2);
        assert_eq!(corpus.documents().list("", "", 10).unwrap().0.len(), 2);
    }

    #[test]
    fn chunks_are_cut_again_only_where_another_segmentation_cut_them() {
        let folder = tempfile::tempdir().unwrap();
        let open = |segmentation: &str| {
            let store = DocumentStore::open(Some(folder.path()), 1 << 20).unwrap();
            Corpus::new(store, segmentation.to_owned()).unwrap()
        };
        let id = document_id(&new_document(7).document);
        open("first").put("", vec![new_document(7)]).unwrap();
        let untouched = |_: &str, _: Document| -> Result<NewDocument> { panic!("it is cut already") };
        let corpus = open("first");
        corpus.index_all(untouched, |tokens| format!("word{}", tokens[0])).unwrap();
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
        corpus.index_all(cut, |_| panic!("its chunks are of another size")).unwrap();
        assert_eq!(corpus.search("", "two", 9).unwrap()[0].chunk, 1);
        assert_eq!(corpus.documents().chunk("", &id, 1).unwrap(), [2]);
        // The keys of both are removed with the document.
        assert_eq!(corpus.unlist("", &id, &[]).unwrap(), [7, 9].map(|byte| ChunkKey([byte; 32])));
        assert!(matches!(corpus.documents().chunk("", &id, 1), Err(Error::NotFound(_))));
    }
}
