//! An engine that is open, with the documents that it keeps.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use refrain::fusion::FusionMethod;
use refrain::{AUTO, EngineOptions, Library};

use crate::error::{raise, warn};
use crate::process::Process;

/// Opens an engine. A signal ends it between two layers that are packed, or pieces of a file that are hashed.
pub(crate) fn open(
    py: Python<'_>,
    options: impl FnOnce() -> EngineOptions<'static> + Send,
) -> PyResult<refrain::Engine> {
    let (mut warnings, mut signal) = (Vec::new(), Ok(()));
    let opened = py.detach(|| {
        let open = || {
            let options = options().on_warning(|text| warnings.push(text.to_owned()));
            let progress = |_, _| {
                signal = Python::attach(|py| py.check_signals());
                if signal.is_err() {
                    // A callback of progress ends the work by unwinding alone, which frees what is half open.
                    resume_unwind(Box::new("a signal"));
                }
            };
            options.on_progress(progress).open()
        };
        catch_unwind(AssertUnwindSafe(open))
    });
    signal?;
    for warning in warnings {
        warn(py, warning)?;
    }
    opened.unwrap_or_else(|panic| resume_unwind(panic)).map_err(raise)
}

/// The age from which on changes of documents by other machines are found: as a server finds them.
const SYNC_INTERVAL: Duration = Duration::from_secs(5);

/// An engine that is open.
pub(crate) struct Opened {
    pub(crate) engine: refrain::Engine,
    /// System message of prompts that give none.
    pub(crate) system: Option<String>,
    /// The kept documents, once they are needed: one program at a time has them open.
    library: Mutex<Option<Library>>,
    /// Digest of the tokenizer, once it is needed.
    tokenizer: OnceLock<[u8; 32]>,
    pub(crate) process: Process,
}

impl Opened {
    pub(crate) fn new(engine: refrain::Engine, system: Option<String>) -> Opened {
        let process = Process::current();
        Opened { engine, system, library: Mutex::default(), tokenizer: OnceLock::new(), process }
    }

    /// The method of this name, or the engine's.
    pub(crate) fn method(&self, name: Option<&str>) -> PyResult<Arc<dyn FusionMethod>> {
        match name.filter(|name| *name != AUTO) {
            Some(name) => refrain::fusion::METHODS.parse(name).map_err(raise),
            None => Ok(self.engine.default_method().clone()),
        }
    }

    /// Works with the kept documents of the store's folder, which stay open from then on.
    pub(crate) fn in_library<T>(
        &self,
        work: impl FnOnce(&Library) -> refrain::corpus::Result<T>,
    ) -> refrain::corpus::Result<T> {
        let mut library = self.library.lock().unwrap_or_else(PoisonError::into_inner);
        let opened = match library.take() {
            Some(opened) => opened,
            None => match self.engine.store().folder() {
                Some(folder) => Library::open(&self.engine, folder)?,
                None => Library::in_memory(&self.engine)?,
            },
        };
        work(library.insert(opened))
    }

    /// Reads the kept documents, with what other machines changed some seconds ago. A warning says where that could not be brought.
    pub(crate) fn read_library<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Library) -> refrain::corpus::Result<T> + Send,
    ) -> PyResult<T> {
        let read = || self.in_library(|library| Ok((library.pull_if_older(SYNC_INTERVAL), work(library)?)));
        let (pulled, found) = py.detach(read).map_err(raise)?;
        if let Err(error) = pulled {
            warn(py, format!("changes of documents by other machines may be missing: {error}"))?;
        }
        Ok(found)
    }

    /// Brings the kept documents in line with those of the other machines, if they are open.
    pub(crate) fn sync(&self) -> refrain::corpus::Result<()> {
        let library = self.library.lock().unwrap_or_else(PoisonError::into_inner);
        library.as_ref().map_or(Ok(()), Library::sync)
    }

    /// Digest of the tokenizer, which tells its chunks from those of another.
    pub(crate) fn tokenizer(&self) -> refrain::corpus::Result<[u8; 32]> {
        match self.tokenizer.get() {
            Some(digest) => Ok(*digest),
            None => {
                let digest = refrain::corpus::tokenizer_digest(&self.engine)?;
                Ok(*self.tokenizer.get_or_init(|| digest))
            }
        }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if !self.process.is_current() {
            let library = self.library.get_mut().unwrap_or_else(PoisonError::into_inner).take();
            std::mem::forget((self.engine.clone(), library));
        }
    }
}
