//! Documents: given as they are, or read from files.

use std::path::PathBuf;

use pyo3::exceptions::{PyFileNotFoundError, PyTypeError};
use pyo3::prelude::*;

/// A document: its title, which may be empty, and its text.
#[pyclass(frozen, eq, from_py_object, module = "refrain")]
#[derive(Clone, PartialEq)]
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

    fn __repr__(&self) -> String {
        format!("Document(title={:?}, {} characters)", self.title, self.text.chars().count())
    }
}

/// The documents of a file or folder: text, Markdown, HTML, PDF, DOCX and JSONL. Those that cannot be read are told as a warning of
/// Python, and the others are read all the same.
#[pyfunction]
pub(crate) fn read(py: Python<'_>, path: PathBuf) -> PyResult<Vec<Document>> {
    if !path.exists() {
        return Err(PyFileNotFoundError::new_err(format!("there is no file or folder {}", path.display())));
    }
    let reading = py.detach(|| refrain::documents::read_path(&path));
    let warnings = py.import("warnings")?;
    for failure in reading.failures {
        warnings.call_method1("warn", (failure.to_string(),))?;
    }
    let document = |document: refrain::Document| Document { title: document.title, text: document.text };
    Ok(reading.documents.into_iter().map(document).collect())
}

/// Documents of an iterable of documents and texts.
pub(crate) fn documents(given: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<refrain::Document>> {
    let Some(given) = given else { return Ok(Vec::new()) };
    if given.extract::<String>().is_ok() || given.extract::<Document>().is_ok() {
        return Err(PyTypeError::new_err("documents is a list of documents or texts, not one of them"));
    }
    let mut documents = Vec::new();
    for item in given.try_iter()? {
        let item = item?;
        documents.push(if let Ok(Document { title, text }) = item.extract() {
            refrain::Document { title, text }
        } else if let Ok(text) = item.extract::<String>() {
            refrain::Document { title: String::new(), text }
        } else {
            let found = item.get_type().name()?;
            return Err(PyTypeError::new_err(format!(
                "a document is a refrain.Document or a str, not {found}"
            )));
        });
    }
    Ok(documents)
}
