//! The documents of a machine as a replica of those in an object store.

use redb::{ReadableTable, ReadableTableMetadata};
use refrain_engine::Document;
use refrain_store::ChunkKey;

use crate::error::Result;
use crate::local::LocalDocuments;
use crate::notes::{Note, SHARING, SharingState, UNSENT, Unsent, may_follow, note_all, noted, set_state};
use crate::tables::{METADATA, Segmented, StoredDocument, document_id, insert, parsed, write_keys};

/// A document that an object store has.
#[derive(Debug, PartialEq)]
pub(crate) struct FoundDocument {
    pub(crate) namespace: String,
    pub(crate) document: Document,
    /// Seconds since 1970.
    pub(crate) created: u64,
    /// Tokens and number of the chunks that another machine has cut.
    pub(crate) tokens: usize,
    pub(crate) chunks: u32,
    pub(crate) keys: Vec<ChunkKey>,
}

impl LocalDocuments {
    /// Inserts a document that the object store has, unless it is here, or is removed and the object store has not been told. Its
    /// chunks are not cut, so that no answer draws on it yet. Says whether it is inserted.
    pub(crate) fn insert_found(
        &self,
        found: &FoundDocument,
        pinned: bool,
        e_tag: Option<String>,
    ) -> Result<bool> {
        let namespace = found.namespace.as_str();
        self.database.write(|transaction| {
            let id = document_id(&found.document);
            let is_known = transaction.open_table(METADATA)?.get((namespace, id.as_str()))?.is_some();
            if is_known || !may_follow(noted(transaction, namespace, &id)?) {
                return Ok(false);
            }
            let uncut = Segmented { chunks: Vec::new(), keys: &found.keys, segmentation: "" };
            // Another machine has counted it against the quota.
            let FoundDocument { created, tokens, chunks, .. } = *found;
            let stored = insert(transaction, namespace, &found.document, &uncut, None, created)?;
            let stored = StoredDocument { pinned, tokens, chunks, e_tag, ..stored };
            let json = serde_json::to_vec(&stored)?;
            transaction.open_table(METADATA)?.insert((namespace, id.as_str()), json.as_slice())?;
            Ok(true)
        })
    }

    /// Takes up what the object store knows of a document: what its object says, with the object's entity tag, if that is given; whether it
    /// is pinned, unless this machine has changed that and not told it; and further chunk keys. A document that is not here stays away.
    pub(crate) fn adopt(
        &self,
        namespace: &str,
        id: &str,
        found: Option<(&FoundDocument, Option<String>)>,
        pinned: bool,
        keys: &[ChunkKey],
    ) -> Result<()> {
        self.database.write(|transaction| {
            let mut metadata = transaction.open_table(METADATA)?;
            let known: Option<StoredDocument> = parsed(metadata.get((namespace, id))?)?;
            let Some(mut known) = known else { return Ok(()) };
            if let Some((found, e_tag)) = found {
                (known.created, known.e_tag) = (found.created, e_tag);
                write_keys(transaction, namespace, &mut known, &found.keys)?;
            }
            if !noted(transaction, namespace, id)?.is_some_and(|note| note.pin) {
                known.pinned = pinned;
            }
            write_keys(transaction, namespace, &mut known, keys)?;
            metadata.insert((namespace, id), serde_json::to_vec(&known)?.as_slice())?;
            Ok(())
        })
    }

    /// Notes, at most `limit` of them, from those behind `after` on.
    pub(crate) fn unsent(&self, after: Option<(&str, &str)>, limit: usize) -> Result<Vec<Unsent>> {
        self.database.read(|transaction| {
            let table = transaction.open_table(UNSENT)?;
            let mut found = Vec::new();
            for row in table.range(after.unwrap_or_default()..)? {
                let (key, value) = row?;
                let ((namespace, id), (flags, noted)) = (key.value(), value.value());
                if found.len() == limit {
                    break;
                }
                if after != Some((namespace, id)) {
                    let (namespace, id) = (namespace.to_owned(), id.to_owned());
                    found.push(Unsent { namespace, id, note: Note::of_flags(flags), noted, e_tag: None });
                }
            }
            Ok(found)
        })
    }

    /// The note of a document, if it has one.
    pub(crate) fn note_of(&self, namespace: &str, id: &str) -> Result<Option<Unsent>> {
        self.database.read(|transaction| {
            let row = transaction.open_table(UNSENT)?.get((namespace, id))?.map(|row| row.value());
            let (namespace, id) = (namespace.to_owned(), id.to_owned());
            Ok(row.map(|(flags, noted)| Unsent {
                namespace,
                id,
                note: Note::of_flags(flags),
                noted,
                e_tag: None,
            }))
        })
    }

    /// Number of notes.
    pub(crate) fn count_unsent(&self) -> Result<u64> {
        self.database.read(|transaction| Ok(transaction.open_table(UNSENT)?.len()?))
    }

    /// Forgets notes that the object store was told of, but for those of documents that were changed again meanwhile, and remembers the
    /// entity tags of their objects.
    pub(crate) fn sent(&self, told: &[Unsent]) -> Result<()> {
        if told.is_empty() {
            return Ok(());
        }
        self.database.write(|transaction| {
            let (mut unsent, mut metadata) =
                (transaction.open_table(UNSENT)?, transaction.open_table(METADATA)?);
            for Unsent { namespace, id, noted, e_tag, .. } in told {
                let key = (namespace.as_str(), id.as_str());
                let stored: Option<StoredDocument> = parsed(metadata.get(key)?)?;
                if let (Some(stored), Some(_)) = (stored, e_tag) {
                    let stored = StoredDocument { e_tag: e_tag.clone(), ..stored };
                    metadata.insert(key, serde_json::to_vec(&stored)?.as_slice())?;
                }
                let is_same = unsent.get(key)?.is_some_and(|row| row.value().1 == *noted);
                if is_same {
                    unsent.remove(key)?;
                }
            }
            Ok(())
        })
    }

    pub(crate) fn sharing_state(&self) -> Result<SharingState> {
        self.database.read(|transaction| {
            let found = parsed(transaction.open_table(SHARING)?.get("")?)?;
            Ok(found.unwrap_or_default())
        })
    }

    pub(crate) fn set_sharing_state(&self, state: &SharingState) -> Result<()> {
        self.database.write(|transaction| set_state(transaction, state))
    }

    /// Begins to follow another object store: all documents are noted, since it may know none of them.
    pub(crate) fn share_anew(&self, state: &SharingState) -> Result<()> {
        self.database.write(|transaction| note_all(transaction, state, true))
    }
}
