//! A redb database that is opened again after a failed read or write, and whose file can be made anew.
//!
//! The file is not trusted: the checksums of all its pages are verified when it is opened, and a panic of the database on a page that
//! was damaged since becomes an error.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError, RwLock};

use redb::{Builder, Database, DatabaseError, ReadTransaction, ReadableDatabase, WriteTransaction};
use refrain_store::{
    DOCUMENTS, NEW_DOCUMENTS, TEMPORARY, damage, file_identity, make_private_file, unless_it_panics,
};

use crate::error::{Error, Result};

/// Bytes of database pages kept in memory.
const CACHE: usize = 64 << 20;

/// A database. redb refuses every operation on the file after one that failed, such as a write to a full disk, so the database is
/// opened again then.
pub(super) struct ReopeningDatabase {
    /// `None` only where the database could not be opened again.
    database: RwLock<Option<Database>>,
    /// How often it was opened again.
    reopened: AtomicU64,
    open: Box<Open>,
    /// The file; a name for errors where the database is in memory.
    path: PathBuf,
    /// Whether the database is in a file of this name.
    is_file: bool,
    /// The identity of the file that is open.
    identity: Mutex<Option<(u64, u64)>>,
    /// Held while a transaction writes, and while the file is made anew.
    writing: Mutex<()>,
}

type Open = dyn Fn() -> std::result::Result<Database, DatabaseError> + Send + Sync;

/// A failure inside a transaction.
pub(super) enum Failure {
    Database(redb::Error),
    /// The file is damaged. The reason.
    Damaged(String),
    Other(Error),
}

impl Failure {
    /// Whether the database refuses to use its file after it.
    fn is_of_file(&self) -> bool {
        matches!(self, Failure::Database(redb::Error::Io(_) | redb::Error::PreviousIo))
    }

    fn is_damage(&self) -> bool {
        matches!(self, Failure::Damaged(_))
    }

    /// The error of a database in the file `path`.
    fn at(self, path: &Path) -> Error {
        match self {
            Failure::Database(redb::Error::Io(source))
                if matches!(source.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) =>
            {
                Error::DiskFull { path: path.to_owned(), source }
            }
            Failure::Database(error) => Error::Database(error.into()),
            Failure::Damaged(reason) => Error::Damaged { path: path.to_owned(), reason },
            Failure::Other(error) => error,
        }
    }
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
                damage(error.into()).map_or_else(Failure::Database, Failure::Damaged)
            }
        }
    )*};
}
from_redb!(StorageError, TableError, TransactionError, CommitError, DatabaseError);

impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Failure {
        Failure::Damaged(format!("a row cannot be read: {error}"))
    }
}

pub(super) type Transacted<T> = std::result::Result<T, Failure>;

impl ReopeningDatabase {
    /// Opens the database of a file, or one in memory.
    pub(super) fn new(
        file: Option<&Path>,
        open: impl Fn() -> std::result::Result<Database, DatabaseError> + Send + Sync + 'static,
    ) -> Result<ReopeningDatabase> {
        let (path, open) = (file.unwrap_or(Path::new(DOCUMENTS)).to_owned(), Box::new(open));
        let database = ReopeningDatabase {
            database: RwLock::new(Some(opened(&*open, &path)?)),
            reopened: AtomicU64::new(0),
            open,
            path,
            is_file: file.is_some(),
            identity: Mutex::default(),
            writing: Mutex::default(),
        };
        database.identify();
        Ok(database)
    }

    /// Remembers which file is open.
    fn identify(&self) {
        let identity = if self.is_file { file_identity(&self.path) } else { None };
        *self.identity.lock().unwrap_or_else(PoisonError::into_inner) = identity;
    }

    /// Checks that the name still leads to the file that is open.
    ///
    /// # Errors
    /// If the file was moved away or removed: what is written to it would be lost.
    fn check_name(&self) -> Result<()> {
        let identity = *self.identity.lock().unwrap_or_else(PoisonError::into_inner);
        if identity.is_some() && file_identity(&self.path) != identity {
            return Err(Error::Moved { path: self.path.clone() });
        }
        Ok(())
    }

    /// Runs `work` in a write transaction, which is committed if it succeeds.
    ///
    /// # Errors
    /// If the file was moved away or removed, or `work` or the transaction fails.
    pub(super) fn write<T>(&self, work: impl FnOnce(&WriteTransaction) -> Transacted<T>) -> Result<T> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let work = |database: &Database| {
            self.check_name()?;
            let transaction = database.begin_write()?;
            let done = work(&transaction)?;
            transaction.commit()?;
            Ok(done)
        };
        self.reopening_after(|failure| failure.is_of_file() || failure.is_damage(), work)
    }

    /// Runs `work` in a read transaction.
    ///
    /// # Errors
    /// If `work` or the transaction fails.
    pub(super) fn read<T>(&self, work: impl FnOnce(&ReadTransaction) -> Transacted<T>) -> Result<T> {
        // A damaged file is refused when it is opened again, and what else it holds can be read as it is open.
        self.reopening_after(Failure::is_of_file, |database| work(&database.begin_read()?))
    }

    /// Runs `work`, and opens the database again after such a failure of it.
    fn reopening_after<T>(
        &self,
        reopens: impl FnOnce(&Failure) -> bool,
        work: impl FnOnce(&Database) -> Transacted<T>,
    ) -> Result<T> {
        let reopened = self.reopened.load(Relaxed);
        self.with_database(work).map_err(|failure| {
            if reopens(&failure)
                && let Err(error) = self.reopen(reopened)
            {
                tracing::error!(%error, "the documents' database cannot be opened again");
            }
            failure.at(&self.path)
        })
    }

    /// Replaces the database's file, if there is one, by a new one to which `copy` writes all that stays, if `is_due`. The name always leads to
    /// a whole file, and the lock on it is held throughout.
    ///
    /// # Errors
    /// If the file was moved away or removed, or the new one cannot be written. The old one stays then.
    pub(super) fn rewrite_if(
        &self,
        is_due: impl FnOnce(&ReadTransaction) -> Transacted<bool>,
        copy: impl FnOnce(&ReadTransaction, &WriteTransaction) -> Transacted<()>,
    ) -> Result<()> {
        if !self.is_file {
            return Ok(());
        }
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        self.check_name()?;
        let (file, new) = (&self.path, self.path.with_file_name(NEW_DOCUMENTS));
        // A process that was killed has left it. The lock on the database keeps other processes away.
        remove(&new).map_err(|failure| failure.at(&self.path))?;
        if !self.read(is_due)? {
            return Ok(());
        }
        let copied = self.with_database(|database| {
            let copied = open_file(&new)?;
            let transaction = copied.begin_write()?;
            copy(&database.begin_read()?, &transaction)?;
            transaction.commit()?;
            self.check_name()?;
            fs::rename(&new, file).map_err(redb::StorageError::Io)?;
            Ok(copied)
        });
        match copied {
            Ok(copied) => {
                // The bytes of the old file go with its last handle.
                *self.database.write().unwrap_or_else(PoisonError::into_inner) = Some(copied);
                self.identify();
                let synced = sync_folder_of(file).map_err(redb::StorageError::Io);
                synced.map_err(|error| Failure::from(error).at(&self.path))
            }
            Err(failure) => {
                let _ = remove(&new);
                Err(failure.at(&self.path))
            }
        }
    }

    fn with_database<T>(&self, work: impl FnOnce(&Database) -> Transacted<T>) -> Transacted<T> {
        let mut database = self.database.read().unwrap_or_else(PoisonError::into_inner);
        if database.is_none() {
            let reopened = self.reopened.load(Relaxed);
            drop(database);
            self.reopen(reopened).map_err(Failure::Other)?;
            database = self.database.read().unwrap_or_else(PoisonError::into_inner);
        }
        let closed = || Failure::Other(Error::Database("their file is closed".into()));
        let database = database.as_ref().ok_or_else(closed)?;
        unless_it_panics(|| work(database), Failure::Damaged)
    }

    /// Opens the database again, unless another thread has done so since it had been `reopened` so often.
    fn reopen(&self, reopened: u64) -> Result<()> {
        let mut database = self.database.write().unwrap_or_else(PoisonError::into_inner);
        if self.reopened.load(Relaxed) != reopened {
            return Ok(());
        }
        if database.is_some() {
            self.check_name()?;
        }
        // The lock on the file must be released first.
        *database = None;
        *database = Some(opened(&*self.open, &self.path)?);
        self.identify();
        self.reopened.fetch_add(1, Relaxed);
        Ok(())
    }
}

fn opened(open: &Open, path: &Path) -> Result<Database> {
    let work = || match open() {
        Err(DatabaseError::DatabaseAlreadyOpen) => Err(Error::InUse { path: path.to_owned() }.into()),
        outcome => Ok(outcome?),
    };
    let outcome = unless_it_panics(work, Failure::Damaged);
    outcome.map_err(|failure| match failure.at(path) {
        Error::Database(error) => Error::Open { path: path.to_owned(), reason: error.to_string() },
        error => error,
    })
}

/// Opens the database of the file `path`, or makes one. The name never leads to one that is half made, which would count as damaged.
pub(super) fn open_or_make(path: &Path) -> std::result::Result<Database, DatabaseError> {
    if !path.exists() {
        let made = tempfile::Builder::new().prefix(TEMPORARY).tempfile_in(folder_of(path))?;
        drop(open_file(made.path())?);
        match made.persist_noclobber(path) {
            Ok(_) => sync_folder_of(path)?,
            // Another process was faster.
            Err(error) if error.error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error.error.into()),
        }
    }
    open_file(path)
}

/// Opens the database of a file, or makes one, and verifies all its pages: an unverified page may end the program.
pub(super) fn open_file(path: &Path) -> std::result::Result<Database, DatabaseError> {
    make_private_file(path)?;
    Builder::new().set_cache_size(CACHE).set_check_integrity_on_open(true).create(path)
}

fn remove(path: &Path) -> Transacted<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(redb::StorageError::Io(error).into()),
        _ => Ok(()),
    }
}

/// Makes the file's name survive a loss of power.
#[cfg(unix)]
fn sync_folder_of(file: &Path) -> io::Result<()> {
    fs::File::open(folder_of(file)).and_then(|folder| folder.sync_all())
}

/// Other systems do not open folders.
#[cfg(not(unix))]
fn sync_folder_of(_: &Path) -> io::Result<()> {
    Ok(())
}

fn folder_of(file: &Path) -> &Path {
    file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
