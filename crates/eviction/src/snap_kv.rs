//! SnapKV (arXiv 2404.14469): once, after the prompt, the tokens that its last rows attend to, pooled over neighbours.
//!
//! `s[t] = Σ_w A[w,t]` over the last `W` rows, pooled over `κ` neighbours; the top `C − W` stay, and the window.

use std::ops::Range;

use refrain_kv::{Span, stats};
use refrain_registry::{Error, MAX_COUNT, Options};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    Budget, EvictionPolicy, LayerView, Observation, Observed, PromptSpans, Result, Sizes, Statistics,
};

/// How a score takes in those of its neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Pool {
    /// Their mean, the divisor being the kernel also at the edges.
    Avg,
    /// The largest of them.
    Max,
}

/// Keep what the prompt's end attends to.
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

    fn observes(&self, _: &PromptSpans) -> Observation {
        Observation::Prompt { rows: self.window }
    }

    fn statistics(&self, prompt: &PromptSpans, sizes: Sizes) -> Box<dyn Statistics> {
        let n = prompt.len();
        let window = Span::new(n.saturating_sub(self.window), n);
        Box::new(PromptScores::new((self.kernel, self.pool), 0..window.range().start, vec![window], sizes))
    }
}

/// What the prompt's last rows give to each token; needed once.
#[derive(Clone, Debug)]
pub(crate) struct PromptScores {
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

impl PromptScores {
    pub(crate) fn new(
        (kernel, pool): (usize, Pool),
        scored: Range<usize>,
        kept: Vec<Span>,
        Sizes { heads, capacity, .. }: Sizes,
    ) -> PromptScores {
        PromptScores { scored, kept, kernel, pool, capacity, sums: vec![0.0; heads * capacity] }
    }
}

impl Statistics for PromptScores {
    fn observe(&mut self, seen: &Observed<'_>, layer: &LayerView<'_>) {
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

    fn gather(&self, _: &[u32], _: usize) -> Box<dyn Statistics> {
        // What is scored once needs nothing more.
        Box::new(crate::Recent::default())
    }
}
