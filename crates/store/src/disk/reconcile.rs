//! Reconciling the index with the folder's files.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::time::SystemTime;

use super::eviction::choose_victims;
use super::{Disk, Phantom, bytes};
use crate::clock::{milliseconds, now};
use crate::file_names::BROKEN_INDEX;
use crate::folder::{FolderEntry, is_recent, remove, remove_stale};
use crate::index::{IndexError, IndexRow, Tables};
use crate::info::GcReport;
use crate::{ChunkKey, Result};

/// Bytes of a chunk's files, and whether the chunk's own is among them.
#[derive(Clone, Copy, Default)]
struct Files {
    has_chunk: bool,
    bytes: u64,
}

impl Files {
    fn add(&mut self, found: &FolderEntry) {
        self.has_chunk |= matches!(found, FolderEntry::Chunk(..));
        self.bytes += found.bytes();
    }
}

impl Phantom {
    /// Bytes that the row counts and that are not there, at most.
    pub(super) fn bytes(&self) -> u64 {
        self.removed.unwrap_or(self.row.bytes)
    }
}

impl Disk {
    /// Removes temporary files of writers that died, aux tensors files without their chunk, chunks that have expired and, where
    /// the folder exceeds its bounds, the least recently used chunks; and reconciles the index.
    pub(crate) fn gc(&self) -> Result<GcReport> {
        let mut report = GcReport::default();
        // Files that need no index go first: on a full disk that makes the room that the index needs.
        for found in self.folder.scan()? {
            let size = found.bytes();
            let is_orphan = |key| matches!(self.folder.path(key).try_exists(), Ok(false));
            match found {
                FolderEntry::Temporary(path) if remove_stale(&path)? => {
                    report.freed += size;
                    report.stale.push(path);
                }
                FolderEntry::Aux(key, _, path) if is_orphan(&key) && remove_stale(&path)? => {
                    report.freed += size;
                    report.orphans.push(path);
                }
                _ => {}
            }
        }
        if remove(&self.folder.root().join(BROKEN_INDEX))? {
            report.stale.push(self.folder.root().join(BROKEN_INDEX));
        }
        self.flush();
        self.index()?;
        self.reconcile_index(&self.folder.scan()?, true, &mut report)?;
        self.evicted.fetch_add(report.evicted + report.expired, Relaxed);
        Ok(report)
    }

    /// Corrects the row of a chunk of which a broken file was removed. Waits for nobody who writes: the next write does it then.
    pub(crate) fn uncount(&self, phantom: Phantom) {
        let corrected =
            self.index().and_then(|index| index.try_write(|tables| self.correct(tables, &phantom)));
        if let Ok(None) = corrected {
            self.phantoms().push(phantom);
        }
    }

    /// Corrects a row that counts bytes which are not there, unless the row has been changed since: the chunk may have been stored again. Pins and
    /// times to live stay for the next file of a chunk whose file was broken. Best effort: `gc` corrects a row that counts too much.
    pub(super) fn correct(&self, tables: &mut Tables<'_>, phantom: &Phantom) -> Result<(), IndexError> {
        let Phantom { key, row, removed } = phantom;
        if tables.row(key)?.as_ref() != Some(row) {
            return Ok(());
        }
        let bytes = match *removed {
            // A file that another process is writing stays in it.
            Some(removed) if is_recent(row.entered) => row.bytes.saturating_sub(removed),
            _ => bytes(&self.folder.files(key)?),
        };
        if removed.is_none() && bytes == 0 {
            return tables.remove(key);
        }
        tables.set(key, &IndexRow { bytes, ..row.clone() })
    }

    /// Reconciles the index with the folder, and removes no chunk.
    pub(crate) fn reconcile(&self) -> Result<GcReport> {
        self.index()?;
        let mut report = GcReport::default();
        self.reconcile_index(&self.folder.scan()?, false, &mut report)?;
        Ok(report)
    }

    /// Enters a row for each chunk in `found` that has none, corrects the bytes of the others, takes out rows without a
    /// file and, to `evict`, removes the chunks that the limits have no room for.
    pub(crate) fn reconcile_index(
        &self,
        found: &[FolderEntry],
        evict: bool,
        report: &mut GcReport,
    ) -> Result<()> {
        let mut files: BTreeMap<ChunkKey, Files> = BTreeMap::new();
        for found in found {
            let Some(key) = found.key() else { continue };
            files.entry(*key).or_default().add(found);
        }
        self.index.write(|tables| {
            self.reconcile_rows(tables, &files, report)?;
            if evict {
                let now = now();
                for (key, row) in choose_victims(tables, None, &self.limits, true, now)? {
                    self.remove_files(&key)?;
                    tables.remove(&key)?;
                    *if row.is_expired(now) { &mut report.expired } else { &mut report.evicted } += 1;
                    report.freed += row.bytes;
                }
            }
            let totals = tables.totals(None)?;
            (report.chunks, report.bytes) = (totals.chunks, totals.bytes);
            Ok(())
        })
    }

    fn reconcile_rows(
        &self,
        tables: &mut Tables<'_>,
        files: &BTreeMap<ChunkKey, Files>,
        report: &mut GcReport,
    ) -> Result<(), IndexError> {
        let mut rows: BTreeMap<ChunkKey, IndexRow> = tables.rows()?.into_iter().collect();
        let latest = milliseconds(SystemTime::now());
        for (key, row) in rows.iter_mut().filter(|(_, row)| row.last_used > latest) {
            row.last_used = latest;
            tables.set(key, row)?;
        }
        for (key, row) in &rows {
            // The files of a new row may be about to get their names.
            if is_recent(row.entered) {
                continue;
            }
            if files.get(key).is_some_and(|files| files.bytes == row.bytes) {
                continue;
            }
            // A large folder takes minutes to scan, in which others go on storing: what differs is looked at once more.
            let Ok(found) = self.folder.files(key) else { continue };
            let mut own = Files::default();
            found.iter().for_each(|found| own.add(found));
            if found.is_empty() {
                report.forgotten += 1;
                tables.remove(key)?;
            } else if own.bytes != row.bytes {
                tables.set(key, &IndexRow { bytes: own.bytes, ..row.clone() })?;
            }
        }
        for (key, files) in files.iter().filter(|(key, files)| files.has_chunk && !rows.contains_key(key)) {
            let Some(row) = self.row_of_file(key, self.modified(key)) else { continue };
            report.entered += 1;
            tables.set(key, &IndexRow { bytes: files.bytes, ..row })?;
        }
        Ok(())
    }

    /// When a chunk's file was written, in milliseconds since 1970.
    fn modified(&self, key: &ChunkKey) -> u64 {
        let modified = self.folder.path(key).metadata().and_then(|metadata| metadata.modified());
        modified.map_or(0, milliseconds)
    }
}
