//! Questions with the engine that they are asked of.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use refrain::Question;

use crate::answer::{Answer, TokenStream};
use crate::document::prompt_chunks;
use crate::error::{RefrainError, raise};
use crate::keywords::set_keywords;
use crate::opened::Opened;

/// Documents, method, policy and system message that a question is asked with.
pub(crate) type Given<'a, 'py> =
    (Option<&'a Bound<'py, PyAny>>, Option<String>, Option<String>, Option<String>);

/// A question with the engine that it is asked of.
pub(crate) struct Asked {
    pub(crate) opened: Arc<Opened>,
    pub(crate) question: Question,
}

impl Asked {
    pub(crate) fn new(
        py: Python<'_>,
        opened: Arc<Opened>,
        question: Question,
        (given, method, evict, system): Given<'_, '_>,
        keywords: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Asked> {
        let mut question = question.chunks(prompt_chunks(py, &opened, given)?);
        question.method = method;
        question.evict = evict;
        question.instructions.system = system.or_else(|| opened.system.clone());
        if let Some(keywords) = keywords {
            set_keywords(&mut question, keywords)?;
        }
        Ok(Asked { opened, question })
    }

    pub(crate) fn stream(self, py: Python<'_>) -> PyResult<TokenStream> {
        let Asked { opened, question } = self;
        let seed = (question.sampling.temperature > 0.0).then_some(question.sampling.seed);
        Ok(TokenStream::new(py.detach(|| question.stream(&opened.engine)).map_err(raise)?, seed))
    }

    /// The whole answer; a signal ends it after a layer or a token.
    pub(crate) fn answer(self, py: Python<'_>) -> PyResult<Answer> {
        let answer = self.stream(py)?.finish(py)?;
        answer.ok_or_else(|| RefrainError::new_err("the answer ended without a result"))
    }
}
