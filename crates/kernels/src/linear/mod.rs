//! Products with prepacked weights.
//!
//! `weights` are the packed weights, `quant_blocks` their quantised blocks, `pack` packs them and activations (for AMX:
//! `pack_amx`, as integers: `pack_i16`). `activations` are the rows that products take and give. `matmul` cuts a product into tasks, of the sizes that
//! `blocking` tells, which `panel_task` computes (with AMX: `panel_task_amx`, as integers: `panel_task_i16`).

mod activations;
mod blocking;
#[cfg(target_arch = "x86_64")]
mod gated_amx;
mod matmul;
mod pack;
#[cfg(target_arch = "x86_64")]
mod pack_amx;
#[cfg(target_arch = "x86_64")]
mod pack_i16;
mod panel_task;
#[cfg(target_arch = "x86_64")]
mod panel_task_amx;
#[cfg(target_arch = "x86_64")]
mod panel_task_i16;
mod quant_blocks;
mod weights;

pub(crate) use activations::{Input, Output};
pub use pack::{PackedPanels, WeightRows, WriteRow};
pub use quant_blocks::{Q4Block, Q8Block};
pub(crate) use weights::PACKED_LAYOUT;
pub use weights::{Activation, Linear, Precision, UnknownPrecision};
