/// Errors of fusion methods.
#[derive(Debug, thiserror::Error, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// The question part has no token, so there is no row to answer from.
    #[error("the prompt has an empty question; give it at least one token")]
    EmptyQuestion,
    /// A chunk that is called cached without its keys and values.
    #[error("the chunk at positions {start}..{end} is called cached, but its keys and values are not there")]
    NotCached {
        /// Its first position.
        start: u32,
        /// One past its last position.
        end: u32,
    },
    /// A document's summary that is not as this method makes it.
    #[error(
        "the summary of the document at positions {start}..{end} has no fitting '{tensor}'; remove the chunk and ingest the document again"
    )]
    AuxTensors {
        /// The tensor that is missing or has another shape.
        tensor: &'static str,
        /// The document's first position.
        start: u32,
        /// One past its last position.
        end: u32,
    },
    /// A check layer that the model does not have.
    #[error("check layer {layer} is not below the model's {layers} layers")]
    CheckLayer {
        /// The layer asked for.
        layer: usize,
        /// Layers of the model.
        layers: usize,
    },
}

/// Result with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
