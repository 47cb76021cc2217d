//! Memory of an engine's work on a device with memory of its own, counted before the work begins, so that it is refused if it does not fit.
//!
//! With hidden states of D elements, queries of Q = heads · head dim, keys of W = KV heads · head dim, networks of I and logits of V elements,
//! c bytes of an activation as a product takes it (2, or 4 in `f32`) and s bytes of a cached element, the bytes are:
//!
//! | | |
//! |---|---|
//! | keys and values | [`Engine::max_kv_bytes`] |
//! | a token under way | 4 · (D + max(D, Q) + 4 Q + heads) + 2 · W · s: hidden states and room to gather them, queries, these before rotation, attention's output and that of a report, log-sum-exps, fresh keys and values |
//! | a step | the most of: c · D + 4 · (Q + 2 W) for each projected row (8192 at a time); c · (Q + D + I) + 8 · D for each row of `--ubatch-size` in a network, or what experts gather; attention in pieces; c · D + 4 · V for each row with logits |
//!
//! Tokens under way are those that a method computes at most ([`FusionMethod::max_rows`]). Each loader holds a layer of a chunk besides. A missing
//! chunk is prefilled alone before the prompt has keys and values: the more of both counts.

use std::fmt;

use refrain_eviction::Eviction;
use refrain_fusion::{ChunkSpan, FusionMethod, PromptLayout};
use refrain_kernels::{MAX_BLOCK_ROWS, Precision};
use refrain_model::{Config, LayerSpec};

use crate::device_chunks::ClosedChunks;
use crate::engine::Engine;
use crate::error::mib;
use crate::prefill::{loaders, loading_bytes};
use crate::prompt::Prompt;
use crate::{Error, Result};

/// One part in so many of a device's memory is left alone: for reports of methods and policies, what loaders bring in, and memory that is free in
/// pieces that are too small.
const MARGIN: u64 = 20;
/// Keys of a piece of attention at least, and rows and heads of all pieces at most: where few rows see many keys, a GPU is filled by pieces of keys.
const PIECE: usize = 192;
const PIECES: usize = 256 * 64;
/// Rows, times the heads of a KV head, that have pieces of so many keys, however many those are.
const FEW_ENTRIES: usize = 16;

/// The memory of a device with memory of its own that is there for requests, and what the rest of the free memory is for.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RequestMemory {
    /// Name of the device.
    pub device: String,
    /// Bytes that are free, weights being in place.
    pub free: u64,
    /// Bytes of steps, of tokens that are decoded, and of chunks that are ingested.
    pub steps: u64,
    /// Bytes that the prefix cache may take.
    pub prefix_cache: u64,
    /// Bytes that chunks in the device's memory may take.
    pub device_chunks: u64,
    /// Bytes that are left alone.
    pub margin: u64,
    /// Bytes for requests: keys and values, and tokens of prompts under way.
    pub requests: u64,
}

impl fmt::Display for RequestMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RequestMemory { device, free, steps, prefix_cache, device_chunks, margin, requests } = self;
        write!(
            f,
            "of {} that are free on {device}, steps take {}, the prefix cache {}, the cache of chunks {}, and {} stay free: {} are left for requests",
            mib(*free),
            mib(*steps),
            mib(*prefix_cache),
            mib(*device_chunks),
            mib(*margin),
            mib(*requests)
        )
    }
}

impl Engine {
    /// The memory for requests of a server that decodes at most `decoded` tokens a step and has at most `ingests` ingests under way. None for a
    /// device that computes in the host's memory.
    ///
    /// # Errors
    /// If a prompt of one chunk does not fit.
    pub fn request_memory(&self, decoded: usize, ingests: usize) -> Result<Option<RequestMemory>> {
        let device = self.decoder().device();
        let Some(memory) = device.memory() else { return Ok(None) };
        let (settings, config) = (self.settings(), self.decoder().config());
        let left = if settings.left_tokens < config.context { settings.left_tokens } else { 0 };
        let chunk = (self.before_chunks().len() + left + settings.chunk_tokens).min(config.context);
        let decoding = self.token_bytes(decoded) + 8 * product(&[decoded, config.heads, config.head_dim]);
        let steps = self.step_bytes(config.context, config.context, decoded) + decoding;
        let steps = steps + ingests as u64 * (self.token_bytes(chunk) + self.layer_bytes(chunk));
        let (prefix_cache, device_chunks) =
            (self.prefix_cache().bound() as u64, self.device_chunks().bound());
        let (device, free, margin) = (device.name(), memory.free, memory.total / MARGIN);
        let others = [steps, prefix_cache, device_chunks, margin];
        let requests = others.into_iter().fold(free, u64::saturating_sub);
        let room = RequestMemory { device, free, steps, prefix_cache, device_chunks, margin, requests };
        let tokens = settings.chunk_tokens;
        let least = self.token_bytes(tokens) + config.num_layers() as u64 * self.layer_bytes(tokens);
        if requests >= least {
            return Ok(Some(room));
        }
        let reason = format!(
            "{room}, and a prompt of {tokens} tokens takes {}: lower --ubatch-size, --max-num-seqs or --prefix-cache-memory-bytes, or choose \
             another --device",
            mib(least)
        );
        Err(Error::Device { device: room.device, reason })
    }

    /// Bytes that a request takes while its prompt is computed, beside those of [`Engine::max_kv_bytes`]: what the eviction policy keeps beside a
    /// layer of the prompt, and on a device with memory of its own all else.
    pub fn prompt_bytes(&self, prompt: &Prompt, method: &dyn FusionMethod, eviction: &Eviction) -> usize {
        let side_bytes = self.prompt_side_bytes(prompt, eviction);
        // Asking for the memory would wait for all work of the device.
        if !self.device_chunks().is_apart() {
            return side_bytes;
        }
        // A lower bound: what an answer adds is not known here.
        let kv = self.kv_bytes(prompt, prompt.len(), eviction).unwrap_or(0) as u64;
        let bytes = self.beside_kv(prompt, method, eviction, kv, None);
        usize::try_from(bytes).unwrap_or(usize::MAX).saturating_add(side_bytes)
    }

    /// Bytes that a request takes beside `kv` bytes of keys and values, those of steps that see at most `slots` keys included if they are given:
    /// while the prompt is computed, or before that, where a chunk of it is missing and prefilled alone.
    fn beside_kv(
        &self,
        prompt: &Prompt,
        method: &dyn FusionMethod,
        eviction: &Eviction,
        kv: u64,
        slots: Option<usize>,
    ) -> u64 {
        let (config, threads) = (self.decoder().config(), self.decoder().device().threads());
        let (rows, longest) = self.prompt_rows(prompt, method);
        let step = |rows, seen: usize, with_logits| {
            slots.map_or(0, |slots| self.step_bytes(rows, seen.min(slots), with_logits))
        };
        // Layers that are made for the time of their computation: where a policy bounds the cache, loaders bring in some ahead.
        let is_whole = eviction.is_full() && !eviction.per_query_head;
        let ahead = if method.reuses() { loaders(threads, true) } else { 0 };
        let at_most = |layers: usize| layers.min(config.num_layers());
        // With caches for query heads, a layer of the prompt is in memory beside its copies, one for each query head of a KV head.
        let expanded = if eviction.per_query_head { config.heads / config.kv_heads } else { 0 };
        let layers = match is_whole {
            true => at_most(2 * usize::from(method.selects())),
            false => at_most(2 + ahead).max(at_most(1 + ahead) + expanded),
        } as u64;
        let tables = product(&[prompt.len(), self.table_bytes()]);
        let [all, part] = [prompt.len(), longest].map(|tokens| self.layer_bytes(tokens));
        let loaders = if method.reuses() { loading_bytes(threads, part, all) } else { 0 };
        let loading = layers * all + loaders + tables;
        let pass = self.token_bytes(rows) + loading + step(rows, usize::MAX, 1);
        let alone = self.token_bytes(longest) + self.layer_bytes(longest) + step(longest, longest, 0);
        pass.max(alone.saturating_sub(kv))
    }

    /// Rows of a prompt that a method computes at most, and those of its longest part, where that is prefilled alone.
    fn prompt_rows(&self, prompt: &Prompt, method: &dyn FusionMethod) -> (usize, usize) {
        let prompt = self.parts_of(prompt, method);
        let chunk = |span| ChunkSpan { span, ..ChunkSpan::default() };
        let layout = PromptLayout {
            layers: self.decoder().config().num_layers(),
            system: prompt.system_span(),
            system_cached: false,
            chunks: prompt.chunk_spans().into_iter().map(chunk).collect(),
            question: prompt.question_span(),
        };
        let before = self.before_chunks().len();
        let chunks = prompt.chunks.iter().map(|chunk| before + chunk.left.len() + chunk.tokens.len());
        (method.max_rows(&layout), chunks.max().unwrap_or(0).max(prompt.system.len()))
    }

    /// Checks that a prompt, and its answer, of at most `max_seq_len` tokens together, fit into the memory that the device has free. Where chunks
    /// might take what was checked, none are added there while the value that is returned lives.
    ///
    /// # Errors
    /// If they do not; those of the eviction policy.
    pub(crate) fn check_prompt_memory(
        &self,
        prompt: &Prompt,
        method: &dyn FusionMethod,
        max_seq_len: usize,
        eviction: &Eviction,
    ) -> Result<Option<ClosedChunks>> {
        let Some(memory) = self.decoder().device().memory() else { return Ok(None) };
        let (kv, activations) = self.memory_of_prompt(prompt, method, max_seq_len, eviction)?;
        let chunks = self.device_chunks();
        let most = kv.saturating_add(activations).saturating_add(chunks.room());
        let closed = (most > memory.free).then(|| chunks.close());
        self.check_memory(max_seq_len, kv, activations)?;
        Ok(closed)
    }

    /// Bytes of keys and values of a prompt and its answer, of at most `max_seq_len` tokens together, and of all else.
    pub(crate) fn memory_of_prompt(
        &self,
        prompt: &Prompt,
        method: &dyn FusionMethod,
        max_seq_len: usize,
        eviction: &Eviction,
    ) -> Result<(u64, u64)> {
        let kv = self.kv_bytes(prompt, max_seq_len, eviction)? as u64;
        Ok((kv, self.beside_kv(prompt, method, eviction, kv, Some(max_seq_len))))
    }

    /// Checks that a chunk's prefill of so many rows fits, whose layer has `slots` slots a head.
    ///
    /// # Errors
    /// If it does not.
    pub(crate) fn check_chunk_memory(&self, rows: usize, slots: usize) -> Result<()> {
        let activations = self.token_bytes(rows) + self.step_bytes(rows, slots, 0);
        self.check_memory(slots, self.layer_bytes(slots), activations)
    }

    /// Chunks in the device's memory make room if they have to.
    fn check_memory(&self, tokens: usize, kv: u64, activations: u64) -> Result<()> {
        let device = self.decoder().device();
        let short = || device.memory().filter(|memory| kv.saturating_add(activations) > memory.free);
        if short().is_none() {
            return Ok(());
        }
        self.device_chunks().clear();
        let Some(memory) = short() else { return Ok(()) };
        Err(Error::DeviceMemory { device: device.name(), tokens, kv, activations, free: memory.free })
    }

    /// Bytes of keys and values of a layer's cache of so many slots a head.
    fn layer_bytes(&self, slots: usize) -> u64 {
        product(&[2 * self.settings().kv.size(), self.decoder().shape().width(), slots])
    }

    /// Bytes of a token's cosines and sines at all layers.
    fn table_bytes(&self) -> usize {
        self.decoder().config().ropes.iter().map(|rope| 4 * rope.rotary_dim).sum()
    }

    /// Bytes of tokens on their way through the layers, with their positions' tables and the ranges that they see.
    fn token_bytes(&self, tokens: usize) -> u64 {
        let Config { hidden, heads, head_dim, .. } = *self.decoder().config();
        let queries = heads * head_dim;
        let floats = hidden + hidden.max(queries) + 4 * queries + heads;
        let kv = 2 * self.decoder().shape().width() * self.settings().kv.size();
        product(&[tokens, 4 * floats + kv + self.table_bytes() + 8])
    }

    /// Bytes of what lies between the products of a step over at most `rows` rows, which see at most `slots` keys, and `with_logits` of which get
    /// logits.
    fn step_bytes(&self, rows: usize, slots: usize, with_logits: usize) -> u64 {
        let config = self.decoder().config();
        let Config { hidden, heads, kv_heads, head_dim, vocab, .. } = *config;
        let (queries, width) = (heads * head_dim, self.decoder().shape().width());
        let rounded = if self.decoder().precision() == Precision::F32 { 4 } else { 2 };
        let projected = rows.min(MAX_BLOCK_ROWS);
        let finished = projected.min(self.settings().ubatch);
        let few = (slots / PIECE + 1).saturating_mul(FEW_ENTRIES * kv_heads);
        let pieces = (slots / PIECE + 1).saturating_mul(finished * heads).min(PIECES.max(few));
        let network = |layer: &LayerSpec| match &layer.experts {
            None => rounded * (queries + hidden + config.intermediate) + 8 * hidden,
            Some(experts) => {
                4 * ((3 + experts.top_k) * hidden + experts.count)
                    + rounded * (2 * hidden + experts.intermediate.max(queries))
            }
        };
        let network = config.layers.iter().map(network).max().unwrap_or(0);
        let steps = [
            product(&[projected, rounded * hidden + 4 * (queries + 2 * width)]),
            product(&[finished, network]),
            product(&[finished, 4 * heads]) + product(&[pieces, 4 * (head_dim + 1)]),
            product(&[with_logits, rounded * hidden + 4 * vocab]),
        ];
        steps.into_iter().max().unwrap_or(0)
    }
}

/// A product that ends at its maximum: a model's file may give any sizes.
fn product(factors: &[usize]) -> u64 {
    factors.iter().fold(1, |all: u64, n| all.saturating_mul(*n as u64))
}
