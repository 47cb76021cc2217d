//! The engine: ingest documents once, answer over their cached chunks with any fusion method, decode
//! in a KV cache that any eviction policy bounds.
//!
//! ```no_run
//! use refrain_engine::{Document, Engine, Request, Sampling, Settings};
//! use refrain_store::Store;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let store = Store::open("chunks", 1 << 30)?;
//! let engine = Engine::open("model.gguf".as_ref(), store, Settings::default(), |_, _| ())?;
//! let documents = Document::read("docs".as_ref())?;
//! engine.ingest(&documents, |_| ())?;
//! let prompt = engine.prompt(&documents, "How tight is a stem bolt?", &Default::default())?;
//! let a3 = refrain_fusion::METHODS.parse("a3:ratio=0.15")?;
//! let morph_kv = refrain_eviction::POLICIES.parse("morph_kv:capacity=600")?;
//! let sampling = Sampling::default();
//! let request = Request { eviction: &morph_kv, ..Request::new(a3.as_ref(), &sampling) };
//! let answer = engine.answer(&prompt, &request, |_| true)?;
//! println!("{}", answer.text);
//! # Ok(())
//! # }
//! ```

mod answer;
mod batch;
mod bounded;
mod closeness;
mod compare;
mod compose;
mod document;
mod error;
mod explain;
mod feed;
mod forward;
mod ingest;
mod likely;
mod load;
mod places;
mod prefill;
mod probe;
mod prompt;
mod retrieval;
mod sampling;
mod sparse;
mod stop;
#[cfg(test)]
mod tests;
mod writing;

pub use answer::{Account, Answer, Finish, Progress, Request};
pub use batch::{Ongoing, Steps, step};
pub use closeness::{Closeness, Hits, Reference};
pub use compare::{Agreement, Comparison};
pub use compose::Parts;
pub use document::Document;
pub use error::{Error, Result};
pub use explain::{Attended, Explanation, Shaded};
pub use ingest::{IngestProgress, IngestReport, rate};
pub use likely::Likely;
pub use probe::{AnswerTimes, DecodeTimes};
pub use prompt::{Prompt, PromptChunk};
pub use refrain_kernels::release_free_memory;
pub use sampling::{Sampling, argmax};

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use refrain_kernels::{Cpu, Dtype, Precision};
use refrain_kv::Span;
use refrain_model::{
    ChatTemplate, Decoder, Layout, Message, ModelFiles, Piece, PromptParts, Specials, Tokenizer,
};
use refrain_store::{KvQuantization, Store};

/// How an engine computes and keeps.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Threads; 0 for one a core.
    pub threads: usize,
    /// How weights are kept and multiplied; none for what the model's files come nearest to.
    pub precision: Option<Precision>,
    /// Type of cached keys and values.
    pub kv: Dtype,
    /// How documents' keys and values lie in the store.
    pub store_dtype: KvQuantization,
    /// Most tokens of a chunk; lowered to the model's context where that is less.
    pub chunk_tokens: usize,
    /// Chunks of one namespace are invisible to another.
    pub namespace: String,
    /// A namespace whose chunks are used where one's own lacks them; nothing is stored there.
    pub shared: Option<String>,
    /// Whether a missing or broken chunk is prefilled alone again; if not, it is computed within the prompt.
    pub repair: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            threads: 0,
            precision: None,
            kv: Dtype::F16,
            store_dtype: KvQuantization::Exact,
            chunk_tokens: 512,
            namespace: String::new(),
            shared: None,
            repair: true,
        }
    }
}

/// What stands around documents and question in a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instructions {
    /// The system message; none leaves it to the model's template.
    pub system: Option<String>,
    /// Said before the documents.
    pub before_documents: String,
    /// Said between the documents and the question.
    pub before_question: String,
    /// Earlier turns of the conversation.
    pub history: Vec<Message>,
}

impl Default for Instructions {
    fn default() -> Self {
        Instructions {
            system: None,
            before_documents: "Answer the question from these documents.\n\n".to_owned(),
            before_question:
                "Answer the question from the documents above, in one short sentence.\nQuestion: ".to_owned(),
            history: Vec::new(),
        }
    }
}

/// A model, its tokenizer and chat template, and the store of its chunks. Cheap to clone; clones share everything.
#[derive(Clone, Debug)]
pub struct Engine {
    decoder: Arc<Decoder>,
    tokenizer: Arc<Tokenizer>,
    template: Option<Arc<ChatTemplate>>,
    store: Store,
    settings: Settings,
    fingerprint: [u8; 32],
    /// Layers that were found to be stable for this model.
    stable_layers: Option<Span>,
    pool: Arc<forward::Pool>,
    between: Option<Between>,
}

/// What is done between two layers of a prefill, and whether it goes on then.
#[derive(Clone)]
struct Between(Arc<dyn Fn() -> bool + Send + Sync>);

impl fmt::Debug for Between {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Between")
    }
}

impl Engine {
    /// Opens a GGUF file or a Hugging Face folder. `progress(done, total)` is called as large files are hashed for
    /// the first time, and then as weights are packed.
    ///
    /// # Errors
    /// If the model's files are missing, truncated or unsupported, the chunk size is 0, or the environment variable
    /// `REFRAIN_CPU` asks for an instruction set that this machine lacks.
    pub fn open(
        path: &Path,
        store: Store,
        settings: Settings,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<Engine> {
        let files = ModelFiles::open(path)?;
        let tokenizer = Tokenizer::open(&files)?;
        let template = ChatTemplate::open(&files)?;
        let fingerprint = files.fingerprint(&mut progress);
        let cpu = Cpu::new(settings.threads)?;
        let precision = settings.precision.map_or_else(|| files.native_precision(), Ok)?;
        let decoder = Decoder::load(files, &cpu, precision, progress)?;
        Engine::new(decoder, tokenizer, template, store, settings, fingerprint)
    }

    /// An engine of its parts. `fingerprint` identifies weights and configuration in chunk names.
    ///
    /// # Errors
    /// If the chunk size is 0.
    pub fn new(
        decoder: Decoder,
        tokenizer: Tokenizer,
        template: Option<ChatTemplate>,
        store: Store,
        mut settings: Settings,
        fingerprint: [u8; 32],
    ) -> Result<Engine> {
        let context = decoder.config().context;
        if settings.chunk_tokens == 0 {
            return Err(Error::ChunkSize);
        }
        settings.chunk_tokens = settings.chunk_tokens.min(context.saturating_sub(1).max(1));
        let fingerprint = identity(fingerprint, decoder.precision());
        Ok(Engine {
            decoder: Arc::new(decoder),
            tokenizer: Arc::new(tokenizer),
            template: template.map(Arc::new),
            store,
            settings,
            fingerprint,
            stable_layers: None,
            pool: Arc::default(),
            between: None,
        })
    }

    /// The same engine with documents lying in the store in another way.
    pub fn store_dtype(&self, store_dtype: KvQuantization) -> Engine {
        Engine { settings: Settings { store_dtype, ..self.settings.clone() }, ..self.clone() }
    }

    /// The same engine for the chunks of another namespace, with those of a shared one where it lacks its own.
    pub fn in_namespace(&self, namespace: &str, shared: Option<&str>) -> Engine {
        let (namespace, shared) = (namespace.to_owned(), shared.map(str::to_owned));
        Engine { settings: Settings { namespace, shared, ..self.settings.clone() }, ..self.clone() }
    }

    /// The same engine doing something between any two layers of a prefill, which says whether to go on. If not, what was
    /// asked ends with [`Error::Cancelled`].
    pub fn pausing(&self, between: impl Fn() -> bool + Send + Sync + 'static) -> Engine {
        Engine { between: Some(Between(Arc::new(between))), ..self.clone() }
    }

    /// Called between two layers of a prefill.
    pub(crate) fn pause(&self) -> Result<()> {
        let goes_on = self.between.as_ref().is_none_or(|between| (between.0)());
        if goes_on { Ok(()) } else { Err(Error::Cancelled) }
    }

    /// The decoder.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The chunk store.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// What identifies weights, configuration and precision in chunk names.
    pub fn fingerprint(&self) -> [u8; 32] {
        self.fingerprint
    }

    /// Lets SamKV average over these layers, from 0; without them, over the last `max(4, L/8)`.
    pub fn use_stable_layers(&mut self, layers: Option<std::ops::Range<usize>>) {
        self.stable_layers = layers.map(|layers| Span::new(layers.start, layers.end));
    }

    /// Whether a token ends an answer.
    pub fn is_end(&self, token: u32) -> bool {
        self.ends().any(|end| end == token)
    }

    /// Tokens that end an answer.
    pub(crate) fn ends(&self) -> impl Iterator<Item = u32> {
        self.decoder.config().eos.iter().chain(self.tokenizer.eos_ids()).copied()
    }

    /// Ids of a user's text; special tokens written in it are ordinary characters.
    pub(crate) fn tokenize(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode(text, Specials::Plain)?)
    }

    /// The prompt of a question over documents. Each part is tokenised once, alone.
    ///
    /// # Errors
    /// If the question is empty, or the chat template or tokenizer refuses a part.
    pub fn prompt(&self, documents: &[Document], question: &str, around: &Instructions) -> Result<Prompt> {
        let chunks = self.chunks(documents)?;
        let question = question.trim();
        if question.is_empty() {
            return Err(Error::EmptyQuestion);
        }
        let (before, asked) = if documents.is_empty() {
            (String::new(), question.to_owned())
        } else {
            (around.before_documents.clone(), format!("{}{question}", around.before_question))
        };
        let parts = match &self.template {
            Some(template) => template.split(&Layout {
                system: around.system.clone(),
                before_documents: before,
                question: asked,
                history: around.history.clone(),
            })?,
            None => plain(around, before, asked),
        };
        let ends = self.around(&parts)?;
        Ok(Prompt { system_reusable: around.history.is_empty(), chunks, ..ends })
    }
}

/// What names a model's chunks: weights and configuration, and the precision that they are computed with.
pub fn identity(fingerprint: [u8; 32], precision: Precision) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("refrain 2026-11 model fingerprint and precision");
    hasher.update(&fingerprint).update(precision.to_string().as_bytes());
    *hasher.finalize().as_bytes()
}

/// The parts for a model without a chat template.
fn plain(around: &Instructions, before: String, asked: String) -> PromptParts {
    let text = |text: String| Piece { text, literal: false };
    let mut system: Vec<Piece> = around.system.iter().map(|system| text(format!("{system}\n\n"))).collect();
    system.extend(around.history.iter().map(|turn| text(format!("{}: {}\n", turn.role, turn.content))));
    system.push(text(before));
    system.retain(|piece| !piece.text.is_empty());
    PromptParts { system, question: vec![text(format!("{asked}\nAnswer:"))] }
}
