//! The device interface, and its implementation by CPU kernels on plain slices.
//!
//! [`Device`] is all that is ever done to a tensor. The CPU's kernels take slices and sizes, never a tensor object. All arithmetic accumulates in `f32`.
//!
//! **In `f32` the result of a row never depends on how many other rows are computed with it**: every path of a product
//! or an attention (matrix, vector, tail) sums each output element in the same order. Keys and values must be finite for that: a value that
//! a row does not see is multiplied by a weight of 0 where another row of its block sees it. In `bf16` and with 8 bits a row may depend on where other
//! kernels begin: of an attention at 8 queries a KV head, at 16 rows and at 512 queries over many keys; of a product with quantised blocks at more than 4
//! rows, with AMX, in plain Rust, or of 8 bits with AVX-512 without VNNI; of a product at 24 rows with AVX2, but of 4 bits, and of 8 bits with VNNI.
//! [`Device::batch_invariant`] rules out those of products.
//!
//! Modules build on one another in this order: memory (`pages`, `scratch`, `disjoint`), threads (`pool`), instruction
//! sets (`simd`, `isa`), both together (`cpu`), stored numbers (`convert`, `dequantize`, `buffer`, `host_bytes`, `floats`), kernels
//! (`row_ops`, `ops`, `linear`, `attention`, `row_changes`), the device interface (`device`) the CPU's (`cpu_device`) and the one of plain
//! loops that tests compare with (`reference`, and `conformance`, the
//! comparison).

// `unsafe` is for vector and prefetch instructions, for slices that the threads of the pool share, and for aligned memory.
#[allow(unsafe_code)]
mod attention;
mod buffer;
pub mod conformance;
#[allow(unsafe_code)]
mod convert;
#[allow(unsafe_code)]
mod cpu;
mod cpu_device;
#[allow(unsafe_code)]
mod cpu_experts;
#[allow(unsafe_code)]
mod cpu_layer;
mod cpu_name;
mod cpu_tensors;
#[allow(unsafe_code)]
mod dequantize;
mod device;
#[allow(unsafe_code)]
mod disjoint;
mod floats;
mod host_bytes;
mod isa;
#[allow(unsafe_code)]
mod linear;
#[allow(unsafe_code)]
mod ops;
#[allow(unsafe_code)]
mod pages;
#[allow(unsafe_code)]
mod peak;
#[allow(unsafe_code)]
mod pool;
#[allow(unsafe_code)]
mod prefetch;
mod read_ahead;
mod reference;
mod routing;
#[allow(unsafe_code)]
mod row_changes;
#[allow(unsafe_code)]
mod row_ops;
#[allow(unsafe_code)]
mod scratch;
#[allow(unsafe_code)]
mod simd;
#[allow(unsafe_code)]
mod weight_arena;

pub use attention::{Attention, AttentionOutputs, GumbelNoise, gumbel_logarithms};
pub use buffer::{Buffer, CastError, Dtype, HostElements, Slice, UnknownDtype};
pub use cpu::Cpu;
pub use cpu_name::cpu_name;
pub use device::{
    CacheHeads, CachedAttention, Device, DeviceFailure, DeviceMemory, Distance, Experts, FillRow, Floats,
    GatedMlp, HeadKeys, KvBuffer, KvRows, LayerTail, MAX_BLOCK_ROWS, Mlp, Norm, PackedLinear, QkNorms,
    Rotary, RowUnavailable, Storage, TableEntries, TableNumber, WeightAggregation, WeightMatrix, copy_range,
    download, parallel_each, processors, upload,
};
pub use half::{bf16, f16};
pub use host_bytes::{HostBytes, HostSlice};
pub use isa::{Isa, IsaError};
pub use linear::{
    Activation, Linear, PackedPanels, Precision, Q4Block, Q8Block, UnknownPrecision, WeightRows, WriteRow,
};
pub use ops::softmax;
pub use pages::{advise_huge_pages, keep_large_memory_apart, release_free_memory};
pub use reference::ReferenceDevice;
pub use routing::{Route, Routing};
pub use row_ops::{argmin_before, max_assign, mean, replace_row_in_sums, round_to_f16};
