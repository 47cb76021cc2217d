//! Following what other machines change.

use std::collections::{BTreeSet, HashSet};
use std::sync::PoisonError;
use std::time::SystemTime;

use super::SharedDocuments;
use super::listing::BATCH;
use super::objects::{CHANGES, ChangesObject, MOST_BYTES, before_changes, decode, is_id, time_of_change};
use super::parallel::in_parallel;
use super::parts::REMOVED_FOR;
use crate::document_store::{Applied, KeysOf};
use crate::error::{Error, Result};
use crate::notes::{SharingState, now};

/// Seconds after which all documents are listed, and not only what was announced since.
const LIST_EVERY: u64 = 600;
/// Seconds for which changes are announced. A machine that was away for half of that lists all documents.
const ANNOUNCED_FOR: u64 = 3600;
/// Milliseconds by which the clocks of two machines may differ. What a clock that is further behind announces is found by the next
/// listing.
const CLOCK_DIFFERENCE: u64 = 120_000;

impl SharedDocuments {
    /// Brings the replica in line with the object store, which is told what is noted before if `sends` is true.
    pub(super) fn follow(
        &self,
        sends: bool,
        keys_of: Option<&KeysOf<'_>>,
        applied: &mut Applied<'_>,
    ) -> Result<()> {
        let mut followed = self.followed.lock().unwrap_or_else(PoisonError::into_inner);
        let outcome = self.follow_once(&mut followed, sends, keys_of, applied);
        let mut stats = self.stats();
        stats.syncs += 1;
        stats.failures += u64::from(outcome.is_err());
        stats.trouble = outcome.as_ref().err().map(ToString::to_string);
        outcome
    }

    fn follow_once(
        &self,
        followed: &mut HashSet<String>,
        sends: bool,
        keys_of: Option<&KeysOf<'_>>,
        applied: &mut Applied<'_>,
    ) -> Result<()> {
        let mut state = self.local.sharing_state()?;
        let began = now().as_secs();
        let since = |then: u64| began.checked_sub(then).unwrap_or(u64::MAX);
        let is_elsewhere = state.library.is_empty() || state.url != self.objects.url();
        let is_due = since(state.listed) >= LIST_EVERY || since(state.polled) >= ANNOUNCED_FOR / 2;
        let lists = is_elsewhere || is_due;
        if lists {
            self.check_library(&mut state, sends)?;
        }
        let sent = if sends { self.send_all() } else { Ok(()) };
        if let Err(error) = &sent
            && !self.is_of_one(error)
        {
            return sent;
        }
        let failed = if lists {
            // A change that is announced after this is followed the next time, whether or not this listing has it.
            state.cursor = self.announced(followed)?;
            // A library that was never listed was not left for a month, and neither was one that was listed later than this clock says.
            let may_be_forgotten = (1..=began.saturating_sub(REMOVED_FOR)).contains(&state.listed);
            state.listed = began;
            self.list_all(sends, may_be_forgotten, keys_of, applied)?
        } else {
            let (cursor, failed) = self.poll(&state, sends, followed, keys_of, applied)?;
            state.cursor = cursor;
            failed
        };
        state.polled = began;
        if keys_of.is_some() {
            self.local.set_sharing_state(&state)?;
        } else {
            followed.clear();
        }
        self.stats().last_sync = Some(SystemTime::now());
        // The next listing looks at them again.
        failed.into_iter().next().map_or(sent, Err)
    }

    /// Marks all that is announced as followed, and deletes what was announced long ago. Gives the time of the last change.
    fn announced(&self, followed: &mut HashSet<String>) -> Result<u64> {
        let now = now().as_millis() as u64;
        followed.clear();
        let (mut old, mut last) = (Vec::new(), 0);
        for object in self.objects.list(CHANGES, None)? {
            let Some(time) = time_of_change(&object.name) else { continue };
            if time.saturating_add(ANNOUNCED_FOR * 1000) < now {
                old.push(object.name);
            } else {
                last = last.max(time.min(now));
                followed.insert(object.name);
            }
        }
        // A machine that may not delete objects leaves them to machines that may.
        in_parallel(&old, |name| self.objects.delete(name).is_ok());
        Ok(last)
    }

    /// Looks at what was announced and not yet followed. Gives the time of the last change, and the errors of single documents.
    fn poll(
        &self,
        state: &SharingState,
        sends: bool,
        followed: &mut HashSet<String>,
        keys_of: Option<&KeysOf<'_>>,
        applied: &mut Applied<'_>,
    ) -> Result<(u64, Vec<Error>)> {
        let mut failed = Vec::new();
        let before = before_changes(state.cursor.saturating_sub(CLOCK_DIFFERENCE));
        let listed = self.objects.list(CHANGES, Some(&before))?.into_iter().map(|object| object.name);
        let listed: Vec<String> = listed.filter(|name| time_of_change(name).is_some()).collect();
        let new: Vec<&String> = listed.iter().filter(|name| !followed.contains(*name)).collect();
        for batch in new.chunks(BATCH) {
            let mut documents = BTreeSet::new();
            for changes in in_parallel(batch, |name| self.changes(name)) {
                match changes {
                    Ok(changes) => documents.extend(changes.into_iter().filter(|(_, id)| is_id(id))),
                    Err(error) if self.is_of_one(&error) => failed.push(error),
                    Err(error) => return Err(error),
                }
            }
            let documents: Vec<(String, String)> = documents.into_iter().collect();
            for some in documents.chunks(BATCH) {
                let look =
                    |(namespace, id): &(String, String)| self.look(namespace, id, sends, false, keys_of);
                failed.extend(self.apply(in_parallel(some, look), applied)?);
            }
            followed.extend(batch.iter().map(|name| (*name).clone()));
        }
        followed.retain(|name| listed.binary_search(name).is_ok());
        let now = now().as_millis() as u64;
        let last = listed.iter().filter_map(|name| time_of_change(name)).map(|time| time.min(now)).max();
        Ok((last.unwrap_or(0).max(state.cursor), failed))
    }

    /// The documents of an announced change.
    fn changes(&self, name: &str) -> Result<Vec<(String, String)>> {
        let Some(bytes) = self.bytes(name, MOST_BYTES)? else { return Ok(Vec::new()) };
        let found: Result<ChangesObject, _> = bytes.and_then(|bytes| decode(&bytes));
        found.map(|changes| changes.documents).or_else(|why| {
            self.unusable(name, &why);
            Ok(Vec::new())
        })
    }
}
