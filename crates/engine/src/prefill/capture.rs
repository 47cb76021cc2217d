//! Attention of the question that is reported beside a prefill: for explanations, and for comparisons with vanilla.

use refrain_kernels::Device;
use refrain_kv::{LayerCache, Span, stats};

use crate::forward::{ActiveTokens, attention};

/// Last rows of the question whose attention makes a map.
const MAP_ROWS: usize = 64;

/// The layer whose attention explains a choice (A³'s check layer).
pub(crate) const EXPLAIN_LAYER: usize = 1;

/// Attention of the question that is to be reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttentionCapture {
    /// None.
    Nothing,
    /// The attention that document tokens receive at [`EXPLAIN_LAYER`].
    Explain,
    /// Its map at every layer.
    Maps,
}

/// Attention of the question's last rows to document tokens at one layer, mean over heads: `rows × documents`. What rows
/// give to the system part and the question is left out.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AttentionMap {
    rows: usize,
    weights: Vec<f32>,
}

/// Queries of the projected tokens, of which those of the question come last, with the keys of `layer` that they see. `slot` is the number of
/// tokens in `cache` before a position.
pub(crate) fn question_keys<'a>(
    tokens: &'a ActiveTokens,
    (cache, capacity): (&'a LayerCache, usize),
    layer: usize,
    slot: impl Fn(u32) -> u32,
) -> stats::QuestionKeys<'a> {
    let (decoder, queries) = (&tokens.decoder, (&tokens.work.q, 0));
    let window = decoder.config().layers[layer].window.map(|window| window as u32);
    let starts = |window| tokens.positions.iter().map(|row| slot((row + 1).saturating_sub(window))).collect();
    stats::QuestionKeys {
        attention: attention(decoder, layer, (cache, capacity), queries, &[]),
        starts: window.map(starts).unwrap_or_default(),
    }
}

impl AttentionMap {
    /// Document tokens.
    pub(crate) fn documents(&self) -> usize {
        self.weights.len() / self.rows.max(1)
    }

    /// The map of the last rows of the question; `documents` and `question` are slots.
    pub(crate) fn of(
        device: &dyn Device,
        keys: &stats::QuestionKeys<'_>,
        (documents, question): (Span, Span),
    ) -> AttentionMap {
        let rows = question.len().min(MAP_ROWS);
        let last = Span::new(question.range().end - rows, question.range().end);
        AttentionMap { rows, weights: stats::question_map(device, keys, documents, last) }
    }

    /// The map over all `documents` tokens, where this one's columns are the tokens `kept` of them and the others receive nothing.
    pub(crate) fn spread(&self, kept: &[usize], documents: usize) -> AttentionMap {
        let mut weights = vec![0.0; self.rows * documents];
        for (row, all) in self.rows().zip(weights.chunks_mut(documents.max(1))) {
            kept.iter().zip(row).for_each(|(token, weight)| all[*token] = *weight);
        }
        AttentionMap { rows: self.rows, weights }
    }

    pub(crate) fn rows(&self) -> impl Iterator<Item = &[f32]> {
        self.weights.chunks((self.weights.len() / self.rows.max(1)).max(1))
    }

    /// Mean over rows of their L2 distance.
    pub(crate) fn distance(&self, other: &AttentionMap) -> f64 {
        let row = |(a, b): (&[f32], &[f32])| {
            a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt()
        };
        self.rows().zip(other.rows()).map(row).sum::<f64>() / self.rows.max(1) as f64
    }
}
