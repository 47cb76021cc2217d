//! What methods keep beside chunks: memory before disk.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use quick_cache::Weighter;
use refrain_kv::Summary;

use super::{ByBytes, Store};
use crate::disk::Origin;
use crate::folder::{Folder, Found, open_summary, read_summary};
use crate::{ChunkId, ChunkInfo, ChunkKey, PutOutcome, Result, StoreError, summary};

/// Chunk and kind.
pub(super) type Name = (ChunkKey, String);

impl Weighter<Name, Arc<Summary>> for ByBytes {
    fn weight(&self, (_, kind): &Name, summary: &Arc<Summary>) -> u64 {
        let tensors = summary.tensors().iter();
        let names: usize = tensors.map(|tensor| tensor.name.len() + 8 * tensor.shape.len() + 128).sum();
        (summary.bytes() + names + kind.len() + 256) as u64
    }
}

/// The summaries of one chunk.
#[derive(Default)]
pub(super) struct Beside {
    kinds: BTreeSet<String>,
    /// Bytes of their files.
    bytes: u64,
}

impl Store {
    /// Keeps a summary beside the chunk `id`, in memory and, if there is none of this `kind`, on disk. What a kind
    /// holds follows from the chunk. A kind is 1 to 40 of the characters `a` to `z`, `0` to `9`, `_` and `-`.
    ///
    /// A file that cannot be used now, or is of an unknown version, is left alone; the summary is then not stored.
    ///
    /// # Errors
    /// If no chunk can have this identity: it is empty or too large. A summary that cannot be written is told by the
    /// outcome, and serves from memory.
    ///
    /// # Panics
    /// If it is no kind.
    pub fn put_summary(&self, id: &ChunkId, kind: &str, summary: Summary) -> Result<PutOutcome> {
        let name = name(id, kind);
        id.layout()?;
        let outcome = self.write(|disk| {
            let path = disk.folder().summary_path(&name.0, kind);
            match open_summary(&path, &name.0, kind) {
                Ok(Some(_)) => Ok(None),
                Err(problem) if !problem.is_permanent() => Err(StoreError::Unusable { path, problem }),
                _ => disk.write_summary(id, kind, &summary, Origin::Here).map(Some),
            }
        });
        self.0.summaries.insert(name, Arc::new(summary));
        Ok(outcome)
    }

    /// The summary of this kind from memory, else from disk with everything about it verified. A file that fails is
    /// treated as that of a broken chunk (see [`Store::get`]).
    ///
    /// # Errors
    /// If no chunk can have this identity: it is empty or too large.
    ///
    /// # Panics
    /// If it is no kind.
    pub fn summary(&self, id: &ChunkId, kind: &str) -> Result<Option<Arc<Summary>>> {
        let name = name(id, kind);
        id.layout()?;
        let found = self.local_summary(&name);
        #[cfg(feature = "remote")]
        if found.is_none() && self.0.remote.is_some() {
            self.bring(&[id], &[kind], false);
            return Ok(self.local_summary(&name));
        }
        Ok(found)
    }

    /// The summary from memory or disk.
    fn local_summary(&self, name: &Name) -> Option<Arc<Summary>> {
        if let Some(summary) = self.0.summaries.get(name) {
            return Some(summary);
        }
        let path = self.folder_on_disk()?.summary_path(&name.0, &name.1);
        match read_summary(&path, &name.0, &name.1) {
            Ok(found) => {
                let summary = Arc::new(found?);
                self.count_read(summary.bytes() as u64);
                self.0.summaries.insert(name.clone(), summary.clone());
                Some(summary)
            }
            Err(problem) => {
                self.repair(path, problem);
                None
            }
        }
    }

    /// Whether there is a summary of this kind in memory, or on disk with a header that fits. Its tensors are not read,
    /// so that a later [`Store::summary`] may still find it broken.
    ///
    /// # Panics
    /// If it is no kind.
    pub fn has_summary(&self, id: &ChunkId, kind: &str) -> bool {
        let name = name(id, kind);
        let on_disk = |folder: &Folder| open_summary(&folder.summary_path(&name.0, kind), &name.0, kind);
        self.0.summaries.contains_key(&name)
            || self.folder_on_disk().is_some_and(|folder| matches!(on_disk(folder), Ok(Some(_))))
    }

    /// Whether there is a summary of this kind in memory.
    ///
    /// # Panics
    /// If it is no kind.
    pub fn holds_summary(&self, id: &ChunkId, kind: &str) -> bool {
        self.0.summaries.contains_key(&name(id, kind))
    }

    /// The files of a chunk's summaries.
    pub(super) fn summaries_on_disk(&self, key: &ChunkKey) -> Result<Vec<Found>> {
        self.folder_on_disk().map_or(Ok(Vec::new()), |folder| folder.summaries(key))
    }

    /// The summaries in memory and in `found`, by chunk.
    pub(super) fn beside(&self, found: &[Found]) -> BTreeMap<ChunkKey, Beside> {
        let mut beside: BTreeMap<ChunkKey, Beside> = BTreeMap::new();
        for ((key, kind), _) in self.0.summaries.iter() {
            beside.entry(key).or_default().kinds.insert(kind);
        }
        for found in found {
            if let Found::Summary(key, kind, _) = found {
                let beside = beside.entry(*key).or_default();
                beside.kinds.insert(kind.clone());
                beside.bytes += found.bytes();
            }
        }
        beside
    }
}

impl Beside {
    /// Tells them in what is known about the chunk.
    pub(super) fn tell(self, info: &mut ChunkInfo) {
        (info.summaries, info.summary_bytes) = (self.kinds.into_iter().collect(), self.bytes);
    }
}

fn name(id: &ChunkId, kind: &str) -> Name {
    assert!(summary::is_kind(kind), "{kind:?} is no kind: 1 to 40 of a-z, 0-9, _ and -");
    (id.key(), kind.to_owned())
}
