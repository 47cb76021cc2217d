//! Telling the object store what is noted.

use refrain_store::ChunkKey;

use super::SharedDocuments;
use super::objects::{
    ChangesObject, DOCUMENT, DocumentObject, KEYS, PINNED, Place, Unusable, change_name, encode, encode_keys,
    place_of,
};
use super::parallel::in_parallel;
use crate::error::{Error, Result};
use crate::notes::{Note, Unsent, now};

/// Notes that are told together.
const BATCH: usize = 256;
/// How often a change is tried that others' changes of the same document undo.
const TRIES: usize = 4;

impl SharedDocuments {
    /// Tells the object store all that is noted.
    pub(super) fn send_all(&self) -> Result<()> {
        let (mut after, mut outcome): (Option<Unsent>, _) = (None, Ok(()));
        loop {
            let behind = after.as_ref().map(|last| (last.namespace.as_str(), last.id.as_str()));
            let batch = self.local.unsent(behind, BATCH)?;
            let Some(last) = batch.last().cloned() else { return outcome };
            let noted: Vec<_> = batch.into_iter().map(|unsent| (unsent.namespace, unsent.id)).collect();
            if let Err(error) = self.send(&noted) {
                if !self.is_of_one(&error) {
                    return Err(error);
                }
                outcome = Err(error);
            }
            after = Some(last);
        }
    }

    /// Tells the object store what is noted of some documents.
    pub(super) fn send(&self, noted: &[(String, String)]) -> Result<()> {
        let outcomes = in_parallel(noted, |(namespace, id)| self.send_one(namespace, id));
        let (mut told, mut outcome) = (Vec::with_capacity(outcomes.len()), Ok(()));
        for sent in outcomes {
            match sent {
                Ok(sent) => told.extend(sent),
                Err(error) => outcome = Err(error),
            }
        }
        // Notes stay until all of them are announced, and are sent again. A note is announced also where its object was as it should be: an
        // earlier attempt may have changed the object and not announced it.
        told.chunks(BATCH).try_for_each(|told| self.announce(told))?;
        self.local.sent(&told)?;
        outcome
    }

    /// Tells the other machines where to look.
    fn announce(&self, told: &[Unsent]) -> Result<()> {
        let documents = told.iter().map(|unsent| (unsent.namespace.clone(), unsent.id.clone())).collect();
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(|error| Error::Sharing(error.to_string()))?;
        let name = change_name(now().as_millis() as u64, u64::from_le_bytes(random));
        self.objects.put(&name, encode(ChangesObject { documents }))?;
        Ok(())
    }

    /// Tells the object store what is noted of a document; nothing if nothing is.
    fn send_one(&self, namespace: &str, id: &str) -> Result<Option<Unsent>> {
        let place = place_of(namespace, id);
        let _turn = self.turn(&place);
        // Another thread may have told it since, or noted something else.
        let Some(note) = self.local.note_of(namespace, id)? else { return Ok(None) };
        let mut e_tag = None;
        match note.note {
            Note { removal: true, .. } => self.withdraw(namespace, &place)?,
            Note { put: true, .. } => e_tag = self.publish(namespace, &place, note.note)?,
            _ => self.send_pin(namespace, &place)?,
        }
        Ok(Some(Unsent { e_tag, ..note }))
    }

    /// Creates a document's object, with its pin. Where it is there, adopts what others know of it, and adds what only this machine
    /// knows. Gives the entity tag of the document's object, if that was written.
    pub(super) fn publish(&self, namespace: &str, place: &Place, note: Note) -> Result<Option<String>> {
        let document = match self.local.document(namespace, &place.id) {
            // It was removed meanwhile, which is noted by now.
            Err(Error::NotFound(_)) => return Ok(None),
            document => document?,
        };
        let (stored, keys) =
            (self.local.get(namespace, &place.id)?, self.local.chunk_keys(namespace, &place.id)?);
        let object = encode(DocumentObject {
            namespace: namespace.into(),
            title: document.title.into(),
            text: document.text.into(),
            created: stored.created,
            tokens: stored.tokens,
            chunks: stored.chunks,
            chunk_keys: keys.iter().map(ToString::to_string).collect(),
        });
        let name = place.name(DOCUMENT);
        if note.before && self.parts(place)?.is_removed_since(stored.created) {
            // The listing that follows removes it here as well.
            return Ok(None);
        }
        for _ in 0..TRIES {
            let mut written = self.objects.create(&name, object.clone())?;
            // Others may have changed the pin of a document that comes back. The listing that follows takes it up, and tells of it.
            let keeps_pin = note.before && !note.pin && written.is_none();
            let mut is_beside = false;
            if written.is_none() {
                // The tag of the object that is read, or of one before it.
                let parts = self.parts(place)?;
                match self.document_in(place)? {
                    None => continue,
                    // What a newer program wrote of the same text is its own.
                    Some(Err(Unusable::Newer(_))) => {}
                    Some(Err(Unusable::Broken(_))) => {
                        written = Some(self.objects.put(&name, object.clone())?)
                    }
                    Some(Ok(found)) => {
                        let beside = self.all_keys(place, &parts.keys)?;
                        is_beside =
                            self.add_keys(namespace, place, &keys, &[&found.keys[..], &beside].concat())?;
                        let found = Some((&found, parts.e_tag.clone()));
                        let pinned = if keeps_pin { stored.pinned } else { parts.pinned };
                        self.local.adopt(namespace, &place.id, found, pinned, &beside)?;
                    }
                }
            }
            let is_pinned = self.local.get(namespace, &place.id).is_ok_and(|stored| stored.pinned);
            if !keeps_pin && (note.pin || is_pinned) {
                self.write_pin(place, is_pinned)?;
                is_beside = true;
            }
            // A machine that removes the document lists what lies beside it after it has deleted the document. So it sees all that is
            // written beside a document which is still there afterwards.
            if !is_beside || self.parts(place)?.document {
                return Ok(written.and_then(|written| written.e_tag));
            }
        }
        Err(Error::Sharing(format!("document {} is removed and stored again all the time", place.id)))
    }

    /// Writes those of the keys that are not known there, and says whether there were some.
    fn add_keys(
        &self,
        namespace: &str,
        place: &Place,
        keys: &[ChunkKey],
        known: &[ChunkKey],
    ) -> Result<bool> {
        let new: Vec<ChunkKey> = keys.iter().filter(|key| !known.contains(key)).copied().collect();
        if new.is_empty() {
            return Ok(false);
        }
        let (hash, bytes) = encode_keys(namespace, &new);
        self.objects.put(&place.name(&format!("{KEYS}{hash}")), bytes)?;
        Ok(true)
    }

    /// Tells whether a document is pinned.
    fn send_pin(&self, namespace: &str, place: &Place) -> Result<()> {
        let Ok(stored) = self.local.get(namespace, &place.id) else { return Ok(()) };
        self.write_pin(place, stored.pinned)?;
        if stored.pinned && !self.parts(place)?.document {
            // It was removed on another machine: no pin of it is left.
            self.objects.delete(&place.name(PINNED))?;
        }
        Ok(())
    }

    fn write_pin(&self, place: &Place, is_pinned: bool) -> Result<()> {
        let name = place.name(PINNED);
        if is_pinned {
            self.objects.create(&name, Vec::new())?;
        } else {
            self.objects.delete(&name)?;
        }
        Ok(())
    }
}
