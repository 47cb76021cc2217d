//! Values of JSON between Rust and Python.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyString};

use crate::error::RefrainError;

/// A value as dictionaries, lists, strings and numbers.
pub(crate) fn to_python<'py>(py: Python<'py>, value: &impl serde::Serialize) -> PyResult<Bound<'py, PyAny>> {
    from_json_text(py, &json_text(value)?)
}

/// The JSON text of a value.
pub(crate) fn json_text(value: &impl serde::Serialize) -> PyResult<String> {
    serde_json::to_string(value).map_err(|error| RefrainError::new_err(error.to_string()))
}

/// A JSON text as dictionaries, lists, strings and numbers.
pub(crate) fn from_json_text<'py>(py: Python<'py>, text: &str) -> PyResult<Bound<'py, PyAny>> {
    py.import("json")?.call_method1("loads", (PyString::new(py, text),))
}

/// The JSON of dictionaries, lists, strings and numbers. Numbers that JSON does not have, such as NaN, are refused.
pub(crate) fn to_json(value: &Bound<'_, PyAny>) -> PyResult<serde_json::Value> {
    let options = [("allow_nan", false)].into_py_dict(value.py())?;
    let text: String =
        value.py().import("json")?.call_method("dumps", (value,), Some(&options))?.extract()?;
    serde_json::from_str(&text).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// A text as Python writes it in a program.
pub(crate) fn quoted(py: Python<'_>, text: &str) -> PyResult<String> {
    Ok(PyString::new(py, text).repr()?.to_string())
}
