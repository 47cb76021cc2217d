//! LegoLink of EPIC (arXiv 2410.15332): the ends of every chunk are recomputed at every layer.
//!
//! A³ compares with the first and last 20 tokens; EPIC's own code takes the first only (`head_only`).

use std::sync::Arc;

use refrain_kv::Span;
use refrain_registry::{MAX_COUNT, Options};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::pass::planned;
use crate::{FusionMethod, Pass, PassPlan, PrefillInputs, PromptLayout, Result};

/// Recompute the first `w` and last `w` tokens of every chunk.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LegoLink {
    /// Tokens recomputed at each end of a chunk.
    #[schemars(range(max = MAX_COUNT))]
    pub window: usize,
    /// Share of the document tokens that is computed, ends of chunks that are equally long; in place of `window` where it is not 0.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub charge: f64,
    /// Recompute only the first tokens of a chunk.
    pub head_only: bool,
}

impl Default for LegoLink {
    fn default() -> Self {
        LegoLink { window: 20, charge: 0.0, head_only: false }
    }
}

impl Options for LegoLink {
    const NAME: &'static str = "lego_link";
}

impl LegoLink {
    /// The first and last `window` tokens of a chunk.
    fn ends(&self, chunk: Span, window: usize) -> Vec<u32> {
        let head = chunk.len().min(window);
        let tail = if self.head_only { 0 } else { (chunk.len() - head).min(window) };
        (chunk.start..chunk.start + head as u32).chain(chunk.end - tail as u32..chunk.end).collect()
    }
}

impl FusionMethod for LegoLink {
    fn start(&self, inputs: &Arc<PrefillInputs>) -> Result<Box<dyn Pass>> {
        let layout = &inputs.layout;
        layout.check()?;
        let window = match self.charge {
            0.0 => self.window,
            charge => {
                let most = layout.count_for_charge(charge, 0, 0);
                let longest = layout.inexact_chunks().map(Span::len).max().unwrap_or(0);
                let fits = |window: &usize| {
                    layout.inexact_chunks().map(|c| self.ends(c, *window).len()).sum::<usize>() <= most
                };
                (0..=longest).rev().find(fits).unwrap_or(0)
            }
        };
        let ends = layout.inexact_chunks().flat_map(|chunk| self.ends(chunk, window));
        Ok(planned(PassPlan::new(layout.required_and(ends))))
    }

    fn max_rows(&self, layout: &PromptLayout) -> usize {
        let ends = match self.charge {
            0.0 => layout.inexact_chunks().map(|chunk| self.ends(chunk, self.window).len()).sum(),
            charge => layout.count_for_charge(charge, 0, 0),
        };
        layout.required_tokens().len() + ends
    }
}
