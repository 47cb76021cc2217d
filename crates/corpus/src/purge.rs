//! Purging removed documents from the file.
//!
//! The database gives a removed row's pages free and leaves their bytes in the file until something else is written there.
//! The file is therefore made anew without them.

use redb::{
    Key, MultimapTableDefinition, ReadTransaction, ReadableMultimapTable, ReadableTable, TableDefinition,
    TableHandle, Value, WriteTransaction,
};

use crate::database::Transacted;
use crate::notes::{SHARING, UNSENT};
use crate::tables::{CHUNK_KEYS, CHUNK_USERS, METADATA, REMOVALS, STORED_BYTES, TEXTS, TOKENS, UNPURGED};

/// Says that the file holds bytes of removed documents, until it is made anew.
pub(super) fn mark_unpurged(transaction: &WriteTransaction) -> Transacted<()> {
    transaction.open_table(UNPURGED)?.insert("", ())?;
    Ok(())
}

/// Marks the file of an earlier build, which removed documents and left their bytes.
pub(super) fn mark_earlier_file(transaction: &WriteTransaction) -> Transacted<()> {
    let mut is_empty = true;
    for table in transaction.list_tables()? {
        if table.name() == REMOVALS.name() {
            return Ok(());
        }
        is_empty = false;
    }
    if is_empty { Ok(()) } else { mark_unpurged(transaction) }
}

/// Whether the file holds bytes of removed documents.
pub(super) fn is_unpurged(transaction: &ReadTransaction) -> Transacted<bool> {
    Ok(transaction.open_table(UNPURGED)?.get("")?.is_some())
}

/// Copies everything that is to stay to an empty database.
pub(super) fn copy_all(from: &ReadTransaction, to: &WriteTransaction) -> Transacted<()> {
    copy(from, to, METADATA)?;
    copy(from, to, TEXTS)?;
    copy(from, to, TOKENS)?;
    copy(from, to, STORED_BYTES)?;
    copy(from, to, REMOVALS)?;
    copy(from, to, UNSENT)?;
    copy(from, to, SHARING)?;
    copy_multimap(from, to, CHUNK_KEYS)?;
    copy_multimap(from, to, CHUNK_USERS)?;
    to.open_table(UNPURGED)?;
    Ok(())
}

fn copy<K: Key + 'static, V: Value + 'static>(
    from: &ReadTransaction,
    to: &WriteTransaction,
    table: TableDefinition<'_, K, V>,
) -> Transacted<()> {
    let mut to = to.open_table(table)?;
    for row in from.open_table(table)?.iter()? {
        let (key, value) = row?;
        to.insert(key.value(), value.value())?;
    }
    Ok(())
}

fn copy_multimap<K: Key + 'static, V: Key + 'static>(
    from: &ReadTransaction,
    to: &WriteTransaction,
    table: MultimapTableDefinition<'_, K, V>,
) -> Transacted<()> {
    let mut to = to.open_multimap_table(table)?;
    for row in from.open_multimap_table(table)?.iter()? {
        let (key, values) = row?;
        for value in values {
            to.insert(key.value(), value?.value())?;
        }
    }
    Ok(())
}
