//! Scissorhands (arXiv 2305.17118): important tokens stay important. The policy counts in how many of the last `w` attention
//! rows a token received less than an even share, and drops the tokens of the highest counts, many at a time.
//!
//! `I[t] = Σ_w 1[a_t < 1/len]`; the last `r` tokens stay, and `m` with the largest `I` go.

use refrain_registry::{Error, MAX_COUNT, Options};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    AttentionNeeds, AttentionReport, Budget, EvictionPolicy, LayerView, PromptSpans, Result, Sizes,
    TokenScorer,
};

/// Options of Scissorhands: drop the tokens that received little attention most often.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Scissorhands {
    /// Tokens that are in the cache at most.
    #[schemars(range(max = MAX_COUNT))]
    pub capacity: usize,
    /// Attention rows that are looked back at.
    #[schemars(range(max = MAX_COUNT))]
    pub history: usize,
    /// Most recent tokens that stay.
    #[schemars(range(max = MAX_COUNT))]
    pub recent: usize,
    /// Share of the capacity that is dropped at a time.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub drop: f64,
}

impl Default for Scissorhands {
    fn default() -> Self {
        Scissorhands { capacity: 1024, history: 400, recent: 10, drop: 0.5 }
    }
}

impl Options for Scissorhands {
    const NAME: &'static str = "scissorhands";

    fn validate(&self) -> Result<()> {
        let Scissorhands { capacity, recent, history, .. } = *self;
        let conflict = |conflict| Err(Error::conflict(Self::NAME, conflict));
        if self.keep() <= recent || capacity == 0 {
            return conflict(format!(
                "capacity {capacity} less the {} dropped at a time leaves no token beside the {recent} recent ones: choose a larger capacity or a smaller drop",
                self.dropped()
            ));
        }
        if history == 0 {
            return conflict("a history of 0 leaves no row to look back at: choose a longer one".to_owned());
        }
        if history.saturating_mul(capacity) > BITS {
            return conflict(format!(
                "a history of {history} rows of {capacity} tokens is more than is looked back at for every token that goes: {BITS} in all at most"
            ));
        }
        Ok(())
    }
}

impl Scissorhands {
    /// Tokens dropped at a time.
    fn dropped(&self) -> usize {
        refrain_kv::top_count(self.drop, self.capacity, self.capacity).max(1)
    }

    /// Tokens that dropping leaves.
    fn keep(&self) -> usize {
        self.capacity.saturating_add(1).saturating_sub(self.dropped())
    }
}

/// Most rows of the history times tokens of the cache: each is a bit, for every head.
const BITS: usize = 1 << 22;

impl EvictionPolicy for Scissorhands {
    fn budget(&self, prompt: &PromptSpans) -> Result<Option<Budget>> {
        self.validate()?;
        prompt.check_rows(self.history, Self::NAME, "history")?;
        Ok(Some(Budget { keep: self.keep(), most: self.capacity, decoding: true }))
    }

    fn needs(&self, _: &PromptSpans, _: usize) -> AttentionNeeds {
        AttentionNeeds::RowWeights { rows: self.history }
    }

    fn scorer(&self, _: &PromptSpans, sizes: Sizes) -> Box<dyn TokenScorer> {
        let policy = Scissorhands { history: self.history.min(sizes.rows), ..*self };
        Box::new(LowAttentionBits::new(policy, sizes.heads, sizes.group, sizes.capacity))
    }

    fn side_bytes(&self, _: &PromptSpans, sizes: Sizes) -> usize {
        LowAttentionBits::bytes_of(self.history.min(sizes.rows), sizes)
    }
}

/// Position of a row that was not written yet.
const NONE: u32 = u32::MAX;

/// One bit a row and token: whether the row gave the token less than an even share.
#[derive(Clone, Debug)]
struct LowAttentionBits {
    policy: Scissorhands,
    heads: usize,
    group: usize,
    capacity: usize,
    /// `heads × history × ⌈capacity / 64⌉`
    words: Vec<u64>,
    /// Position of each row; bits count only for tokens that are not younger.
    rows: Vec<u32>,
    next: usize,
}

impl LowAttentionBits {
    fn new(policy: Scissorhands, heads: usize, group: usize, capacity: usize) -> LowAttentionBits {
        let words = vec![0; heads * policy.history * capacity.div_ceil(64)];
        LowAttentionBits { policy, heads, group, capacity, words, rows: vec![NONE; policy.history], next: 0 }
    }

    /// Bytes of one layer's bits and positions.
    fn bytes_of(history: usize, Sizes { heads, capacity, .. }: Sizes) -> usize {
        history * (heads * capacity.div_ceil(64) * size_of::<u64>() + size_of::<u32>())
    }

    /// The words of a row.
    fn row(&self, head: usize, row: usize) -> std::ops::Range<usize> {
        let each = self.capacity.div_ceil(64);
        let at = (head * self.policy.history + row) * each;
        at..at + each
    }

    fn get(&self, head: usize, row: usize, slot: usize) -> bool {
        self.words[self.row(head, row)][slot / 64] >> (slot % 64) & 1 == 1
    }

    fn set(&mut self, head: usize, row: usize, slot: usize, bit: bool) {
        let range = self.row(head, row);
        let word = &mut self.words[range][slot / 64];
        *word = *word & !(1 << (slot % 64)) | u64::from(bit) << (slot % 64);
    }
}

impl TokenScorer for LowAttentionBits {
    fn observe(&mut self, seen: &AttentionReport<'_>, layer: &LayerView<'_>) {
        let (rows, len) = (seen.rows.len(), layer.len);
        for (row, (position, visible)) in seen.rows.iter().zip(seen.seen).enumerate() {
            // The group's weights sum up to its size.
            let even = self.group as f32 / *visible as f32;
            for head in 0..self.heads {
                let range = self.row(head, self.next);
                let weights = &seen.weights[(head * rows + row) * len..][..len];
                for (word, weights) in self.words[range].iter_mut().zip(weights.chunks(64)) {
                    let bit = |(i, weight): (usize, &f32)| u64::from(*weight < even) << i;
                    *word = weights.iter().enumerate().map(bit).sum();
                }
            }
            self.rows[self.next] = *position;
            self.next = (self.next + 1) % self.policy.history;
        }
    }

    fn score(&self, layer: &LayerView<'_>, head: usize, scores: &mut [f32]) {
        scores.fill(0.0);
        let positions = layer.head(head);
        for (row, position) in self.rows.iter().enumerate().filter(|(_, position)| **position != NONE) {
            let words = &self.words[self.row(head, row)];
            for ((scores, positions), word) in scores.chunks_mut(64).zip(positions.chunks(64)).zip(words) {
                for (i, (score, of)) in scores.iter_mut().zip(positions).enumerate() {
                    let counts = (word >> i) as u32 & u32::from(of <= position) & 1;
                    *score -= counts as f32;
                }
            }
        }
        for (score, position) in scores.iter_mut().zip(layer.head(head)) {
            if layer.is_recent(*position, self.policy.recent) {
                *score = f32::INFINITY;
            }
        }
    }

    fn moved(&mut self, head: usize, from: usize, to: usize, position: u32) {
        for row in 0..self.rows.len() {
            if self.rows[row] != NONE && self.rows[row] >= position {
                let bit = self.get(head, row, from);
                self.set(head, row, to, bit);
            }
        }
    }

    fn gather(&self, kept: &[u32], capacity: usize) -> Box<dyn TokenScorer> {
        let mut bits = LowAttentionBits::new(self.policy, self.heads, self.group, capacity);
        bits.rows.clone_from(&self.rows);
        bits.next = self.next;
        for (head, kept) in kept.chunks_exact(kept.len() / self.heads).enumerate() {
            for row in 0..self.rows.len() {
                for (slot, from) in kept.iter().enumerate() {
                    let bit = self.get(head, row, *from as usize);
                    bits.set(head, row, slot, bit);
                }
            }
        }
        Box::new(bits)
    }

    fn bytes(&self) -> usize {
        size_of_val(self.words.as_slice()) + size_of_val(self.rows.as_slice())
    }
}
