//! Vanilla prefill: every token is computed, nothing is reused.

use refrain_registry::Options;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{FusionMethod, Plan, PromptView, Result};

/// Full causal prefill.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Vanilla;

impl Options for Vanilla {
    const NAME: &'static str = "vanilla";
}

impl FusionMethod for Vanilla {
    fn plan(&self, prompt: &PromptView<'_>) -> Result<Plan> {
        prompt.check()?;
        Ok(Plan { rows: (0..prompt.len() as u32).collect(), ..Plan::default() })
    }

    fn reuses(&self) -> bool {
        false
    }
}
