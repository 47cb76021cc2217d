//! Errors of jobs.

/// The reason for which a job cannot be planned, run or shown.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The object store does not answer, or refuses.
    #[error(transparent)]
    Objects(#[from] refrain::store::StoreError),
    /// A URL without a plan.
    #[error("there is no job at {0}; `refrain job plan` makes one")]
    NoJob(String),
    /// An object that does not hold what its name says.
    #[error("{name} of the job is broken: {reason}")]
    Broken {
        /// The object.
        name: String,
        /// The fault.
        reason: String,
    },
    /// A URL at which another job was planned.
    #[error("another job was planned there before, with {}; give another --job, or the same settings", differences.join(", with "))]
    OtherJob {
        /// The settings that differ: `compute bf16, not q8`.
        differences: Vec<String>,
    },
    /// A URL with what a job has done, and without its plan.
    #[error(
        "{folder}/ there holds objects of a job whose manifest is gone; give another --job, or delete them"
    )]
    Leftovers {
        /// The folder.
        folder: String,
    },
    /// Nothing to be done.
    #[error("there is nothing to do: no {0} were given")]
    Empty(&'static str),
    /// An item that a job cannot have.
    #[error("{0}")]
    Item(String),
    /// Another machine than the job was planned for: it has another model, or other settings.
    #[error("{0}")]
    OtherMachine(String),
    /// The work cannot go on on this machine.
    #[error(transparent)]
    Work(Box<dyn std::error::Error + Send + Sync>),
}

/// The result of something with a job.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Whether the same runner would meet the error again, as the job and its machine are.
    pub fn is_lasting(&self) -> bool {
        match self {
            Error::Broken { .. } | Error::OtherJob { .. } | Error::OtherMachine(_) => true,
            Error::Work(error) => error.downcast_ref().is_some_and(Error::is_lasting),
            _ => false,
        }
    }

    /// An object that is broken.
    pub(crate) fn broken(name: &str, reason: impl ToString) -> Error {
        Error::Broken { name: name.to_owned(), reason: reason.to_string() }
    }
}
