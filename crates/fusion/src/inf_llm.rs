//! InfLLM (arXiv 2402.04617): rows see the first tokens, their own neighbourhood, and the `k` blocks in between that their
//! mean query retrieves. Everything is computed; for one long context.
//!
//! A block that leaves the local window is represented by the mean of those of its keys that received most attention
//! while they were in it. 512 rows retrieve together: `Σ_h ⟨q̄_h, rep_{h/G}⟩`, the same blocks for all heads.

use refrain_registry::{MAX_COUNT, Options};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{FusionMethod, Plan, PromptView, Result, Retrieval, RetrievalMethod};

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
    fn plan(&self, prompt: &PromptView<'_>) -> Result<Plan> {
        prompt.check()?;
        Ok(Plan { rows: (0..prompt.len() as u32).collect(), ..Plan::default() })
    }

    fn reuses(&self) -> bool {
        false
    }

    fn retrieval(&self) -> Option<&dyn RetrievalMethod> {
        Some(self)
    }
}

impl RetrievalMethod for InfLlm {
    fn retrieval(&self, _: &PromptView<'_>) -> Retrieval {
        let InfLlm { block, initial, local, topk, representatives, rows } = *self;
        Retrieval { initial, local, block, blocks: Some(topk), representatives, rows }
    }
}
