//! Answers, in one piece and token by token.

use std::hash::{Hash, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use refrain::engine::Advance;

use crate::convert::{from_json_text, json_text, quoted, to_python};
use crate::process::{Process, free_detached};
use crate::signals::advance;

/// Log probabilities of a token, before temperature and all other sampling options.
#[pyclass(frozen, get_all, eq, from_py_object, module = "refrain")]
#[derive(Clone, PartialEq)]
pub(crate) struct TokenLogprobs {
    /// Log probability of the token.
    logprob: f32,
    /// The likeliest tokens with theirs, most likely first; as many as were asked for.
    top: Vec<(u32, f32)>,
}

#[pymethods]
impl TokenLogprobs {
    #[new]
    fn new(logprob: f32, top: Vec<(u32, f32)>) -> TokenLogprobs {
        TokenLogprobs { logprob, top }
    }

    /// The arguments that make it again, for copies and pickles.
    fn __getnewargs__(&self) -> (f32, Vec<(u32, f32)>) {
        (self.logprob, self.top.clone())
    }

    fn __repr__(&self) -> String {
        format!("TokenLogprobs(logprob={:.4}, top={:?})", self.logprob, self.top)
    }
}

/// The values of an answer that a pickle keeps, which are all of it: text, tokens, log probabilities, the reason why it ended, statistics in JSON and seed.
type Pickled = (String, Vec<u32>, Vec<TokenLogprobs>, String, String, Option<u64>);

/// An answer.
#[pyclass(frozen, eq, hash, weakref, module = "refrain")]
#[derive(Clone, PartialEq)]
pub(crate) struct Answer {
    /// The text.
    #[pyo3(get)]
    text: String,
    /// The token ids, the end token included.
    #[pyo3(get)]
    tokens: Vec<u32>,
    /// Log probabilities of its tokens, but for the one that ended it; empty unless `logprobs` asked for them.
    #[pyo3(get)]
    logprobs: Vec<TokenLogprobs>,
    /// Why it ended: `stop`, `length`, `cancelled` or `failed`.
    #[pyo3(get)]
    finish_reason: String,
    /// The statistics in JSON.
    stats: String,
    /// The seed with which its tokens were drawn; none of a greedy answer. Asked with this seed again, a question has this answer.
    #[pyo3(get)]
    seed: Option<u64>,
}

/// Two answers may differ and have one hash, as those of one text that took different times.
impl Hash for Answer {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (&self.text, &self.tokens).hash(state);
    }
}

impl Answer {
    fn new(py: Python<'_>, ended: Ended) -> PyResult<Answer> {
        let Ended { answer, logprobs, seed } = ended;
        let finish_reason = to_python(py, &answer.finish)?.extract()?;
        let stats = json_text(&answer.stats)?;
        Ok(Answer { text: answer.text, tokens: answer.tokens, logprobs, finish_reason, stats, seed })
    }
}

#[pymethods]
impl Answer {
    /// Counts and times: `prompt_tokens`, `cached_tokens`, `recomputed_tokens`, `charged_ratio`, `ttft`, `tpot` and more.
    #[getter]
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        from_json_text(py, &self.stats)
    }

    /// The function and the arguments that make it again, for copies and pickles.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, Pickled)> {
        let Answer { text, tokens, logprobs, finish_reason, stats, seed } = slf.get().clone();
        let restore = slf.get_type().getattr("_restore")?;
        Ok((restore, (text, tokens, logprobs, finish_reason, stats, seed)))
    }

    #[staticmethod]
    fn _restore(
        text: String,
        tokens: Vec<u32>,
        logprobs: Vec<TokenLogprobs>,
        finish_reason: String,
        stats: String,
        seed: Option<u64>,
    ) -> Answer {
        Answer { text, tokens, logprobs, finish_reason, stats, seed }
    }

    fn __str__(&self) -> &str {
        &self.text
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let text = quoted(py, &self.text)?;
        Ok(format!("Answer(text={text}, {} tokens)", self.tokens.len()))
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

/// An answer on its way: an iterator over its tokens, each computed when it is asked for. `close`, or the end of a `with` block, ends the work.
#[pyclass(frozen, weakref, module = "refrain")]
pub(crate) struct TokenStream {
    running: Mutex<Running>,
    process: Process,
}

/// An answer on its way, and the answer once it is there.
struct Running {
    /// None once it has ended or is closed.
    stream: Option<refrain::TokenStream>,
    logprobs: Vec<TokenLogprobs>,
    seed: Option<u64>,
    ended: Option<Ended>,
}

/// An answer that is there, with log probabilities of its tokens and its seed.
#[derive(Clone)]
struct Ended {
    answer: refrain::Answer,
    logprobs: Vec<TokenLogprobs>,
    seed: Option<u64>,
}

impl Running {
    /// Does one step towards the next token. Nothing is to be computed for it once all is done.
    fn advance(&mut self) -> refrain::Result<Advance> {
        self.stream.as_mut().map_or(Ok(Advance::Done), |stream| Ok(stream.advance()?))
    }

    /// The next token, once nothing is to be computed for it; none at the end.
    fn take(&mut self) -> refrain::Result<Option<Token>> {
        let Some(stream) = &mut self.stream else { return Ok(None) };
        let Some(token) = stream.next().transpose()? else {
            let logprobs = std::mem::take(&mut self.logprobs);
            let seed = self.seed;
            self.ended = stream.answer().cloned().map(|answer| Ended { answer, logprobs, seed });
            self.stream = None;
            return Ok(None);
        };
        let logprobs = token.logprobs.map(|of| TokenLogprobs { logprob: of.logprob, top: of.top });
        self.logprobs.extend(logprobs.clone());
        Ok(Some(Token { text: token.text, id: token.id, logprobs }))
    }
}

impl TokenStream {
    /// A stream whose tokens are drawn with `seed`, if they are not chosen greedily.
    pub(crate) fn new(stream: refrain::TokenStream, seed: Option<u64>) -> TokenStream {
        let running = Running { stream: Some(stream), logprobs: Vec::new(), seed, ended: None };
        TokenStream { running: Mutex::new(running), process: Process::current() }
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The whole answer. A signal ends it after a step: a layer of the prompt or a token.
    pub(crate) fn finish(&self, py: Python<'_>) -> PyResult<Option<Answer>> {
        advance(py, || {
            let mut running = self.running();
            let step = running.advance()?;
            let is_token = step == Advance::Done && running.take()?.is_some();
            Ok(if is_token { Advance::Progress } else { step })
        })?;
        self.answer(py)
    }
}

impl Drop for TokenStream {
    fn drop(&mut self) {
        let stream = self.running.get_mut().unwrap_or_else(PoisonError::into_inner).stream.take();
        if self.process.is_current() {
            free_detached(stream);
        } else {
            std::mem::forget(stream);
        }
    }
}

#[pymethods]
impl TokenStream {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Token>> {
        self.process.check()?;
        let mut next = None;
        advance(py, || {
            let mut running = self.running();
            let step = running.advance()?;
            if step == Advance::Done {
                next = running.take()?;
            }
            Ok(step)
        })?;
        Ok(next)
    }

    /// The answer with its statistics, once the iterator has ended; none before.
    #[getter]
    fn answer(&self, py: Python<'_>) -> PyResult<Option<Answer>> {
        self.process.check()?;
        let ended = py.detach(|| self.running().ended.clone());
        ended.map(|ended| Answer::new(py, ended)).transpose()
    }

    /// Ends the work and frees its memory; the iterator has ended then.
    fn close(&self, py: Python<'_>) {
        // In a forked process another thread may seem to hold the stream for ever.
        if self.process.is_current() {
            py.detach(|| self.running().stream = None);
        }
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyTuple>) {
        self.close(py);
    }
}
