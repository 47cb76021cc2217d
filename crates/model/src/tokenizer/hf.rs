//! The tokenizer of a Hugging Face folder.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use tokenizers::AddedToken;

use super::byte_encoding::ByteEncoding;
use super::pipeline::{is_markup, parts, type_of};
use super::spec::{BosEos, TokenizerSpec};
use crate::error::{ModelError, Result};
use crate::safetensors::read_json;

const NORMALIZERS: [&str; 8] = ["NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace", "Strip", "Lowercase"];
const PRE_TOKENIZERS: [&str; 7] =
    ["Split", "ByteLevel", "Digits", "Metaspace", "Whitespace", "WhitespaceSplit", "Punctuation"];

/// How many times as long as a text its normalised form may be. SentencePiece's normalisers make a space before a text and each space in it three
/// bytes, which counts as 12 for the shortest text.
const MAX_GROWTH: f64 = 16.0;

/// `tokenizer.json`.
#[derive(Debug, Deserialize)]
struct RawTokenizer {
    #[serde(default)]
    added_tokens: Vec<RawAdded>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    model: RawModel,
}

/// A token of `added_tokens`.
#[derive(Debug, Deserialize)]
struct RawAdded {
    id: u32,
    #[serde(flatten)]
    token: AddedToken,
}

/// `model`, if it is BPE.
#[derive(Debug, Deserialize)]
struct RawModel {
    vocab: HashMap<String, u32>,
    merges: Vec<RawMerge>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    fuse_unk: bool,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum RawMerge {
    Pair(String, String),
    /// With a space between.
    Line(String),
}

/// `tokenizer_config.json`, as far as the engine heeds it.
#[derive(Debug, Default, Deserialize)]
struct RawConfig {
    bos_token: Option<RawToken>,
    eos_token: Option<RawToken>,
    add_bos_token: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum RawToken {
    Text(String),
    Token { content: String },
}

impl RawToken {
    fn text(self) -> String {
        match self {
            Self::Text(text) | Self::Token { content: text } => text,
        }
    }
}

/// The text of BOS and EOS.
pub(super) fn bos_eos(folder: &Path) -> Result<BosEos> {
    Ok(config(folder)?.0)
}

/// The text of BOS and EOS, and whether BOS is added, if a file says so.
fn config(folder: &Path) -> Result<(BosEos, Option<bool>)> {
    let mut bos_eos = BosEos::default();
    let mut add_bos = None;
    for name in ["tokenizer_config.json", "special_tokens_map.json"] {
        let path = folder.join(name);
        if path.is_file() {
            let raw: RawConfig = read_json(&path)?;
            bos_eos.bos = bos_eos.bos.or(raw.bos_token.map(RawToken::text));
            bos_eos.eos = bos_eos.eos.or(raw.eos_token.map(RawToken::text));
            add_bos = add_bos.or(raw.add_bos_token);
        }
    }
    Ok((bos_eos, add_bos))
}

pub(super) fn spec(folder: &Path) -> Result<TokenizerSpec> {
    let path = folder.join("tokenizer.json");
    let raw = read(&path)?;
    let (bos_eos, add_bos) = config(folder)?;
    let wrong = |message: String| ModelError::Tokenizer { path: path.clone(), message };
    check(&raw.normalizer, "normalizer", &NORMALIZERS).map_err(wrong)?;
    check(&raw.pre_tokenizer, "pre_tokenizer", &PRE_TOKENIZERS).map_err(wrong)?;
    let bytes = bytes(&raw.decoder).map_err(wrong)?;
    let mut added = BTreeMap::new();
    for RawAdded { id, token } in raw.added_tokens {
        if let Some(other) = added.insert(id, token) {
            return Err(wrong(format!("the added tokens '{}' and another have the id {id}", other.content)));
        }
    }
    let vocab = raw.model.vocab;
    let id_of = |text: &str| {
        let token = added.iter().find(|(_, token)| token.content == text);
        token.map(|(id, _)| *id).or_else(|| vocab.get(text).copied())
    };
    let bos = match add_bos {
        Some(true) => bos_eos.bos.as_deref().and_then(id_of),
        Some(false) => None,
        None => first_of(&raw.post_processor).and_then(id_of),
    };
    let eos: Vec<u32> = bos_eos.eos.as_deref().and_then(id_of).into_iter().collect();
    for id in bos.iter().chain(&eos) {
        // BOS and EOS are control tokens even if the file does not list them as added ones.
        if let Some((text, _)) = vocab.iter().find(|(text, other)| *other == id && is_markup(text)) {
            added.entry(*id).or_insert_with(|| AddedToken::from(text.as_str(), true)).special = true;
        }
    }
    Ok(TokenizerSpec {
        merges: merges(raw.model.merges, &path)?,
        vocab,
        added,
        unused: BTreeMap::new(),
        unknown: raw.model.unk_token,
        fuse_unknown: raw.model.fuse_unk,
        byte_fallback: raw.model.byte_fallback,
        ignore_merges: raw.model.ignore_merges,
        normalizer: raw.normalizer,
        pre_tokenizer: raw.pre_tokenizer,
        bytes,
        bos,
        eos,
        path,
    })
}

/// Reads `tokenizer.json`, if its model is plain BPE.
fn read(path: &Path) -> Result<RawTokenizer> {
    #[derive(Deserialize)]
    struct Kind {
        model: KindOfModel,
    }
    #[derive(Deserialize)]
    struct KindOfModel {
        r#type: Option<String>,
    }
    let wrong = |message: String| ModelError::Tokenizer { path: path.to_owned(), message };
    if !path.is_file() {
        let message = "the file is missing; convert the folder's tokenizer with transformers (save_pretrained of a fast tokenizer)";
        return Err(wrong(message.into()));
    }
    let kind = read_json::<Kind>(path)?.model.r#type.unwrap_or_else(|| "BPE".into());
    if kind != "BPE" {
        return Err(wrong(format!("the tokenizer model '{kind}' is not supported; supported is BPE")));
    }
    let raw: RawTokenizer = read_json(path)?;
    for (name, affix) in [
        ("continuing_subword_prefix", &raw.model.continuing_subword_prefix),
        ("end_of_word_suffix", &raw.model.end_of_word_suffix),
    ] {
        if affix.as_ref().is_some_and(|affix| !affix.is_empty()) {
            return Err(wrong(format!("a tokenizer with {name} is not supported")));
        }
    }
    Ok(raw)
}

fn merges(raw: Vec<RawMerge>, path: &Path) -> Result<Vec<(String, String)>> {
    let pair = |merge| match merge {
        RawMerge::Pair(left, right) => Ok((left, right)),
        RawMerge::Line(line) => match line.split_once(' ') {
            Some((left, right)) => Ok((left.to_owned(), right.to_owned())),
            None => Err(ModelError::Tokenizer {
                path: path.to_owned(),
                message: format!("the merge '{line}' is not of two tokens"),
            }),
        },
    };
    raw.into_iter().map(pair).collect()
}

/// Refuses what is not known to be safe with any text, or is not of the supported families.
fn check(value: &Value, what: &str, supported: &[&str]) -> Result<(), String> {
    let mut growth = 1.0;
    for part in parts(value) {
        let kind = type_of(part);
        // An empty sequence is one too.
        if !supported.contains(&kind) && kind != "Sequence" {
            let supported = supported.join(", ");
            return Err(format!(
                "the {what} '{kind}' is not supported; supported are {supported} and sequences of them"
            ));
        }
        if kind == "Prepend" && part.get("prepend").is_some_and(|prepend| prepend == "") {
            return Err(format!("the {what} 'Prepend' has nothing to prepend; remove it from the file"));
        }
        let pattern = part.get("pattern").map(|p| p.get("String").or(p.get("Regex")).unwrap_or(p));
        if pattern.is_some_and(|p| p.as_str().is_none_or(str::is_empty)) {
            return Err(format!("the {what} '{kind}' has no pattern"));
        }
        growth *= growth_of(part);
    }
    if growth > MAX_GROWTH {
        return Err(format!(
            "the {what} may make a text more than {MAX_GROWTH} times as long; replace and prepend shorter texts"
        ));
    }
    Ok(())
}

/// How many times as long a part of a normaliser may make a text.
fn growth_of(part: &Value) -> f64 {
    let bytes = |value: Option<&Value>| value.and_then(Value::as_str).map_or(0.0, |text| text.len() as f64);
    match (type_of(part), part.get("pattern").and_then(|pattern| pattern.get("String"))) {
        ("Prepend", _) => 1.0 + bytes(part.get("prepend")),
        ("Replace", Some(text)) => (bytes(part.get("content")) / bytes(Some(text))).max(1.0),
        // An expression may match the empty text before each character.
        ("Replace", None) => 1.0 + bytes(part.get("content")),
        _ => 1.0,
    }
}

/// How the vocabulary spells, by the decoder that undoes it.
fn bytes(decoder: &Value) -> Result<ByteEncoding, String> {
    let decoders = parts(decoder);
    let has = |kind: &str| decoders.iter().find(|part| type_of(part) == kind);
    if has("ByteLevel").is_some() {
        return Ok(ByteEncoding::ByteLevel);
    }
    if let Some(part) = has("Metaspace") {
        let never = part.get("prepend_scheme").is_some_and(|scheme| scheme == "never")
            || part.get("add_prefix_space").is_some_and(|add| add == false);
        return Ok(ByteEncoding::Metaspace { prefixed: !never });
    }
    let space = |part: &&&Value| part.get("pattern").and_then(|p| p.get("String")).is_some_and(|s| s == "▁");
    if decoders.iter().filter(|part| type_of(part) == "Replace").find(space).is_some() {
        let strips = has("Strip").is_some_and(|strip| {
            strip.get("content").is_some_and(|c| c == " ")
                && strip.get("start").and_then(Value::as_u64).is_some_and(|n| n > 0)
        });
        return Ok(ByteEncoding::Metaspace { prefixed: strips });
    }
    let kinds: Vec<&str> = decoders.iter().map(|part| type_of(part)).collect();
    Err(format!(
        "the decoder {kinds:?} is not supported; supported are ByteLevel, Metaspace and Replace of '▁'"
    ))
}

/// The special token that the post-processor puts first.
fn first_of(post_processor: &Value) -> Option<&str> {
    let templates = parts(post_processor);
    let template = templates.iter().find(|part| type_of(part) == "TemplateProcessing")?;
    template.get("single")?.get(0)?.get("SpecialToken")?.get("id")?.as_str()
}
