//! Fusion methods: which rows of a prompt `S ‖ D1..Dk ‖ Q` are computed at each layer, and by which positions
//! the cached keys of the others are rotated. Methods decide, the engine acts: a method sees neither model nor store.
//!
//! One paper, one file. [`METHODS`] lists them with their options.

mod a3;
mod cache_blend;
pub mod conformance;
mod error;
mod full_reuse;
mod inf_llm;
mod lego_link;
mod multi_inf_llm;
mod pie;
mod prompt;
mod registry;
mod retrieval;
mod sam_kv;
mod sparse;
mod vanilla;
mod view;

pub use a3::A3;
pub use cache_blend::{CacheBlend, Metric};
pub use error::{Error, Result};
pub use full_reuse::FullReuse;
pub use inf_llm::InfLlm;
pub use lego_link::LegoLink;
pub use multi_inf_llm::MultiInfLlm;
pub use pie::Pie;
pub use prompt::{ChunkPlace, PromptView};
pub use registry::METHODS;
pub use retrieval::{KnownBlock, Retrieval, RetrievalMethod, representative};
pub use sam_kv::{
    Below, Calibration, Cosine, Extremes, Quota, Recompute, Rotation, Rounding, SamKv, Theta, Update,
};
pub use sparse::{ContextLayer, Draft, Kept, Pass, Selection, SparseMethod, Summarize};
pub use vanilla::Vanilla;
pub use view::{CachedSegment, LayerView};

use std::fmt::Debug;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// By which positions the keys of reused tokens are rotated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeyPositions {
    /// Their places in the prompt.
    #[default]
    Global,
    /// Their places when they were precomputed.
    ChunkLocal,
}

/// Which keys a row sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Mask {
    /// Key `j` is seen by row `i` iff `j <= i`, by absolute position.
    #[default]
    Absolute,
    /// Row number `i` of `m` sees `n - m + i + 1` keys, as in published code of CacheBlend: rows see later keys.
    /// Only for comparing with that code.
    BottomRight,
}

/// What a method decides before the first layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Positions computed at layer 0, ascending. Every other position's keys and values come from the cache.
    pub rows: Vec<u32>,
    /// Layers at which [`FusionMethod::narrow`] is asked, ascending.
    pub narrows: Vec<usize>,
    /// Rotation of reused keys.
    pub positions: KeyPositions,
    /// Causal mask.
    pub mask: Mask,
}

/// A way to answer from chunks that were prefilled alone.
pub trait FusionMethod: Debug + Send + Sync {
    /// Rows computed at layer 0, layers at which to narrow them, key positions.
    ///
    /// # Errors
    /// If the prompt has no question, or an option does not fit the model.
    fn plan(&self, prompt: &PromptView<'_>) -> Result<Plan>;

    /// At a layer of [`Plan::narrows`], after projection and before attention: the rows that go on, a subset of
    /// `layer.rows` in ascending order that holds all of [`PromptView::always`]. Keys and values of this layer
    /// stay fresh for every row of `layer.rows`.
    ///
    /// # Errors
    /// If the view lacks what the method needs.
    fn narrow(&self, layer: &LayerView<'_>) -> Result<Vec<u32>> {
        Ok(layer.rows.to_vec())
    }

    /// Whether it ever takes anything from the cache.
    fn reuses(&self) -> bool {
        true
    }

    /// What makes the summaries that the method wants beside documents. If there are any, the prompt's chunks are whole
    /// documents.
    fn summarizes(&self) -> Vec<&dyn Summarize> {
        Vec::new()
    }

    /// What decides further, if only a part of the documents is kept. It [summarises](FusionMethod::summarizes).
    fn sparse(&self) -> Option<&dyn SparseMethod> {
        None
    }

    /// What decides further, if rows see blocks that they retrieve.
    fn retrieval(&self) -> Option<&dyn RetrievalMethod> {
        None
    }
}
