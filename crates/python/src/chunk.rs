//! Chunks that a search found.

use pyo3::prelude::*;
use refrain::PromptChunk;
use refrain::corpus::{Found, Source};

/// A chunk of a kept document. It stands in a question's documents as it was prefilled.
#[pyclass(frozen, from_py_object, module = "refrain")]
#[derive(Clone)]
pub(crate) struct Chunk {
    /// The text.
    #[pyo3(get)]
    text: String,
    /// Id of its document.
    #[pyo3(get)]
    pub(crate) document: String,
    /// BM25 score; none of a chunk that stands there because its method needs whole documents.
    #[pyo3(get)]
    score: Option<f32>,
    pub(crate) chunk: PromptChunk,
}

#[pymethods]
impl Chunk {
    /// Title of its document, or the first line of a text without one.
    #[getter]
    fn title(&self) -> &str {
        &self.chunk.title
    }

    /// Index of the chunk in its document.
    #[getter]
    fn part(&self) -> usize {
        self.chunk.part.0
    }

    /// Number of the document's chunks.
    #[getter]
    fn of(&self) -> usize {
        self.chunk.part.1
    }

    /// Number of its tokens.
    fn __len__(&self) -> usize {
        self.chunk.tokens.len()
    }

    fn __repr__(&self) -> String {
        let score = self.score.map(|score| format!(", score={score:.2}")).unwrap_or_default();
        format!("Chunk({:?}{score}, {} tokens)", self.chunk.label(), self.chunk.tokens.len())
    }
}

/// The chunks that a search found, those of one document together.
pub(crate) fn chunks(engine: &refrain::Engine, found: Found) -> Vec<Chunk> {
    let scored = |source: Source| {
        let Source { id, chunks, .. } = source;
        chunks.into_iter().map(move |chunk| (id.clone(), chunk.score))
    };
    let scored = found.sources.into_iter().flat_map(scored);
    let chunk = |(chunk, (document, score)): (PromptChunk, (String, Option<f32>))| Chunk {
        text: engine.tokenizer().decode(&chunk.tokens, false),
        document,
        score,
        chunk,
    };
    found.chunks.into_iter().zip(scored).map(chunk).collect()
}
