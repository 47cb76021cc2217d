//! An answer under way: its cache, its sampler and its text.

mod generator;
mod running;
mod stop;

pub(crate) use generator::Generator;
pub use running::Sequence;
