//! Block retrieval: tokens attend to the first tokens, to those near them, and to blocks in between that they retrieve, while
//! the answer is decoded too.
//!
//! Tokens out of the local window are seen at one constant distance: keys as they are before RoPE, queries rotated to the
//! window's last position. A token between the window and the last whole block before it is always seen.

use refrain_kv::Span;

/// Sizes of a retrieval, in tokens where they are not blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retrieval {
    /// Tokens at the beginning that every row sees.
    pub initial: usize,
    /// Tokens that a row sees as they are, its own included.
    pub local: usize,
    /// Tokens of a block.
    pub block: usize,
    /// Keys whose mean stands for a block, for each KV head: those that received most attention.
    pub representatives: usize,
    /// Rows that retrieve together.
    pub rows: usize,
}

/// Blocks that are seen of those out of the window: the best of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetrievalBudget {
    /// A number of blocks.
    Blocks(usize),
    /// Blocks of this many tokens together.
    Tokens(usize),
}

/// A pass's block retrieval.
#[derive(Clone, Debug, PartialEq)]
pub struct RetrievalPlan {
    /// Sizes.
    pub sizes: Retrieval,
    /// Blocks that are seen.
    pub budget: RetrievalBudget,
    /// Blocks whose representatives are known before, ascending and apart; tokens between them are in no block.
    pub known: Vec<KnownBlock>,
    /// First position that retrieves, and whose tokens become blocks when they leave the window. Tokens before it see
    /// everything up to their own position.
    pub from: u32,
}

/// A block whose representative was computed with its document.
#[derive(Clone, Debug, PartialEq)]
pub struct KnownBlock {
    /// Its positions in the prompt.
    pub span: Span,
    /// Its representative before RoPE at each layer, `layers × Hkv·d`.
    pub keys: Vec<f32>,
}

/// Mean of the keys (`tokens × d`, before RoPE) of the `count` highest `scores`; of equal ones the first.
pub fn representative(keys: &[f32], scores: &[f32], count: usize) -> Vec<f32> {
    let d = keys.len() / scores.len().max(1);
    let best = refrain_kv::top_k(scores, count.max(1));
    let mut mean = vec![0.0; d];
    for token in &best {
        let key = &keys[*token as usize * d..][..d];
        mean.iter_mut().zip(key).for_each(|(mean, x)| *mean += x / best.len() as f32);
    }
    mean
}
