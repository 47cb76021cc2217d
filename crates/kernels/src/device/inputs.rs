//! Arguments of a device's calls beside tensors.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::tensors::{Floats, KvBuffer, PackedLinear};
use crate::buffer::Slice;
use crate::linear::{Activation, Precision, WeightRows};

/// Memory of a device of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// All bytes.
    pub total: u64,
    /// Bytes that are free.
    pub free: u64,
}

/// Writes the row of an index; several rows may be written at a time.
pub type FillRow<'a> = dyn Fn(usize, &mut [f32]) + Sync + 'a;

/// A row of weights cannot be had: packing stops, and the caller, who gave the rows, knows why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowUnavailable;

/// The weights of one or several products of the same input, one below the other.
#[derive(Clone)]
pub struct WeightMatrix<'a> {
    /// How weights are kept and multiplied.
    pub precision: Precision,
    /// Rows.
    pub outputs: usize,
    /// Columns.
    pub inputs: usize,
    /// One addend for each row.
    pub bias: Option<Vec<f32>>,
    /// The rows.
    pub rows: WeightRows<'a, RowUnavailable>,
}

/// The parameters of a root-mean-square norm.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// One weight for each column.
    pub weight: &'a [f32],
    /// Added to the mean square.
    pub eps: f32,
}

/// Norms of queries and keys, applied between their projection and their rotation. A weight as long as a head norms each head by
/// itself (Qwen3, Gemma 3); a weight as long as a row norms all heads of a token together (OLMo 2).
#[derive(Clone, Copy, Debug)]
pub struct QkNorms<'a> {
    /// Norm of queries.
    pub q: Norm<'a>,
    /// Norm of keys.
    pub k: Norm<'a>,
}

/// The weights of a gated feed-forward network, down(activation(gate(x)) · up(x)).
#[derive(Debug)]
pub struct GatedMlp {
    /// Gate and up projection, packed by [`Device::pack_gate_up`](super::Device::pack_gate_up).
    pub gate_up: PackedLinear,
    /// Down projection.
    pub down: PackedLinear,
}

/// A layer's feed-forward network.
#[derive(Clone, Copy, Debug)]
pub enum Mlp<'a> {
    /// One network for all tokens.
    Dense(&'a GatedMlp),
    /// A mixture of experts: each token goes through those that the router chooses for it.
    Experts(Experts<'a>),
}

/// A mixture of experts: y = Σ wₑ · mlpₑ(x) over the experts e whose probability, softmax(router(x))ₑ, is among the greatest of the
/// token; wₑ is that probability. Shazeer et al., <https://arxiv.org/abs/1701.06538>.
#[derive(Clone, Copy, Debug)]
pub struct Experts<'a> {
    /// One output for each expert.
    pub router: &'a PackedLinear,
    /// The experts.
    pub experts: &'a [GatedMlp],
    /// Experts of a token, at least one and at most all.
    pub top_k: usize,
    /// Whether a token's weights are divided by their sum.
    pub normalised: bool,
}

/// The weights of a layer's second half, from attention's output to the next layer.
#[derive(Debug)]
pub struct LayerTail<'a> {
    /// Attention's output projection O.
    pub output: &'a PackedLinear,
    /// Norm of O's result before it joins the residual stream, in layers that norm it.
    pub attention_post_norm: Option<Norm<'a>>,
    /// Norm of the MLP's input, where it is normed.
    pub mlp_norm: Option<Norm<'a>>,
    /// The feed-forward network.
    pub mlp: Mlp<'a>,
    /// Activation of the gate.
    pub activation: Activation,
    /// Norm of the network's result before it joins the residual stream, in layers that norm it.
    pub mlp_post_norm: Option<Norm<'a>>,
    /// Weights of the product that follows the layer, which a device may begin to read.
    pub next: &'a PackedLinear,
}

/// Cosines and sines of the positions of some tokens, `tokens × rotary_dim/2` each. Pairs are half-split: element `i` of a head
/// with element `i + rotary_dim/2`; elements past `rotary_dim` are left alone.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rotary<'a> {
    /// Cosines.
    pub cos: &'a [f32],
    /// Sines.
    pub sin: &'a [f32],
    /// Their place in a table that other calls use as well; none of entries of one call.
    pub entries: Option<TableEntries>,
}

/// Entries of a table of cosines and sines, which a device with memory of its own may keep there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableEntries {
    /// The table.
    pub table: TableNumber,
    /// The first of the entries.
    pub first: usize,
}

/// The number of what a table holds. A table that changes gets another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableNumber(u64);

impl TableNumber {
    /// A number that the process has not given before.
    pub fn unused() -> TableNumber {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        TableNumber(NEXT.fetch_add(1, Relaxed))
    }
}

impl<'a> Rotary<'a> {
    /// Cosines and sines of one call.
    pub fn new(cos: &'a [f32], sin: &'a [f32]) -> Rotary<'a> {
        Rotary { cos, sin, entries: None }
    }

    /// Elements of a head that are rotated, for `tokens` tokens.
    pub fn dim(&self, tokens: usize) -> usize {
        2 * self.cos.len().checked_div(tokens).unwrap_or(0)
    }
}

/// Keys before RoPE or values of the tokens that are to be written into a cache, `tokens × Hkv × d`.
#[derive(Clone, Copy, Debug)]
pub enum KvRows<'a> {
    /// In the host's memory, as a store gives them; of these tokens alone.
    Host(Slice<'a>),
    /// In the device's memory, from the token of this index on; others may follow.
    Device(&'a KvBuffer, usize),
}

/// Heads of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheHeads {
    /// KV heads, `Hkv`.
    pub kv_heads: usize,
    /// Elements of a head, `d`.
    pub head_dim: usize,
}

impl CacheHeads {
    /// Elements of one token, `Hkv·d`.
    pub fn width(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

/// The way from the weights that rows and heads give a slot to one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightAggregation {
    /// Mean over heads, then the root of the sum of squares over rows.
    L2,
    /// Mean over the heads of a KV head, then the highest of all rows and KV heads.
    Max,
}

/// Weights that are held at a time, 64 MiB of them.
pub(super) const HELD_WEIGHTS: usize = 1 << 24;

impl WeightAggregation {
    /// Scores, one a slot, of the weights that `weigh` gives for some rows of `a`, kv_heads × rows × slots, about `held` of them at a time.
    pub(super) fn aggregate(
        self,
        a: &CachedAttention<'_>,
        held: usize,
        weigh: impl Fn(&CachedAttention<'_>, &mut [f32]),
        scores: &mut [f32],
    ) {
        let (rows, of_row) = (a.visible.len(), a.kv_heads * scores.len());
        let each = (held / of_row.max(1)).clamp(1, rows.max(1));
        let mut weights = vec![0.0; each * of_row];
        scores.fill(0.0);
        for first in (0..rows).step_by(each) {
            let visible = &a.visible[first..rows.min(first + each)];
            let weights = &mut weights[..visible.len() * of_row];
            weigh(&CachedAttention { first_row: a.first_row + first, visible, ..*a }, weights);
            self.add(weights, (a.heads, a.kv_heads), scores);
        }
        if self == WeightAggregation::L2 {
            scores.iter_mut().for_each(|score| *score = score.sqrt());
        }
    }

    /// Adds the weights of some rows, kv_heads × rows × slots.
    fn add(self, weights: &[f32], (heads, kv_heads): (usize, usize), scores: &mut [f32]) {
        let slots = scores.len();
        let rows = weights.len() / (kv_heads * slots).max(1);
        if self == WeightAggregation::Max {
            let group = (heads / kv_heads) as f32;
            for row in weights.chunks(slots.max(1)) {
                scores.iter_mut().zip(row).for_each(|(best, x)| *best = best.max(x / group));
            }
            return;
        }
        let mut means = vec![0.0f32; slots];
        for row in 0..rows {
            means.fill(0.0);
            for head in 0..kv_heads {
                let row = &weights[(head * rows + row) * slots..][..slots];
                means.iter_mut().zip(row).for_each(|(sum, x)| *sum += x / heads as f32);
            }
            scores.iter_mut().zip(&means).for_each(|(sum, x)| *sum += x * x);
        }
    }
}

/// Attention of rows of queries over cached keys and values.
///
/// Row `first_row + i` of `q` sees the slots `visible[i].0 .. visible[i].1`; head `h` uses KV head `h / (heads / kv_heads)`.
#[derive(Clone, Copy, Debug)]
pub struct CachedAttention<'a> {
    /// Rotated queries, rows × heads × head_dim.
    pub q: &'a Floats,
    /// The first row of `q` that attends. Its output goes to the row of the same index.
    pub first_row: usize,
    /// Rotated keys, kv_heads × capacity × head_dim.
    pub k: &'a KvBuffer,
    /// Values, kv_heads × capacity × head_dim, of the keys' type.
    pub v: &'a KvBuffer,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Slots of a KV head.
    pub capacity: usize,
    /// Half-open range of slots that each row sees: 1 <= end − start, end <= capacity. Ascending ends are the fastest
    /// order; every order is right.
    pub visible: &'a [(u32, u32)],
    /// Factor of the dot products before softmax.
    pub scale: f32,
    /// With [`Precision::F32`] a row's result does not depend on the other rows. With another precision, queries, keys,
    /// values and probabilities may be rounded to `bf16`, and fewer rows may be computed by another kernel than more. Sums
    /// are in `f32` in any case.
    pub precision: Precision,
}

impl CachedAttention<'_> {
    /// Elements of one row of queries, `H·d`.
    pub fn width(&self) -> usize {
        self.heads * self.head_dim
    }
}

/// How far recomputed and cached rows are apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Distance {
    /// Sum of squared differences.
    L2,
    /// Sum of absolute differences.
    L1,
}

/// Keys of one head of a cache.
#[derive(Clone, Copy, Debug)]
pub struct HeadKeys<'a> {
    /// Rotated keys, kv_heads × capacity × head_dim.
    pub k: &'a KvBuffer,
    /// The KV head.
    pub head: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Slots of a head.
    pub capacity: usize,
    /// Query heads of a row.
    pub queries: usize,
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;
    use crate::conformance::random;
    use crate::device::{Device, upload};
    use crate::{Buffer, Cpu};

    /// Rows are weighed some at a time, and scores are those of all at once.
    #[test]
    fn scores_do_not_depend_on_how_many_weights_are_held() {
        let device: &dyn Device = &Cpu::new(1).unwrap();
        let (heads, kv_heads, head_dim, slots, rows) = (4, 2, 32, 90, 11);
        let keys = random(kv_heads * slots * head_dim, 1).into_iter().map(f16::from_f32).collect();
        let k = device.upload_kv(Buffer::F16(keys).as_slice());
        let q = upload(device, &random((rows + 2) * heads * head_dim, 2));
        let visible: Vec<(u32, u32)> = (0..rows as u32).map(|row| (8 + row % 3, 60 + row)).collect();
        let (capacity, scale, precision) = (slots, 0.2, Precision::F32);
        let visible = visible.as_slice();
        let a = CachedAttention {
            q: &q,
            first_row: 2,
            k: &k,
            v: &k,
            heads,
            kv_heads,
            head_dim,
            capacity,
            visible,
            scale,
            precision,
        };
        let range = 8..60 + rows;
        for aggregation in [WeightAggregation::L2, WeightAggregation::Max] {
            let scored = |held| {
                let mut scores = vec![0.0; range.len()];
                let weigh = |a: &CachedAttention<'_>, weights: &mut [f32]| {
                    device.row_weights(a, range.clone(), weights)
                };
                aggregation.aggregate(&a, held, weigh, &mut scores);
                scores
            };
            let all = scored(HELD_WEIGHTS);
            assert!(all.iter().any(|score| *score > 0.0));
            for held in [0, 1, 3 * kv_heads * range.len(), 1000] {
                assert_eq!(scored(held), all, "{aggregation:?}, {held}");
            }
        }
    }
}
