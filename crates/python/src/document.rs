//! Documents: given as they are, or read from files.

use std::path::PathBuf;

use pyo3::exceptions::{PyOSError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyString;
use refrain::PromptChunk;
use refrain::documents::{Failure, Files, ReadError};
use refrain::engine::Advance;

use crate::chunk::Chunk;
use crate::convert::quoted;
use crate::error::{RefrainError, raise, warn};
use crate::opened::Opened;
use crate::signals::advance;

/// A document: its title, which may be empty, and its text.
#[pyclass(frozen, eq, hash, from_py_object, weakref, module = "refrain")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Document {
    /// The title.
    #[pyo3(get)]
    title: String,
    /// The text; Markdown, where its file has structure.
    #[pyo3(get)]
    text: String,
}

#[pymethods]
impl Document {
    #[new]
    #[pyo3(signature = (text, title = ""))]
    fn new(text: String, title: &str) -> Document {
        Document { title: title.to_owned(), text }
    }

    /// The arguments that make it again, for copies and pickles.
    fn __getnewargs__(&self) -> (&str, &str) {
        (&self.text, &self.title)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let title = quoted(py, &self.title)?;
        Ok(format!("Document(title={title}, {} characters)", self.text.chars().count()))
    }
}

/// The documents of a file or folder: text, Markdown, HTML, PDF, DOCX and JSONL. Files of a folder that cannot be read are told as warnings of
/// Python, and the others are read all the same; a file given by name that cannot be read raises OSError or RefrainError.
#[pyfunction]
pub(crate) fn read(py: Python<'_>, path: PathBuf) -> PyResult<Vec<Document>> {
    let Files { found, mut failures, .. } = py.detach(|| refrain::documents::files(&path));
    let (mut documents, mut left) = (Vec::new(), found.into_iter());
    advance(py, || {
        let Some(file) = left.next() else { return Ok(Advance::Done) };
        let reading = refrain::documents::read_path(&file);
        documents.extend(reading.documents);
        failures.extend(reading.failures);
        Ok(Advance::Progress)
    })?;
    for failure in failures {
        if failure.path == path {
            return Err(unread(py, &failure)?);
        }
        warn(py, failure.to_string())?;
    }
    let document = |document: refrain::Document| Document { title: document.title, text: document.text };
    Ok(documents.into_iter().map(document).collect())
}

/// The exception of a file or folder that cannot be read: that of Python's own functions, if the system refuses.
fn unread(py: Python<'_>, failure: &Failure) -> PyResult<PyErr> {
    let ReadError::Io(error) = &failure.error else { return Ok(RefrainError::new_err(failure.to_string())) };
    let Some(code) = error.raw_os_error() else { return Ok(PyOSError::new_err(failure.to_string())) };
    let reason: String = py.import("os")?.call_method1("strerror", (code,))?.extract()?;
    Ok(PyOSError::new_err((code, reason, failure.path.clone().into_os_string())))
}

/// A document as it is given.
enum Given {
    Document(refrain::Document),
    Chunk(Chunk),
}

fn given(list: &Bound<'_, PyAny>) -> PyResult<Vec<Given>> {
    let is_one = list.is_instance_of::<PyString>()
        || list.is_instance_of::<Document>()
        || list.is_instance_of::<Chunk>();
    if is_one {
        return Err(PyTypeError::new_err("documents is a list of documents or texts, not one of them"));
    }
    let mut all = Vec::new();
    for item in list.try_iter()? {
        let item = item?;
        all.push(if let Ok(Document { title, text }) = item.extract() {
            Given::Document(refrain::Document { title, text })
        } else if let Ok(chunk) = item.extract() {
            Given::Chunk(chunk)
        } else if item.is_instance_of::<PyString>() {
            Given::Document(refrain::Document { title: String::new(), text: item.extract()? })
        } else {
            let found = item.get_type().name()?;
            let message = format!("a document is a refrain.Document, a refrain.Chunk or a str, not {found}");
            return Err(PyTypeError::new_err(message));
        });
    }
    Ok(all)
}

/// Documents of an iterable of documents and texts, without those whose text is blank, as files without text give none.
pub(crate) fn documents(list: &Bound<'_, PyAny>) -> PyResult<Vec<refrain::Document>> {
    let document = |given| match given {
        Given::Document(document) => Ok(document),
        Given::Chunk(_) => Err(PyTypeError::new_err("a chunk is prefilled already: documents are ingested")),
    };
    let mut documents = given(list)?.into_iter().map(document).collect::<PyResult<Vec<_>>>()?;
    documents.retain(|document| !document.text.trim().is_empty());
    Ok(documents)
}

/// Cuts documents into chunks, one after the other; a signal ends it between two of them.
pub(crate) fn cut(
    py: Python<'_>,
    engine: &refrain::Engine,
    documents: &[refrain::Document],
) -> PyResult<Vec<PromptChunk>> {
    let (mut chunks, mut left) = (Vec::new(), documents.iter().enumerate());
    advance(py, || {
        let Some((index, document)) = left.next() else { return Ok(Advance::Done) };
        let cut = engine.chunks(std::slice::from_ref(document))?;
        chunks.extend(cut.into_iter().map(|chunk| PromptChunk { document: index, ..chunk }));
        Ok(Advance::Progress)
    })?;
    Ok(chunks)
}

/// The chunks of an iterable of documents, texts and chunks, in its order. Chunks of one document that stand together are of one document of
/// the prompt.
pub(crate) fn prompt_chunks(
    py: Python<'_>,
    opened: &Opened,
    list: Option<&Bound<'_, PyAny>>,
) -> PyResult<Vec<PromptChunk>> {
    let Some(list) = list else { return Ok(Vec::new()) };
    let (mut chunks, mut next, mut last): (Vec<PromptChunk>, usize, Option<String>) = (Vec::new(), 0, None);
    for given in given(list)? {
        match given {
            Given::Document(document) => {
                let cut = cut(py, &opened.engine, &[document])?;
                chunks.extend(cut.into_iter().map(|chunk| PromptChunk { document: next, ..chunk }));
                (next, last) = (next + 1, None);
            }
            Given::Chunk(Chunk { document, chunk, tokenizer, .. }) => {
                if py.detach(|| opened.tokenizer()).map_err(raise)? != tokenizer {
                    return Err(of_another_tokenizer(py, &chunk)?);
                }
                next += usize::from(last.as_ref() != Some(&document));
                chunks.push(PromptChunk { document: next - 1, ..chunk });
                last = Some(document);
            }
        }
    }
    Ok(chunks)
}

fn of_another_tokenizer(py: Python<'_>, chunk: &PromptChunk) -> PyResult<PyErr> {
    let label = quoted(py, &chunk.label())?;
    Ok(PyValueError::new_err(format!(
        "the chunk {label} is of an engine with another tokenizer: give a chunk that this engine has found, or its text"
    )))
}
