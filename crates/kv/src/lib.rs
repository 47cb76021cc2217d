//! Parts that all methods share about keys and values: spans of prompt positions, rotary positions, the working
//! KV cache that attention reads, the selection rule, and per-token statistics.
//!
//! Shapes are written `a × b × c`, row-major. `n` tokens, `H` query heads, `Hkv` KV heads, `d` head dim.

mod aux_tensors;
mod cache;
mod rope;
mod select;
mod span;
pub mod stats;

pub use aux_tensors::{AuxTensors, Tensor};
pub use cache::{HeldBytes, KvAllocator, KvBufferPool, KvCache, LayerCache, MemoryMeter, Shape};
pub use rope::{Rope, RopeTable, RopeTables, Ropes};
pub use select::{survivors, top_count, top_k, weakest};
pub use span::Span;
