//! The conformance battery of document stores: each implementation passes all of these tests.

use refrain_engine::Document;
use refrain_store::ChunkKey;

use crate::cut::NewDocument;
use crate::document_store::{Change, DocumentStore};
use crate::error::{Error, Result};
use crate::tables::{StoredDocument, document_id};

/// A document of two chunks with these keys.
pub(crate) fn new_document(title: &str, text: &str, keys: &[u8]) -> NewDocument {
    NewDocument {
        document: Document { title: title.to_owned(), text: text.to_owned() },
        chunks: vec![vec![1, 2, 3], vec![text.len() as u32]],
        chunk_texts: vec![text.to_owned(), String::new()],
        keys: keys.iter().copied().map(key).collect(),
    }
}

pub(crate) fn key(byte: u8) -> ChunkKey {
    ChunkKey([byte; 32])
}

/// Stores a document.
pub(crate) fn put(
    store: &dyn DocumentStore,
    namespace: &str,
    text: &str,
    keys: &[u8],
) -> Result<StoredDocument> {
    let (mut stored, outcome) = store.put(namespace, &[new_document("", text, keys)], "test");
    outcome.map(|()| stored.remove(0))
}

/// Removes a document, and gives the keys of the chunks that are to be deleted.
pub(crate) fn remove(store: &dyn DocumentStore, namespace: &str, id: &str) -> Result<Vec<ChunkKey>> {
    let removal = store.remove(namespace, id, &[])?;
    removal.withdrawn.map(|()| removal.keys)
}

/// Removes a document, and finishes that.
pub(crate) fn remove_all(store: &dyn DocumentStore, namespace: &str, id: &str) {
    let keys = remove(store, namespace, id).unwrap();
    store.finish_removal(namespace, id, &keys).unwrap();
}

pub(crate) fn list(store: &dyn DocumentStore, namespace: &str) -> Vec<StoredDocument> {
    store.local().list(namespace, "", usize::MAX).unwrap().0
}

/// Brings a store in line, and gives what has changed.
pub(crate) fn sync(store: &dyn DocumentStore) -> Vec<Change> {
    let mut all = Vec::new();
    let mut applied = |changes: Vec<Change>| {
        all.extend(changes);
        Ok(())
    };
    store.sync(Some(&|_, _| Ok(Vec::new())), &mut applied).unwrap();
    all
}

fn is_not_found<T>(found: Result<T>) -> bool {
    matches!(found, Err(Error::NotFound(_)))
}

/// Holds stores that `open` makes, each empty and with a quota, against what the trait says.
pub(crate) fn check(open: &dyn Fn(u64) -> Box<dyn DocumentStore>) {
    documents_are_read_as_they_were_put(&*open(u64::MAX));
    a_document_that_is_put_again_stays_the_same(&*open(u64::MAX));
    namespaces_see_nothing_of_each_other(&*open(u64::MAX));
    a_removal_is_remembered_until_it_is_finished(&*open(u64::MAX));
    chunks_of_other_documents_stay(&*open(u64::MAX));
    the_quota_bounds_a_namespace(&*open(10));
    ids_and_namespaces_of_any_form_lead_nowhere_else(&*open(u64::MAX));
}

fn documents_are_read_as_they_were_put(store: &dyn DocumentStore) {
    assert!(list(store, "x").is_empty() && store.local().count().unwrap() == 0);
    let new = [new_document("One", "first text", &[2, 1]), new_document("", "# Second\ntext", &[3])];
    let (stored, outcome) = store.put("x", &new, "by this tokenizer");
    outcome.unwrap();
    let local = store.local();
    for (stored, new) in stored.iter().zip(&new) {
        assert_eq!(stored.id, document_id(&new.document));
        assert_eq!(local.get("x", &stored.id).unwrap(), *stored);
        assert_eq!(local.document("x", &stored.id).unwrap(), new.document);
        assert_eq!(local.chunks("x", &stored.id).unwrap(), new.chunks);
        assert_eq!(local.chunk("x", &stored.id, 1).unwrap(), new.chunks[1]);
        assert!(is_not_found(local.chunk("x", &stored.id, 2)));
        assert_eq!((stored.chunks, stored.tokens, stored.pinned), (2, 4, false));
        assert_eq!(stored.segmentation, "by this tokenizer");
        assert_ne!(stored.published, Some(false));
    }
    assert_eq!((stored[0].title.as_str(), stored[1].title.as_str()), ("One", "Second"));
    assert_eq!(local.chunk_keys("x", &stored[0].id).unwrap(), [1, 2].map(key));
    let listed = list(store, "x");
    assert!(
        listed.len() == 2 && listed[0].id < listed[1].id && listed.iter().all(|one| stored.contains(one))
    );
    assert_eq!(local.list("x", &listed[0].id, 1).unwrap(), (listed[1..].to_vec(), false));
    assert!(local.list("x", "", 1).unwrap().1);
    // It is in line with itself.
    assert_eq!(sync(store), []);
    assert_eq!(list(store, "x"), listed);
}

fn a_document_that_is_put_again_stays_the_same(store: &dyn DocumentStore) {
    let first = put(store, "", "text", &[1]).unwrap();
    assert!(is_not_found(store.set_pinned("", &format!("doc-{}", "0".repeat(24)), true)));
    assert!(store.set_pinned("", &first.id, true).unwrap().pinned);
    let again = put(store, "", "text", &[2]).unwrap();
    assert_eq!((&again.id, again.created, again.pinned), (&first.id, first.created, true));
    assert_eq!(store.local().chunk_keys("", &first.id).unwrap(), [1, 2].map(key));
    assert_eq!(store.local().count().unwrap(), 1);
    assert!(!store.set_pinned("", &first.id, false).unwrap().pinned);
    assert!(!store.local().get("", &first.id).unwrap().pinned);
}

fn namespaces_see_nothing_of_each_other(store: &dyn DocumentStore) {
    let id = put(store, "x", "text", &[1]).unwrap().id;
    for other in ["", "y", "x/", "x\0"] {
        assert!(list(store, other).is_empty());
        assert!(
            is_not_found(store.local().get(other, &id)) && is_not_found(store.local().document(other, &id))
        );
        assert!(store.local().chunks(other, &id).unwrap().is_empty());
        assert!(!store.find(other, &id).unwrap());
        assert!(is_not_found(store.set_pinned(other, &id, true)));
        assert!(is_not_found(store.remove(other, &id, &[])));
    }
    // Equal texts of two namespaces are two documents.
    put(store, "y", "text", &[1]).unwrap();
    assert_eq!(remove(store, "y", &id).unwrap(), [key(1)]);
    store.finish_removal("y", &id, &[key(1)]).unwrap();
    assert!(store.find("x", &id).unwrap() && !store.find("y", &id).unwrap());
}

fn a_removal_is_remembered_until_it_is_finished(store: &dyn DocumentStore) {
    let id = put(store, "", "text", &[1, 2]).unwrap().id;
    let removal = store.remove("", &id, &[key(3)]).unwrap();
    removal.withdrawn.unwrap();
    assert_eq!(removal.keys, [1, 2, 3].map(key));
    assert!(is_not_found(store.local().get("", &id)) && !store.find("", &id).unwrap());
    assert_eq!(remove(store, "", &id).unwrap(), [1, 2, 3].map(key));
    // A chunk that a document has got meanwhile stays, and so does a document that is stored again.
    let other = put(store, "", "other", &[3]).unwrap().id;
    assert_eq!(remove(store, "", &id).unwrap(), [1, 2].map(key));
    put(store, "", "text", &[1]).unwrap();
    store.finish_removal("", &id, &[1, 2].map(key)).unwrap();
    assert_eq!(store.local().chunk_keys("", &id).unwrap(), [key(1)]);
    assert_eq!(sync(store), []);
    remove_all(store, "", &id);
    assert!(is_not_found(store.remove("", &id, &[])));
    assert_eq!(list(store, "").into_iter().map(|document| document.id).collect::<Vec<_>>(), [other]);
}

fn chunks_of_other_documents_stay(store: &dyn DocumentStore) {
    let ids = [("a", [1, 2]), ("b", [2, 3])].map(|(text, keys)| put(store, "", text, &keys).unwrap().id);
    put(store, "elsewhere", "c", &[1]).unwrap();
    assert_eq!(remove(store, "", &ids[0]).unwrap(), [key(1)]);
    assert_eq!(store.local().chunk_keys("", &ids[1]).unwrap(), [2, 3].map(key));
}

fn the_quota_bounds_a_namespace(store: &dyn DocumentStore) {
    let new = ["1234", "5678", "too long"].map(|text| new_document("", text, &[]));
    let (stored, outcome) = store.put("", &new, "test");
    assert_eq!(stored.len(), 2, "those before it stay");
    assert!(matches!(outcome, Err(Error::QuotaExceeded { stored: 8, quota: 10, new: 8 })), "{outcome:?}");
    assert_eq!(list(store, "").len(), 2);
    put(store, "other", "too long", &[]).unwrap();
    remove_all(store, "", &stored[0].id);
    put(store, "", "54321", &[]).unwrap();
}

fn ids_and_namespaces_of_any_form_lead_nowhere_else(store: &dyn DocumentStore) {
    let id = put(store, "", "text", &[]).unwrap().id;
    for hostile in
        ["", ".", "../", "/etc/passwd", "doc-", "..\\..", "documents/x", "\u{0}", &"x".repeat(4000)]
    {
        for (namespace, id) in [("", hostile), (hostile, hostile)] {
            assert!(is_not_found(store.local().get(namespace, id)));
            assert!(!store.find(namespace, id).unwrap());
            assert!(is_not_found(store.remove(namespace, id, &[])));
            assert!(is_not_found(store.set_pinned(namespace, id, true)));
        }
        // Any text is valid as a namespace.
        let own = put(store, hostile, "text", &[]).unwrap();
        assert_eq!((list(store, hostile), own.id.as_str()), (vec![own.clone()], id.as_str()));
        if !hostile.is_empty() {
            remove_all(store, hostile, &id);
            assert!(list(store, hostile).is_empty());
        }
    }
    assert_eq!(list(store, "").len(), 1);
}
