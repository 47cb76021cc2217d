//! The chunks that documents name.

use std::collections::{HashMap, HashSet};

use refrain_store::{ChunkKey, ListedObject, Objects};

use super::super::objects::{DOCUMENT, DOCUMENTS, KEYS, MOST_DOCUMENT, Place, decode_document, decode_keys};
use super::super::parallel::in_parallel;
use crate::error::{Error, Result};

/// Objects that are read between two signs of life.
const BATCH: usize = 256;

/// Keys that documents name, now or at an earlier look.
#[derive(Debug, Default)]
pub(super) struct Named {
    keys: HashSet<ChunkKey>,
    /// The objects that were read, with their versions.
    read: HashMap<String, String>,
    documents: usize,
}

impl Named {
    /// Documents that there were at the last look.
    pub(super) fn documents(&self) -> usize {
        self.documents
    }

    pub(super) fn has(&self, key: &ChunkKey) -> bool {
        self.keys.contains(key)
    }

    /// Reads the objects of documents that have come since the last look. Calls `alive` in between.
    pub(super) fn look(&mut self, objects: &Objects, mut alive: impl FnMut() -> Result<()>) -> Result<()> {
        self.documents = 0;
        let mut new = Vec::new();
        for object in objects.list(DOCUMENTS, None)? {
            let Some((place, part)) = Place::parse(&object.name) else { continue };
            let is_document = part == DOCUMENT;
            self.documents += usize::from(is_document);
            let has_keys = is_document || part.starts_with(KEYS);
            if has_keys && self.read.get(&object.name) != Some(&object.version()) {
                new.push((place, is_document, object));
            }
        }
        for batch in new.chunks(BATCH) {
            alive()?;
            let read = |(place, is_document, object): &(Place, bool, ListedObject)| -> Result<_> {
                Ok((object.clone(), keys_in(objects, place, *is_document, &object.name)?))
            };
            for outcome in in_parallel(batch, read) {
                let (object, keys) = outcome?;
                self.keys.extend(keys);
                let version = object.version();
                self.read.insert(object.name, version);
            }
        }
        Ok(())
    }
}

/// The keys in an object of a document; none if it was removed meanwhile.
fn keys_in(objects: &Objects, place: &Place, is_document: bool, name: &str) -> Result<Vec<ChunkKey>> {
    let Some(bytes) = objects.get(name, MOST_DOCUMENT)? else { return Ok(Vec::new()) };
    let found = match is_document {
        true => decode_document(&bytes, place).map(|document| document.keys),
        false => decode_keys(&bytes, place).map(|(_, keys)| keys),
    };
    found.map_err(|why| {
        let url = objects.url();
        Error::Garbage(format!(
            "what {name} of {url} names is not known, so that nothing can be deleted: {why}"
        ))
    })
}
