//! Whether the object store has what an ingest brings there.

use std::ops::Range;
use std::sync::Arc;

use refrain_fusion::FusionMethod;
use refrain_store::ChunkId;

use crate::Result;
use crate::engine::Engine;
use crate::prompt::{Document, Prompt};

impl Engine {
    /// Of each document, whether the object store has all that [`Engine::ingest_for`] stores of it. Nothing is fetched, and a
    /// document that cannot be cut is not there.
    ///
    /// # Errors
    /// If the object store does not answer.
    pub fn are_shared(&self, documents: &[&Document], method: &Arc<dyn FusionMethod>) -> Result<Vec<bool>> {
        let (ids, parts) = self.stored_of(documents, method);
        let kinds: Vec<String> = method.statistics().iter().map(|statistics| statistics.kind()).collect();
        let kinds: Vec<&str> = kinds.iter().map(String::as_str).collect();
        let there = self.store().are_shared(&ids.iter().collect::<Vec<_>>(), &kinds)?;
        let is_shared =
            |part: Option<Range<usize>>| part.is_some_and(|part| there[part].iter().all(|there| *there));
        Ok(parts.into_iter().map(is_shared).collect())
    }

    /// Tells for each document whether some of its chunks or statistics, as [`Engine::ingest_for`] stores them, wait here to be brought to the object store.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn are_pending(&self, documents: &[&Document], method: &Arc<dyn FusionMethod>) -> Result<Vec<bool>> {
        let (ids, parts) = self.stored_of(documents, method);
        let pending = self.store().are_pending(&ids.iter().collect::<Vec<_>>())?;
        let is_pending = |part: Option<Range<usize>>| part.is_some_and(|part| pending[part].contains(&true));
        Ok(parts.into_iter().map(is_pending).collect())
    }

    /// The chunks that are stored of documents, and each document's among them; none for one that cannot be cut.
    fn stored_of(
        &self,
        documents: &[&Document],
        method: &Arc<dyn FusionMethod>,
    ) -> (Vec<ChunkId>, Vec<Option<Range<usize>>>) {
        let (mut ids, mut parts) = (Vec::new(), Vec::with_capacity(documents.len()));
        let whole = !method.statistics().is_empty();
        for document in documents {
            let first = ids.len();
            if let Ok(chunks) = self.chunks(std::slice::from_ref(*document)) {
                let prompt = Prompt { chunks, ..Prompt::default() };
                ids.extend(self.stored_in(&prompt, whole).into_iter().map(|(id, _)| id));
                parts.push(Some(first..ids.len()));
            } else {
                parts.push(None);
            }
        }
        (ids, parts)
    }
}
