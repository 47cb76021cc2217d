//! Opening the documents that a store's options name.

use std::path::Path;

use refrain_store::Store;

use crate::document_store::DocumentStore;
use crate::error::Result;
use crate::local::LocalDocuments;
#[cfg(feature = "remote")]
use crate::shared::SharedDocuments;

/// The documents of a folder, or of none in memory: those of all machines that share the object store of the chunk store, if it has one.
/// `quota` bounds the bytes of a namespace's titles and texts.
///
/// # Errors
/// If the documents' file cannot be opened, or another program has it open.
pub fn open_documents(store: &Store, folder: Option<&Path>, quota: u64) -> Result<Box<dyn DocumentStore>> {
    #[cfg(feature = "remote")]
    if let Some(objects) = store.objects() {
        return Ok(Box::new(SharedDocuments::open(folder, quota, objects)?));
    }
    let _ = store;
    Ok(Box::new(LocalDocuments::open(folder, quota)?))
}
