//! Requests to ingest documents, or the parts of a prompt that methods reuse.

use std::sync::Arc;
use std::time::Instant;

use refrain_fusion::FusionMethod;
use refrain_store::{ChunkId, Fetched, WantedChunk};

use super::job::{Ingest, IngestProgress, IngestReport};
use crate::Result;
use crate::background::Background;
use crate::engine::Engine;
use crate::prompt::{Document, Prompt, PromptChunk};

impl Engine {
    /// Computes and stores every chunk of the documents that the store does not have.
    ///
    /// # Errors
    /// If a text cannot be tokenised or the store cannot be read. A full disk is no error: the report says so.
    pub fn ingest(
        &self,
        documents: &[Document],
        progress: impl FnMut(IngestProgress),
    ) -> Result<IngestReport> {
        let prompt = Prompt { chunks: self.chunks(documents)?, ..Prompt::default() };
        Ingest::start(self, self.named_in(&prompt), documents.len(), Vec::new(), true)?.run(progress)
    }

    /// Computes and stores what a method reuses of the documents. For a method with statistics, documents are prefilled whole,
    /// and its statistics are kept beside each. Documents that the store has already only get statistics.
    ///
    /// # Errors
    /// As for [`Engine::ingest`].
    pub fn ingest_for(
        &self,
        documents: &[Document],
        method: &Arc<dyn FusionMethod>,
        progress: impl FnMut(IngestProgress),
    ) -> Result<IngestReport> {
        self.start_ingest(documents, method)?.run(progress)
    }

    /// Begins [`Engine::ingest_for`], to be done step by step.
    ///
    /// # Errors
    /// As for [`Engine::ingest`].
    pub fn start_ingest(&self, documents: &[Document], method: &Arc<dyn FusionMethod>) -> Result<Ingest> {
        self.start_chunk_ingest(self.chunks(documents)?, method)
    }

    /// [`Engine::start_ingest`] of documents that are cut into chunks already, as [`Engine::chunks`] cuts them.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn start_chunk_ingest(
        &self,
        chunks: Vec<PromptChunk>,
        method: &Arc<dyn FusionMethod>,
    ) -> Result<Ingest> {
        self.start_ingest_of(&Prompt { chunks, ..Prompt::default() }, method, true)
    }

    /// [`Engine::start_chunk_ingest`] on the way to an answer: chunks that come from an object store are not waited for, but read while they
    /// come.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn start_ingest_to_answer(
        &self,
        chunks: &[PromptChunk],
        method: &Arc<dyn FusionMethod>,
    ) -> Result<Ingest> {
        // The documents are those of the answer's prompt, in their order.
        let prompt = Prompt { system: self.before_chunks(), chunks: chunks.to_vec(), ..Prompt::default() };
        self.start_ingest_of(&prompt, method, false)
    }

    fn start_ingest_of(
        &self,
        prompt: &Prompt,
        method: &Arc<dyn FusionMethod>,
        whole: bool,
    ) -> Result<Ingest> {
        let documents = prompt.chunks.chunk_by(|a, b| a.document == b.document).count();
        let methods = if method.statistics().is_empty() { Vec::new() } else { vec![method.clone()] };
        Ingest::start(self, self.stored_in(prompt, !methods.is_empty()), documents, methods, whole)
    }

    /// Whether the system part of a prompt is kept in the store.
    pub(crate) fn keeps_system(&self, prompt: &Prompt) -> bool {
        prompt.system_reusable && !prompt.system.is_empty()
    }

    /// A chunk as the object store is asked for it: also in the shared namespace, with the time that computing it behind what is `left` of it
    /// is expected to take.
    pub(crate) fn wanted(&self, id: ChunkId, left: &[u32]) -> WantedChunk {
        let compute = self.prefill_rate().time_of(left.len() + self.prefilled_tokens(&id));
        WantedChunk { ids: self.places(&id).collect(), compute }
    }

    /// Has the store fetch chunks that it lacks, on another thread, unless computing them is expected to take less time. The work ends when it
    /// is known which of them come, or, where they are to be `whole`, when these are there. None where there is no object store.
    pub(crate) fn prefetch_chunks(
        &self,
        wanted: Vec<WantedChunk>,
        kinds: Vec<String>,
        whole: bool,
    ) -> Result<Option<Background<Fetched>>> {
        let store = self.store().clone();
        if !store.fetches() {
            return Ok(None);
        }
        let fetch = move || {
            let kinds: Vec<&str> = kinds.iter().map(String::as_str).collect();
            let fetched = store.prefetch(&wanted, &kinds, whole);
            wanted.iter().flat_map(|chunk| &chunk.ids).for_each(|id| _ = store.awaits_header(id, None));
            fetched
        };
        Ok(Some(Background::spawn("fetch", fetch)?))
    }

    /// Whether one of the chunks, which is not here, is on its way from the object store and not late, and its header still to come. Waits for
    /// headers until that time at most, or without one until the chunk is late.
    pub(crate) fn awaits_header<'a>(
        &self,
        ids: impl IntoIterator<Item = &'a ChunkId>,
        until: Option<Instant>,
    ) -> bool {
        let (store, now) = (self.store(), Instant::now());
        let is_at_hand = |id: ChunkId| store.contains(&id) || store.is_in_flight(&id);
        let is_awaited = |id: &ChunkId| {
            let awaits = |until| self.places(id).any(|id| store.awaits_header(&id, until));
            awaits(Some(now)) && !self.places(id).any(is_at_hand) && awaits(until)
        };
        store.fetches() && ids.into_iter().any(is_awaited)
    }
}
