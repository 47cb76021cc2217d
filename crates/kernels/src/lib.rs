//! CPU kernels on plain slices.
//!
//! Everything here takes slices and sizes, never a tensor object. All arithmetic accumulates in `f32`.
//! **In `f32` the result of a row never depends on how many other rows are computed with it**: whatever path a
//! product or an attention takes (matrix, vector, tail), each output element is summed in the same order. With `bf16`
//! it may at 16 rows in attention, with blocks of bytes also at 4 rows in products, where other kernels begin.

// `unsafe` is for vector instructions, for what is handed to the threads of the pool, and for aligned memory.
#[allow(unsafe_code)]
mod attention;
#[allow(unsafe_code)]
mod backend;
mod buffer;
#[allow(unsafe_code)]
mod codes;
#[allow(unsafe_code)]
mod convert;
mod floats;
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
mod ranking;
#[allow(unsafe_code)]
mod scratch;
#[allow(unsafe_code)]
mod shared;
#[allow(unsafe_code)]
mod simd;

pub use attention::{Attention, Noise, Report};
pub use backend::{Backend, HeadNorms, LayerTail, Norm};
pub use buffer::{Buffer, CastError, Dtype, Slice, UnknownDtype};
pub use floats::Floats;
pub use half::{bf16, f16};
pub use linear::{Activation, Linear, Nibbles, Precision, Row, Rows, UnknownPrecision};
pub use ops::softmax;
pub use pages::{advise as advise_huge_pages, give_back};
pub use pool::Isa;
pub use ranking::{exchange_row, lowest, raise_row, round_row};

/// A CPU with its persistent thread pool. Cheap to clone; clones share the pool.
#[derive(Clone, Debug)]
pub struct Cpu {
    pool: std::sync::Arc<pool::Pool>,
    /// Whether each row of a product is computed as if it were alone.
    each: bool,
}
