//! Answers, in one piece and token by token.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use refrain::engine::Advance;

use crate::convert::{quoted, to_python};
use crate::signals::advance;

/// Log probabilities of a token, before temperature and all other sampling options.
#[pyclass(frozen, get_all, eq, module = "refrain")]
#[derive(Clone, PartialEq)]
pub(crate) struct TokenLogprobs {
    /// Log probability of the token.
    logprob: f32,
    /// The likeliest tokens with theirs, most likely first; as many as were asked for.
    top: Vec<(u32, f32)>,
}

#[pymethods]
impl TokenLogprobs {
    fn __repr__(&self) -> String {
        format!("TokenLogprobs(logprob={:.4}, top={:?})", self.logprob, self.top)
    }
}

/// An answer.
#[pyclass(frozen, module = "refrain")]
#[derive(Clone)]
pub(crate) struct Answer {
    answer: refrain::Answer,
    logprobs: Vec<TokenLogprobs>,
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

    /// Log probabilities of its tokens, but for the one that ended it; empty unless `logprobs` asked for them.
    #[getter]
    fn logprobs(&self) -> Vec<TokenLogprobs> {
        self.logprobs.clone()
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

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let text = quoted(py, &self.answer.text)?;
        Ok(format!("Answer(text={text}, {} tokens)", self.answer.tokens.len()))
    }
}

/// A token of a stream, or the text that was held back until the end.
#[pyclass(frozen, get_all, module = "refrain")]
pub(crate) struct Token {
    /// Text that can be shown now; often empty, where characters or stop strings are not complete.
    text: String,
    /// The token; none with the text that was held back until the end.
    id: Option<u32>,
    /// Its log probabilities, if `logprobs` asked for them.
    logprobs: Option<TokenLogprobs>,
}

#[pymethods]
impl Token {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let text = quoted(py, &self.text)?;
        Ok(match self.id {
            Some(id) => format!("Token(text={text}, id={id})"),
            None => format!("Token(text={text})"),
        })
    }
}

/// An answer on its way: an iterator over its tokens, each computed when it is asked for.
#[pyclass(frozen, module = "refrain")]
pub(crate) struct TokenStream {
    running: Mutex<Running>,
}

/// An answer on its way, and the answer once it is there.
struct Running {
    /// None once it has ended or is closed.
    stream: Option<refrain::TokenStream>,
    logprobs: Vec<TokenLogprobs>,
    answer: Option<Answer>,
}

impl Running {
    /// The next token, once nothing is to be computed for it; none at the end.
    fn take(&mut self) -> refrain::Result<Option<Token>> {
        let Some(stream) = &mut self.stream else { return Ok(None) };
        let Some(token) = stream.next().transpose()? else {
            let logprobs = std::mem::take(&mut self.logprobs);
            self.answer = stream.answer().cloned().map(|answer| Answer { answer, logprobs });
            self.stream = None;
            return Ok(None);
        };
        let logprobs = token.logprobs.map(|of| TokenLogprobs { logprob: of.logprob, top: of.top });
        self.logprobs.extend(logprobs.clone());
        Ok(Some(Token { text: token.text, id: token.id, logprobs }))
    }
}

impl TokenStream {
    pub(crate) fn new(stream: refrain::TokenStream) -> TokenStream {
        let running = Running { stream: Some(stream), logprobs: Vec::new(), answer: None };
        TokenStream { running: Mutex::new(running) }
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The whole answer. A signal ends it after a step: a layer of the prompt or a token.
    pub(crate) fn finish(&self, py: Python<'_>) -> PyResult<Option<Answer>> {
        while self.__next__(py)?.is_some() {}
        Ok(self.running().answer.take())
    }
}

#[pymethods]
impl TokenStream {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Token>> {
        let mut next = None;
        advance(py, || {
            let mut running = self.running();
            let step = running.stream.as_mut().map_or(Ok(Advance::Done), refrain::TokenStream::advance)?;
            if step == Advance::Done {
                next = running.take()?;
            }
            Ok(step)
        })?;
        Ok(next)
    }

    /// The answer with its statistics, once the iterator has ended; none before.
    #[getter]
    fn answer(&self, py: Python<'_>) -> Option<Answer> {
        py.detach(|| self.running().answer.clone())
    }

    /// Ends the work and frees its memory; the iterator has ended then.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.running().stream = None);
    }
}
