//! The index's tables inside one transaction: the rows, and the orders and totals that follow from them.
//!
//! `chunks` holds the rows. `by last use`, `by expiry` and `totals` are derived from it: [`Tables::replace`] is the only
//! place that writes any of the four, so they agree in every committed transaction. Storing a chunk and choosing the chunks
//! that make room for it therefore read a few rows, however many there are.

use redb::{
    ReadTransaction, ReadableTable, StorageError, Table, TableDefinition, TableError, WriteTransaction,
};

use super::error::IndexError;
use crate::ChunkKey;

/// Row of each chunk: bytes, last use (ms since 1970), when the row was entered and when the chunk expires (s since 1970,
/// 0 never), pinned, namespace. A change of any table below takes new names for all four.
const CHUNKS: TableDefinition<'static, Key, RowValue> = TableDefinition::new("chunks, version 2");
/// Two entries a chunk, one in the order of the whole folder (no namespace) and one in that of its namespace: namespace,
/// pinned, last use, key.
const BY_LAST_USE: TableDefinition<'static, UseKey, ()> = TableDefinition::new("by last use, version 2");
/// One entry for each chunk that expires: when (s since 1970), key.
const BY_EXPIRY: TableDefinition<'static, ExpiryKey, ()> = TableDefinition::new("by expiry, version 2");
/// Chunks, bytes, and bytes of pinned chunks of the whole folder (no namespace) and of each namespace.
const TOTALS: TableDefinition<'static, Option<&'static str>, TotalsValue> =
    TableDefinition::new("totals, version 2");
/// One row once every file that is older than the index has its row.
const COMPLETE: TableDefinition<'static, &str, bool> = TableDefinition::new("complete, version 2");
/// Chunks that are not yet in the object store, and when each was noted (ns since 1970).
const PENDING: TableDefinition<'static, Key, u64> = TableDefinition::new("pending, version 1");
/// Rows of earlier builds, which kept neither orders nor totals.
const CHUNKS_1: TableDefinition<'static, Key, RowValue> = TableDefinition::new("chunks, version 1");
/// [`COMPLETE`] of earlier builds.
const COMPLETE_1: TableDefinition<'static, &str, bool> = TableDefinition::new("complete");

type Key = &'static [u8; 32];
type RowValue = (u64, u64, u64, u64, bool, &'static str);
type UseKey = (Option<&'static str>, bool, u64, Key);
type ExpiryKey = (u64, Key);
type TotalsValue = (u64, u64, u64);

/// A chunk in the index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct IndexRow {
    /// Bytes of the chunk's file and of the files beside it.
    pub(crate) bytes: u64,
    /// Last use, in milliseconds since 1970.
    pub(crate) last_used: u64,
    /// When the row was entered, in seconds since 1970.
    pub(crate) entered: u64,
    /// When the chunk expires, in seconds since 1970; 0 is never.
    pub(crate) expires: u64,
    /// Whether the chunk is kept however much room is needed.
    pub(crate) pinned: bool,
    pub(crate) namespace: String,
}

impl IndexRow {
    /// Whether the chunk has expired at `now`, in seconds since 1970.
    pub(crate) fn is_expired(&self, now: u64) -> bool {
        self.expires != 0 && self.expires <= now
    }

    /// The scopes whose bounds the chunk counts for: the whole folder, and its namespace.
    fn scopes(&self) -> [Option<&str>; 2] {
        [None, Some(&self.namespace)]
    }

    fn value(&self) -> (u64, u64, u64, u64, bool, &str) {
        (self.bytes, self.last_used, self.entered, self.expires, self.pinned, &self.namespace)
    }

    fn from_value(
        (bytes, last_used, entered, expires, pinned, namespace): (u64, u64, u64, u64, bool, &str),
    ) -> IndexRow {
        IndexRow { bytes, last_used, entered, expires, pinned, namespace: namespace.to_owned() }
    }
}

/// Sums over the rows of the whole folder, or of one namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) chunks: u64,
    pub(crate) bytes: u64,
    /// Bytes of pinned chunks, part of `bytes`.
    pub(crate) pinned_bytes: u64,
}

impl Totals {
    fn from_value((chunks, bytes, pinned_bytes): (u64, u64, u64)) -> Totals {
        Totals { chunks, bytes, pinned_bytes }
    }

    /// The sums with a row added, or taken out.
    fn with(self, row: &IndexRow, is_added: bool) -> Totals {
        let change = if is_added { u64::saturating_add } else { u64::saturating_sub };
        Totals {
            chunks: change(self.chunks, 1),
            bytes: change(self.bytes, row.bytes),
            pinned_bytes: change(self.pinned_bytes, if row.pinned { row.bytes } else { 0 }),
        }
    }
}

/// The tables as one write transaction sees and changes them.
pub(crate) struct Tables<'t> {
    chunks: Table<'t, Key, RowValue>,
    by_last_use: Table<'t, UseKey, ()>,
    by_expiry: Table<'t, ExpiryKey, ()>,
    totals: Table<'t, Option<&'static str>, TotalsValue>,
    pending: Table<'t, Key, u64>,
}

impl<'t> Tables<'t> {
    pub(super) fn open(transaction: &'t WriteTransaction) -> Result<Tables<'t>, IndexError> {
        Ok(Tables {
            chunks: transaction.open_table(CHUNKS)?,
            by_last_use: transaction.open_table(BY_LAST_USE)?,
            by_expiry: transaction.open_table(BY_EXPIRY)?,
            totals: transaction.open_table(TOTALS)?,
            pending: transaction.open_table(PENDING)?,
        })
    }

    pub(crate) fn row(&self, key: &ChunkKey) -> Result<Option<IndexRow>, IndexError> {
        row(&self.chunks, key)
    }

    /// All rows, ascending by key.
    pub(crate) fn rows(&self) -> Result<Vec<(ChunkKey, IndexRow)>, IndexError> {
        all(&self.chunks)
    }

    pub(crate) fn totals(&self, scope: Option<&str>) -> Result<Totals, IndexError> {
        totals(&self.totals, scope)
    }

    /// The namespaces that have rows, ascending.
    pub(crate) fn namespaces(&self) -> Result<Vec<String>, IndexError> {
        let mut namespaces = Vec::new();
        for entry in self.totals.range(Some("")..)? {
            namespaces.extend(entry?.0.value().map(str::to_owned));
        }
        Ok(namespaces)
    }

    /// Chunks that have expired at `now` (s since 1970), the earliest first.
    pub(crate) fn expired(&self, now: u64) -> Result<Vec<(ChunkKey, IndexRow)>, IndexError> {
        let mut expired = Vec::new();
        for entry in self.by_expiry.range((0, &[0; 32])..=(now, &[0xff; 32]))? {
            let key = ChunkKey(*entry?.0.value().1);
            expired.extend(self.row(&key)?.map(|row| (key, row)));
        }
        Ok(expired)
    }

    /// Chunks of a scope that are not pinned, the least recently used first. A row is read when its turn comes.
    pub(crate) fn least_recently_used(
        &self,
        scope: Option<&str>,
    ) -> Result<impl Iterator<Item = Result<(ChunkKey, IndexRow), IndexError>>, IndexError> {
        let range = self.by_last_use.range((scope, false, 0, &[0; 32])..(scope, true, 0, &[0; 32]))?;
        Ok(range.filter_map(|entry| {
            let key = entry.map(|(entry, _)| ChunkKey(*entry.value().3));
            key.map_err(IndexError::from)
                .and_then(|key| Ok(self.row(&key)?.map(|row| (key, row))))
                .transpose()
        }))
    }

    /// Writes a chunk's row, or takes it out (none), and returns the row that it had.
    fn replace(&mut self, key: &ChunkKey, new: Option<&IndexRow>) -> Result<Option<IndexRow>, IndexError> {
        let old = match new {
            Some(row) => self.chunks.insert(&key.0, row.value())?,
            None => self.chunks.remove(&key.0)?,
        };
        let old = old.map(|row| IndexRow::from_value(row.value()));
        if old.as_ref() == new {
            return Ok(old);
        }
        let counted = |row: &IndexRow| (row.bytes, row.pinned, row.namespace.clone());
        let counts_differ = old.as_ref().map(counted) != new.map(counted);
        for (row, is_added) in [(old.as_ref(), false), (new, true)] {
            let Some(row) = row else { continue };
            for scope in row.scopes() {
                let entry = (scope, row.pinned, row.last_used, &key.0);
                if is_added {
                    self.by_last_use.insert(entry, ())?;
                } else {
                    self.by_last_use.remove(entry)?;
                }
                if counts_differ {
                    self.count(scope, row, is_added)?;
                }
            }
            if row.expires != 0 && is_added {
                self.by_expiry.insert((row.expires, &key.0), ())?;
            } else if row.expires != 0 {
                self.by_expiry.remove((row.expires, &key.0))?;
            }
        }
        Ok(old)
    }

    fn count(&mut self, scope: Option<&str>, row: &IndexRow, is_added: bool) -> Result<(), IndexError> {
        let totals = self.totals(scope)?.with(row, is_added);
        if totals == Totals::default() {
            self.totals.remove(scope)?;
        } else {
            self.totals.insert(scope, (totals.chunks, totals.bytes, totals.pinned_bytes))?;
        }
        Ok(())
    }

    pub(crate) fn set(&mut self, key: &ChunkKey, row: &IndexRow) -> Result<(), IndexError> {
        self.replace(key, Some(row)).map(drop)
    }

    /// Takes a chunk's row out and returns it. The note that the chunk is not yet in the object store stays.
    pub(crate) fn take(&mut self, key: &ChunkKey) -> Result<Option<IndexRow>, IndexError> {
        self.replace(key, None)
    }

    /// Takes out all that is known of a chunk.
    pub(crate) fn remove(&mut self, key: &ChunkKey) -> Result<(), IndexError> {
        self.replace(key, None)?;
        self.pending.remove(&key.0)?;
        Ok(())
    }

    /// When a chunk was noted as not yet in the object store (ns since 1970).
    #[cfg(feature = "remote")]
    pub(crate) fn noted(&self, key: &ChunkKey) -> Result<Option<u64>, IndexError> {
        Ok(self.pending.get(&key.0)?.map(|noted| noted.value()))
    }

    /// Notes that a chunk is not yet in the object store.
    pub(crate) fn note(&mut self, key: &ChunkKey, now: u64) -> Result<(), IndexError> {
        self.pending.insert(&key.0, now)?;
        Ok(())
    }

    /// Takes out the note that a chunk is not yet in the object store.
    #[cfg(feature = "remote")]
    pub(crate) fn unnote(&mut self, key: &ChunkKey) -> Result<(), IndexError> {
        self.pending.remove(&key.0)?;
        Ok(())
    }
}

/// The tables as one read transaction sees them. A table that has never been written has no rows.
pub(super) struct Snapshot(pub(super) ReadTransaction);

impl Snapshot {
    fn table<K: redb::Key + 'static, V: redb::Value + 'static, T: Default>(
        &self,
        table: TableDefinition<'static, K, V>,
        read: impl FnOnce(&redb::ReadOnlyTable<K, V>) -> Result<T, IndexError>,
    ) -> Result<T, IndexError> {
        match self.0.open_table(table) {
            Ok(table) => read(&table),
            Err(TableError::TableDoesNotExist(_)) => Ok(T::default()),
            Err(error) => Err(error.into()),
        }
    }

    pub(super) fn is_complete(&self) -> Result<bool, IndexError> {
        self.table(COMPLETE, |table| Ok(table.get("")?.is_some_and(|complete| complete.value())))
    }

    pub(super) fn row(&self, key: &ChunkKey) -> Result<Option<IndexRow>, IndexError> {
        self.table(CHUNKS, |table| row(table, key))
    }

    /// All rows, ascending by key.
    pub(super) fn rows(&self) -> Result<Vec<(ChunkKey, IndexRow)>, IndexError> {
        self.table(CHUNKS, all)
    }

    /// The rows of a namespace, ascending by key.
    pub(super) fn rows_of(&self, namespace: &str) -> Result<Vec<(ChunkKey, IndexRow)>, IndexError> {
        let keys: Vec<ChunkKey> = self.table(BY_LAST_USE, |table| {
            let range =
                (Some(namespace), false, 0, &[0; 32])..=(Some(namespace), true, u64::MAX, &[0xff; 32]);
            table.range(range)?.map(|entry| Ok(ChunkKey(*entry?.0.value().3))).collect()
        })?;
        let mut rows = self.table(CHUNKS, |table| {
            let known = keys.iter().map(|key| Ok(row(table, key)?.map(|row| (*key, row))));
            known.filter_map(Result::transpose).collect::<Result<Vec<_>, _>>()
        })?;
        rows.sort_unstable_by_key(|(key, _)| *key);
        Ok(rows)
    }

    pub(super) fn totals(&self, scope: Option<&str>) -> Result<Totals, IndexError> {
        self.table(TOTALS, |table| totals(table, scope))
    }

    /// Chunks that are not yet in the object store, and when each was noted (ns since 1970).
    #[cfg(feature = "remote")]
    pub(super) fn pending(&self) -> Result<Vec<(ChunkKey, u64)>, IndexError> {
        self.table(PENDING, |table| {
            let note = |entry: Result<_, StorageError>| {
                let (key, noted): (redb::AccessGuard<'_, Key>, redb::AccessGuard<'_, u64>) = entry?;
                Ok((ChunkKey(*key.value()), noted.value()))
            };
            table.iter()?.map(note).collect()
        })
    }

    /// Whether an earlier build has left rows here.
    pub(super) fn has_earlier_rows(&self) -> Result<bool, IndexError> {
        match self.0.open_table(CHUNKS_1) {
            Ok(_) => Ok(true),
            Err(TableError::TableDoesNotExist(_)) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

/// Takes over the rows of an earlier build, pins and times to live included, unless the chunk has a row already.
pub(super) fn take_over_earlier_rows(transaction: &WriteTransaction) -> Result<(), IndexError> {
    let earlier = all(&transaction.open_table(CHUNKS_1)?)?;
    let was_complete = transaction.open_table(COMPLETE_1)?.get("")?.is_some_and(|complete| complete.value());
    let mut tables = Tables::open(transaction)?;
    for (key, row) in &earlier {
        if tables.row(key)?.is_none() {
            tables.set(key, row)?;
        }
    }
    drop(tables);
    if was_complete {
        set_complete(transaction)?;
    }
    transaction.delete_table(CHUNKS_1)?;
    transaction.delete_table(COMPLETE_1)?;
    Ok(())
}

/// Says that every file that is older than the index has its row.
pub(super) fn set_complete(transaction: &WriteTransaction) -> Result<(), IndexError> {
    transaction.open_table(COMPLETE)?.insert("", true)?;
    Ok(())
}

/// Whether a chunk has a row.
pub(super) fn has_row(transaction: &WriteTransaction, key: &ChunkKey) -> Result<bool, IndexError> {
    Ok(row(&transaction.open_table(CHUNKS)?, key)?.is_some())
}

fn row(table: &impl ReadableTable<Key, RowValue>, key: &ChunkKey) -> Result<Option<IndexRow>, IndexError> {
    count_row_read();
    Ok(table.get(&key.0)?.map(|row| IndexRow::from_value(row.value())))
}

fn all(table: &impl ReadableTable<Key, RowValue>) -> Result<Vec<(ChunkKey, IndexRow)>, IndexError> {
    let row = |entry: Result<_, StorageError>| {
        let (key, row): (redb::AccessGuard<'_, Key>, redb::AccessGuard<'_, RowValue>) = entry?;
        count_row_read();
        Ok((ChunkKey(*key.value()), IndexRow::from_value(row.value())))
    };
    table.iter()?.map(row).collect()
}

fn totals(
    table: &impl ReadableTable<Option<&'static str>, TotalsValue>,
    scope: Option<&str>,
) -> Result<Totals, IndexError> {
    count_row_read();
    Ok(table.get(scope)?.map_or_else(Totals::default, |totals| Totals::from_value(totals.value())))
}

#[cfg(not(test))]
fn count_row_read() {}

#[cfg(test)]
fn count_row_read() {
    ROWS_READ.set(ROWS_READ.get() + 1);
}

#[cfg(test)]
thread_local! {
    /// Rows of the index that this thread has read, so that tests can hold what an operation costs.
    pub(crate) static ROWS_READ: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}
