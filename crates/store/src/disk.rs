//! The folder of files together with its index: storing within the bounds, removing, last uses, pins and expiry.

mod beside;
pub(crate) mod eviction;
mod last_uses;
mod reconcile;
mod unwritten_uses;

use std::fs::File;
use std::path::Path;
#[cfg(feature = "remote")]
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use refrain_kv::AuxTensors;

use self::eviction::choose_victims;
use crate::chunk_file::Header;
use crate::clock::{milliseconds, nanoseconds, now};
use crate::folder::{Folder, FolderEntry, NewFile, is_recent, remove};
use crate::index::{Index, IndexError, IndexRow, Tables, Totals};
use crate::info::GcReport;
use crate::limits::Limits;
use crate::{Chunk, ChunkId, ChunkKey, Problem, Result};

use self::unwritten_uses::UnwrittenUses;

/// Where a file that is written comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Computed or imported here: sent to the object store, if there is one.
    Here,
    /// The object store.
    #[cfg(feature = "remote")]
    Remote,
}

/// A row that counts bytes which are not in the folder.
#[derive(Debug)]
pub(crate) struct Phantom {
    pub(crate) key: ChunkKey,
    /// The row as it was then: one that has been changed since is right.
    pub(crate) row: IndexRow,
    /// Bytes of a broken file that was removed; none where the chunk's file could not be written.
    pub(crate) removed: Option<u64>,
}

/// Chunks and aux tensors in a folder.
#[derive(Debug)]
pub(crate) struct Disk {
    folder: Folder,
    index: Index,
    limits: Limits,
    uses: UnwrittenUses,
    /// Rows of chunks whose files could not be written, which the index could not withdraw either, as on a full disk, and of broken files that
    /// were removed while others wrote. The next write corrects them; those that die with the process are corrected by `gc`.
    phantoms: Mutex<Vec<Phantom>>,
    evicted: AtomicU64,
    /// Whether chunks that are stored here are noted as not yet in the object store.
    shares: bool,
    /// Whether every namespace is known to be within its quota. Storing a chunk then looks at the chunk's namespace alone.
    quotas_hold: AtomicBool,
    /// Whether the disk was full still after chunks had gone, as where snapshots hold their bytes. No more go for it until a file is written.
    frees_nothing: AtomicBool,
}

impl Disk {
    /// With `shares`, chunks that are stored here are noted as not yet in the object store.
    pub(crate) fn open(root: &Path, limits: Limits, shares: bool) -> Result<Disk> {
        let folder = Folder::open(root)?;
        Ok(Disk {
            index: Index::of(folder.root()),
            folder,
            limits,
            uses: UnwrittenUses::new(),
            phantoms: Mutex::default(),
            evicted: AtomicU64::new(0),
            shares,
            quotas_hold: AtomicBool::new(false),
            frees_nothing: AtomicBool::new(false),
        })
    }

    pub(crate) fn folder(&self) -> &Folder {
        &self.folder
    }

    /// Chunks removed to make room or because they had expired, since this store was opened.
    pub(crate) fn evicted(&self) -> u64 {
        self.evicted.load(Relaxed)
    }

    /// Why a broken index was set aside, if one was since the last call.
    pub(crate) fn take_set_aside(&self) -> Option<String> {
        self.index.take_set_aside()
    }

    /// The index, after every file that is older than the index has got its row.
    fn index(&self) -> Result<&Index> {
        if !self.index.is_complete()? {
            self.reconcile_index(&self.folder.scan()?, false, &mut GcReport::default())?;
            self.index.set_complete()?;
        }
        Ok(&self.index)
    }

    /// All rows, ascending by key.
    pub(crate) fn rows(&self) -> Result<Vec<(ChunkKey, IndexRow)>> {
        self.index()?.rows()
    }

    /// The rows of a namespace, ascending by key.
    pub(crate) fn rows_of(&self, namespace: &str) -> Result<Vec<(ChunkKey, IndexRow)>> {
        self.index()?.rows_of(namespace)
    }

    /// The row of a chunk.
    pub(crate) fn row(&self, key: &ChunkKey) -> Result<Option<IndexRow>> {
        self.index()?.row(key)
    }

    /// Sums over all rows.
    pub(crate) fn totals(&self) -> Result<Totals> {
        self.index()?.totals()
    }

    /// The file of a chunk whose identity is known, and when the chunk expires (s since 1970, 0 never). An expired chunk is
    /// missing: it goes when a chunk is stored, since a reader does not wait for those that write.
    pub(crate) fn open_known(
        &self,
        id: &ChunkId,
        key: &ChunkKey,
    ) -> Result<Option<(File, Header, u64)>, Problem> {
        // An index that cannot be read does not stop reading: the file itself says what it is.
        let row = self.index.row(key).ok().flatten();
        if row.as_ref().is_some_and(|row| row.is_expired(now())) {
            return Ok(None);
        }
        let expires = row.map_or(0, |row| row.expires);
        Ok(self.folder.open_known(id, key)?.map(|(file, header)| (file, header, expires)))
    }

    /// Whether there is a chunk with a header that fits and that has not expired.
    pub(crate) fn contains(&self, key: &ChunkKey) -> bool {
        matches!(self.folder.open_chunk(key), Ok(Some(_)))
            && !matches!(self.index.row(key), Ok(Some(row)) if row.is_expired(now()))
    }

    /// The row of a chunk that has a file and no row.
    fn row_of_file(&self, key: &ChunkKey, last_used: u64) -> Option<IndexRow> {
        let (_, header) = self.folder.open_chunk(key).ok().flatten()?;
        // No room was made for it when it was written.
        self.quotas_hold.store(false, Relaxed);
        Some(IndexRow {
            bytes: bytes(&self.folder.files(key).ok()?),
            last_used,
            entered: now(),
            expires: 0,
            pinned: false,
            namespace: header.id.namespace,
        })
    }

    /// Writes a chunk and returns the bytes of its file.
    pub(crate) fn write_chunk(&self, chunk: &Chunk, origin: Origin) -> Result<u64> {
        self.write(&chunk.key(), &chunk.id().namespace, &self.folder.chunk_file(chunk)?, origin)
    }

    /// Writes an aux tensors file and returns the bytes of its file.
    pub(crate) fn write_aux(
        &self,
        id: &ChunkId,
        kind: &str,
        aux: &AuxTensors,
        origin: Origin,
    ) -> Result<u64> {
        let key = id.key();
        self.write(&key, &id.namespace, &self.folder.aux_file(&key, kind, aux)?, origin)
    }

    /// Makes room for a file of a chunk, and writes it. On a full disk, the least recently used chunks go for it, though the bound has room.
    fn write(&self, key: &ChunkKey, namespace: &str, file: &NewFile<'_>, origin: Origin) -> Result<u64> {
        let full = match self.write_within(&self.limits, key, namespace, file, origin) {
            Err(error) if error.is_full_disk() && !self.frees_nothing.load(Relaxed) => error,
            outcome => return outcome,
        };
        let Ok(totals) = self.totals() else { return Err(full) };
        let phantoms = self.phantoms().iter().map(Phantom::bytes).fold(0, u64::saturating_add);
        let disk = totals.bytes.saturating_sub(phantoms).min(self.limits.disk);
        let limits = Limits { disk, ..self.limits.clone() };
        self.write_within(&limits, key, namespace, file, origin).map_err(|error| {
            self.frees_nothing.store(error.is_full_disk(), Relaxed);
            // The system's error has the remedy, also where no chunk may go.
            full
        })
    }

    /// Makes room for a file of a chunk within `limits`, and writes it.
    fn write_within(
        &self,
        limits: &Limits,
        key: &ChunkKey,
        namespace: &str,
        file: &NewFile<'_>,
        origin: Origin,
    ) -> Result<u64> {
        let note = self.shares && origin == Origin::Here;
        let row = self.change_index(|tables| self.admit(tables, (key, namespace), file, limits, note))?;
        self.quotas_hold.store(true, Relaxed);
        let written = self.folder.write(file);
        // Best effort from here on: a row that counts too much is corrected by `gc`.
        let phantom = Phantom { key: *key, row, removed: None };
        let corrected = match &written {
            Err(_) => self.index.write(|tables| self.correct(tables, &phantom)),
            // The row that was entered above, and its note, are there unless another process took them out meanwhile: one
            // that removed the chunk did not see the file, and one that sent the chunk's files did not either.
            Ok(_) if note => self.index.write(|tables| {
                if tables.row(key)?.is_none() {
                    tables.set(key, &phantom.row)?;
                }
                tables.note(key, nanoseconds())
            }),
            Ok(_) => self.index.ensure_row(key, &phantom.row),
        };
        if written.is_ok() {
            self.frees_nothing.store(false, Relaxed);
        } else if corrected.is_err() {
            self.phantoms().push(phantom);
        }
        written
    }

    /// Changes the index in one transaction, once it is right. Which chunks go depends on what was used until now, so the uses are written in the
    /// same transaction.
    fn change_index<T>(&self, change: impl FnOnce(&mut Tables<'_>) -> Result<T, IndexError>) -> Result<T> {
        let uses = self.uses.take();
        let phantoms = std::mem::take(&mut *self.phantoms());
        let changed = self.index().and_then(|index| {
            index.write(|tables| {
                phantoms.iter().try_for_each(|phantom| self.correct(tables, phantom))?;
                self.enter_uses(tables, &uses)?;
                change(tables)
            })
        });
        if changed.is_err() {
            self.uses.put_back(uses);
            self.phantoms().extend(phantoms);
        }
        changed
    }

    pub(crate) fn phantoms(&self) -> MutexGuard<'_, Vec<Phantom>> {
        self.phantoms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters the row of a chunk that gets a new file, after removing the chunks that must go for it.
    fn admit(
        &self,
        tables: &mut Tables<'_>,
        (key, namespace): (&ChunkKey, &str),
        file: &NewFile<'_>,
        limits: &Limits,
        note: bool,
    ) -> Result<IndexRow, IndexError> {
        let now = now();
        if tables.row(key)?.is_some_and(|row| row.is_expired(now)) {
            // A file that stayed would have a new time where the new one cannot be written.
            self.remove_files(key)?;
        }
        let files = self.folder.files(key)?;
        let (old, beside): (Vec<FolderEntry>, Vec<FolderEntry>) =
            files.into_iter().partition(|found| found.path() == file.path);
        let known = tables.take(key)?.filter(|row| !row.is_expired(now));
        // A file that another process is writing is in the row before it is in the folder.
        let is_awaited = |row: &&IndexRow| is_recent(row.entered);
        let taken = known.as_ref().filter(is_awaited).map_or(0, |row| row.bytes.saturating_sub(bytes(&old)));
        let row = IndexRow {
            bytes: taken.max(bytes(&beside)) + file.bytes(),
            last_used: milliseconds(SystemTime::now()),
            entered: now,
            expires: known.as_ref().map_or(self.expiry(now), |row| self.renewed(row.expires, now)),
            pinned: known.is_some_and(|row| row.pinned),
            namespace: namespace.to_owned(),
        };
        let every_namespace = !self.quotas_hold.load(Relaxed);
        let victims = choose_victims(tables, Some(&row), limits, every_namespace, now)?;
        self.evict(tables, &victims)?;
        tables.set(key, &row)?;
        if note {
            tables.note(key, nanoseconds())?;
        }
        Ok(row)
    }

    /// Removes chunks with their rows.
    fn evict(&self, tables: &mut Tables<'_>, victims: &[(ChunkKey, IndexRow)]) -> Result<(), IndexError> {
        for (victim, _) in victims {
            self.remove_files(victim)?;
            tables.remove(victim)?;
        }
        self.evicted.fetch_add(victims.len() as u64, Relaxed);
        Ok(())
    }

    /// When a chunk that is stored now expires (s since 1970, 0 never).
    pub(crate) fn expiry_now(&self) -> u64 {
        self.expiry(now())
    }

    /// When a chunk that is stored at `now` expires.
    fn expiry(&self, now: u64) -> u64 {
        self.limits.time_to_live.map_or(0, |time| now.saturating_add(time.as_secs()).max(1))
    }

    /// When a chunk that expires at `expires` does so after it is stored again at `now`: never earlier.
    fn renewed(&self, expires: u64, now: u64) -> u64 {
        if expires == 0 { 0 } else { expires.max(self.expiry(now)) }
    }

    /// Changes the rows of the chunks in `keys` that have a file, in one transaction, and returns how many have one.
    pub(crate) fn change(&self, keys: &[ChunkKey], change: impl Fn(&mut IndexRow)) -> Result<usize> {
        self.index()?.write(|tables| {
            let mut there = 0;
            for key in keys {
                let Some(mut row) = self.row_with_file(tables, key)? else { continue };
                change(&mut row);
                tables.set(key, &row)?;
                there += 1;
            }
            Ok(there)
        })
    }

    /// The row of a chunk that has a file.
    fn row_with_file(&self, tables: &Tables<'_>, key: &ChunkKey) -> Result<Option<IndexRow>, IndexError> {
        let known = tables.row(key)?.filter(|_| self.folder.path(key).exists());
        Ok(known.or_else(|| self.row_of_file(key, milliseconds(SystemTime::now()))))
    }

    /// Chunks that are on disk were to be stored again: they are used now, their time to live begins anew, and they are noted as not
    /// yet in the object store, since they may have been stored before there was one. One transaction for all of them.
    pub(crate) fn renew(&self, keys: &[ChunkKey]) {
        let used = milliseconds(SystemTime::now());
        keys.iter().for_each(|key| _ = self.uses.add(*key, used));
        if self.limits.time_to_live.is_none() && !self.shares {
            return;
        }
        let uses = self.uses.take();
        let renew = |tables: &mut Tables<'_>| {
            self.enter_uses(tables, &uses)?;
            for key in keys {
                if let Some(row) = self.row_with_file(tables, key)? {
                    let expires = self.renewed(row.expires, now());
                    tables.set(key, &IndexRow { expires, ..row })?;
                }
                if self.shares {
                    tables.note(key, nanoseconds())?;
                }
            }
            Ok(())
        };
        // Best effort: the chunks are there in any case.
        if self.index().and_then(|index| index.write(renew)).is_err() {
            self.uses.put_back(uses);
        }
    }

    /// Removes a chunk and its aux tensors, and says whether the chunk was there. No process stores the chunk meanwhile.
    pub(crate) fn remove(&self, key: &ChunkKey) -> Result<bool> {
        self.uses.remove(key);
        let mut removed = None;
        let _ = self.index.write(|tables| {
            let outcome = self.remove_files(key);
            // A file that could not be removed still counts.
            let is_gone = outcome.is_ok();
            removed = Some(outcome);
            if is_gone { tables.remove(key) } else { Ok(()) }
        });
        // The files go even where the index cannot be written.
        removed.unwrap_or_else(|| self.remove_files(key))
    }

    /// Removes a chunk's files, and says whether its own was there.
    fn remove_files(&self, key: &ChunkKey) -> Result<bool> {
        // The chunk goes first: `gc` finds an aux tensors file without its chunk.
        let was_there = remove(&self.folder.path(key))?;
        self.folder.aux_files(key)?.iter().try_for_each(|found| remove(found.path()).map(drop))?;
        Ok(was_there)
    }

    /// Chunks that are not yet in the object store, and when each was noted.
    #[cfg(feature = "remote")]
    pub(crate) fn pending(&self) -> Result<Vec<(ChunkKey, u64)>> {
        self.index()?.pending()
    }

    /// A chunk's files are in the object store. Its note goes unless it has been noted again since `noted`.
    #[cfg(feature = "remote")]
    pub(crate) fn sent(&self, key: &ChunkKey, noted: u64) -> Result<()> {
        self.index.write(|tables| if tables.noted(key)? == Some(noted) { tables.unnote(key) } else { Ok(()) })
    }

    /// A chunk's files, with their names in the object store.
    #[cfg(feature = "remote")]
    pub(crate) fn shared_files(&self, key: &ChunkKey) -> Result<Vec<(String, PathBuf)>> {
        let named = |found: FolderEntry| {
            let kind = match &found {
                FolderEntry::Aux(_, kind, _) => Some(kind.as_str()),
                _ => None,
            };
            (crate::folder::name(key, kind), found.path().to_owned())
        };
        Ok(self.folder.files(key)?.into_iter().map(named).collect())
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.flush();
    }
}

fn bytes(found: &[FolderEntry]) -> u64 {
    found.iter().map(FolderEntry::bytes).sum()
}
