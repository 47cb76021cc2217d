//! The documents that an answer draws on, as chunks of token ids.

use std::collections::{BTreeMap, HashSet};

use axum::http::StatusCode;
use refrain::engine::{Document, Engine, PromptChunk};
use serde::Serialize;
use utoipa::ToSchema;

use super::request::{DocumentReference, Documents};
use crate::api_error::{ApiError, Result};
use crate::corpus::{Corpus, StoredDocument, display_title, document_id};

/// Chunks that a search finds if the request gives no number.
const SEARCH_LIMIT: usize = 5;
/// Most chunks that a search may find.
const MAX_SEARCH_LIMIT: usize = 64;

/// A document of a prompt.
#[derive(Debug)]
pub(crate) struct Source {
    id: String,
    title: String,
    /// Its chunks in the prompt, ascending.
    chunks: Vec<SourceChunk>,
}

#[derive(Debug)]
struct SourceChunk {
    /// Index of the chunk in its document, and the number of the document's chunks.
    part: (usize, usize),
    tokens: Vec<u32>,
    /// The tokens left of it in its document that it is prefilled behind.
    left: Vec<u32>,
    /// BM25 score of a chunk that a search found.
    score: Option<f32>,
}

/// A document that an answer draws on.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct SourceResponse {
    id: String,
    title: String,
    /// The document's chunks in the prompt.
    chunks: Vec<ChunkResponse>,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
struct ChunkResponse {
    /// Index of the chunk in its document.
    part: usize,
    /// Number of the document's chunks.
    of: usize,
    tokens: usize,
    /// BM25 score of a chunk that a search found.
    #[schema(required = true)]
    score: Option<f32>,
}

impl Source {
    pub(super) fn tokens(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.tokens.len()).sum()
    }

    pub(crate) fn response(&self) -> SourceResponse {
        let chunk = |chunk: &SourceChunk| {
            let (part, of) = chunk.part;
            ChunkResponse { part, of, tokens: chunk.tokens.len(), score: chunk.score }
        };
        SourceResponse {
            id: self.id.clone(),
            title: self.title.clone(),
            chunks: self.chunks.iter().map(chunk).collect(),
        }
    }

    /// The chunks as those of a prompt's `document`-th document.
    pub(crate) fn prompt_chunks(&self, document: usize) -> impl Iterator<Item = PromptChunk> + '_ {
        self.chunks.iter().map(move |chunk| PromptChunk {
            left: chunk.left.clone(),
            part: chunk.part,
            ..PromptChunk::whole(document, self.title.clone(), chunk.tokens.clone())
        })
    }
}

/// Finds the documents of requests.
pub(crate) struct SourceFinder<'a> {
    pub(crate) corpus: &'a Corpus,
    /// The engine of the sender's namespace.
    pub(crate) engine: &'a Engine,
    /// Most documents of a request.
    pub(crate) max_documents: usize,
    /// Whether the method needs whole documents. Each is then one context, which is stored under a key of its own, and a
    /// context made of some chunks would have a key that the document's removal does not know.
    pub(crate) whole_documents: bool,
}

impl SourceFinder<'_> {
    /// The documents that a request names, or that a search for its question finds, best first.
    ///
    /// # Errors
    /// If a document is not there or empty, the documents exceed the model's context, or the field is neither a list nor
    /// `"search"`.
    pub(super) fn find(
        &self,
        documents: Option<&Documents>,
        question: &str,
        search_limit: Option<usize>,
    ) -> Result<Vec<Source>> {
        match documents {
            None => Ok(Vec::new()),
            Some(Documents::List(list)) => self.listed(list),
            Some(Documents::Search(word)) if word == "search" => {
                let limit = search_limit.unwrap_or(SEARCH_LIMIT).min(MAX_SEARCH_LIMIT);
                self.searched(question, limit)
            }
            Some(Documents::Search(word)) => {
                Err(ApiError::field("documents", format!("documents is \"search\" or a list, not {word:?}")))
            }
        }
    }

    fn namespace(&self) -> &str {
        &self.engine.settings().namespace
    }

    fn context(&self) -> usize {
        self.engine.decoder().config().context
    }

    fn too_many_tokens(&self) -> ApiError {
        let message =
            format!("the documents have more tokens than the model's context of {}", self.context());
        ApiError::context_length("documents", message)
    }

    fn listed(&self, list: &[DocumentReference]) -> Result<Vec<Source>> {
        let limit = self.max_documents;
        if list.len() > limit {
            return Err(ApiError::field("documents", format!("a request may have {limit} documents")));
        }
        let mut tokens = 0;
        let mut sources = Vec::with_capacity(list.len());
        for reference in list {
            sources.push(match reference {
                DocumentReference::Id { id, parts } => {
                    let stored = self.corpus.documents().get(self.namespace(), id)?;
                    let source = match parts {
                        Some(parts) if !self.whole_documents => self.parts(&stored, parts)?,
                        _ if tokens + stored.tokens > self.context() => return Err(self.too_many_tokens()),
                        _ => self.whole(&stored, &BTreeMap::new())?,
                    };
                    tokens += source.tokens();
                    if tokens > self.context() {
                        return Err(self.too_many_tokens());
                    }
                    source
                }
                DocumentReference::Text(document) if document.text.trim().is_empty() => {
                    return Err(ApiError::field("documents", "a document has no text"));
                }
                DocumentReference::Text(document) => self.given(document.clone().into())?,
            });
        }
        Ok(sources)
    }

    /// A document that the request contains.
    fn given(&self, document: Document) -> Result<Source> {
        let chunks = self.engine.chunks(std::slice::from_ref(&document))?;
        self.engine.store().admit(|| self.engine.keys_of(&chunks, true));
        let chunk = |PromptChunk { part, tokens, left, .. }| SourceChunk { part, tokens, left, score: None };
        Ok(Source {
            id: document_id(&document),
            title: display_title(&document),
            chunks: chunks.into_iter().map(chunk).collect(),
        })
    }

    /// A stored document with all its chunks, and the scores of those that a search found.
    fn whole(&self, stored: &StoredDocument, scores: &BTreeMap<u32, f32>) -> Result<Source> {
        let chunks = self.corpus.documents().chunks(self.namespace(), &stored.id)?;
        // It may have been removed since its metadata was read.
        if chunks.len() != stored.chunks as usize {
            return Err(ApiError::not_found("document", &stored.id));
        }
        let chunk = |PromptChunk { part, tokens, left, .. }| {
            let score = scores.get(&(part.0 as u32)).copied();
            SourceChunk { part, tokens, left, score }
        };
        let chunks = self.engine.whole_document(chunks).into_iter().map(chunk).collect();
        Ok(Source { id: stored.id.clone(), title: stored.title.clone(), chunks })
    }

    /// The chunks of a stored document that a request names by their indices.
    fn parts(&self, stored: &StoredDocument, parts: &[u32]) -> Result<Source> {
        let parts: BTreeMap<u32, Option<f32>> = parts.iter().map(|index| (*index, None)).collect();
        match parts.last_key_value() {
            None => Err(ApiError::field("documents", format!("parts of document {} is empty", stored.id))),
            Some((last, _)) if *last >= stored.chunks => {
                let message = format!("document {} has no part {last}: it has {}", stored.id, stored.chunks);
                Err(ApiError::field("documents", message))
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
            let part = (*index as usize, stored.chunks as usize);
            chunks.push(SourceChunk { part, tokens, left, score: *score });
        }
        Ok(Source { id: stored.id.clone(), title: stored.title.clone(), chunks })
    }

    /// The chunks that a search for a question finds, or the documents that hold them, best first.
    ///
    /// # Errors
    /// If the documents exceed the model's context, or cannot be read.
    pub(crate) fn searched(&self, question: &str, limit: usize) -> Result<Vec<Source>> {
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
                    tokens += source.tokens();
                    if tokens > self.context() {
                        return Err(self.too_many_tokens());
                    }
                    sources.push(source);
                }
                Ok(None) => {}
                // It may have been removed since the search.
                Err(error) if error.status == StatusCode::NOT_FOUND => {}
                Err(error) => return Err(error),
            }
        }
        if sources.is_empty() && is_left_out {
            return Err(self.too_many_tokens());
        }
        Ok(sources)
    }
}
