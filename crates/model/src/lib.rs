//! Models: their files, configuration and weights.

mod chat_template;
mod config;
mod decoder;
mod dtype;
mod error;
mod files;
mod fingerprint;
mod gguf;
mod layers;
mod map;
mod names;
mod packed;
mod quant;
mod rope;
mod safetensors;
#[cfg(test)]
mod testing;
mod tokenizer;
mod tool_calls;
mod weights;

pub use chat_template::{ChatTemplate, Layout, Message, PromptParts, THOUGHT_MARKS, Thinking, ToolCall};
pub use config::{BranchNorms, Config, ExpertSpec, Family, LayerSpec, QkNorm, RopeScaling, RopeSpec};
pub use decoder::{Decoder, Workspace};
pub use dtype::DType;
pub use error::{ModelError, Result};
pub use files::ModelFiles;
pub use gguf::{Array, Gguf, TensorInfo, Value};
pub use packed::PackedWeights;
pub use quant::dequantize;
pub use refrain_kernels::Activation;
pub use tokenizer::{Detokenizer, Piece, Specials, Tokenizer};
pub use tool_calls::{Delta, ToolCallFormat, ToolCallParser};
pub use weights::{Matrix, Weights};
