//! A³'s extension (arXiv 2511.17560): SnapKV after the first token, with system part and question protected.
//!
//! The question's rows score the documents' tokens; system part, question and the top `C − |S| − |Q|` of them stay.
//! Where `|S| + |Q| ≥ C`, the system part and the question's last `C − |S|` tokens do.

use refrain_registry::Error;

use crate::snap_kv::{Pool, PromptScores};
use crate::{Budget, EvictionPolicy, Observation, PromptSpans, Result, Sizes, Statistics};

/// Keep system part, question, and the documents' tokens that the question attends to.
#[derive(Clone, Copy, Debug)]
pub struct A3Ex {
    /// Tokens of the prompt that stay, `C`.
    pub capacity: usize,
    /// Rows of the question's end that score; all of them, but at most `C/2`, if not given.
    pub window: Option<usize>,
    /// Neighbours that are pooled (odd), `κ`.
    pub kernel: usize,
    /// How they are pooled.
    pub pool: Pool,
}

impl Default for A3Ex {
    fn default() -> Self {
        A3Ex { capacity: 1024, window: None, kernel: 5, pool: Pool::Avg }
    }
}

impl EvictionPolicy for A3Ex {
    fn budget(&self, prompt: &PromptSpans) -> Result<Option<Budget>> {
        let system = prompt.system.len();
        if prompt.len() > self.capacity && system >= self.capacity {
            let clash = format!(
                "capacity {} does not hold the system part, earlier turns included, of {system} tokens and a token of the question: choose more than {system}",
                self.capacity
            );
            return Err(Error::Clash { owner: "a3_ex", clash });
        }
        Ok((prompt.len() > self.capacity).then_some(Budget::once(self.capacity)))
    }

    fn observes(&self, prompt: &PromptSpans) -> Observation {
        let rows = self.window.unwrap_or(self.capacity / 2).min(prompt.question.len()).max(1);
        Observation::Prompt { rows }
    }

    fn statistics(&self, prompt: &PromptSpans, sizes: Sizes) -> Box<dyn Statistics> {
        let scored = prompt.system.range().end..prompt.question.range().start;
        let kept = vec![prompt.system, prompt.question];
        Box::new(PromptScores::new((self.kernel, self.pool), scored, kept, sizes))
    }
}
