//! Pins of documents, and of their chunks in the store's folder.
//!
//! A chunk is to be pinned while a pinned document of its namespace has it. A document is pinned, unpinned, stored or removed first. Then its chunks are
//! pinned or unpinned as the documents stand, by one thread at a time, so that the last of several changes leaves them right, whatever their order.

use std::collections::HashSet;
use std::sync::PoisonError;

use refrain_engine::Engine;
use refrain_store::ChunkKey;

use crate::corpus::{Corpus, keys_of};
use crate::error::{Error, Result};
use crate::tables::StoredDocument;

impl Corpus {
    /// Pins or unpins a document of an engine's namespace, and those of its chunks that the store's folder has. Chunks that another pinned document has
    /// stay pinned.
    ///
    /// # Errors
    /// If the namespace has no such document, or the chunks cannot be pinned: the document is, all the same, and doing it again pins them.
    pub fn set_pinned(&self, engine: &Engine, id: &str, pinned: bool) -> Result<StoredDocument> {
        let stored = self.store.set_pinned(&engine.settings().namespace, id, pinned)?;
        self.settle_pins(engine, id)?;
        Ok(stored)
    }

    /// Pins or unpins those of a document's chunks that the store's folder has, as the documents stand now: after chunks were stored.
    ///
    /// # Errors
    /// If the documents cannot be read, or the chunks cannot be pinned.
    pub fn settle_pins(&self, engine: &Engine, id: &str) -> Result<()> {
        let namespace = &engine.settings().namespace;
        self.settle(engine, namespace, &self.documents().chunk_keys(namespace, id)?)
    }

    fn settle(&self, engine: &Engine, namespace: &str, keys: &[ChunkKey]) -> Result<()> {
        let _pinning = self.pinning.lock().unwrap_or_else(PoisonError::into_inner);
        let pinned = self.documents().pinned_keys(namespace, keys)?;
        let (pinned, others): (Vec<_>, Vec<_>) = keys.iter().copied().partition(|key| pinned.contains(key));
        for (keys, pinned) in [(pinned, true), (others, false)] {
            if !keys.is_empty() {
                engine.store().pin(&keys, pinned).map_err(Error::Pins)?;
            }
        }
        Ok(())
    }

    /// Pins or unpins chunks of a document as the documents stand. The change of the document holds where the chunks cannot be changed.
    ///
    /// # Errors
    /// If the documents cannot be read.
    pub(crate) fn pin_here(
        &self,
        engine: &Engine,
        namespace: &str,
        id: &str,
        keys: &[ChunkKey],
    ) -> Result<()> {
        match self.settle(engine, namespace, keys) {
            Err(Error::Pins(error)) => {
                tracing::error!(%error, "chunks of document {id} cannot be pinned or unpinned here");
                Ok(())
            }
            settled => settled,
        }
    }

    /// Pins the chunks that pinned documents have since they were cut anew, and unpins those that no pinned one has any more. `documents` are all, as
    /// they were before.
    pub(crate) fn pin_anew(&self, engine: &Engine, documents: &[(String, StoredDocument)]) -> Result<()> {
        let pinned: Vec<_> = documents.iter().filter(|(_, stored)| stored.pinned).collect();
        if pinned.iter().all(|(_, stored)| self.is_cut(stored)) {
            return Ok(());
        }
        let (mut present, mut earlier) = (HashSet::new(), HashSet::new());
        for (namespace, stored) in pinned {
            present.extend(keys_of(engine, namespace, self.documents().chunks(namespace, &stored.id)?));
            if !self.is_cut(stored) {
                earlier.extend(self.documents().chunk_keys(namespace, &stored.id)?);
            }
        }
        let dead: Vec<ChunkKey> = earlier.difference(&present).copied().collect();
        let pinned = engine.store().pin(&present.into_iter().collect::<Vec<_>>(), true);
        if let Err(error) = pinned.and(engine.store().pin(&dead, false)) {
            tracing::error!(%error, "chunks of pinned documents that were cut anew cannot be pinned or unpinned");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use refrain_engine::Document;
    use refrain_store::Scope;
    use tempfile::TempDir;

    use super::*;
    use crate::corpus::tests::{corpus, with_a_chunk};
    use crate::cut::{NewDocument, segmentation};
    use crate::document_store::{Change, ChangeKind};
    use crate::local::LocalDocuments;

    /// Four documents that differ in their titles, and have their only chunk in common.
    struct Shared {
        engine: Engine,
        corpus: Corpus,
        ids: Vec<String>,
        _folder: TempDir,
    }

    fn with_a_shared_chunk() -> Shared {
        let folder = tempfile::tempdir().unwrap();
        let (engine, document) = with_a_chunk(folder.path());
        let documents = LocalDocuments::open(None, 1 << 20).unwrap();
        let corpus = Corpus::unindexed(&engine, Box::new(documents)).unwrap();
        let new = |title: &str| {
            let new = NewDocument::cut(&engine, document.clone(), false).unwrap();
            NewDocument { document: Document { title: title.to_owned(), ..document.clone() }, ..new }
        };
        let stored = corpus.put(&engine, ["a", "b", "c", "d"].map(new).into()).unwrap();
        let ids = stored.into_iter().map(|stored| stored.id).collect();
        Shared { engine, corpus, ids, _folder: folder }
    }

    fn is_pinned(engine: &Engine) -> bool {
        engine.store().list(Scope::All).unwrap().chunks.iter().any(|chunk| chunk.pinned)
    }

    #[test]
    fn a_chunk_of_removed_documents_stays_pinned_only_as_long_as_another_pinned_one_has_it() {
        let Shared { engine, corpus, ids, _folder } = with_a_shared_chunk();
        let is_pinned = || is_pinned(&engine);
        for id in &ids[..2] {
            assert!(corpus.set_pinned(&engine, id, true).unwrap().pinned);
        }
        assert!(is_pinned());
        corpus.remove(&engine, &ids[0]).unwrap();
        assert!(is_pinned(), "the second document is pinned");
        corpus.remove(&engine, &ids[1]).unwrap();
        assert!(!is_pinned(), "the third document has the chunk, and is not pinned");
        // Another machine removes one.
        corpus.set_pinned(&engine, &ids[2], true).unwrap();
        let unpinned = corpus.store.remove("", &ids[2], &[]).unwrap().unpinned;
        assert!(is_pinned());
        let removed = Change { unpinned, ..Change::new("", ids[2].clone(), ChangeKind::Removed) };
        corpus.apply(&engine, vec![removed]).unwrap();
        assert!(!is_pinned());
    }

    /// Another change comes between the two halves of one: the document, then its chunks.
    #[test]
    fn the_last_of_several_changes_leaves_chunks_as_the_documents_stand() {
        let Shared { engine, corpus, ids, _folder } = with_a_shared_chunk();
        let [a, b, c] = [&ids[0], &ids[1], &ids[2]];
        let of_document = |id: &str, pinned: bool| _ = corpus.store.set_pinned("", id, pinned).unwrap();
        let of_chunks = |id: &str| corpus.settle_pins(&engine, id).unwrap();
        corpus.set_pinned(&engine, b, true).unwrap();
        of_document(b, false);
        corpus.set_pinned(&engine, a, true).unwrap();
        of_chunks(b);
        assert!(is_pinned(&engine), "the first document was pinned while the second one was unpinned");
        // A document is unpinned after it was stored again, and before its chunks are pinned for that.
        corpus.set_pinned(&engine, a, false).unwrap();
        of_chunks(a);
        assert!(!is_pinned(&engine), "it was unpinned meanwhile");
        of_document(a, true);
        corpus.set_pinned(&engine, a, false).unwrap();
        of_chunks(a);
        assert!(!is_pinned(&engine));
        // A document is removed while it is being pinned.
        of_document(c, true);
        corpus.remove(&engine, c).unwrap();
        of_chunks(c);
        assert!(!is_pinned(&engine), "no document that is left is pinned");
    }

    /// The dead chunk of one document is a present one of the other.
    #[test]
    fn a_pinned_document_that_is_cut_anew_has_its_new_chunks_pinned_alone() {
        let folder = tempfile::tempdir().unwrap();
        let (engine, document) = with_a_chunk(folder.path());
        let other = Document { title: String::new(), text: "A bell is loose.".to_owned() };
        engine.ingest(std::slice::from_ref(&other), |_| ()).unwrap();
        let open = || LocalDocuments::open(Some(folder.path()), 1 << 20).unwrap();
        let cut = |document: &Document| NewDocument::cut(&engine, document.clone(), false).unwrap();
        let (new, others) = (cut(&document), cut(&other));
        let keys = || -> BTreeSet<ChunkKey> {
            let listed = engine.store().list(Scope::All).unwrap().chunks;
            listed.into_iter().filter(|chunk| chunk.pinned).map(|chunk| chunk.key).collect()
        };
        let put = |document: &Document, chunks: &NewDocument, segmentation: &str| {
            let (corpus, keys) = (corpus(open(), segmentation), chunks.keys.clone());
            let (chunks, chunk_texts) = (chunks.chunks.clone(), chunks.chunk_texts.clone());
            let new = NewDocument { document: document.clone(), chunks, chunk_texts, keys };
            let id = corpus.put(&engine, vec![new]).unwrap().remove(0).id;
            corpus.set_pinned(&engine, &id, true).unwrap();
        };
        // Another segmentation had cut it into the chunk that the other document has now.
        put(&document, &others, "earlier");
        assert_eq!(keys(), others.keys.iter().copied().collect());
        drop(Corpus::open(&engine, Box::new(open())).unwrap());
        assert_eq!(keys(), new.keys.iter().copied().collect());
        put(&other, &others, &segmentation(&engine).unwrap());
        put(&document, &others, "earlier");
        Corpus::open(&engine, Box::new(open())).unwrap();
        assert_eq!(keys(), new.keys.iter().chain(&others.keys).copied().collect());
    }
}
