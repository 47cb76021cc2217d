//! Several machines write to one object store at once.

use std::fs;
use std::path::Path;

use refrain_kernels::Buffer;
use refrain_kv::AuxTensors;
use tempfile::tempdir;

use super::library::{Library, object, sent, wait_for};
use super::{Random, mutate, numbered};
use crate::chunk::Provenance;
use crate::{Chunk, Limits, RemoteOptions, RemoteStats, Store};

/// The same chunk as another machine computes it: what its file says beside keys and values may differ.
fn relabelled(chunk: &Chunk) -> Chunk {
    let layers = chunk.data().to_vec();
    let provenance = Provenance { label: "another machine".to_owned(), ..chunk.provenance().clone() };
    Chunk::from_parts(chunk.id().clone(), provenance, layers).unwrap()
}

fn stats(store: &Store) -> RemoteStats {
    store.remote_stats().unwrap()
}

/// Whether an object was found there in place of being brought. How often follows from when the sender looks: a chunk is noted
/// before and after its file is written.
fn found_there(store: &Store) -> bool {
    stats(store).already_there > 0
}

/// The bytes of a chunk's file with a bit of its last layer turned.
fn broken(chunk: &Chunk) -> Vec<u8> {
    let mut bytes = chunk.to_bytes();
    *bytes.last_mut().unwrap() ^= 1;
    bytes
}

fn aux() -> AuxTensors {
    let mut aux = AuxTensors::default();
    aux.push("t".to_owned(), vec![2], Buffer::F32(vec![1.0, 2.0]));
    aux
}

#[test]
fn the_second_to_bring_a_chunk_leaves_the_object_of_the_first() {
    let (library, chunk) = (Library::default(), numbered(1, 3));
    let (_a, first) = library.machine();
    first.put(chunk.clone()).unwrap();
    sent(&first);
    let (_b, second) = library.machine();
    second.put(relabelled(&chunk)).unwrap();
    sent(&second);
    assert_eq!((stats(&first).sent, stats(&second).sent, found_there(&second)), (1, 0, true));
    assert_eq!(library.read(&object(&chunk.key())).unwrap(), chunk.to_bytes());
}

/// Between the question whether the object is there and the request that writes it, another machine writes it.
#[test]
fn an_object_that_appears_meanwhile_stays() {
    let (library, chunk) = (Library::default(), numbered(1, 3));
    let other = relabelled(&chunk).to_bytes();
    library.write_before_put(other.clone());
    let (_folder, store) = library.machine();
    store.put(chunk.clone()).unwrap();
    sent(&store);
    assert_eq!((stats(&store).sent, found_there(&store), stats(&store).failures), (0, true, 0));
    assert_eq!(library.read(&object(&chunk.key())).unwrap(), other);
}

/// A deletion under way conflicts with a request that creates, and leaves nothing there.
#[test]
fn a_conflict_that_leaves_nothing_there_is_tried_again() {
    let (library, chunk) = (Library::default(), numbered(1, 3));
    let (_folder, store) = library.machine();
    library.conflict(2);
    store.put(chunk.clone()).unwrap();
    sent(&store);
    // A conflict that was taken for an object would leave nothing to be sent.
    assert_eq!((stats(&store).sent, stats(&store).stuck), (1, None));
    let objects = store.objects().unwrap();
    library.conflict(2);
    assert!(objects.create("one", b"1".to_vec()).unwrap().is_some());
    assert!(objects.create("one", b"2".to_vec()).unwrap().is_none());
    library.conflict(100);
    let error = objects.create("two", b"1".to_vec()).unwrap_err();
    assert!(error.to_string().contains("at the same time"), "{error}");
}

#[test]
fn a_broken_object_is_replaced_once_its_chunk_was_computed() {
    let (library, chunk) = (Library::default(), numbered(1, 3));
    library.write(&object(&chunk.key()), broken(&chunk));
    let (_a, store) = library.machine();
    assert!(store.get(chunk.id()).unwrap().is_none());
    wait_for("it is found broken", || stats(&store).broken == 1);
    // A request deletes nothing, and what is known as broken is not brought again.
    assert_eq!(library.read(&object(&chunk.key())).unwrap(), broken(&chunk));
    store.put(chunk.clone()).unwrap();
    sent(&store);
    let done = stats(&store);
    assert_eq!((done.broken, done.replaced, done.sent), (1, 1, 1));
    assert_eq!(library.read(&object(&chunk.key())).unwrap(), chunk.to_bytes());
    let (_b, other) = library.machine();
    assert_eq!(other.get(chunk.id()).unwrap().unwrap().to_bytes(), chunk.to_bytes());
}

#[test]
fn broken_aux_tensors_are_replaced_as_well() {
    let (library, chunk) = (Library::default(), numbered(1, 3));
    let (_a, first) = library.machine();
    first.put(chunk.clone()).unwrap();
    first.put_aux_tensors(chunk.id(), "test", aux()).unwrap();
    sent(&first);
    let path = object_store::path::Path::from(
        object(&chunk.key()).to_string().replace(".safetensors", ".test.summary"),
    );
    let (mut random, whole) = (Random(1), library.read(&path).unwrap());
    let mut bytes = whole.clone();
    while bytes == whole {
        mutate(&mut bytes, &whole, &mut random);
    }
    library.write(&path, bytes);
    let (_b, second) = library.machine();
    assert!(second.aux_tensors(chunk.id(), "test").unwrap().is_none());
    wait_for("they are found broken", || stats(&second).broken == 1);
    assert!(second.get(chunk.id()).unwrap().is_some());
    second.put_aux_tensors(chunk.id(), "test", aux()).unwrap();
    sent(&second);
    assert_eq!((stats(&second).replaced, stats(&second).sent, found_there(&second)), (1, 1, true));
    let (_c, third) = library.machine();
    assert_eq!(*third.aux_tensors(chunk.id(), "test").unwrap().unwrap(), aux());
}

/// Another machine finds the object broken as well, and replaces it first.
#[test]
fn a_whole_object_that_replaced_the_broken_one_meanwhile_stays() {
    let (library, chunk) = (Library::default(), numbered(1, 3));
    library.write(&object(&chunk.key()), broken(&chunk));
    let (_a, store) = library.machine();
    assert!(store.get(chunk.id()).unwrap().is_none());
    wait_for("it is found broken", || stats(&store).broken == 1);
    let other = relabelled(&chunk).to_bytes();
    library.write_before_put(other.clone());
    store.put(chunk.clone()).unwrap();
    sent(&store);
    assert_eq!((stats(&store).replaced, stats(&store).sent, found_there(&store)), (0, 0, true));
    assert_eq!(library.read(&object(&chunk.key())).unwrap(), other);
}

#[test]
fn a_broken_object_that_is_deleted_meanwhile_is_written_anew() {
    let (library, chunk) = (Library::default(), numbered(1, 3));
    library.write(&object(&chunk.key()), broken(&chunk));
    let (_a, store) = library.machine();
    assert!(store.get(chunk.id()).unwrap().is_none());
    wait_for("it is found broken", || stats(&store).broken == 1);
    library.delete_before_put();
    store.put(chunk.clone()).unwrap();
    sent(&store);
    assert_eq!((stats(&store).replaced, stats(&store).sent), (0, 1));
    assert_eq!(library.read(&object(&chunk.key())).unwrap(), chunk.to_bytes());
}

/// An object store without conditional requests: what is there is looked for, and what is broken is written over.
#[test]
fn an_object_store_without_conditional_requests_is_used_without_them() {
    let (library, chunk, damaged) = (Library::default(), numbered(1, 3), numbered(2, 3));
    library.refuse_conditions();
    library.write(&object(&damaged.key()), broken(&damaged));
    let (_a, first) = library.machine();
    assert!(first.get(damaged.id()).unwrap().is_none());
    wait_for("it is found broken", || stats(&first).broken == 1);
    for chunk in [&chunk, &damaged] {
        first.put(chunk.clone()).unwrap();
    }
    sent(&first);
    assert_eq!((stats(&first).sent, stats(&first).replaced, stats(&first).down), (2, 1, None));
    let (_b, second) = library.machine();
    second.put(relabelled(&chunk)).unwrap();
    sent(&second);
    assert_eq!((stats(&second).sent, found_there(&second)), (0, true));
    for chunk in [&chunk, &damaged] {
        assert_eq!(library.read(&object(&chunk.key())).unwrap(), chunk.to_bytes());
    }
}

/// A mount without hard links: what is there is looked for, and the rest is written without a condition.
#[cfg(unix)]
#[test]
fn a_folder_without_hard_links_is_shared() {
    let (library, chunk) = (Library::default(), numbered(1, 3));
    library.refuse_links();
    let (_a, first) = library.machine();
    first.put(chunk.clone()).unwrap();
    sent(&first);
    assert_eq!((stats(&first).sent, stats(&first).stuck), (1, None));
    assert_eq!(library.read(&object(&chunk.key())).unwrap(), chunk.to_bytes());
    let objects = first.objects().unwrap();
    assert!(objects.create("library.json", b"1".to_vec()).unwrap().is_some());
    assert!(objects.create("library.json", b"2".to_vec()).unwrap().is_none());
}

/// An object store that answers and takes nothing is read, and gets what waits once it takes something.
#[test]
fn an_object_store_without_room_is_read() {
    let library = Library::default();
    let (_one, one) = library.machine();
    let chunks = [numbered(1, 50), numbered(2, 50), numbered(3, 50)];
    one.put(chunks[0].clone()).unwrap();
    sent(&one);
    library.set_full(true);
    let (_two, two) = library.machine();
    for chunk in &chunks[1..] {
        two.put(chunk.clone()).unwrap();
        wait_for("it is refused", || stats(&two).stuck.is_some_and(|why| why.contains("no space left")));
    }
    assert_eq!((stats(&two).down, stats(&two).pending), (None, 2));
    two.prefetch(&[chunks[0].id().into()], &[], true);
    assert!(two.get(chunks[0].id()).unwrap().is_some());
    library.set_full(false);
    sent(&two);
}

/// A mistyped folder is not filled with chunks.
#[test]
fn a_folder_of_other_files_is_refused() {
    let (shared, folder) = (tempdir().unwrap(), tempdir().unwrap());
    let open = |at: &Path| {
        let options = RemoteOptions::new(format!("file://{}", at.display()));
        Store::open_shared(folder.path(), Limits::memory(1 << 20), &options)
    };
    fs::create_dir(shared.path().join("lost+found")).unwrap();
    fs::write(shared.path().join(".nfs1"), "").unwrap();
    open(shared.path()).unwrap();
    fs::write(shared.path().join("passwd"), "root").unwrap();
    let error = open(shared.path()).unwrap_err().to_string();
    assert!(error.contains("the folder holds \"passwd\", and nothing that Refrain has written"), "{error}");
    // One that has both was accepted by earlier builds.
    fs::create_dir(shared.path().join("0a")).unwrap();
    open(shared.path()).unwrap();
    let new = shared.path().join("new/library");
    open(&new).unwrap();
    #[cfg(unix)]
    assert_eq!(
        std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&new).unwrap().permissions()) & 0o777,
        0o700
    );
}

/// A folder as the object store creates by condition and replaces without one.
#[test]
fn a_shared_folder_has_its_broken_object_replaced() {
    let (shared, chunk) = (tempdir().unwrap(), numbered(1, 3));
    let options = RemoteOptions::new(format!("file://{}", shared.path().display()));
    let machine = |folder: &Path| Store::open_shared(folder, Limits::memory(1 << 20), &options).unwrap();
    let key = chunk.key().to_string();
    let file = shared.path().join(&key[..2]).join(format!("{key}.safetensors"));
    fs::create_dir(file.parent().unwrap()).unwrap();
    fs::write(&file, broken(&chunk)).unwrap();
    let folder = tempdir().unwrap();
    let store = machine(folder.path());
    assert!(store.get(chunk.id()).unwrap().is_none());
    wait_for("it is found broken", || stats(&store).broken == 1);
    store.put(chunk.clone()).unwrap();
    store.put(numbered(2, 3)).unwrap();
    sent(&store);
    assert_eq!((stats(&store).sent, stats(&store).replaced), (2, 1));
    assert_eq!(fs::read(&file).unwrap(), chunk.to_bytes());
}
