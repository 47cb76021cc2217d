//! An engine that is open, with the documents that it keeps.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use pyo3::prelude::*;
use refrain::fusion::FusionMethod;
use refrain::{AUTO, Library};

use crate::error::raise;

/// An engine that is open.
pub(crate) struct Opened {
    pub(crate) engine: refrain::Engine,
    /// System message of prompts that give none.
    pub(crate) system: Option<String>,
    /// The kept documents, once they are needed: one program at a time has them open.
    library: Mutex<Option<Library>>,
    /// Digest of the tokenizer, once it is needed.
    tokenizer: OnceLock<[u8; 32]>,
}

impl Opened {
    pub(crate) fn new(engine: refrain::Engine, system: Option<String>) -> Opened {
        Opened { engine, system, library: Mutex::default(), tokenizer: OnceLock::new() }
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
