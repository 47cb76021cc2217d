//! The trait of all policies, and what they see.

use std::fmt::Debug;

use refrain_kernels::{Cpu, Slice};
use refrain_kv::Span;

use crate::Result;

/// Where a prompt's parts lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptSpans {
    /// The system part, from 0.
    pub system: Span,
    /// The question part, up to the end.
    pub question: Span,
}

impl PromptSpans {
    /// Tokens of the prompt, `n`.
    pub fn len(&self) -> usize {
        self.question.end as usize
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// How many tokens stay, and when that is looked at: before a token is appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Tokens that pruning leaves.
    pub keep: usize,
    /// Pruning happens when there are more tokens than this; at least `keep`.
    pub most: usize,
    /// Whether it goes on while decoding. If not, only the prompt is pruned, and the cache grows from there.
    pub decoding: bool,
}

impl Budget {
    /// Pruning to `capacity` whenever there is one token more.
    pub fn constant(capacity: usize) -> Budget {
        Budget { keep: capacity, most: capacity, decoding: true }
    }

    /// Pruning the prompt to `capacity`, once.
    pub fn once(capacity: usize) -> Budget {
        Budget { keep: capacity, most: capacity, decoding: false }
    }
}

/// What attention must report to a policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Observation {
    /// Nothing: attention stays fused.
    Nothing,
    /// The sum over the prompt's last `rows` rows of the weights that each token receives; nothing while decoding.
    Prompt {
        /// Rows at the prompt's end.
        rows: usize,
    },
    /// The sum over all rows of the prompt, then the weights of each step.
    Sums,
    /// The same of `softmax((logit + g) / τ)`, `g` Gumbel noise.
    NoisySums {
        /// Seed of the noise; none for no noise.
        seed: Option<u64>,
        /// Temperature.
        tau: Tau,
    },
    /// The weights of each of the last `rows` rows.
    Weights {
        /// Rows at the prompt's end.
        rows: usize,
    },
    /// The rotated queries of the last `rows` rows.
    Queries {
        /// Rows at the prompt's end.
        rows: usize,
    },
}

/// A temperature that rises with every step of decoding: `min(start + step·i, end)`; `start` for the prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tau {
    /// At the prompt.
    pub start: f32,
    /// Added with every step.
    pub step: f32,
    /// At most.
    pub end: f32,
}

impl Tau {
    /// At step `i` of decoding, from 1; 0 is the prompt.
    pub fn at(&self, i: usize) -> f32 {
        (self.start + self.step * i as f32).min(self.end)
    }
}

/// One layer of a cache. A *head* is one of the cache: a KV head, or a query head where each has a cache of its own.
#[derive(Clone, Copy, Debug)]
pub struct LayerView<'a> {
    /// Kernels to compute with.
    pub cpu: &'a Cpu,
    /// Heads of the cache.
    pub heads: usize,
    /// Query heads of each.
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
    /// Rotated keys, `heads × capacity × d`.
    pub keys: Slice<'a>,
    /// Position of the token that comes next.
    pub next: u32,
}

impl LayerView<'_> {
    /// Positions of a head's tokens, `len` of them.
    pub fn head(&self, head: usize) -> &[u32] {
        &self.positions[head * self.capacity..][..self.len]
    }

    /// Whether a position is one of the last `recent` before the next token.
    pub fn is_recent(&self, position: u32, recent: usize) -> bool {
        position as usize + recent >= self.next as usize
    }
}

/// What attention reported of some rows.
#[derive(Clone, Copy, Debug)]
pub struct Observed<'a> {
    /// Positions of the rows, ascending.
    pub rows: &'a [u32],
    /// Number of tokens that each of them saw.
    pub seen: &'a [u32],
    /// Weights summed over the query heads of a head: `heads × rows × len`, or, where sums over the rows are asked for,
    /// `heads × 1 × len`.
    pub weights: &'a [f32],
    /// Rotated queries, `rows × query heads × d`.
    pub queries: &'a [f32],
}

/// A way to bound the cache.
pub trait EvictionPolicy: Debug + Send + Sync {
    /// How many tokens stay; none if nothing is ever evicted after this prompt.
    ///
    /// # Errors
    /// If options contradict one another or the prompt.
    fn budget(&self, prompt: &PromptSpans) -> Result<Option<Budget>>;

    /// What attention must report.
    fn observes(&self, prompt: &PromptSpans) -> Observation;

    /// The statistics of one layer, with `heads × capacity` slots. `group` query heads share a head; `head_dim` is `d`.
    fn statistics(&self, prompt: &PromptSpans, sizes: Sizes) -> Box<dyn Statistics>;

    /// Whether it never evicts anything from any prompt.
    fn is_full(&self) -> bool {
        false
    }

    /// Where keys are rotated by their places in the cache and not by their positions: how many tokens at the start
    /// stay for good.
    fn sinks(&self) -> Option<usize> {
        None
    }
}

/// Sizes of one layer's statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Heads of the cache.
    pub heads: usize,
    /// Query heads of each.
    pub group: usize,
    /// Elements of a head, `d`.
    pub head_dim: usize,
    /// Slots of a head.
    pub capacity: usize,
    /// Rows that there can be at most: the tokens of prompt and answer.
    pub rows: usize,
}

/// What a policy remembers of one layer, beside keys and values and moved with them.
pub trait Statistics: Debug + Send {
    /// Takes in what attention reported. `layer` holds the tokens that the last row saw.
    fn observe(&mut self, _seen: &Observed<'_>, _layer: &LayerView<'_>) {}

    /// One score for each token of a head, `layer.len` of them: the highest stay, and of equal ones the earlier
    /// position. [`f32::INFINITY`] protects.
    fn score(&self, layer: &LayerView<'_>, head: usize, scores: &mut [f32]);

    /// The slot that goes if one has to: that of the lowest [score](Statistics::score), `scores` being room for `layer.len`.
    /// An override may tell apart what is equal in f32.
    fn weakest(&self, layer: &LayerView<'_>, head: usize, scores: &mut [f32]) -> Option<usize> {
        self.score(layer, head, scores);
        refrain_kv::weakest(scores, layer.head(head))
    }

    /// The token at `position` has moved from one slot of a head to another.
    fn moved(&mut self, _head: usize, _from: usize, _to: usize, _position: u32) {}

    /// The same for `capacity` slots of each head, of which the first `kept.len() / heads` hold what was in the slots
    /// `kept` (head after head).
    fn gather(&self, kept: &[u32], capacity: usize) -> Box<dyn Statistics>;

    /// Bytes allocated.
    fn bytes(&self) -> usize {
        0
    }
}

/// Statistics that need none: the first `sinks` positions and the most recent ones stay.
#[derive(Clone, Copy, Debug, Default)]
pub struct Recent {
    /// Positions at the start that stay.
    pub sinks: usize,
}

impl Statistics for Recent {
    fn score(&self, layer: &LayerView<'_>, head: usize, scores: &mut [f32]) {
        for (score, position) in scores.iter_mut().zip(layer.head(head)) {
            let age = (layer.next - position) as f32;
            *score = if (*position as usize) < self.sinks { f32::INFINITY } else { -age };
        }
    }

    fn gather(&self, _: &[u32], _: usize) -> Box<dyn Statistics> {
        Box::new(*self)
    }
}
