//! Comparing the replica with the names of all objects.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, SystemTime};

use super::SharedDocuments;
use super::objects::{
    DOCUMENTS, LIBRARY, LibraryObject, MOST_BYTES, Place, REMOVED, decode, encode, place_of,
};
use super::parallel::in_parallel;
use super::parts::{CLOCKS_DIFFER, Parts, REMOVED_FOR};
use crate::document_store::{Applied, Change, KeysOf};
use crate::error::{Error, Result};
use crate::notes::SharingState;

/// Documents that are brought before the changes are applied.
pub(super) const BATCH: usize = 256;
/// A removal that has not been finished for so long was left by a machine that stopped.
const ABANDONED_AFTER: Duration = Duration::from_secs(600);
/// So long stays the object that says that a document was removed: longer than machines count on, for clocks that differ.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(REMOVED_FOR + CLOCKS_DIFFER);

/// A document of which replica and objects differ by their names.
enum Difference {
    /// The replica lacks it.
    Lacking(Place, Parts),
    /// It may be removed, stored again, or have another pin: namespace and id.
    Stale(String, String),
    /// Its removal was not finished.
    Abandoned(Place, Parts),
    /// Its removal lies so far back that it need not be remembered.
    Forgotten(Place),
}

impl SharedDocuments {
    /// Learns the id of all documents as a whole. Where it is another than the one that this machine has followed, nothing is known of
    /// what it has sent before, and all is noted again: an object store that was emptied takes no document from its machines.
    pub(super) fn check_library(&self, state: &mut SharingState, creates: bool) -> Result<()> {
        let (library, url) = (self.library(creates)?, self.objects.url().to_owned());
        if state.library == library {
            state.url = url;
            return Ok(());
        }
        let is_first = state.library.is_empty();
        *state = SharingState { library, url, ..SharingState::default() };
        // When the documents are shared for the first time they are all noted already.
        if is_first { self.local.set_sharing_state(state) } else { self.local.share_anew(state) }
    }

    /// The id of all documents as a whole. If there is none it is made at random, or empty unless `creates` is true.
    fn library(&self, creates: bool) -> Result<String> {
        for _ in 0..2 {
            if let Some(bytes) = self.bytes(LIBRARY, MOST_BYTES)? {
                let found: Result<LibraryObject, _> = bytes.and_then(|bytes| decode(&bytes));
                let broken = |why| Error::Sharing(format!("{LIBRARY} of {}: {why}", self.objects.url()));
                return found.map(|library| library.id).map_err(broken);
            }
            if !creates {
                return Ok(String::new());
            }
            let mut random = [0; 16];
            getrandom::fill(&mut random).map_err(|error| Error::Sharing(error.to_string()))?;
            let id = refrain_store::hex::encode(&random);
            self.objects.create(LIBRARY, encode(LibraryObject { id }))?;
        }
        Err(Error::Sharing(format!("{LIBRARY} of {} is gone again", self.objects.url())))
    }

    /// Brings the replica in line with all objects, but for those of documents whose errors it gives. `sends` and `may_be_forgotten` are
    /// those of [`look`](SharedDocuments::look).
    pub(super) fn list_all(
        &self,
        sends: bool,
        may_be_forgotten: bool,
        keys_of: Option<&KeysOf<'_>>,
        applied: &mut Applied<'_>,
    ) -> Result<Vec<Error>> {
        let mut failed = Vec::new();
        for batch in self.differences()?.chunks(BATCH) {
            let outcomes = in_parallel(batch, |difference| match difference {
                Difference::Lacking(place, parts) => self.bring_listed(place, parts),
                Difference::Stale(namespace, id) => {
                    self.look(namespace, id, sends, may_be_forgotten, keys_of)
                }
                Difference::Abandoned(place, parts) => self.take_up_removal(place, parts).map(|()| None),
                // A machine that may not delete objects leaves it to machines that may.
                Difference::Forgotten(place) => {
                    let _ = self.objects.delete(&place.name(REMOVED));
                    Ok(None)
                }
            });
            failed.extend(self.apply(outcomes, applied)?);
        }
        Ok(failed)
    }

    /// Applies the changes of a batch, and gives the errors of documents that do not concern the others.
    pub(super) fn apply(
        &self,
        outcomes: Vec<Result<Option<Change>>>,
        applied: &mut Applied<'_>,
    ) -> Result<Vec<Error>> {
        let (mut changes, mut failed, mut outcome) = (Vec::new(), Vec::new(), Ok(()));
        for looked in outcomes {
            match looked {
                Ok(change) => changes.extend(change),
                Err(error) if self.is_of_one(&error) => failed.push(error),
                Err(error) => outcome = Err(error),
            }
        }
        if !changes.is_empty() {
            changes.sort_unstable_by(|a: &Change, b| (&a.namespace, &a.id).cmp(&(&b.namespace, &b.id)));
            // What has come is applied in any case: it is in the replica.
            applied(changes)?;
        }
        outcome.map(|()| failed)
    }

    /// The documents that are to be looked at.
    fn differences(&self) -> Result<Vec<Difference>> {
        let mut listed: BTreeMap<Place, Parts> = BTreeMap::new();
        for object in self.objects.list(DOCUMENTS, None)? {
            if let Some((place, part)) = Place::parse(&object.name) {
                listed.entry(place).or_default().add(part, &object);
            }
        }
        let mut known = HashMap::new();
        for (namespace, stored) in self.local.all()? {
            known.insert(place_of(&namespace, &stored.id), (namespace, stored));
        }
        let mut differences = Vec::new();
        for (place, parts) in listed {
            match known.remove(&place) {
                Some((namespace, stored)) => {
                    let is_same = parts.document && stored.pinned == parts.pinned;
                    if !is_same || parts.is_another(stored.e_tag.as_ref()) {
                        differences.push(Difference::Stale(namespace, stored.id));
                    }
                }
                None if parts.document => differences.push(Difference::Lacking(place, parts)),
                None if !parts.removals.is_empty() && is_past(parts.written, ABANDONED_AFTER) => {
                    differences.push(Difference::Abandoned(place, parts));
                }
                None if is_past(parts.removed, FORGOTTEN_AFTER) => {
                    differences.push(Difference::Forgotten(place));
                }
                None => {}
            }
        }
        let gone = known.into_values().map(|(namespace, stored)| Difference::Stale(namespace, stored.id));
        differences.extend(gone);
        Ok(differences)
    }
}

fn is_past(time: Option<SystemTime>, after: Duration) -> bool {
    let age = time.and_then(|time| SystemTime::now().duration_since(time).ok());
    age.is_some_and(|age| age >= after)
}
