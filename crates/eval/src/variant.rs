//! The variants that a run compares, and its options.

use std::sync::Arc;
use std::time::Instant;

use refrain::engine::{Oracle, Prefix};
use refrain::eviction::Eviction;
use refrain::fusion::FusionMethod;
use refrain::store::KvQuantization;

/// A fusion method with an eviction policy and an encoding of stored documents, under the names that records have.
#[derive(Clone, Debug)]
pub struct Variant {
    /// Specification of the method, with the encoding if it is not exact, and the prefix and the oracle if there is one:
    /// `a3:ratio=0.3,store_dtype=q4,prefix=system`.
    pub method: String,
    /// The method.
    pub fusion: Arc<dyn FusionMethod>,
    /// How the documents lie in the store.
    pub store_dtype: KvQuantization,
    /// Tokens before every chunk while it is prefilled.
    pub prefix: Prefix,
    /// The part of the reused keys and values that is taken from the full prefill, where an oracle is asked.
    pub oracle: Option<Oracle>,
    /// Specification of the policy.
    pub policy: String,
    /// The policy.
    pub eviction: Eviction,
}

impl Variant {
    /// Whether this is vanilla with full attention, which others are compared with.
    pub(crate) fn is_reference(&self) -> bool {
        self.method == "vanilla" && self.policy == "full"
    }
}

/// Options of a run.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// Tokens of vanilla's answer that variants are forced to.
    pub forced: usize,
    /// Whether attention is compared by layer.
    pub maps: bool,
    /// Seed of sampled answers.
    pub seed: u64,
    /// Answers to a sample that are decoded together; 1 measures the time a token.
    pub batch: usize,
    /// When the last sample may begin.
    pub until: Option<Instant>,
}
