//! Fusion methods: which tokens of a prompt `S ‖ D1..Dk ‖ Q` are computed at each layer, and by which positions the cached
//! keys of the others are rotated. Methods decide, the engine acts: a method sees neither model nor store.
//!
//! One paper, one file; [`Scout`] and [`Drift`] are this project's own. [`METHODS`] lists them with their options. A method is a chain of [passes](Pass): A³ is one pass,
//! SamKV, ProphetKV, RelaxKV, InfoFlow, Scout and Drift are two.

mod a3;
mod cache_blend;
pub mod conformance;
mod drift;
mod error;
mod full_reuse;
mod inf_llm;
mod info_flow;
mod lego_link;
mod multi_inf_llm;
mod pass;
mod pie;
mod probe;
mod prompt;
mod prophet_kv;
mod registry;
mod relax_kv;
mod retrieval;
mod sam_kv;
mod scout;
mod selection;
mod statistics;
#[cfg(test)]
mod test_inputs;
mod vanilla;

pub use a3::A3;
pub use cache_blend::{CacheBlend, Metric};
pub use drift::Drift;
pub use error::{Error, Result};
pub use full_reuse::FullReuse;
pub use inf_llm::InfLlm;
pub use info_flow::InfoFlow;
pub use lego_link::LegoLink;
pub use multi_inf_llm::MultiInfLlm;
pub use pass::{
    CachedTensor, CachedTokens, ChunkChange, Correction, KeyPositions, LayerTokens, LayerView, Mask, Needs,
    Pass, PassAttention, PassPlan,
};
pub use pie::Pie;
pub use prompt::{ChunkSpan, ModelFacts, PrefillInputs, PromptLayout};
pub use prophet_kv::ProphetKv;
pub use registry::METHODS;
pub use relax_kv::RelaxKv;
pub use retrieval::{KnownBlock, Retrieval, RetrievalBudget, RetrievalPlan, representative};
pub use sam_kv::{
    Below, Calibration, Cosine, Extremes, Quota, Recompute, Rotation, Rounding, SamKv, Theta, Update,
};
pub use scout::Scout;
pub use selection::{LayerSelection, Selection, SelectionPlan};
pub use statistics::{ChunkStatistics, ContextLayer, ContextTensors};
pub use vanilla::Vanilla;

use std::fmt::Debug;
use std::sync::Arc;

/// A way to answer from chunks that were prefilled alone.
pub trait FusionMethod: Debug + Send + Sync {
    /// The first pass over a prompt.
    ///
    /// # Errors
    /// If the prompt has no question, or an option does not fit the model.
    fn start(&self, inputs: &Arc<PrefillInputs>) -> Result<Box<dyn Pass>>;

    /// An upper bound of the tokens that a pass of the method computes at one layer, of a prompt of this layout. A chunk that turns out
    /// [exact](ChunkSpan::exact) and a system part that turns out cached only make them fewer. Memory for them is counted before
    /// the prompt starts; the bound is all tokens for a method that computes them at some layer, computes as many as its scores say, or
    /// retrieves blocks.
    fn max_rows(&self, layout: &PromptLayout) -> usize {
        layout.len()
    }

    /// Whether the method ever takes anything from the cache.
    fn reuses(&self) -> bool {
        true
    }

    /// Whether a probe of the method puts the prompt's chunks in another [order](Pass::order).
    fn reorders(&self) -> bool {
        false
    }

    /// Whether the answer is decoded over all tokens of the documents. If not, the last pass selects a part of them.
    fn keeps_all_tokens(&self) -> bool {
        true
    }

    /// Whether the last pass may read a part of the documents ([`CachedTokens::Selected`]): a layer of the prompt is then gathered from
    /// what is kept of it.
    fn selects(&self) -> bool {
        !self.keeps_all_tokens()
    }

    /// Whether a prompt may go on behind a beginning that another prompt has left: all that follows then attends to all tokens before it. A method
    /// that retrieves does not, since to what its rows attend would depend on the prompts before.
    fn goes_on(&self) -> bool {
        true
    }

    /// Statistics that the method wants beside documents. If there are any, the prompt's chunks are whole documents.
    fn statistics(&self) -> Vec<&dyn ChunkStatistics> {
        Vec::new()
    }
}

/// A shared method decides as the method itself.
impl<M: FusionMethod + ?Sized> FusionMethod for Arc<M> {
    fn start(&self, inputs: &Arc<PrefillInputs>) -> Result<Box<dyn Pass>> {
        self.as_ref().start(inputs)
    }

    fn max_rows(&self, layout: &PromptLayout) -> usize {
        self.as_ref().max_rows(layout)
    }

    fn reuses(&self) -> bool {
        self.as_ref().reuses()
    }

    fn reorders(&self) -> bool {
        self.as_ref().reorders()
    }

    fn keeps_all_tokens(&self) -> bool {
        self.as_ref().keeps_all_tokens()
    }

    fn selects(&self) -> bool {
        self.as_ref().selects()
    }

    fn goes_on(&self) -> bool {
        self.as_ref().goes_on()
    }

    fn statistics(&self) -> Vec<&dyn ChunkStatistics> {
        self.as_ref().statistics()
    }
}
