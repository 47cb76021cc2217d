//! A redb database that is opened again after a failed write.

use std::sync::{PoisonError, RwLock};

use redb::{Database, DatabaseError, ReadTransaction, ReadableDatabase, WriteTransaction};

use crate::api_error::{ApiError, Result};

/// A database. redb refuses every operation after a failed write, such as one to a full disk, so the database is opened again
/// then.
pub(super) struct ReopeningDatabase {
    /// `None` only where the database could not be opened again.
    database: RwLock<Option<Database>>,
    open: Box<Open>,
}

type Open = dyn Fn() -> std::result::Result<Database, DatabaseError> + Send + Sync;

/// A failure inside a transaction.
pub(super) enum Failure {
    Database(redb::Error),
    Request(ApiError),
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Failure {
        Failure::Request(error)
    }
}

macro_rules! from_redb {
    ($($error:ident),*) => {$(
        impl From<redb::$error> for Failure {
            fn from(error: redb::$error) -> Failure {
                Failure::Database(error.into())
            }
        }
    )*};
}
from_redb!(StorageError, TableError, TransactionError, CommitError);

impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Failure {
        Failure::Request(ApiError::internal(&error))
    }
}

pub(super) type Transacted<T> = std::result::Result<T, Failure>;

impl ReopeningDatabase {
    /// Opens a database.
    pub(super) fn new(
        open: impl Fn() -> std::result::Result<Database, DatabaseError> + Send + Sync + 'static,
    ) -> std::result::Result<ReopeningDatabase, DatabaseError> {
        let database = RwLock::new(Some(open()?));
        Ok(ReopeningDatabase { database, open: Box::new(open) })
    }

    /// Runs `work` in a write transaction, which is committed if it succeeds.
    ///
    /// # Errors
    /// If `work` or the transaction fails.
    pub(super) fn write<T>(&self, work: impl FnOnce(&WriteTransaction) -> Transacted<T>) -> Result<T> {
        let outcome = self.with_database(|database| {
            let transaction = database.begin_write()?;
            let done = work(&transaction)?;
            transaction.commit()?;
            Ok(done)
        });
        if let Err(Failure::Database(redb::Error::Io(_) | redb::Error::PreviousIo)) = &outcome {
            self.reopen();
        }
        outcome.map_err(api_error)
    }

    /// Runs `work` in a read transaction.
    ///
    /// # Errors
    /// If `work` or the transaction fails.
    pub(super) fn read<T>(&self, work: impl FnOnce(&ReadTransaction) -> Transacted<T>) -> Result<T> {
        self.with_database(|database| work(&database.begin_read()?)).map_err(api_error)
    }

    fn with_database<T>(&self, work: impl FnOnce(&Database) -> Transacted<T>) -> Transacted<T> {
        let mut database = self.database.read().unwrap_or_else(PoisonError::into_inner);
        if database.is_none() {
            drop(database);
            self.reopen();
            database = self.database.read().unwrap_or_else(PoisonError::into_inner);
        }
        let closed = || Failure::Request(ApiError::internal(&"the documents' database is closed"));
        work(database.as_ref().ok_or_else(closed)?)
    }

    fn reopen(&self) {
        let mut database = self.database.write().unwrap_or_else(PoisonError::into_inner);
        // The lock on the file must be released first.
        *database = None;
        match (self.open)() {
            Ok(opened) => *database = Some(opened),
            Err(error) => tracing::error!(%error, "the documents' database cannot be opened again"),
        }
    }
}

fn api_error(failure: Failure) -> ApiError {
    match failure {
        Failure::Database(error) => ApiError::internal(&error),
        Failure::Request(error) => error,
    }
}
