//! Documents cut into chunks.

use refrain_kernels::Dtype;

use super::{engine, exact, tiny};
use crate::{Document, Error, Parts, Settings};

fn read(engine: &super::Engine, tokens: &[u32]) -> String {
    engine.tokenizer().decode(tokens, false)
}

#[test]
fn chunks_never_cross_documents_and_follow_their_structure() {
    let engine = engine(&tiny("llama"), Settings { chunk_tokens: 80, ..exact(Dtype::F32) });
    let handbook = "# Handbook\n\nWords on bikes. More words on them.\n\n## Brakes\n\n### Rear wheel\n\n\
                    Turn the left screw by a half. Then turn the right screw.\n\n## Lights\n\nA lamp.\n";
    let document = |title: &str, text: &str| Document { title: title.to_owned(), text: text.to_owned() };
    let chunks = engine.chunks(&[document("Handbook", handbook), document("Note", " A bell. ")]).unwrap();
    let of = |document: usize| chunks.iter().filter(move |chunk| chunk.document == document);
    let texts: Vec<String> = of(0).map(|chunk| read(&engine, &chunk.tokens)).collect();
    assert!(texts.len() > 2, "{texts:?}");
    assert!(texts[0].starts_with("Handbook\n\nWords on bikes."), "{texts:?}");
    assert!(
        texts.iter().any(|text| text.starts_with("Handbook > Brakes > Rear wheel\n\nTurn ")),
        "{texts:?}"
    );
    assert!(texts.last().unwrap().ends_with("A lamp.\n\n"));
    for (index, (chunk, text)) in of(0).zip(&texts).enumerate() {
        assert!(chunk.tokens.len() <= 80 && text.ends_with(".\n\n"), "{text:?}");
        assert_eq!(chunk.label(), format!("Handbook ({}/{})", index + 1, texts.len()));
    }
    // A document that fits is as it is, below its title.
    let note: Vec<String> = of(1).map(|chunk| read(&engine, &chunk.tokens)).collect();
    assert_eq!(note, ["Note\nA bell.\n\n"]);
}

#[test]
fn no_document_is_without_chunks_and_no_chunk_too_long() {
    let texts = [
        "",
        "x",
        "wörter 一二三 ohne Ende ".repeat(40).leak(),
        "ab".repeat(300).leak(),
        "🦀".repeat(90).leak(),
    ];
    for chunk_tokens in [1, 2, 7, 16, 64] {
        let engine = engine(&tiny("llama"), Settings { chunk_tokens, ..exact(Dtype::F32) });
        for title in ["", "Title", "A title of many more words than there are in others ".repeat(9).leak()] {
            for text in texts {
                let document = Document { title: title.to_owned(), text: text.to_owned() };
                let chunks = engine.chunks(&[document]).unwrap();
                assert!(!chunks.is_empty() && chunks.iter().all(|chunk| !chunk.tokens.is_empty()));
                assert!(chunks.iter().all(|chunk| chunk.tokens.len() <= chunk_tokens), "{title:?} {text:?}");
                let read: String = chunks.iter().map(|chunk| read(&engine, &chunk.tokens)).collect();
                let letters = |text: &str| text.chars().filter(|c| "ö一🦀".contains(*c)).count();
                if chunk_tokens > 7 {
                    assert_eq!(letters(&read), letters(text), "{title:?} {text:?}");
                }
            }
        }
    }
}

/// A benchmark's prompt has the tokens of its text, whatever its chunks.
#[test]
fn composed_prompts_are_cut_between_sentences_and_keep_their_tokens() {
    let engine = engine(&tiny("llama"), Settings { chunk_tokens: 48, ..exact(Dtype::F32) });
    let text = "Passage 1:\nThe first sentence has words. The second one has more words in it. And a third.\n\n\
                Another paragraph is here. It ends now.\n\n";
    let documents = [text.to_owned(), "Short.".to_owned()];
    let parts = Parts { documents: &documents, question: "why?", ..Parts::default() };
    let prompt = engine.compose(&parts).unwrap();
    let of = |document: usize| prompt.chunks.iter().filter(move |chunk| chunk.document == document);
    let tokens: Vec<u32> = of(0).flat_map(|chunk| chunk.tokens.clone()).collect();
    assert_eq!(tokens, engine.tokenize(text).unwrap());
    assert_eq!(of(1).count(), 1);
    let texts: Vec<String> = of(0).map(|chunk| read(&engine, &chunk.tokens)).collect();
    assert!(texts.len() > 2 && texts.iter().all(|text| text.trim_end().ends_with('.')), "{texts:?}");
    assert!(of(0).all(|chunk| chunk.tokens.len() <= 48));
}

#[test]
fn a_chunk_has_tokens() {
    let error = super::Engine::open(
        &tiny("llama"),
        refrain_store::Store::in_memory(1 << 20),
        Settings { chunk_tokens: 0, ..exact(Dtype::F32) },
        |_, _| (),
    );
    assert!(matches!(error, Err(Error::ChunkSize)));
}
