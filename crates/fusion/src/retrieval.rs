//! Methods that keep everything and let each block of rows see only some of it.

use std::fmt::Debug;

use refrain_kv::{AuxTensors, Span};

use crate::{PromptView, Result, SparseMethod};

/// A method whose rows attend to the first tokens, to those near them, and to blocks in between that they retrieve, while
/// the answer is decoded too.
///
/// Tokens out of the local window are seen at one constant distance: keys as they are before RoPE, queries rotated to the
/// window's last position. A token between the window and the last whole block before it is always seen.
pub trait RetrievalMethod: Debug + Send + Sync {
    /// Sizes for a prompt.
    fn retrieval(&self, prompt: &PromptView<'_>) -> Retrieval;

    /// Blocks whose representatives are known before, ascending and apart; tokens between them are in none. Of `summaries`,
    /// those of the first kind, each belongs to a context; `width` is `Hkv·d`.
    ///
    /// # Errors
    /// If a summary is not what the method made.
    fn known(
        &self,
        _prompt: &PromptView<'_>,
        _summaries: &[Option<&AuxTensors>],
        _width: usize,
    ) -> Result<Vec<KnownBlock>> {
        Ok(Vec::new())
    }

    /// A sparse method of which as many tokens are to be seen on the same prompt as it keeps, where
    /// [`Retrieval::blocks`] is open. Its summaries are those of the second kind.
    fn like(&self) -> Option<&dyn SparseMethod> {
        None
    }
}

/// Sizes of a retrieval, in tokens where they are not blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retrieval {
    /// Tokens at the beginning that every row sees.
    pub initial: usize,
    /// Tokens that a row sees as they are, its own included.
    pub local: usize,
    /// Tokens of a block.
    pub block: usize,
    /// Blocks that are seen of those before; none for as many as another method's number of tokens allows.
    pub blocks: Option<usize>,
    /// Keys whose mean stands for a block, for each KV head: those that received most attention.
    pub representatives: usize,
    /// Rows that retrieve together.
    pub rows: usize,
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
