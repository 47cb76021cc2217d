//! The tables of stored documents, and how a document is written to them.
//!
//! | table | key | value |
//! |---|---|---|
//! | [`METADATA`] | namespace, id | [`StoredDocument`] as JSON |
//! | [`TEXTS`] | namespace, id | [`Document`] as JSON |
//! | [`TOKENS`] | namespace, id, chunk index | token ids, little-endian `u32` |
//! | [`CHUNK_KEYS`] | namespace, id | the document's chunk keys, several a document |
//! | [`CHUNK_USERS`] | namespace, chunk key | ids of the documents that have the chunk |
//! | [`STORED_BYTES`] | namespace | bytes of all titles and texts |
//! | [`REMOVALS`] | namespace, id | chunk keys of a removed document whose chunks may not all be deleted, 32 bytes each |
//! | [`UNPURGED`] | `""` | one row while the file holds bytes of removed documents |
//! | [`UNSENT`](crate::notes::UNSENT) | namespace, id | what the object store still has to be told of the document |
//! | [`SHARING`](crate::notes::SHARING) | `""` | how far the object store was followed |

use redb::{MultimapTableDefinition, ReadableTable, TableDefinition, WriteTransaction};
use refrain_engine::Document;
use refrain_store::ChunkKey;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::database::Transacted;
use crate::error::Error;
use crate::migration;

pub(super) const METADATA: TableDefinition<(&str, &str), &[u8]> = TableDefinition::new("metadata, version 2");
pub(super) const TEXTS: TableDefinition<(&str, &str), &[u8]> = TableDefinition::new("texts, version 2");
pub(super) const TOKENS: TableDefinition<(&str, &str, u32), &[u8]> =
    TableDefinition::new("tokens, version 2");
pub(super) const CHUNK_KEYS: MultimapTableDefinition<(&str, &str), &[u8; 32]> =
    MultimapTableDefinition::new("chunk keys, version 2");
pub(super) const CHUNK_USERS: MultimapTableDefinition<(&str, &[u8; 32]), &str> =
    MultimapTableDefinition::new("chunk users, version 2");
pub(super) const STORED_BYTES: TableDefinition<&str, u64> = TableDefinition::new("stored bytes, version 2");
pub(super) const REMOVALS: TableDefinition<(&str, &str), &[u8]> = TableDefinition::new("removals, version 1");
pub(super) const UNPURGED: TableDefinition<&str, ()> = TableDefinition::new("unpurged, version 1");

/// Most characters of a title that is shown: of one that was given, and of a text's first line.
const GIVEN_TITLE: usize = 1000;
const FIRST_LINE: usize = 80;

/// A document without its text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StoredDocument {
    /// Its id in its namespace.
    pub id: String,
    /// The title, or the first line of a text without one.
    pub title: String,
    /// Seconds since 1970.
    pub created: u64,
    /// Whether its chunks stay in the chunk store whatever room is needed.
    pub pinned: bool,
    /// Bytes of the text.
    pub bytes: u64,
    /// Bytes of title and text, which the quota counts.
    pub(super) stored_bytes: u64,
    /// Tokens of all chunks.
    pub tokens: usize,
    /// Keys of the document's chunks, over all methods that it was ingested for.
    pub chunk_keys: usize,
    /// Chunks whose token ids are stored.
    pub chunks: u32,
    /// The tokenizer and chunk size that cut those chunks.
    pub segmentation: String,
    /// Whether the object store has it, so that every machine that shares documents answers for it; none where documents are not shared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub published: Option<bool>,
    /// The entity tag of its object, once that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) e_tag: Option<String>,
}

/// A document cut into chunks.
#[derive(Clone, Debug)]
pub(crate) struct Segmented<'a> {
    /// Token ids of each chunk.
    pub(crate) chunks: Vec<&'a [u32]>,
    /// Keys of the chunks in the chunk store.
    pub(crate) keys: &'a [ChunkKey],
    /// The tokenizer and chunk size that cut them.
    pub(crate) segmentation: &'a str,
}

/// The id of a document.
pub fn document_id(document: &Document) -> String {
    let mut hasher = blake3::Hasher::new_derive_key("refrain document, version 1");
    hasher.update(&(document.title.len() as u64).to_le_bytes());
    hasher.update(document.title.as_bytes()).update(document.text.as_bytes());
    format!("doc-{}", &hasher.finalize().to_hex()[..24])
}

/// Bytes of a document that the quota counts.
pub(super) fn stored_bytes(document: &Document) -> u64 {
    (document.title.len() + document.text.len()) as u64
}

/// A document's title as it was given, or the first line of its text without a heading's marks. Dots stand at the end of a longer one.
pub(crate) fn display_title(document: &Document) -> String {
    let given = document.title.trim();
    if !given.is_empty() {
        return first_characters(given, GIVEN_TITLE);
    }
    let line = document.text.trim().lines().next().unwrap_or_default().trim();
    let heading = line.trim_start_matches('#').trim();
    first_characters(if heading.is_empty() { line } else { heading }, FIRST_LINE)
}

/// A text of at most so many characters, the last of which are dots where it goes on.
fn first_characters(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        None => text.to_owned(),
        Some(_) => text.chars().take(most - 1).chain(['…']).collect(),
    }
}

/// Creates the tables, and moves the documents of an earlier version's file into them.
pub(super) fn create_tables(transaction: &WriteTransaction) -> Transacted<()> {
    transaction.open_table(REMOVALS)?;
    transaction.open_table(UNPURGED)?;
    transaction.open_table(METADATA)?;
    transaction.open_table(TEXTS)?;
    transaction.open_table(TOKENS)?;
    transaction.open_multimap_table(CHUNK_KEYS)?;
    transaction.open_multimap_table(CHUNK_USERS)?;
    transaction.open_table(STORED_BYTES)?;
    migration::from_version_1(transaction, |namespace, known| {
        // Its chunks are cut when the server starts.
        let segmented = Segmented { chunks: Vec::new(), keys: &known.keys, segmentation: "" };
        let stored = insert(transaction, namespace, &known.document, &segmented, None, known.created)?;
        let stored = StoredDocument { pinned: known.pinned, tokens: known.tokens, ..stored };
        let json = serde_json::to_vec(&stored)?;
        transaction.open_table(METADATA)?.insert((namespace, stored.id.as_str()), json.as_slice())?;
        Ok(())
    })
}

/// Inserts a document of the time `created`, or adds chunks and keys to the one that is there already.
///
/// # Errors
/// If the quota has no room for a new document, or a table cannot be written.
pub(super) fn insert(
    transaction: &WriteTransaction,
    namespace: &str,
    document: &Document,
    segmented: &Segmented<'_>,
    quota: Option<u64>,
    created: u64,
) -> Transacted<StoredDocument> {
    let id = document_id(document);
    let mut metadata = transaction.open_table(METADATA)?;
    let known: Option<StoredDocument> = parsed(metadata.get((namespace, id.as_str()))?)?;
    let mut stored = match known {
        Some(known) => known,
        None => {
            let stored_bytes = stored_bytes(document);
            count_bytes(transaction, namespace, stored_bytes, quota)?;
            let json = serde_json::to_vec(document)?;
            transaction.open_table(TEXTS)?.insert((namespace, id.as_str()), json.as_slice())?;
            StoredDocument {
                id: id.clone(),
                title: display_title(document),
                created,
                pinned: false,
                bytes: document.text.len() as u64,
                stored_bytes,
                tokens: 0,
                chunk_keys: 0,
                chunks: 0,
                segmentation: String::new(),
                published: None,
                e_tag: None,
            }
        }
    };
    write_chunks(transaction, namespace, &mut stored, segmented)?;
    metadata.insert((namespace, id.as_str()), serde_json::to_vec(&stored)?.as_slice())?;
    Ok(stored)
}

/// Writes the chunks' token ids and keys, and enters them into the metadata.
pub(super) fn write_chunks(
    transaction: &WriteTransaction,
    namespace: &str,
    stored: &mut StoredDocument,
    segmented: &Segmented<'_>,
) -> Transacted<()> {
    remove_tokens(transaction, namespace, &stored.id)?;
    let mut table = transaction.open_table(TOKENS)?;
    for (index, tokens) in segmented.chunks.iter().enumerate() {
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        table.insert((namespace, stored.id.as_str(), index as u32), bytes.as_slice())?;
    }
    write_keys(transaction, namespace, stored, segmented.keys)?;
    stored.tokens = segmented.chunks.iter().map(|chunk| chunk.len()).sum();
    stored.chunks = segmented.chunks.len() as u32;
    segmented.segmentation.clone_into(&mut stored.segmentation);
    Ok(())
}

/// Writes keys of chunks, and counts those that are new in the metadata.
pub(super) fn write_keys(
    transaction: &WriteTransaction,
    namespace: &str,
    stored: &mut StoredDocument,
    keys: &[ChunkKey],
) -> Transacted<()> {
    let mut of_document = transaction.open_multimap_table(CHUNK_KEYS)?;
    let mut users = transaction.open_multimap_table(CHUNK_USERS)?;
    for key in keys {
        let is_known = of_document.insert((namespace, stored.id.as_str()), &key.0)?;
        stored.chunk_keys += usize::from(!is_known);
        users.insert((namespace, &key.0), stored.id.as_str())?;
    }
    Ok(())
}

/// Removes the token ids of all chunks of a document.
pub(super) fn remove_tokens(transaction: &WriteTransaction, namespace: &str, id: &str) -> Transacted<()> {
    let mut table = transaction.open_table(TOKENS)?;
    // The number of chunks in the metadata may be that of another machine, which has nothing to do with the rows here.
    Ok(table.retain_in((namespace, id, 0)..=(namespace, id, u32::MAX), |_, _| false)?)
}

/// Counts a new document's bytes, where the quota has room for them.
fn count_bytes(
    transaction: &WriteTransaction,
    namespace: &str,
    new: u64,
    quota: Option<u64>,
) -> Transacted<()> {
    let mut table = transaction.open_table(STORED_BYTES)?;
    let stored = table.get(namespace)?.map_or(0, |row| row.value());
    if let Some(quota) = quota.filter(|quota| stored + new > *quota) {
        return Err(Error::QuotaExceeded { stored, quota, new }.into());
    }
    table.insert(namespace, stored + new)?;
    Ok(())
}

/// A row of JSON.
pub(super) fn parsed<T: DeserializeOwned>(
    row: Option<redb::AccessGuard<'_, &'static [u8]>>,
) -> Transacted<Option<T>> {
    Ok(row.map(|row| serde_json::from_slice(row.value())).transpose()?)
}

/// Chunk keys of a row of [`REMOVALS`].
pub(super) fn removed_keys(bytes: &[u8]) -> Vec<ChunkKey> {
    bytes.as_chunks().0.iter().map(|key| ChunkKey(*key)).collect()
}

/// Token ids of a row of [`TOKENS`].
pub(super) fn token_ids(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
}
