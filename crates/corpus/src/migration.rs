//! Documents of the first version's file, which had one table with everything about a document in one row.

use redb::{ReadableTable, TableDefinition, WriteTransaction};
use refrain_engine::Document;
use refrain_store::ChunkKey;
use serde::Deserialize;

/// `NAMESPACE/ID` to the document as JSON.
pub(super) const TABLE: TableDefinition<&str, &[u8]> = TableDefinition::new("documents, version 1");

/// A row of version 1.
#[derive(Deserialize)]
struct Row {
    document: Document,
    created: u64,
    pinned: bool,
    tokens: usize,
    chunks: Vec<String>,
}

/// A document of version 1.
pub(super) struct Migrated {
    pub(super) document: Document,
    /// Seconds since 1970.
    pub(super) created: u64,
    pub(super) pinned: bool,
    /// Tokens of all chunks.
    pub(super) tokens: usize,
    pub(super) keys: Vec<ChunkKey>,
}

/// Gives every document of version 1 with its namespace to `insert`, then removes their table.
///
/// # Errors
/// If a row cannot be read, or `insert` fails.
pub(super) fn from_version_1<E>(
    transaction: &WriteTransaction,
    mut insert: impl FnMut(&str, Migrated) -> Result<(), E>,
) -> Result<(), E>
where
    E: From<redb::StorageError> + From<redb::TableError> + From<serde_json::Error>,
{
    {
        let table = transaction.open_table(TABLE)?;
        for row in table.iter()? {
            let (key, value) = row?;
            let namespace = key.value().rsplit_once('/').map_or("", |(namespace, _)| namespace);
            let Row { document, created, pinned, tokens, chunks } = serde_json::from_slice(value.value())?;
            let keys = chunks.iter().filter_map(|key| key.parse().ok()).collect();
            insert(namespace, Migrated { document, created, pinned, tokens, keys })?;
        }
    }
    transaction.delete_table(TABLE)?;
    Ok(())
}
