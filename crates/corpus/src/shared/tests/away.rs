//! An object store that is away, forgets, or takes nothing.

use std::time::{Duration, Instant};

use refrain_store::{Limits, Store};

use super::{Bucket, Folder, Machine, Memory, contents};
use crate::conformance::{key, list, put, remove, remove_all, sync};
use crate::document_store::{Applied, Change, ChangeKind, DocumentStore};
use crate::error::{Error, Result};
use crate::local::LocalDocuments;
use crate::notes::SharingState;
use crate::shared::SharedDocuments;
use crate::shared::objects::{DOCUMENT, place_of};

pub(super) fn try_sync(documents: &SharedDocuments) -> Result<()> {
    let applied: &mut Applied<'_> = &mut |_| Ok(());
    documents.sync(Some(&|_, _| Ok(Vec::new())), applied)
}

/// Tries until the object store is asked again after a failure.
pub(super) fn back(machine: &Machine) {
    let began = Instant::now();
    while let Err(error) = try_sync(&machine.documents) {
        assert!(began.elapsed() < Duration::from_secs(60), "{error}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// What is changed while the object store is away counts here, is said not to be published, and reaches the others when it is back,
/// also after a restart.
pub(super) fn changes_wait_for_the_object_store(bucket: &dyn Bucket, hang: &dyn Fn(bool)) {
    let (one, two) = (bucket.machine(), bucket.machine());
    let [removed, pinned] = ["removed", "pinned"].map(|text| put(&one.documents, "", text, &[1]).unwrap().id);
    sync(&one.documents);
    sync(&two.documents);
    hang(true);
    let new = put(&one.documents, "", "new", &[2]).unwrap();
    assert_eq!(new.published, Some(false));
    assert!(one.documents.set_pinned("", &pinned, true).unwrap().pinned);
    let removal = one.documents.remove("", &removed, &[]).unwrap();
    assert!(removal.withdrawn.is_err(), "it is honest about the others");
    let began = Instant::now();
    for index in 0..20 {
        let stored = put(&one.documents, "", &format!("further {index}"), &[]).unwrap();
        assert_eq!(one.documents.local.get("", &stored.id).unwrap().published, Some(false));
    }
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    // What is not here can be neither found nor said to be missing.
    let unknown = format!("doc-{}", "0".repeat(24));
    assert!(matches!(one.documents.find("", &unknown), Err(Error::ObjectStore(_))));
    assert!(matches!(one.documents.remove("", &unknown, &[]), Err(Error::ObjectStore(_))));
    assert!(!one.documents.find("", "no id").unwrap());
    assert!(try_sync(&one.documents).is_err());
    let stats = one.documents.sharing().unwrap();
    assert!(stats.unsent == 23 && stats.failures == 1 && stats.trouble.is_some(), "{stats:?}");
    // The other machine goes on with what it knows.
    assert!(try_sync(&two.documents).is_err());
    assert_eq!(list(&two.documents, "").len(), 2);
    let one = one.restarted();
    assert_eq!(list(&one.documents, "").len(), 22);
    hang(false);
    back(&one);
    let stats = one.documents.sharing().unwrap();
    assert!(stats.unsent == 0 && stats.trouble.is_none() && stats.last_sync.is_some(), "{stats:?}");
    assert_eq!(one.documents.local.get("", &new.id).unwrap().published, Some(true));
    for (_, id, keys) in one.documents.unfinished_removals().unwrap() {
        assert_eq!(
            (&id, keys.as_slice()),
            (&removed, [].as_slice()),
            "the chunk is another document's as well"
        );
        one.documents.finish_removal("", &id, &keys).unwrap();
    }
    back(&two);
    assert_eq!(contents(&two), contents(&one));
    assert!(two.documents.local.get("", &pinned).unwrap().pinned);
    assert!(!two.documents.find("", &removed).unwrap());
    for (_, id, keys) in two.documents.unfinished_removals().unwrap() {
        two.documents.finish_removal("", &id, &keys).unwrap();
    }
    assert!(!one.names().iter().any(|name| name.contains(&removed)), "{:?}", one.names());
}

#[test]
fn changes_wait_for_an_object_store_in_memory() {
    let memory = Memory::new();
    changes_wait_for_the_object_store(&memory, &|hangs| memory.hang(hangs));
}

/// A removal that could not be told is not undone by what the object store still has, and a document that is put again meanwhile stays.
#[test]
fn an_unsent_change_is_not_undone_by_what_others_have() {
    let memory = Memory::new();
    let one = memory.machine();
    let ids = ["a", "b"].map(|text| put(&one.documents, "", text, &[1]).unwrap().id);
    sync(&one.documents);
    memory.hang(true);
    for id in &ids {
        assert!(one.documents.remove("", id, &[]).unwrap().withdrawn.is_err());
    }
    put(&one.documents, "", "b", &[1]).unwrap();
    one.list_next();
    memory.hang(false);
    back(&one);
    let left: Vec<String> = list(&one.documents, "").into_iter().map(|document| document.id).collect();
    assert_eq!(left, [ids[1].clone()]);
    assert_eq!(one.names().iter().filter(|name| name.ends_with("document.json")).count(), 1);
    // The removal of the first is complete but for its chunks, which any machine may delete.
    let two = memory.machine();
    sync(&two.documents);
    assert_eq!(contents(&two), contents(&one));
}

/// The documents of a folder that was never shared are brought to the object store when it is.
#[test]
fn documents_that_were_there_before_are_shared() {
    let memory = Memory::new();
    let folder = std::sync::Arc::new(tempfile::tempdir().unwrap());
    let local = LocalDocuments::open(Some(folder.path()), u64::MAX).unwrap();
    let stored = put(&local, "x", "text", &[1]).unwrap();
    DocumentStore::set_pinned(&local, "x", &stored.id, true).unwrap();
    assert_eq!(stored.published, None);
    let theirs = put(&local, "x", "theirs", &[1]).unwrap().id;
    drop(local);
    let other = memory.machine();
    put(&other.documents, "x", "theirs", &[1]).unwrap();
    other.documents.set_pinned("x", &theirs, true).unwrap();
    let one = Machine::in_folder(folder, &memory.options());
    assert_eq!(one.documents.local.get("x", &stored.id).unwrap().published, Some(false));
    sync(&one.documents);
    let two = memory.machine();
    assert_eq!(sync(&two.documents).len(), 2);
    assert!(two.documents.local.get("x", &theirs).unwrap().pinned, "a pin is not undone");
    let found = two.documents.local.get("x", &stored.id).unwrap();
    assert!(found.pinned && found.created == stored.created);
    assert_eq!(two.documents.local.chunk_keys("x", &stored.id).unwrap(), [key(1)]);
}

/// What a program changes in the folder without the object store reaches it with the next one that has it.
#[test]
fn changes_without_the_object_store_are_noted_in_a_folder_that_was_shared() {
    let memory = Memory::new();
    let (one, two) = (memory.machine(), memory.machine());
    let id = put(&one.documents, "", "text", &[1]).unwrap().id;
    sync(&two.documents);
    let (folder, options) = (one.folder.clone(), memory.options());
    drop(one);
    let local = LocalDocuments::open(Some(folder.path()), u64::MAX).unwrap();
    let new = put(&local, "", "new", &[2]).unwrap();
    assert_eq!(new.published, None);
    // A chunk that a question has stored goes with the document, in the object store as well.
    let removal = DocumentStore::remove(&local, "", &id, &[key(7)]).unwrap();
    assert_eq!(DocumentStore::unfinished_removals(&local).unwrap().len(), 1);
    DocumentStore::finish_removal(&local, "", &id, &removal.keys).unwrap();
    assert!(DocumentStore::unfinished_removals(&local).unwrap().is_empty(), "nothing is left to do here");
    drop(local);
    let one = Machine::in_folder(folder, &options);
    sync(&one.documents);
    let removal = (String::new(), id.clone(), [1, 7].map(key).to_vec());
    assert_eq!(one.documents.unfinished_removals().unwrap(), [removal]);
    one.documents.finish_removal("", &id, &[1, 7].map(key)).unwrap();
    assert!(one.documents.unfinished_removals().unwrap().is_empty());
    assert_eq!(list(&one.documents, "").len(), 1, "it does not come back");
    let kinds: Vec<_> = sync(&two.documents).into_iter().map(|change| (change.id, change.kind)).collect();
    assert!(
        kinds.contains(&(id, ChangeKind::Removed)) && kinds.contains(&(new.id, ChangeKind::Put)),
        "{kinds:?}"
    );
}

/// An object store that is emptied while machines look, in whatever order, gets the documents again and takes none away.
#[test]
fn an_object_store_that_was_emptied_takes_no_document() {
    for is_reversed in [false, true] {
        let memory = Memory::new();
        let (one, two) = (memory.machine(), memory.machine());
        let ids = ["a", "b", "c"].map(|text| put(&one.documents, "", text, &[1]).unwrap().id);
        sync(&one.documents);
        sync(&two.documents);
        let mut names: Vec<String> =
            one.objects.list("", None).unwrap().into_iter().map(|object| object.name).collect();
        names.sort();
        if is_reversed {
            names.reverse();
        }
        for name in names {
            one.objects.delete(&name).unwrap();
            // A machine that looks at what is announced finds it gone as well.
            one.documents.set_pinned("", &ids[0], true).unwrap();
            assert!(!sync(&two.documents).iter().any(|change| change.kind == ChangeKind::Removed), "{name}");
            for machine in [&two, &one] {
                machine.list_next();
                assert_eq!(sync(&machine.documents), [], "{name}");
                assert_eq!(list(&machine.documents, "").len(), 3);
            }
        }
        let three = memory.machine();
        sync(&three.documents);
        assert_eq!(contents(&three), contents(&one));
        assert!(three.documents.local.get("", &ids[0]).unwrap().pinned);
    }
}

/// Documents that are deleted from the object store between a machine's sending and its listing are brought again, also after a clock was set
/// back.
#[test]
fn an_object_store_that_was_emptied_before_its_first_listing_takes_no_document() {
    let memory = Memory::new();
    let one = memory.machine();
    put(&one.documents, "", "text", &[1]).unwrap();
    sync(&one.documents);
    let empty = || one.names().iter().for_each(|name| one.objects.delete(name).unwrap());
    one.objects.delete("library.json").unwrap();
    let mut state = one.documents.local.sharing_state().unwrap();
    one.documents.check_library(&mut state, true).unwrap();
    one.documents.send_all().unwrap();
    empty();
    assert_eq!(sync(&one.documents), []);
    assert_eq!(one.names().len(), 1);
    let state = one.documents.local.sharing_state().unwrap();
    let listed = crate::notes::now().as_secs() + 60;
    one.documents.local.set_sharing_state(&SharingState { listed, ..state }).unwrap();
    empty();
    assert_eq!(sync(&one.documents), []);
    assert_eq!(one.names().len(), 1);
}

/// A removal is remembered for a month, and a machine that was away for longer removes what has no objects.
#[test]
fn a_machine_that_was_away_for_a_month_forgets_what_has_no_objects() {
    let memory = Memory::new();
    let (one, two) = (memory.machine(), memory.machine());
    let ids = ["a", "b"].map(|text| put(&one.documents, "", text, &[1]).unwrap().id);
    sync(&two.documents);
    for id in &ids {
        remove_all(&one.documents, "", id);
    }
    for object in one.objects.list("", None).unwrap() {
        // That of the second one is gone, as after a month.
        if object.name.starts_with("changes/") || object.name.contains(&ids[1]) {
            one.objects.delete(&object.name).unwrap();
        }
    }
    two.was_away(30 * 86400);
    assert_eq!(sync(&two.documents).len(), 2);
    assert!(two.names().is_empty(), "{:?}", two.names());
}

/// Another object store gets the documents of a machine that comes there, and takes none away.
#[test]
fn another_object_store_gets_the_documents() {
    let memory = Memory::new();
    let three = memory.machine();
    put(&three.documents, "", "text", &[1]).unwrap();
    sync(&three.documents);
    let folder = three.folder.clone();
    drop(three);
    let elsewhere = Folder(tempfile::tempdir().unwrap());
    let moved = Machine::in_folder(folder, &elsewhere.options());
    moved.list_next();
    sync(&moved.documents);
    let four = elsewhere.machine();
    assert_eq!(sync(&four.documents).len(), 1);
}

/// A machine that pulls has the documents of others and sends none of its own. What it has is not published in another object store.
#[test]
fn a_pull_sends_nothing() {
    let bucket = Memory::new();
    let folder = std::sync::Arc::new(tempfile::tempdir().unwrap());
    let local = LocalDocuments::open(Some(folder.path()), u64::MAX).unwrap();
    let own = put(&local, "", "own", &[1]).unwrap().id;
    drop(local);
    let other = bucket.machine();
    let theirs = put(&other.documents, "", "theirs", &[2]).unwrap().id;
    sync(&other.documents);
    let pull = |machine: &Machine| {
        let mut pulled = Vec::new();
        let mut applied = |changes: Vec<Change>| {
            pulled.extend(changes);
            Ok(())
        };
        machine.documents.pull(Some(&|_, _| Ok(Vec::new())), &mut applied).unwrap();
        pulled
    };
    let published = |machine: &Machine| {
        let published = |id| machine.documents.local.get("", id).unwrap().published;
        (published(&own), published(&theirs))
    };
    let one = Machine::in_folder(folder.clone(), &bucket.options());
    assert_eq!(pull(&one), [Change::new("", &theirs, ChangeKind::Put)]);
    assert_eq!(list(&other.documents, "").len(), 1);
    assert_eq!(sync(&other.documents), []);
    assert_eq!(published(&one), (Some(false), Some(true)));
    // Lost and broken objects are left to machines that send.
    let object = place_of("", &theirs).name(DOCUMENT);
    one.objects.delete(&object).unwrap();
    one.list_next();
    assert_eq!(pull(&one), []);
    assert_eq!(one.objects.get(&object, 1 << 20).unwrap(), None);
    one.objects.put(&object, b"broken".to_vec()).unwrap();
    one.list_next();
    assert_eq!(pull(&one), []);
    assert_eq!(one.objects.get(&object, 1 << 20).unwrap().unwrap(), b"broken");
    other.list_next();
    assert_eq!(sync(&other.documents), []);
    assert_ne!(one.objects.get(&object, 1 << 20).unwrap().unwrap(), b"broken");
    drop(one);
    let elsewhere = Folder(tempfile::tempdir().unwrap());
    let one = Machine::in_folder(folder, &elsewhere.options());
    assert_eq!(pull(&one), []);
    assert_eq!(one.objects.list("", None).unwrap().len(), 0);
    assert_eq!(published(&one), (Some(false), Some(false)));
    sync(&one.documents);
    assert_eq!(published(&one), (Some(true), Some(true)));
}

/// A machine that used another object store in between brings what it got there, and nothing that was removed meanwhile.
#[test]
fn a_machine_that_comes_back_brings_no_removed_document() {
    let (memory, elsewhere) = (Memory::new(), Memory::new());
    let (one, two) = (memory.machine(), memory.machine());
    let [removed, kept] = ["removed", "kept"].map(|text| put(&one.documents, "", text, &[1]).unwrap().id);
    sync(&one.documents);
    sync(&two.documents);
    let folder = two.folder.clone();
    drop(two);
    let two = Machine::in_folder(folder.clone(), &elsewhere.options());
    let new = put(&two.documents, "", "new", &[2]).unwrap().id;
    two.list_next();
    sync(&two.documents);
    assert_eq!(list(&two.documents, "").len(), 3);
    drop(two);
    remove_all(&one.documents, "", &removed);
    let two = Machine::in_folder(folder, &memory.options());
    two.list_next();
    let changes = sync(&two.documents).into_iter().map(|change| (change.id, change.kind));
    assert!(changes.eq([(removed, ChangeKind::Removed)]));
    sync(&one.documents);
    assert_eq!(contents(&one), contents(&two));
    let mut expected = [kept, new];
    expected.sort();
    assert!(contents(&one).into_iter().map(|(id, ..)| id).eq(expected));
}

/// A machine that used another object store in between follows the pins that were changed meanwhile.
#[test]
fn a_machine_that_comes_back_undoes_no_pin() {
    let (memory, elsewhere) = (Memory::new(), Memory::new());
    let (one, two) = (memory.machine(), memory.machine());
    let [first, second] = ["a", "b"].map(|text| put(&one.documents, "", text, &[1]).unwrap().id);
    one.documents.set_pinned("", &second, true).unwrap();
    sync(&two.documents);
    let folder = two.folder.clone();
    drop(two);
    let two = Machine::in_folder(folder.clone(), &elsewhere.options());
    two.list_next();
    sync(&two.documents);
    drop(two);
    one.documents.set_pinned("", &first, true).unwrap();
    one.documents.set_pinned("", &second, false).unwrap();
    let two = Machine::in_folder(folder, &memory.options());
    two.list_next();
    let changes = sync(&two.documents);
    let pinned = |id: &str, pinned| changes.contains(&Change::new("", id, ChangeKind::Pinned(pinned)));
    assert!(changes.len() == 2 && pinned(&first, true) && pinned(&second, false), "{changes:?}");
    assert_eq!(sync(&one.documents), []);
    assert_eq!(contents(&one), contents(&two));
}

/// A change whose announcement was interrupted is announced by the next program, though it finds the objects changed.
#[test]
fn a_change_that_was_not_announced_is_announced_later() {
    let memory = Memory::new();
    let (one, two) = (memory.machine(), memory.machine());
    let id = put(&one.documents, "", "text", &[1]).unwrap().id;
    sync(&one.documents);
    sync(&two.documents);
    one.documents.local.remove("", &id, &[]).unwrap();
    one.documents.withdraw("", &place_of("", &id)).unwrap();
    let one = one.restarted();
    sync(&one.documents);
    let removed = sync(&two.documents).into_iter().map(|change| (change.id, change.kind));
    assert!(removed.eq([(id, ChangeKind::Removed)]));
}

/// Where nothing can be written, documents are read and kept all the same, and it is said what is in the way.
#[test]
fn an_object_store_that_takes_nothing_is_read() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = Folder(tempfile::tempdir().unwrap());
    let one = folder.machine();
    let id = put(&one.documents, "", "text", &[1]).unwrap().id;
    sync(&one.documents);
    let two = folder.machine();
    sync(&two.documents);
    // A folder that a program may not write to; the superuser may, so that a file stands in the way of the folder of changes as well.
    let changes = folder.0.path().join("library/changes");
    std::fs::remove_dir_all(&changes).unwrap();
    std::fs::write(&changes, "").unwrap();
    std::fs::set_permissions(&changes, std::fs::Permissions::from_mode(0o400)).unwrap();
    let new = put(&two.documents, "", "new", &[1]).unwrap();
    assert_eq!(new.published, Some(false));
    assert!(try_sync(&two.documents).is_err());
    assert!(two.documents.sharing().unwrap().trouble.is_some());
    assert!(two.documents.find("", &id).unwrap());
    std::fs::remove_file(&changes).unwrap();
    back(&two);
    assert_eq!(two.documents.local.get("", &new.id).unwrap().published, Some(true));
    back(&one);
    assert_eq!(contents(&one), contents(&two));
}

/// A handle that is closed waits for nothing.
#[test]
fn closing_ends_what_waits() {
    let memory = Memory::new();
    let folder = tempfile::tempdir().unwrap();
    let mut options = memory.options();
    options.timeout = Duration::from_secs(600);
    let store = Store::open_shared(folder.path(), Limits::memory(0), &options).unwrap();
    let documents = SharedDocuments::open(None, u64::MAX, store.objects().unwrap()).unwrap();
    memory.hang(true);
    std::thread::scope(|scope| {
        let syncing = scope.spawn(|| try_sync(&documents));
        std::thread::sleep(Duration::from_millis(50));
        documents.close();
        assert!(syncing.join().unwrap().is_err());
    });
    assert_eq!(put(&documents, "", "text", &[1]).unwrap().published, Some(false));
    assert!(remove(&documents, "", &list(&documents, "")[0].id).is_err());
}
