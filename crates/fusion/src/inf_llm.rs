//! InfLLM (arXiv 2402.04617): rows see the first tokens, their own neighbourhood, and the `k` blocks in between that their
//! mean query retrieves. Everything is computed; for one long context.
//!
//! A block that leaves the local window is represented by the mean of those of its keys that received most attention
//! while they were in it. 512 rows retrieve together: `Σ_h ⟨q̄_h, rep_{h/G}⟩`, the same blocks for all heads.

use std::sync::Arc;

use refrain_registry::{MAX_COUNT, Options};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::pass::planned;
use crate::retrieval::{RetrievalBudget, RetrievalPlan};
use crate::{FusionMethod, Pass, PassAttention, PassPlan, PrefillInputs, Result, Retrieval};

/// Compute everything, attend to what is retrieved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct InfLlm {
    /// Tokens of a block.
    #[schemars(range(min = 1, max = MAX_COUNT))]
    pub block: usize,
    /// Tokens at the beginning that every row sees.
    #[schemars(range(max = MAX_COUNT))]
    pub initial: usize,
    /// Tokens near a row that it sees.
    #[schemars(range(min = 1, max = MAX_COUNT))]
    pub local: usize,
    /// Blocks that are retrieved.
    #[schemars(range(max = MAX_COUNT))]
    pub topk: usize,
    /// Keys whose mean stands for a block.
    #[schemars(range(min = 1, max = MAX_COUNT))]
    pub representatives: usize,
    /// Rows that retrieve together.
    #[schemars(range(min = 1, max = MAX_COUNT))]
    pub rows: usize,
}

impl Default for InfLlm {
    fn default() -> Self {
        InfLlm { block: 128, initial: 128, local: 4096, topk: 16, representatives: 4, rows: 512 }
    }
}

impl Options for InfLlm {
    const NAME: &'static str = "inf_llm";
}

impl FusionMethod for InfLlm {
    fn start(&self, inputs: &Arc<PrefillInputs>) -> Result<Box<dyn Pass>> {
        let layout = &inputs.layout;
        layout.check()?;
        let mut plan = PassPlan::new((0..layout.len() as u32).collect());
        let InfLlm { initial, local, block, topk, representatives, rows } = *self;
        // A window that holds everything is full attention.
        if inputs.max_tokens > local {
            plan.attention = PassAttention::BlockRetrieval(RetrievalPlan {
                sizes: Retrieval { initial, local, block, representatives, rows },
                budget: RetrievalBudget::Blocks(topk),
                known: Vec::new(),
                from: 0,
            });
        }
        Ok(planned(plan))
    }

    fn reuses(&self) -> bool {
        false
    }

    fn goes_on(&self) -> bool {
        false
    }
}
