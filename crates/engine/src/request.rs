//! A request for an answer, and the answer with its statistics.

use std::sync::Arc;

use refrain_eviction::Eviction;
use refrain_fusion::FusionMethod;
use serde::Serialize;

use crate::cache::SequenceCache;
use crate::engine::Engine;
use crate::explanation::Explanation;
use crate::logprobs::TokenLogprobs;
use crate::prefill::{PrefillStats, ReusedSegments};
use crate::prompt::Prompt;
use crate::sampling::{Grammar, Sampling};

/// Counts and times of an answer, taken while it was made.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RequestStats {
    /// Name of the device that computed: the instruction set of a CPU, or a GPU.
    pub device: String,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Prompt tokens of document chunks.
    pub document_tokens: usize,
    /// Prompt tokens whose keys and values were read from the cache at one layer at least.
    pub cached_tokens: usize,
    /// Cached tokens behind those of the prefix cache that were not computed at the deepest layer.
    pub reused_tokens: usize,
    /// Cached tokens whose chunk, or system part, was prefilled for this request; no earlier one had left them.
    pub prefilled_tokens: usize,
    /// First tokens of the prompt whose keys and values an earlier request had left in the prefix cache; they count among
    /// `cached_tokens`.
    pub prefix_tokens: usize,
    /// Document tokens that were computed at the deepest layer.
    pub recomputed_tokens: usize,
    /// Document tokens that were neither read nor computed at any layer of the last pass: those that a method does without.
    pub left_out_tokens: usize,
    /// Document rows computed over all layers / (layers × document tokens); layers that run in full count.
    pub recompute_ratio: f64,
    /// Rows computed over all layers and passes, but for those of the last pass that any method computes / (layers × document
    /// tokens): what the answer cost beside a full prefill. Layers that run in full count, and so does a first pass of the question.
    pub charged_ratio: f64,
    /// Layers at which every document token was computed, but for those whose cached keys and values are exact.
    pub full_layers: usize,
    /// Tokens of the prompt that attention has before it when the first token is chosen, at every layer: what a method
    /// keeps or retrieves.
    pub kept_tokens: usize,
    /// `kept_tokens` / tokens of the prompt.
    pub sequence_ratio: f64,
    /// Times that a method met a case that its paper leaves open (SamKV: a layer and document whose kept blocks score not
    /// above the lowest).
    pub ambiguous_cases: usize,
    /// Floating point operations of prefill's products and attention, as the chosen rows and the keys that each sees
    /// make them; the language head is left out.
    pub operations: f64,
    /// Seconds that the method took to score tokens and choose among them: at the layers where it narrows its rows, or with the
    /// question's first pass, where it selects by that.
    pub select_seconds: f64,
    /// The order in which the method has put the prompt's chunks, as indices into the order that was asked for; empty where that stayed.
    pub chunk_order: Vec<usize>,
    /// Chunks that were prefilled behind a prefix that is not this prompt's system part. They are less exact than they could be. Behind
    /// earlier turns of a conversation no chunk could be better, and none counts.
    pub other_prefix_chunks: usize,
    /// Parts of the prompt (chunks and the system part) that were prefilled alone before the answer: they were not in the store, were
    /// broken there, or, averaged, came first in a prompt for the first time.
    pub prefilled_chunks: usize,
    /// Parts of the prompt that were computed because the object store was expected to take longer than that, or was late and took longer. It
    /// may not have had those that it was not asked for.
    pub unfetched_chunks: usize,
    /// Bytes of keys and values that were brought in from the store's memory or folder. What a method does not use is
    /// brought in from the folder only.
    pub bytes_loaded: u64,
    /// Bytes of keys, values and summaries that were read from the folder.
    pub bytes_read: u64,
    /// Bytes of keys and values that the document chunks of the prompt have in the store, as they lie at rest.
    pub document_bytes: u64,
    /// Bytes of keys and values that were copied to the device's own memory; 0 on a CPU.
    pub device_bytes_copied: u64,
    /// Bytes of keys and values of chunks that the device's own memory had from earlier prompts; they count neither as loaded nor as copied.
    pub device_bytes_reused: u64,
    /// Seconds that threads spent bringing them in (reading, verifying, copying to a device, rotating, placing), mostly beside the
    /// computing; summed over those threads.
    pub load_seconds: f64,
    /// Seconds in which threads brought them in and the computing thread did not wait: the part of loading that is hidden.
    pub load_hidden_seconds: f64,
    /// Seconds in which the computing thread did nothing but wait for loading: the part that is not hidden.
    pub load_wait_seconds: f64,
    /// Seconds from the request to the first token, loading included.
    pub ttft: f64,
    /// `ttft` without the time in which the computing thread did nothing but wait for loading: opening files and reading their
    /// headers, and for layers that were not ready when their turn came.
    pub compute_ttft: f64,
    /// Seconds a token after the first; none for an answer of one token.
    pub tpot: Option<f64>,
    /// Tokens of the answer, the end token included.
    pub answer_tokens: usize,
    /// Tokens that were proposed from what was said before and verified in a step of decoding.
    pub draft_tokens: usize,
    /// Proposed tokens that were accepted.
    pub accepted_draft_tokens: usize,
    /// Bytes allocated for the keys and values that the answer was decoded with.
    pub kv_bytes: usize,
    /// Bytes that those held at the end take.
    pub kv_bytes_held: usize,
    /// Most bytes of keys and values that were allocated at a time, prefill included.
    pub kv_bytes_peak: usize,
    /// Bytes that full attention would hold at the end, one cache a KV head.
    pub kv_bytes_full: usize,
    /// Bytes kept beside keys and values at the end: an eviction policy's positions and statistics, or the representatives of
    /// blocks that are retrieved and what they are made from.
    pub side_bytes: usize,
    /// Tokens whose keys and values each head's cache holds at the end.
    pub retained_tokens: usize,
    /// The unit that has a cache of its own: `kv_head`, or `query_head` as in the papers' figures of memory.
    pub kv_accounting: &'static str,
}

/// The way in which a prompt is to be answered.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    /// Decides which tokens are computed before the first one.
    pub method: Arc<dyn FusionMethod>,
    /// Decides which tokens stay in the cache after it.
    pub eviction: Eviction,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// The grammar that the answer follows, behind its thoughts where the prompt lets it think.
    pub grammar: Option<Grammar>,
    /// Most tokens that are proposed at a time from what was said before, and verified in one step (prompt lookup decoding); 0 proposes
    /// none. The answer is the same. A cache that evicts tokens cannot take them back, and gets no proposals.
    pub speculative_tokens: usize,
    /// Whether the answer goes on past end tokens.
    pub ignore_eos: bool,
    /// Whether to report the question's attention.
    pub explain: bool,
}

impl GenerateRequest {
    /// Full attention while decoding, up to an end token, nothing explained.
    pub fn new(method: Arc<dyn FusionMethod>, sampling: Sampling) -> GenerateRequest {
        let eviction = Eviction::full().clone();
        GenerateRequest {
            method,
            eviction,
            sampling,
            grammar: None,
            speculative_tokens: 0,
            ignore_eos: false,
            explain: false,
        }
    }
}

/// One event of an answer's stream: a token, or the text that was held back until the end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenEvent<'a> {
    /// Text that can be shown now; often empty, where characters or stop strings are not complete.
    pub text: &'a str,
    /// Tokens of the answer so far.
    pub tokens: usize,
    /// The token; none with the text that was held back until the end.
    pub token: Option<u32>,
    /// Log probabilities of the token and of the likeliest ones, where they were asked for.
    pub logprobs: Option<&'a TokenLogprobs>,
    /// Tokens that each head's cache holds, of the layer that holds most.
    pub retained: usize,
    /// Bytes allocated for keys and values.
    pub kv_bytes: usize,
    /// Bytes that the keys and values held take, over all layers.
    pub kv_bytes_held: usize,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended it, or a stop string did.
    Stop,
    /// The limit of tokens.
    Length,
    /// The receiver of the stream did.
    Cancelled,
    /// Its grammar took more steps or memory than its bounds allow.
    Failed,
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Answer {
    /// Its text.
    pub text: String,
    /// Its token ids, the end token included.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: FinishReason,
    /// Counts and times.
    pub stats: RequestStats,
    /// Attention of the question, if it was asked for.
    #[serde(skip)]
    pub explanation: Option<Explanation>,
}

impl RequestStats {
    /// Statistics of a prefill.
    pub(crate) fn of_prefill(
        engine: &Engine,
        prompt: &Prompt,
        prefill: &PrefillStats,
        reused: &ReusedSegments,
    ) -> RequestStats {
        let (documents, reuses) = (prompt.document_tokens(), !reused.segments.is_empty());
        let mut document_rows = prefill.document_rows.clone();
        if prefill.prefix_tokens > 0 {
            // All rows behind a beginning that was taken over are computed at every layer, as the question is.
            document_rows.fill(prompt.documents_behind(prefill.prefix_tokens));
        }
        let rows: usize = document_rows.iter().sum();
        let possible = documents * document_rows.len();
        let is_full = |rows: &&usize| **rows > 0 && **rows + prefill.exact_tokens >= documents;
        let full = document_rows.iter().filter(is_full);
        RequestStats {
            device: engine.decoder().device().name(),
            prompt_tokens: prompt.len(),
            document_tokens: documents,
            cached_tokens: prefill.cached_tokens,
            reused_tokens: prefill.reused_tokens,
            prefilled_tokens: prefill.prefilled_tokens,
            prefix_tokens: prefill.prefix_tokens,
            recomputed_tokens: document_rows.last().copied().unwrap_or(0),
            left_out_tokens: prefill.left_out_tokens,
            recompute_ratio: rows as f64 / possible.max(1) as f64,
            charged_ratio: if documents == 0 {
                0.0
            } else {
                (rows + prefill.probe_rows) as f64 / possible.max(1) as f64
            },
            full_layers: full.count(),
            kept_tokens: prefill.kept_tokens,
            sequence_ratio: prefill.kept_tokens as f64 / prompt.len().max(1) as f64,
            ambiguous_cases: prefill.ambiguous_cases,
            operations: prefill.operations,
            select_seconds: prefill.selecting.as_secs_f64(),
            chunk_order: prefill.order.clone().unwrap_or_default(),
            other_prefix_chunks: if reuses
                && prompt.system_reusable
                && engine.prefix().is_some_and(|prefix| prefix.tokens != prompt.system)
            {
                prompt.chunks.len()
            } else {
                0
            },
            document_bytes: prompt.chunks.iter().map(|chunk| engine.chunk_id(chunk).bytes()).sum(),
            kv_bytes_peak: prefill.kv_bytes_peak,
            ..RequestStats::default()
        }
        .with_loading(reused)
    }

    /// Statistics with those of loading as it stands.
    pub(crate) fn with_loading(self, reused: &ReusedSegments) -> RequestStats {
        RequestStats {
            prefilled_chunks: reused.prefilled,
            unfetched_chunks: reused.unfetched,
            bytes_loaded: reused.load.bytes,
            bytes_read: reused.bytes_read(),
            device_bytes_copied: reused.load.copied,
            device_bytes_reused: reused.load.reused,
            load_seconds: reused.load.busy.as_secs_f64(),
            load_hidden_seconds: reused.load.hidden.as_secs_f64(),
            load_wait_seconds: reused.waited.as_secs_f64(),
            ..self
        }
    }

    /// Cached tokens that earlier requests had left.
    pub fn found_tokens(&self) -> usize {
        self.cached_tokens - self.prefilled_tokens
    }

    /// Counts what the cache holds now.
    pub(crate) fn count_cache(&mut self, engine: &Engine, sequence: &SequenceCache, eviction: &Eviction) {
        let cache = &sequence.cache;
        self.kv_bytes = cache.kv_bytes();
        self.kv_bytes_held = cache.kv_bytes_held();
        self.kv_bytes_peak = self.kv_bytes_peak.max(self.kv_bytes);
        self.kv_bytes_full = sequence.len * engine.decoder().shape().token_bytes(engine.settings().kv);
        self.side_bytes = cache.side_bytes();
        self.retained_tokens = cache.retained();
        self.kv_accounting = if eviction.per_query_head { "query_head" } else { "kv_head" };
    }
}
