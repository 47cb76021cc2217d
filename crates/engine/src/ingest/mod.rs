//! Ingest: chunks are prefilled alone and kept in the store.

mod averaged;
mod calibrate;
mod chunk_prefill;
mod chunk_writer;
mod identity;
mod job;
mod prefilled_prefix;
mod prefix;
mod prompt_ingest;
mod requests;
mod shared;

#[cfg(test)]
pub(crate) use chunk_prefill::IsolatedRun;
pub(crate) use chunk_prefill::{ChunkPrefill, UnstoredChunk};
pub(crate) use chunk_writer::ChunkWriter;
pub use job::{Ingest, IngestProgress, IngestReport, rate};
pub(crate) use job::{SYSTEM_LABEL, kinds_of};
pub(crate) use prefilled_prefix::{AveragedPrefixes, PrefilledPrefix};
pub use prefix::Prefix;
pub use prompt_ingest::PromptIngest;
