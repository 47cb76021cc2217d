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
pub(super) const SUPPORTED: &str = "default, gpt-2, phi-2, olmo, mellum, a.x-4.0, trillion, llama3, llama-v3, \
     llama-bpe, falcon3, pixtral, midm-2.0, dbrx, smaug-bpe, gpt-4o, llama4, tekken, qwen2, deepseek-r1-qwen, megrez, kormo, smollm, starcoder, \
     refact, codeshell, minerva-7b, deepseek-llm, deepseek-coder, seed-coder";

const CONTRACTIONS: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)";
const SPACES: &str = r"\s*[\r\n]+|\s+(?!\S)|\s+";
/// Chinese, Korean and other letters without case, which DeepSeek's first models cut out of words.
const CJK: &str = r"[\u{4E00}-\u{9FA5}\u{0800}-\u{4E00}\u{AC00}-\u{D7FF}]+";
/// DeepSeek LLM's letters: those with case, in an early state of Unicode.
const CASED: &str = r"[[\p{Lu}\p{Ll}\p{Lt}]--[\u{560}-\u{588}\u{10C7}\u{10CD}\u{10D0}-\u{10FF}\u{1C80}-\u{1C8A}\u{1FBE}\u{2D00}-\u{2D2D}\u{A790}-\u{A7FA}\u{AB30}-\u{AB68}\u{10570}-\u{105BC}\u{10D50}-\u{10D85}\u{16E40}-\u{16E7F}\u{1D400}-\u{1D7CB}\u{1DF00}-\u{1DF2A}]]";
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
        "gpt-2" | "phi-2" | "olmo" | "mellum" | "a.x-4.0" | "trillion" => plain(gpt2),
        "smollm" | "starcoder" | "refact" | "codeshell" | "minerva-7b" => plain(sequence(vec![digits, gpt2])),
        "dbrx" | "smaug-bpe" => plain(split(&[&words("{1,3}", LINES)])),
        "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "pixtral" | "midm-2.0" => {
            Pre { ignore_merges: true, add_bos: true, ..plain(split(&[&words("{1,3}", LINES)])) }
        }
        "qwen2" | "deepseek-r1-qwen" => {
            Pre { normalizer: json!({"type": "NFC"}), ..plain(split(&[&words("", LINES)])) }
        }
        "megrez" | "kormo" => plain(split(&[&words("", LINES)])),
        "seed-coder" => plain(split(&[&words("", "")])),
        "deepseek-llm" => plain(split(&[
            r"[\r\n]",
            &format!(r"\s?{CASED}+"),
            r"\s?[!-/:-~\u{FF01}-\u{FF0F}\u{FF1A}-\u{FF5E}\u{2018}-\u{201F}\u{3000}-\u{3002}]+",
            r"\s+$",
            CJK,
            r"\p{N}",
        ])),
        "deepseek-coder" => plain(split(&[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, r"\p{N}"])),
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

/// Line breaks that go with the marks before them.
const LINES: &str = r"[\r\n]*";

/// The pattern of GPT-4 (cl100k): words with what stands before them, digits in groups, marks with `lines` behind them.
fn words(digits: &str, lines: &str) -> String {
    format!(
        r"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+{lines}|{SPACES}"
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
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, PreTokenizerWrapper};

    use super::*;

    #[test]
    fn every_supported_name_has_a_pre_tokenizer() {
        for name in SUPPORTED.split(',').map(str::trim) {
            let pre = lookup(name).unwrap_or_else(|| panic!("{name}"));
            serde_json::from_value::<PreTokenizerWrapper>(pre.pre_tokenizer).expect(name);
        }
        assert!(lookup("kimi-k2").is_none());
    }

    /// The words that the patterns of the models' own `tokenizer.json` give.
    #[test]
    fn words_are_cut_as_the_models_cut_them() {
        let words = |name: &str, text: &str| -> Vec<String> {
            let pre: PreTokenizerWrapper =
                serde_json::from_value(lookup(name).unwrap().pre_tokenizer).unwrap();
            let mut text = PreTokenizedString::from(text);
            pre.pre_tokenize(&mut text).unwrap();
            let splits = text.get_splits(OffsetReferential::Original, OffsetType::Byte);
            splits.into_iter().map(|(word, ..)| word.replace('Ġ', " ").replace('Ċ', "\n")).collect()
        };
        for (name, text, expected) in [
            ("deepseek-coder", "x = 12;\n\n  y", &["x", " = ", "1", "2", ";", "\n", "\n", " ", " y"][..]),
            ("deepseek-llm", "x = 12;\n\n  y", &["x", " =", " ", "1", "2", ";", "\n", "\n", " ", " y"]),
            ("deepseek-llm", "a ", &["a", " "]),
            ("seed-coder", "x();\n\n12 y", &["x", "();", "\n\n", "1", "2", " y"]),
            ("megrez", "x();\n\n12 y", &["x", "();\n\n", "1", "2", " y"]),
            ("midm-2.0", "x();\n\n12 y", &["x", "();\n\n", "12", " y"]),
            ("trillion", "x 12", &["x", " 12"]),
            ("minerva-7b", "x 12", &["x", " ", "1", "2"]),
        ] {
            assert_eq!(words(name, text), expected, "{name}: {text:?}");
        }
        // Letters are told by the bytes that they are written as.
        for (name, text, count) in [("deepseek-llm", "ბაДа図书a", 4), ("deepseek-coder", "bД図书a", 3)]
        {
            assert_eq!(words(name, text).len(), count, "{name}: {:?}", words(name, text));
        }
        assert!(lookup("midm-2.0").unwrap().add_bos && lookup("midm-2.0").unwrap().ignore_merges);
    }
}
