//! Removing a document's objects.

use std::collections::BTreeSet;
use std::time::Duration;

use refrain_store::ChunkKey;

use super::SharedDocuments;
use super::objects::{DOCUMENT, PINNED, Place, REMOVAL, REMOVED, encode_keys, is_id, place_of};
use crate::error::{Error, Result};

/// How often objects are looked for that others write beside a document while it is removed.
const TRIES: usize = 4;
/// Age at which what is left of an object in a folder is not that of a writer at work.
const LEFT_AFTER: Duration = Duration::from_secs(60);

impl SharedDocuments {
    /// Deletes a document's object and those beside it. An object with the keys of its chunks stays until the removal is finished, so
    /// that any machine can finish it, and one that says that the document was removed stays for as long as machines may be away.
    pub(super) fn withdraw(&self, namespace: &str, place: &Place) -> Result<()> {
        // Before the document's object goes: a document without objects counts as lost, and is brought again.
        self.objects.put(&place.name(REMOVED), Vec::new())?;
        for _ in 0..TRIES {
            let parts = self.parts(place)?;
            let mut keys = self.all_keys(place, &[parts.keys.clone(), parts.removals.clone()].concat())?;
            if parts.document
                && let Some(Ok(found)) = self.document_in(place)?
            {
                keys.extend(found.keys);
            }
            let keys = self.local.extend_removal(namespace, &place.id, &keys)?;
            let (hash, bytes) = encode_keys(namespace, &keys);
            self.objects.create(&place.name(&format!("{REMOVAL}{hash}")), bytes)?;
            if parts.document {
                self.objects.delete(&place.name(DOCUMENT))?;
            }
            for part in parts.keys.iter().chain(parts.pinned.then(|| PINNED.to_owned()).iter()) {
                self.objects.delete(&place.name(part))?;
            }
            // A process that was killed while it wrote the document has left the text in the folder. The removal holds without this.
            if let Err(error) = self.objects.remove_leftovers(&place.folder(), LEFT_AFTER) {
                let id = &place.id;
                tracing::warn!(%error, "what killed processes have left of document {id} is removed by `refrain store prune --delete`");
            }
            // A machine that writes beside the document looks for the document afterwards. So what is written after this listing belongs
            // to a document that is stored anew.
            let left = self.parts(place)?;
            if left.document || left.keys.is_empty() && !left.pinned {
                return Ok(());
            }
        }
        Err(Error::Sharing(format!("document {} is stored and removed again all the time", place.id)))
    }

    /// Deletes the objects that remember a removal, after all chunks of `keys` are deleted.
    ///
    /// # Errors
    /// If they remember further chunks, which are added to the removal here.
    pub(super) fn delete_removals(&self, namespace: &str, id: &str, keys: &[ChunkKey]) -> Result<()> {
        if !is_id(id) {
            return Ok(());
        }
        let place = place_of(namespace, id);
        let _turn = self.turn(&place);
        let deleted: BTreeSet<&ChunkKey> = keys.iter().collect();
        for part in self.parts(&place)?.removals {
            let remembered = self.keys_in(&place, &part)?.map(|(_, keys)| keys).unwrap_or_default();
            let further: Vec<ChunkKey> =
                remembered.into_iter().filter(|key| !deleted.contains(key)).collect();
            let unused = self.local.extend_removal(namespace, id, &further)?;
            if !unused.iter().all(|key| deleted.contains(key)) {
                return Err(Error::Sharing(
                    "another machine removes the document at the same time".to_owned(),
                ));
            }
            self.objects.delete(&place.name(&part))?;
        }
        Ok(())
    }
}
