//! Whether the object store has what an ingest would bring there.

use std::sync::Arc;

use refrain_fusion::FusionMethod;

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
        let kinds: Vec<String> = method.statistics().iter().map(|statistics| statistics.kind()).collect();
        let kinds: Vec<&str> = kinds.iter().map(String::as_str).collect();
        let there = self.store().are_shared(&ids.iter().collect::<Vec<_>>(), &kinds)?;
        let is_shared = |part: Option<std::ops::Range<usize>>| {
            part.is_some_and(|part| there[part].iter().all(|there| *there))
        };
        Ok(parts.into_iter().map(is_shared).collect())
    }
}
