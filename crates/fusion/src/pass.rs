//! Passes: the way of some tokens of a prompt through the layers, and what a method sees and decides on it.
//!
//! A method is a chain of passes. Every pass but the last is a probe: the engine throws its keys and values away, and what the
//! pass has seen shapes the next one. The last pass leaves the keys and values that the answer is decoded with.

use std::collections::BTreeMap;
use std::fmt;

use refrain_kv::stats::{Distance, QuestionScore};
use refrain_kv::{Span, top_k};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{PromptLayout, Result, RetrievalPlan};

/// Positions by which the keys of reused tokens are rotated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeyPositions {
    /// Their positions in the prompt.
    #[default]
    Global,
    /// Their positions when their chunk was prefilled.
    ChunkLocal,
}

/// Keys that an active token sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Mask {
    /// Token `i` sees key `j` iff `j <= i`, by absolute position.
    #[default]
    Absolute,
    /// Active token number `i` of `m` sees `n - m + i + 1` keys, as in published code of CacheBlend: tokens see later keys.
    /// It exists for comparisons with that code.
    BottomRight,
}

/// Cached tokens that a pass reads.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum CachedTokens {
    /// All tokens of the prompt, at every layer.
    #[default]
    All,
    /// A part of the documents, with one entry a layer. The system part and the question are
    /// always there.
    Selected(Vec<LayerTokens>),
}

/// Tokens of the documents at one layer of a pass that reads a part of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerTokens {
    /// Positions of cached documents that the question sees, ascending and apart. The answer is decoded over them.
    pub question_sees: Vec<Span>,
    /// Positions of cached documents that active document tokens see, ascending and apart.
    pub documents_see: Vec<Span>,
    /// Active document tokens whose fresh keys and values take the place of the cached ones, ascending.
    pub written: Vec<u32>,
    /// Active document tokens that go on to the next layer, ascending.
    pub continuing: Vec<u32>,
}

/// Attention of the active tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum PassAttention {
    /// Each token sees all keys up to its own position.
    #[default]
    Causal,
    /// Each token sees the first tokens, those near it, and blocks that it retrieves.
    BlockRetrieval(RetrievalPlan),
}

/// One side of a layer's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CachedTensor {
    /// Keys before RoPE.
    Keys,
    /// Values.
    Values,
}

/// Reports that a pass needs of a layer; the engine computes them on its device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Needs {
    /// The attention that every document token receives from the question.
    pub question_attention: Option<QuestionScore>,
    /// The distance of every active cached token's fresh row from its cached one.
    pub deviation: Option<(CachedTensor, Distance)>,
    /// The question's mean query before RoPE.
    pub mean_query: bool,
}

/// Everything about a pass that is known before its first layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PassPlan {
    /// Positions computed at layer 0, ascending. Keys and values of all other positions come from the cache.
    pub tokens: Vec<u32>,
    /// For a probe, the number of layers that it goes through. At the last of them it ends after [`Pass::observe`], before
    /// attention. Without it the pass is the last one, and goes through all layers.
    pub probe: Option<usize>,
    /// Layers at which [`Pass::observe`] is called, with the reports that it needs there.
    pub checks: BTreeMap<usize, Needs>,
    /// Rotation of reused keys.
    pub key_positions: KeyPositions,
    /// Causal mask.
    pub mask: Mask,
    /// Cached tokens that are read.
    pub cached: CachedTokens,
    /// Attention of the active tokens.
    pub attention: PassAttention,
    /// Whether fresh keys and values go through [`Pass::merge`] instead of taking the place of cached ones.
    pub merges: bool,
    /// Reused keys and values are corrected, layer by layer, through [`Pass::correct`].
    pub corrects: Option<Correction>,
    /// Times that the method met a case that its paper leaves open, for the request's statistics.
    pub ambiguous_cases: usize,
}

impl PassPlan {
    /// A last pass over `tokens` that reads the whole cache and checks nothing.
    pub fn new(tokens: Vec<u32>) -> PassPlan {
        PassPlan { tokens, ..PassPlan::default() }
    }
}

/// How the changes that [`Pass::correct`] is asked about are summed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Correction {
    /// First tokens of a [bare](crate::ChunkSpan::bare) chunk that are left out of its sums.
    pub skip: usize,
}

/// The change of a chunk's keys and values at one layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChunkChange {
    /// Tokens of the chunk that are computed anew, without those that [`Correction::skip`] leaves out.
    pub tokens: usize,
    /// Keys before RoPE, `Hkv × d`: fresh minus cached, summed over those tokens.
    pub keys: Vec<f32>,
    /// Values, likewise.
    pub values: Vec<f32>,
}

/// One way of some tokens of a prompt through the layers.
pub trait Pass: fmt::Debug + Send {
    /// The plan of this pass; equal at every call.
    fn plan(&self) -> &PassPlan;

    /// At a layer of [`PassPlan::checks`], after projection and before attention: the positions that go on, ascending, a
    /// subset of `layer.tokens` that holds all of [`PromptLayout::required_tokens`]. Keys and values of this layer stay fresh
    /// for every token of `layer.tokens`. Of a pass over selected tokens the answer is not used: its plan says which go on.
    ///
    /// # Errors
    /// If the view lacks a report that the pass needs.
    fn observe(&mut self, layer: &LayerView<'_>) -> Result<Vec<u32>> {
        Ok(layer.tokens.to_vec())
    }

    /// A key (before RoPE) or value of one token, `Hkv × d`, computed anew, becomes the one that is kept beside the cached one.
    /// Called where [`PassPlan::merges`] says so.
    fn merge(&self, _fresh: &mut [f32], _cached: &[f32], _head_dim: usize) {}

    /// Decides what the keys (before RoPE) and values of reused tokens that are not computed anew gain at `layer`. `changes` has an
    /// entry for each of [`PromptLayout::inexact_chunks`]: on entry the change that its recomputed tokens show, on return the
    /// one that its other tokens get. Called where [`PassPlan::corrects`] says so, from layer 1 on: keys and values of layer 0
    /// depend on their token alone.
    fn correct(&self, _layer: usize, _changes: &mut [ChunkChange]) {}

    /// The order in which a probe at its end wants the prompt's chunks, as indices into [`PromptLayout::chunks`]. Where there is one, no
    /// pass follows this probe: the method is asked for its first pass over the prompt in that order.
    fn order(&self) -> Option<Vec<usize>> {
        None
    }

    /// The pass that follows a probe. The last pass has none.
    ///
    /// # Errors
    /// If what the method keeps beside a chunk does not fit.
    fn next(self: Box<Self>) -> Result<Option<Box<dyn Pass>>> {
        Ok(None)
    }
}

/// One layer of a pass after projection and before attention. All reports lie in host memory.
#[derive(Clone, Copy, Debug)]
pub struct LayerView<'a> {
    /// Index of the layer, from 0.
    pub layer: usize,
    /// Layout of the prompt.
    pub layout: &'a PromptLayout,
    /// Positions computed at this layer, ascending.
    pub tokens: &'a [u32],
    /// [`Needs::question_attention`]: one score a document token. Empty if it was not asked for.
    pub question_attention: &'a [f32],
    /// [`Needs::deviation`]: one distance for each of [`LayerView::candidates`]. Empty if it was not asked for.
    pub deviation: &'a [f32],
    /// [`Needs::mean_query`]: `H·d` elements. Empty if it was not asked for.
    pub mean_query: &'a [f32],
}

impl LayerView<'_> {
    /// Positions among `tokens` that a method may drop, ascending: tokens of chunks.
    pub fn candidates(&self) -> Vec<u32> {
        self.layout.candidates(self.tokens)
    }

    /// The `count` best of `candidates` by `scores` (one each), and the tokens that are always computed; ascending.
    pub fn best(&self, candidates: &[u32], scores: &[f32], count: usize) -> Vec<u32> {
        self.layout.required_and(top_k(scores, count).into_iter().map(|i| candidates[i as usize]))
    }
}

/// A last pass whose tokens go on as a function says.
pub(crate) struct SelectingPass<F> {
    plan: PassPlan,
    select: F,
}

impl<F> fmt::Debug for SelectingPass<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SelectingPass").field("plan", &self.plan).finish_non_exhaustive()
    }
}

impl<F: FnMut(&LayerView<'_>) -> Vec<u32> + Send> Pass for SelectingPass<F> {
    fn plan(&self) -> &PassPlan {
        &self.plan
    }

    fn observe(&mut self, layer: &LayerView<'_>) -> Result<Vec<u32>> {
        Ok((self.select)(layer))
    }
}

/// A pass that ends the chain and selects tokens at the layers that its plan checks.
pub(crate) fn selecting(
    plan: PassPlan,
    select: impl FnMut(&LayerView<'_>) -> Vec<u32> + Send + 'static,
) -> Box<dyn Pass> {
    Box::new(SelectingPass { plan, select })
}

/// A pass that ends the chain and selects nothing.
pub(crate) fn planned(plan: PassPlan) -> Box<dyn Pass> {
    selecting(plan, |layer| layer.tokens.to_vec())
}
