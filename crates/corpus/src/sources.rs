//! The documents that an answer draws on, as chunks of token ids.

use std::collections::{BTreeMap, HashSet};

use refrain_engine::{Document, Engine, PromptChunk};
use serde::{Serialize, Serializer};

use crate::corpus::Corpus;
use crate::error::{Error, Result};
use crate::tables::{StoredDocument, display_title, document_id};

/// A document of a prompt.
#[derive(Clone, Debug, Serialize)]
pub struct Source {
    /// Its id, which follows from title and text.
    pub id: String,
    /// Its title, or the first line of a text without one.
    pub title: String,
    /// Its chunks in the prompt, ascending.
    pub chunks: Vec<SourceChunk>,
}

/// A chunk of a document.
#[derive(Clone, Debug, Serialize)]
pub struct SourceChunk {
    /// Index of the chunk in its document.
    pub part: usize,
    /// Number of the document's chunks.
    pub of: usize,
    /// Its token ids; their number, where it is serialized.
    #[serde(serialize_with = "count")]
    pub tokens: Vec<u32>,
    /// The tokens left of it in its document that it is prefilled behind.
    #[serde(skip)]
    pub left: Vec<u32>,
    /// BM25 score of a chunk that a search found.
    pub score: Option<f32>,
}

fn count<S: Serializer>(tokens: &[u32], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(tokens.len() as u64)
}

impl SourceChunk {
    fn new(chunk: PromptChunk, score: Option<f32>) -> SourceChunk {
        let PromptChunk { part: (part, of), tokens, left, .. } = chunk;
        SourceChunk { part, of, tokens, left, score }
    }
}

impl Source {
    /// Tokens of its chunks.
    pub fn tokens(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.tokens.len()).sum()
    }

    /// The chunks as those of a prompt's `document`-th document.
    pub fn prompt_chunks(&self, document: usize) -> impl Iterator<Item = PromptChunk> + '_ {
        self.chunks.iter().map(move |chunk| PromptChunk {
            left: chunk.left.clone(),
            part: (chunk.part, chunk.of),
            ..PromptChunk::whole(document, self.title.clone(), chunk.tokens.clone())
        })
    }
}

/// Gives documents as the chunks of a prompt.
pub struct SourceFinder<'a> {
    /// The stored documents.
    pub corpus: &'a Corpus,
    /// The engine, whose namespace has the documents.
    pub engine: &'a Engine,
    /// Whether the method needs whole documents. Each is then one context, which is stored under a key of its own, and a
    /// context made of some chunks would have a key that the document's removal does not know.
    pub whole_documents: bool,
}

impl std::fmt::Debug for SourceFinder<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SourceFinder").field("whole_documents", &self.whole_documents).finish_non_exhaustive()
    }
}

impl SourceFinder<'_> {
    fn namespace(&self) -> &str {
        &self.engine.settings().namespace
    }

    /// Positions of the model's context, which the documents of a prompt must not exceed.
    fn context(&self) -> usize {
        self.engine.decoder().config().context
    }

    fn too_many_tokens(&self) -> Error {
        Error::ContextExceeded { context: self.context() }
    }

    /// Adds the tokens of a document to those of the documents before it.
    ///
    /// # Errors
    /// If they exceed the model's context.
    pub fn count(&self, before: usize, source: &Source) -> Result<usize> {
        let tokens = before + source.tokens();
        if tokens > self.context() { Err(self.too_many_tokens()) } else { Ok(tokens) }
    }

    /// A document that comes with the question. Its chunks are stored, though it may have been removed before.
    ///
    /// # Errors
    /// If its text cannot be tokenised.
    pub fn given(&self, document: &Document) -> Result<Source> {
        let chunks = self.engine.chunks(std::slice::from_ref(document))?;
        self.engine.store().admit(|| self.engine.keys_of(&chunks, true));
        Ok(Source {
            id: document_id(document),
            title: display_title(document),
            chunks: chunks.into_iter().map(|chunk| SourceChunk::new(chunk, None)).collect(),
        })
    }

    /// A stored document behind `before` tokens of others. `parts` narrows it to some of its chunks, where the method does not need
    /// whole documents.
    ///
    /// # Errors
    /// If it or a part is not there, or it exceeds the model's context.
    pub fn stored(&self, id: &str, parts: Option<&[u32]>, before: usize) -> Result<Source> {
        let stored = self.corpus.get(self.engine, id)?;
        match parts {
            Some(parts) if !self.whole_documents => self.parts(&stored, parts),
            _ if before + stored.tokens > self.context() => Err(self.too_many_tokens()),
            _ => self.whole(&stored, &BTreeMap::new()),
        }
    }

    /// A stored document with all its chunks, and the scores of those that a search found.
    fn whole(&self, stored: &StoredDocument, scores: &BTreeMap<u32, f32>) -> Result<Source> {
        let chunks = self.corpus.documents().chunks(self.namespace(), &stored.id)?;
        // It may have been removed since its metadata was read.
        if chunks.len() != stored.chunks as usize {
            return Err(Error::NotFound(stored.id.clone()));
        }
        let chunk = |chunk: PromptChunk| {
            let score = scores.get(&(chunk.part.0 as u32)).copied();
            SourceChunk::new(chunk, score)
        };
        let chunks = self.engine.whole_document(chunks).into_iter().map(chunk).collect();
        Ok(Source { id: stored.id.clone(), title: stored.title.clone(), chunks })
    }

    /// The chunks of a stored document that are named by their indices.
    fn parts(&self, stored: &StoredDocument, parts: &[u32]) -> Result<Source> {
        let parts: BTreeMap<u32, Option<f32>> = parts.iter().map(|index| (*index, None)).collect();
        match parts.last_key_value() {
            None => Err(Error::NoParts(stored.id.clone())),
            Some((last, _)) if *last >= stored.chunks => {
                Err(Error::NoPart { id: stored.id.clone(), part: *last, parts: stored.chunks })
            }
            Some(_) => self.part(stored, &parts),
        }
    }

    /// Some chunks of a stored document by their indices, with the scores of those that a search found.
    fn part(&self, stored: &StoredDocument, wanted: &BTreeMap<u32, Option<f32>>) -> Result<Source> {
        let documents = self.corpus.documents();
        let mut chunks = Vec::with_capacity(wanted.len());
        let (engine, namespace) = (self.engine, self.namespace());
        for (index, score) in wanted {
            let tokens = documents.chunk(namespace, &stored.id, *index)?;
            let (mut before, mut first) = (Vec::new(), *index);
            while first > 0 && before.len() < engine.settings().left_tokens {
                first -= 1;
                before = [documents.chunk(namespace, &stored.id, first)?, before].concat();
            }
            let left = engine.left_of(tokens.len(), &before).to_vec();
            let (part, of) = (*index as usize, stored.chunks as usize);
            chunks.push(SourceChunk { part, of, tokens, left, score: *score });
        }
        Ok(Source { id: stored.id.clone(), title: stored.title.clone(), chunks })
    }

    /// The chunks that a search for a question finds, or the documents that hold them, best first.
    ///
    /// # Errors
    /// If the documents exceed the model's context, or cannot be read.
    pub fn searched(&self, question: &str, limit: usize) -> Result<Vec<Source>> {
        let hits = self.corpus.search(self.namespace(), question, limit)?;
        let mut scores: BTreeMap<&str, BTreeMap<u32, f32>> = BTreeMap::new();
        for hit in &hits {
            scores.entry(&hit.document).or_default().insert(hit.chunk, hit.score);
        }
        let (mut sources, mut tokens) = (Vec::new(), 0);
        let (mut seen, mut is_left_out) = (HashSet::new(), false);
        for hit in hits.iter().filter(|hit| seen.insert(&hit.document)) {
            let scores = &scores[hit.document.as_str()];
            let found = self.corpus.documents().get(self.namespace(), &hit.document);
            let source = found.and_then(|stored| {
                if self.whole_documents && tokens + stored.tokens > self.context() {
                    is_left_out = true;
                    return Ok(None);
                }
                let source = if self.whole_documents {
                    self.whole(&stored, scores)
                } else {
                    self.part(&stored, &scores.iter().map(|(index, score)| (*index, Some(*score))).collect())
                };
                source.map(Some)
            });
            match source {
                Ok(Some(source)) => {
                    tokens = self.count(tokens, &source)?;
                    sources.push(source);
                }
                Ok(None) => {}
                // It may have been removed since the search.
                Err(Error::NotFound(_)) => {}
                Err(error) => return Err(error),
            }
        }
        if sources.is_empty() && is_left_out {
            return Err(self.too_many_tokens());
        }
        Ok(sources)
    }
}
