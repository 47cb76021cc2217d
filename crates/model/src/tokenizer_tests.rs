use std::path::PathBuf;

use serde::Deserialize;

use super::{Detokenizer, Specials, Tokenizer};
use crate::files::ModelFiles;
use crate::gguf::Gguf;
use crate::template::{ChatTemplate, Message};
use crate::testing::GgufBuilder;

#[derive(Deserialize)]
struct Golden {
    tokenizer: Vec<Case>,
    chat: Vec<Chat>,
}

#[derive(Deserialize)]
struct Case {
    text: String,
    ids: Vec<u32>,
}

#[derive(Deserialize)]
struct Chat {
    messages: Vec<Message>,
    rendered: String,
}

fn golden(path: &str) -> Golden {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(path);
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn check(name: &str, files: &ModelFiles, golden: &Golden) -> Tokenizer {
    let tokenizer = Tokenizer::open(files).unwrap();
    for case in &golden.tokenizer {
        assert_eq!(
            tokenizer.encode(&case.text, Specials::Parse).unwrap(),
            case.ids,
            "{name}: {:?}",
            case.text
        );
        let mut detokenizer = Detokenizer::default();
        let pieces: String = case.ids.iter().filter_map(|id| detokenizer.push(&tokenizer, *id)).collect();
        let streamed = pieces + &detokenizer.finish().unwrap_or_default();
        assert_eq!(streamed, tokenizer.decode(&case.ids, true), "{name}: {:?}", case.text);
    }
    let template = ChatTemplate::open(files).unwrap().unwrap();
    for chat in &golden.chat {
        assert_eq!(template.render(&chat.messages, true).unwrap(), chat.rendered, "{name}");
    }
    tokenizer
}

#[test]
fn folders_agree_with_transformers() {
    for name in ["llama", "phi3"] {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny").join(name);
        let tokenizer =
            check(name, &ModelFiles::open(folder).unwrap(), &golden(&format!("tiny/{name}/golden.json")));
        assert!(tokenizer.bos().is_some(), "{name}");
    }
}

#[test]
fn gguf_files_agree_with_transformers() {
    for file in ["SmolLM2-135M-Instruct.Q4_1", "qwen2.5-coder-0.5b-instruct-q4_k_m"] {
        let Some(path) = crate::testing::real_model(&format!("{file}.gguf")) else { continue };
        let tokenizer = check(file, &ModelFiles::open(path).unwrap(), &golden(&format!("real/{file}.json")));
        assert_eq!(tokenizer.bos(), None, "{file}");
        let text = "before <|im_end|> after";
        let end = tokenizer.token_id("<|im_end|>").unwrap();
        assert!(tokenizer.encode(text, Specials::Parse).unwrap().contains(&end));
        let plain = tokenizer.encode(text, Specials::Plain).unwrap();
        assert!(!plain.contains(&end), "{file}: a user's text must not make special tokens");
        assert_eq!(tokenizer.decode(&plain, true), text);
        for case in
            golden(&format!("real/{file}.json")).tokenizer.iter().filter(|case| !case.text.contains("<|"))
        {
            assert_eq!(tokenizer.encode(&case.text, Specials::Plain).unwrap(), case.ids, "{:?}", case.text);
        }
    }
}

/// A SentencePiece vocabulary with a few words, single letters and all bytes.
fn sentence_piece() -> Tokenizer {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).into();
    let mut types = vec![2, 3, 3];
    for byte in 0..=255u8 {
        tokens.push(format!("<0x{byte:02X}>"));
        types.push(6);
    }
    for word in ["▁", "h", "e", "l", "o", "ll", "he", "hell", "▁hell", "▁hello", "lo"] {
        tokens.push(word.to_owned());
        types.push(1);
    }
    let scores: Vec<f32> =
        (0..tokens.len()).map(|id| if id < 259 { 0.0 } else { -((id - 258) as f32) }).collect();
    let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
    let bytes = GgufBuilder::new()
        .str("tokenizer.ggml.model", "llama")
        .strings("tokenizer.ggml.tokens", &tokens)
        .i32s("tokenizer.ggml.token_type", &types)
        .f32s("tokenizer.ggml.scores", &scores)
        .u32("tokenizer.ggml.bos_token_id", 1)
        .u32("tokenizer.ggml.unknown_token_id", 0)
        .build();
    super::gguf::read(&Gguf::from_bytes("small.gguf", bytes).unwrap()).unwrap()
}

#[test]
fn sentence_piece_merges_by_score_and_falls_back_to_bytes() {
    let tokenizer = sentence_piece();
    assert_eq!(tokenizer.bos(), Some(1));
    let spelled = |text: &str, specials| -> Vec<String> {
        let ids = tokenizer.encode(text, specials).unwrap();
        ids.iter().map(|id| tokenizer.token_text(*id).unwrap()).collect()
    };
    assert_eq!(spelled("hello", Specials::Plain), ["▁hello"]);
    assert_eq!(spelled("hell loo", Specials::Plain), ["▁hell", "▁", "lo", "o"]);
    assert_eq!(spelled("oé", Specials::Plain), ["▁", "o", "<0xC3>", "<0xA9>"]);
    assert_eq!(spelled("<s>", Specials::Parse), ["<s>"]);
    assert!(!spelled("<s>", Specials::Plain).contains(&"<s>".to_owned()));
    for text in ["hello hello", "日本 é", " o  l"] {
        let ids = tokenizer.encode(text, Specials::Plain).unwrap();
        assert_eq!(tokenizer.decode(&ids, true), text);
        let mut detokenizer = Detokenizer::default();
        let pieces: Vec<String> = ids.iter().filter_map(|id| detokenizer.push(&tokenizer, *id)).collect();
        assert_eq!(pieces.concat(), text);
        assert!(pieces.iter().all(|piece| !piece.contains('\u{FFFD}')), "{pieces:?}");
    }
    let mut detokenizer = Detokenizer::default();
    let half = tokenizer.token_id("<0xC3>").unwrap();
    assert_eq!(detokenizer.push(&tokenizer, half), None);
    assert_eq!(detokenizer.finish().as_deref(), Some("\u{FFFD}"));
}

#[test]
fn broken_vocabularies_are_errors() {
    let error = |builder: GgufBuilder| {
        super::gguf::read(&Gguf::from_bytes("small.gguf", builder.build()).unwrap()).unwrap_err().to_string()
    };
    let base = || {
        GgufBuilder::new()
            .str("tokenizer.ggml.model", "gpt2")
            .strings("tokenizer.ggml.tokens", &["a", "b", "ab"])
    };
    assert!(error(base().str("tokenizer.ggml.pre", "martian")).contains("martian"));
    assert!(error(base().strings("tokenizer.ggml.merges", &["ab"])).contains("merge 0"));
    assert!(error(base().strings("tokenizer.ggml.merges", &["a x"])).contains("small.gguf"));
    assert!(error(base().i32s("tokenizer.ggml.token_type", &[1])).contains("1 token types for 3 tokens"));
    let wordpiece =
        GgufBuilder::new().str("tokenizer.ggml.model", "bert").strings("tokenizer.ggml.tokens", &["a"]);
    assert!(error(wordpiece).contains("bert"));
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    assert!(Tokenizer::from_folder(&folder).unwrap_err().to_string().contains("tokenizer.json"));
}
