use refrain_kv::{Span, top_count};

use crate::{Error, Result};

/// A chunk's place in the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkPlace {
    /// Its positions in the prompt.
    pub span: Span,
    /// Whether its keys and values are at hand; if not, all its tokens are computed at every layer.
    pub cached: bool,
}

/// What a method sees of a prompt `S ‖ D1..Dk ‖ Q`: lengths and places, no text.
#[derive(Clone, Copy, Debug)]
pub struct PromptView<'a> {
    /// Layers of the model.
    pub layers: usize,
    /// The system part, from 0.
    pub system: Span,
    /// Whether the system part's keys and values are at hand (it is a true prefix, so they are exact).
    pub system_cached: bool,
    /// Document chunks, in order, back to back after the system part.
    pub chunks: &'a [ChunkPlace],
    /// The question part, up to the end.
    pub question: Span,
}

impl PromptView<'_> {
    /// Tokens in all, `n`.
    pub fn len(&self) -> usize {
        self.question.end as usize
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Positions of all chunks.
    pub fn documents(&self) -> Span {
        Span { start: self.system.end, end: self.question.start }
    }

    /// Document tokens whose keys and values are at hand.
    pub fn reusable(&self) -> usize {
        self.chunks.iter().filter(|chunk| chunk.cached).map(|chunk| chunk.span.len()).sum()
    }

    /// Rows computed at every layer by every method: what is not at hand, and the question. Ascending.
    pub fn always(&self) -> Vec<u32> {
        let system = (!self.system_cached).then_some(self.system);
        let missing = self.chunks.iter().filter(|chunk| !chunk.cached).map(|chunk| chunk.span);
        system.into_iter().chain(missing).chain([self.question]).flat_map(Span::positions).collect()
    }

    /// [`always`](Self::always) and the positions that `keep` picks of each cached chunk. Ascending.
    pub(crate) fn rows(&self, mut keep: impl FnMut(ChunkPlace) -> Vec<u32>) -> Vec<u32> {
        let mut rows = self.always();
        rows.extend(self.chunks.iter().filter(|chunk| chunk.cached).flat_map(|chunk| keep(*chunk)));
        rows.sort_unstable();
        rows
    }

    /// Every document and question position, and the system part's where it is not at hand.
    pub(crate) fn rows_after_system(&self) -> Vec<u32> {
        self.rows(|chunk| chunk.span.positions().collect())
    }

    /// Number of tokens that a ratio stands for: `floor(r·(n−|Q|))`, at most the reusable ones.
    pub(crate) fn count(&self, ratio: f64) -> usize {
        top_count(ratio, self.len() - self.question.len(), self.reusable())
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.question.is_empty() { Err(Error::EmptyQuestion) } else { Ok(()) }
    }
}
