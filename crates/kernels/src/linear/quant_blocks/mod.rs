//! Quantised weights in blocks of 32 inputs: their format and their kernels.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod amx_unpack;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx2_vnni;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod format;
mod kernels;
#[cfg(target_arch = "aarch64")]
mod neon;

#[cfg(target_arch = "x86_64")]
pub(super) use amx::{BlockProduct, PASSING, Pairs};
#[cfg(target_arch = "x86_64")]
pub(super) use avx2::unpack_q8_as_i16;
pub(super) use format::{BLOCK, BlockFormat, X_WORDS, blocks_of, pack_q4, pack_q8};
pub use format::{Q4Block, Q8Block};
pub(super) use kernels::{MultiplyRows, QuantizeRow, QuantizeWeights, Unpack};
