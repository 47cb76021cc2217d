//! Full reuse: cached keys stay rotated by the positions they had when they were precomputed.
//!
//! The baseline "Full Reuse" of A³ (arXiv 2511.17560, §4); only the question is computed.

use std::sync::Arc;

use refrain_registry::Options;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::pass::planned;
use crate::{FusionMethod, KeyPositions, Pass, PassPlan, PrefillInputs, PromptLayout, Result};

/// Reuse without recovering positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FullReuse;

impl Options for FullReuse {
    const NAME: &'static str = "full_reuse";
}

impl FusionMethod for FullReuse {
    fn start(&self, inputs: &Arc<PrefillInputs>) -> Result<Box<dyn Pass>> {
        let layout = &inputs.layout;
        layout.check()?;
        Ok(planned(PassPlan {
            key_positions: KeyPositions::ChunkLocal,
            ..PassPlan::new(layout.required_tokens())
        }))
    }

    fn max_rows(&self, layout: &PromptLayout) -> usize {
        layout.required_tokens().len()
    }
}
