//! The scores by which tokens of one layer stay or go.

use std::fmt::Debug;

use refrain_kernels::{Device, HeadKeys, KvBuffer};

use crate::AttentionReport;

/// One layer of a cache. A *head* is one of the cache: a KV head, or a query head where each has a cache of its own.
#[derive(Clone, Copy, Debug)]
pub struct LayerView<'a> {
    /// Heads of the cache.
    pub heads: usize,
    /// Query heads of each head.
    pub group: usize,
    /// Elements of a head, `d`.
    pub head_dim: usize,
    /// Factor of the layer's attention logits q·k.
    pub scale: f32,
    /// Slots of a head.
    pub capacity: usize,
    /// Slots in use, from 0; the same number in every head.
    pub len: usize,
    /// Position of the token in each slot, `heads × capacity`.
    pub positions: &'a [u32],
    /// Rotated keys, on their device.
    pub keys: CachedKeys<'a>,
    /// Position of the token that comes next.
    pub next: u32,
}

/// Rotated keys of a layer's cache, `heads × capacity × d`. They stay on their device; a scorer asks for logits.
#[derive(Clone, Copy, Debug)]
pub struct CachedKeys<'a> {
    device: &'a dyn Device,
    keys: &'a KvBuffer,
}

impl<'a> CachedKeys<'a> {
    /// Keys of a device.
    pub fn new(device: &'a dyn Device, keys: &'a KvBuffer) -> CachedKeys<'a> {
        CachedKeys { device, keys }
    }
}

impl LayerView<'_> {
    /// Logits of rows of queries over a head's tokens, `rows × len`: the sum over the row's `queries` queries, scaled. `q` is
    /// `rows × queries × d`, rotated.
    pub fn concat_logits(&self, head: usize, q: &[f32], queries: usize) -> Vec<f32> {
        let (capacity, head_dim) = (self.capacity, self.head_dim);
        let keys = HeadKeys { k: self.keys.keys, head, head_dim, capacity, queries };
        let mut logits = vec![0.0; q.len() / (queries * head_dim) * self.len];
        self.keys.device.concat_logits(q, keys, self.scale, &mut logits);
        logits
    }

    /// Positions of a head's tokens, `len` of them.
    pub fn head(&self, head: usize) -> &[u32] {
        &self.positions[head * self.capacity..][..self.len]
    }

    /// Whether a position is one of the last `recent` before the next token.
    pub fn is_recent(&self, position: u32, recent: usize) -> bool {
        position as usize + recent >= self.next as usize
    }
}

/// Scores the tokens of one layer. A scorer remembers what it needs beside keys and values, slot by slot, and follows tokens
/// that move.
pub trait TokenScorer: Debug + Send {
    /// Takes in what attention reports. `layer` holds the tokens that the last row sees.
    fn observe(&mut self, _report: &AttentionReport<'_>, _layer: &LayerView<'_>) {}

    /// Writes one score for each token of a head, `layer.len` of them. The highest stay; of equal ones the earlier
    /// position. [`f32::INFINITY`] protects.
    fn score(&self, layer: &LayerView<'_>, head: usize, scores: &mut [f32]);

    /// The slot that goes if one has to: the one of the lowest [score](TokenScorer::score), `scores` being room for
    /// `layer.len`. An implementation of its own may order tokens whose scores are equal in f32.
    fn weakest(&self, layer: &LayerView<'_>, head: usize, scores: &mut [f32]) -> Option<usize> {
        self.score(layer, head, scores);
        refrain_kv::weakest(scores, layer.head(head))
    }

    /// Follows the token at `position` from one slot of a head to another.
    fn moved(&mut self, _head: usize, _from: usize, _to: usize, _position: u32) {}

    /// A scorer for `capacity` slots of each head, of which the first `kept.len() / heads` hold what was in the slots
    /// `kept` (head after head).
    fn gather(&self, kept: &[u32], capacity: usize) -> Box<dyn TokenScorer>;

    /// Bytes that the scorer holds.
    fn bytes(&self) -> usize {
        0
    }
}

/// Keeps the first `sinks` positions and the most recent ones; needs no report.
#[derive(Clone, Copy, Debug, Default)]
pub struct RecencyScorer {
    /// Positions at the start that stay.
    pub sinks: usize,
}

impl TokenScorer for RecencyScorer {
    fn score(&self, layer: &LayerView<'_>, head: usize, scores: &mut [f32]) {
        for (score, position) in scores.iter_mut().zip(layer.head(head)) {
            let age = (layer.next - position) as f32;
            *score = if (*position as usize) < self.sinks { f32::INFINITY } else { -age };
        }
    }

    fn gather(&self, _: &[u32], _: usize) -> Box<dyn TokenScorer> {
        Box::new(*self)
    }
}
