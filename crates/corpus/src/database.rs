//! A redb database that is opened again after a failed write, and whose file can be made anew.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::{Mutex, PoisonError, RwLock};

use redb::{Database, DatabaseError, ReadTransaction, ReadableDatabase, WriteTransaction};

use crate::error::{Error, Result};

/// A database. redb refuses every operation after a failed write, such as one to a full disk, so the database is opened again
/// then.
pub(super) struct ReopeningDatabase {
    /// `None` only where the database could not be opened again.
    database: RwLock<Option<Database>>,
    open: Box<Open>,
    /// Held while a transaction writes, and while the file is made anew.
    writing: Mutex<()>,
}

type Open = dyn Fn() -> std::result::Result<Database, DatabaseError> + Send + Sync;

/// A failure inside a transaction.
pub(super) enum Failure {
    Database(redb::Error),
    Other(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Other(error)
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
from_redb!(StorageError, TableError, TransactionError, CommitError, DatabaseError);

impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Failure {
        Failure::Other(Error::Database(error.into()))
    }
}

pub(super) type Transacted<T> = std::result::Result<T, Failure>;

impl ReopeningDatabase {
    /// Opens a database.
    pub(super) fn new(
        open: impl Fn() -> std::result::Result<Database, DatabaseError> + Send + Sync + 'static,
    ) -> std::result::Result<ReopeningDatabase, DatabaseError> {
        let database = RwLock::new(Some(open()?));
        Ok(ReopeningDatabase { database, open: Box::new(open), writing: Mutex::default() })
    }

    /// Runs `work` in a write transaction, which is committed if it succeeds.
    ///
    /// # Errors
    /// If `work` or the transaction fails.
    pub(super) fn write<T>(&self, work: impl FnOnce(&WriteTransaction) -> Transacted<T>) -> Result<T> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let outcome = self.with_database(|database| {
            let transaction = database.begin_write()?;
            let done = work(&transaction)?;
            transaction.commit()?;
            Ok(done)
        });
        if let Err(Failure::Database(redb::Error::Io(_) | redb::Error::PreviousIo)) = &outcome {
            self.reopen();
        }
        outcome.map_err(Error::from)
    }

    /// Runs `work` in a read transaction.
    ///
    /// # Errors
    /// If `work` or the transaction fails.
    pub(super) fn read<T>(&self, work: impl FnOnce(&ReadTransaction) -> Transacted<T>) -> Result<T> {
        self.with_database(|database| work(&database.begin_read()?)).map_err(Error::from)
    }

    /// Replaces the database's `file` by a new one to which `copy` writes all that stays, if `is_due`. The name always leads to
    /// a whole file, and the lock on it is held throughout.
    ///
    /// # Errors
    /// If the new file cannot be written. The old one stays then.
    pub(super) fn rewrite_if(
        &self,
        file: &Path,
        is_due: impl FnOnce(&ReadTransaction) -> Transacted<bool>,
        copy: impl FnOnce(&ReadTransaction, &WriteTransaction) -> Transacted<()>,
    ) -> Result<()> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let new = file.with_file_name(refrain_store::NEW_DOCUMENTS);
        // A process that was killed has left it. The lock on the database keeps other processes away.
        remove(&new).map_err(Error::from)?;
        if !self.read(is_due)? {
            return Ok(());
        }
        let copied = self.with_database(|database| {
            let copied = Database::create(&new)?;
            let transaction = copied.begin_write()?;
            copy(&database.begin_read()?, &transaction)?;
            transaction.commit()?;
            fs::rename(&new, file).map_err(redb::StorageError::Io)?;
            Ok(copied)
        });
        match copied {
            Ok(copied) => {
                // The bytes of the old file go with its last handle.
                *self.database.write().unwrap_or_else(PoisonError::into_inner) = Some(copied);
                sync_folder_of(file).map_err(Error::from)
            }
            Err(failure) => {
                let _ = remove(&new);
                Err(failure.into())
            }
        }
    }

    fn with_database<T>(&self, work: impl FnOnce(&Database) -> Transacted<T>) -> Transacted<T> {
        let mut database = self.database.read().unwrap_or_else(PoisonError::into_inner);
        if database.is_none() {
            drop(database);
            self.reopen();
            database = self.database.read().unwrap_or_else(PoisonError::into_inner);
        }
        let closed = || Failure::Other(Error::Database("their file is closed".into()));
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

fn remove(path: &Path) -> Transacted<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(redb::StorageError::Io(error).into()),
        _ => Ok(()),
    }
}

/// Makes the file's name survive a loss of power.
#[cfg(unix)]
fn sync_folder_of(file: &Path) -> Transacted<()> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let synced = fs::File::open(folder).and_then(|folder| folder.sync_all());
    synced.map_err(|error| redb::StorageError::Io(error).into())
}

/// Other systems do not open folders.
#[cfg(not(unix))]
fn sync_folder_of(_: &Path) -> Transacted<()> {
    Ok(())
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        match failure {
            Failure::Database(error) => Error::Database(error.into()),
            Failure::Other(error) => error,
        }
    }
}
