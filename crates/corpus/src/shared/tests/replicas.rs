//! Several machines with the same documents.

use std::thread;
use std::time::Duration;

use super::{Bucket, Folder, Machine, Memory, contents};
use crate::conformance::{key, list, new_document, put, remove, remove_all, sync};
use crate::corpus::tests::with_a_chunk;
use crate::document_store::{Change, ChangeKind, DocumentStore};
use crate::error::Error;
use crate::library::Library;
use crate::notes::SharingState;

fn change(id: &str, kind: ChangeKind) -> Change {
    Change::new("", id, kind)
}

/// What one machine changes the other has after its next look, and what is asked for it has at once.
pub(super) fn what_one_machine_changes_is_changed_on_all(bucket: &dyn Bucket) {
    let (one, two) = (bucket.machine(), bucket.machine());
    assert_eq!((sync(&one.documents), sync(&two.documents)), (vec![], vec![]));
    let first = put(&one.documents, "", "first", &[1, 2]).unwrap();
    let second = put(&one.documents, "", "second", &[2, 3]).unwrap();
    assert_eq!((first.published, second.published), (Some(true), Some(true)));
    // It is asked for before it has come.
    assert!(two.documents.find("", &first.id).unwrap());
    assert_eq!(two.documents.local.document("", &first.id).unwrap().text, "first");
    // It cannot answer before it is cut here.
    assert!(two.documents.local.chunks("", &first.id).unwrap().is_empty());
    assert_eq!(sync(&two.documents), [change(&second.id, ChangeKind::Put)]);
    assert_eq!(contents(&two), contents(&one));
    assert_eq!(two.documents.local.chunk_keys("", &second.id).unwrap(), [2, 3].map(key));
    let listed = &list(&two.documents, "")[0];
    assert_eq!((listed.tokens, listed.segmentation.as_str(), listed.published), (4, "", Some(true)));

    assert!(two.documents.set_pinned("", &second.id, true).unwrap().pinned);
    assert_eq!(sync(&one.documents), [change(&second.id, ChangeKind::Pinned(true))]);
    // Further keys are known to all, so that all can remove their chunks.
    put(&one.documents, "", "second", &[9]).unwrap();
    sync(&two.documents);
    assert_eq!(two.documents.local.chunk_keys("", &second.id).unwrap(), [2, 3, 9].map(key));
    let third = bucket.machine();
    assert_eq!(sync(&third.documents).len(), 2);
    assert_eq!(contents(&third), contents(&one));
    assert_eq!(third.documents.local.chunk_keys("", &second.id).unwrap(), [2, 3, 9].map(key));

    assert_eq!(remove(&two.documents, "", &second.id).unwrap(), [3, 9].map(key));
    two.documents.finish_removal("", &second.id, &[3, 9].map(key)).unwrap();
    let mut asked = Vec::new();
    let mut applied = |changes: Vec<Change>| {
        asked.extend(changes);
        Ok(())
    };
    // Chunks that questions have stored here go with it.
    let keys_of = |namespace: &str, chunks: Vec<Vec<u32>>| {
        assert_eq!((namespace, chunks), ("", vec![vec![1, 2, 3], vec![6]]));
        Ok(vec![key(7)])
    };
    one.documents.sync(Some(&keys_of), &mut applied).unwrap();
    // It was pinned, and the first document, which shares a chunk with it, is not.
    let removed = Change { unpinned: [2, 3, 9].map(key).to_vec(), ..change(&second.id, ChangeKind::Removed) };
    assert_eq!(asked, std::slice::from_ref(&removed));
    let removal = (String::new(), second.id.clone(), [3, 7, 9].map(key).to_vec());
    assert_eq!(one.documents.unfinished_removals().unwrap(), [removal]);
    one.documents.finish_removal("", &second.id, &[3, 7, 9].map(key)).unwrap();
    assert!(one.documents.unfinished_removals().unwrap().is_empty());
    assert_eq!(sync(&third.documents), [removed]);
    assert_eq!((contents(&two), contents(&third)), (contents(&one), contents(&one)));
    // Of the removed document no object is left.
    assert_eq!(one.names().len(), 1);
    assert!(one.names().iter().all(|name| name.ends_with(&format!("{}/document.json", first.id))));
}

#[test]
fn what_one_machine_changes_is_changed_on_all_of_a_memory() {
    what_one_machine_changes_is_changed_on_all(&Memory::new());
}

#[test]
fn what_one_machine_changes_is_changed_on_all_of_a_folder() {
    what_one_machine_changes_is_changed_on_all(&Folder(tempfile::tempdir().unwrap()));
}

/// A document that is cut anew, as after an upgrade, has other chunks: garbage is what no document names.
#[test]
fn keys_of_a_document_that_is_cut_anew_are_told() {
    let bucket = Memory::new();
    let (one, two) = (bucket.machine(), bucket.machine());
    let id = put(&one.documents, "", "text", &[1]).unwrap().id;
    sync(&two.documents);
    let cut_anew = |machine: &Machine, keys: &[u8]| {
        let new = new_document("", "text", keys);
        machine.documents.local.replace_chunks("", &id, &new, "second").unwrap();
    };
    cut_anew(&one, &[1]);
    assert!(one.documents.local.unsent(None, 9).unwrap().is_empty());
    cut_anew(&one, &[9]);
    sync(&one.documents);
    let three = bucket.machine();
    sync(&three.documents);
    assert_eq!(three.documents.local.chunk_keys("", &id).unwrap(), [1, 9].map(key));
    // A machine that has not heard of a removal does not undo it.
    cut_anew(&two, &[8]);
    remove_all(&one.documents, "", &id);
    two.list_next();
    sync(&two.documents);
    assert!(list(&two.documents, "").is_empty() && one.names().is_empty());
}

/// Two machines that put the same document at once have one, created at one time, with the chunk keys of both.
pub(super) fn both_put_the_same(bucket: &dyn Bucket, rounds: u8) {
    let (one, two) = (bucket.machine(), bucket.machine());
    for round in 0..rounds {
        let text = format!("text {round}");
        let put = |machine: &Machine, byte: u8| put(&machine.documents, "", &text, &[byte]).unwrap();
        let (a, b) = thread::scope(|scope| {
            let b = scope.spawn(|| put(&two, 100 + round));
            (put(&one, round), b.join().unwrap())
        });
        assert_eq!(a.id, b.id);
    }
    sync(&one.documents);
    sync(&two.documents);
    assert_eq!(contents(&one), contents(&two));
    let three = bucket.machine();
    sync(&three.documents);
    assert_eq!(contents(&three), contents(&one));
    for round in 0..rounds {
        let id = crate::tables::document_id(&new_document("", &format!("text {round}"), &[]).document);
        assert_eq!(three.documents.local.chunk_keys("", &id).unwrap(), [round, 100 + round].map(key));
    }
}

#[test]
fn two_machines_that_put_the_same_document_have_one() {
    both_put_the_same(&Memory::new(), 30);
}

/// Documents are put, pinned and removed by three machines at once. In the end all agree with the objects, and nothing is left beside
/// documents that are gone.
pub(super) fn all_agree_after_races(bucket: &dyn Bucket, rounds: usize) {
    let machines = [bucket.machine(), bucket.machine(), bucket.machine()];
    let texts = ["a", "b", "c"];
    thread::scope(|scope| {
        for (index, machine) in machines.iter().enumerate() {
            scope.spawn(move || {
                for round in 0..rounds {
                    let documents = &machine.documents;
                    let text = texts[(round + index) % 3];
                    let id = crate::tables::document_id(&new_document("", text, &[]).document);
                    match (round * 7 + index * 3) % 5 {
                        0 | 1 => _ = put(documents, "", text, &[index as u8]).unwrap(),
                        2 => _ = documents.set_pinned("", &id, round % 2 == 0),
                        3 => {
                            if let Ok(keys) = remove(documents, "", &id) {
                                let _ = documents.finish_removal("", &id, &keys);
                            }
                        }
                        _ => _ = sync(documents),
                    }
                }
            });
        }
    });
    for _ in 0..3 {
        for machine in &machines {
            machine.list_next();
            sync(&machine.documents);
            for (namespace, id, keys) in machine.documents.unfinished_removals().unwrap() {
                machine.documents.finish_removal(&namespace, &id, &keys).unwrap();
            }
        }
    }
    let fresh = bucket.machine();
    sync(&fresh.documents);
    let expected = contents(&fresh);
    for machine in &machines {
        assert_eq!(contents(machine), expected);
        assert_eq!(machine.documents.sharing().unwrap().unsent, 0);
    }
    for name in fresh.names() {
        let is_kept = expected.iter().any(|(id, ..)| name.contains(id));
        assert!(is_kept, "{name} lies beside no document: {expected:?}");
    }
}

#[test]
fn three_machines_agree_after_races() {
    all_agree_after_races(&Memory::new(), 200);
}

/// A pin that comes to a document which another machine removes leaves nothing of it.
#[test]
fn a_pin_of_a_removed_document_leaves_nothing() {
    let bucket = Memory::new();
    let (one, two) = (bucket.machine(), bucket.machine());
    let id = put(&one.documents, "", "text", &[1]).unwrap().id;
    sync(&two.documents);
    remove_all(&two.documents, "", &id);
    assert!(one.documents.set_pinned("", &id, true).unwrap().pinned, "it is not known here yet");
    assert!(one.names().is_empty(), "{:?}", one.names());
    let removed = Change { unpinned: vec![key(1)], ..change(&id, ChangeKind::Removed) };
    assert_eq!(sync(&one.documents), [removed]);
    assert!(matches!(one.documents.set_pinned("", &id, true), Err(Error::NotFound(_))));
    // Stored again it is a document like any other.
    assert!(!put(&one.documents, "", "text", &[1]).unwrap().pinned);
}

/// A removal that one machine has begun is finished by another that is asked to, or that finds it abandoned.
#[test]
fn a_removal_is_finished_by_any_machine() {
    let bucket = Memory::new();
    let (one, two) = (bucket.machine(), bucket.machine());
    let ids = ["a", "b"].map(|text| put(&one.documents, "x", text, &[text.as_bytes()[0]]).unwrap().id);
    for id in &ids {
        assert_eq!(remove(&one.documents, "x", id).unwrap().len(), 1);
    }
    drop(one);
    assert_eq!(two.names().len(), 2);
    // The second machine never had the document.
    assert_eq!(remove(&two.documents, "x", &ids[0]).unwrap(), [key(b'a')]);
    two.documents.finish_removal("x", &ids[0], &[key(b'a')]).unwrap();
    assert!(matches!(two.documents.remove("x", &ids[0], &[]), Err(Error::NotFound(_))));
    // What is under way elsewhere is left alone, and taken up after a time.
    sync(&two.documents);
    assert!(two.documents.unfinished_removals().unwrap().is_empty());
    let place = super::super::objects::place_of("x", &ids[1]);
    let parts = two.documents.parts(&place).unwrap();
    two.documents.take_up_removal(&place, &parts).unwrap();
    let begun = two.documents.unfinished_removals().unwrap();
    assert_eq!(begun, [("x".to_owned(), ids[1].clone(), vec![key(b'b')])]);
    // Not all that is remembered there is deleted: it stays.
    assert!(two.documents.finish_removal("x", &ids[1], &[]).is_err());
    assert_eq!(two.names().len(), 1);
    two.documents.finish_removal("x", &ids[1], &[key(b'b')]).unwrap();
    assert!(two.names().is_empty());
}

/// What is announced is looked at once, whatever the announcing clock says, and forgotten after a time.
#[test]
fn announcements_are_followed_whatever_clocks_say() {
    use super::super::objects::{ChangesObject, change_name, encode};
    let bucket = Memory::new();
    let (one, two) = (bucket.machine(), bucket.machine());
    sync(&one.documents);
    sync(&two.documents);
    let id = put(&one.documents, "", "text", &[]).unwrap().id;
    let announced = |machine: &Machine| machine.objects.list("changes", None).unwrap();
    assert_eq!(announced(&one).len(), 1);
    let now = crate::notes::now().as_millis() as u64;
    let announce = |time: u64| {
        let documents = vec![(String::new(), id.clone()), ("../x".to_owned(), "../../y".to_owned())];
        one.objects.put(&change_name(time, time), encode(ChangesObject { documents })).unwrap();
    };
    one.objects.delete(&announced(&one)[0].name).unwrap();
    // A clock that is two hours ahead, and one that is a minute behind.
    announce(now + 7_200_000);
    assert_eq!(sync(&two.documents), [change(&id, ChangeKind::Put)]);
    let other = put(&one.documents, "", "other", &[]).unwrap().id;
    assert_eq!(
        sync(&two.documents),
        [change(&other, ChangeKind::Put)],
        "the time to come stands in nobody's way"
    );
    remove_all(&one.documents, "", &id);
    announced(&one).iter().for_each(|object| one.objects.delete(&object.name).unwrap());
    announce(now - 60_000);
    assert_eq!(sync(&two.documents), [change(&id, ChangeKind::Removed)]);
    // What comes from a clock that is further behind is found when all documents are listed.
    remove_all(&one.documents, "", &other);
    announced(&one).iter().for_each(|object| one.objects.delete(&object.name).unwrap());
    announce(now - 3_700_000);
    assert_eq!(sync(&two.documents), []);
    two.list_next();
    assert_eq!(sync(&two.documents), [change(&other, ChangeKind::Removed)]);
    assert_eq!(announced(&two), [], "it was announced long ago");
}

/// A machine that was away lists all documents, whatever was announced and forgotten meanwhile.
#[test]
fn a_machine_that_was_away_during_a_removal_forgets_the_document() {
    let bucket = Memory::new();
    let (one, two) = (bucket.machine(), bucket.machine());
    let ids = ["gone", "kept"].map(|text| put(&one.documents, "", text, &[text.len() as u8]).unwrap().id);
    sync(&two.documents);
    let state = two.documents.local.sharing_state().unwrap();
    two.documents.local.set_sharing_state(&SharingState { polled: state.polled - 1900, ..state }).unwrap();
    let folder = two.folder.clone();
    drop(two);
    remove_all(&one.documents, "", &ids[0]);
    let new = put(&one.documents, "", "new", &[]).unwrap().id;
    for object in one.objects.list("changes", None).unwrap() {
        one.objects.delete(&object.name).unwrap();
    }
    let two = Machine::in_folder(folder, &bucket.options());
    let mut changes = sync(&two.documents);
    changes.sort_by(|a, b| a.id.cmp(&b.id));
    let mut expected = [change(&ids[0], ChangeKind::Removed), change(&new, ChangeKind::Put)];
    expected.sort_by(|a, b| a.id.cmp(&b.id));
    assert_eq!(changes, expected);
    assert_eq!(contents(&two), contents(&one));
}

/// A document that was removed and stored again is the new one on all machines, also on one that saw nothing of it.
#[test]
fn a_document_that_was_stored_again_is_known_as_the_new_one() {
    for is_announced in [true, false] {
        let bucket = Memory::new();
        let (one, two) = (bucket.machine(), bucket.machine());
        let id = put(&one.documents, "", "text", &[1]).unwrap().id;
        sync(&one.documents);
        sync(&two.documents);
        remove_all(&one.documents, "", &id);
        put(&one.documents, "", "text", &[2]).unwrap();
        if !is_announced {
            for object in one.objects.list("changes", None).unwrap() {
                one.objects.delete(&object.name).unwrap();
            }
            two.list_next();
        }
        assert_eq!(sync(&two.documents), []);
        assert_eq!(two.documents.local.chunk_keys("", &id).unwrap(), [1, 2].map(key));
        let e_tag = |machine: &Machine| machine.documents.local.get("", &id).unwrap().e_tag;
        assert!(e_tag(&one).is_some());
        assert_eq!(e_tag(&two), e_tag(&one));
    }
}

/// Documents come and go on another machine while a library is open.
#[test]
fn a_library_takes_up_changes_that_are_older_than_it_is_told() {
    let memory = Memory::new();
    let (one, two) = (memory.machine(), memory.machine());
    let folder = tempfile::tempdir().unwrap();
    let (engine, _) = with_a_chunk(folder.path());
    let library = Library::of(&engine, Box::new(one.documents)).unwrap();
    library.sync().unwrap();
    let id = put(&two.documents, "", "A bell is loose.", &[1]).unwrap().id;
    let pulled = |age: Duration| {
        library.pull_if_older(age).unwrap();
        library.search("bell", 5, false).unwrap().sources.len()
    };
    let hour = Duration::from_secs(3600);
    assert_eq!((pulled(hour), pulled(Duration::ZERO)), (0, 1));
    remove_all(&two.documents, "", &id);
    assert_eq!((pulled(hour), pulled(Duration::ZERO)), (1, 0));
}
