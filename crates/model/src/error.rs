//! Errors of reading a model's files; each says where the fault lies and what to do.

use std::path::PathBuf;

use crate::dtype::DType;

/// The result of everything fallible in this crate.
pub type Result<T, E = ModelError> = std::result::Result<T, E>;

/// An error about a model: what is wrong, where (file, tensor, key, byte offset) and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },

    /// The path is neither a GGUF file nor a folder with a model in it.
    #[error("{} is no model: {message}", path.display())]
    NoModel {
        /// The path that was given.
        path: PathBuf,
        /// The missing part, and the kinds that are accepted.
        message: String,
    },

    /// A GGUF file that ends too early or contradicts itself.
    #[error(
        "{}: malformed or truncated GGUF at byte {offset}: {message}; fetch the file again",
        path.display()
    )]
    Gguf {
        /// The file.
        path: PathBuf,
        /// Where in the file the reader stood, in bytes from its start.
        offset: usize,
        /// The fault found there.
        message: String,
    },

    /// A sound GGUF file of a version or byte order that is not read.
    #[error("{}: {message}", path.display())]
    GgufForm {
        /// The file.
        path: PathBuf,
        /// The version or byte order, and what to do.
        message: String,
    },

    /// A GGUF file that is a part of a model in several files, and does not lead to the others or fit them.
    #[error("{}: {message}", path.display())]
    GgufPart {
        /// The file.
        path: PathBuf,
        /// The part, its fault, and what to do.
        message: String,
    },

    /// A GGUF metadata key that the model needs and the file lacks.
    #[error(
        "{}: the metadata key '{key}' is missing; convert the model with a current converter",
        path.display()
    )]
    KeyMissing {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
    },

    /// A GGUF metadata key with a value of another type or out of range.
    #[error("{}: the metadata key '{key}' should hold {expected}, but holds {found}", path.display())]
    KeyType {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// The type that was asked for.
        expected: &'static str,
        /// The type or value in the file.
        found: String,
    },

    /// A model family that the decoder does not know.
    #[error(
        "{}: the architecture '{architecture}' is not supported; supported are {supported}",
        path.display()
    )]
    Architecture {
        /// The file that names the architecture.
        path: PathBuf,
        /// The architecture's name.
        architecture: String,
        /// The names that would be accepted.
        supported: &'static str,
    },

    /// A configuration that cannot be read, contradicts itself or asks for something unknown.
    #[error("{}: {message}", path.display())]
    Config {
        /// The file with the configuration.
        path: PathBuf,
        /// The field, its value and what is wrong with it.
        message: String,
    },

    /// A malformed safetensors file or index.
    #[error("{}: {message}; fetch the file again", path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// The fault.
        message: String,
    },

    /// A tensor that the model needs and the files lack.
    #[error(
        "{}: the tensor '{tensor}' is missing; the file is incomplete or of another architecture",
        path.display()
    )]
    TensorMissing {
        /// The file or folder.
        path: PathBuf,
        /// The tensor, by the file's own name for it.
        tensor: String,
    },

    /// A tensor of another shape than the configuration says.
    #[error("{}: the tensor '{tensor}' has shape {found:?}, expected {expected}", path.display())]
    TensorShape {
        /// The file or folder.
        path: PathBuf,
        /// The tensor, by the file's own name for it.
        tensor: String,
        /// The shape that is asked for, outermost dimension first.
        expected: String,
        /// The shape in the file, outermost dimension first.
        found: Vec<usize>,
    },

    /// A tensor in a number format that cannot be read.
    #[error(
        "{}: the tensor '{tensor}' has the type {found}, which is not supported; supported are {supported}: take a file of the \
         model in one of these",
        path.display()
    )]
    TensorType {
        /// The file or folder.
        path: PathBuf,
        /// The tensor, by the file's own name for it.
        tensor: String,
        /// Its type.
        found: String,
        /// The types that would be accepted.
        supported: &'static str,
    },

    /// A row of a tensor asked for with the wrong index or into a buffer of the wrong length.
    #[error("the tensor '{tensor}' of shape [{rows}, {cols}] has no row {row} of length {len}")]
    Row {
        /// The tensor, by the file's own name for it.
        tensor: String,
        /// The row asked for.
        row: usize,
        /// The length of the buffer, in values.
        len: usize,
        /// The tensor's rows.
        rows: usize,
        /// The tensor's columns.
        cols: usize,
    },

    /// Blocks of bytes that do not make the number of values asked for.
    #[error("{bytes} bytes of {dtype} do not make {values} values")]
    Blocks {
        /// The type of the blocks.
        dtype: DType,
        /// How many bytes were given.
        bytes: usize,
        /// How many values were asked for.
        values: usize,
    },

    /// A tokenizer that cannot be read, contradicts itself or asks for something unknown.
    #[error("{}: {message}", path.display())]
    Tokenizer {
        /// The file with the tokenizer.
        path: PathBuf,
        /// The fault, and the kinds that are accepted.
        message: String,
    },

    /// A text that the tokenizer cannot encode.
    #[error("{bytes} bytes of text cannot be tokenised: {message}")]
    Encode {
        /// The text's length in bytes.
        bytes: usize,
        /// The tokenizer's reason.
        message: String,
    },

    /// A chat template that cannot be read or rendered, or that does not keep the messages as they are.
    #[error("the model's chat template {message}")]
    ChatTemplate {
        /// The fault, as the end of the sentence.
        message: String,
    },

    /// A chat template that takes too long to compile or render, or makes the template engine panic.
    #[error("the model's chat template {message}")]
    TemplateFailed {
        /// The fault, as the end of the sentence.
        message: String,
    },

    /// A thread for the chat template that could not be started.
    #[error(
        "the model's chat template has no thread to run on: {0}; the system allows too few of them, or has too little memory"
    )]
    TemplateThread(std::io::Error),

    /// Tools, or calls of them, that a chat template leaves out of the prompt.
    #[error(
        "the model's chat template does not write the tools of this conversation, or their calls; send them as text of messages"
    )]
    ToolsIgnored,

    /// A tool that must be called and is not there.
    #[error("there is no tool {name:?} to call; the tools are: {known}")]
    UnknownTool {
        /// The tool's name; empty if any would do.
        name: String,
        /// The names of the tools that are there.
        known: String,
    },
}

/// An error about a chat template; `message` ends the sentence "the model's chat template …".
pub(crate) fn template_error(message: String) -> ModelError {
    ModelError::ChatTemplate { message }
}
