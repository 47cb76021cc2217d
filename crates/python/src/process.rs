//! The process that an engine was opened in. A process that is forked later has none of the engine's threads: work would wait for them for
//! ever, and so would freeing what they have.

use pyo3::prelude::*;

use crate::error::RefrainError;

/// The process that an engine was opened in.
#[derive(Clone, Copy)]
pub(crate) struct Process(u32);

impl Process {
    /// The process that runs now.
    pub(crate) fn current() -> Process {
        Process(std::process::id())
    }

    /// Whether this one runs now.
    pub(crate) fn is_current(self) -> bool {
        self.0 == std::process::id()
    }

    /// # Errors
    /// If a process runs now that was forked from this one.
    pub(crate) fn check(self) -> PyResult<()> {
        if self.is_current() {
            return Ok(());
        }
        let message = "this engine was opened before the process was forked, and its threads are not in the new process: open an engine \
                       there, or start the process with multiprocessing.get_context(\"spawn\")";
        Err(RefrainError::new_err(message))
    }
}

/// Frees a value while other threads of Python run, since it may take time and end threads.
pub(crate) fn free_detached<T: Send>(value: T) {
    let mut value = Some(value);
    // While the interpreter ends no thread attaches to it: the closure is not called, and `value` is freed here.
    Python::try_attach(|py| py.detach(|| drop(value.take())));
}
