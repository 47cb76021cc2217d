//! The kept documents of one engine, without a server.

use std::path::Path;

use refrain_engine::{Document, Engine, PromptChunk};

use crate::corpus::Corpus;
use crate::cut::NewDocument;
use crate::error::Result;
use crate::sources::{Source, SourceFinder};
use crate::store::DocumentStore;
use crate::tables::StoredDocument;

/// The documents of an engine's namespace, found by the words of questions. A folder has those that its server keeps too, and one
/// program at a time has it open.
pub struct Library {
    corpus: Corpus,
    engine: Engine,
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Library").finish_non_exhaustive()
    }
}

/// Chunks of kept documents.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// The chunks, by documents; of a search, those that match best first.
    pub chunks: Vec<PromptChunk>,
    /// Their documents.
    pub sources: Vec<Source>,
}

impl Found {
    fn new(sources: Vec<Source>) -> Found {
        let chunks = sources.iter().enumerate().flat_map(|(index, source)| source.prompt_chunks(index));
        Found { chunks: chunks.collect(), sources }
    }
}

impl Library {
    /// Opens the documents of a folder.
    ///
    /// # Errors
    /// If the documents cannot be opened or indexed, or another program has them open.
    pub fn open(engine: &Engine, folder: &Path) -> Result<Library> {
        let corpus = Corpus::open(engine, DocumentStore::open(Some(folder), u64::MAX)?)?;
        Ok(Library { corpus, engine: engine.clone() })
    }

    /// An empty library in memory.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn in_memory(engine: &Engine) -> Result<Library> {
        let corpus = Corpus::unindexed(engine, DocumentStore::open(None, u64::MAX)?)?;
        Ok(Library { corpus, engine: engine.clone() })
    }

    /// Keeps documents in a folder, to be found later. One that is there stays as it is.
    ///
    /// # Errors
    /// If the folder's documents cannot be opened or written, or another program has them open.
    pub fn keep(engine: &Engine, folder: &Path, documents: &[Document]) -> Result<()> {
        // The index is in memory, and made by those that search.
        let corpus = Corpus::unindexed(engine, DocumentStore::open(Some(folder), u64::MAX)?)?;
        Library { corpus, engine: engine.clone() }.put(documents)
    }

    /// Keeps documents, to be found from now on. One that is there stays as it is. Their chunks are prefilled by
    /// [`Engine::ingest`], or when a question is asked about them.
    ///
    /// # Errors
    /// If a text cannot be tokenised, or the documents cannot be written.
    pub fn put(&self, documents: &[Document]) -> Result<()> {
        let cut = documents.iter().map(|document| NewDocument::cut(&self.engine, document.clone(), true));
        self.corpus.put(&self.engine.settings().namespace, cut.collect::<Result<_>>()?)?;
        Ok(())
    }

    /// Whether there is no document.
    ///
    /// # Errors
    /// If the documents cannot be read.
    pub fn is_empty(&self) -> Result<bool> {
        Ok(self.corpus.documents().list(&self.engine.settings().namespace, "", 1)?.0.is_empty())
    }

    /// The documents, by their ids.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn documents(&self) -> Result<Vec<StoredDocument>> {
        Ok(self.corpus.documents().list(&self.engine.settings().namespace, "", usize::MAX)?.0)
    }

    /// Removes a document by its id, and its chunks that no other document has, from memory, disk and the object store.
    ///
    /// # Errors
    /// If it is not there, or bytes of it are left somewhere.
    pub fn remove(&self, id: &str) -> Result<()> {
        self.corpus.remove(&self.engine, id)
    }

    /// The `limit` chunks that match a question best, or, for methods that need them whole, the documents that hold these.
    ///
    /// # Errors
    /// If they exceed the model's context, or cannot be read.
    pub fn search(&self, question: &str, limit: usize, whole_documents: bool) -> Result<Found> {
        let finder = SourceFinder { corpus: &self.corpus, engine: &self.engine, whole_documents };
        Ok(Found::new(finder.searched(question, limit)?))
    }

    /// A document by its id, or some of its chunks, as an earlier search told them.
    ///
    /// # Errors
    /// If it or a part is not there, or it exceeds the model's context.
    pub fn document(&self, id: &str, parts: Option<&[u32]>) -> Result<Found> {
        let finder = SourceFinder { corpus: &self.corpus, engine: &self.engine, whole_documents: false };
        Ok(Found::new(vec![finder.stored(id, parts, 0)?]))
    }
}
