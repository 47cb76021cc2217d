/// What a fusion method can refuse.
#[derive(Debug, thiserror::Error, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// The question part has no token, so there is no row to answer from.
    #[error("the prompt has an empty question; give it at least one token")]
    EmptyQuestion,
    /// No method of this name.
    #[error("unknown fusion method `{name}`; known are: {known}")]
    UnknownMethod {
        /// The name as given.
        name: String,
        /// All names.
        known: String,
    },
    /// An option that the method does not have.
    #[error("method `{method}` takes no option `{option}`; it takes: {known}")]
    UnknownOption {
        /// The method.
        method: &'static str,
        /// The option as given.
        option: String,
        /// Its options.
        known: String,
    },
    /// An option's value that does not parse or is out of range.
    #[error("option `{option}` of `{method}`: `{value}` is not {expected}")]
    BadValue {
        /// The method.
        method: &'static str,
        /// The option.
        option: &'static str,
        /// The value as given.
        value: String,
        /// What would be right.
        expected: String,
    },
    /// A chunk that is called cached without its keys and values.
    #[error("the chunk at positions {start}..{end} is called cached, but its keys and values are not there")]
    NotCached {
        /// Its first position.
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
