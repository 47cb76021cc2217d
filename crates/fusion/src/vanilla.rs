//! Vanilla prefill: every token is computed, nothing is reused.

use std::sync::Arc;

use refrain_registry::Options;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::pass::planned;
use crate::{FusionMethod, Pass, PassPlan, PrefillInputs, Result};

/// Full causal prefill.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Vanilla;

impl Options for Vanilla {
    const NAME: &'static str = "vanilla";
}

impl FusionMethod for Vanilla {
    fn start(&self, inputs: &Arc<PrefillInputs>) -> Result<Box<dyn Pass>> {
        let layout = &inputs.layout;
        layout.check()?;
        Ok(planned(PassPlan::new((0..layout.len() as u32).collect())))
    }

    fn reuses(&self) -> bool {
        false
    }
}
