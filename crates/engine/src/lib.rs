//! The engine: ingest documents once, answer over their cached chunks with any fusion method, decode
//! in a KV cache that any eviction policy bounds.
//!
#![doc = concat!("```no_run\n", include_str!("../examples/answer.rs"), "```")]

mod advance;
mod background;
mod cache;
mod decode;
mod device_choice;
mod device_chunks;
mod device_memory;
mod engine;
mod error;
mod explanation;
mod finite;
mod forward;
mod generate;
mod ingest;
mod limits;
mod logprobs;
mod measure;
mod prefill;
mod prefill_rate;
mod prefix_cache;
mod prompt;
mod request;
mod sampling;
mod sequence;
mod step_cost;
mod stream;
#[cfg(test)]
mod tests;

pub use advance::Advance;
pub use decode::{DecodeWorkspace, decode_step};
pub use device_choice::{DeviceChoice, UnknownDevice};
pub use device_chunks::DeviceChunkStats;
pub use device_memory::RequestMemory;
pub use engine::{Engine, Settings, identity};
pub use error::{Error, Result};
pub use explanation::{AttendedToken, Explanation, ShadedChunk};
pub use generate::Prefill;
pub use ingest::{Ingest, IngestProgress, IngestReport, Prefix, PromptIngest, rate};
pub use logprobs::TokenLogprobs;
pub use measure::{Agreement, AnswerTimes, Comparison, DecodeTimes, Fidelity, Hits, Oracle, Reference};
pub use prompt::{Document, Instructions, Parts, Prompt, PromptChunk};
pub use refrain_kernels::{DeviceFailure, keep_large_memory_apart, release_free_memory};
pub use request::{Answer, FinishReason, GenerateRequest, RequestStats, TokenEvent};
pub use sampling::{Grammar, Sampling, StructuredOutput, argmax, with_closed_objects, without_unreadable};
pub use sequence::Sequence;
pub use stream::{Token, TokenStream};
