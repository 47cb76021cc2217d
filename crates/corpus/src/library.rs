//! The kept documents of one engine, without a server.

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use refrain_engine::{Document, Engine, PromptChunk};

use crate::corpus::Corpus;
use crate::cut::NewDocument;
use crate::document_store::DocumentStore;
use crate::error::Result;
use crate::local::LocalDocuments;
use crate::open::open_documents;
use crate::sources::{Source, SourceFinder};
use crate::tables::StoredDocument;

/// The documents of an engine's namespace, found by the words of questions. A folder has those that its server keeps too, and one
/// program at a time has it open. Where the engine's store has an object store, the documents are those of all machines that share it.
pub struct Library {
    corpus: Corpus,
    engine: Engine,
    /// When the other machines were last asked what they have changed; none before.
    asked: Mutex<Option<Instant>>,
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
    fn new(engine: &Engine, corpus: Corpus) -> Library {
        Library { corpus, engine: engine.clone(), asked: Mutex::default() }
    }

    /// Opens the documents of a folder, which should be that of the engine's store ([`Store::folder`](refrain_store::Store::folder)), so that documents and their
    /// chunks stay together, and brings them in line with those of the other machines, if the engine's store is shared. What
    /// cannot be reached is told in the log, and the documents of this machine are there without it.
    ///
    /// # Errors
    /// If the documents cannot be opened or indexed, or another program or engine has them open.
    pub fn open(engine: &Engine, folder: &Path) -> Result<Library> {
        let library = Library::of(engine, open_documents(engine.store(), Some(folder), u64::MAX)?)?;
        if let Err(error) = library.sync() {
            tracing::warn!(%error, "documents of other machines may be missing");
        }
        Ok(library)
    }

    /// The documents of a store, which are not brought in line with those of other machines.
    ///
    /// # Errors
    /// If the documents cannot be indexed.
    pub fn of(engine: &Engine, documents: Box<dyn DocumentStore>) -> Result<Library> {
        Ok(Library::new(engine, Corpus::open(engine, documents)?))
    }

    /// An empty library in memory.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn in_memory(engine: &Engine) -> Result<Library> {
        let corpus = Corpus::unindexed(engine, Box::new(LocalDocuments::open(None, u64::MAX)?))?;
        Ok(Library::new(engine, corpus))
    }

    /// Keeps documents in a store, to be found later, and gives what is kept. One that is there stays as it is.
    ///
    /// # Errors
    /// If the documents cannot be written.
    pub fn keep(
        engine: &Engine,
        store: Box<dyn DocumentStore>,
        documents: &[Document],
    ) -> Result<Vec<StoredDocument>> {
        // The index is in memory, and made by those that search.
        let library = Library::new(engine, Corpus::to_put(engine, store)?);
        let kept = library.put(documents);
        // Chunks of these documents stay, though an interrupted removal names them.
        library.corpus.finish_local_removals(engine);
        kept
    }

    /// Brings the documents in line with those of the other machines, if they are shared: what they have changed since the library was
    /// opened is found hereafter. Must not be called by a thread of an asynchronous runtime, since it waits.
    ///
    /// # Errors
    /// If some of it is left to be done. The next call does it.
    pub fn sync(&self) -> Result<()> {
        *self.asked.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        self.corpus.sync(&self.engine)
    }

    /// Takes up what other machines have changed, as [`sync`](Library::sync) does, and sends them nothing.
    ///
    /// # Errors
    /// If some of it is left to be done. The next call does it.
    pub fn pull(&self) -> Result<()> {
        *self.asked.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        self.corpus.pull(&self.engine)
    }

    /// [`Library::pull`], unless that or a [`sync`](Library::sync) was tried within the last `age`, or the documents are not shared: for programs that
    /// have a library open for long.
    ///
    /// # Errors
    /// If some of it is left to be done. A later call does it.
    pub fn pull_if_older(&self, age: Duration) -> Result<()> {
        let asked = *self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let is_recent = asked.is_some_and(|asked| asked.elapsed() < age);
        if is_recent || self.corpus.sharing().is_none() { Ok(()) } else { self.pull() }
    }

    /// Keeps documents, to be found from now on, and gives what is kept. One that is there stays as it is. Their chunks are prefilled by
    /// [`Engine::ingest`], or when a question is asked about them.
    ///
    /// # Errors
    /// If a text cannot be tokenised, or the documents cannot be written.
    pub fn put(&self, documents: &[Document]) -> Result<Vec<StoredDocument>> {
        let cut = documents.iter().map(|document| NewDocument::cut(&self.engine, document.clone(), true));
        self.corpus.put(&self.engine, cut.collect::<Result<_>>()?)
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
