//! Chunks that a search found.

use std::hash::{Hash, Hasher};

use pyo3::prelude::*;
use refrain::PromptChunk;
use refrain::corpus::{Found, Source};

use crate::convert::quoted;
use crate::opened::Opened;

/// A chunk of a kept document. It stands in a question's documents as it was prefilled.
#[pyclass(frozen, eq, hash, from_py_object, weakref, module = "refrain")]
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
    /// Digest of the tokenizer whose tokens it has.
    pub(crate) tokenizer: [u8; 32],
}

impl Chunk {
    /// The parts by which two chunks are equal. The search that found a chunk, and its place there, are none of them.
    fn identity(&self) -> (&str, (usize, usize), &[u32], [u8; 32]) {
        (&self.document, self.chunk.part, &self.chunk.tokens, self.tokenizer)
    }
}

impl PartialEq for Chunk {
    fn eq(&self, other: &Chunk) -> bool {
        self.identity() == other.identity()
    }
}

impl Eq for Chunk {}

impl Hash for Chunk {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.identity().hash(state);
    }
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

    /// A chunk never changes.
    fn __copy__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    /// A chunk never changes.
    fn __deepcopy__<'py>(slf: PyRef<'py, Self>, _memo: &Bound<'py, PyAny>) -> PyRef<'py, Self> {
        slf
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let score = self.score.map(|score| format!(", score={score:.2}")).unwrap_or_default();
        let label = quoted(py, &self.chunk.label())?;
        Ok(format!("Chunk({label}{score}, {} tokens)", self.chunk.tokens.len()))
    }
}

/// The chunks that a search found, those of one document together.
pub(crate) fn chunks(opened: &Opened, found: Found) -> refrain::corpus::Result<Vec<Chunk>> {
    let tokenizer = opened.tokenizer()?;
    let scored = |source: Source| {
        let Source { id, chunks, .. } = source;
        chunks.into_iter().map(move |chunk| (id.clone(), chunk.score))
    };
    let scored = found.sources.into_iter().flat_map(scored);
    let chunk = |(chunk, (document, score)): (PromptChunk, (String, Option<f32>))| Chunk {
        text: opened.engine.tokenizer().decode(&chunk.tokens, false),
        document,
        score,
        chunk,
        tokenizer,
    };
    Ok(found.chunks.into_iter().zip(scored).map(chunk).collect())
}
