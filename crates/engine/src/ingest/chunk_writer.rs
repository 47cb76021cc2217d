//! Chunks that a question had to compute, on their way to the store.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use super::chunk_prefill::UnstoredChunk;
use crate::Result;
use crate::background::Background;

/// Stores chunks one after the other on a thread of its own, so that the computing thread does not wait for a disk. A writer that is dropped ends
/// with the chunk that is being written: chunks of questions that were given up would else pile up in memory beside a slow disk.
#[derive(Debug, Default)]
pub(crate) struct ChunkWriter(Option<Writing>);

#[derive(Debug)]
struct Writing {
    /// Gone once no chunk follows.
    outbox: Option<Sender<UnstoredChunk>>,
    work: Background<Result<()>>,
    is_dropped: Arc<AtomicBool>,
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
                let is_dropped = Arc::new(AtomicBool::new(false));
                let ends = is_dropped.clone();
                let store_all = move || {
                    let mut wanted = inbox.iter().take_while(|_| !ends.load(Relaxed));
                    wanted.try_for_each(|chunk| chunk.store().map(drop))
                };
                let work = Background::spawn("store", store_all)?;
                Writing { outbox: Some(outbox), work, is_dropped }
            }
        };
        let Writing { outbox, .. } = self.0.insert(writing);
        // A thread that has failed receives nothing more, and `is_done` says why.
        let _ = outbox.as_ref().map(|outbox| outbox.send(chunk));
        Ok(())
    }

    /// Whether all chunks are stored, of which the last was handed over; waits for it, for `patience` at most.
    ///
    /// # Errors
    /// If a chunk was deleted while it was stored, and could not be deleted again.
    pub(crate) fn is_done(&mut self, patience: Duration) -> Result<bool> {
        let Some(writing) = &mut self.0 else { return Ok(true) };
        writing.outbox = None;
        let Some(stored) = writing.work.poll(patience) else { return Ok(false) };
        self.0 = None;
        stored.map(|()| true)
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        self.is_dropped.store(true, Relaxed);
    }
}
