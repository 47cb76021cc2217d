//! Answers, in one piece and token by token.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;

use crate::convert::to_python;
use crate::error::raise;

/// An answer.
#[pyclass(frozen, module = "refrain")]
pub(crate) struct Answer {
    answer: refrain::Answer,
}

impl Answer {
    pub(crate) fn new(answer: refrain::Answer) -> Answer {
        Answer { answer }
    }
}

#[pymethods]
impl Answer {
    /// The text.
    #[getter]
    fn text(&self) -> &str {
        &self.answer.text
    }

    /// The token ids, the end token included.
    #[getter]
    fn tokens(&self) -> Vec<u32> {
        self.answer.tokens.clone()
    }

    /// Why it ended: `stop`, `length`, `cancelled` or `failed`.
    #[getter]
    fn finish_reason<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &self.answer.finish)
    }

    /// Counts and times: `prompt_tokens`, `cached_tokens`, `recomputed_tokens`, `charged_ratio`, `ttft`, `tpot` and more.
    #[getter]
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &self.answer.stats)
    }

    fn __str__(&self) -> &str {
        &self.answer.text
    }

    fn __repr__(&self) -> String {
        format!("Answer(text={:?}, {} tokens)", self.answer.text, self.answer.tokens.len())
    }
}

/// A token of a stream, or the text that was held back until the end.
#[pyclass(frozen, get_all, module = "refrain")]
pub(crate) struct Token {
    /// Text that can be shown now; often empty, where characters or stop strings are not complete.
    text: String,
    /// The token; none with the text that was held back until the end.
    id: Option<u32>,
}

#[pymethods]
impl Token {
    fn __repr__(&self) -> String {
        match self.id {
            Some(id) => format!("Token(text={:?}, id={id})", self.text),
            None => format!("Token(text={:?})", self.text),
        }
    }
}

/// An answer on its way: an iterator over its tokens, each computed when it is asked for.
#[pyclass(frozen, module = "refrain")]
pub(crate) struct TokenStream {
    stream: Mutex<refrain::TokenStream>,
}

impl TokenStream {
    pub(crate) fn new(stream: refrain::TokenStream) -> TokenStream {
        TokenStream { stream: Mutex::new(stream) }
    }
}

#[pymethods]
impl TokenStream {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Token>> {
        py.check_signals()?;
        let next = py.detach(|| self.stream.lock().unwrap_or_else(PoisonError::into_inner).next());
        match next {
            None => Ok(None),
            Some(token) => {
                let token = token.map_err(raise)?;
                Ok(Some(Token { text: token.text, id: token.id }))
            }
        }
    }

    /// The answer with its statistics, once the iterator has ended; none before.
    #[getter]
    fn answer(&self, py: Python<'_>) -> Option<Answer> {
        let answer =
            py.detach(|| self.stream.lock().unwrap_or_else(PoisonError::into_inner).answer().cloned());
        answer.map(Answer::new)
    }
}
