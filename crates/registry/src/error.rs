/// What can be wrong with what is asked for.
#[derive(Clone, Debug, thiserror::Error, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// Nothing of this name.
    #[error("unknown {what} `{name}`; known are: {known}")]
    UnknownName {
        /// What was looked for.
        what: &'static str,
        /// The name as given.
        name: String,
        /// All names.
        known: String,
    },
    /// An option that it does not have.
    #[error("`{owner}` takes no option `{option}`; it takes: {known}")]
    UnknownOption {
        /// What the option was given to.
        owner: &'static str,
        /// The option as given.
        option: String,
        /// Its options.
        known: String,
    },
    /// An option's value that does not parse or is out of range.
    #[error("option `{option}` of `{owner}`: `{value}` is not {expected}")]
    BadValue {
        /// What the option was given to.
        owner: &'static str,
        /// The option.
        option: &'static str,
        /// The value as given.
        value: String,
        /// What would be right.
        expected: String,
    },
    /// Two options that contradict one another.
    #[error("`{owner}`: {clash}")]
    Clash {
        /// What the options were given to.
        owner: &'static str,
        /// Both, with their values, and what would be right.
        clash: String,
    },
}

/// Result with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
