//! Tokenizers: text to ids and back.
//!
//! Built from a GGUF file's vocabulary or a folder's `tokenizer.json`; the work is done by the `tokenizers` crate.

mod detokenizer;
mod gguf;

pub use detokenizer::Detokenizer;

use std::path::{Path, PathBuf};

use serde_json::Value as Json;
use tokenizers::tokenizer::{Model as _, Normalizer as _, OffsetType, PreTokenizer as _};
use tokenizers::{NormalizedString, PreTokenizedString, Tokenizer as Inner};

use crate::error::{ModelError, Result};
use crate::files::ModelFiles;
use crate::template::Piece;

/// Whether special tokens written in a text are recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Specials {
    /// `<|im_end|>` is one token: for text of a chat template.
    Parse,
    /// `<|im_end|>` is ten ordinary characters: for text of users and documents.
    Plain,
}

/// Text to token ids and back.
#[derive(Debug)]
pub struct Tokenizer {
    inner: Inner,
    path: PathBuf,
    bos: Option<u32>,
}

impl Tokenizer {
    /// The tokenizer of a model's files.
    ///
    /// # Errors
    /// If it is missing, malformed or of an unsupported kind.
    pub fn open(files: &ModelFiles) -> Result<Tokenizer> {
        match (files.gguf(), files.folder()) {
            (Some(gguf), _) => gguf::read(gguf),
            (None, Some(folder)) => Tokenizer::from_folder(folder),
            (None, None) => Err(fail(files.path(), "there is no tokenizer")),
        }
    }

    /// The tokenizer of a Hugging Face folder: `tokenizer.json`, and `tokenizer_config.json` for its BOS rule.
    ///
    /// # Errors
    /// If `tokenizer.json` is missing or malformed.
    pub fn from_folder(folder: &Path) -> Result<Tokenizer> {
        let path = folder.join("tokenizer.json");
        if !path.is_file() {
            return Err(fail(&path, "the file is missing; the folder must hold the model's tokenizer.json"));
        }
        let inner = Inner::from_file(&path).map_err(|error| fail(&path, &error.to_string()))?;
        let config = read_json(&folder.join("tokenizer_config.json"))?;
        let name = special_name(&config, "bos_token");
        let named = name.and_then(|name| inner.token_to_id(&name));
        let bos = match config.get("add_bos_token").and_then(Json::as_bool) {
            Some(add) => named.filter(|_| add),
            // What the file's own template adds to an empty text begins with BOS, or there is none.
            None => {
                let empty = inner.encode_fast("", true).map_err(|error| fail(&path, &error.to_string()))?;
                empty.get_ids().first().copied().filter(|first| named == Some(*first))
            }
        };
        Ok(Tokenizer { inner, path, bos })
    }

    /// Ids of `text`; BOS is never added.
    ///
    /// # Errors
    /// If the tokenizer refuses the text.
    pub fn encode(&self, text: &str, specials: Specials) -> Result<Vec<u32>> {
        let ids = match specials {
            Specials::Parse => {
                self.inner.encode_fast(text, false).map(|encoding| encoding.get_ids().to_vec())
            }
            Specials::Plain => self.encode_plain(text),
        };
        ids.map_err(|error| fail(&self.path, &error.to_string()))
    }

    /// The tokenizer's steps without the one that looks for added tokens.
    fn encode_plain(&self, text: &str) -> tokenizers::Result<Vec<u32>> {
        if text.is_empty() {
            return Ok(Vec::new());
        }
        let mut normalized = NormalizedString::from(text);
        if let Some(normalizer) = self.inner.get_normalizer() {
            normalizer.normalize(&mut normalized)?;
        }
        let mut pieces = PreTokenizedString::from(normalized);
        if let Some(pre_tokenizer) = self.inner.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces)?;
        }
        pieces.tokenize(|piece| self.inner.get_model().tokenize(piece.get()))?;
        Ok(pieces.into_encoding(None, 0, OffsetType::None)?.get_ids().to_vec())
    }

    /// Ids of the pieces of a part of a prompt, each tokenised once, alone.
    ///
    /// # Errors
    /// If the tokenizer refuses a text.
    pub fn encode_pieces(&self, pieces: &[Piece]) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        for piece in pieces {
            let specials = if piece.literal { Specials::Parse } else { Specials::Plain };
            ids.extend(self.encode(&piece.text, specials)?);
        }
        Ok(ids)
    }

    /// Text of `ids`; bytes that are no UTF-8 become U+FFFD. Ids without a token are passed over.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        self.inner.decode(ids, skip_special).unwrap_or_default()
    }

    /// The id that stands before a sequence, by the model's own rule; none for models such as Qwen.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// A token as the vocabulary spells it.
    pub fn token_text(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The id of a token as the vocabulary spells it.
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text)
    }

    /// Number of tokens, added ones included.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }
}

fn fail(path: &Path, message: &str) -> ModelError {
    ModelError::Tokenizer { path: path.to_owned(), message: message.to_owned() }
}

/// A JSON file, or null if it is not there.
pub(crate) fn read_json(path: &Path) -> Result<Json> {
    match std::fs::read_to_string(path) {
        Ok(text) => serde_json::from_str(&text).map_err(|error| fail(path, &error.to_string())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Json::Null),
        Err(source) => Err(ModelError::Io { path: path.to_owned(), source }),
    }
}

/// `"bos_token": "<s>"` or `{"content": "<s>"}`.
pub(crate) fn special_name(config: &Json, key: &str) -> Option<String> {
    let value = config.get(key)?;
    value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned)
}

#[cfg(test)]
#[path = "tokenizer_tests.rs"]
mod tests;
