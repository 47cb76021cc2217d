//! Answers from documents that were prefilled once: each chunk's KV cache is kept, reused at any position of any later prompt, and
//! repaired where the question looks.
//!
//! [`EngineOptions`] opens a model with its store, [`Engine::ingest`] prefills documents, and a [`Question`] is answered in one piece,
//! token by token, or by several methods side by side. A [`Library`] keeps documents, and finds the chunks that a question is about.
//!
//! ```no_run
//! use refrain::{EngineOptions, Question, documents};
//!
//! let engine = EngineOptions::new("smollm2-135m").open()?;
//! let manuals = documents::read_path("examples/docs/drive".as_ref()).documents;
//! engine.ingest(&manuals, |progress| eprintln!("{} of {} tokens", progress.done, progress.total))?;
//!
//! let question = Question::new("How far does a waxed chain run between treatments?").documents(manuals);
//! for token in question.stream(&engine)? {
//!     print!("{}", token?.text);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The crates below are here by their own names: [`fusion`] has the methods, [`eviction`] the policies, [`store`] the chunks, [`corpus`] the
//! documents that are kept and searched, [`model`]
//! the files, tokenizers and chat templates, [`documents`] the readers of documents, [`kernels`] the devices.

mod calibration;
mod choice;
mod engine_options;
mod error;
pub mod folders;
mod hub;
mod models;
pub mod quantities;
mod question;
mod system_bytes;

pub use calibration::{CalibrationFile, calibration_path, fingerprint, stable_layers};
pub use choice::{AUTO, Choice, TunedFile, choice, tuned_path};
pub use engine_options::{EngineOptions, open};
pub use error::{Error, Result};
pub use hub::{Address, hub_cache, hub_setting, hub_token};
pub use models::{KNOWN, KnownModel, known_names, resolve};
pub use question::Question;
pub use refrain_corpus::{Found, Library};
pub use refrain_engine::{
    Answer, Comparison, DeviceChoice, Document, Engine, FinishReason, GenerateRequest, IngestProgress,
    IngestReport, Instructions, Prefix, Prompt, PromptChunk, RequestStats, Sampling, Settings,
    StructuredOutput, Token, TokenStream,
};
pub use system_bytes::{memory_limit, system_bytes};
pub use {
    refrain_corpus as corpus, refrain_documents as documents, refrain_engine as engine,
    refrain_eviction as eviction, refrain_fusion as fusion, refrain_kernels as kernels,
    refrain_model as model, refrain_registry as registry, refrain_store as store,
};

/// The chapter of the book whose programs are doctests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/book/src/rust.md")]
struct Book;
