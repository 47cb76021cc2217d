//! Damage of a redb database's file.

use std::io::ErrorKind;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Why a database's file is damaged, where the error means that.
///
/// # Errors
/// The error itself, where the file may be whole.
pub fn damage(error: redb::Error) -> Result<String, redb::Error> {
    match error {
        redb::Error::Corrupted(why) => Ok(why),
        redb::Error::Io(error)
            if matches!(error.kind(), ErrorKind::InvalidData | ErrorKind::UnexpectedEof) =>
        {
            Ok(error.to_string())
        }
        redb::Error::RepairAborted | redb::Error::UpgradeRequired(_) => Ok(error.to_string()),
        error => Err(error),
    }
}

/// Does work on a database, which panics on some damaged pages, and only when it comes to them.
///
/// # Errors
/// Those of the work, and `damaged` of the reason if it panics.
pub fn unless_it_panics<T, E>(
    work: impl FnOnce() -> Result<T, E>,
    damaged: impl FnOnce(String) -> E,
) -> Result<T, E> {
    let outcome = catch_unwind(AssertUnwindSafe(work));
    outcome.unwrap_or_else(|_| Err(damaged("the database cannot make sense of it".to_owned())))
}
