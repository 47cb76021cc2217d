//! InfLLM (arXiv 2402.04617): rows see the first tokens, their own neighbourhood, and the `k` blocks in between that their
//! mean query retrieves. Everything is computed; for one long context.
//!
//! A block that leaves the local window is represented by the mean of those of its keys that received most attention
//! while they were in it. 512 rows retrieve together: `Σ_h ⟨q̄_h, rep_{h/G}⟩`, the same blocks for all heads.

use crate::{FusionMethod, Plan, PromptView, Result, Retrieval, RetrievalMethod};

/// Compute everything, attend to what is retrieved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InfLlm {
    /// Sizes.
    pub sizes: Retrieval,
}

impl Default for InfLlm {
    fn default() -> Self {
        let (initial, local, block, rows) = (128, 4096, 128, 512);
        InfLlm { sizes: Retrieval { initial, local, block, blocks: Some(16), representatives: 4, rows } }
    }
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
        self.sizes
    }
}
