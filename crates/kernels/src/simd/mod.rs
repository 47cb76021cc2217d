//! Vectors of `f32` on every instruction set, behind one trait, so that each kernel is written once.
//!
//! A value that implements [`Simd`] is a token: it exists only on a machine that has its instructions. A [`Kernel`]
//! gets one from [`Level::run`] and hands it down to every function that calculates.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
mod amx_attention;
#[cfg(target_arch = "aarch64")]
mod arm_features;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod elem;
#[cfg(target_arch = "x86_64")]
pub(crate) mod features;
#[cfg(target_arch = "x86_64")]
pub(crate) mod i16_tiles;
mod level;
mod microkernel;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
pub(crate) mod pair_tiles;
mod portable;
mod tile;
#[cfg(target_arch = "x86_64")]
pub(crate) mod tile_weights;
mod vector;
#[cfg(target_arch = "x86_64")]
pub(crate) mod whole_tiles;

#[cfg(target_arch = "aarch64")]
pub(crate) use arm_features::Neon;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::{Avx512, sums_of_four, sums_of_lanes};
pub(crate) use elem::{Elem, load_part, store_part};
#[cfg(test)]
pub(crate) use level::LAST_RUN;
pub(crate) use level::{Kernel, Level};
pub(crate) use portable::Portable;
pub(crate) use tile::{KEYS, PANEL, STRIP, Tile, strip_width};
pub(crate) use vector::Simd;
