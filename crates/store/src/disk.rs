//! The folder and its index: what may be written, what goes, and what becomes of it.

mod gc;

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::mem;
use std::path::Path;
#[cfg(feature = "remote")]
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use refrain_kv::Summary;

use crate::chunk::now;
use crate::file::Header;
use crate::folder::{Folder, Found, NewFile, remove};
use crate::index::{Changes, Index};
use crate::limits::{Limits, Row};
use crate::{Chunk, ChunkId, ChunkKey, Problem, Result};

pub use gc::GcReport;

/// How often uses are written to the index, at most.
const FLUSH: Duration = Duration::from_secs(10);
/// Most uses that wait for it.
const TOUCHED: usize = 4096;

/// Where what is written comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Computed, or imported: to be shared, if anything is.
    Here,
    /// From where it is shared.
    #[cfg(feature = "remote")]
    Remote,
}

/// Chunks and summaries on disk.
#[derive(Debug)]
pub(crate) struct Disk {
    folder: Folder,
    index: Index,
    limits: Limits,
    touched: Mutex<Touched>,
    evicted: AtomicU64,
    /// Whether what is written is noted as not yet where it is shared.
    notes: bool,
}

/// When chunks were last used, in milliseconds since 1970, where the index does not know it yet.
#[derive(Debug)]
struct Touched {
    keys: HashMap<ChunkKey, u64>,
    flushed: Instant,
}

impl Disk {
    /// `notes`: what is written is noted as not yet where it is shared.
    pub(crate) fn open(root: &Path, limits: Limits, notes: bool) -> Result<Disk> {
        let touched = Mutex::new(Touched { keys: HashMap::new(), flushed: Instant::now() });
        let (folder, index) = (Folder::open(root)?, Index::of(root));
        Ok(Disk { folder, index, limits, touched, evicted: AtomicU64::new(0), notes })
    }

    pub(crate) fn folder(&self) -> &Folder {
        &self.folder
    }

    /// Chunks that went to make room or because their time was over, since this store was opened.
    pub(crate) fn evicted(&self) -> u64 {
        self.evicted.load(Relaxed)
    }

    /// Why the index was made anew, if it was since this was last asked.
    pub(crate) fn take_set_aside(&self) -> Option<String> {
        self.index.take_set_aside()
    }

    /// The index, with a row of every file that was there before it.
    fn index(&self) -> Result<&Index> {
        if !self.index.is_complete()? {
            self.settle(&self.folder.scan()?, false, &mut GcReport::default())?;
            self.index.complete()?;
        }
        Ok(&self.index)
    }

    /// All rows; none where the index cannot be used.
    pub(crate) fn rows(&self) -> BTreeMap<ChunkKey, Row> {
        self.index().and_then(Index::rows).unwrap_or_default()
    }

    /// The file of a chunk whose identity is known, and when its time is over (0 is never). A chunk whose time is over is
    /// removed, and not there.
    pub(crate) fn open_known(
        &self,
        id: &ChunkId,
        key: &ChunkKey,
    ) -> Result<Option<(File, Header, u64)>, Problem> {
        // What the index cannot tell does not matter here: a file says what it is.
        let row = self.index.row(key).ok().flatten();
        if row.as_ref().is_some_and(|row| row.is_over(now())) {
            // Removed later, if not now: it is not used any more in any case.
            let _ = self.remove_if(key, |row| row.is_some_and(|row| row.is_over(now())));
            return Ok(None);
        }
        let expires = row.map_or(0, |row| row.expires);
        Ok(self.folder.open_known(id, key)?.map(|(file, header)| (file, header, expires)))
    }

    /// Whether there is a chunk with a header that fits, whose time is not over.
    pub(crate) fn contains(&self, key: &ChunkKey) -> bool {
        matches!(self.folder.open_chunk(key), Ok(Some(_)))
            && !matches!(self.index.row(key), Ok(Some(row)) if row.is_over(now()))
    }

    /// Remembers that a chunk is used now. The index learns of it some seconds later.
    pub(crate) fn touch(&self, key: ChunkKey) {
        let mut touched = self.touched();
        touched.keys.insert(key, milliseconds());
        let due = touched.flushed.elapsed() >= FLUSH || touched.keys.len() >= TOUCHED;
        drop(touched);
        if due {
            self.tell(false);
        }
    }

    /// Tells the index which chunks were used, and of files that it does not know. Where it cannot be written this is lost.
    pub(crate) fn flush(&self) {
        self.tell(true);
    }

    /// The same, unless somebody else is writing and it is not to `wait` for them.
    fn tell(&self, wait: bool) {
        let mut touched = self.touched();
        touched.flushed = Instant::now();
        let keys = mem::take(&mut touched.keys);
        drop(touched);
        if keys.is_empty() {
            return;
        }
        let used = |(key, used): (&ChunkKey, &u64), rows: &BTreeMap<ChunkKey, Row>| {
            let row = match rows.get(key) {
                Some(row) => Row { used: row.used.max(*used), ..row.clone() },
                None => self.row_of(key, *used)?,
            };
            Some((*key, Some(row)))
        };
        let change = |rows: &BTreeMap<ChunkKey, Row>| {
            Ok((keys.iter().filter_map(|touched| used(touched, rows)).collect(), ()))
        };
        let write = |index: &Index| match wait {
            true => index.change(change).map(Some),
            false => index.try_change(change),
        };
        if let Ok(None) = self.index().and_then(write) {
            // The next time.
            let mut touched = self.touched();
            keys.into_iter().for_each(|(key, used)| _ = touched.keys.entry(key).or_insert(used));
        }
    }

    fn touched(&self) -> MutexGuard<'_, Touched> {
        self.touched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The row of a chunk that the index does not know, from its file.
    fn row_of(&self, key: &ChunkKey, used: u64) -> Option<Row> {
        let (_, header) = self.folder.open_chunk(key).ok().flatten()?;
        Some(Row {
            bytes: bytes(&self.folder.files(key).ok()?),
            used,
            written: now(),
            expires: 0,
            pinned: false,
            namespace: header.id.namespace,
        })
    }

    /// Writes a chunk and returns the bytes of its file.
    pub(crate) fn write_chunk(&self, chunk: &Chunk, origin: Origin) -> Result<u64> {
        self.write(&chunk.key(), &chunk.id().namespace, &self.folder.chunk_file(chunk)?, origin)
    }

    /// Writes a summary and returns the bytes of its file.
    pub(crate) fn write_summary(
        &self,
        id: &ChunkId,
        kind: &str,
        summary: &Summary,
        origin: Origin,
    ) -> Result<u64> {
        let key = id.key();
        self.write(&key, &id.namespace, &self.folder.summary_file(&key, kind, summary)?, origin)
    }

    /// Chunks that are not yet where they are shared.
    #[cfg(feature = "remote")]
    pub(crate) fn pending(&self) -> Result<Vec<(ChunkKey, u64)>> {
        self.index()?.pending()
    }

    /// A chunk is where it is shared, unless more of it has been noted since.
    #[cfg(feature = "remote")]
    pub(crate) fn sent(&self, key: &ChunkKey, noted: u64) -> Result<()> {
        self.index.sent(key, noted)
    }

    /// A chunk's files, under the names that they have where they are shared.
    #[cfg(feature = "remote")]
    pub(crate) fn shared_files(&self, key: &ChunkKey) -> Result<Vec<(String, PathBuf)>> {
        let named = |found: Found| {
            let kind = match &found {
                Found::Summary(_, kind, _) => Some(kind.as_str()),
                _ => None,
            };
            (crate::folder::name(key, kind), found.path().to_owned())
        };
        Ok(self.folder.files(key)?.into_iter().map(named).collect())
    }

    /// Makes room for a file of a chunk, and writes it.
    fn write(&self, key: &ChunkKey, namespace: &str, file: &NewFile<'_>, origin: Origin) -> Result<u64> {
        let note = self.notes && origin == Origin::Here;
        let (now, used) = (now(), milliseconds());
        let mut entered = None;
        let row = |known: Option<Row>| {
            let files = self.folder.files(key).unwrap_or_default();
            let (old, beside): (Vec<Found>, Vec<Found>) =
                files.into_iter().partition(|found| found.path() == file.path);
            let known = known.filter(|row| !row.is_over(now));
            // What others are writing is in its row before it is in the folder.
            let taken = known.as_ref().map_or(0, |row| row.bytes.saturating_sub(bytes(&old)));
            let row = Row {
                bytes: taken.max(bytes(&beside)) + file.bytes(),
                used,
                written: now,
                expires: match &known {
                    Some(row) if row.expires == 0 => 0,
                    Some(row) => row.expires.max(self.expiry(now)),
                    None => self.expiry(now),
                },
                pinned: known.is_some_and(|row| row.pinned),
                namespace: namespace.to_owned(),
            };
            entered = Some(row.clone());
            row
        };
        // Who goes depends on what was used until now.
        self.flush();
        let remove = |victim: &ChunkKey| self.remove_files(victim).map(drop);
        let gone = self.index()?.admit(key, row, note, &self.limits, remove)?;
        self.evicted.fetch_add(gone.len() as u64, Relaxed);
        let written = self.folder.write(file);
        if written.is_err() {
            // Best effort: what it counts too much is found when the store is set right.
            let change = |rows: &BTreeMap<ChunkKey, Row>| {
                let Some(row) = rows.get(key).filter(|row| Some(*row) == entered.as_ref()) else {
                    return Ok((Changes::new(), ()));
                };
                let left = bytes(&self.folder.files(key)?);
                let row = (left > 0).then(|| Row { bytes: left, ..row.clone() });
                Ok((Changes::from([(*key, row)]), ()))
            };
            let _ = self.index.change(change);
        } else if let Some(row) = &entered {
            // Best effort: the row that was entered above, and its note, are there unless somebody took them out meanwhile.
            let _ = self.index.has_its_name(key, row, note);
        }
        written
    }

    /// When the time of a chunk that is stored now is over; 0 is never.
    pub(crate) fn expiry_now(&self) -> u64 {
        self.expiry(now())
    }

    /// When the time of a chunk that is stored `now` is over.
    fn expiry(&self, now: u64) -> u64 {
        self.limits.time_to_live.map_or(0, |time| now.saturating_add(time.as_secs()).max(1))
    }

    /// Changes what the index knows of a chunk that has a file, and says whether it has one.
    pub(crate) fn change(&self, key: &ChunkKey, change: impl FnOnce(&mut Row)) -> Result<bool> {
        self.index()?.change(|rows| {
            let known = rows.get(key).cloned().filter(|_| self.folder.path(key).exists());
            let Some(mut row) = known.or_else(|| self.row_of(key, milliseconds())) else {
                return Ok((Changes::new(), false));
            };
            change(&mut row);
            Ok((Changes::from([(*key, Some(row))]), true))
        })
    }

    /// A chunk that is on disk already was to be stored: its time begins anew.
    pub(crate) fn renew(&self, key: &ChunkKey) {
        self.touch(*key);
        if self.limits.time_to_live.is_some() {
            let expires = self.expiry(now());
            // What is to stay without an end does.
            let longer =
                |row: &mut Row| row.expires = if row.expires == 0 { 0 } else { row.expires.max(expires) };
            let _ = self.change(key, longer);
        }
        if self.notes {
            // It may have been stored before it was to be shared.
            let _ = self.index.note(key);
        }
    }

    /// Removes a chunk and its summaries, and says whether the chunk was there.
    pub(crate) fn remove(&self, key: &ChunkKey) -> Result<bool> {
        self.touched().keys.remove(key);
        self.remove_if(key, |_| true)
    }

    /// Removes a chunk if its row is so, and says whether it did and the chunk was there. Nobody stores it meanwhile.
    fn remove_if(&self, key: &ChunkKey, goes: impl Fn(Option<&Row>) -> bool) -> Result<bool> {
        let mut removed = None;
        let in_index = self.index.change(|rows| {
            if !goes(rows.get(key)) {
                removed = Some(Ok(false));
                return Ok((Changes::new(), ()));
            }
            removed = Some(self.remove_files(key));
            Ok((Changes::from([(*key, None)]), ()))
        });
        match (removed, in_index) {
            (Some(removed), _) => removed,
            // What no index says goes all the same.
            (None, Err(_)) if goes(None) => self.remove_files(key),
            (None, _) => Ok(false),
        }
    }

    /// Removes a chunk's files, and says whether its own was there.
    fn remove_files(&self, key: &ChunkKey) -> Result<bool> {
        // The chunk goes first: a summary alone is an orphan, and found.
        let was_there = remove(&self.folder.path(key))?;
        self.folder.summaries(key)?.iter().try_for_each(|found| remove(found.path()).map(drop))?;
        Ok(was_there)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.flush();
    }
}

fn bytes(found: &[Found]) -> u64 {
    found.iter().map(Found::bytes).sum()
}

fn milliseconds() -> u64 {
    since_1970(SystemTime::now())
}

fn since_1970(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}
