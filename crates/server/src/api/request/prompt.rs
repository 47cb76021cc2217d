//! The texts that a completion continues.

use refrain::engine::{Engine, Prompt};
use refrain::model::{Specials, Tokenizer};
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
    /// If the text cannot be tokenised, or the model has no token of an id.
    pub(crate) fn compose(self, engine: &Engine) -> Result<Prompt> {
        let mut ids = match self {
            Continued::Text(text) => text_ids(engine.tokenizer(), text, true)?,
            Continued::Ids(ids) => ids.to_vec(),
        };
        let vocab = engine.tokenizer().vocab_size().min(engine.decoder().config().vocab);
        if let Some(id) = ids.iter().find(|id| **id as usize >= vocab) {
            let message = format!("the model has {vocab} tokens, and none of id {id}");
            return Err(ApiError::field("prompt", message));
        }
        // Documents stand behind the token that prompts begin with.
        let begins = ids.len() > 1 && engine.tokenizer().bos() == Some(ids[0]);
        let question = ids.split_off(usize::from(begins));
        let (system_reusable, continues_text) = (true, true);
        Ok(Prompt { system: ids, system_reusable, question, continues_text, ..Prompt::default() })
    }

    /// The text, of ids for which there are tokens.
    pub(crate) fn text(self, engine: &Engine) -> String {
        match self {
            Continued::Text(text) => text.to_owned(),
            Continued::Ids(ids) => engine.tokenizer().decode(ids, false),
        }
    }
}

/// The ids of a text whose author writes the whole prompt: special tokens in it are recognised. With `adds_bos` they
/// begin with BOS, once, where the model uses one.
///
/// # Errors
/// If the vocabulary has no way to write a character.
pub(crate) fn text_ids(tokenizer: &Tokenizer, text: &str, adds_bos: bool) -> Result<Vec<u32>> {
    let ids = tokenizer.encode(text, Specials::Parse);
    let mut ids = ids.map_err(|error| ApiError::field("prompt", error.to_string()))?;
    if let Some(bos) = tokenizer.bos().filter(|bos| adds_bos && ids.first() != Some(bos)) {
        ids.insert(0, bos);
    }
    Ok(ids)
}
