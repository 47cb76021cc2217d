//! Errors of the harness.

use std::path::PathBuf;

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file of a benchmark is missing or malformed.
    #[error("{}: {reason}", path.display())]
    Data {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and what to do.
        reason: String,
    },
    /// A matrix or a run asks for something that there is not.
    #[error("{0}")]
    Asked(String),
    /// The judge gave no reply.
    #[error("judge {url}: {reason}")]
    Judge {
        /// Where it was asked.
        url: String,
        /// What went wrong: status and beginning of what came back, if something did.
        reason: String,
    },
    /// The engine refused.
    #[error(transparent)]
    Engine(#[from] refrain_engine::Error),
}

/// Result of the harness.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// A fault of a file.
    pub(crate) fn data(path: impl Into<PathBuf>, reason: impl ToString) -> Error {
        Error::Data { path: path.into(), reason: reason.to_string() }
    }
}
