//! Statistics that a method keeps beside a document, of the document's own attention, computed when it is prefilled.

use std::fmt::Debug;

use refrain_kernels::{CachedAttention, Device, Dtype, Floats, Slice};
use refrain_kv::AuxTensors;
use refrain_kv::stats::mean;

use crate::retrieval::representative;

/// Statistics that a method keeps beside each document. A document is one *context* for it: prefilled as one, however long.
pub trait ChunkStatistics: Debug + Send + Sync {
    /// Name of the statistics: `[a-z0-9_-]`, with every option that changes them.
    fn kind(&self) -> String;

    /// Last tokens of a context whose queries before RoPE [`observe`](ChunkStatistics::observe) wants.
    fn last_queries(&self) -> usize;

    /// Adds one layer of a context to its statistics. Called for every layer, ascending, when the context is prefilled.
    fn observe(&self, layer: &ContextLayer<'_>, statistics: &mut AuxTensors);
}

/// One layer of a context that is prefilled alone. Its tensors stay on the device: a method asks for what it needs of them.
#[derive(Clone, Copy, Debug)]
pub struct ContextLayer<'a> {
    /// Index of the layer, from 0.
    pub layer: usize,
    /// Layers of the model.
    pub layers: usize,
    tensors: ContextTensors<'a>,
}

/// The tensors of a layer of a context.
#[derive(Clone, Copy, Debug)]
pub struct ContextTensors<'a> {
    /// The device that holds them.
    pub device: &'a dyn Device,
    /// Attention of all rows: one a token, after `first` rows of tokens that are not the context's (BOS).
    pub attention: CachedAttention<'a>,
    /// Logarithm of the softmax's sum of every row and head, `rows × H`.
    pub lse: &'a Floats,
    /// Rows before the context's first token.
    pub first: usize,
    /// Queries before RoPE of the last tokens, `m × H × d`.
    pub queries: &'a Floats,
    /// Keys before RoPE, `tokens × Hkv × d`, as they go to the store.
    pub k: Slice<'a>,
}

impl<'a> ContextLayer<'a> {
    /// The layer of number `layer` of `layers`.
    pub fn new(layer: usize, layers: usize, tensors: ContextTensors<'a>) -> ContextLayer<'a> {
        ContextLayer { layer, layers, tensors }
    }

    /// Tokens of the context.
    pub fn tokens(&self) -> usize {
        self.tensors.attention.visible.len() - self.tensors.first
    }

    /// Elements of one token's keys, `Hkv·d`.
    pub fn width(&self) -> usize {
        self.tensors.attention.kv_heads * self.tensors.attention.head_dim
    }

    /// Elements of one token's queries, `H·d`.
    pub fn query_width(&self) -> usize {
        self.tensors.attention.width()
    }

    /// Type of the keys.
    pub fn dtype(&self) -> Dtype {
        self.tensors.k.dtype()
    }

    /// Mean query before RoPE of the last `tokens` tokens, or of all if there are fewer; at most as many as
    /// [`ChunkStatistics::last_queries`] asks for. `H·d` elements.
    pub fn mean_query(&self, tokens: usize) -> Vec<f32> {
        let width = self.query_width();
        let rows = self.tensors.queries.len() / width;
        self.tensors.device.mean_row(self.tensors.queries, width, rows.saturating_sub(tokens)..rows)
    }

    /// Means of the keys before RoPE of each `block` tokens, the last block being of those that are left: `blocks × Hkv·d`.
    pub fn key_means(&self, block: usize) -> Vec<f32> {
        let width = self.width();
        self.keys().chunks(block * width).flat_map(|block| mean(block, width)).collect()
    }

    /// Mean of the `count` keys before RoPE that received most attention, one for each `block` tokens and each KV head:
    /// `blocks × Hkv·d`.
    pub fn representatives(&self, block: usize, count: usize) -> Vec<f32> {
        let (tokens, width, d) = (self.tokens(), self.width(), self.tensors.attention.head_dim);
        let (keys, received) = (self.keys(), self.received_by_head());
        let mut found = Vec::with_capacity(tokens.div_ceil(block) * width);
        for from in (0..tokens).step_by(block) {
            let to = (from + block).min(tokens);
            for (head, received) in received.chunks_exact(tokens).enumerate() {
                let own = |t: usize| &keys[t * width + head * d..][..d];
                let keys: Vec<f32> = (from..to).flat_map(own).copied().collect();
                found.extend(representative(&keys, &received[from..to], count));
            }
        }
        found
    }

    fn keys(&self) -> Vec<f32> {
        self.tensors.k.floats()
    }

    /// Attention that each token receives from all later ones, summed over these and over the query heads of each KV head:
    /// `Hkv × tokens`.
    pub fn received_by_head(&self) -> Vec<f32> {
        let tokens = self.tokens();
        let visible: Vec<(u32, u32)> = self.later().collect();
        let ContextTensors { device, lse, first, .. } = self.tensors;
        let attention = self.rows(&visible);
        let mut sums = vec![0.0; attention.kv_heads * tokens];
        device.attention_mass_from_lse(&attention, lse, first..first + tokens, &mut sums);
        sums
    }

    /// Attention that each token receives from all later ones, mean over heads: its sum, and the number of rows that see the token.
    pub fn received(&self) -> Vec<(f32, usize)> {
        let (tokens, heads, first) = (self.tokens(), self.tensors.attention.heads, self.tensors.first);
        let visible: Vec<(u32, u32)> = self.later().collect();
        let sums = self.received_by_head();
        // How many rows more see a token than the one before it.
        let mut more = vec![0i64; tokens + 1];
        for (from, to) in &visible {
            let at = |slot: u32| (slot as usize).clamp(first, first + tokens) - first;
            more[at(*from)] += 1;
            more[at(*to)] -= 1;
        }
        let mut count = 0;
        let token = |t: usize| {
            count += more[t];
            (sums[t..].iter().step_by(tokens).sum::<f32>() / heads as f32, count as usize)
        };
        (0..tokens).map(token).collect()
    }

    /// Attention that each of `tokens` (ascending) receives from all later ones that see it, mean over heads: for each the
    /// weights at distance 1, 2, …
    pub fn decay(&self, tokens: &[u32]) -> Vec<Vec<f32>> {
        let visible: Vec<(u32, u32)> = self.later().collect();
        let ContextTensors { device, lse, first, .. } = self.tensors;
        let attention = self.rows(&visible);
        let slots: Vec<u32> = tokens.iter().map(|t| t + first as u32).collect();
        let mut weights = vec![0.0; slots.len() * visible.len()];
        device.column_weights_from_lse(&attention, lse, &slots, &mut weights);
        let heads = attention.heads as f32;
        let column = |(t, row): (&u32, &[f32])| {
            let seen = visible.iter().zip(row).skip(*t as usize + 1);
            let seen = seen.take_while(|((from, _), _)| *from <= t + first as u32);
            seen.map(|(_, weight)| weight / heads).collect()
        };
        tokens.iter().zip(weights.chunks_exact(visible.len().max(1))).map(column).collect()
    }

    /// The tokens that each of the context's rows sees, without itself.
    fn later(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.tensors.attention.visible[self.tensors.first..].iter().map(|(from, to)| (*from, to - 1))
    }

    /// Attention of the context's rows over `visible`.
    fn rows<'b>(&'b self, visible: &'b [(u32, u32)]) -> CachedAttention<'b> {
        CachedAttention { first_row: self.tensors.first, visible, ..self.tensors.attention }
    }
}
