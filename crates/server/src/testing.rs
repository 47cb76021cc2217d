//! Engines and questions for unit tests.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use refrain::engine::{Engine, GenerateRequest, Parts, Sampling, Settings};
use refrain::fusion::METHODS;
use refrain::store::Store;

use crate::job::GenerateJob;

/// An engine of a tiny model, with a store in memory.
pub(crate) fn tiny_engine() -> Engine {
    engine_of(Store::in_memory(1 << 28))
}

/// An engine of a tiny model.
pub(crate) fn engine_of(store: Store) -> Engine {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    let settings = Settings { chunk_tokens: 64, ..Settings::default() };
    Engine::open(&path, store, settings, |_, _| ()).unwrap()
}

/// A store in a folder whose index is read and written only once the lock is given back: a broken index is made anew under this lock.
pub(crate) fn blocked_store(folder: &Path) -> (Store, File) {
    let store = Store::open(folder, 1 << 28).unwrap();
    fs::write(folder.join("index.redb"), "no index").unwrap();
    let lock = File::create(folder.join("index.lock")).unwrap();
    lock.lock().unwrap();
    (store, lock)
}

/// A question that is computed whole, without the store.
pub(crate) fn question(engine: &Engine) -> GenerateJob {
    question_over(engine, &[], "vanilla")
}

/// A question over documents, with a method.
pub(crate) fn question_over(engine: &Engine, documents: &[String], method: &str) -> GenerateJob {
    let question = "How tight is a bolt, and how tight is the screw beside it?";
    let parts = Parts { documents, question, ..Parts::default() };
    let sampling = Sampling { max_tokens: 200, min_tokens: 200, ..Sampling::default() };
    GenerateJob {
        prompt: Arc::new(engine.compose(&parts).unwrap()),
        request: GenerateRequest::new(METHODS.select(method).unwrap().built, sampling),
        grammar_field: "",
    }
}
