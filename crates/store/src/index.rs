//! The index: bytes, last use, expiry and pin of every chunk on disk.
//!
//! The index is an embedded database beside the chunks. Any number of processes may have it open, and one at a time writes.
//! It never says what a chunk is: the chunk's file does. An index that is lost or broken is therefore made anew from the
//! files, and only pins and times to live are lost.
//!
//! A chunk's row is committed before its file gets its name, and leaves in the transaction in which its file was removed.
//! The bytes of all rows are therefore never less than the bytes on disk, whenever a process is killed.

mod error;
mod tables;

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redb::{
    Builder, ConcurrencyMode, Database, ReadableDatabase, StorageError, TransactionError, WriteTransaction,
};

pub(crate) use self::error::IndexError;
#[cfg(test)]
pub(crate) use self::tables::ROWS_READ;
pub(crate) use self::tables::{IndexRow, Tables, Totals};
use self::tables::{Snapshot, has_row, set_complete, take_over_earlier_rows};
use crate::file_identity::file_identity;
use crate::file_names::{BROKEN_INDEX, INDEX, INDEX_LOCK, TEMPORARY};
use crate::folder::{create_dir, sync_dir};
use crate::{ChunkKey, Result, StoreError, unless_it_panics};

/// Bytes of database pages kept in memory.
const CACHE: usize = 4 << 20;

#[derive(Debug)]
pub(crate) struct Index {
    path: PathBuf,
    /// None before the first use, and after an error of the database.
    database: Mutex<Option<Opened>>,
    /// Whether every file that is older than the index is known to have its row.
    complete: AtomicBool,
    /// Why a broken index was set aside, until this is asked for.
    set_aside: Mutex<Option<String>>,
}

impl Index {
    /// The index of the folder `root`, which is opened, or made, at its first use.
    pub(crate) fn of(root: &Path) -> Index {
        Index {
            path: root.join(INDEX),
            database: Mutex::new(None),
            complete: AtomicBool::new(false),
            set_aside: Mutex::new(None),
        }
    }

    /// Why a broken index was set aside, if one was since the last call.
    pub(crate) fn take_set_aside(&self) -> Option<String> {
        self.set_aside.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Whether every file that is older than the index has its row.
    pub(crate) fn is_complete(&self) -> Result<bool> {
        if self.complete.load(Relaxed) {
            return Ok(true);
        }
        let complete = self.read(|snapshot| snapshot.is_complete())?;
        self.complete.store(complete, Relaxed);
        Ok(complete)
    }

    /// Says that every file that is older than the index has its row.
    pub(crate) fn set_complete(&self) -> Result<()> {
        self.with("write", |database| {
            let transaction = database.begin_write()?;
            set_complete(&transaction)?;
            Ok(transaction.commit()?)
        })?;
        self.complete.store(true, Relaxed);
        Ok(())
    }

    /// The row of a chunk.
    pub(crate) fn row(&self, key: &ChunkKey) -> Result<Option<IndexRow>> {
        self.read(|snapshot| snapshot.row(key))
    }

    /// All rows, ascending by key.
    pub(crate) fn rows(&self) -> Result<Vec<(ChunkKey, IndexRow)>> {
        self.read(|snapshot| snapshot.rows())
    }

    /// The rows of a namespace, ascending by key.
    pub(crate) fn rows_of(&self, namespace: &str) -> Result<Vec<(ChunkKey, IndexRow)>> {
        self.read(|snapshot| snapshot.rows_of(namespace))
    }

    /// Sums over all rows.
    pub(crate) fn totals(&self) -> Result<Totals> {
        self.read(|snapshot| snapshot.totals(None))
    }

    /// Chunks that are not yet in the object store, and when each was noted (ns since 1970).
    #[cfg(feature = "remote")]
    pub(crate) fn pending(&self) -> Result<Vec<(ChunkKey, u64)>> {
        self.read(|snapshot| snapshot.pending())
    }

    fn read<T>(&self, read: impl FnOnce(&Snapshot) -> Result<T, IndexError>) -> Result<T> {
        self.with("read", |database| read(&Snapshot(database.begin_read()?)))
    }

    /// Changes rows in one transaction, which is committed if `change` succeeds and has no effect otherwise. Waits while
    /// another thread or process writes.
    pub(crate) fn write<T>(
        &self,
        change: impl FnOnce(&mut Tables<'_>) -> Result<T, IndexError>,
    ) -> Result<T> {
        self.with("write", |database| committed(database.begin_write()?, change))
    }

    /// Changes rows as [`Index::write`] does; none, at once, if another thread or process writes.
    pub(crate) fn try_write<T>(
        &self,
        change: impl FnOnce(&mut Tables<'_>) -> Result<T, IndexError>,
    ) -> Result<Option<T>> {
        self.with("write", |database| match database.try_begin_write() {
            Ok(transaction) => committed(transaction, change).map(Some),
            Err(TransactionError::WouldBlock) => Ok(None),
            Err(error) => Err(error.into()),
        })
    }

    /// Enters `row` again if it was taken out, and commits nothing if it is there. Called when a file of the chunk has got
    /// its name: a process that removed the chunk meanwhile did not see the file.
    pub(crate) fn ensure_row(&self, key: &ChunkKey, row: &IndexRow) -> Result<()> {
        self.with("write", |database| {
            let transaction = database.begin_write()?;
            if has_row(&transaction, key)? {
                return Ok(transaction.abort()?);
            }
            committed(transaction, |tables| tables.set(key, row))
        })
    }

    /// Runs `work` on the open database. After an error of the database it is opened again at the next use.
    fn with<T>(
        &self,
        action: &'static str,
        work: impl FnOnce(&Database) -> Result<T, IndexError>,
    ) -> Result<T> {
        let database = self.database()?;
        let outcome = unless_it_panics(|| work(&database), IndexError::Broken);
        if matches!(outcome, Err(IndexError::Broken(_) | IndexError::Database(_))) {
            self.lock().take();
            self.complete.store(false, Relaxed);
        }
        outcome.map_err(|error| error.at(action, &self.path))
    }

    /// The open database. A database whose file another process has set aside or removed is opened again.
    fn database(&self) -> Result<Arc<Database>> {
        let mut slot = self.lock();
        let now = file_identity(&self.path);
        if let Some((database, _)) = slot.as_ref().filter(|(_, opened)| now.is_some() && *opened == now) {
            return Ok(database.clone());
        }
        if slot.take().is_some() {
            self.complete.store(false, Relaxed);
        }
        let database = Arc::new(self.open()?);
        unless_it_panics(|| migrate(&database), IndexError::Broken)
            .map_err(|error| error.at("migrate", &self.path))?;
        *slot = Some((database.clone(), file_identity(&self.path)));
        Ok(database)
    }

    /// Opens the database, or makes one. A broken file is set aside.
    fn open(&self) -> Result<Database> {
        // The whole folder may have been removed while the store is open.
        if let Some(root) = self.path.parent() {
            create_dir(root)?;
        }
        match open(&self.path) {
            Ok(database) => return Ok(database),
            Err(IndexError::Broken(_)) => {}
            Err(error) => return Err(error.at("open", &self.path)),
        }
        // One process sets the file aside. A second one waits for the lock and then finds the new file.
        let failed = |source| StoreError::Io { action: "set aside", path: self.path.clone(), source };
        let lock = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .open(self.path.with_file_name(INDEX_LOCK));
        let lock = lock.map_err(failed)?;
        lock.lock().map_err(failed)?;
        match open(&self.path) {
            Ok(database) => return Ok(database),
            Err(IndexError::Broken(why)) => {
                fs::rename(&self.path, self.path.with_file_name(BROKEN_INDEX)).map_err(failed)?;
                self.complete.store(false, Relaxed);
                *self.set_aside.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
            }
            Err(error) => return Err(error.at("open", &self.path)),
        }
        open(&self.path).map_err(|error| error.at("open", &self.path))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Opened>> {
        self.database.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The database, and the identity of its file.
type Opened = (Arc<Database>, Option<(u64, u64)>);

fn committed<T>(
    transaction: WriteTransaction,
    change: impl FnOnce(&mut Tables<'_>) -> Result<T, IndexError>,
) -> Result<T, IndexError> {
    let outcome = change(&mut Tables::open(&transaction)?)?;
    transaction.commit()?;
    count_commit();
    Ok(outcome)
}

#[cfg(not(test))]
fn count_commit() {}

#[cfg(test)]
fn count_commit() {
    COMMITS.set(COMMITS.get() + 1);
}

#[cfg(test)]
thread_local! {
    /// Transactions that this thread has committed, each of which waits for the disk.
    pub(crate) static COMMITS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Takes over what an earlier build has written.
fn migrate(database: &Database) -> Result<(), IndexError> {
    if !Snapshot(database.begin_read()?).has_earlier_rows()? {
        return Ok(());
    }
    let transaction = database.begin_write()?;
    take_over_earlier_rows(&transaction)?;
    Ok(transaction.commit()?)
}

/// Opens a database, or makes one. A reader never sees one that is half made.
fn open(path: &Path) -> Result<Database, IndexError> {
    if !path.exists() {
        let root = path.parent().unwrap_or(Path::new("."));
        // Temporary files are readable by their owner only.
        let made = tempfile::Builder::new().prefix(TEMPORARY).tempfile_in(root).map_err(StorageError::Io)?;
        drop(open_file(made.path())?);
        match made.persist_noclobber(path) {
            Err(error) if error.error.kind() != ErrorKind::AlreadyExists => {
                return Err(StorageError::Io(error.error).into());
            }
            // Another process was faster.
            Err(_) => {}
            Ok(_) => sync_dir(root)?,
        }
    }
    open_file(path)
}

/// Opens a database and verifies all pages: the file is small, and an unverified page may end the program.
fn open_file(path: &Path) -> Result<Database, IndexError> {
    let create = || {
        Builder::new()
            .set_cache_size(CACHE)
            .set_concurrency_mode(ConcurrencyMode::MultiWriter)
            .set_check_integrity_on_open(true)
            .create(path)
    };
    unless_it_panics(|| Ok(create()?), IndexError::Broken)
}
