//! LegoLink of EPIC (arXiv 2410.15332): the ends of every chunk are recomputed at every layer.
//!
//! A³ compares with the first and last 20 tokens; EPIC's own code takes the first only (`head_only`).

use refrain_registry::{MAX_COUNT, Options};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{FusionMethod, Plan, PromptView, Result};

/// Recompute the first `w` and last `w` tokens of every chunk.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LegoLink {
    /// Tokens recomputed at each end of a chunk.
    #[schemars(range(max = MAX_COUNT))]
    pub window: usize,
    /// Recompute only the first tokens of a chunk.
    pub head_only: bool,
}

impl Default for LegoLink {
    fn default() -> Self {
        LegoLink { window: 20, head_only: false }
    }
}

impl Options for LegoLink {
    const NAME: &'static str = "lego_link";
}

impl FusionMethod for LegoLink {
    fn plan(&self, prompt: &PromptView<'_>) -> Result<Plan> {
        prompt.check()?;
        let rows = prompt.rows(|chunk| {
            let head = chunk.span.len().min(self.window);
            let tail = if self.head_only { 0 } else { (chunk.span.len() - head).min(self.window) };
            let (start, end) = (chunk.span.start, chunk.span.end);
            (start..start + head as u32).chain(end - tail as u32..end).collect()
        });
        Ok(Plan { rows, ..Plan::default() })
    }
}
