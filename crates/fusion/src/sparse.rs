//! Methods that keep only a part of the documents: what they see, and what they decide.

use std::fmt::Debug;

use refrain_kernels::{Attention, Cpu, Slice};
use refrain_kv::{AuxTensors, Ropes, Span};

use crate::{PromptView, Result};

/// A method that keeps something of its own beside each document. A document is one *context* for it: prefilled as one,
/// however long. [`PromptView::chunks`] are contexts here.
pub trait Summarize: Debug + Send + Sync {
    /// Name of what [`summarize`](Summarize::summarize) makes: `[a-z0-9_-]`, with every option that changes it.
    fn kind(&self) -> String;

    /// Last tokens of a context whose queries before RoPE `summarize` wants.
    fn local(&self) -> usize;

    /// What is kept beside a context's keys and values: called for every layer, ascending, when it is prefilled.
    fn summarize(&self, layer: &ContextLayer<'_>, summary: &mut AuxTensors);
}

/// A method that keeps, layer by layer, only a part of the documents' keys and values.
pub trait SparseMethod: Summarize {
    /// Positions of documents that are kept at every layer whatever is asked, ascending and apart.
    fn base(&self, prompt: &PromptView<'_>) -> Vec<Span>;

    /// Whether the question is to be computed over the base first, so that [`select`](SparseMethod::select) knows its queries.
    fn asks(&self, prompt: &PromptView<'_>) -> bool;

    /// What is kept of each layer, and what of that is computed anew.
    ///
    /// # Errors
    /// If a summary is not what `summarize` made.
    fn select(&self, draft: &Draft<'_>) -> Result<Selection>;

    /// Whether what is computed anew takes the place of what was cached. If not, it is [merged](SparseMethod::merge).
    fn overwrites(&self) -> bool {
        true
    }

    /// A token's key (before RoPE) or value, `Hkv × d`, computed anew, becomes what is kept in view of the cached one.
    fn merge(&self, _fresh: &mut [f32], _cached: &[f32], _head_dim: usize) {}
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

    /// What each of the context's rows sees but itself.
    fn later(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.attention.visible[self.first..].iter().map(|(from, to)| (*from, to - 1))
    }

    fn rows<'a>(&'a self, visible: &'a [(u32, u32)]) -> (Attention<'a>, &'a [f32]) {
        let Attention { q, heads, head_dim, .. } = self.attention;
        let attention = Attention { q: &q[self.first * heads * head_dim..], visible, ..self.attention };
        (attention, &self.lse[self.first * heads..])
    }
}

/// What a sparse method selects by.
#[derive(Clone, Copy, Debug)]
pub struct Draft<'a> {
    /// The prompt; its chunks are contexts.
    pub prompt: &'a PromptView<'a>,
    /// Of each context, what was kept beside it; none if the context is not cached.
    pub summaries: &'a [Option<&'a AuxTensors>],
    /// Mean query before RoPE of the question at each layer, `layers × H × d`; empty if the method did not
    /// [ask](SparseMethod::asks).
    pub queries: &'a [f32],
    /// Query heads, `H`.
    pub heads: usize,
    /// KV heads, `Hkv`.
    pub kv_heads: usize,
    /// Elements of a head, `d`.
    pub head_dim: usize,
    /// Rotary frequencies of the request, by layer.
    pub ropes: &'a Ropes,
    /// Layers that were found to be stable for this model, if that was looked for.
    pub stable_layers: Option<Span>,
}

/// What is kept of the documents and what of it is computed anew.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Selection {
    /// One entry a layer. All of them keep equally many tokens.
    pub layers: Vec<Kept>,
    /// Times that a rule met a case that its paper leaves open, for the account.
    pub undecided: usize,
}

/// What is kept of the documents at one layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Kept {
    /// Positions, ascending and apart.
    pub spans: Vec<Span>,
    /// Positions among them whose keys and values are computed anew, ascending.
    pub fresh: Vec<u32>,
}

/// What is computed at one layer for a [`Selection`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pass {
    /// Positions that are projected, ascending: those of a token that is computed anew here or deeper.
    pub rows: Vec<u32>,
    /// Those that go on to the next layer: computed anew deeper.
    pub on: Vec<u32>,
    /// Those of them that are not kept here: their cached keys and values stand in while this layer's rows are computed,
    /// and are gone afterwards.
    pub padded: Vec<u32>,
}

impl Kept {
    /// Tokens kept.
    pub fn len(&self) -> usize {
        self.spans.iter().map(|span| span.len()).sum()
    }

    /// Whether nothing is kept.
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// Whether a position is kept.
    pub fn contains(&self, position: u32) -> bool {
        let after = self.spans.partition_point(|span| span.start <= position);
        after > 0 && self.spans[after - 1].contains(position)
    }
}

impl Selection {
    /// What is to be computed so that every layer's fresh tokens can be: a token whose deepest such layer is `l` goes
    /// through all layers above `l`. Rows shrink with depth.
    pub fn passes(&self) -> Vec<Pass> {
        let mut passes = vec![Pass::default(); self.layers.len()];
        let mut on: Vec<u32> = Vec::new();
        for (kept, pass) in self.layers.iter().zip(&mut passes).rev() {
            pass.padded = on.iter().copied().filter(|position| !kept.contains(*position)).collect();
            pass.on.clone_from(&on);
            on.extend(&kept.fresh);
            on.sort_unstable();
            on.dedup();
            pass.rows.clone_from(&on);
        }
        passes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(spans: &[(usize, usize)], fresh: &[u32]) -> Kept {
        Kept { spans: spans.iter().map(|(a, b)| Span::new(*a, *b)).collect(), fresh: fresh.to_vec() }
    }

    #[test]
    fn a_token_goes_through_all_layers_above_its_deepest_and_is_padded_where_it_is_not_kept() {
        let layers = vec![
            kept(&[(0, 2), (4, 6)], &[0, 4]),
            kept(&[(0, 2), (8, 10)], &[0]),
            kept(&[(0, 2), (4, 6)], &[0, 5]),
            kept(&[(0, 2), (8, 10)], &[0]),
        ];
        let passes = Selection { layers, undecided: 0 }.passes();
        let pass = |rows: &[u32], on: &[u32], padded: &[u32]| Pass {
            rows: rows.to_vec(),
            on: on.to_vec(),
            padded: padded.to_vec(),
        };
        // 4 is computed anew at layer 0 and nowhere deeper: projected there, it goes no further. 5 is at layer 2:
        // it goes through layers 0, where it is kept as it was, and 1, where it is not kept.
        assert_eq!(passes[0], pass(&[0, 4, 5], &[0, 5], &[]));
        assert_eq!(passes[1], pass(&[0, 5], &[0, 5], &[5]));
        assert_eq!(passes[2], pass(&[0, 5], &[0], &[]));
        assert_eq!(passes[3], pass(&[0], &[], &[]));
    }

    #[test]
    fn kept_positions_are_found_in_their_spans() {
        let kept = kept(&[(2, 4), (4, 5), (9, 12)], &[]);
        let found: Vec<u32> = (0..14).filter(|p| kept.contains(*p)).collect();
        assert_eq!((found, kept.len()), (vec![2, 3, 4, 9, 10, 11], 6));
    }
}
