//! Work that may wait for a disk or an object store, on a thread of its own.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Work under way on a thread of its own. Dropping it does not stop the work.
#[derive(Debug)]
pub(crate) struct Background<T> {
    inbox: Receiver<T>,
    thread: Option<JoinHandle<()>>,
}

impl<T: Send + 'static> Background<T> {
    /// Starts `work` on a thread of this name.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(crate) fn spawn(
        name: &str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> std::io::Result<Background<T>> {
        let (outbox, inbox) = channel();
        let work = move || {
            // The receiver is gone where the work is not wanted any more.
            let _ = outbox.send(work());
        };
        let thread = thread::Builder::new().name(name.to_owned()).spawn(work)?;
        Ok(Background { inbox, thread: Some(thread) })
    }

    /// The result, if it comes within `patience`.
    pub(crate) fn poll(&mut self, patience: Duration) -> Option<T> {
        match self.inbox.recv_timeout(patience) {
            Ok(done) => Some(done),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join) {
                    std::panic::resume_unwind(panic);
                }
                None
            }
        }
    }
}
