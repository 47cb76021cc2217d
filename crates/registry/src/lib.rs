//! Methods that are selected by name, with typed options: `a3:ratio=0.2,softmax=per_head`, or
//! `{"name": "a3", "ratio": 0.2}`.
//!
//! The options of a method are a struct ([`Options`]) in the method's own file. Text, JSON, help and schemas are derived
//! from it; a [`Registry`] adds one line a method.

mod error;
mod options;
mod registry;

pub use error::{Error, Result};
pub use options::{
    MAX_COUNT, OptionSpec, OptionType, Options, option_specs, read_options, value_text, zero_is_none,
};
pub use registry::{Entry, Registry, Selected, append, join, split};
