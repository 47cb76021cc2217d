//! Values of JSON between Rust and Python.

use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::error::RefrainError;

/// A value as dictionaries, lists, strings and numbers.
pub(crate) fn to_python<'py>(py: Python<'py>, value: &impl serde::Serialize) -> PyResult<Bound<'py, PyAny>> {
    let text = serde_json::to_string(value).map_err(|error| RefrainError::new_err(error.to_string()))?;
    py.import("json")?.call_method1("loads", (PyString::new(py, &text),))
}

/// The JSON of dictionaries, lists, strings and numbers.
pub(crate) fn to_json(value: &Bound<'_, PyAny>) -> PyResult<serde_json::Value> {
    let text: String = value.py().import("json")?.call_method1("dumps", (value,))?.extract()?;
    serde_json::from_str(&text).map_err(|error| RefrainError::new_err(error.to_string()))
}
