//! Ingest: every chunk is prefilled alone, from position 0, and kept.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_fusion::{Calibration, ContextLayer, FusionMethod, SamKv, Summarize};
use refrain_kernels::{Buffer, Dtype, Slice};
use refrain_kv::AuxTensors;
use refrain_store::{BosPolicy, Chunk, ChunkId, ChunkKey, KvQuantization, PutOutcome};
use serde::Serialize;

use crate::forward::{State, attention};
use crate::{Document, Engine, Prompt, PromptChunk, Result};

/// What an ingest did.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct IngestReport {
    /// Documents given.
    pub documents: usize,
    /// Chunks that they are cut into.
    pub chunks: usize,
    /// Chunks that had to be computed; the others were in the store.
    pub computed: usize,
    /// Those of them that were in the store and lacked a method's summary only.
    pub summarised: usize,
    /// Chunk files that were broken, and are computed again.
    pub repaired: usize,
    /// Tokens of all chunks.
    pub tokens: usize,
    /// Tokens that were computed.
    pub computed_tokens: usize,
    /// Bytes of keys and values that were added, and of summaries.
    pub bytes: u64,
    /// Seconds that it took.
    pub seconds: f64,
    /// Chunks that went to make room, of these documents or others, or whose time was over.
    pub evicted: usize,
    /// Names of the chunks.
    #[serde(skip)]
    pub keys: Vec<ChunkKey>,
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

/// Keys before RoPE and values of a layer.
type Kv = (Buffer, Buffer);

/// Most characters of a title that name its chunks.
const LABEL: usize = 60;

/// How long what waits for an object store does not look after others.
const PATIENCE: Duration = Duration::from_millis(5);

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
            let heading =
                || document.text.trim().lines().next().unwrap_or_default().trim_start_matches('#').trim();
            let title = match (document.title.trim(), heading()) {
                ("", "") => format!("document {}", index + 1),
                ("", heading) => heading.chars().take(LABEL).collect(),
                (title, _) => title.chars().take(LABEL).collect(),
            };
            self.cut(index, &title, &tokens, &mut chunks);
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
        progress: impl FnMut(IngestProgress),
    ) -> Result<IngestReport> {
        self.ingest_parts(&self.chunks(documents)?, documents.len(), &[], true, progress)
    }

    /// The same for a method: one that keeps only parts of documents has these prefilled whole, and keeps a summary of each
    /// beside it. What the store has already is only summarised.
    ///
    /// # Errors
    /// As for [`Engine::ingest`].
    pub fn ingest_for(
        &self,
        documents: &[Document],
        method: &dyn FusionMethod,
        progress: impl FnMut(IngestProgress),
    ) -> Result<IngestReport> {
        self.ingest_documents(documents, method, true, progress)
    }

    /// The same on the way to an answer: what comes from an object store is not waited for, but read while it comes.
    ///
    /// # Errors
    /// As for [`Engine::ingest`].
    pub fn ingest_to_answer(
        &self,
        documents: &[Document],
        method: &dyn FusionMethod,
        progress: impl FnMut(IngestProgress),
    ) -> Result<IngestReport> {
        self.ingest_documents(documents, method, false, progress)
    }

    fn ingest_documents(
        &self,
        documents: &[Document],
        method: &dyn FusionMethod,
        whole: bool,
        progress: impl FnMut(IngestProgress),
    ) -> Result<IngestReport> {
        let (summaries, chunks) = (method.summarizes(), self.chunks(documents)?);
        if summaries.is_empty() {
            return self.ingest_parts(&chunks, documents.len(), &[], whole, progress);
        }
        let prompt = Prompt { chunks, ..Prompt::default() };
        let contexts = prompt.contexts(self.longest_context()).chunks;
        self.ingest_parts(&contexts, documents.len(), &summaries, whole, progress)
    }

    /// Finds the layers over which SamKV averages, from documents, which are ingested for it; nothing if none of
    /// them is long enough. [`Engine::use_stable_layers`] makes use of it.
    ///
    /// # Errors
    /// As for [`Engine::ingest`].
    pub fn calibrate(
        &self,
        documents: &[Document],
        method: &SamKv,
        progress: impl FnMut(IngestProgress),
    ) -> Result<Option<Calibration>> {
        self.ingest_for(documents, method, progress)?;
        let prompt = Prompt { chunks: self.chunks(documents)?, ..Prompt::default() };
        let mut summaries = Vec::new();
        for context in prompt.contexts(self.longest_context()).chunks {
            let id = self.chunk_id(&context.tokens);
            let own = self.store.aux_tensors(&id, &method.kind())?;
            let shared = self.shared(&id).filter(|_| own.is_none());
            let shared = shared.map(|id| self.store.aux_tensors(&id, &method.kind())).transpose()?;
            summaries.extend(own.or(shared.flatten()));
        }
        Ok(method.calibrate(&summaries.iter().map(AsRef::as_ref).collect::<Vec<_>>()))
    }

    /// Most tokens that can be prefilled alone.
    pub(crate) fn longest_context(&self) -> usize {
        self.decoder.config().context.saturating_sub(1).max(1)
    }

    pub(crate) fn ingest_parts(
        &self,
        chunks: &[PromptChunk],
        documents: usize,
        summaries: &[&dyn Summarize],
        whole: bool,
        mut progress: impl FnMut(IngestProgress),
    ) -> Result<IngestReport> {
        let started = Instant::now();
        let (broken_before, evicted_before) = (self.store.removed(), self.store.evicted());
        let mut missing: Vec<(&PromptChunk, ChunkId, bool)> = Vec::new();
        let mut seen = HashSet::new();
        let mut report = IngestReport {
            documents,
            chunks: chunks.len(),
            tokens: chunks.iter().map(|chunk| chunk.tokens.len()).sum(),
            ..IngestReport::default()
        };
        let ids: Vec<ChunkId> = chunks.iter().map(|chunk| self.chunk_id(&chunk.tokens)).collect();
        self.prefetch(&ids, summaries, whole)?;
        for chunk in chunks {
            self.pause()?;
            let id = self.chunk_id(&chunk.tokens);
            let is_whole =
                |id: &ChunkId| summaries.iter().all(|of| self.store.has_aux_tensors(id, &of.kind()));
            let is_there = |id: &ChunkId| self.store.contains(id) || self.store.is_in_flight(id);
            let stored = is_there(&id);
            let shared = || self.shared(&id).is_some_and(|id| is_there(&id) && is_whole(&id));
            let whole = stored && is_whole(&id) || shared();
            if stored {
                self.store.renew(&id);
            }
            report.keys.push(id.key());
            if !whole && seen.insert(id.key()) {
                report.summarised += usize::from(stored);
                missing.push((chunk, id, stored));
            }
        }
        let total = missing.iter().map(|(chunk, ..)| chunk.tokens.len()).sum();
        report.computed = missing.len();
        report.repaired = (self.store.removed() - broken_before) as usize;
        report.computed_tokens = total;
        let mut done = 0;
        progress(IngestProgress { total, done });
        for (chunk, id, known) in missing {
            let (stored, made, outcome) = self.compute_chunk(id, &chunk.label(), summaries)?;
            report.bytes += if known { 0 } else { stored.bytes() as u64 };
            report.bytes += made.iter().map(|summary| summary.bytes() as u64).sum::<u64>();
            if let PutOutcome::NotStored { error } = outcome {
                report.not_stored.get_or_insert(error.to_string());
            }
            done += chunk.tokens.len();
            progress(IngestProgress { total, done });
        }
        report.evicted = (self.store.evicted() - evicted_before) as usize;
        report.seconds = started.elapsed().as_secs_f64();
        Ok(report)
    }

    /// Has the store fetch what it shares with others and lacks of these chunks, at once, and waits until it is known which of
    /// them come. They are read while they come, unless this is to wait until they are `whole`.
    pub(crate) fn prefetch(&self, own: &[ChunkId], summaries: &[&dyn Summarize], whole: bool) -> Result<()> {
        let shared: Vec<ChunkId> = own.iter().filter_map(|id| self.shared(id)).collect();
        let kinds: Vec<String> = summaries.iter().map(|of| of.kind()).collect();
        let kinds: Vec<&str> = kinds.iter().map(String::as_str).collect();
        let all: Vec<&ChunkId> = own.iter().chain(&shared).collect();
        self.patiently(|| {
            self.store.prefetch(&all, &kinds, whole);
            all.iter().for_each(|id| _ = self.store.is_in_flight(id));
        })
    }

    /// Does what may wait for an object store, and meanwhile pauses for others.
    pub(crate) fn patiently<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        if !self.store.fetches() {
            return Ok(work());
        }
        let this = std::thread::current();
        std::thread::scope(|scope| {
            let working = scope.spawn(|| {
                let done = work();
                this.unpark();
                done
            });
            let mut goes_on = Ok(());
            while !working.is_finished() {
                std::thread::park_timeout(PATIENCE);
                // The others go on even if this is not wanted any more.
                goes_on = goes_on.and(self.pause());
            }
            let done = working.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            goes_on.map(|()| done)
        })
    }

    /// The identity of a document chunk under this model and these settings.
    pub(crate) fn chunk_id(&self, tokens: &[u32]) -> ChunkId {
        let bos = if self.tokenizer.bos().is_some() { BosPolicy::Dropped } else { BosPolicy::None };
        ChunkId { quantization: self.settings.store_dtype, ..self.id(bos, tokens) }
    }

    /// What a document's chunks are called in the store, and if `whole`, what they are called for methods that have documents
    /// whole.
    pub fn keys_of(&self, chunks: &[PromptChunk], whole: bool) -> Vec<ChunkKey> {
        let prompt = Prompt { chunks: chunks.to_vec(), ..Prompt::default() };
        let mut all = prompt.chunks.clone();
        if whole {
            all.extend(prompt.contexts(self.longest_context()).chunks);
        }
        let mut keys: Vec<ChunkKey> = all.iter().map(|chunk| self.chunk_id(&chunk.tokens).key()).collect();
        keys.sort_unstable();
        keys.dedup();
        keys
    }

    /// What the same chunk is called in the namespace that is shared.
    pub(crate) fn shared(&self, id: &ChunkId) -> Option<ChunkId> {
        let namespace = self.settings.shared.clone()?;
        (namespace != id.namespace).then(|| ChunkId { namespace, ..id.clone() })
    }

    /// The identity of a system part, BOS included. It is a true prefix, and kept as computed.
    pub(crate) fn system_id(&self, tokens: &[u32]) -> ChunkId {
        self.id(BosPolicy::Kept, tokens)
    }

    fn id(&self, bos: BosPolicy, tokens: &[u32]) -> ChunkId {
        let shape = self.decoder.shape();
        ChunkId {
            model: self.fingerprint,
            dtype: self.settings.kv,
            quantization: KvQuantization::Exact,
            layers: shape.layers,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            bos,
            namespace: self.settings.namespace.clone(),
            tokens: tokens.to_vec(),
        }
    }

    /// Prefills a chunk alone and puts it into the store, with summaries of it.
    pub(crate) fn compute_chunk(
        &self,
        id: ChunkId,
        label: &str,
        summaries: &[&dyn Summarize],
    ) -> Result<(Chunk, Vec<Arc<AuxTensors>>, PutOutcome)> {
        let mut tokens = Vec::with_capacity(id.tokens.len() + 1);
        let dropped = usize::from(id.bos == BosPolicy::Dropped);
        tokens.extend(self.tokenizer.bos().filter(|_| dropped == 1));
        tokens.extend_from_slice(&id.tokens);
        let (layers, made) = self.isolated(&tokens, dropped, id.dtype, summaries)?;
        let chunk = Chunk::new(id, label, layers)?;
        let mut outcome = self.store.put(chunk.clone())?;
        for (of, summary) in summaries.iter().zip(&made) {
            let put = self.store.put_aux_tensors(chunk.id(), &of.kind(), summary.clone())?;
            if let failed @ PutOutcome::NotStored { .. } = put {
                outcome = failed;
            }
        }
        Ok((chunk, made.into_iter().map(Arc::new).collect(), outcome))
    }

    /// One causal prefill from position 0. Keys before RoPE and values of each layer without the first `dropped`
    /// tokens, each `tokens × Hkv × d`, and the summaries that are made of these.
    pub(crate) fn isolated(
        &self,
        ids: &[u32],
        dropped: usize,
        dtype: Dtype,
        summaries: &[&dyn Summarize],
    ) -> Result<(Vec<Kv>, Vec<AuxTensors>)> {
        let config = self.decoder.config();
        let mut state = State::new(&self.decoder, dtype, ids.len(), ids.len());
        let mut rows = state.embed(ids, (0..ids.len() as u32).collect())?;
        let width = config.kv_heads * config.head_dim;
        let kept = dropped * width..ids.len() * width;
        let mut kv = Vec::with_capacity(config.num_layers());
        let mut made = vec![AuxTensors::default(); summaries.len()];
        let local = summaries.iter().map(|of| of.local().min(ids.len() - dropped)).max().unwrap_or(0);
        let (mut queries, mut lse) = (Vec::new(), Vec::new());
        for layer in 0..config.num_layers() {
            self.pause()?;
            self.decoder.project(layer, &rows.x, &mut state.work);
            let query = config.heads * config.head_dim;
            if local > 0 {
                queries = state.work.q[(ids.len() - local) * query..].to_vec();
            }
            state.rotate_queries(layer, &rows);
            state.place(layer, &rows);
            let copy = |buffer: &Buffer| owned(buffer.as_slice().range(kept.clone()));
            kv.push((copy(&state.work.k), copy(&state.work.v)));
            state.see_causally(layer, &mut rows);
            let last = layer + 1 == config.num_layers();
            if !summaries.is_empty() {
                lse.resize(ids.len() * config.heads, 0.0);
                state.attend_reporting(layer, &rows, &mut lse);
                let cached = state.cache.layer(layer);
                let attention =
                    attention(&self.decoder, layer, (cached, ids.len()), &state.work.q, &rows.visible);
                let view = ContextLayer {
                    cpu: self.decoder.backend(),
                    layer,
                    layers: config.num_layers(),
                    attention,
                    lse: &lse,
                    first: dropped,
                    queries: &[],
                    k: state.work.k.as_slice().range(kept.clone()),
                };
                for (of, summary) in summaries.iter().zip(&mut made) {
                    let own = of.local().min(local);
                    let queries = &queries[(local - own) * query..];
                    of.summarize(&ContextLayer { queries, ..view }, summary);
                }
                if !last {
                    state.finish(layer, &mut rows);
                }
            } else if !last {
                // The last layer's output is nobody's input.
                state.attend(layer, &mut rows);
            }
        }
        Ok((kv, made))
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
