//! The description of a tokenizer in a file.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use serde_json::Value;
use tokenizers::AddedToken;

use super::byte_encoding::ByteEncoding;

/// The texts of BOS and EOS, which chat templates write.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct BosEos {
    pub(crate) bos: Option<String>,
    pub(crate) eos: Option<String>,
}

/// The description of a tokenizer, to which both kinds of files are brought.
#[derive(Debug)]
pub(super) struct TokenizerSpec {
    /// The file, for errors.
    pub(super) path: PathBuf,
    /// All tokens but the added ones that lie outside, by text.
    pub(super) vocab: HashMap<String, u32>,
    /// In order of precedence.
    pub(super) merges: Vec<(String, String)>,
    /// Added tokens by id, control tokens among them.
    pub(super) added: BTreeMap<u32, AddedToken>,
    /// Tokens by id that no text gives.
    pub(super) unused: BTreeMap<u32, String>,
    /// The token for characters that cannot be written otherwise.
    pub(super) unknown: Option<String>,
    pub(super) fuse_unknown: bool,
    pub(super) byte_fallback: bool,
    pub(super) ignore_merges: bool,
    /// As `tokenizer.json` describes it, or null.
    pub(super) normalizer: Value,
    /// As `tokenizer.json` describes it, or null.
    pub(super) pre_tokenizer: Value,
    pub(super) bytes: ByteEncoding,
    pub(super) bos: Option<u32>,
    pub(super) eos: Vec<u32>,
}
