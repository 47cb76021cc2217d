//! Layers over which SamKV averages, found from documents.

use std::sync::Arc;

use refrain_fusion::{Calibration, ChunkStatistics as _, FusionMethod, SamKv};

use super::job::IngestProgress;
use crate::Result;
use crate::engine::Engine;
use crate::prompt::{Document, Prompt};

impl Engine {
    /// Finds the layers over which SamKV averages, from documents, which are ingested for it; nothing if none of
    /// them is long enough. [`Engine::use_stable_layers`] makes use of it.
    ///
    /// # Errors
    /// As for [`Engine::ingest`].
    pub fn calibrate(
        &self,
        documents: &[Document],
        method: &SamKv,
        progress: impl FnMut(IngestProgress),
    ) -> Result<Option<Calibration>> {
        let all: Arc<dyn FusionMethod> = Arc::new(*method);
        self.ingest_for(documents, &all, progress)?;
        let prompt = Prompt { chunks: self.chunks(documents)?, ..Prompt::default() };
        let mut summaries = Vec::new();
        for context in prompt.contexts(self.longest_context()).chunks {
            let id = self.chunk_id(&context);
            let own = self.store().aux_tensors(&id, &method.kind())?;
            let shared = self.shared(&id).filter(|_| own.is_none());
            let shared = shared.map(|id| self.store().aux_tensors(&id, &method.kind())).transpose()?;
            summaries.extend(own.or(shared.flatten()));
        }
        Ok(method.calibrate(&summaries.iter().map(AsRef::as_ref).collect::<Vec<_>>()))
    }
}
