//! Bringing the replica of one document in line with its objects.

use super::SharedDocuments;
use super::objects::{Place, Unusable, place_of};
use super::parts::Parts;
use crate::document_store::{Change, ChangeKind, KeysOf};
use crate::error::{Error, Result};
use crate::notes::{Note, may_follow, may_go, now};

impl SharedDocuments {
    /// Brings the replica of a document in line with its objects, unless this machine has changed it and they are not told. Gives what
    /// has changed in the replica, if something has. A document whose objects are broken or gone is brought to the object store again if
    /// `sends` is true. One that a machine has removed is removed here, and one without objects as well if `may_be_forgotten` is true: its
    /// removal may lie so far back that no object remembers it.
    pub(super) fn look(
        &self,
        namespace: &str,
        id: &str,
        sends: bool,
        may_be_forgotten: bool,
        keys_of: Option<&KeysOf<'_>>,
    ) -> Result<Option<Change>> {
        let place = place_of(namespace, id);
        let _turn = self.turn(&place);
        let note = self.local.note_of(namespace, id)?.map(|unsent| unsent.note);
        if !may_go(note) {
            return Ok(None);
        }
        let parts = self.parts(&place)?;
        let known = match self.local.get(namespace, id) {
            Err(Error::NotFound(_)) => None,
            known => Some(known?),
        };
        let change = |kind| Some(Change::new(namespace, id, kind));
        let now = now().as_secs();
        match known {
            // Its note is told first, unless another machine has removed it.
            Some(known) if !may_follow(note) && !parts.is_removed(known.created, now) => Ok(None),
            None if parts.document => self.bring(&place, &parts),
            None => Ok(None),
            Some(known) if parts.document => {
                // It may have been removed and stored again since this machine last looked.
                let is_another = parts.is_another(known.e_tag.as_ref());
                if !is_another && parts.keys.is_empty() && parts.pinned == known.pinned {
                    return Ok(None);
                }
                let in_place = if is_another { self.document_in(&place)? } else { None };
                let is_broken = matches!(in_place, Some(Err(Unusable::Broken(_))));
                let found = in_place.and_then(Result::ok);
                let found = found.as_ref().map(|found| (found, parts.e_tag.clone()));
                let keys = self.all_keys(&place, &parts.keys)?;
                self.local.adopt(namespace, id, found, parts.pinned, &keys)?;
                // At once and without a note: a note that is told late would bring a document back that was removed meanwhile.
                if sends
                    && is_broken
                    && let Err(error) = self.publish(namespace, &place, Note::PUT)
                {
                    tracing::warn!(%error, "the broken object of document {id} is replaced later");
                }
                let pinned = self.local.get(namespace, id).map_or(known.pinned, |found| found.pinned);
                Ok(if pinned == known.pinned { None } else { change(ChangeKind::Pinned(pinned)) })
            }
            // The second look: the first one may have begun before another machine removed the document, and ended after.
            Some(known)
                if !may_be_forgotten
                    && !parts.is_removed(known.created, now)
                    && !self.parts(&place)?.is_removed(known.created, now) =>
            {
                if sends {
                    let url = self.objects.url();
                    tracing::warn!("{url} has lost document {id}, which is brought there again");
                    self.publish(namespace, &place, Note::PUT)?;
                }
                Ok(None)
            }
            Some(_) => {
                let Some(keys_of) = keys_of else { return Ok(change(ChangeKind::Removed)) };
                let mut keys = self.all_keys(&place, &parts.removals)?;
                keys.extend(keys_of(namespace, self.local.chunks(namespace, id)?)?);
                let removed = self.local.remove_withdrawn(namespace, id, &keys)?;
                let change =
                    |unpinned| Change { unpinned, ..Change::new(namespace, id, ChangeKind::Removed) };
                Ok(removed.map(change))
            }
        }
    }

    /// Brings a document that the replica lacks, if it is there.
    pub(super) fn look_for(&self, namespace: &str, id: &str) -> Result<()> {
        let place = place_of(namespace, id);
        let _turn = self.turn(&place);
        if self.local.note_of(namespace, id)?.is_some() || self.local.contains(namespace, id)? {
            return Ok(());
        }
        let parts = self.parts(&place)?;
        if parts.document {
            self.bring(&place, &parts)?;
        }
        Ok(())
    }

    /// Brings the document of a place, with the objects beside it that are given, if the replica lacks it.
    pub(super) fn bring_listed(&self, place: &Place, parts: &Parts) -> Result<Option<Change>> {
        let _turn = self.turn(place);
        self.bring(place, parts)
    }

    /// Brings the document of a place. The place's turn is the caller's.
    fn bring(&self, place: &Place, parts: &Parts) -> Result<Option<Change>> {
        let Some(Ok(mut found)) = self.document_in(place)? else { return Ok(None) };
        found.keys.extend(self.all_keys(place, &parts.keys)?);
        let is_new = self.local.insert_found(&found, parts.pinned, parts.e_tag.clone())?;
        Ok(is_new.then(|| Change::new(found.namespace, place.id.clone(), ChangeKind::Put)))
    }

    /// Takes up a removal that another machine has begun and not finished.
    pub(super) fn take_up_removal(&self, place: &Place, parts: &Parts) -> Result<()> {
        let _turn = self.turn(place);
        for part in &parts.removals {
            if let Some((namespace, keys)) = self.keys_in(place, part)?
                && !self.local.contains(&namespace, &place.id)?
            {
                self.local.extend_removal(&namespace, &place.id, &keys)?;
            }
        }
        Ok(())
    }
}
