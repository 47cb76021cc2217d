//! A tokenizer out of GGUF metadata: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`).

use std::collections::HashMap;

use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence as Decoders;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::{NFC, NormalizerWrapper, Prepend, Replace, Sequence as Normalizers};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence as PreTokenizers;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, DecoderWrapper, SplitDelimiterBehavior, Tokenizer as Inner};

use super::{Tokenizer, fail};
use crate::error::Result;
use crate::gguf::Gguf;

/// Token types of `tokenizer.ggml.token_type`.
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;

/// Letters, up to three digits, punctuation, line breaks, spaces: Llama 3 (and GPT-4).
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The same with single digits: Qwen2.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Words split where capitals begin: Mistral's Tekken.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The same with contractions and up to three digits: GPT-4o, Phi-4-mini.
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// How a byte-level vocabulary cuts text before merging.
enum Cut {
    /// GPT-2's pattern, which the byte-level step has built in.
    Gpt2,
    /// Single digits first, then GPT-2's pattern.
    Digits,
    Pattern(&'static str),
}

const KNOWN: &str = "default, gpt-2, smollm, llama-bpe, qwen2, tekken, dbrx, gpt-4o";

pub(super) fn read(gguf: &Gguf) -> Result<Tokenizer> {
    let tokens = gguf.get_strings("tokenizer.ggml.tokens")?;
    if tokens.is_empty() {
        return Err(fail(gguf.path(), "tokenizer.ggml.tokens is empty"));
    }
    let types = gguf.opt_i32s("tokenizer.ggml.token_type")?.unwrap_or_default();
    if !types.is_empty() && types.len() != tokens.len() {
        let message =
            format!("{} token types for {} tokens; fetch the file again", types.len(), tokens.len());
        return Err(fail(gguf.path(), &message));
    }
    let model = gguf.get_str("tokenizer.ggml.model")?;
    let (mut inner, default_bos) = match model {
        "gpt2" => byte_level(gguf, tokens)?,
        "llama" => sentence_piece(gguf, tokens, types)?,
        other => {
            let message = format!("tokenizer.ggml.model is '{other}'; supported are gpt2 and llama");
            return Err(fail(gguf.path(), &message));
        }
    };
    let strip = model == "llama" && gguf.opt_str("general.architecture")? == Some("phi3");
    let added = tokens.iter().zip(types).filter(|(_, kind)| [CONTROL, USER_DEFINED].contains(*kind));
    let added: Vec<AddedToken> = added.map(|(text, kind)| added_token(text, *kind, strip)).collect();
    inner.add_tokens(added).map_err(|error| fail(gguf.path(), &error.to_string()))?;
    let add_bos = gguf.opt_bool("tokenizer.ggml.add_bos_token")?.unwrap_or(default_bos);
    let bos = gguf.opt_u32("tokenizer.ggml.bos_token_id")?;
    let bos = bos.filter(|id| add_bos && (*id as usize) < tokens.len());
    Ok(Tokenizer { inner, path: gguf.path().to_owned(), bos })
}

/// Phi-3's own tokenizer lets its special tokens swallow the white space after them; GGUF does not record that.
fn added_token(text: &str, kind: i32, strip: bool) -> AddedToken {
    let strips = strip && kind == CONTROL && !["<unk>", "<s>", "<|endoftext|>"].contains(&text);
    AddedToken::from(text, kind == CONTROL).normalized(false).rstrip(strips)
}

fn byte_level(gguf: &Gguf, tokens: &[String]) -> Result<(Inner, bool)> {
    let wrong = |error: tokenizers::Error| fail(gguf.path(), &error.to_string());
    let name = gguf.opt_str("tokenizer.ggml.pre")?.unwrap_or("default");
    let cut = match name {
        "default" | "gpt-2" | "gpt2" | "phi-2" => Cut::Gpt2,
        "smollm" | "starcoder" | "refact" | "command-r" => Cut::Digits,
        "llama-bpe" | "llama3" | "llama-v3" | "dbrx" | "smaug-bpe" => Cut::Pattern(LLAMA3),
        "qwen2" | "deepseek-r1-qwen" => Cut::Pattern(QWEN2),
        "tekken" => Cut::Pattern(TEKKEN),
        "gpt-4o" => Cut::Pattern(GPT4O),
        other => {
            let message = format!(
                "the pre-tokenizer '{other}' (tokenizer.ggml.pre) is not supported; supported are {KNOWN}"
            );
            return Err(fail(gguf.path(), &message));
        }
    };
    let mut merges = Vec::new();
    for (index, merge) in gguf.get_strings("tokenizer.ggml.merges")?.iter().enumerate() {
        let Some((left, right)) = merge.split_once(' ') else {
            return Err(fail(
                gguf.path(),
                &format!("merge {index} of tokenizer.ggml.merges is not two tokens"),
            ));
        };
        merges.push((left.to_owned(), right.to_owned()));
    }
    let whole_words = matches!(name, "llama-bpe" | "llama3" | "llama-v3" | "tekken");
    let model = BPE::builder().vocab_and_merges(vocabulary(tokens), merges).ignore_merges(whole_words);
    let mut inner = Inner::new(model.build().map_err(wrong)?);
    let bytes = |pattern| PreTokenizerWrapper::from(ByteLevel::new(false, false, pattern));
    let first: Option<PreTokenizerWrapper> = match cut {
        Cut::Gpt2 => None,
        Cut::Digits => Some(Digits::new(true).into()),
        Cut::Pattern(pattern) => {
            let pattern = SplitPattern::Regex(pattern.to_owned());
            Some(Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(wrong)?.into())
        }
    };
    let own_pattern = !matches!(cut, Cut::Pattern(_));
    let steps: Vec<PreTokenizerWrapper> = first.into_iter().chain([bytes(own_pattern)]).collect();
    inner.with_pre_tokenizer(Some(PreTokenizers::new(steps)));
    inner.with_decoder(Some(ByteLevel::new(false, false, false)));
    if matches!(name, "qwen2" | "deepseek-r1-qwen") {
        inner.with_normalizer(Some(NFC)).map_err(wrong)?;
    }
    Ok((inner, whole_words))
}

fn sentence_piece(gguf: &Gguf, tokens: &[String], types: &[i32]) -> Result<(Inner, bool)> {
    let wrong = |error: tokenizers::Error| fail(gguf.path(), &error.to_string());
    let scores = gguf.opt_f32s("tokenizer.ggml.scores")?.unwrap_or_default();
    if scores.len() != tokens.len() {
        let message = format!("{} scores for {} tokens; fetch the file again", scores.len(), tokens.len());
        return Err(fail(gguf.path(), &message));
    }
    let unknown = gguf.opt_u32("tokenizer.ggml.unknown_token_id")?.unwrap_or(0) as usize;
    let model = BPE::builder()
        .vocab_and_merges(vocabulary(tokens), merges(tokens, types, scores))
        .byte_fallback(true)
        .fuse_unk(true)
        .unk_token(tokens.get(unknown).unwrap_or(&tokens[0]).clone());
    let mut inner = Inner::new(model.build().map_err(wrong)?);
    let prefix = gguf.opt_bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let spaces = Replace::new(" ", "▁").map_err(wrong)?;
    let prepend = prefix.then(|| NormalizerWrapper::from(Prepend::new("▁".to_owned())));
    let normalizers = prepend.into_iter().chain([spaces.into()]).collect();
    inner.with_normalizer(Some(Normalizers::new(normalizers))).map_err(wrong)?;
    let spaces = Replace::new("▁", " ").map_err(wrong)?;
    let mut decoders: Vec<DecoderWrapper> =
        vec![spaces.into(), ByteFallback::new().into(), Fuse::new().into()];
    if prefix {
        decoders.push(Strip::new(' ', 1, 0).into());
    }
    inner.with_decoder(Some(Decoders::new(decoders)));
    Ok((inner, true))
}

/// A token that stands twice keeps its first id.
fn vocabulary(tokens: &[String]) -> Vocab {
    tokens.iter().enumerate().rev().map(|(id, token)| (token.clone(), id as u32)).collect()
}

/// SentencePiece joins the pair whose result has the highest score; BPE wants the pairs in that order.
fn merges(tokens: &[String], types: &[i32], scores: &[f32]) -> Vec<(String, String)> {
    let ids: HashMap<&str, usize> = tokens.iter().enumerate().rev().map(|(id, t)| (t.as_str(), id)).collect();
    let ordinary = |id: usize| types.get(id).is_none_or(|kind| *kind == 1);
    let mut pairs: Vec<(f32, usize, usize)> = Vec::new();
    for (id, token) in tokens.iter().enumerate().filter(|(id, _)| ordinary(*id)) {
        for (at, _) in token.char_indices().skip(1) {
            if let (Some(left), Some(right)) = (ids.get(&token[..at]), ids.get(&token[at..]))
                && ordinary(*left)
                && ordinary(*right)
            {
                pairs.push((scores[id], *left, *right));
            }
        }
    }
    pairs.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    pairs.into_iter().map(|(_, left, right)| (tokens[left].clone(), tokens[right].clone())).collect()
}
