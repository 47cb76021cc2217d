//! Chunks that several machines share.

use std::path::Path;
use std::sync::Arc;

use super::{Held, Store};
use crate::disk::{Disk, Origin};
use crate::file::MAX_HEADER;
use crate::folder::{name, open_summary};
use crate::remote::{Remote, Wanted};
use crate::{Chunk, ChunkId, ChunkKey, Limits, Problem, RemoteOptions, RemoteStats, Result, summary};

/// Most bytes of a summary that are fetched.
const LARGEST_SUMMARY: u64 = 1 << 30;

impl Store {
    /// Opens the store in `folder` as [`Store::open`] does, and shares its chunks through an object store: what neither memory
    /// nor the folder has is fetched from there, and what is stored here is brought there in the background.
    ///
    /// # Errors
    /// If the folder can be neither created nor read, or the options name no object store. Whether it answers is not
    /// asked: one that does not is left alone, and asked again later.
    pub fn open_shared(
        folder: impl AsRef<Path>,
        limits: impl Into<Limits>,
        options: &RemoteOptions,
    ) -> Result<Store> {
        let limits = limits.into();
        let memory = limits.memory;
        let disk = Arc::new(Disk::open(folder.as_ref(), limits, true)?);
        let remote = Remote::open(options, &disk)?;
        Ok(Store::assemble(Some(disk), Some(remote), memory))
    }

    /// Fetches the chunks that neither memory nor the folder has, several at once, with their summaries of these kinds, and
    /// says how many chunks came. Where there is no object store, or it does not answer, none does.
    ///
    /// # Panics
    /// If one is no kind.
    pub fn bring(&self, ids: &[&ChunkId], kinds: &[&str]) -> usize {
        let Some(remote) = &self.0.remote else { return 0 };
        let mut wanted: Vec<(&ChunkId, ChunkKey, Option<&str>)> = Vec::new();
        for id in ids.iter().filter(|id| id.layout().is_ok()) {
            let key = id.key();
            if wanted.iter().any(|(_, other, _)| *other == key) {
                continue;
            }
            if !self.contains(id) {
                wanted.push((id, key, None));
            }
            let lacking = kinds.iter().filter(|kind| !self.has_summary(id, kind));
            wanted.extend(lacking.map(|kind| (*id, key, Some(*kind))));
        }
        let most = |(id, _, kind): &(&ChunkId, ChunkKey, Option<&str>)| match kind {
            // Its layout was looked at above.
            None => id.layout().map_or(0, |layout| (layout.layer * id.layers) as u64) + MAX_HEADER + 8,
            Some(_) => LARGEST_SUMMARY,
        };
        let objects: Vec<Wanted> =
            wanted.iter().map(|wanted| (name(&wanted.1, wanted.2), most(wanted))).collect();
        let (mut brought, mut broken) = (0, Vec::new());
        remote.fetch(&objects, |index, bytes| {
            let (id, key, kind) = wanted[index];
            let taken = match kind {
                None => self.take_chunk(id, &bytes).map(|()| brought += 1),
                Some(kind) => self.take_summary(id, &key, kind, &bytes),
            };
            // What a newer program wrote is its own.
            if taken.is_err_and(|problem| problem.is_permanent()) {
                broken.push(index);
            }
        });
        broken.into_iter().for_each(|index| remote.discard(&objects[index].0));
        brought
    }

    fn take_chunk(&self, id: &ChunkId, bytes: &[u8]) -> Result<(), Problem> {
        let chunk = Chunk::from_bytes(bytes)?;
        if let Some(field) = chunk.id().difference(id) {
            return Err(Problem::Identity(field));
        }
        let expires = self.0.disk.as_ref().map_or(0, |disk| disk.expiry_now());
        // Where it cannot be written it serves from memory.
        let _ = self.write(|disk| disk.write_chunk(&chunk, Origin::Remote).map(Some));
        self.0.memory.insert(chunk.key(), Held { chunk, expires });
        Ok(())
    }

    fn take_summary(&self, id: &ChunkId, key: &ChunkKey, kind: &str, bytes: &[u8]) -> Result<(), Problem> {
        let summary = summary::decode(bytes, key, kind)?;
        let _ = self.write(|disk| match open_summary(&disk.folder().summary_path(key, kind), key, kind) {
            Err(problem) if !problem.is_permanent() => Ok(None),
            _ => disk.write_summary(id, kind, &summary, Origin::Remote).map(Some),
        });
        self.0.summaries.insert((*key, kind.to_owned()), Arc::new(summary));
        Ok(())
    }

    /// What the object store has done; none where there is none.
    pub fn remote_stats(&self) -> Option<RemoteStats> {
        let remote = self.0.remote.as_ref()?;
        let pending = self.0.disk.as_ref().and_then(|disk| disk.pending().ok());
        let pending = pending.map_or(0, |pending| pending.len() as u64);
        Some(RemoteStats { pending, ..remote.stats() })
    }
}
