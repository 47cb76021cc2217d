//! Setting the folder right: what goes, and that index and files agree.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;

use serde::Serialize;

use super::{Disk, since_1970};
use crate::chunk::now;
use crate::folder::{Found, STALE, remove, remove_stale};
use crate::index::Changes;
use crate::limits::{Row, victims};
use crate::{ChunkKey, Result};

/// What became of a store's files when they were set right.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct GcReport {
    /// Chunks that are on disk now.
    pub chunks: u64,
    /// Bytes of their files and their summaries'.
    pub bytes: u64,
    /// Chunks removed because their time was over.
    pub expired: u64,
    /// Chunks removed to stay within the limits, the least recently used.
    pub evicted: u64,
    /// Bytes of all files removed.
    pub freed: u64,
    /// Chunk files that the index did not know, and does now.
    pub entered: u64,
    /// Chunks in the index whose files were gone, and that it has forgotten.
    pub forgotten: u64,
    /// Summaries whose chunk is not there, removed.
    pub orphans: Vec<PathBuf>,
    /// Temporary files of writers that died, removed.
    pub stale: Vec<PathBuf>,
}

impl Disk {
    /// Sets the store right: removes what writers that died have left, summaries without their chunk, chunks whose time is
    /// over and, if it keeps more than it may, the least recently used; and the index learns what there is.
    pub(crate) fn gc(&self) -> Result<GcReport> {
        let mut report = GcReport::default();
        // First what makes room: on a full disk there is none for the index.
        for found in self.folder.scan()? {
            let size = found.bytes();
            let is_orphan = |key| matches!(self.folder.path(key).try_exists(), Ok(false));
            match found {
                Found::Temporary(path) if remove_stale(&path)? => {
                    report.freed += size;
                    report.stale.push(path);
                }
                Found::Summary(key, _, path) if is_orphan(&key) && remove_stale(&path)? => {
                    report.freed += size;
                    report.orphans.push(path);
                }
                _ => {}
            }
        }
        if remove(&self.folder.root().join(crate::index::BROKEN))? {
            report.stale.push(self.folder.root().join(crate::index::BROKEN));
        }
        self.flush();
        self.index()?;
        self.settle(&self.folder.scan()?, true, &mut report)?;
        self.evicted.fetch_add(report.evicted + report.expired, Relaxed);
        Ok(report)
    }

    /// The index learns what there is, and, to `evict`, what has to go goes.
    pub(crate) fn settle(&self, found: &[Found], evict: bool, report: &mut GcReport) -> Result<()> {
        let mut files: BTreeMap<ChunkKey, (bool, u64)> = BTreeMap::new();
        for found in found {
            let Some(key) = found.key() else { continue };
            let (whole, bytes) = files.entry(*key).or_default();
            *whole |= matches!(found, Found::Chunk(..));
            *bytes += found.bytes();
        }
        self.index.change(|rows| {
            let (mut now_rows, mut changes) = (BTreeMap::new(), Changes::new());
            for (key, row) in rows {
                let bytes = files.get(key).map(|(_, bytes)| *bytes);
                let is_new = row.written.saturating_add(STALE.as_secs()) > now();
                let row = match bytes {
                    // Its files may be about to get their names.
                    _ if is_new => row.clone(),
                    Some(bytes) => Row { bytes, ..row.clone() },
                    None => {
                        report.forgotten += 1;
                        changes.insert(*key, None);
                        continue;
                    }
                };
                if row != rows[key] {
                    changes.insert(*key, Some(row.clone()));
                }
                now_rows.insert(*key, row);
            }
            let unknown = files.iter().filter(|(key, (whole, _))| *whole && !rows.contains_key(*key));
            for (key, (_, bytes)) in unknown {
                let Some(row) = self.row_of(key, self.modified(key)) else { continue };
                let row = Row { bytes: *bytes, ..row };
                report.entered += 1;
                changes.insert(*key, Some(row.clone()));
                now_rows.insert(*key, row);
            }
            let gone = if evict { victims(&now_rows, None, &self.limits)? } else { Vec::new() };
            let seconds = now();
            for (key, bytes) in gone {
                self.remove_files(&key)?;
                let row = now_rows.remove(&key);
                let is_over = row.is_some_and(|row| row.is_over(seconds));
                *if is_over { &mut report.expired } else { &mut report.evicted } += 1;
                report.freed += bytes;
                changes.insert(key, None);
            }
            report.chunks = now_rows.len() as u64;
            report.bytes = now_rows.values().map(|row| row.bytes).sum();
            Ok((changes, ()))
        })
    }

    /// When a chunk's file was written, in milliseconds since 1970.
    fn modified(&self, key: &ChunkKey) -> u64 {
        let modified = self.folder.path(key).metadata().and_then(|metadata| metadata.modified());
        modified.map_or(0, since_1970)
    }

    /// What `verify` sets right when it has removed what is broken.
    pub(crate) fn settle_now(&self) -> Result<GcReport> {
        self.index()?;
        let mut report = GcReport::default();
        self.settle(&self.folder.scan()?, false, &mut report)?;
        Ok(report)
    }
}
