//! Models: their files, configuration and weights.

mod config;
mod decoder;
mod error;
mod files;
mod gguf;
mod map;
mod names;
mod quant;
mod rope;
mod safetensors;
mod template;
#[cfg(test)]
mod testing;
mod tokenizer;
mod weights;

pub use config::{Config, Family, RopeConfig, RopeScaling};
pub use decoder::{Decoder, Workspace};
pub use error::{ModelError, Result};
pub use files::ModelFiles;
pub use gguf::{Array, Gguf, TensorInfo, Value};
pub use quant::{DType, dequantize};
pub use template::{ChatTemplate, Layout, Message, Piece, PromptParts};
pub use tokenizer::{Detokenizer, Specials, Tokenizer};
pub use weights::{Matrix, Weights};
