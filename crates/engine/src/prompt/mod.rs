//! Documents, and the prompt that is made of them and a question.

mod build;
mod cut;
mod document;
mod layout;

pub use build::{Instructions, Parts};
pub use document::Document;
pub use layout::{Prompt, PromptChunk};
