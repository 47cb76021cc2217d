//! Attention over cached keys, and the scores, weights and sums of weights that methods need of it.
//!
//! `input` states the problem and `query_blocks` how its rows are taken in blocks. `flash` computes blocks of rows over
//! tiles of keys (with AVX2 over integers of 16 bits: `flash_i16`, and their attention mass: `mass_i16`; what either computes of some keys: `partial_output`), `flash_pairs` over
//! tiles of `bf16` pairs (sixteen queries of them: `query_groups`; the attention mass of what they compute: `kept_weights`), `pair_segments` some rows over such tiles segment after segment, and `decode` and `decode_pairs` a few rows
//! (`decode_segments`); `dispatch` chooses between them. `attention_mass`, `concat_logits` and `from_lse` (over tiles of pairs:
//! `from_lse_pairs`) compute scores and weights without values. `merge` joins attention over two sets of keys.

mod attention_mass;
mod concat_logits;
mod decode;
#[cfg(target_arch = "x86_64")]
mod decode_pairs;
mod decode_part;
mod decode_segments;
mod dispatch;
mod flash;
#[cfg(target_arch = "x86_64")]
mod flash_i16;
#[cfg(target_arch = "x86_64")]
mod flash_pairs;
mod from_lse;
#[cfg(target_arch = "x86_64")]
mod from_lse_pairs;
mod gumbel;
mod input;
#[cfg(target_arch = "x86_64")]
mod kept_weights;
mod key_tiles;
#[cfg(target_arch = "x86_64")]
mod mass_i16;
mod merge;
#[cfg(target_arch = "x86_64")]
mod pair_segments;
mod partial_output;
mod query_blocks;
#[cfg(target_arch = "x86_64")]
mod query_groups;
mod shape;
mod workspace;

pub use dispatch::AttentionOutputs;
pub use gumbel::{GumbelNoise, gumbel_logarithms};
pub use input::Attention;
pub(crate) use merge::merge;
