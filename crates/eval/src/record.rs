//! A record a sample and variant: a line of `results.jsonl`.

use std::collections::BTreeMap;

use refrain::engine::RequestStats;
use serde::{Deserialize, Serialize};

/// One answer with its scores: a line of `results.jsonl`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The model, as it was named.
    pub model: String,
    /// `longbench`, `needle`, `ruler`, `longgenbench`, `longwriter` or `rag`.
    pub benchmark: String,
    /// The task within it, such as `hotpotqa` or `niah_single_1`.
    pub task: String,
    /// Tokens of context that the sample was made for, where the benchmark is a grid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub length: Option<usize>,
    /// Where its needle lies, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub depth: Option<f64>,
    /// Words of its context, or characters of a Chinese one, as LongBench's data count them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context_words: Option<usize>,
    /// The sample's name within the task.
    pub sample: String,
    /// Specification of the fusion method, such as `a3:ratio=0.3`.
    pub method: String,
    /// Specification of the eviction policy; `full` keeps everything.
    pub policy: String,
    /// The answer.
    #[serde(default)]
    pub answer: String,
    /// Scores by name, `score` being the task's own. Each is 0..1, except `words` and counts of checks (`checks`,
    /// `_asked`, `_yes`). Empty if the sample failed.
    #[serde(default)]
    pub scores: BTreeMap<String, f64>,
    /// The judge that took part in the scores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub judge: Option<String>,
    /// Most new tokens that the context had room for, where the sample allows more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer_room: Option<usize>,
    /// Fidelity to vanilla; none if the sample failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fidelity: Option<Fidelity>,
    /// Times and bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<Cost>,
    /// Why there is no answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Why the judge has not graded the answer, which has its other scores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub judge_error: Option<String>,
    /// When it was done, seconds since 1970.
    #[serde(default)]
    pub finished: u64,
}

impl Record {
    /// Why the answer, or its grading, is to be tried again.
    pub fn failure(&self) -> Option<String> {
        let grading = || self.judge_error.as_ref().map(|error| format!("the answer is not graded: {error}"));
        self.error.clone().or_else(grading)
    }
}

/// Fidelity of a variant to vanilla with full attention, teacher-forced over the first tokens of vanilla's answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Fidelity {
    /// Mean over positions of `KL(vanilla ‖ method)` of the next token, in nats.
    pub kl: f64,
    /// `KL(vanilla ‖ method)` of the answer's first token, in nats.
    #[serde(default)]
    pub kl_first: f64,
    /// Share of positions at which both have an equal likeliest token.
    pub top1: f64,
    /// Positions compared.
    pub positions: usize,
    /// By layer: L2 distance of the attention of the question's rows to the document tokens, mean over heads, to
    /// vanilla's (A3, figure 3). Empty if the run does not compare attention.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attention_l2: Vec<f64>,
    /// Share of vanilla's 40 most attended document tokens that the method recomputed at its deepest layer (A3, figure 2).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hit_rate_40: Option<f64>,
    /// Share of vanilla's most attended document tokens that the method recomputed, of as many as it recomputed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hit_rate: Option<f64>,
}

/// Times and bytes of an answer, from the engine's statistics. Times are in seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Parts of the prompt that were prefilled alone within the request, which its time to the first token counts and its charge does not:
    /// the store had no room for them.
    #[serde(default)]
    pub prefilled_chunks: usize,
    /// Prompt tokens of document chunks.
    pub document_tokens: usize,
    /// Tokens of the answer.
    pub answer_tokens: usize,
    /// Document rows computed over all layers / (layers × document tokens).
    pub recompute_ratio: f64,
    /// Rows computed over all layers and passes / (layers × document tokens).
    #[serde(default)]
    pub charged_ratio: f64,
    /// Tokens of the prompt that are kept / tokens of the prompt.
    pub sequence_ratio: f64,
    /// Operations of the prefill.
    pub operations: f64,
    /// Request to first token, loading included.
    pub ttft: f64,
    /// `ttft` without the time of waiting for loading.
    pub compute_ttft: f64,
    /// Time a token after the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpot: Option<f64>,
    /// Bytes that the keys and values held at the end take, one cache a KV head.
    pub kv_bytes: usize,
    /// `kv_bytes` with a cache for each query head, as the papers count memory.
    pub kv_bytes_query_heads: usize,
    /// Most bytes that were allocated at a time, prefill included.
    pub kv_bytes_peak: usize,
    /// Bytes that full attention would hold at the end.
    pub kv_bytes_full: usize,
    /// Bytes beside keys and values: statistics, positions, representatives.
    pub side_bytes: usize,
    /// Bytes of keys and values brought in from the store.
    pub bytes_loaded: u64,
    /// Bytes of the document chunks' keys and values at rest.
    #[serde(default)]
    pub document_bytes: u64,
    /// Vanilla's cost of the sample, measured beside the answer by the same runner. Records of sampled answers, and of earlier versions, have
    /// none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vanilla: Option<VanillaCost>,
}

/// The costs of vanilla's answer that others are set against.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VanillaCost {
    /// [`Cost::ttft`].
    pub ttft: f64,
    /// [`Cost::compute_ttft`].
    pub compute_ttft: f64,
    /// [`Cost::tpot`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpot: Option<f64>,
    /// [`Cost::operations`].
    pub operations: f64,
}

impl From<&Cost> for VanillaCost {
    fn from(cost: &Cost) -> VanillaCost {
        let Cost { ttft, compute_ttft, tpot, operations, .. } = *cost;
        VanillaCost { ttft, compute_ttft, tpot, operations }
    }
}

impl Cost {
    /// Vanilla's costs of the sample: those measured beside the answer, or else those of vanilla's own record, which may be of another
    /// machine or hour.
    pub fn vanilla_or(&self, record: Option<&Cost>) -> Option<VanillaCost> {
        self.vanilla.or_else(|| record.map(VanillaCost::from))
    }

    /// A time to the first token; none where chunks were prefilled within it.
    pub fn timed(&self, seconds: f64) -> Option<f64> {
        (self.prefilled_chunks == 0).then_some(seconds)
    }

    /// The costs in the statistics of a request; `group` is query heads a KV head.
    pub fn of(stats: &RequestStats, group: usize) -> Cost {
        let own = if stats.kv_accounting == "query_head" { group } else { 1 };
        Cost {
            prompt_tokens: stats.prompt_tokens,
            prefilled_chunks: stats.prefilled_chunks,
            document_tokens: stats.document_tokens,
            answer_tokens: stats.answer_tokens,
            recompute_ratio: stats.recompute_ratio,
            charged_ratio: stats.charged_ratio,
            sequence_ratio: stats.sequence_ratio,
            operations: stats.operations,
            ttft: stats.ttft,
            compute_ttft: stats.compute_ttft,
            tpot: stats.tpot,
            kv_bytes: stats.kv_bytes_held / own,
            kv_bytes_query_heads: stats.kv_bytes_held / own * group,
            kv_bytes_peak: stats.kv_bytes_peak,
            kv_bytes_full: stats.kv_bytes_full,
            side_bytes: stats.side_bytes,
            bytes_loaded: stats.bytes_loaded,
            document_bytes: stats.document_bytes,
            vanilla: None,
        }
    }
}
