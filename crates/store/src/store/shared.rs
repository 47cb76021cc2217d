//! Whether chunks are in the object store, or on their way there.

use std::collections::HashSet;

use super::Store;
use crate::folder::name;
use crate::{ChunkId, ChunkKey, Result};

impl Store {
    /// Of each chunk, whether the object store has it, with its aux tensors of these kinds. Nothing is fetched: what is broken there
    /// counts as long as nobody has read it. None is there without an object store.
    ///
    /// # Errors
    /// If the object store does not answer, or refuses.
    ///
    /// # Panics
    /// If one is no kind.
    pub fn are_shared(&self, ids: &[&ChunkId], kinds: &[&str]) -> Result<Vec<bool>> {
        let Some(objects) = self.objects() else { return Ok(vec![false; ids.len()]) };
        let names = |id: &&ChunkId| {
            let key = id.key();
            let aux = kinds.iter().map(move |kind| name(&key, Some(kind)));
            std::iter::once(name(&key, None)).chain(aux)
        };
        let found = objects.exist(ids.iter().flat_map(names).collect())?;
        Ok(found.chunks(1 + kinds.len()).map(|parts| parts.iter().all(|there| *there)).collect())
    }

    /// Tells for each chunk whether it is in the folder and waits to be brought to the object store.
    ///
    /// # Errors
    /// If the index cannot be read.
    pub fn are_pending(&self, ids: &[&ChunkId]) -> Result<Vec<bool>> {
        let pending = self.0.disk.as_ref().map_or(Ok(Vec::new()), |disk| disk.pending())?;
        let pending: HashSet<ChunkKey> = pending.into_iter().map(|(key, _)| key).collect();
        Ok(ids.iter().map(|id| pending.contains(&id.key())).collect())
    }
}
