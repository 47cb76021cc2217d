//! Reading documents and cutting them into chunks.

use refrain_kernels::Dtype;

use super::{engine, exact, tiny};
use crate::{Document, Error, Settings};

#[test]
fn files_of_a_folder_become_documents_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    write("b.md", "# Beta\n\ntext of beta");
    write("a.txt", "text of alpha");
    write("c/d.jsonl", "{\"title\":\"Delta\",\"text\":\"text of delta\"}\n\n{\"text\":\"untitled\"}\n");
    write("picture.png", "\u{0}");
    write(".hidden.md", "no");
    write("empty.txt", " \n");
    let documents = Document::read(folder.path()).unwrap();
    let texts: Vec<String> = documents.iter().map(Document::prompt_text).collect();
    assert_eq!(
        texts,
        ["a\ntext of alpha\n\n", "# Beta\n\ntext of beta\n\n", "Delta\ntext of delta\n\n", "untitled\n\n"]
    );
}

#[test]
fn bad_documents_are_named_with_the_place() {
    let folder = tempfile::tempdir().unwrap();
    let error = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let error = Document::read(&path).unwrap_err();
        assert!(matches!(error, Error::Document { .. }));
        error.to_string()
    };
    let latin = error("latin.txt", b"caf\xe9 au lait");
    assert!(latin.contains("latin.txt") && latin.contains("byte 3"), "{latin}");
    let record = error("bad.jsonl", b"{\"text\":\"good\"}\n{\"title\":\"no text\"}\n");
    assert!(record.contains("line 2") && record.contains("text"), "{record}");
    let absent = Document::read(&folder.path().join("absent")).unwrap_err().to_string();
    assert!(absent.contains("absent"), "{absent}");
}

#[test]
fn chunks_never_cross_documents_and_hold_all_tokens() {
    let engine = engine(&tiny("llama"), Settings { chunk_tokens: 16, ..exact(Dtype::F32) });
    let document = |n: usize| Document { title: format!("Title {n}"), text: "some words to cut ".repeat(n) };
    let documents = [document(7), document(1)];
    let chunks = engine.chunks(&documents).unwrap();
    let whole: Vec<u32> = documents.iter().flat_map(|d| engine.tokenize(&d.prompt_text()).unwrap()).collect();
    assert_eq!(chunks.iter().flat_map(|c| c.tokens.clone()).collect::<Vec<_>>(), whole);
    assert!(chunks.iter().all(|c| c.tokens.len() <= 16));
    let first = engine.tokenize(&documents[0].prompt_text()).unwrap().len().div_ceil(16);
    assert_eq!(chunks[first - 1].label(), format!("Title 7 ({first}/{first})"));
    assert!(chunks[first].label().starts_with("Title 1"));
    let error = super::Engine::open(
        &tiny("llama"),
        refrain_store::Store::in_memory(1 << 20),
        Settings { chunk_tokens: 0, ..exact(Dtype::F32) },
        |_, _| (),
    );
    assert!(matches!(error, Err(Error::ChunkSize)));
}
