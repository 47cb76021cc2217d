//! LegoLink of EPIC (arXiv 2410.15332): the ends of every chunk are recomputed at every layer.
//!
//! A³ compares with the first and last 20 tokens; EPIC's own code takes the first only (`head_only`).

use std::sync::Arc;

use refrain_registry::{MAX_COUNT, Options};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::pass::planned;
use crate::{FusionMethod, Pass, PassPlan, PrefillInputs, Result};

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
    fn start(&self, inputs: &Arc<PrefillInputs>) -> Result<Box<dyn Pass>> {
        let layout = &inputs.layout;
        layout.check()?;
        let tokens = layout.tokens_with(|chunk| {
            let head = chunk.len().min(self.window);
            let tail = if self.head_only { 0 } else { (chunk.len() - head).min(self.window) };
            (chunk.start..chunk.start + head as u32).chain(chunk.end - tail as u32..chunk.end).collect()
        });
        Ok(planned(PassPlan::new(tokens)))
    }
}
