use refrain_kernels::{Cpu, Slice};
use refrain_kv::{Span, stats, top_k};

use crate::{Error, PromptView, Result};

/// Cached keys (before RoPE) and values of one part of the prompt at one layer, each `tokens × Hkv × d`.
#[derive(Clone, Copy, Debug)]
pub struct CachedSegment<'a> {
    /// Positions in the prompt.
    pub span: Span,
    /// Keys before RoPE.
    pub k: Slice<'a>,
    /// Values.
    pub v: Slice<'a>,
}

/// One layer after projection, before attention.
#[derive(Clone, Copy, Debug)]
pub struct LayerView<'a> {
    /// Kernels to compute with.
    pub cpu: &'a Cpu,
    /// Index of the layer, from 0.
    pub layer: usize,
    /// The prompt.
    pub prompt: &'a PromptView<'a>,
    /// Positions computed at this layer, ascending; `m` of them.
    pub rows: &'a [u32],
    /// Their rotated queries, `m × H × d`.
    pub q: &'a [f32],
    /// Their keys before RoPE, `m × Hkv × d`, rounded to the cache's type.
    pub k: Slice<'a>,
    /// Their values, `m × Hkv × d`, rounded to the cache's type.
    pub v: Slice<'a>,
    /// Rotated keys of the whole prompt with the fresh ones in place, `Hkv × capacity × d`.
    pub keys: Slice<'a>,
    /// What the cache holds for this layer.
    pub cached: &'a [CachedSegment<'a>],
    /// Query heads, `H`.
    pub heads: usize,
    /// KV heads, `Hkv`.
    pub kv_heads: usize,
    /// Elements of a head, `d`.
    pub head_dim: usize,
    /// Slots of a KV head in `keys`.
    pub capacity: usize,
    /// Positions that a row sees at most, its own included.
    pub window: Option<usize>,
    /// Factor of the layer's attention logits q·k.
    pub scale: f32,
}

impl LayerView<'_> {
    /// Attention of the question to every document token (see [`stats::question_attention`]).
    pub fn question_attention(&self, softmax: stats::Softmax) -> Vec<f32> {
        let width = self.heads * self.head_dim;
        let question = self.prompt.question;
        let keys = stats::QuestionKeys {
            q: &self.q[(self.rows.len() - question.len()) * width..],
            k: self.keys,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            capacity: self.capacity,
            window: self.window,
            scale: self.scale,
        };
        stats::question_attention(self.cpu, &keys, self.prompt.documents(), question, softmax)
    }

    /// Positions among `rows` that a method may drop, ascending: tokens of cached chunks.
    pub(crate) fn candidates(&self) -> Vec<u32> {
        let cached = self.prompt.chunks.iter().filter(|chunk| chunk.cached);
        cached.flat_map(|chunk| self.rows_in(chunk.span).iter().copied()).collect()
    }

    /// The `count` best of `candidates` by `scores` (one each), and the rows that are always computed; ascending.
    pub(crate) fn keep(&self, candidates: &[u32], scores: &[f32], count: usize) -> Vec<u32> {
        let mut rows = self.prompt.always();
        rows.extend(top_k(scores, count).into_iter().map(|i| candidates[i as usize]));
        rows.sort_unstable();
        rows
    }

    fn rows_in(&self, span: Span) -> &[u32] {
        let from = self.rows.partition_point(|row| *row < span.start);
        let to = self.rows.partition_point(|row| *row < span.end);
        &self.rows[from..to]
    }

    /// Distance of each candidate's fresh row from its cached one, in the order of [`Self::candidates`].
    ///
    /// # Errors
    /// If the view lacks a chunk that its prompt calls cached.
    pub(crate) fn deviation(&self, values: bool, distance: stats::Distance) -> Result<Vec<f32>> {
        let width = self.kv_heads * self.head_dim;
        let fresh = if values { self.v } else { self.k };
        fn row(slice: Slice<'_>, i: usize, width: usize) -> Slice<'_> {
            slice.range(i * width..(i + 1) * width)
        }
        let mut scores = Vec::new();
        for chunk in self.prompt.chunks.iter().filter(|chunk| chunk.cached) {
            let cached = self.cached.iter().find(|segment| segment.span == chunk.span);
            let cached = cached.ok_or(Error::NotCached { start: chunk.span.start, end: chunk.span.end })?;
            let cached = if values { cached.v } else { cached.k };
            let from = self.rows.partition_point(|row| *row < chunk.span.start);
            for (i, position) in self.rows_in(chunk.span).iter().enumerate() {
                let cached = row(cached, (position - chunk.span.start) as usize, width);
                scores.extend(stats::deviation(row(fresh, from + i, width), cached, width, distance));
            }
        }
        Ok(scores)
    }
}
