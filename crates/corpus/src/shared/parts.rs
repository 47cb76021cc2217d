//! What objects a document has, and what they hold.

use std::time::{SystemTime, UNIX_EPOCH};

use refrain_store::{ChunkKey, ListedObject, StoreError};

use super::SharedDocuments;
use super::objects::{
    DOCUMENT, KEYS, MOST_BYTES, MOST_DOCUMENT, PINNED, Place, REMOVAL, REMOVED, Unusable, decode_document,
    decode_keys,
};
use crate::error::Result;
use crate::replica::FoundDocument;

/// Seconds for which objects say that a document was removed. A machine that was away for longer takes a document without objects for
/// a removed one.
pub(super) const REMOVED_FOR: u64 = 30 * 86400;
/// Seconds by which a machine's clock and that of the object store may differ before a removed document counts as one that was stored again.
pub(super) const CLOCKS_DIFFER: u64 = 86400;

/// The objects of a document, by the last parts of their names.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Parts {
    /// Whether the document itself is there. Without it there is no document, whatever else there is.
    pub(super) document: bool,
    /// The entity tag of the document's object.
    pub(super) e_tag: Option<String>,
    pub(super) pinned: bool,
    pub(super) keys: Vec<String>,
    pub(super) removals: Vec<String>,
    /// When the document was last removed, by the object store's clock. It may have been stored again since.
    pub(super) removed: Option<SystemTime>,
    /// When the last of them was written, by the object store's clock.
    pub(super) written: Option<SystemTime>,
}

impl Parts {
    /// Whether the document's object is another than the one with this tag, as far as that is known.
    pub(super) fn is_another(&self, e_tag: Option<&String>) -> bool {
        self.e_tag.is_some() && self.e_tag.as_ref() != e_tag
    }

    /// Whether a machine has removed the document that was created at this time, seconds since 1970. A document whose objects are gone
    /// without that was lost: the object store was emptied, or has expired them. What remembers a removal stays when the document is
    /// stored again, and says nothing of a document that is clearly younger. One that was created after `now` has the time of a clock that is
    /// ahead.
    pub(super) fn is_removed(&self, created: u64, now: u64) -> bool {
        let is_older = |removed: u64| removed.saturating_add(CLOCKS_DIFFER) >= created.min(now);
        !self.document && (!self.removals.is_empty() || self.removed_at().is_some_and(is_older))
    }

    /// Whether a machine has removed the document after this time, seconds since 1970, by clocks as they are.
    pub(super) fn is_removed_since(&self, created: u64) -> bool {
        !self.document && self.removed_at().is_some_and(|removed| removed >= created)
    }

    /// When the document was last removed, in seconds since 1970 by the object store's clock.
    fn removed_at(&self) -> Option<u64> {
        Some(self.removed?.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs())
    }

    /// Adds an object of the document.
    pub(super) fn add(&mut self, part: &str, object: &ListedObject) {
        match part {
            DOCUMENT => (self.document, self.e_tag) = (true, object.e_tag.clone()),
            PINNED => self.pinned = true,
            REMOVED => self.removed = Some(object.written),
            part if part.starts_with(KEYS) => self.keys.push(part.to_owned()),
            part if part.starts_with(REMOVAL) => self.removals.push(part.to_owned()),
            _ => return,
        }
        self.written = self.written.max(Some(object.written));
    }
}

impl SharedDocuments {
    /// The objects of a document, as they are now.
    pub(super) fn parts(&self, place: &Place) -> Result<Parts> {
        let mut parts = Parts::default();
        for object in self.objects.list(&place.folder(), None)? {
            if let Some((of, part)) = Place::parse(&object.name)
                && of == *place
            {
                parts.add(part, &object);
            }
        }
        Ok(parts)
    }

    /// Whether there is an object of the document, or of its removal.
    pub(super) fn has_objects(&self, place: &Place) -> Result<bool> {
        let parts = self.parts(place)?;
        Ok(parts.document || !parts.removals.is_empty())
    }

    /// The document of a place, or the reason for which it is not used; none if there is none.
    pub(super) fn document_in(&self, place: &Place) -> Result<Option<Result<FoundDocument, Unusable>>> {
        let name = place.name(DOCUMENT);
        let Some(bytes) = self.bytes(&name, MOST_DOCUMENT)? else { return Ok(None) };
        let found = bytes.and_then(|bytes| decode_document(&bytes, place));
        if let Err(why) = &found {
            self.unusable(&name, why);
        }
        Ok(Some(found))
    }

    /// The namespace and the chunk keys of an object of keys; none if there is none, or none that can be used.
    pub(super) fn keys_in(&self, place: &Place, part: &str) -> Result<Option<(String, Vec<ChunkKey>)>> {
        let name = place.name(part);
        let Some(bytes) = self.bytes(&name, MOST_BYTES)? else { return Ok(None) };
        let found = bytes.and_then(|bytes| decode_keys(&bytes, place));
        Ok(found.map_err(|why| self.unusable(&name, &why)).ok())
    }

    /// The bytes of an object; none if there is none.
    pub(super) fn bytes(&self, name: &str, most: u64) -> Result<Option<Result<Vec<u8>, Unusable>>> {
        match self.objects.get(name, most) {
            Err(error @ StoreError::ObjectTooLarge { .. }) => {
                Ok(Some(Err(Unusable::Broken(error.to_string()))))
            }
            found => Ok(found?.map(Ok)),
        }
    }

    /// The chunk keys of several objects of keys.
    pub(super) fn all_keys(&self, place: &Place, parts: &[String]) -> Result<Vec<ChunkKey>> {
        let mut keys = Vec::new();
        for part in parts {
            keys.extend(self.keys_in(place, part)?.into_iter().flat_map(|(_, keys)| keys));
        }
        Ok(keys)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An earlier removal is no removal of a document that was stored again since, unless a clock that was ahead says so.
    #[test]
    fn a_removal_is_that_of_a_document_that_is_not_clearly_younger() {
        let (day, removed_at) = (CLOCKS_DIFFER, 1_000 * CLOCKS_DIFFER);
        let removed = Some(UNIX_EPOCH + std::time::Duration::from_secs(removed_at));
        let parts = Parts { removed, ..Parts::default() };
        let later = removed_at + 9 * day;
        for (created, now, is_removed) in [
            (removed_at - day, later, true),
            (removed_at + day, later, true),
            (removed_at + 2 * day, later, false),
            (removed_at + 2 * day, removed_at, true),
        ] {
            assert_eq!(parts.is_removed(created, now), is_removed, "{created} {now}");
            assert!(!Parts { document: true, ..parts.clone() }.is_removed(created, now));
        }
        let begun = Parts { removals: vec!["removal".to_owned()], ..parts };
        assert!(begun.is_removed(removed_at + 2 * day, later));
        assert!(!Parts::default().is_removed(0, later));
    }
}
