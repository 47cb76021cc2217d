//! The prompt as a method sees it: lengths and positions, no text.

use std::ops::Range;
use std::sync::Arc;

use refrain_kv::{AuxTensors, Ropes, Span, top_count, top_k};

use crate::{Error, Result};

/// Positions of a chunk in the prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChunkSpan {
    /// Its positions.
    pub span: Span,
    /// Whether its keys and values are those of a full prefill: what stands before the chunk is what it was prefilled behind. Its tokens are never
    /// chosen.
    pub exact: bool,
    /// Whether it was prefilled with nothing before it, not even BOS: its first tokens then drew the attention that the first tokens
    /// of any prompt draw, and their rows are unlike all others.
    pub bare: bool,
}

/// Layout of a prompt `S ‖ D1..Dk ‖ Q`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptLayout {
    /// Layers of the model.
    pub layers: usize,
    /// The system part, from 0.
    pub system: Span,
    /// Whether the system part's keys and values are at hand. It is a true prefix, so they are exact.
    pub system_cached: bool,
    /// Document chunks in order, back to back after the system part.
    pub chunks: Vec<ChunkSpan>,
    /// The question part, up to the end.
    pub question: Span,
}

impl PromptLayout {
    /// Tokens of the prompt, `n`.
    pub fn len(&self) -> usize {
        self.question.end as usize
    }

    /// Whether the prompt has no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Positions of all chunks.
    pub fn documents(&self) -> Span {
        Span { start: self.system.end, end: self.question.start }
    }

    /// Document tokens that a method may choose or drop: those of [`inexact_chunks`](Self::inexact_chunks).
    pub fn reusable(&self) -> usize {
        self.inexact_chunks().map(Span::len).sum()
    }

    /// Positions of each chunk.
    pub fn chunk_spans(&self) -> impl Iterator<Item = Span> + '_ {
        self.chunks.iter().map(|chunk| chunk.span)
    }

    /// The chunks whose keys and values are not those of a full prefill.
    pub fn reused_chunks(&self) -> impl Iterator<Item = &ChunkSpan> + '_ {
        self.chunks.iter().filter(|chunk| !chunk.exact)
    }

    /// Positions of [`reused_chunks`](Self::reused_chunks).
    pub fn inexact_chunks(&self) -> impl Iterator<Item = Span> + '_ {
        self.reused_chunks().map(|chunk| chunk.span)
    }

    /// Tokens that every method computes at every layer: the question, and the system part where it is not at hand. Ascending.
    pub fn required_tokens(&self) -> Vec<u32> {
        let system = (!self.system_cached).then_some(self.system);
        system.into_iter().chain([self.question]).flat_map(Span::positions).collect()
    }

    /// [`required_tokens`](Self::required_tokens) and `others`, none of which is among them. Ascending.
    pub fn required_and(&self, others: impl IntoIterator<Item = u32>) -> Vec<u32> {
        let mut tokens = self.required_tokens();
        tokens.extend(others);
        tokens.sort_unstable();
        tokens
    }

    /// The tokens of layers that a method computes in full: all but those whose cached keys and values are exact. Ascending.
    pub fn full_tokens(&self) -> Vec<u32> {
        self.required_and(self.inexact_chunks().flat_map(Span::positions))
    }

    /// The `count` tokens of [`inexact_chunks`](Self::inexact_chunks) of highest score, ascending; `scores` has one for each token
    /// of the documents.
    pub fn top_reusable(&self, scores: &[f32], count: usize) -> Vec<u32> {
        let candidates: Vec<u32> = self.inexact_chunks().flat_map(Span::positions).collect();
        let start = self.documents().start;
        let own: Vec<f32> = candidates.iter().map(|t| scores[(t - start) as usize]).collect();
        top_k(&own, count).into_iter().map(|i| candidates[i as usize]).collect()
    }

    /// The `tokens` (ascending) that lie in chunks which are not exact.
    pub fn candidates(&self, tokens: &[u32]) -> Vec<u32> {
        let within = |span: Span| {
            let from = tokens.partition_point(|token| *token < span.start);
            let to = tokens.partition_point(|token| *token < span.end);
            tokens[from..to].iter().copied()
        };
        self.inexact_chunks().flat_map(within).collect()
    }

    /// Number of tokens that a ratio stands for: `floor(r·(n−|Q|))`, at most the reusable ones.
    pub fn count(&self, ratio: f64) -> usize {
        top_count(ratio, self.len() - self.question.len(), self.reusable())
    }

    /// Number of tokens whose computation makes up `charge`, the share of all rows of the documents (tokens × layers), together with
    /// `full` layers at which all [`full_tokens`](Self::full_tokens) are computed and a probe of the question through `probed` layers: the
    /// tokens that the layers after the full ones compute. A probe counts for three quarters of the charge at most, so that a question
    /// that is long beside the documents leaves tokens to recompute. It computes all [`required_tokens`](Self::required_tokens).
    pub fn count_for_charge(&self, charge: f64, full: usize, probed: usize) -> usize {
        let (documents, layers) = (self.documents().len(), self.layers);
        let rows = charge * (documents * layers) as f64;
        let probe = (self.probe_rows(probed) as f64).min(0.75 * rows);
        let left = rows - (full * self.reusable()) as f64 - probe;
        top_count(left / layers.saturating_sub(full).max(1) as f64, 1, self.reusable())
    }

    /// Rows of a probe of the question through `probed` layers.
    fn probe_rows(&self, probed: usize) -> usize {
        probed * self.required_tokens().len()
    }

    /// Whether a probe through `probed` layers, and then `count` tokens at every layer, take as many rows as all reusable tokens at every
    /// layer do, with which the answer is exact.
    pub fn probe_is_dearer(&self, probed: usize, count: usize) -> bool {
        count > 0 && self.probe_rows(probed) + count * self.layers >= self.reusable() * self.layers
    }

    /// Refuses a prompt without a question.
    ///
    /// # Errors
    /// If the question part is empty.
    pub fn check(&self) -> Result<()> {
        if self.question.is_empty() { Err(Error::EmptyQuestion) } else { Ok(()) }
    }
}

/// Facts of the model that methods decide by.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelFacts {
    /// Query heads, `H`.
    pub heads: usize,
    /// KV heads, `Hkv`.
    pub kv_heads: usize,
    /// Elements of a head, `d`.
    pub head_dim: usize,
    /// Rotary frequencies of the request.
    pub ropes: Ropes,
    /// Sliding window of each layer, in tokens; none where a layer sees all of the prompt.
    pub windows: Vec<Option<usize>>,
    /// Layers over which calibration found SamKV's scores to be stable, if it was run for this model.
    pub stable_layers: Option<Span>,
}

/// A method's view of a request before anything is computed.
#[derive(Clone, Debug)]
pub struct PrefillInputs {
    /// Layout of the prompt. For methods with [chunk statistics](crate::FusionMethod::statistics) a chunk is a whole document.
    pub layout: PromptLayout,
    /// Facts of the model.
    pub model: ModelFacts,
    /// Tokens of prompt and answer at most.
    pub max_tokens: usize,
    /// Statistics of each chunk, one for each entry of [`statistics`](crate::FusionMethod::statistics) in its order.
    pub statistics: Vec<Vec<Arc<AuxTensors>>>,
    /// Whether a probe of this method has put the chunks in order already.
    pub reordered: bool,
}

impl PrefillInputs {
    /// Those of `layers` at which row `row` of the question, by which tokens are chosen, sees every document token that can be chosen; if there
    /// is none, the next layer at which it does. Of several rows the question's first sees farthest back, and sees all if any does.
    ///
    /// # Errors
    /// If no layer from the first of `layers` on is one: each has a window that ends within the documents.
    pub fn layers_of_choice(&self, layers: Range<usize>, row: u32) -> Result<Vec<usize>> {
        let layout = &self.layout;
        // Exact chunks have no token to choose.
        let first = layout.inexact_chunks().map(|chunk| chunk.start).min().unwrap_or(row);
        let needed = (row + 1 - first.min(row)) as usize;
        let sees = |layer: &usize| self.model.windows[*layer].is_none_or(|window| window >= needed);
        let (first, end) = (layers.start, layers.end);
        let mut found: Vec<usize> = layers.filter(sees).collect();
        if found.is_empty() {
            found.extend((end..layout.layers).find(sees));
        }
        if found.is_empty() {
            let others: Vec<usize> = (0..layout.layers).filter(sees).collect();
            let window = self.model.windows.get(first).copied().flatten().unwrap_or_default();
            return Err(Error::Window { first, window, needed, others });
        }
        Ok(found)
    }

    /// Entry `kind` of each chunk's statistics.
    pub fn statistics_of(&self, kind: usize) -> impl Iterator<Item = &AuxTensors> + '_ {
        self.statistics.iter().map(move |all| &*all[kind])
    }
}
