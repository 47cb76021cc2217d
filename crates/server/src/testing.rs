//! An engine for unit tests.

use std::path::PathBuf;

use refrain::engine::{Engine, Settings};
use refrain::store::Store;

/// An engine of a tiny model, with a store in memory.
pub(crate) fn tiny_engine() -> Engine {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    let settings = Settings { chunk_tokens: 64, ..Settings::default() };
    Engine::open(&path, Store::in_memory(1 << 28), settings, |_, _| ()).unwrap()
}
