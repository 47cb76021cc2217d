//! The engine: ingest documents once, answer over their cached chunks with any fusion method, decode
//! in a KV cache that any eviction policy bounds.
//!
//! ```no_run
//! use refrain_engine::{Document, Engine, GenerateRequest, Sampling, Settings};
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
//! let request = GenerateRequest { eviction: morph_kv, ..GenerateRequest::new(a3, Sampling::default()) };
//! let answer = engine.answer(&prompt, &request, |_| true)?;
//! println!("{}", answer.text);
//! # Ok(())
//! # }
//! ```

mod advance;
mod background;
mod cache;
mod decode;
mod engine;
mod error;
mod explanation;
mod forward;
mod generate;
mod ingest;
mod limits;
mod logprobs;
mod measure;
mod prefill;
mod prompt;
mod request;
mod sampling;
mod sequence;
#[cfg(test)]
mod tests;

pub use advance::Advance;
pub use decode::{DecodeWorkspace, decode_step};
pub use engine::{Engine, Settings, identity};
pub use error::{Error, Result};
pub use explanation::{AttendedToken, Explanation, ShadedChunk};
pub use generate::Prefill;
pub use ingest::{Ingest, IngestProgress, IngestReport, rate};
pub use logprobs::TokenLogprobs;
pub use measure::{Agreement, AnswerTimes, Comparison, DecodeTimes, Fidelity, Hits, Reference};
pub use prompt::{Document, Instructions, Parts, Prompt, PromptChunk};
pub use refrain_kernels::release_free_memory;
pub use request::{Answer, FinishReason, GenerateRequest, RequestStats, TokenEvent};
pub use sampling::{Sampling, argmax};
pub use sequence::Sequence;
