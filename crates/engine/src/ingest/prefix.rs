//! The prefix: tokens that stand before every chunk while it is prefilled, and whose own rows are dropped.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use super::chunk_prefill::IsolatedRun;
use super::prefilled_prefix::{LayerKv, PrefilledPrefix};
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
    /// The system part and, behind it, each of several texts: chunks are the mean of these prefills. A chunk that comes first in a
    /// prompt is kept behind the system part alone as well, where it is exact.
    Averaged,
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
            "averaged" => Ok(Prefix::Averaged),
            _ => match text.strip_prefix("text:") {
                Some(path) if !path.is_empty() => Ok(Prefix::Text(path.into())),
                _ => Err(format!("unknown prefix `{text}`: use none, bos, system, averaged or text:FILE")),
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
            Prefix::Averaged => f.write_str("averaged"),
            Prefix::Text(path) => write!(f, "text:{}", path.display()),
        }
    }
}

impl Engine {
    /// The system part of prompts that have `around` around their documents.
    ///
    /// # Errors
    /// If the chat template or tokenizer refuses a text.
    pub fn system_part(&self, around: &Instructions) -> Result<Vec<u32>> {
        let document = PromptChunk::whole(0, "", vec![0]);
        self.prompt_of_chunks(vec![document], "?", around).map(|prompt| prompt.system)
    }

    /// [`Engine::behind`] the tokens of a choice; `system` gives the system part of the prompts to come, and is called where the choice
    /// needs it.
    ///
    /// # Errors
    /// If a file cannot be read, the tokenizer refuses a text, or the prefix takes more than half of the model's context; those of `system`.
    pub fn with_prefix(&self, prefix: &Prefix, system: impl FnOnce() -> Result<Vec<u32>>) -> Result<Engine> {
        let bos: Vec<u32> = self.tokenizer().bos().into_iter().collect();
        match prefix {
            Prefix::None => self.behind(&[]),
            Prefix::Bos if bos.is_empty() => {
                let first: Vec<u32> = system()?.into_iter().take(1).collect();
                self.behind(&first)
            }
            Prefix::Bos => self.behind(&bos),
            Prefix::System => self.behind(&system()?),
            Prefix::Averaged => self.behind(&system()?)?.averaging(),
            Prefix::Text(path) => {
                let fail = |error: std::io::Error| Error::PrefixText {
                    path: path.clone(),
                    reason: error.to_string(),
                };
                let text = std::fs::read_to_string(path).map_err(fail)?;
                self.behind(&[bos, self.tokenize(&text)?].concat())
            }
        }
    }

    /// An engine that shares everything with this one, whose chunks are prefilled behind `prefix` (BOS included, where the model has
    /// one); they have nothing to do with chunks prefilled behind another. The prefix is prefilled once, with the first chunk.
    ///
    /// # Errors
    /// If the prefix takes more than half of the model's context.
    pub fn behind(&self, prefix: &[u32]) -> Result<Engine> {
        if prefix.is_empty() || self.tokenizer().bos().is_some_and(|bos| prefix == [bos]) {
            return Ok(self.with_prefixes(None, None, self.settings().clone()));
        }
        let settings = self.settings_behind(prefix.len())?;
        Ok(self.with_prefixes(Some(Arc::new(PrefilledPrefix::new(prefix.to_vec()))), None, settings))
    }

    /// An engine that shares everything with this one, whose chunks are the mean of prefills behind its prefix and each of several
    /// texts, but for chunks right behind that prefix.
    ///
    /// # Errors
    /// If the longest of these prefixes takes more than half of the model's context.
    fn averaging(&self) -> Result<Engine> {
        let averaged = self.averaged_prefixes()?;
        let settings = self.settings_behind(averaged.longest())?;
        Ok(self.with_prefixes(self.prefix().cloned(), Some(Arc::new(averaged)), settings))
    }

    /// Settings that leave room for a prefix of so many tokens before each chunk.
    fn settings_behind(&self, prefix: usize) -> Result<Settings> {
        let context = self.decoder().config().context;
        if prefix > context / 2 {
            return Err(Error::PrefixTooLong { prefix, context });
        }
        let chunk_tokens = self.settings().chunk_tokens.min(context - 1 - prefix);
        Ok(Settings { chunk_tokens, ..self.settings().clone() })
    }

    /// Keys before RoPE and values of each layer, of tokens from position 0 on.
    pub(crate) fn prefilled(&self, tokens: &[u32]) -> Result<Vec<LayerKv>> {
        let mut run = IsolatedRun::start(self, tokens, 0, None, self.settings().kv)?;
        while !run.advance(&[])? {}
        Ok(run.finish(self).0)
    }

    /// Tokens that stand before every chunk while it is prefilled.
    pub fn before_chunks(&self) -> Vec<u32> {
        match self.prefix() {
            Some(prefix) => prefix.tokens.clone(),
            None => self.tokenizer().bos().into_iter().collect(),
        }
    }
}
