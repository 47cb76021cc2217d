//! Errors as Python's exceptions.

use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;
use refrain::{Address, KnownModel};

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
create_exception!(
    refrain,
    PromptTooLong,
    RefrainError,
    "A prompt that does not fit the model's context with its answer: `prompt_tokens` and `max_tokens` are more than `context`."
);

/// The exception of an error, with its remedy in a line of its own.
pub(crate) fn raise(error: impl Into<refrain::Error>) -> PyErr {
    let error = error.into();
    let text = match hint(&error) {
        Some(hint) => format!("{error}\nhint: {hint}"),
        None => error.to_string(),
    };
    match error {
        refrain::Error::UnknownModel { .. }
        | refrain::Error::NotFetched { .. }
        | refrain::Error::Address { .. } => ModelNotFound::new_err(text),
        // The message names options of the program, and keywords have no dashes.
        refrain::Error::Engine(refrain::engine::Error::DeviceMemory { .. }) => {
            RefrainError::new_err(text.replace("--max-tokens", "max_tokens").replace("--", ""))
        }
        refrain::Error::Engine(
            refrain::engine::Error::Sampling { .. } | refrain::engine::Error::LogitBias { .. },
        ) => PyValueError::new_err(text),
        refrain::Error::Engine(refrain::engine::Error::PromptTooLong { prompt, answer, context }) => {
            Python::attach(|py| {
                let raised = PromptTooLong::new_err(text);
                let values = [("prompt_tokens", prompt), ("max_tokens", answer), ("context", context)];
                let set = |(name, value)| raised.value(py).setattr(name, value);
                values.into_iter().try_for_each(set).err().unwrap_or(raised)
            })
        }
        _ => RefrainError::new_err(text),
    }
}

/// Tells something as a warning of Python, which may be an exception there.
pub(crate) fn warn(py: Python<'_>, message: String) -> PyResult<()> {
    py.import("warnings")?.call_method1("warn", (message,))?;
    Ok(())
}

/// The remedy in words of this module, which may be there without the program.
fn hint(error: &refrain::Error) -> Option<String> {
    match error {
        refrain::Error::NotFetched { name, place } => Some(fetch(name, place)),
        refrain::Error::Engine(refrain::engine::Error::Device { .. }) => {
            Some("device=\"cpu\" needs neither a GPU nor a driver".to_owned())
        }
        other => other.hint(),
    }
}

/// The commands that fetch a model.
fn fetch(name: &str, place: &str) -> String {
    let known = KnownModel::named(name);
    let address = known.map_or_else(|| name.to_owned(), KnownModel::address);
    let pull = format!("refrain pull {name} (Refrain's program)");
    let Ok(Some(Address { repository, revision, file, .. })) = Address::parse(&address) else {
        return format!("run: {pull}");
    };
    let file = file.map(|file| format!(" {file}")).unwrap_or_default();
    let revision = if revision == "main" { String::new() } else { format!(" --revision {revision}") };
    let folder = known.map(|_| format!(" --local-dir {place}")).unwrap_or_default();
    format!("run: hf download {repository}{file}{revision}{folder} (package huggingface_hub), or: {pull}")
}
