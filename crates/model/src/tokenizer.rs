//! Text to token ids and back.
//!
//! The vocabulary comes from a Hugging Face folder's `tokenizer.json` or from a GGUF file's metadata; both are brought
//! to one byte-pair-encoding pipeline. Two things differ from what the usual libraries do, because prompts are made of
//! parts that different people wrote:
//!
//! - [`Specials::Plain`] text cannot produce a control token.
//! - A part that continues another ([`Tokenizer::encode_pieces`]) gets no space put before it, as it would get none in
//!   the middle of one text.

mod byte_encoding;
mod detokenizer;
mod gguf;
mod hf;
mod piecewise;
mod pipeline;
mod pre;
mod spec;
mod spm;

use std::borrow::Cow;
use std::path::Path;

use tokenizers::AddedToken;

use self::byte_encoding::ByteEncoding;
pub use self::detokenizer::Detokenizer;
use self::pipeline::Pipeline;
pub use self::pipeline::Specials;
pub(crate) use self::spec::BosEos;
use self::spec::TokenizerSpec;
use crate::error::{ModelError, Result};
use crate::files::ModelFiles;
use crate::gguf::Gguf;

/// A stretch of a prompt, with its author: the chat template or a user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The text.
    pub text: String,
    /// Whether the template wrote it, so that special tokens in it are recognised; else it is a user's text.
    pub literal: bool,
}

impl Piece {
    /// Whether this piece of the template ends in a space that belongs to the first word of the user's text `next`.
    pub(crate) fn ends_in_space_of(&self, next: &Piece) -> bool {
        let is_space = self.literal && self.text.ends_with(' ');
        is_space && !next.literal && next.text.starts_with(|c: char| !c.is_whitespace())
    }
}

/// Tokens that end a text which fills in a middle. Models write the next file, or nothing but padding, behind them, and no file lists them as
/// ends.
const FILL_ENDS: [&str; 3] = ["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"];

/// A model's tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    pipeline: Pipeline,
    bytes: ByteEncoding,
    bos: Option<u32>,
    eos: Vec<u32>,
    /// The control tokens, in ascending order.
    special: Vec<u32>,
}

impl Tokenizer {
    /// The tokenizer of an opened model.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`] if it is missing, malformed, of an unsupported kind, or a text may give tokens that the model has no
    /// embedding for, and the errors of reading JSON files and GGUF metadata.
    pub fn open(files: &ModelFiles) -> Result<Self> {
        let mut tokenizer = match files.gguf() {
            Some(gguf) => Self::from_gguf(gguf)?,
            None => Self::from_folder(files.path())?,
        };
        // Control tokens without an embedding do no harm: published files have some for fine-tuning or pictures.
        let (ids, vocab) = (tokenizer.pipeline.text_ids(), files.config().vocab);
        if ids > vocab {
            let message = format!(
                "the tokenizer's texts have ids below {ids}, and the model has {vocab} embeddings: \
                 they are of different models, or the files are damaged; fetch the model anew"
            );
            return Err(ModelError::Tokenizer { path: files.path().to_owned(), message });
        }
        tokenizer.eos.extend(&files.config().eos);
        tokenizer.eos.sort_unstable();
        tokenizer.eos.dedup();
        Ok(tokenizer)
    }

    /// The tokenizer in a GGUF file's metadata.
    ///
    /// # Errors
    /// Those of [`Tokenizer::open`].
    pub fn from_gguf(gguf: &Gguf) -> Result<Self> {
        Self::build(gguf::spec(gguf)?)
    }

    /// The tokenizer of a Hugging Face folder: `tokenizer.json` and, if it is there, `tokenizer_config.json`.
    ///
    /// # Errors
    /// Those of [`Tokenizer::open`].
    pub fn from_folder(folder: &Path) -> Result<Self> {
        Self::build(hf::spec(folder)?)
    }

    fn build(spec: TokenizerSpec) -> Result<Self> {
        let (bytes, bos, mut eos) = (spec.bytes, spec.bos, spec.eos.clone());
        let ids = |wanted: fn(&AddedToken) -> bool| {
            spec.added.iter().filter(move |(_, token)| wanted(token)).map(|(id, _)| *id)
        };
        let special = ids(|token| token.special).collect();
        eos.extend(ids(|token| FILL_ENDS.contains(&token.content.as_str())));
        eos.sort_unstable();
        eos.dedup();
        Ok(Self { pipeline: Pipeline::build(spec)?, bytes, bos, eos, special })
    }

    /// The ids of a text that stands alone. BOS is never added.
    ///
    /// # Errors
    /// [`ModelError::Encode`] if the vocabulary has no way to write a character.
    pub fn encode(&self, text: &str, specials: Specials) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        piecewise::encode_to(&mut ids, &self.pipeline, text, specials)?;
        Ok(ids)
    }

    /// The ids of a text in pieces. Each piece is tokenised once, alone, literal ones with their special tokens. BOS
    /// is there only if a literal piece has it.
    ///
    /// A space at the end of a literal piece is tokenised with the user's word behind it, as in one text: vocabularies
    /// have words with the space before them.
    ///
    /// # Errors
    /// Those of [`Tokenizer::encode`].
    pub fn encode_pieces(&self, pieces: &[Piece]) -> Result<Vec<u32>> {
        let mut ids: Vec<u32> = Vec::new();
        let mut space = "";
        for (index, piece) in pieces.iter().enumerate() {
            let specials = if piece.literal { Specials::Parse } else { Specials::Plain };
            let gives = pieces.get(index + 1).is_some_and(|next| piece.ends_in_space_of(next));
            let (text, given) = piece.text.split_at(piece.text.len() - usize::from(gives));
            // Before the first text the tokenizer may put a space itself.
            let text = match space {
                " " if !(ids.is_empty() && self.pipeline.has_prefix()) => Cow::from(format!(" {text}")),
                _ => Cow::from(text),
            };
            piecewise::encode_to(&mut ids, &self.pipeline, &text, specials)?;
            space = given;
        }
        Ok(ids)
    }

    /// The token to put before a prompt, by the file's own rule. None for models that use none, even if their files
    /// name a BOS token.
    #[must_use]
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The tokens that end an answer, in ascending order.
    #[must_use]
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos
    }

    /// Whether a token is a control token, which stands for no text.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.special.binary_search(&id).is_ok()
    }

    /// Whether a token stands in literal pieces alone: no text of a user can give it.
    #[must_use]
    pub fn is_reserved(&self, id: u32) -> bool {
        self.pipeline.is_reserved(id)
    }

    /// A token as the vocabulary writes it (`Ġthe`, `▁the`, `<|im_end|>`); none if there is no such token.
    #[must_use]
    pub fn token_text(&self, id: u32) -> Option<String> {
        self.pipeline.token_text(id)
    }

    /// The id of a token as the vocabulary writes it; none if there is no such token.
    #[must_use]
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.pipeline.token_id(text)
    }

    /// The number of ids: the greatest one plus 1. The model's embedding may have more rows.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.pipeline.vocab_size()
    }

    /// The bytes that a token stands for within a text, perhaps a part of a character; none for an unknown id.
    #[must_use]
    pub fn bytes_of(&self, id: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.push_bytes(id, &mut bytes);
        bytes
    }

    /// Appends the bytes that a token stands for.
    fn push_bytes(&self, id: u32, out: &mut Vec<u8>) {
        let Some(text) = self.pipeline.token_text(id) else { return };
        if self.pipeline.is_added(id) {
            out.extend(text.as_bytes());
        } else {
            self.bytes.push_bytes(&text, out);
        }
    }
}

/// The texts of BOS and EOS of an opened model, for its chat template.
///
/// # Errors
/// If the files that say so cannot be read.
pub(crate) fn bos_eos(files: &ModelFiles) -> Result<BosEos> {
    match files.gguf() {
        Some(gguf) => gguf::bos_eos(gguf),
        None => hf::bos_eos(files.path()),
    }
}

#[cfg(test)]
#[path = "tokenizer_tests.rs"]
mod tests;
