//! Ingest: every chunk is prefilled alone, from position 0, and kept.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use refrain_kernels::{Buffer, Dtype, Slice};
use refrain_store::{BosPolicy, Chunk, ChunkId, PutOutcome};
use serde::Serialize;

use crate::forward::State;
use crate::{Document, Engine, PromptChunk, Result};

/// What an ingest did.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct IngestReport {
    /// Documents given.
    pub documents: usize,
    /// Chunks that they are cut into.
    pub chunks: usize,
    /// Chunks that had to be computed; the others were in the store.
    pub computed: usize,
    /// Chunk files that were broken, and are computed again.
    pub repaired: usize,
    /// Tokens of all chunks.
    pub tokens: usize,
    /// Tokens that were computed.
    pub computed_tokens: usize,
    /// Bytes of keys and values that were added.
    pub bytes: u64,
    /// Seconds that it took.
    pub seconds: f64,
    /// Why chunks could not be written to disk (they serve from memory while there is room), if so.
    pub not_stored: Option<String>,
}

/// Progress of an ingest.
#[derive(Clone, Copy, Debug)]
pub struct IngestProgress {
    /// Tokens to compute in all.
    pub total: usize,
    /// Tokens computed.
    pub done: usize,
}

/// Most characters of a title that name its chunks.
const LABEL: usize = 60;

impl Engine {
    /// Cuts documents into chunks of at most [`Settings::chunk_tokens`](crate::Settings::chunk_tokens); a chunk
    /// never crosses a document.
    ///
    /// # Errors
    /// If a text cannot be tokenised.
    pub fn chunks(&self, documents: &[Document]) -> Result<Vec<PromptChunk>> {
        let mut chunks = Vec::new();
        for (index, document) in documents.iter().enumerate() {
            let tokens = self.tokenize(&document.prompt_text())?;
            let parts = tokens.len().div_ceil(self.settings.chunk_tokens);
            let heading =
                || document.text.trim().lines().next().unwrap_or_default().trim_start_matches('#').trim();
            let title = match (document.title.trim(), heading()) {
                ("", "") => format!("document {}", index + 1),
                ("", heading) => heading.chars().take(LABEL).collect(),
                (title, _) => title.chars().take(LABEL).collect(),
            };
            for (part, tokens) in tokens.chunks(self.settings.chunk_tokens).enumerate() {
                let label =
                    if parts == 1 { title.clone() } else { format!("{title} ({}/{parts})", part + 1) };
                chunks.push(PromptChunk { tokens: tokens.to_vec(), label });
            }
        }
        Ok(chunks)
    }

    /// Computes and stores every chunk of the documents that the store does not have.
    ///
    /// # Errors
    /// If a text cannot be tokenised or the store cannot be read. A full disk is no error: the report says so.
    pub fn ingest(
        &self,
        documents: &[Document],
        mut progress: impl FnMut(IngestProgress),
    ) -> Result<IngestReport> {
        let started = Instant::now();
        let chunks = self.chunks(documents)?;
        let broken = || self.store.stats().removed;
        let broken_before = broken();
        let mut missing: Vec<(&PromptChunk, ChunkId)> = Vec::new();
        let mut seen = HashSet::new();
        for chunk in &chunks {
            let id = self.chunk_id(&chunk.tokens);
            if !self.store.contains(&id) && seen.insert(id.key()) {
                missing.push((chunk, id));
            }
        }
        let count = |chunks: &[(&PromptChunk, ChunkId)]| chunks.iter().map(|(c, _)| c.tokens.len()).sum();
        let total = count(&missing);
        let mut report = IngestReport {
            documents: documents.len(),
            chunks: chunks.len(),
            computed: missing.len(),
            repaired: (broken() - broken_before) as usize,
            tokens: chunks.iter().map(|chunk| chunk.tokens.len()).sum(),
            computed_tokens: total,
            ..IngestReport::default()
        };
        let mut done = 0;
        progress(IngestProgress { total, done });
        for (chunk, id) in missing {
            let (stored, outcome) = self.compute_chunk(id, &chunk.label)?;
            report.bytes += stored.bytes() as u64;
            if let PutOutcome::NotStored { error } = outcome {
                report.not_stored.get_or_insert(error.to_string());
            }
            done += chunk.tokens.len();
            progress(IngestProgress { total, done });
        }
        report.seconds = started.elapsed().as_secs_f64();
        Ok(report)
    }

    /// The identity of a document chunk under this model and these settings.
    pub(crate) fn chunk_id(&self, tokens: &[u32]) -> ChunkId {
        let bos = if self.tokenizer.bos().is_some() { BosPolicy::Dropped } else { BosPolicy::None };
        self.id(bos, tokens)
    }

    /// The identity of a system part, BOS included.
    pub(crate) fn system_id(&self, tokens: &[u32]) -> ChunkId {
        self.id(BosPolicy::Kept, tokens)
    }

    fn id(&self, bos: BosPolicy, tokens: &[u32]) -> ChunkId {
        let shape = self.decoder.shape();
        ChunkId {
            model: self.fingerprint,
            dtype: self.settings.kv,
            layers: shape.layers,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            bos,
            namespace: self.settings.namespace.clone(),
            tokens: tokens.to_vec(),
        }
    }

    /// Prefills a chunk alone and puts it into the store.
    pub(crate) fn compute_chunk(&self, id: ChunkId, label: &str) -> Result<(Chunk, PutOutcome)> {
        let mut tokens = Vec::with_capacity(id.tokens.len() + 1);
        let dropped = usize::from(id.bos == BosPolicy::Dropped);
        tokens.extend(self.tokenizer.bos().filter(|_| dropped == 1));
        tokens.extend_from_slice(&id.tokens);
        let layers = self.isolated(&tokens, dropped, id.dtype)?;
        let chunk = Chunk::new(id, label, layers)?;
        let outcome = self.store.put(chunk.clone())?;
        Ok((chunk, outcome))
    }

    /// One causal prefill from position 0. Keys before RoPE and values of each layer without the first `dropped`
    /// tokens, each `tokens × Hkv × d`.
    pub(crate) fn isolated(
        &self,
        ids: &[u32],
        dropped: usize,
        dtype: Dtype,
    ) -> Result<Vec<(Buffer, Buffer)>> {
        let config = self.decoder.config();
        let mut state = State::new(&self.decoder, dtype, ids.len(), ids.len());
        let mut rows = state.embed(ids, (0..ids.len() as u32).collect())?;
        let width = config.kv_heads * config.head_dim;
        let kept = dropped * width..ids.len() * width;
        let mut kv = Vec::with_capacity(config.layers);
        for layer in 0..config.layers {
            state.project(layer, &rows);
            let copy = |buffer: &Buffer| owned(buffer.as_slice().range(kept.clone()));
            kv.push((copy(&state.work.k), copy(&state.work.v)));
            // The last layer's output is nobody's input.
            if layer + 1 < config.layers {
                state.see_causally(layer, &mut rows);
                state.attend(layer, &mut rows);
            }
        }
        Ok(kv)
    }
}

fn owned(slice: Slice<'_>) -> Buffer {
    match slice {
        Slice::F32(x) => Buffer::F32(x.to_vec()),
        Slice::F16(x) => Buffer::F16(x.to_vec()),
        Slice::Bf16(x) => Buffer::Bf16(x.to_vec()),
    }
}

/// Tokens a second, 0 for no time.
pub fn rate(tokens: usize, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { tokens as f64 / time.as_secs_f64() }
}
