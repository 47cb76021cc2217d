//! Statistics that a method keeps beside a document, of the document's own attention, computed when it is prefilled.

use std::fmt::Debug;

use refrain_kernels::{Attention, Cpu, Slice};
use refrain_kv::AuxTensors;

/// Statistics that a method keeps beside each document. A document is one *context* for it: prefilled as one, however long.
pub trait ChunkStatistics: Debug + Send + Sync {
    /// Name of the statistics: `[a-z0-9_-]`, with every option that changes them.
    fn kind(&self) -> String;

    /// Last tokens of a context whose queries before RoPE [`observe`](ChunkStatistics::observe) wants.
    fn last_queries(&self) -> usize;

    /// Adds one layer of a context to its statistics. Called for every layer, ascending, when the context is prefilled.
    fn observe(&self, layer: &ContextLayer<'_>, statistics: &mut AuxTensors);
}

/// One layer of a context that is prefilled alone.
#[derive(Clone, Copy, Debug)]
pub struct ContextLayer<'a> {
    /// Kernels to compute with.
    pub cpu: &'a Cpu,
    /// Index of the layer, from 0.
    pub layer: usize,
    /// Layers of the model.
    pub layers: usize,
    /// Its attention: one row a token, after `first` rows of tokens that are not the context's (BOS).
    pub attention: Attention<'a>,
    /// Logarithm of the softmax's sum of every row and head, `rows × H`.
    pub lse: &'a [f32],
    /// Rows before the context's first token.
    pub first: usize,
    /// Queries before RoPE of the last tokens, `m × H × d`.
    pub queries: &'a [f32],
    /// Keys before RoPE, `tokens × Hkv × d`.
    pub k: Slice<'a>,
}

impl ContextLayer<'_> {
    /// Tokens of the context.
    pub fn tokens(&self) -> usize {
        self.attention.visible.len() - self.first
    }

    /// Elements of one token's keys, `Hkv·d`.
    pub fn width(&self) -> usize {
        self.attention.kv_heads * self.attention.head_dim
    }

    /// Attention that each token receives from all later ones, summed over these and over the query heads of each KV head:
    /// `Hkv × tokens`.
    pub fn received_by_head(&self) -> Vec<f32> {
        let tokens = self.tokens();
        let visible: Vec<(u32, u32)> = self.later().collect();
        let (attention, lse) = self.rows(&visible);
        let mut sums = vec![0.0; self.attention.kv_heads * tokens];
        self.cpu.attention_mass_from_lse(&attention, lse, self.first..self.first + tokens, &mut sums);
        sums
    }

    /// The same, mean over heads: their sum over later tokens, and how many of these see the token.
    pub fn received(&self) -> Vec<(f32, usize)> {
        let (tokens, heads) = (self.tokens(), self.attention.heads);
        let visible: Vec<(u32, u32)> = self.later().collect();
        let sums = self.received_by_head();
        // How many rows more see a token than the one before it.
        let mut more = vec![0i64; tokens + 1];
        for (from, to) in &visible {
            let at = |slot: u32| (slot as usize).clamp(self.first, self.first + tokens) - self.first;
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
        let (attention, lse) = self.rows(&visible);
        let slots: Vec<u32> = tokens.iter().map(|t| t + self.first as u32).collect();
        let mut weights = vec![0.0; slots.len() * visible.len()];
        self.cpu.column_weights_from_lse(&attention, lse, &slots, &mut weights);
        let heads = attention.heads as f32;
        let column = |(t, row): (&u32, &[f32])| {
            let seen = visible.iter().zip(row).skip(*t as usize + 1);
            let seen = seen.take_while(|((from, _), _)| *from <= t + self.first as u32);
            seen.map(|(_, weight)| weight / heads).collect()
        };
        tokens.iter().zip(weights.chunks_exact(visible.len().max(1))).map(column).collect()
    }

    /// The tokens that each of the context's rows sees, without itself.
    fn later(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.attention.visible[self.first..].iter().map(|(from, to)| (*from, to - 1))
    }

    fn rows<'a>(&'a self, visible: &'a [(u32, u32)]) -> (Attention<'a>, &'a [f32]) {
        let Attention { q, heads, head_dim, .. } = self.attention;
        let attention = Attention { q: &q[self.first * heads * head_dim..], visible, ..self.attention };
        (attention, &self.lse[self.first * heads..])
    }
}
