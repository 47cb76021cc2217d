//! Documents cut into chunks by an engine, whose tokenizer and chunk size say where.

use refrain_engine::{Document, Engine, Parts};
use refrain_store::ChunkKey;

use crate::error::Result;
use crate::tables::stored_bytes;

/// A text that tells tokenizers with the same vocabulary apart, for [`segmentation`].
const PROBE: &str = "Hello,  world's 12345 tokens\n\tdef f(x): return x²; Straße, 螺栓用五牛米, ψηφιακό 🦀";

/// Identifies the tokenizer and the chunk size, which decide how documents are cut: a hash of the vocabulary, of the token
/// ids of a probe text, and of the chunk size.
pub(crate) fn segmentation(engine: &Engine) -> Result<String> {
    let mut hasher = blake3::Hasher::new_derive_key("refrain segmentation of documents, version 3");
    hasher.update(&(engine.settings().chunk_tokens as u64).to_le_bytes());
    add_vocabulary(engine, &mut hasher);
    let probe = Document { title: String::new(), text: PROBE.to_owned() };
    for token in engine.chunks(&[probe])?.iter().flat_map(|chunk| &chunk.tokens) {
        hasher.update(&token.to_le_bytes());
    }
    Ok(hasher.finalize().to_hex().to_string())
}

/// Identifies the tokenizer, which decides what the token ids of a chunk mean: a hash of the vocabulary and of the token ids of a probe text.
///
/// # Errors
/// If the tokenizer fails.
pub fn tokenizer_digest(engine: &Engine) -> Result<[u8; 32]> {
    let mut hasher = blake3::Hasher::new_derive_key("refrain tokenizer, version 1");
    add_vocabulary(engine, &mut hasher);
    let probe = engine.compose(&Parts { question: PROBE, ..Parts::default() })?;
    for token in probe.question {
        hasher.update(&token.to_le_bytes());
    }
    Ok(*hasher.finalize().as_bytes())
}

fn add_vocabulary(engine: &Engine, hasher: &mut blake3::Hasher) {
    let tokenizer = engine.tokenizer();
    for id in 0..tokenizer.vocab_size() as u32 {
        let bytes = tokenizer.bytes_of(id);
        hasher.update(&(bytes.len() as u64).to_le_bytes()).update(&bytes);
    }
}

/// A document with its chunks, ready to be stored and searched.
#[derive(Debug)]
pub struct NewDocument {
    /// Title and text.
    pub document: Document,
    /// Token ids of each chunk.
    pub chunks: Vec<Vec<u32>>,
    /// Text of each chunk.
    pub chunk_texts: Vec<String>,
    /// Keys of the chunks in the chunk store.
    pub keys: Vec<ChunkKey>,
}

impl NewDocument {
    /// Cuts a document into chunks. Its keys are those of the chunks, and with `with_contexts` also those of the whole
    /// document, which some methods use.
    ///
    /// # Errors
    /// If the text cannot be tokenised.
    pub fn cut(engine: &Engine, document: Document, with_contexts: bool) -> Result<NewDocument> {
        let chunks = engine.chunks(std::slice::from_ref(&document))?;
        let text = |tokens: &[u32]| engine.tokenizer().decode(tokens, false);
        Ok(NewDocument {
            keys: engine.keys_of(&chunks, with_contexts),
            chunk_texts: chunks.iter().map(|chunk| text(&chunk.tokens)).collect(),
            chunks: chunks.into_iter().map(|chunk| chunk.tokens).collect(),
            document,
        })
    }

    /// Bytes of its rows in the documents' file, about.
    pub(crate) fn bytes(&self) -> u64 {
        let tokens: usize = self.chunks.iter().map(Vec::len).sum();
        let beside_texts = tokens * size_of::<u32>() + self.keys.len() * 2 * size_of::<ChunkKey>();
        stored_bytes(&self.document) + beside_texts as u64
    }
}
