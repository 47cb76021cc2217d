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
        for context in self.contexts(&prompt).chunks {
            let mut places = self.places(&self.chunk_id(&context));
            let summary = places.find_map(|id| self.store().aux_tensors(&id, &method.kind()).transpose());
            summaries.extend(summary.transpose()?);
        }
        Ok(method.calibrate(&summaries.iter().map(AsRef::as_ref).collect::<Vec<_>>()))
    }
}
