//! Chunks that a question had to compute, on their way to the store.

use std::sync::mpsc::{Sender, channel};

use super::chunk_prefill::UnstoredChunk;
use crate::Result;
use crate::background::Background;

/// Stores chunks one after the other on a thread of its own, so that the computing thread does not wait for a disk. Chunks that were handed over
/// are stored even if the writer is dropped.
#[derive(Debug, Default)]
pub(crate) struct ChunkWriter(Option<Writing>);

#[derive(Debug)]
struct Writing {
    /// Gone once no chunk follows.
    outbox: Option<Sender<UnstoredChunk>>,
    work: Background<Result<()>>,
}

impl ChunkWriter {
    /// Hands a chunk over.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(crate) fn store(&mut self, chunk: UnstoredChunk) -> Result<()> {
        let writing = match self.0.take() {
            Some(writing) => writing,
            None => {
                let (outbox, inbox) = channel::<UnstoredChunk>();
                let store_all = move || inbox.iter().try_for_each(|chunk| chunk.store().map(drop));
                Writing { outbox: Some(outbox), work: Background::spawn("store", store_all)? }
            }
        };
        let Writing { outbox, .. } = self.0.insert(writing);
        // A thread that has failed receives nothing more, and `is_done` says why.
        let _ = outbox.as_ref().map(|outbox| outbox.send(chunk));
        Ok(())
    }

    /// Whether all chunks are stored, of which the last was handed over; waits a moment for it.
    ///
    /// # Errors
    /// If a chunk was deleted while it was stored, and could not be deleted again.
    pub(crate) fn is_done(&mut self) -> Result<bool> {
        let Some(writing) = &mut self.0 else { return Ok(true) };
        writing.outbox = None;
        let Some(stored) = writing.work.poll() else { return Ok(false) };
        self.0 = None;
        stored.map(|()| true)
    }
}
