//! An answer under way: its cache, its sampler and its text.

mod answer_grammar;
mod generator;
mod lookup;
mod running;
mod stop;

pub(crate) use generator::Generator;
pub(crate) use lookup::PromptLookup;
pub use running::Sequence;
pub(crate) use running::StepState;
