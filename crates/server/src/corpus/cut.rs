//! A corpus for an engine, whose tokenizer and chunk size say how documents are cut.

use refrain::engine::{Document, Engine};

use super::store::DocumentStore;
use super::{Corpus, NewDocument};
use crate::api_error::Result;

/// A text that tells tokenizers with the same vocabulary apart, for [`segmentation`].
const PROBE: &str = "Hello,  world's 12345 tokens\n\tdef f(x): return x²; Straße, 螺栓用五牛米, ψηφιακό 🦀";

/// Identifies the tokenizer and the chunk size, which decide how documents are cut: a hash of the vocabulary, of the token
/// ids of a probe text, and of the chunk size.
fn segmentation(engine: &Engine) -> Result<String> {
    let tokenizer = engine.tokenizer();
    let mut hasher = blake3::Hasher::new_derive_key("refrain segmentation of documents, version 2");
    hasher.update(&(engine.settings().chunk_tokens as u64).to_le_bytes());
    for id in 0..tokenizer.vocab_size() as u32 {
        let bytes = tokenizer.bytes_of(id);
        hasher.update(&(bytes.len() as u64).to_le_bytes()).update(&bytes);
    }
    let probe = Document { title: String::new(), text: PROBE.to_owned() };
    for token in engine.chunks(&[probe])?.iter().flat_map(|chunk| &chunk.tokens) {
        hasher.update(&token.to_le_bytes());
    }
    Ok(hasher.finalize().to_hex().to_string())
}

/// The corpus of the stored documents, all of them indexed.
///
/// # Errors
/// If a document cannot be read, or cut again.
pub(crate) fn open_corpus(engine: &Engine, documents: DocumentStore) -> Result<Corpus> {
    let corpus = empty_corpus(engine, documents)?;
    let cut = |namespace: &str, document: Document| {
        let engine = engine.in_namespace(namespace, None);
        cut_document(&engine, document, false)
    };
    corpus.index_all(cut, |tokens| engine.tokenizer().decode(tokens, false))?;
    Ok(corpus)
}

/// The corpus of the stored documents, none of them indexed.
///
/// # Errors
/// If the probe text cannot be tokenised.
pub(crate) fn empty_corpus(engine: &Engine, documents: DocumentStore) -> Result<Corpus> {
    Corpus::new(documents, segmentation(engine)?)
}

/// Cuts a document into chunks. Its keys are those of the chunks, and with `with_contexts` also those of the whole
/// document, which some methods use.
///
/// # Errors
/// If the text cannot be tokenised.
pub(crate) fn cut_document(engine: &Engine, document: Document, with_contexts: bool) -> Result<NewDocument> {
    let chunks = engine.chunks(std::slice::from_ref(&document))?;
    Ok(NewDocument {
        keys: engine.keys_of(&chunks, with_contexts),
        chunk_texts: chunks.iter().map(|chunk| engine.tokenizer().decode(&chunk.tokens, false)).collect(),
        chunks: chunks.into_iter().map(|chunk| chunk.tokens).collect(),
        document,
    })
}
