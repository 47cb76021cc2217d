//! Full reuse: cached keys stay rotated by the positions they had when they were precomputed.
//!
//! The baseline "Full Reuse" of A³ (arXiv 2511.17560, §4); only the question is computed.

use refrain_registry::Options;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{FusionMethod, KeyPositions, Plan, PromptView, Result};

/// Reuse without recovering positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FullReuse;

impl Options for FullReuse {
    const NAME: &'static str = "full_reuse";
}

impl FusionMethod for FullReuse {
    fn plan(&self, prompt: &PromptView<'_>) -> Result<Plan> {
        prompt.check()?;
        Ok(Plan { rows: prompt.always(), positions: KeyPositions::ChunkLocal, ..Plan::default() })
    }
}
