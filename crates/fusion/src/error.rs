/// Errors of fusion methods.
#[derive(Debug, thiserror::Error, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// The question part has no token, so there is no row to answer from.
    #[error("the prompt has an empty question; give it at least one token")]
    EmptyQuestion,
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
    /// Attention of the question cannot choose among tokens that a sliding window hides from it.
    #[error(
        "the method chooses tokens by the question's attention from layer {first} on, whose sliding window of {window} tokens is \
         shorter than the {needed} tokens from the first document to the question; {}",
        advice(others)
    )]
    Window {
        /// The first layer that was asked for.
        first: usize,
        /// Its window.
        window: usize,
        /// Tokens that a window would have to hold.
        needed: usize,
        /// Layers that see all of the documents.
        others: Vec<usize>,
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

/// What a user may do who asked for layers whose windows are too short.
fn advice(others: &[usize]) -> String {
    if others.is_empty() {
        return "no layer of the model sees that far: give fewer documents, or take the method vanilla"
            .into();
    }
    let others: Vec<String> = others.iter().map(usize::to_string).collect();
    format!("let the method look at one of the layers {}, which see all of them", others.join(", "))
}
