//! Objects beside the chunks, in memory and in a folder.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use object_store::ObjectStore;
use object_store::memory::InMemory;
use object_store::throttle::{ThrottleConfig, ThrottledStore};
use tempfile::{TempDir, tempdir};

use crate::{Limits, Objects, RemoteOptions, Store, StoreError};

fn open(objects: Option<Arc<dyn ObjectStore>>, url: &str) -> (TempDir, Store, Objects) {
    let folder = tempdir().unwrap();
    let mut options = RemoteOptions::new(url);
    (options.timeout, options.objects) = (Duration::from_millis(500), objects);
    let store = Store::open_shared(folder.path(), Limits::memory(0), &options).unwrap();
    let objects = store.objects().unwrap();
    (folder, store, objects)
}

fn names(objects: &Objects, folder: &str, after: Option<&str>) -> Vec<String> {
    objects.list(folder, after).unwrap().into_iter().map(|object| object.name).collect()
}

fn conforms(objects: &Objects) {
    assert_eq!(objects.get("a/one", 9).unwrap(), None);
    assert_eq!(objects.list("a", None).unwrap(), []);
    objects.delete("a/one").unwrap();
    let listed = || objects.list("a", None).unwrap().remove(0);
    let created = objects.create("a/one", b"1".to_vec()).unwrap().unwrap();
    assert!(created.e_tag.is_some() && created.e_tag == listed().e_tag);
    assert_eq!(objects.create("a/one", b"2".to_vec()).unwrap(), None);
    let asked = ["a/one", "a", "a/none", "a/one"].map(str::to_owned);
    assert_eq!(objects.exist(asked.into()).unwrap(), [true, false, false, true]);
    assert!(objects.exist(Vec::new()).unwrap().is_empty());
    let first = listed().version();
    objects.put("a/one", b"1".to_vec()).unwrap();
    assert_ne!(listed().version(), first, "it was written again");
    assert_eq!(objects.get("a/one", 1).unwrap().unwrap(), b"1");
    let put = objects.put("a/one", b"22".to_vec()).unwrap();
    assert!(put != created && put.e_tag == listed().e_tag);
    assert_eq!(objects.get("a/one", 2).unwrap().unwrap(), b"22");
    let error = objects.get("a/one", 1).unwrap_err();
    assert!(matches!(&error, StoreError::ObjectTooLarge { most: 1, .. }), "{error}");
    assert_eq!(objects.down(), None, "an object that is too large is no failure of the object store");
    for name in ["a/two", "a/b/three", "ab/four"] {
        objects.put(name, Vec::new()).unwrap();
    }
    assert_eq!(names(objects, "a", None), ["a/b/three", "a/one", "a/two"]);
    assert_eq!(names(objects, "a", Some("a/one")), ["a/two"]);
    assert_eq!(names(objects, "a", Some("a/onf")), ["a/two"], "a name that is not there");
    let written = objects.list("ab", None).unwrap()[0].written;
    assert!(written > SystemTime::now() - Duration::from_secs(600));
    objects.delete("a/one").unwrap();
    assert_eq!(names(objects, "a", None), ["a/b/three", "a/two"]);
    assert_eq!(names(objects, "", None), ["a/b/three", "a/two", "ab/four"]);
    // Of those that create an object at once, one does.
    let created = thread::scope(|scope| {
        let create = |n: u8| objects.create("race", vec![n]).unwrap().is_some();
        let threads: Vec<_> = (0..8).map(|n| scope.spawn(move || create(n))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).filter(|created| *created).count()
    });
    assert_eq!(created, 1);
}

#[test]
fn objects_are_created_read_replaced_listed_and_deleted() {
    let memory = Arc::new(InMemory::new());
    let (_folder, _store, objects) = open(Some(memory.clone()), "memory:///library/of/two");
    conforms(&objects);
    // They lie below the prefix, which no name leaves.
    objects.put("../outside", Vec::new()).unwrap();
    let (_folder, _store, root) = open(Some(memory), "memory:///");
    assert!(names(&root, "library", None).iter().all(|name| name.starts_with("library/of/two/")));
    assert_eq!(names(&root, "library", None).len(), root.list("", None).unwrap().len());
    let shared = tempdir().unwrap();
    conforms(&open(None, &format!("file://{}", shared.path().display())).2);
    conforms(&Objects::open(&RemoteOptions::new("memory:///alone")).unwrap());
}

/// A process that was killed while it wrote an object has left its bytes in the folder under a name that no listing has.
#[test]
fn what_was_left_of_objects_goes_when_it_is_old() {
    let shared = tempdir().unwrap();
    let (_folder, store, objects) = open(None, &format!("file://{}", shared.path().display()));
    for name in ["of/name", "of/deep/name", "other/name"] {
        objects.put(name, Vec::new()).unwrap();
    }
    let chunk = super::numbered(1, 50);
    store.put(chunk.clone()).unwrap();
    super::library::sent(&store);
    let key = chunk.key().to_string();
    let of_chunk = format!("{}/{key}.safetensors", &key[..2]);
    assert!(shared.path().join(&of_chunk).exists());
    let (old, young) = (format!("{of_chunk}#1"), format!("{of_chunk}#2"));
    let names = ["of/name#1", "of/deep/name#12", "of/name#x", "other/name#1", &old, &young];
    for name in names {
        let file = std::fs::File::create(shared.path().join(name)).unwrap();
        let age = if name == young { 0 } else { 120 };
        file.set_modified(SystemTime::now() - Duration::from_secs(age)).unwrap();
    }
    let left = || names.map(|name| shared.path().join(name).exists());
    objects.delete("of/name").unwrap();
    store.delete(&[chunk.key()]).unwrap();
    assert_eq!(left(), [true, true, true, true, false, true], "a writer may be at work on the young one");
    objects.remove_leftovers("of", Duration::from_secs(600)).unwrap();
    assert_eq!(left(), [true, true, true, true, false, true]);
    objects.remove_leftovers("of", Duration::from_secs(60)).unwrap();
    assert_eq!(left(), [false, false, true, true, false, true]);
    objects.remove_leftovers("none", Duration::ZERO).unwrap();
    assert!(objects.remove_leftovers("other/name", Duration::ZERO).is_err(), "it is no folder");
    assert_eq!(objects.down(), None);
}

#[test]
fn objects_without_a_chunk_store_are_there_again_when_the_object_store_is() {
    let slow = Arc::new(ThrottledStore::new(InMemory::new(), ThrottleConfig::default()));
    let mut options = RemoteOptions::new("memory:///job");
    options.timeout = Duration::from_millis(100);
    options.objects = Some(slow.clone());
    let objects = Objects::open(&options).unwrap();
    slow.config_mut(|config| config.wait_get_per_call = Duration::from_secs(60));
    assert!(objects.get("name", 1).is_err() && objects.down().is_some());
    slow.config_mut(|config| config.wait_get_per_call = Duration::ZERO);
    let began = Instant::now();
    while objects.get("name", 1).is_err() {
        assert!(began.elapsed() < Duration::from_secs(60), "it is never asked again");
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(objects.down(), None);
}

/// A call costs one wait, those after it none, and closing ends one that is under way.
#[test]
fn an_object_store_that_hangs_is_left_alone_and_a_closed_handle_waits_for_nothing() {
    let slow = Arc::new(ThrottledStore::new(InMemory::new(), ThrottleConfig::default()));
    let (_folder, store, objects) = open(Some(slow.clone()), "memory:///library");
    slow.config_mut(|config| config.wait_get_per_call = Duration::from_secs(60));
    let error = objects.get("name", 1).unwrap_err();
    assert!(matches!(&error, StoreError::Objects { url, .. } if url == "memory:///library"), "{error}");
    let began = Instant::now();
    assert!(objects.put("name", Vec::new()).is_err() && began.elapsed() < Duration::from_millis(400));
    assert!(objects.down().is_some() && store.remote_stats().unwrap().failures > 0);

    let (_folder, _store, objects) = open(Some(slow.clone()), "memory:///library");
    slow.config_mut(|config| config.wait_put_per_call = Duration::from_secs(60));
    thread::scope(|scope| {
        let put = scope.spawn(|| objects.put("name", Vec::new()));
        thread::sleep(Duration::from_millis(50));
        objects.clone().close();
        assert!(put.join().unwrap().unwrap_err().to_string().contains("closed"));
    });
    assert!(objects.get("name", 1).is_err() && objects.is_closed());
    assert_eq!(objects.down(), None);
}

/// A request that fails keeps the object store from being used for a pause, not until everything is uploaded.
#[test]
fn a_failed_request_is_forgotten_while_chunks_are_uploaded() {
    let slow = Arc::new(ThrottledStore::new(InMemory::new(), ThrottleConfig::default()));
    let (_folder, store, objects) = open(Some(slow.clone()), "memory:///library");
    slow.config_mut(|config| {
        config.wait_put_per_call = Duration::from_millis(100);
        config.wait_list_per_call = Duration::from_secs(60);
    });
    for n in 1..=100 {
        store.put(super::numbered(n, 4)).unwrap();
    }
    assert!(objects.list("a", None).is_err() && objects.down().is_some());
    super::library::wait_for("it is asked again", || objects.down().is_none());
    assert!(store.remote_stats().unwrap().pending > 0, "uploads take ten seconds, a pause one");
}
