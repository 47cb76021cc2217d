//! The documents that a request's answer draws on.

use refrain::corpus::{Source, SourceChunk, SourceFinder};
use serde::Serialize;
use utoipa::ToSchema;

use super::request::{DocumentReference, Documents};
use crate::api_error::{ApiError, Result};

/// Chunks that a search finds if the request gives no number.
const SEARCH_LIMIT: usize = 5;

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

impl From<&Source> for SourceResponse {
    fn from(source: &Source) -> SourceResponse {
        let chunk = |chunk: &SourceChunk| {
            let SourceChunk { part, of, ref tokens, score, .. } = *chunk;
            ChunkResponse { part, of, tokens: tokens.len(), score }
        };
        SourceResponse {
            id: source.id.clone(),
            title: source.title.clone(),
            chunks: source.chunks.iter().map(chunk).collect(),
        }
    }
}

/// The documents that a request names, at most `max_documents`, or those that a search for its question finds, best first.
///
/// # Errors
/// If a document is not there or empty, the documents exceed the model's context, or the field is neither a list nor
/// `"search"`.
pub(super) fn sources(
    finder: &SourceFinder<'_>,
    (documents, max_documents): (Option<&Documents>, usize),
    question: &str,
    search_limit: Option<usize>,
) -> Result<Vec<Source>> {
    match documents {
        None => Ok(Vec::new()),
        Some(Documents::List(list)) if list.len() > max_documents => {
            let message = format!("a request may have {max_documents} documents");
            Err(ApiError::field("documents", message))
        }
        Some(Documents::List(list)) => listed(finder, list),
        Some(Documents::Search(word)) if word == "search" => {
            Ok(finder.searched(question, search_limit.unwrap_or(SEARCH_LIMIT))?)
        }
        Some(Documents::Search(word)) => {
            Err(ApiError::field("documents", format!("documents is \"search\" or a list, not {word:?}")))
        }
    }
}

fn listed(finder: &SourceFinder<'_>, list: &[DocumentReference]) -> Result<Vec<Source>> {
    let mut tokens = 0;
    let mut sources = Vec::with_capacity(list.len());
    for reference in list {
        let source = match reference {
            DocumentReference::Id { id, parts } => finder.stored(id, parts.as_deref(), tokens)?,
            DocumentReference::Text(document) if document.text.trim().is_empty() => {
                return Err(ApiError::field("documents", "a document has no text"));
            }
            DocumentReference::Text(document) => finder.given(&document.clone().into())?,
        };
        tokens = finder.count(tokens, &source)?;
        sources.push(source);
    }
    Ok(sources)
}
