//! Documents that a program keeps and searches as the server does, without a server.

use std::path::Path;

use refrain::engine::{Document, Engine, PromptChunk};

use crate::api::SourceFinder;
use crate::corpus::{Corpus, DocumentStore, NewDocument, cut_document, empty_corpus, open_corpus};
use crate::error::Error;

/// The documents of an engine's namespace, searched by questions. A folder holds those of its server too, and one program at a time
/// has it open.
pub struct Library {
    corpus: Corpus,
    engine: Engine,
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Library").finish_non_exhaustive()
    }
}

/// Chunks that a question found.
#[derive(Debug, Default)]
pub struct Found {
    /// The chunks, by documents, those that match best first.
    pub chunks: Vec<PromptChunk>,
    /// Their documents, as answers of the server tell them.
    pub sources: Vec<serde_json::Value>,
}

impl Library {
    /// Opens the documents of a folder.
    ///
    /// # Errors
    /// If the documents cannot be opened or indexed, or another program has them open.
    pub fn open(engine: &Engine, folder: &Path) -> Result<Library, Error> {
        let corpus = open_corpus(engine, DocumentStore::open(Some(folder), u64::MAX)?)?;
        Ok(Library { corpus, engine: engine.clone() })
    }

    /// A library in memory.
    ///
    /// # Errors
    /// If a text cannot be tokenised.
    pub fn of(engine: &Engine, documents: &[Document]) -> Result<Library, Error> {
        let corpus = empty_corpus(engine, DocumentStore::open(None, u64::MAX)?)?;
        corpus.put(&engine.settings().namespace, cut(engine, documents)?)?;
        Ok(Library { corpus, engine: engine.clone() })
    }

    /// Keeps documents in a folder, to be found later. One that is there stays as it is.
    ///
    /// # Errors
    /// If the folder's documents cannot be opened or written, or another program has them open.
    pub fn keep(engine: &Engine, folder: &Path, documents: &[Document]) -> Result<(), Error> {
        // The index is in memory, and made by those that search.
        let corpus = empty_corpus(engine, DocumentStore::open(Some(folder), u64::MAX)?)?;
        corpus.put(&engine.settings().namespace, cut(engine, documents)?)?;
        Ok(())
    }

    /// Whether there is no document.
    ///
    /// # Errors
    /// If the documents cannot be read.
    pub fn is_empty(&self) -> Result<bool, Error> {
        Ok(self.corpus.documents().list(&self.engine.settings().namespace, "", 1)?.0.is_empty())
    }

    /// The `limit` chunks that match a question best, or, for methods that need them whole, the documents that hold these.
    ///
    /// # Errors
    /// If they exceed the model's context, or cannot be read.
    pub fn search(&self, question: &str, limit: usize, whole_documents: bool) -> Result<Found, Error> {
        let (corpus, engine) = (&self.corpus, &self.engine);
        let finder = SourceFinder { corpus, engine, max_documents: usize::MAX, whole_documents };
        let mut found = Found::default();
        for (index, source) in finder.searched(question, limit)?.iter().enumerate() {
            found.chunks.extend(source.prompt_chunks(index));
            found.sources.push(serde_json::json!(source.response()));
        }
        Ok(found)
    }
}

fn cut(engine: &Engine, documents: &[Document]) -> Result<Vec<NewDocument>, Error> {
    let cut = documents.iter().map(|document| cut_document(engine, document.clone(), true));
    Ok(cut.collect::<Result<_, _>>()?)
}
