//! A tokenizer in a GGUF file's metadata.
//!
//! Keys: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>

use std::collections::{BTreeMap, HashMap};

use serde_json::{Value, json};
use tokenizers::AddedToken;

use super::byte_encoding::ByteEncoding;
use super::pipeline::is_markup;
use super::spec::{BosEos, TokenizerSpec};
use super::{pre, spm};
use crate::config::END_TOKENS;
use crate::error::{ModelError, Result};
use crate::gguf::Gguf;

/// ggml's token types.
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// Tokens that begin a turn, as [`END_TOKENS`] end one: of both, files give some the type of ordinary text.
const TURN_STARTS: [&str; 2] = ["<|im_start|>", "<start_of_turn>"];

/// Phi-3's tokens that keep the white space after them; its other added tokens take it away. No key says so.
const PHI3_KEEPS_SPACE: [&str; 3] = ["<unk>", "<s>", "<|endoftext|>"];

fn wrong(gguf: &Gguf, message: String) -> ModelError {
    ModelError::Tokenizer { path: gguf.path().to_owned(), message }
}

/// The texts of BOS and EOS.
pub(super) fn bos_eos(gguf: &Gguf) -> Result<BosEos> {
    let tokens = gguf.opt_strings("tokenizer.ggml.tokens")?.unwrap_or_default();
    let text = |key: &str| -> Result<Option<String>> {
        Ok(gguf.opt_u32(key)?.and_then(|id| tokens.get(id as usize)).cloned())
    };
    Ok(BosEos { bos: text("tokenizer.ggml.bos_token_id")?, eos: text("tokenizer.ggml.eos_token_id")? })
}

pub(super) fn spec(gguf: &Gguf) -> Result<TokenizerSpec> {
    let kind = gguf.get_str("tokenizer.ggml.model")?;
    match kind {
        "gpt2" => byte_level(gguf),
        "llama" => sentence_piece(gguf),
        _ => Err(wrong(
            gguf,
            format!(
                "the tokenizer 'tokenizer.ggml.model' = '{kind}' is not supported; supported are gpt2, llama"
            ),
        )),
    }
}

/// A GPT-2 vocabulary with merges.
fn byte_level(gguf: &Gguf) -> Result<TokenizerSpec> {
    let name = match gguf.opt_str("tokenizer.ggml.pre")? {
        Some(name) => name,
        None => unnamed_pre(gguf)?,
    };
    let pre = pre::lookup(name).ok_or_else(|| {
        let supported = pre::SUPPORTED;
        let what = format!("the pre-tokenizer 'tokenizer.ggml.pre' = '{name}' is not supported");
        wrong(gguf, format!("{what}; supported are {supported}"))
    })?;
    let mut spec = tokens(gguf, pre.add_bos, None)?;
    for merge in gguf.get_strings("tokenizer.ggml.merges")? {
        // The first character always belongs to the left half.
        let cut = merge.char_indices().skip(1).find(|(_, c)| *c == ' ').map(|(at, _)| at);
        let (left, right) = cut
            .and_then(|at| Some((merge.get(..at)?, merge.get(at + 1..)?)))
            .ok_or_else(|| wrong(gguf, format!("the merge '{merge}' is not of two tokens")))?;
        spec.merges.push((left.to_owned(), right.to_owned()));
    }
    spec.ignore_merges = pre.ignore_merges;
    spec.normalizer = pre.normalizer;
    spec.pre_tokenizer = pre.pre_tokenizer;
    Ok(spec)
}

/// The pre-tokenizer of a file that does not name it, as converters made them before May 2024, where architecture and tokens leave one alone.
fn unnamed_pre(gguf: &Gguf) -> Result<&'static str> {
    let has = |text: &str| -> Result<bool> {
        Ok(gguf.get_strings("tokenizer.ggml.tokens")?.iter().any(|token| token == text))
    };
    match gguf.opt_str("general.architecture")? {
        Some("qwen2" | "qwen3" | "qwen3moe") => Ok("qwen2"),
        Some("llama") if has("<|begin_of_text|>")? => Ok("llama-bpe"),
        _ => {
            let message = "the key 'tokenizer.ggml.pre' is missing, and nothing else tells how texts are cut into words: an old converter made the \
                           file; take a newer GGUF file of the model, or its Hugging Face folder";
            Err(wrong(gguf, message.into()))
        }
    }
}

/// A SentencePiece vocabulary with scores.
fn sentence_piece(gguf: &Gguf) -> Result<TokenizerSpec> {
    let mut spec = tokens(gguf, true, Some((1, 2)))?;
    let all = gguf.get_strings("tokenizer.ggml.tokens")?;
    let scores = gguf.opt_f32s("tokenizer.ggml.scores")?.unwrap_or_default();
    if scores.len() != all.len() {
        return Err(wrong(gguf, format!("{} tokens have {} scores", all.len(), scores.len())));
    }
    let unknown = gguf.opt_u32("tokenizer.ggml.unknown_token_id")?.unwrap_or(0);
    let unknown = all.get(unknown as usize).ok_or_else(|| {
        wrong(gguf, format!("the unknown token {unknown} is not among {} tokens", all.len()))
    })?;
    if let Some(long) = spec.vocab.keys().find(|piece| piece.len() > spm::MAX_PIECE) {
        return Err(wrong(gguf, format!("a token has {} bytes, more than {}", long.len(), spm::MAX_PIECE)));
    }
    let types = gguf.opt_i32s("tokenizer.ggml.token_type")?.unwrap_or_default();
    let is_piece = |id: &u32, piece: &str| {
        let byte = types.get(*id as usize) == Some(&BYTE);
        spec.vocab.get(piece) == Some(id) && !spec.added.contains_key(id) && !byte
    };
    let pieces: Vec<(&str, f32)> = (0..)
        .zip(all.iter().zip(scores))
        .filter(|(id, (piece, _))| is_piece(id, piece))
        .map(|(_, (piece, score))| (piece.as_str(), *score))
        .collect();
    spec.merges = spm::merges(&pieces).map_err(|message| wrong(gguf, message))?;
    let prefixed = gguf.opt_bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let mut normalizers = vec![json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})];
    if prefixed {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": "▁"}));
    }
    spec.normalizer = json!({"type": "Sequence", "normalizers": normalizers});
    spec.bytes = ByteEncoding::Metaspace { prefixed };
    spec.unknown = Some(unknown.clone());
    spec.fuse_unknown = true;
    spec.byte_fallback = true;
    Ok(spec)
}

/// Whether the vocabulary is Phi-3's. Files of other architectures may be Phi-3 by name, and Phi-4 has the architecture, but no vocabulary of
/// SentencePiece.
fn is_phi3(gguf: &Gguf) -> Result<bool> {
    let text = |key: &str| -> Result<String> { Ok(gguf.opt_str(key)?.unwrap_or_default().to_lowercase()) };
    let by_architecture = text("general.architecture")? == "phi3" && text("tokenizer.ggml.model")? == "llama";
    let name = text("general.name")?;
    Ok(by_architecture || name.contains("phi-3") || name.contains("phi3"))
}

/// The part that both kinds share: the tokens by type, BOS and EOS. `bos_eos` are BOS and EOS where the file names none.
fn tokens(gguf: &Gguf, add_bos: bool, bos_eos: Option<(u32, u32)>) -> Result<TokenizerSpec> {
    let all = gguf.get_strings("tokenizer.ggml.tokens")?;
    let types = gguf.opt_i32s("tokenizer.ggml.token_type")?;
    if let Some(types) = types.filter(|types| types.len() != all.len()) {
        return Err(wrong(gguf, format!("{} tokens have {} types", all.len(), types.len())));
    }
    let id_of = |name: &str, default: Option<u32>| -> Result<Option<u32>> {
        let key = format!("tokenizer.ggml.{name}");
        let id = gguf.opt_u32(&key)?;
        if let Some(id) = id.filter(|id| *id as usize >= all.len()) {
            return Err(wrong(gguf, format!("the token {id} of '{key}' is not among {} tokens", all.len())));
        }
        Ok(id.or(default.filter(|id| (*id as usize) < all.len())))
    };
    let bos = id_of("bos_token_id", bos_eos.map(|(bos, _)| bos))?;
    let add_bos = gguf.opt_bool("tokenizer.ggml.add_bos_token")?.unwrap_or(add_bos);
    let mut eos = Vec::new();
    eos.extend(id_of("eos_token_id", bos_eos.map(|(_, eos)| eos))?);
    eos.extend(id_of("eot_token_id", None)?);
    eos.extend(id_of("eom_token_id", None)?);

    let phi3 = is_phi3(gguf)?;
    let (mut vocab, mut added, mut unused) = (HashMap::new(), BTreeMap::new(), BTreeMap::new());
    for (id, token) in (0u32..).zip(all) {
        let kind = types.and_then(|types| types.get(id as usize)).copied().unwrap_or_default();
        // Some files give these no type, or a wrong one.
        let named = (eos.contains(&id) || bos == Some(id)) && is_markup(token)
            || END_TOKENS.contains(&token.as_str())
            || TURN_STARTS.contains(&token.as_str());
        let special = named || matches!(kind, UNKNOWN | CONTROL);
        if token.is_empty() || (kind == UNUSED && !named) {
            unused.insert(id, token.clone());
            continue;
        }
        if special || kind == USER_DEFINED {
            let strips = phi3 && !PHI3_KEEPS_SPACE.contains(&token.as_str());
            added.insert(id, AddedToken::from(token, special).normalized(false).rstrip(strips));
        }
        if let Some(other) = vocab.insert(token.clone(), id) {
            return Err(wrong(gguf, format!("the token '{token}' is there twice, as {other} and {id}")));
        }
    }
    Ok(TokenizerSpec {
        path: gguf.path().to_owned(),
        vocab,
        merges: Vec::new(),
        added,
        unused,
        unknown: None,
        fuse_unknown: false,
        byte_fallback: false,
        ignore_merges: false,
        normalizer: Value::Null,
        pre_tokenizer: Value::Null,
        bytes: ByteEncoding::ByteLevel,
        bos: bos.filter(|_| add_bos),
        eos,
    })
}
