//! Facts of one transformer layer.

use std::fmt::Display;

use refrain_kernels::Activation;
use serde::{Serialize, Serializer};

/// Facts of one transformer layer. Sizes are the same for all layers and stand in [`Config`](super::Config).
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerSpec {
    /// A query at position p sees the keys at positions in (p − window, p], itself included; `None`: all up
    /// to p. Windows of at least [`Config::context`](super::Config::context) are resolved to `None`.
    pub window: Option<usize>,
    /// Index into [`Config::ropes`](super::Config::ropes).
    pub rope: usize,
    /// Norms around attention and MLP.
    pub norms: BranchNorms,
    /// Activation of the MLP's gate.
    #[serde(serialize_with = "as_text")]
    pub activation: Activation,
    /// RMS norms of queries and keys between projection and rotation.
    pub qk_norm: QkNorm,
    /// The experts whose mixture is the MLP, if it is one.
    pub experts: Option<ExpertSpec>,
    /// Factor of the attention logits q·k.
    pub attention_scale: f32,
}

/// The RMS norms of a residual branch: attention or MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BranchNorms {
    /// Of the branch's input: x += branch(norm(x)).
    Pre,
    /// Of its input and of its result: x += norm(branch(norm(x))).
    PrePost,
    /// Of its result: x += norm(branch(x)).
    Post,
}

/// The RMS norms of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum QkNorm {
    /// There are none.
    None,
    /// Each head is normed by itself.
    Head,
    /// All heads of a token are normed together.
    AllHeads,
}

/// A mixture of experts: a router gives each token to some of the experts and adds up what they give, by its probabilities.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ExpertSpec {
    /// Experts of a layer (`num_experts`).
    pub count: usize,
    /// Experts of a token (`num_experts_per_tok`).
    pub top_k: usize,
    /// Width of one expert (`moe_intermediate_size`).
    pub intermediate: usize,
    /// Whether the probabilities of a token's experts are divided by their sum (`norm_topk_prob`).
    pub normalised: bool,
}

impl LayerSpec {
    /// A layer as Llama has it: everything visible, the first rope, norms before the branches, SiLU, no norms of heads,
    /// attention logits divided by √`head_dim`.
    pub(crate) fn llama(head_dim: usize) -> LayerSpec {
        LayerSpec {
            window: None,
            rope: 0,
            norms: BranchNorms::Pre,
            activation: Activation::Silu,
            qk_norm: QkNorm::None,
            experts: None,
            attention_scale: (head_dim as f32).sqrt().recip(),
        }
    }
}

fn as_text<T: Display, S: Serializer>(value: &T, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}
