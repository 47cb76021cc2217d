//! SnapKV (arXiv 2404.14469): once, after the prompt, the tokens that its last rows attend to, pooled over neighbours.
//!
//! `s[t] = Σ_w A[w,t]` over the last `W` rows, pooled over `κ` neighbours; the top `C − W` stay, and the window.

use std::ops::Range;

use refrain_kv::{Span, stats};
use refrain_registry::{Error, MAX_COUNT, Options};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    AttentionNeeds, AttentionReport, Budget, EvictionPolicy, LayerView, PromptSpans, Result, Sizes,
    TokenScorer,
};

/// How scores of neighbouring tokens are pooled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Pool {
    /// The mean over the kernel; the divisor is the kernel's size at the edges, too.
    Avg,
    /// The maximum over the kernel.
    Max,
}

/// Options of SnapKV: keep what the prompt's end attends to.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SnapKv {
    /// Tokens of the prompt that stay in the cache; what is decoded stays as well.
    #[schemars(range(max = MAX_COUNT))]
    pub capacity: usize,
    /// Tokens at the prompt's end whose attention scores the others, and that stay.
    #[schemars(range(max = MAX_COUNT))]
    pub window: usize,
    /// Neighbours over which scores are pooled: an odd number, 1 for none.
    #[schemars(range(min = 1, max = 1023))]
    pub kernel: usize,
    /// Pool scores by mean or by maximum.
    pub pool: Pool,
}

impl Default for SnapKv {
    fn default() -> Self {
        SnapKv { capacity: 1024, window: 32, kernel: 5, pool: Pool::Avg }
    }
}

impl Options for SnapKv {
    const NAME: &'static str = "snap_kv";

    fn validate(&self) -> Result<()> {
        let SnapKv { capacity, window, .. } = *self;
        if capacity <= window {
            return Err(Error::conflict(
                Self::NAME,
                format!(
                    "capacity {capacity} is not above the window of {window}: choose a larger capacity or a smaller window"
                ),
            ));
        }
        if window == 0 {
            let conflict = "a window of 0 leaves no row to score by: choose a larger window";
            return Err(Error::conflict(Self::NAME, conflict));
        }
        check_kernel(Self::NAME, self.kernel)
    }
}

/// Checks the number of neighbours that are pooled.
///
/// # Errors
/// If it is even.
pub(crate) fn check_kernel(owner: &'static str, kernel: usize) -> Result<()> {
    match kernel % 2 {
        0 => Err(Error::bad_value(owner, "kernel", kernel, "an odd number of tokens, 1023 at most")),
        _ => Ok(()),
    }
}

impl EvictionPolicy for SnapKv {
    fn budget(&self, prompt: &PromptSpans) -> Result<Option<Budget>> {
        self.validate()?;
        let capacity = self.capacity;
        Ok((prompt.len() > capacity).then_some(Budget::once(capacity)))
    }

    fn needs(&self, _: &PromptSpans, _: usize) -> AttentionNeeds {
        AttentionNeeds::PromptSums { rows: self.window }
    }

    fn scorer(&self, prompt: &PromptSpans, sizes: Sizes) -> Box<dyn TokenScorer> {
        let n = prompt.len();
        let window = Span::new(n.saturating_sub(self.window), n);
        Box::new(PromptScorer::new((self.kernel, self.pool), 0..window.range().start, vec![window], sizes))
    }

    fn side_bytes(&self, _: &PromptSpans, sizes: Sizes) -> usize {
        PromptScorer::bytes_of(sizes)
    }
}

/// Scores tokens once, by the attention of the prompt's last rows.
#[derive(Clone, Debug)]
pub(crate) struct PromptScorer {
    /// Slots whose scores are pooled with one another.
    scored: Range<usize>,
    /// Positions that stay, the more important first: where not all can, the latest of the last span do.
    kept: Vec<Span>,
    kernel: usize,
    pool: Pool,
    capacity: usize,
    /// `heads × capacity`
    sums: Vec<f32>,
}

impl PromptScorer {
    pub(crate) fn new(
        (kernel, pool): (usize, Pool),
        scored: Range<usize>,
        kept: Vec<Span>,
        Sizes { heads, capacity, .. }: Sizes,
    ) -> PromptScorer {
        PromptScorer { scored, kept, kernel, pool, capacity, sums: vec![0.0; heads * capacity] }
    }

    /// Bytes of the sums of one layer while the prompt is scored; none are held afterwards.
    pub(crate) fn bytes_of(Sizes { heads, capacity, .. }: Sizes) -> usize {
        heads * capacity * size_of::<f32>()
    }
}

impl TokenScorer for PromptScorer {
    fn observe(&mut self, seen: &AttentionReport<'_>, layer: &LayerView<'_>) {
        for (sums, weights) in
            self.sums.chunks_exact_mut(self.capacity).zip(seen.weights.chunks_exact(layer.len))
        {
            sums.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += weight);
        }
    }

    fn score(&self, _: &LayerView<'_>, head: usize, scores: &mut [f32]) {
        scores.fill(f32::NEG_INFINITY);
        let sums = &self.sums[head * self.capacity..][..self.capacity];
        let pooled = match self.pool {
            Pool::Avg => stats::smooth(&sums[self.scored.clone()], self.kernel),
            Pool::Max => stats::highest(&sums[self.scored.clone()], self.kernel),
        };
        scores[self.scored.clone()].copy_from_slice(&pooled);
        let (last, before) = self.kept.split_last().map_or((Span::default(), &[][..]), |(l, b)| (*l, b));
        before.iter().for_each(|span| scores[span.range()].fill(f32::INFINITY));
        for position in last.positions() {
            // Above every sum of weights, later ones higher.
            scores[position as usize] = 1e30 * (1.0 + position as f32);
        }
    }

    fn gather(&self, _: &[u32], _: usize) -> Box<dyn TokenScorer> {
        // The prompt is scored once.
        Box::new(crate::RecencyScorer::default())
    }

    fn bytes(&self) -> usize {
        size_of_val(self.sums.as_slice())
    }
}
