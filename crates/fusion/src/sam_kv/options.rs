//! Options of SamKV, and the blocks of a document that they make.

use refrain_kv::Span;
use refrain_registry::{MAX_COUNT, Options};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The use of cached keys and values where new ones are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Update {
    /// Recomputed keys and values are merged with the cached ones (eq. 4).
    Fusion,
    /// Recomputed keys and values replace the cached ones.
    Overwrite,
}

/// The meaning of θ in eq. 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Theta {
    /// The cosine over a token's whole key (or value).
    Token,
    /// One cosine a KV head.
    Head,
    /// 0.9, as in an independent implementation.
    Constant,
}

/// The kept tokens that are recomputed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Initial and local blocks, and the marked tokens of the others.
    Marked,
    /// Everything.
    Kept,
    /// Nothing.
    None,
}

/// Whether queries and keys are compared as they are before rotation, or at the centres of question and block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Rotation {
    /// Before rotation.
    None,
    /// Rotated to their centres.
    Centre,
}

/// The vectors of one cosine of eq. 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Cosine {
    /// A query head.
    Head,
    /// All heads.
    Layer,
}

/// How a fraction of blocks becomes a number of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Rounding {
    /// Down.
    Floor,
    /// To the nearest.
    Nearest,
    /// Up.
    Ceil,
}

/// The number that the filter across documents divides by the number of documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Quota {
    /// The blocks retrieved.
    Retrieved,
    /// All blocks.
    All,
}

/// Where the block of highest and that of lowest score come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Extremes {
    /// From the document's own attention, once.
    Offline,
    /// From the scores themselves.
    Online,
}

/// The value of eq. 2 where the kept blocks' score is not above the lowest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Below {
    /// No blocks.
    Zero,
    /// All blocks.
    One,
}

impl Below {
    /// The value of eq. 2.
    pub fn value(self) -> f64 {
        match self {
            Below::Zero => 0.0,
            Below::One => 1.0,
        }
    }
}

/// Keep what question and documents point at, and recompute it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SamKv {
    /// Tokens of a block.
    #[schemars(range(min = 1, max = MAX_COUNT))]
    pub block: usize,
    /// Blocks kept at a document's beginning.
    #[serde(rename = "initial_blocks")]
    #[schemars(range(max = MAX_COUNT))]
    pub initial: usize,
    /// Blocks kept at a document's end.
    #[serde(rename = "local_blocks")]
    #[schemars(range(min = 1, max = MAX_COUNT))]
    pub local: usize,
    /// Select blocks between a document's beginning and end.
    pub selection: bool,
    /// Let queries lean towards the other documents (eq. 1).
    pub bias: bool,
    /// The tokens that are recomputed: ends and marked tokens, all that is kept, or nothing.
    pub recompute: Recompute,
    /// Filter the selected blocks across documents.
    pub filter: bool,
    /// The blocks that the filter divides by the number of documents: those retrieved, or all.
    pub quota: Quota,
    /// Share of a document's blocks that is selected, instead of eq. 2; 0 for eq. 2.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub share: f64,
    /// The value of eq. 2 where the kept blocks' score is not above the lowest.
    pub below: Below,
    /// How fractions of blocks are rounded.
    pub rounding: Rounding,
    /// Highest and lowest block: by the document's own attention (offline), or by score (online).
    pub extremes: Extremes,
    /// Compare queries and keys unrotated, or rotated to the centres of question and block.
    pub rotation: Rotation,
    /// One cosine of eq. 1 over each query head, or over all heads of a layer.
    pub cosine: Cosine,
    /// Divide scores by the lengths of query and key before the filter.
    pub normalise: bool,
    /// Merge recomputed with cached keys and values (eq. 4), or overwrite them.
    pub update: Update,
    /// One weight of eq. 4 a token, one a head, or 0.9.
    pub theta: Theta,
    /// Layers at the end that eq. 3 averages over; 0 for calibrated ones, else the last max(4, L/8).
    #[schemars(range(max = MAX_COUNT))]
    pub stable_layers: usize,
}

impl Default for SamKv {
    fn default() -> Self {
        SamKv {
            block: 64,
            initial: 1,
            local: 2,
            selection: true,
            bias: true,
            recompute: Recompute::Marked,
            filter: true,
            quota: Quota::Retrieved,
            share: 0.0,
            below: Below::Zero,
            rounding: Rounding::Floor,
            extremes: Extremes::Offline,
            rotation: Rotation::None,
            cosine: Cosine::Head,
            normalise: true,
            update: Update::Fusion,
            theta: Theta::Token,
            stable_layers: 0,
        }
    }
}

impl Options for SamKv {
    const NAME: &'static str = "sam_kv";
}

impl SamKv {
    /// A key (before RoPE) or value of one token, `Hkv × d`, computed anew, becomes the one that is kept (eq. 4).
    pub fn merge(&self, fresh: &mut [f32], cached: &[f32], head_dim: usize) {
        let part = if self.theta == Theta::Head { head_dim } else { fresh.len() };
        for (fresh, cached) in fresh.chunks_exact_mut(part).zip(cached.chunks_exact(part)) {
            let theta = match self.theta {
                Theta::Constant => 0.9,
                Theta::Token | Theta::Head => cosine(fresh, cached).clamp(0.0, 1.0),
            };
            fresh.iter_mut().zip(cached).for_each(|(new, old)| *new = theta * *new + (1.0 - theta) * old);
        }
    }

    /// Blocks of a context.
    pub(crate) fn blocks(&self, context: Span) -> usize {
        context.len().div_ceil(self.block)
    }

    /// The `blocks` that are neither initial nor local.
    pub(crate) fn middle(&self, blocks: usize) -> std::ops::Range<usize> {
        self.initial.min(blocks)..blocks.saturating_sub(self.local).max(self.initial.min(blocks))
    }

    /// Positions of a block.
    pub(crate) fn span(&self, context: Span, block: usize) -> Span {
        let start = context.start as usize + block * self.block;
        Span::new(start, (start + self.block).min(context.end as usize))
    }

    /// The spans of a context that are kept for every question: one span where nothing lies between beginning and end.
    pub(crate) fn kept(&self, context: Span) -> Vec<Span> {
        let middle = self.middle(self.blocks(context));
        let (start, end) = (context.start as usize, context.end as usize);
        if middle.is_empty() {
            return vec![context];
        }
        let (first, last) = (start + middle.start * self.block, start + middle.end * self.block);
        let both = [Span::new(start, first), Span::new(last, end)];
        both.into_iter().filter(|span| !span.is_empty()).collect()
    }
}

/// `⟨a, b⟩`
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    // Sixteen sums, so that they can be made side by side.
    let mut sums = [0.0f32; 16];
    let (whole, parts) = (a.chunks_exact(16), b.chunks_exact(16));
    let rest: f32 = whole.remainder().iter().zip(parts.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in whole.zip(parts) {
        for i in 0..16 {
            sums[i] += a[i] * b[i];
        }
    }
    sums.iter().sum::<f32>() + rest
}

/// `⟨a, b⟩ / (|a|·|b|)`; 1 of equal vectors, 0 where one of different ones has no length.
pub(crate) fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let length = (dot(a, a) * dot(b, b)).sqrt();
    if length > 0.0 { dot(a, b) / length } else { f32::from(a == b) }
}
