//! The index: what each chunk takes on disk, when it was last used, and whether it must stay or go.
//!
//! An embedded database beside the chunks. All processes that use the folder share it: any number may have it open, and
//! one at a time writes. It never says what a chunk is, its file does: an index that is lost or broken is made anew
//! from the files, and then only pins and times to live are lost.
//!
//! A chunk's row is committed before its file gets its name, and leaves with the transaction in which its file was
//! removed. So what the rows take together is never less than what lies on disk, whenever a process is killed.

mod trouble;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use redb::{
    Builder, ConcurrencyMode, Database, ReadOnlyTable, ReadableDatabase, ReadableTable, StorageError, Table,
    TableDefinition, TableError, TransactionError, WriteTransaction,
};

use self::trouble::Trouble;
use crate::folder::TEMPORARY;
use crate::limits::{Limits, Row, victims};
use crate::{ChunkKey, Result, StoreError};

/// Its file in the store's folder.
pub(crate) const FILE: &str = "index.redb";
/// Locked by whoever sets a broken one aside.
pub(crate) const LOCK: &str = "index.lock";
/// What a broken one is called from then on.
pub(crate) const BROKEN: &str = "index.redb.broken";
/// Bytes, last use (ms since 1970), when it was written and when it expires (s since 1970, 0 never), pinned, namespace.
/// Another row format takes another name.
const CHUNKS: TableDefinition<'static, Key, Value> = TableDefinition::new("chunks, version 1");
/// Chunks that are not yet where they are shared, and when that was noted (ns since 1970).
const PENDING: TableDefinition<'static, Key, u64> = TableDefinition::new("pending, version 1");
/// Whether the rows of all files that were there before the index have been made.
const COMPLETE: TableDefinition<'static, &str, bool> = TableDefinition::new("complete");
/// What is said of a file that the database stumbles over.
const NONSENSE: &str = "it cannot be made sense of";
/// Bytes of pages that are kept in memory.
const CACHE: usize = 4 << 20;

type Key = &'static [u8; 32];
type Value = (u64, u64, u64, u64, bool, &'static str);
type Rows<'a> = Table<'a, Key, Value>;
type Pending<'a> = Table<'a, Key, u64>;

#[derive(Debug)]
pub(crate) struct Index {
    path: PathBuf,
    /// None until it is used, and after an error of its own.
    database: Mutex<Option<Opened>>,
    /// Whether it is known to have a row of every file that was there before it.
    complete: AtomicBool,
    /// Why the last one was set aside, until somebody asks.
    set_aside: Mutex<Option<String>>,
}

impl Row {
    fn value(&self) -> (u64, u64, u64, u64, bool, &str) {
        (self.bytes, self.used, self.written, self.expires, self.pinned, &self.namespace)
    }

    fn of((bytes, used, written, expires, pinned, namespace): (u64, u64, u64, u64, bool, &str)) -> Row {
        Row { bytes, used, written, expires, pinned, namespace: namespace.to_owned() }
    }
}

impl Index {
    /// The index of the folder `root`, which is opened, or made, when it is first used.
    pub(crate) fn of(root: &Path) -> Index {
        Index {
            path: root.join(FILE),
            database: Mutex::new(None),
            complete: AtomicBool::new(false),
            set_aside: Mutex::new(None),
        }
    }

    /// Why the last one was set aside, if one was since this was last asked.
    pub(crate) fn take_set_aside(&self) -> Option<String> {
        self.set_aside.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Whether it has a row of every file that was there before it.
    pub(crate) fn is_complete(&self) -> Result<bool> {
        if self.complete.load(Relaxed) {
            return Ok(true);
        }
        let complete =
            self.read(COMPLETE, |table| Ok(table.get("")?.is_some_and(|complete| complete.value())))?;
        self.complete.store(complete, Relaxed);
        Ok(complete)
    }

    /// The row of a chunk.
    pub(crate) fn row(&self, key: &ChunkKey) -> Result<Option<Row>> {
        self.read(CHUNKS, |table| Ok(table.get(&key.0)?.map(|row| Row::of(row.value()))))
    }

    /// All rows.
    pub(crate) fn rows(&self) -> Result<BTreeMap<ChunkKey, Row>> {
        self.read(CHUNKS, all)
    }

    /// What a table says; one that nobody has written yet says nothing.
    fn read<K: redb::Key + 'static, V: redb::Value + 'static, T: Default>(
        &self,
        table: TableDefinition<'static, K, V>,
        read: impl FnOnce(&ReadOnlyTable<K, V>) -> Result<T, Trouble>,
    ) -> Result<T> {
        self.with("read", |database| match database.begin_read()?.open_table(table) {
            Ok(table) => read(&table),
            Err(TableError::TableDoesNotExist(_)) => Ok(T::default()),
            Err(error) => Err(error.into()),
        })
    }

    /// Makes room for a chunk's files and enters its row, which `row` makes of the one it has, and, to `note` it, that it is not
    /// yet where it is shared. What has to go, by the limits or because its time is over, is removed by `remove` before its row
    /// is; keys and bytes are returned.
    pub(crate) fn admit(
        &self,
        key: &ChunkKey,
        row: impl FnOnce(Option<Row>) -> Row,
        note: bool,
        limits: &Limits,
        mut remove: impl FnMut(&ChunkKey) -> Result<()>,
    ) -> Result<Vec<(ChunkKey, u64)>> {
        self.write(|rows, pending| {
            let mut others = all(rows)?;
            let row = row(others.remove(key));
            let gone = victims(&others, Some(&row), limits)?;
            for (victim, _) in &gone {
                remove(victim)?;
                rows.remove(&victim.0)?;
                pending.remove(&victim.0)?;
            }
            rows.insert(&key.0, row.value())?;
            if note {
                pending.insert(&key.0, stamp())?;
            }
            Ok(gone)
        })
    }

    /// Changes rows: `change` is given all of them and returns those to be written and those to be taken out.
    pub(crate) fn change<T>(
        &self,
        change: impl FnOnce(&BTreeMap<ChunkKey, Row>) -> Result<(Changes, T)>,
    ) -> Result<T> {
        self.write(|rows, pending| apply(change, rows, pending))
    }

    /// The same if nobody else is writing; none if somebody is.
    pub(crate) fn try_change<T>(
        &self,
        change: impl FnOnce(&BTreeMap<ChunkKey, Row>) -> Result<(Changes, T)>,
    ) -> Result<Option<T>> {
        self.with("write", |database| match database.try_begin_write() {
            Ok(transaction) => written(transaction, |rows, pending| apply(change, rows, pending)).map(Some),
            Err(TransactionError::WouldBlock) => Ok(None),
            Err(error) => Err(error.into()),
        })
    }

    /// Chunks that are not yet where they are shared, and when that was noted.
    #[cfg(feature = "remote")]
    pub(crate) fn pending(&self) -> Result<Vec<(ChunkKey, u64)>> {
        self.read(PENDING, |table| {
            let note = |entry: Result<_, StorageError>| {
                let (key, noted): (redb::AccessGuard<'_, Key>, redb::AccessGuard<'_, u64>) = entry?;
                Ok((ChunkKey(*key.value()), noted.value()))
            };
            table.iter()?.map(note).collect()
        })
    }

    /// Notes anew that a chunk is not yet where it is shared.
    pub(crate) fn note(&self, key: &ChunkKey) -> Result<()> {
        self.write(|_, pending| {
            pending.insert(&key.0, stamp())?;
            Ok(())
        })
    }

    /// A file of a chunk has its name: whoever removed the chunk meanwhile has taken the row out, and whoever has looked for
    /// the file to share it has not found it.
    pub(crate) fn has_its_name(&self, key: &ChunkKey, row: &Row, note: bool) -> Result<()> {
        self.with("write", |database| {
            let transaction = database.begin_write()?;
            let is_there = transaction.open_table(CHUNKS)?.get(&key.0)?.is_some();
            if is_there && !note {
                // Nothing is to be written.
                return Ok(transaction.abort()?);
            }
            written(transaction, |rows, pending| {
                if !is_there {
                    rows.insert(&key.0, row.value())?;
                }
                if note {
                    pending.insert(&key.0, stamp())?;
                }
                Ok(())
            })
        })
    }

    /// A chunk is where it is shared, unless more of it has been noted since.
    #[cfg(feature = "remote")]
    pub(crate) fn sent(&self, key: &ChunkKey, noted: u64) -> Result<()> {
        self.write(|_, pending| {
            if pending.get(&key.0)?.is_some_and(|now| now.value() == noted) {
                pending.remove(&key.0)?;
            }
            Ok(())
        })
    }

    /// Says that the rows of all files have been made.
    pub(crate) fn complete(&self) -> Result<()> {
        self.with("write", |database| {
            let write = database.begin_write()?;
            write.open_table(COMPLETE)?.insert("", true)?;
            Ok(write.commit()?)
        })?;
        self.complete.store(true, Relaxed);
        Ok(())
    }

    fn write<T>(
        &self,
        write: impl FnOnce(&mut Rows<'_>, &mut Pending<'_>) -> Result<T, Trouble>,
    ) -> Result<T> {
        self.with("write", |database| {
            let transaction = database.begin_write()?;
            let told = write(&mut transaction.open_table(CHUNKS)?, &mut transaction.open_table(PENDING)?)?;
            transaction.commit()?;
            Ok(told)
        })
    }

    /// Does something with the database; after an error of its own it is opened again the next time. Nobody waits here for
    /// what another thread or process does, but whoever begins to write.
    fn with<T>(
        &self,
        action: &'static str,
        use_it: impl FnOnce(&Database) -> Result<T, Trouble>,
    ) -> Result<T> {
        let database = self.database()?;
        // What is wrong with a page is found by whoever comes to it.
        let outcome = catch_unwind(AssertUnwindSafe(|| use_it(&database)))
            .unwrap_or_else(|_| Err(Trouble::Broken(NONSENSE.to_owned())));
        if matches!(outcome, Err(Trouble::Broken(_) | Trouble::Database(_))) {
            self.lock().take();
            self.complete.store(false, Relaxed);
        }
        outcome.map_err(|trouble| trouble.at(action, &self.path))
    }

    /// The open database. One whose file has been set aside or removed by another process is none any more.
    fn database(&self) -> Result<Arc<Database>> {
        let mut slot = self.lock();
        let now = identity(&self.path);
        if let Some((database, _)) = slot.as_ref().filter(|(_, opened)| now.is_some() && *opened == now) {
            return Ok(database.clone());
        }
        if slot.take().is_some() {
            self.complete.store(false, Relaxed);
        }
        let database = Arc::new(self.open()?);
        *slot = Some((database.clone(), identity(&self.path)));
        Ok(database)
    }

    /// Opens it, or makes one. A broken one is set aside.
    fn open(&self) -> Result<Database> {
        match open(&self.path) {
            Ok(database) => return Ok(database),
            Err(Trouble::Broken(_)) => {}
            Err(trouble) => return Err(trouble.at("open", &self.path)),
        }
        // One process sets it aside. Who comes second finds the new one.
        let failed = |source| StoreError::Io { action: "set aside", path: self.path.clone(), source };
        let lock =
            File::options().write(true).create(true).truncate(false).open(self.path.with_file_name(LOCK));
        let lock = lock.map_err(failed)?;
        lock.lock().map_err(failed)?;
        match open(&self.path) {
            Ok(database) => return Ok(database),
            Err(Trouble::Broken(why)) => {
                fs::rename(&self.path, self.path.with_file_name(BROKEN)).map_err(failed)?;
                self.complete.store(false, Relaxed);
                *self.set_aside.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
            }
            Err(trouble) => return Err(trouble.at("open", &self.path)),
        }
        open(&self.path).map_err(|trouble| trouble.at("open", &self.path))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Opened>> {
        self.database.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The database, and which file it is.
type Opened = (Arc<Database>, Option<(u64, u64)>);

/// What tells a file from another of its name.
#[cfg(unix)]
fn identity(path: &Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt as _;
    fs::metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

/// Elsewhere a file that is open is not renamed.
#[cfg(not(unix))]
fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::metadata(path).ok().map(|_| (0, 0))
}

/// Rows to be written, and those to be taken out (none).
pub(crate) type Changes = BTreeMap<ChunkKey, Option<Row>>;

fn written<T>(
    transaction: WriteTransaction,
    write: impl FnOnce(&mut Rows<'_>, &mut Pending<'_>) -> Result<T, Trouble>,
) -> Result<T, Trouble> {
    let told = write(&mut transaction.open_table(CHUNKS)?, &mut transaction.open_table(PENDING)?)?;
    transaction.commit()?;
    Ok(told)
}

fn apply<T>(
    change: impl FnOnce(&BTreeMap<ChunkKey, Row>) -> Result<(Changes, T)>,
    rows: &mut Rows<'_>,
    pending: &mut Pending<'_>,
) -> Result<T, Trouble> {
    let (changes, told) = change(&all(rows)?)?;
    for (key, row) in &changes {
        match row {
            Some(row) => drop(rows.insert(&key.0, row.value())?),
            None => {
                rows.remove(&key.0)?;
                pending.remove(&key.0)?;
            }
        }
    }
    Ok(told)
}

fn all(table: &impl ReadableTable<Key, Value>) -> Result<BTreeMap<ChunkKey, Row>, Trouble> {
    let row = |entry: Result<_, StorageError>| {
        let (key, row): (redb::AccessGuard<'_, Key>, redb::AccessGuard<'_, Value>) = entry?;
        Ok((ChunkKey(*key.value()), Row::of(row.value())))
    };
    table.iter()?.map(row).collect()
}

/// Opens a database, or makes one. A reader never sees one that is half made.
fn open(path: &Path) -> Result<Database, Trouble> {
    if !path.exists() {
        let root = path.parent().unwrap_or(Path::new("."));
        // Readable by its owner only, as temporary files are.
        let made = tempfile::Builder::new().prefix(TEMPORARY).tempfile_in(root).map_err(StorageError::Io)?;
        drop(open_file(made.path())?);
        match made.persist_noclobber(path) {
            Err(error) if error.error.kind() != ErrorKind::AlreadyExists => {
                return Err(StorageError::Io(error.error).into());
            }
            // Another process may have been faster.
            _ => {}
        }
    }
    open_file(path)
}

/// All of it is verified: it is small, and what nobody verifies may end the program.
fn open_file(path: &Path) -> Result<Database, Trouble> {
    let create = || {
        Builder::new()
            .set_cache_size(CACHE)
            .set_concurrency_mode(ConcurrencyMode::MultiWriter)
            .set_check_integrity_on_open(true)
            .create(path)
    };
    match catch_unwind(AssertUnwindSafe(create)) {
        Ok(Ok(database)) => Ok(database),
        Ok(Err(error)) => Err(error.into()),
        Err(_) => Err(Trouble::Broken(NONSENSE.to_owned())),
    }
}

/// Nanoseconds since 1970.
fn stamp() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}
