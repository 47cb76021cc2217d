//! Aux tensors, which methods keep beside chunks: memory before disk.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use refrain_kv::AuxTensors;

use super::Store;
use crate::disk::Origin;
use crate::folder::{Folder, FolderEntry, open_aux_file, read_aux_file};
use crate::tiers::AuxName;
use crate::{ChunkId, ChunkInfo, ChunkKey, PutOutcome, Result, StoreError, aux_file};

/// The aux tensors of one chunk.
#[derive(Default)]
pub(super) struct AuxFiles {
    kinds: BTreeSet<String>,
    /// Bytes of their files.
    bytes: u64,
}

impl Store {
    /// Keeps an aux tensors file beside the chunk `id`, in memory and, if there is none of this `kind`, on disk. What a kind
    /// holds follows from the chunk. A kind is 1 to 40 of the characters `a` to `z`, `0` to `9`, `_` and `-`.
    ///
    /// A file that cannot be used now, or is of an unknown version, is left alone; the aux tensors is then not stored.
    ///
    /// # Errors
    /// If no chunk can have this identity: it is empty or too large; or as [`Store::put`]. An aux tensors file that cannot be
    /// written is told by the outcome, and serves from memory.
    ///
    /// # Panics
    /// If it is no kind.
    pub fn put_aux_tensors(&self, id: &ChunkId, kind: &str, aux: AuxTensors) -> Result<PutOutcome> {
        let name = name(id, kind);
        id.layout()?;
        if self.0.is_deleted(&name.0) {
            return Ok(PutOutcome::Deleted);
        }
        let key = name.0;
        let outcome = self.0.write(|disk| {
            let path = disk.folder().aux_path(&name.0, kind);
            match open_aux_file(&path, &name.0, kind) {
                Ok(Some(_)) => Ok(None),
                Err(problem) if !problem.is_permanent() => Err(StoreError::Unusable { path, problem }),
                _ => disk.write_aux(id, kind, &aux, Origin::Here).map(Some),
            }
        });
        self.0.aux_tensors.insert(name, Arc::new(aux));
        self.kept_or_deleted(key, outcome)
    }

    /// The aux tensors of this kind from memory, else from disk with everything about it verified. A file that fails is
    /// treated as that of a broken chunk (see [`Store::get`]).
    ///
    /// # Errors
    /// If no chunk can have this identity: it is empty or too large.
    ///
    /// # Panics
    /// If it is no kind.
    pub fn aux_tensors(&self, id: &ChunkId, kind: &str) -> Result<Option<Arc<AuxTensors>>> {
        let name = name(id, kind);
        id.layout()?;
        let found = self.local_aux_tensors(&name);
        #[cfg(feature = "remote")]
        if found.is_none() && self.0.remote.is_some() {
            self.prefetch(&[id.into()], &[kind], false);
            return Ok(self.local_aux_tensors(&name));
        }
        Ok(found)
    }

    /// [`Store::aux_tensors`] of what [`Store::prefetch`] has brought: nothing is asked of the object store.
    ///
    /// # Errors
    /// If no chunk can have this identity: it is empty or too large.
    ///
    /// # Panics
    /// If it is no kind.
    pub fn aux_tensors_at_hand(&self, id: &ChunkId, kind: &str) -> Result<Option<Arc<AuxTensors>>> {
        let name = name(id, kind);
        id.layout()?;
        Ok(self.local_aux_tensors(&name))
    }

    /// The aux tensors from memory or disk.
    fn local_aux_tensors(&self, name: &AuxName) -> Option<Arc<AuxTensors>> {
        if let Some(aux) = self.0.aux_tensors.get(name) {
            return Some(aux);
        }
        let path = self.0.folder()?.aux_path(&name.0, &name.1);
        let removals = self.0.removals();
        match read_aux_file(&path, &name.0, &name.1) {
            Ok(found) => {
                let aux = Arc::new(found?);
                self.0.count_read(aux.bytes() as u64);
                self.0.aux_tensors.insert(name.clone(), aux.clone());
                if self.0.removals() != removals {
                    self.0.aux_tensors.remove(name);
                }
                Some(aux)
            }
            Err(problem) => {
                self.0.repair(&name.0, path, problem);
                None
            }
        }
    }

    /// Whether there is an aux tensors file of this kind in memory, or on disk with a header that fits. Its tensors are not read,
    /// so that a later [`Store::aux_tensors`] may still find it broken.
    ///
    /// # Panics
    /// If it is no kind.
    pub fn has_aux_tensors(&self, id: &ChunkId, kind: &str) -> bool {
        let name = name(id, kind);
        let on_disk = |folder: &Folder| open_aux_file(&folder.aux_path(&name.0, kind), &name.0, kind);
        self.0.aux_tensors.contains_key(&name)
            || self.0.folder().is_some_and(|folder| matches!(on_disk(folder), Ok(Some(_))))
    }

    /// Whether there is an aux tensors file of this kind in memory.
    ///
    /// # Panics
    /// If it is no kind.
    pub fn has_aux_tensors_in_memory(&self, id: &ChunkId, kind: &str) -> bool {
        self.0.aux_tensors.contains_key(&name(id, kind))
    }

    /// The files of a chunk's aux tensors.
    pub(super) fn aux_files_on_disk(&self, key: &ChunkKey) -> Result<Vec<FolderEntry>> {
        self.0.folder().map_or(Ok(Vec::new()), |folder| folder.aux_files(key))
    }

    /// The aux tensors in memory and in `found`, by chunk.
    pub(super) fn beside(&self, found: &[FolderEntry]) -> BTreeMap<ChunkKey, AuxFiles> {
        let mut beside: BTreeMap<ChunkKey, AuxFiles> = BTreeMap::new();
        for ((key, kind), _) in self.0.aux_tensors.iter() {
            beside.entry(key).or_default().kinds.insert(kind);
        }
        for found in found {
            if let FolderEntry::Aux(key, kind, _) = found {
                let beside = beside.entry(*key).or_default();
                beside.kinds.insert(kind.clone());
                beside.bytes += found.bytes();
            }
        }
        beside
    }
}

impl AuxFiles {
    /// Tells them in what is known about the chunk.
    pub(super) fn tell(self, info: &mut ChunkInfo) {
        (info.aux_kinds, info.aux_bytes) = (self.kinds.into_iter().collect(), self.bytes);
    }
}

fn name(id: &ChunkId, kind: &str) -> AuxName {
    assert!(aux_file::is_kind(kind), "{kind:?} is no kind: 1 to 40 of a-z, 0-9, _ and -");
    (id.key(), kind.to_owned())
}
