//! PIE: reuse with keys rotated to their places in the prompt (arXiv 2407.03157).
//!
//! The paper turns already rotated keys by one more constant angle; rotating keys that are stored unrotated is the
//! same mathematics with one rounding less. Only the question is computed.

use std::sync::Arc;

use refrain_registry::Options;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::pass::planned;
use crate::{FusionMethod, Pass, PassPlan, PrefillInputs, PromptLayout, Result};

/// Reuse with positions recovered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Pie;

impl Options for Pie {
    const NAME: &'static str = "pie";
}

impl FusionMethod for Pie {
    fn start(&self, inputs: &Arc<PrefillInputs>) -> Result<Box<dyn Pass>> {
        let layout = &inputs.layout;
        layout.check()?;
        Ok(planned(PassPlan::new(layout.required_tokens())))
    }

    fn max_rows(&self, layout: &PromptLayout) -> usize {
        layout.required_tokens().len()
    }
}
