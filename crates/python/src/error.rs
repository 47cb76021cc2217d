//! Errors as Python's exceptions.

use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

create_exception!(
    refrain,
    RefrainError,
    PyException,
    "An error of opening a model, of ingesting or of answering."
);
create_exception!(
    refrain,
    ModelNotFound,
    RefrainError,
    "A model that is not there: unknown, or not fetched yet."
);

/// The exception of an error, with its remedy in a line of its own.
pub(crate) fn raise(error: impl Into<refrain::Error>) -> PyErr {
    let error = error.into();
    let text = match error.hint() {
        Some(hint) => format!("{error}\nhint: {hint}"),
        None => error.to_string(),
    };
    match error {
        refrain::Error::UnknownModel { .. }
        | refrain::Error::NotFetched { .. }
        | refrain::Error::Address { .. } => ModelNotFound::new_err(text),
        _ => RefrainError::new_err(text),
    }
}
