//! Objects that are not what their names say.

use super::{Bucket, Machine, Memory};
use crate::conformance::{key, list, new_document, put, remove_all, sync};
use crate::document_store::{ChangeKind, DocumentStore};
use crate::error::Error;
use crate::shared::objects::{
    CHANGES, DOCUMENT, KEYS, LIBRARY, MOST_TEXT, PINNED, REMOVAL, encode_keys, place_of,
};
use crate::shared::{Collector, GarbageOptions};
use crate::tables::document_id;

fn id_of(text: &str) -> String {
    document_id(&new_document("", text, &[]).document)
}

/// The bytes of a document's object.
fn object_of(machine: &Machine, text: &str) -> Vec<u8> {
    machine.objects.get(&place_of("", &id_of(text)).name(DOCUMENT), 1 << 20).unwrap().unwrap()
}

/// None of them is used, all are counted, and the others are brought all the same.
#[test]
fn broken_and_foreign_objects_are_left_out() {
    let bucket = Memory::new();
    let one = bucket.machine();
    let good = put(&one.documents, "", "good", &[1]).unwrap().id;
    let bytes = object_of(&one, "good");
    let planted = |text: &str, bytes: &[u8]| {
        one.objects.put(&place_of("", &id_of(text)).name(DOCUMENT), bytes.to_vec()).unwrap();
    };
    planted("cut off", &bytes[..bytes.len() / 2]);
    planted("empty", b"");
    planted("another document", &bytes);
    planted("no json", &[0xff; 100]);
    planted("nested", "[".repeat(100_000).as_bytes());
    let text = String::from_utf8(bytes.clone()).unwrap();
    planted("newer", text.replace("\"version\":1", "\"version\":7").as_bytes());
    // The same document in another tenant's place.
    one.objects.put(&place_of("victim", &good).name(DOCUMENT), bytes).unwrap();
    for foreign in ["documents/x/y/document.json", "documents/a", "changes/now.json", "ab/cd.safetensors"] {
        one.objects.put(foreign, b"{}".to_vec()).unwrap();
    }
    one.objects.put("changes/0000000000000001-0000000000000001.json", b"{".to_vec()).unwrap();
    let place = place_of("", &good);
    one.objects.put(&place.name(&format!("{KEYS}x.json")), b"{}".to_vec()).unwrap();
    let (hash, other) = encode_keys("victim", &[key(9)]);
    one.objects.put(&place.name(&format!("{KEYS}{hash}")), other).unwrap();
    one.objects.put(&place.name("unknown"), Vec::new()).unwrap();
    let two = bucket.machine();
    let changes = sync(&two.documents);
    assert_eq!(changes.len(), 1, "{changes:?}");
    assert_eq!(list(&two.documents, "").len(), 1);
    assert!(list(&two.documents, "victim").is_empty());
    assert_eq!(two.documents.local.chunk_keys("", &good).unwrap(), [key(1)]);
    assert_eq!(two.documents.sharing().unwrap().broken, 9);
    assert!(!two.documents.find("", &id_of("cut off")).unwrap());
    assert!(matches!(two.documents.set_pinned("", &id_of("empty"), true), Err(Error::NotFound(_))));
}

/// A machine that puts the document replaces an object that is broken, and leaves one of a newer version alone.
#[test]
fn a_broken_object_is_replaced_by_the_document_and_can_be_removed() {
    let bucket = Memory::new();
    let one = bucket.machine();
    put(&one.documents, "", "whole", &[1]).unwrap();
    let whole = object_of(&one, "whole");
    for (text, bytes) in [("broken", &whole[..9]), ("removed", &whole[..9])] {
        one.objects.put(&place_of("", &id_of(text)).name(DOCUMENT), bytes.to_vec()).unwrap();
    }
    assert_eq!(put(&one.documents, "", "broken", &[2]).unwrap().published, Some(true));
    assert_eq!(one.documents.remove("", &id_of("removed"), &[]).unwrap().keys, []);
    one.documents.finish_removal("", &id_of("removed"), &[]).unwrap();
    let two = bucket.machine();
    assert!(sync(&two.documents).iter().all(|change| change.kind == ChangeKind::Put));
    assert_eq!(list(&two.documents, "").len(), 2);
    assert!(!one.names().iter().any(|name| name.contains(&id_of("removed"))), "{:?}", one.names());

    let newer = String::from_utf8(whole).unwrap().replace("\"version\":1", "\"version\":2");
    let name = place_of("", &id_of("whole")).name(DOCUMENT);
    one.objects.put(&name, newer.clone().into_bytes()).unwrap();
    put(&one.documents, "", "whole", &[5]).unwrap();
    assert_eq!(one.objects.get(&name, 1 << 20).unwrap().unwrap(), newer.as_bytes());
    // Its removal is a removal.
    remove_all(&one.documents, "", &id_of("whole"));
    assert_eq!(one.objects.get(&name, 1 << 20).unwrap(), None);
}

/// A machine that has the document replaces its object when that is found broken, with the pin and keys of the others, and garbage
/// is collected again.
#[test]
fn an_object_that_has_been_broken_is_replaced_by_a_machine_that_has_the_document() {
    let bucket = Memory::new();
    let (one, two) = (bucket.machine(), bucket.machine());
    let id = put(&one.documents, "", "text", &[1]).unwrap().id;
    sync(&two.documents);
    put(&two.documents, "", "text", &[2]).unwrap();
    two.documents.set_pinned("", &id, true).unwrap();
    let (name, whole) = (place_of("", &id).name(DOCUMENT), object_of(&one, "text"));
    one.objects.put(&name, whole[..whole.len() / 2].to_vec()).unwrap();
    assert!(Collector::begin(&one.objects, &GarbageOptions::default()).is_err());
    for _ in 0..2 {
        one.list_next();
        sync(&one.documents);
        assert_eq!(one.documents.local.get("", &id).unwrap().published, Some(true));
    }
    assert_eq!(
        one.documents.sharing().unwrap().broken,
        2,
        "it is read once by the look and once by the write"
    );
    let three = bucket.machine();
    assert_eq!(sync(&three.documents).len(), 1);
    let stored = three.documents.local.get("", &id).unwrap();
    assert!(stored.pinned && stored.created == one.documents.local.get("", &id).unwrap().created);
    assert_eq!(three.documents.local.chunk_keys("", &id).unwrap(), [1, 2].map(key));
    assert_eq!(Collector::begin(&one.objects, &GarbageOptions::default()).unwrap().report().documents, 1);

    let newer = String::from_utf8(whole).unwrap().replace("\"version\":1", "\"version\":2");
    one.objects.put(&name, newer.clone().into_bytes()).unwrap();
    one.list_next();
    sync(&one.documents);
    assert_eq!(one.objects.get(&name, 1 << 20).unwrap().unwrap(), newer.as_bytes());
}

/// Whatever lies beside no document is no document, and stands in no document's way.
#[test]
fn what_lies_beside_no_document_is_nothing() {
    let bucket = Memory::new();
    let one = bucket.machine();
    let place = place_of("", &id_of("text"));
    let (hash, keys) = encode_keys("", &[key(9)]);
    one.objects.put(&place.name(PINNED), Vec::new()).unwrap();
    one.objects.put(&place.name(&format!("{KEYS}{hash}")), keys).unwrap();
    one.objects.put(&place.name(&format!("{REMOVAL}x.json")), b"{".to_vec()).unwrap();
    assert_eq!(sync(&one.documents), []);
    assert!(!one.documents.find("", &place.id).unwrap());
    put(&one.documents, "", "text", &[1]).unwrap();
    remove_all(&one.documents, "", &place.id);
    assert!(one.names().is_empty(), "{:?}", one.names());
}

#[test]
fn a_library_that_cannot_be_read_is_told_and_left_alone() {
    let bucket = Memory::new();
    let one = bucket.machine();
    let id = put(&one.documents, "", "text", &[]).unwrap().id;
    for broken in [&b"{"[..], br#"{"version":9,"id":"x"}"#] {
        one.objects.put(LIBRARY, broken.to_vec()).unwrap();
        let error = one.documents.sync(Some(&|_, _| Ok(Vec::new())), &mut |_| Ok(())).unwrap_err();
        assert!(error.to_string().contains(LIBRARY), "{error}");
        assert_eq!(one.objects.get(LIBRARY, 99).unwrap().unwrap(), broken);
    }
    assert!(one.documents.local.get("", &id).is_ok());
    assert!(one.objects.list(CHANGES, None).unwrap().len() == 1);
}

#[test]
fn a_text_that_is_too_large_to_be_shared_is_refused_after_those_before_it() {
    let bucket = Memory::new();
    let one = bucket.machine();
    let large = "x".repeat(MOST_TEXT as usize + 1);
    let new = [new_document("", "small", &[]), new_document("", &large, &[]), new_document("", "last", &[])];
    let (stored, outcome) = one.documents.put("", &new, "test");
    assert_eq!((stored.len(), list(&one.documents, "").len()), (1, 1));
    assert!(matches!(outcome, Err(Error::TooLarge { most: MOST_TEXT, .. })), "{outcome:?}");
}
