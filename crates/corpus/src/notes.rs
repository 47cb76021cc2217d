//! Notes of changes that the object store has not been told, and how far this machine has followed the object store.
//!
//! A change is noted in the transaction that makes it, so that no change is lost while the object store is away. The note goes when
//! the object store has confirmed the change.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use redb::{ReadTransaction, ReadableTable, TableDefinition, WriteTransaction};
use serde::{Deserialize, Serialize};

use crate::database::Transacted;
use crate::tables::{METADATA, StoredDocument};

/// Namespace and id to the flags of [`Note`] (u8) and when it was noted, nanoseconds since 1970 (u64).
pub(super) const UNSENT: TableDefinition<(&str, &str), (u8, u64)> = TableDefinition::new("unsent, version 1");
/// `""` to [`SharingState`] as JSON; no row in a file whose documents were never shared.
pub(super) const SHARING: TableDefinition<&str, &[u8]> = TableDefinition::new("sharing, version 1");

/// The changes of a document that the object store has not been told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Note {
    /// The document is stored, with its chunk keys.
    pub(crate) put: bool,
    /// The document's pin was set or taken away.
    pub(crate) pin: bool,
    /// The document is removed.
    pub(crate) removal: bool,
    /// The document was stored before this machine came to the object store, or came back there: a removal that the object store remembers holds.
    pub(crate) before: bool,
    /// The document is removed, and its chunks are deleted on this machine.
    pub(crate) deleted: bool,
}

impl Note {
    const NOTHING: Note = Note { put: false, pin: false, removal: false, before: false, deleted: false };
    pub(crate) const PUT: Note = Note { put: true, ..Note::NOTHING };
    pub(crate) const PIN: Note = Note { pin: true, ..Note::NOTHING };
    pub(crate) const REMOVAL: Note = Note { removal: true, ..Note::NOTHING };

    fn flags(self) -> u8 {
        u8::from(self.put)
            | u8::from(self.pin) << 1
            | u8::from(self.removal) << 2
            | u8::from(self.before) << 3
            | u8::from(self.deleted) << 4
    }

    pub(super) fn of_flags(flags: u8) -> Note {
        let has = |bit: u8| flags & 1 << bit != 0;
        Note { put: has(0), pin: has(1), removal: has(2), before: has(3), deleted: has(4) }
    }

    /// This note and a later one as one.
    fn then(self, later: Note) -> Note {
        if later.removal {
            return Note::REMOVAL;
        }
        // A document that is stored again before its removal was told has this machine's pin, not the one that it had.
        Note {
            put: self.put || later.put,
            pin: self.pin || later.pin || self.removal && later.put,
            removal: self.removal && !later.put,
            before: if later.put { later.before && (self.before || !self.put) } else { self.before },
            deleted: self.deleted && !later.put,
        }
    }
}

/// A noted document.
#[cfg(feature = "remote")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unsent {
    pub(crate) namespace: String,
    pub(crate) id: String,
    pub(crate) note: Note,
    /// When it was noted, nanoseconds since 1970.
    pub(crate) noted: u64,
    /// The entity tag of the document's object, once it is told.
    pub(crate) e_tag: Option<String>,
}

/// How far this machine has followed an object store.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct SharingState {
    /// The id that the object store's documents have as a whole; empty before it is known, and where there is none.
    pub(crate) library: String,
    /// The object store's address.
    pub(crate) url: String,
    /// The time of the latest change that was followed, milliseconds since 1970.
    pub(crate) cursor: u64,
    /// When the changes were last followed, seconds since 1970.
    pub(crate) polled: u64,
    /// When all documents were last listed, seconds since 1970; 0 before they were.
    pub(crate) listed: u64,
}

/// Time since 1970.
pub(crate) fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Notes a change of a document.
pub(super) fn note(transaction: &WriteTransaction, namespace: &str, id: &str, note: Note) -> Transacted<()> {
    let mut unsent = transaction.open_table(UNSENT)?;
    let before = unsent.get((namespace, id))?.map(|row| row.value());
    let (flags, noted) = before.unwrap_or_default();
    let note = Note::of_flags(flags).then(note);
    // Two changes within the clock's resolution have two times all the same.
    let noted = (now().as_nanos() as u64).max(noted + 1);
    unsent.insert((namespace, id), (note.flags(), noted))?;
    Ok(())
}

/// Takes note that the chunks of a removed document are deleted on this machine. False if the object store need not be told of the removal.
pub(super) fn note_deleted(transaction: &WriteTransaction, namespace: &str, id: &str) -> Transacted<bool> {
    let mut unsent = transaction.open_table(UNSENT)?;
    let row = unsent.get((namespace, id))?.map(|row| row.value());
    let Some((note, noted)) = row.map(|(flags, noted)| (Note::of_flags(flags), noted)) else {
        return Ok(false);
    };
    if note.removal {
        unsent.insert((namespace, id), (Note { deleted: true, ..note }.flags(), noted))?;
    }
    Ok(note.removal)
}

/// Whether the chunks of a removed document are deleted on this machine, while the object store has not been told of the removal.
pub(super) fn is_deleted(transaction: &ReadTransaction, namespace: &str, id: &str) -> Transacted<bool> {
    let row = transaction.open_table(UNSENT)?.get((namespace, id))?;
    Ok(row.is_some_and(|row| Note::of_flags(row.value().0).deleted))
}

/// Whether a document is noted as stored and not yet told.
pub(super) fn is_unsent(transaction: &ReadTransaction, namespace: &str, id: &str) -> Transacted<bool> {
    let row = transaction.open_table(UNSENT)?.get((namespace, id))?;
    Ok(row.is_some_and(|row| Note::of_flags(row.value().0).put))
}

/// Whether a document with this note follows what other machines have changed: its own pin stays, and all else goes with the others.
#[cfg(feature = "remote")]
pub(crate) fn may_follow(note: Option<Note>) -> bool {
    !note.is_some_and(|note| note.put || note.removal)
}

/// Whether a removal by another machine holds for a document with this note.
#[cfg(feature = "remote")]
pub(crate) fn may_go(note: Option<Note>) -> bool {
    may_follow(note) || note.is_some_and(|note| note.before && !note.removal)
}

/// Forgets the note of a document.
#[cfg(feature = "remote")]
pub(super) fn forget(transaction: &WriteTransaction, namespace: &str, id: &str) -> Transacted<()> {
    transaction.open_table(UNSENT)?.remove((namespace, id))?;
    Ok(())
}

/// The note of a document, if it has one.
#[cfg(feature = "remote")]
pub(super) fn noted(transaction: &WriteTransaction, namespace: &str, id: &str) -> Transacted<Option<Note>> {
    let row = transaction.open_table(UNSENT)?.get((namespace, id))?.map(|row| row.value().0);
    Ok(row.map(Note::of_flags))
}

/// Notes all documents as stored, and takes up `state`. `before` is that of their notes. A document that comes to an object store for the
/// first time brings its pin along; one that comes back has the pin that it has there.
pub(super) fn note_all(transaction: &WriteTransaction, state: &SharingState, before: bool) -> Transacted<()> {
    for row in transaction.open_table(METADATA)?.iter()? {
        let (key, value) = row?;
        let (namespace, id) = key.value();
        let stored: StoredDocument = serde_json::from_slice(value.value())?;
        note(transaction, namespace, id, Note { pin: stored.pinned && !before, before, ..Note::PUT })?;
    }
    set_state(transaction, state)
}

/// Remembers how far this machine has followed the object store.
pub(super) fn set_state(transaction: &WriteTransaction, state: &SharingState) -> Transacted<()> {
    transaction.open_table(SHARING)?.insert("", serde_json::to_vec(state)?.as_slice())?;
    Ok(())
}

/// Whether a file's documents are shared, or were before.
pub(super) fn was_shared(transaction: &ReadTransaction) -> Transacted<bool> {
    Ok(transaction.open_table(SHARING)?.get("")?.is_some())
}

/// Whether changes are to be noted: if the documents are shared, or were before and may be so again. Notes all of them in a file
/// that is shared for the first time.
pub(super) fn takes_notes(transaction: &WriteTransaction, is_shared: bool) -> Transacted<bool> {
    transaction.open_table(UNSENT)?;
    let was_shared = transaction.open_table(SHARING)?.get("")?.is_some();
    if is_shared && !was_shared {
        note_all(transaction, &SharingState::default(), false)?;
    }
    Ok(is_shared || was_shared)
}
