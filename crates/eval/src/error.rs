//! Errors of the harness.

use std::path::PathBuf;

use refrain::engine::DeviceFailure;

/// An error of the harness.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file of a benchmark is missing or malformed.
    #[error("{}: {reason}", path.display())]
    Data {
        /// The file.
        path: PathBuf,
        /// The fault, and what to do.
        reason: String,
    },
    /// A matrix or a run names something that does not exist.
    #[error("{0}")]
    Invalid(String),
    /// The matrix or the options of a run are wrong.
    #[error("{0}")]
    Usage(String),
    /// The judge gave no reply.
    #[error("judge {url}: {reason}")]
    Judge {
        /// Where it was asked.
        url: String,
        /// The fault, with the status and the beginning of the reply if there was one.
        reason: String,
        /// Whether the same request may succeed later: the endpoint is busy, failing or away.
        passing: bool,
    },
    /// The device has failed, and with it all answers that are left.
    #[error("{0}; answers that were finished are kept, and the same command goes on with the others")]
    Device(DeviceFailure),
    /// The engine refused.
    #[error(transparent)]
    Engine(#[from] refrain::engine::Error),
}

/// Result of the harness.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// A fault of a file.
    pub(crate) fn data(path: impl Into<PathBuf>, reason: impl ToString) -> Error {
        Error::Data { path: path.into(), reason: reason.to_string() }
    }
}
