//! The texts that a completion continues.

use refrain::engine::{Engine, Parts, Prompt};
use serde::Deserialize;
use utoipa::ToSchema;

use crate::api_error::{ApiError, Result};

/// A text or several, or the ids of their tokens.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(
    untagged,
    expecting = "prompt takes a text, a list of texts, a list of token ids or a list of such lists"
)]
pub(super) enum Prompts {
    Text(String),
    Texts(Vec<String>),
    Ids(Vec<u32>),
    ManyIds(Vec<Vec<u32>>),
}

/// A text to continue.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Continued<'a> {
    Text(&'a str),
    /// The ids of its tokens, to which nothing is added.
    Ids(&'a [u32]),
}

impl Prompts {
    /// Each text.
    pub(super) fn texts(&self) -> Vec<Continued<'_>> {
        match self {
            Prompts::Text(text) => vec![Continued::Text(text)],
            Prompts::Texts(texts) => texts.iter().map(|text| Continued::Text(text)).collect(),
            Prompts::Ids(ids) => vec![Continued::Ids(ids)],
            Prompts::ManyIds(many) => many.iter().map(|ids| Continued::Ids(ids)).collect(),
        }
    }
}

impl Continued<'_> {
    pub(super) fn is_empty(&self) -> bool {
        match self {
            Continued::Text(text) => text.is_empty(),
            Continued::Ids(ids) => ids.is_empty(),
        }
    }

    /// Bytes to tokenise.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Continued::Text(text) => text.len(),
            Continued::Ids(_) => 0,
        }
    }

    /// The prompt of the text, without documents.
    ///
    /// # Errors
    /// If the text cannot be tokenised, or there is no token of an id.
    pub(crate) fn compose(self, engine: &Engine) -> Result<Prompt> {
        let ids = match self {
            Continued::Text(question) => return Ok(engine.compose(&Parts { question, ..Parts::default() })?),
            Continued::Ids(ids) => ids,
        };
        let vocab = engine.tokenizer().vocab_size().min(engine.decoder().config().vocab);
        if let Some(id) = ids.iter().find(|id| **id as usize >= vocab) {
            let message = format!("the model has {vocab} tokens, and none of id {id}");
            return Err(ApiError::field("prompt", message));
        }
        // Documents stand behind the token that prompts begin with.
        let begins = ids.len() > 1 && engine.tokenizer().bos() == Some(ids[0]);
        let (system, question) = ids.split_at(usize::from(begins));
        let (system, question) = (system.to_vec(), question.to_vec());
        Ok(Prompt { system, system_reusable: true, chunks: Vec::new(), question })
    }

    /// The text, of ids for which there are tokens.
    pub(crate) fn text(self, engine: &Engine) -> String {
        match self {
            Continued::Text(text) => text.to_owned(),
            Continued::Ids(ids) => engine.tokenizer().decode(ids, false),
        }
    }
}
