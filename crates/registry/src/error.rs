/// A selection that a registry refuses.
#[derive(Clone, Debug, thiserror::Error, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// The registry has no entry of this name.
    #[error("unknown {what} `{name}`; known are: {known}")]
    UnknownName {
        /// The noun for an entry, in the singular.
        what: &'static str,
        /// The name as given.
        name: String,
        /// All names of the registry.
        known: String,
    },
    /// The selection is neither text nor an object with a name.
    #[error("a {what} is its name, `NAME:OPTION=VALUE,…`, or an object with `name` and its options")]
    NoName {
        /// The noun for an entry, in the singular.
        what: &'static str,
    },
    /// The entry has no option of this name.
    #[error("`{owner}` takes no option `{option}`; it takes: {known}")]
    UnknownOption {
        /// The entry's name.
        owner: &'static str,
        /// The option as given.
        option: String,
        /// The entry's options.
        known: String,
    },
    /// The value of an option has the wrong type or is out of range.
    #[error("option `{option}` of `{owner}`: `{value}` is not {expected}")]
    BadValue {
        /// The entry's name.
        owner: &'static str,
        /// The option.
        option: String,
        /// The value as given.
        value: String,
        /// The values that are accepted.
        expected: String,
    },
    /// Options contradict one another or the prompt.
    #[error("`{owner}`: {conflict}")]
    Conflict {
        /// The entry's name.
        owner: &'static str,
        /// The options with their values, and which values would fit.
        conflict: String,
    },
}

impl Error {
    /// The error for a value that is not `expected`.
    pub fn bad_value(
        owner: &'static str,
        option: &str,
        value: impl ToString,
        expected: impl ToString,
    ) -> Error {
        let (value, expected) = (value.to_string(), expected.to_string());
        Error::BadValue { owner, option: option.to_owned(), value, expected }
    }

    /// The error for options that contradict one another.
    pub fn conflict(owner: &'static str, conflict: impl Into<String>) -> Error {
        Error::Conflict { owner, conflict: conflict.into() }
    }
}

/// Result with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
