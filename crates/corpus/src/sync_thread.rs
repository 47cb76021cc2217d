//! Bringing shared documents in line every few seconds.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use std::{io, thread};

use refrain_engine::Engine;

use crate::corpus::Corpus;
use crate::error::{Error, Result};

/// A thread that brings a corpus in line with the other machines until it is dropped.
pub struct SyncThread {
    corpus: Arc<Corpus>,
    stopping: Arc<(Mutex<bool>, Condvar)>,
    /// Taken when it is dropped.
    thread: Option<JoinHandle<()>>,
}

impl SyncThread {
    /// Begins at once, and then every `interval`.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(corpus: Arc<Corpus>, engine: Engine, interval: Duration) -> io::Result<SyncThread> {
        let stopping = Arc::<(Mutex<bool>, Condvar)>::default();
        let (synced, stop) = (corpus.clone(), stopping.clone());
        let thread = thread::Builder::new()
            .name("documents".to_owned())
            .spawn(move || run(&synced, &engine, &stop, interval))?;
        Ok(SyncThread { corpus, stopping, thread: Some(thread) })
    }
}

fn run(
    corpus: &Corpus,
    engine: &Engine,
    (is_stopping, changed): &(Mutex<bool>, Condvar),
    interval: Duration,
) {
    let mut is_troubled = false;
    loop {
        let synced = synced(corpus, engine);
        let stop = is_stopping.lock().unwrap_or_else(PoisonError::into_inner);
        if *stop {
            return;
        }
        match &synced {
            // Once for each time that something is in the way.
            Err(error) if !is_troubled => {
                tracing::warn!(%error, "documents are not in line with other machines")
            }
            Ok(()) if is_troubled => tracing::info!("documents are in line with other machines again"),
            _ => {}
        }
        is_troubled = synced.is_err();
        let waited = changed.wait_timeout_while(stop, interval, |stop| !*stop);
        if *waited.unwrap_or_else(PoisonError::into_inner).0 {
            return;
        }
    }
}

/// Brings a corpus in line. A panic is an error of this time: the next one does what it has left.
fn synced(corpus: &Corpus, engine: &Engine) -> Result<()> {
    let outcome = catch_unwind(AssertUnwindSafe(|| corpus.sync(engine)));
    outcome.unwrap_or_else(|_| Err(Error::Sharing("bringing them in line has panicked".to_owned())))
}

impl Drop for SyncThread {
    fn drop(&mut self) {
        *self.stopping.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.stopping.1.notify_all();
        // What is under way ends at once, and the documents' file is free hereafter.
        self.corpus.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::mpsc::{Sender, channel};

    use refrain_engine::Settings;
    use refrain_store::{ChunkKey, Store};

    use super::*;
    use crate::cut::NewDocument;
    use crate::document_store::{Applied, DocumentStore, KeysOf, Removal};
    use crate::local::LocalDocuments;
    use crate::tables::StoredDocument;

    /// Tells of each time that it is brought in line, and panics then.
    struct Panicking(LocalDocuments, Sender<()>);

    impl DocumentStore for Panicking {
        fn local(&self) -> &LocalDocuments {
            &self.0
        }

        fn put(&self, _: &str, _: &[NewDocument], _: &str) -> (Vec<StoredDocument>, Result<()>) {
            unreachable!()
        }

        fn set_pinned(&self, _: &str, _: &str, _: bool) -> Result<StoredDocument> {
            unreachable!()
        }

        fn remove(&self, _: &str, _: &str, _: &[ChunkKey]) -> Result<Removal> {
            unreachable!()
        }

        fn finish_removal(&self, _: &str, _: &str, _: &[ChunkKey]) -> Result<()> {
            unreachable!()
        }

        fn sync(&self, _: Option<&KeysOf<'_>>, _: &mut Applied<'_>) -> Result<()> {
            let _ = self.1.send(());
            panic!("no thread can be started")
        }
    }

    #[test]
    fn documents_are_brought_in_line_again_after_a_panic() {
        let folder = tempfile::tempdir().unwrap();
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
        let store = Store::open(folder.path(), 1 << 26).unwrap();
        let engine = Engine::open(&path, store, Settings::default(), |_, _| ()).unwrap();
        let (sender, synced) = channel();
        let documents = Panicking(LocalDocuments::open(None, u64::MAX).unwrap(), sender);
        let corpus = Arc::new(Corpus::unindexed(&engine, Box::new(documents)).unwrap());
        let thread = SyncThread::start(corpus, engine, Duration::from_millis(1)).unwrap();
        for _ in 0..3 {
            synced.recv_timeout(Duration::from_secs(60)).unwrap();
        }
        drop(thread);
    }
}
