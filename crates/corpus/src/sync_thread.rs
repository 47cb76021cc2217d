//! Bringing shared documents in line every few seconds.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use std::{io, thread};

use refrain_engine::Engine;

use crate::corpus::Corpus;

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
        let synced = corpus.sync(engine);
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
