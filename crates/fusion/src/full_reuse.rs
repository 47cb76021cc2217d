//! Full reuse: cached keys stay rotated by the positions they had when they were precomputed.
//!
//! The baseline "Full Reuse" of A³ (arXiv 2511.17560, §4); only the question is computed.

use crate::{FusionMethod, KeyPositions, Plan, PromptView, Result};

/// Reuse without recovering positions.
#[derive(Clone, Copy, Debug, Default)]
pub struct FullReuse;

impl FusionMethod for FullReuse {
    fn plan(&self, prompt: &PromptView<'_>) -> Result<Plan> {
        prompt.check()?;
        Ok(Plan { rows: prompt.always(), positions: KeyPositions::ChunkLocal, ..Plan::default() })
    }
}
