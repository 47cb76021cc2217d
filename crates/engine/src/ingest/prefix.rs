//! The prefix: tokens that stand before every chunk while it is prefilled, and whose own rows are dropped.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use refrain_store::ChunkId;

use super::chunk_prefill::IsolatedRun;
use super::prefilled_prefix::PrefilledPrefix;
use crate::engine::{Engine, Settings};
use crate::prompt::{Instructions, PromptChunk};
use crate::{Error, Result};

/// The choice of a [prefix](Engine::behind).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Prefix {
    /// Nothing but BOS, where the model has one.
    #[default]
    None,
    /// BOS, or, for a model without, the first token of its chat template. It takes the attention that any first token draws.
    Bos,
    /// The system part of the prompts to come. The first chunk of such a prompt is then exact.
    System,
    /// The text of a file.
    Text(PathBuf),
}

impl FromStr for Prefix {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Prefix, String> {
        match text {
            "none" => Ok(Prefix::None),
            "bos" => Ok(Prefix::Bos),
            "system" => Ok(Prefix::System),
            _ => match text.strip_prefix("text:") {
                Some(path) if !path.is_empty() => Ok(Prefix::Text(path.into())),
                _ => Err(format!("unknown prefix `{text}`: use none, bos, system or text:FILE")),
            },
        }
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Prefix::None => f.write_str("none"),
            Prefix::Bos => f.write_str("bos"),
            Prefix::System => f.write_str("system"),
            Prefix::Text(path) => write!(f, "text:{}", path.display()),
        }
    }
}

impl Engine {
    /// Tokens of a prefix; `around` is what prompts will have around their documents.
    ///
    /// # Errors
    /// If a file cannot be read, or the chat template or tokenizer refuses a text.
    pub fn prefix_tokens(&self, prefix: &Prefix, around: &Instructions) -> Result<Vec<u32>> {
        let bos = || self.tokenizer().bos().into_iter();
        let system = || {
            let document = PromptChunk::whole(0, "", vec![0]);
            self.prompt_of_chunks(vec![document], "?", around).map(|prompt| prompt.system)
        };
        Ok(match prefix {
            Prefix::None => Vec::new(),
            Prefix::Bos if bos().next().is_some() => bos().collect(),
            Prefix::Bos => system()?.into_iter().take(1).collect(),
            Prefix::System => system()?,
            Prefix::Text(path) => {
                let fail =
                    |error: std::io::Error| Error::Document { path: path.clone(), reason: error.to_string() };
                bos().chain(self.tokenize(&std::fs::read_to_string(path).map_err(fail)?)?).collect()
            }
        })
    }

    /// An engine that shares everything with this one, whose chunks are prefilled behind `prefix` (BOS included, where the model has
    /// one); they have nothing to do with chunks prefilled behind another. The prefix is prefilled here, once.
    ///
    /// # Errors
    /// If a token has no embedding, or the prefix takes more than half of the model's context.
    pub fn behind(&self, prefix: &[u32]) -> Result<Engine> {
        if prefix.is_empty() || self.tokenizer().bos().is_some_and(|bos| prefix == [bos]) {
            return Ok(self.with_prefix(None, self.settings().clone()));
        }
        let context = self.decoder().config().context;
        if prefix.len() > context / 2 {
            return Err(Error::PrefixTooLong { prefix: prefix.len(), context });
        }
        let prefilled = self.prefilled(prefix)?;
        let chunk_tokens = self.settings().chunk_tokens.min(context - 1 - prefix.len());
        let settings = Settings { chunk_tokens, ..self.settings().clone() };
        Ok(self.with_prefix(Some(Arc::new(prefilled)), settings))
    }

    /// Tokens with their keys and values, from position 0.
    pub(crate) fn prefilled(&self, tokens: &[u32]) -> Result<PrefilledPrefix> {
        let mut run = IsolatedRun::start(self, tokens, 0, None, self.settings().kv)?;
        while !run.advance(&[])? {}
        Ok(PrefilledPrefix {
            tokens: tokens.to_vec(),
            digest: ChunkId::digest(tokens),
            layers: run.finish(self).0,
        })
    }

    /// Tokens that stand before every chunk while it is prefilled.
    pub fn before_chunks(&self) -> Vec<u32> {
        match self.prefix() {
            Some(prefix) => prefix.tokens.clone(),
            None => self.tokenizer().bos().into_iter().collect(),
        }
    }
}
