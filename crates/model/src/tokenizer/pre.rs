//! Pre-tokenizers that GGUF files name (`tokenizer.ggml.pre`).
//!
//! The names are llama.cpp's, the descriptions those of the models' own `tokenizer.json`.

use serde_json::{Value, json};

/// The pre-tokenizer that a name stands for.
#[derive(Debug)]
pub(super) struct Pre {
    pub(super) normalizer: Value,
    pub(super) pre_tokenizer: Value,
    /// Whether a whole word that is a token is taken without merging.
    pub(super) ignore_merges: bool,
    /// Whether BOS is added if the file does not say.
    pub(super) add_bos: bool,
}

/// The names that [`lookup`] knows.
pub(super) const SUPPORTED: &str = "default, gpt-2, phi-2, olmo, llama3, llama-v3, llama-bpe, falcon3, pixtral, dbrx, \
     smaug-bpe, gpt-4o, llama4, tekken, qwen2, deepseek-r1-qwen, smollm, starcoder, refact, codeshell";

const CONTRACTIONS: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)";
const SPACES: &str = r"\s*[\r\n]+|\s+(?!\S)|\s+";
const UPPER: &str = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]";
const LOWER: &str = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]";

/// The pre-tokenizer of a name; none if it is not known.
pub(super) fn lookup(name: &str) -> Option<Pre> {
    let digits = json!({"type": "Digits", "individual_digits": true});
    let gpt2 =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let plain =
        |pre_tokenizer| Pre { normalizer: Value::Null, pre_tokenizer, ignore_merges: false, add_bos: false };
    Some(match name {
        "gpt-2" | "phi-2" | "olmo" => plain(gpt2),
        "smollm" | "starcoder" | "refact" | "codeshell" => plain(sequence(vec![digits, gpt2])),
        "dbrx" | "smaug-bpe" => plain(split(&[&words("{1,3}")])),
        "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "pixtral" => {
            Pre { ignore_merges: true, add_bos: true, ..plain(split(&[&words("{1,3}")])) }
        }
        "qwen2" | "deepseek-r1-qwen" => {
            Pre { normalizer: json!({"type": "NFC"}), ..plain(split(&[&words("")])) }
        }
        "gpt-4o" | "llama4" => plain(split(&[&cased(&format!("{CONTRACTIONS}?"), "{1,3}")])),
        "tekken" => Pre { ignore_merges: true, add_bos: true, ..plain(split(&[&cased("", "")])) },
        "default" => plain(split(&[
            r"[\p{P}$+<=>^~|]+",
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
            r"\p{N}+",
            "[0-9][0-9][0-9]",
        ])),
        _ => return None,
    })
}

/// The pattern of GPT-4 (cl100k): words with what stands before them, digits in groups.
fn words(digits: &str) -> String {
    format!(
        r"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
    )
}

/// The pattern of GPT-4o (o200k): words are cut where lower case turns to upper case.
fn cased(contractions: &str, digits: &str) -> String {
    let before = r"[^\r\n\p{L}\p{N}]?";
    format!(
        r"{before}{UPPER}*{LOWER}+{contractions}|{before}{UPPER}+{LOWER}*{contractions}|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
    )
}

/// Cuts by each pattern in turn, then spells bytes.
fn split(patterns: &[&str]) -> Value {
    let cut = |pattern: &&str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    let mut parts: Vec<Value> = patterns.iter().map(cut).collect();
    parts.push(
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}),
    );
    sequence(parts)
}

fn sequence(parts: Vec<Value>) -> Value {
    json!({"type": "Sequence", "pretokenizers": parts})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_supported_name_has_a_pre_tokenizer() {
        for name in SUPPORTED.split(',').map(str::trim) {
            let pre = lookup(name).unwrap_or_else(|| panic!("{name}"));
            serde_json::from_value::<tokenizers::PreTokenizerWrapper>(pre.pre_tokenizer).expect(name);
        }
        assert!(lookup("kimi-k2").is_none());
    }
}
