//! Text to token ids and back.
//!
//! The vocabulary comes from a Hugging Face folder's `tokenizer.json` or from a GGUF file's metadata; both are brought
//! to one byte-pair-encoding pipeline. Two things differ from what the usual libraries do, because prompts are made of
//! parts that different people wrote:
//!
//! - [`Specials::Plain`] text cannot produce a control token, whatever is written in it.
//! - A part that continues another ([`Tokenizer::encode_pieces`]) gets no space put before it, as it would get none in
//!   the middle of one text.

mod detokenizer;
mod gguf;
mod hf;
mod pipeline;
mod pre;
mod spm;

use std::path::Path;

pub use self::detokenizer::Detokenizer;
use self::pipeline::{Pipeline, Recipe};
use crate::chat_template::Piece;
use crate::error::Result;
use crate::files::ModelFiles;
use crate::gguf::Gguf;

/// What special tokens written in a text mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Specials {
    /// They are recognised: for text that the model's own chat template wrote.
    Parse,
    /// They are ordinary characters: for text that a user wrote. Added tokens that are neither control tokens nor look
    /// like markup (runs of spaces, say) are still recognised, as they are in the text that the model learned from.
    Plain,
}

/// The text of the tokens that a chat template may write.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Marks {
    pub(crate) bos: Option<String>,
    pub(crate) eos: Option<String>,
}

/// A model's tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    pipeline: Pipeline,
    spelling: Spelling,
    bos: Option<u32>,
    eos: Vec<u32>,
    special: Vec<u32>,
}

/// How the vocabulary writes bytes and spaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spelling {
    /// GPT-2's: each byte is one printable character.
    ByteLevel,
    /// SentencePiece's: a space is `▁`, a byte that no token has is `<0x0A>`.
    Spaces {
        /// Whether encoding puts a space before the text, which decoding takes away.
        prefixed: bool,
    },
}

impl Tokenizer {
    /// The tokenizer of an opened model.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`](crate::ModelError::Tokenizer) if it is missing, malformed or of an unsupported kind,
    /// and the errors of reading JSON files and GGUF metadata.
    pub fn open(files: &ModelFiles) -> Result<Self> {
        let mut tokenizer = match files.gguf() {
            Some(gguf) => Self::from_gguf(gguf)?,
            None => Self::from_folder(files.path())?,
        };
        tokenizer.eos.extend(&files.config().eos);
        tokenizer.eos.sort_unstable();
        tokenizer.eos.dedup();
        Ok(tokenizer)
    }

    /// The tokenizer in a GGUF file's metadata.
    ///
    /// # Errors
    /// As [`Tokenizer::open`].
    pub fn from_gguf(gguf: &Gguf) -> Result<Self> {
        Self::build(gguf::recipe(gguf)?)
    }

    /// The tokenizer of a Hugging Face folder: `tokenizer.json` and, if it is there, `tokenizer_config.json`.
    ///
    /// # Errors
    /// As [`Tokenizer::open`].
    pub fn from_folder(folder: &Path) -> Result<Self> {
        Self::build(hf::recipe(folder)?)
    }

    fn build(recipe: Recipe) -> Result<Self> {
        let (spelling, bos, mut eos) = (recipe.spelling, recipe.bos, recipe.eos.clone());
        let special = recipe.added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();
        eos.sort_unstable();
        eos.dedup();
        Ok(Self { pipeline: Pipeline::build(recipe)?, spelling, bos, eos, special })
    }

    /// The ids of a text that stands alone. BOS is never added.
    ///
    /// # Errors
    /// [`ModelError::Encode`](crate::ModelError::Encode) if the vocabulary has no way to write a character.
    pub fn encode(&self, text: &str, specials: Specials) -> Result<Vec<u32>> {
        self.pipeline.encode(text, specials)
    }

    /// The ids of a text in pieces. Each piece is tokenised once, alone, literal ones with their special tokens. BOS
    /// is there only if a literal piece has it.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_pieces(&self, pieces: &[Piece]) -> Result<Vec<u32>> {
        let mut ids: Vec<u32> = Vec::new();
        for piece in pieces {
            let specials = if piece.literal { Specials::Parse } else { Specials::Plain };
            let more = match ids.last() {
                Some(last) => self.pipeline.encode_after(*last, &piece.text, specials)?,
                None => self.pipeline.encode(&piece.text, specials)?,
            };
            ids.extend(more);
        }
        Ok(ids)
    }

    /// The token to put before a prompt, by the file's own rule. None for models that use none, whatever token their
    /// files call BOS.
    #[must_use]
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The tokens that end an answer, in ascending order.
    #[must_use]
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos
    }

    /// The control tokens, in ascending order: those that stand for no text.
    #[must_use]
    pub fn special_ids(&self) -> &[u32] {
        &self.special
    }

    /// Whether a token is a control token.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.special.binary_search(&id).is_ok()
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

    /// The text of tokens. Bytes that are no UTF-8 become U+FFFD, unknown ids nothing.
    #[must_use]
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut text = String::new();
        let mut detokenizer = Detokenizer::default();
        for id in ids.iter().filter(|id| !(skip_special && self.is_special(**id))) {
            text.extend(detokenizer.add(self, *id));
        }
        text.extend(detokenizer.finish());
        text
    }

    /// Appends the bytes that a token stands for.
    fn push_bytes(&self, id: u32, out: &mut Vec<u8>) {
        let Some(text) = self.pipeline.token_text(id) else { return };
        match self.spelling {
            _ if self.pipeline.is_added(id) => out.extend(text.as_bytes()),
            Spelling::ByteLevel => detokenizer::push_byte_level(&text, out),
            Spelling::Spaces { .. } => detokenizer::push_spaces(&text, out),
        }
    }
}

/// The text of BOS and EOS of an opened model, for its chat template.
///
/// # Errors
/// If the files that say so cannot be read.
pub(crate) fn marks(files: &ModelFiles) -> Result<Marks> {
    match files.gguf() {
        Some(gguf) => gguf::marks(gguf),
        None => hf::marks(files.path()),
    }
}

#[cfg(test)]
#[path = "tokenizer_tests.rs"]
mod tests;
