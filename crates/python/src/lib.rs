//! The Python module `refrain`: an engine, its answers, and the documents that it reads.
//!
//! Whatever computes or reads files does so without the interpreter's lock, so that other threads of Python go on.

mod answer;
mod chunk;
mod convert;
mod document;
mod engine;
mod error;
mod ingest;
mod keywords;
mod opened;
mod process;
mod question;
mod signals;

use pyo3::prelude::*;
use serde_json::json;

/// Answers from documents whose KV caches are kept and reused.
#[pymodule(name = "refrain")]
mod module {
    use super::*;

    #[pymodule_export]
    use super::answer::{Answer, Token, TokenLogprobs, TokenStream};
    #[pymodule_export]
    use super::chunk::Chunk;
    #[pymodule_export]
    use super::document::{Document, read};
    #[pymodule_export]
    use super::engine::Engine;
    #[pymodule_export]
    use super::error::{ModelNotFound, PromptTooLong, RefrainError};
    #[pymodule_export]
    use super::{methods, models, policies};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}

/// The models that are known by name.
#[pyfunction]
fn models(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    let known = refrain::KNOWN.iter().map(|known| {
        json!({
            "name": known.name,
            "title": known.title,
            "quantization": known.quantization,
            "size": known.size,
            "context": known.context,
            "licence": known.licence,
            "method": known.method,
            "prefix": known.prefix,
            "address": known.address(),
        })
    });
    convert::to_python(py, &known.collect::<Vec<_>>())
}

/// The fusion methods with their options.
#[pyfunction]
fn methods(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    let entries = refrain::fusion::METHODS.entries.iter().map(|entry| entry.to_json());
    convert::to_python(py, &entries.collect::<Vec<_>>())
}

/// The eviction policies with their options.
#[pyfunction]
fn policies(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    let entries = refrain::eviction::POLICIES.entries.iter().map(|entry| entry.to_json());
    convert::to_python(py, &entries.collect::<Vec<_>>())
}
