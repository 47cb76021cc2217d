//! Eviction policies decide which tokens stay in a KV cache of bounded size while an answer is decoded. The engine acts on
//! their decisions: a policy sees neither model nor request, only lengths, positions and attention reports.
//!
//! One paper, one file. [`POLICIES`] lists them with their options.
//!
//! A capacity counts the tokens that stay beside the one being computed: a cache that is pruned at every step to capacity `C`
//! has `C + 1` slots.

mod a3_ex;
mod accumulated_attention;
mod attention;
mod attention_window;
pub mod conformance;
mod full;
mod h2o;
mod keyformer;
mod morph_kv;
mod policy;
mod registry;
mod scissorhands;
mod scorer;
mod snap_kv;
mod streaming_llm;

pub use a3_ex::A3Ex;
pub use attention::{AttentionNeeds, AttentionReport, Tau};
pub use attention_window::Fuse;
pub use full::Full;
pub use h2o::{H2o, H2oBudget};
pub use keyformer::Keyformer;
pub use morph_kv::{MorphKv, Profile};
pub use policy::{Budget, EvictionPolicy, PromptSpans, Sizes};
pub use refrain_registry::{Error, Result};
pub use registry::{Eviction, POLICIES};
pub use scissorhands::Scissorhands;
pub use scorer::{CachedKeys, LayerView, RecencyScorer, TokenScorer};
pub use snap_kv::{Pool, SnapKv};
pub use streaming_llm::{SinkPositions, StreamingLlm};
