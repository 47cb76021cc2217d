//! Deletion from every tier, the object store included.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use futures_util::TryStreamExt as _;
use object_store::ObjectStore;
use object_store::memory::InMemory;
use object_store::throttle::{ThrottleConfig, ThrottledStore};
use refrain_kernels::Buffer;
use refrain_kv::AuxTensors;
use tempfile::{TempDir, tempdir};

use super::store::files;
use super::{chunk_of, id, numbered};
use crate::{Chunk, ChunkId, PutOutcome, RemoteOptions, Store, StoreError};

/// An object store in memory that can be made slow.
#[derive(Clone)]
struct Library(Arc<ThrottledStore<InMemory>>);

impl Library {
    fn new() -> Library {
        Library(Arc::new(ThrottledStore::new(InMemory::new(), ThrottleConfig::default())))
    }

    fn slow(&self, change: impl Fn(&mut ThrottleConfig)) {
        self.0.config_mut(change);
    }

    fn machine(&self) -> (TempDir, Store) {
        let folder = tempdir().unwrap();
        let mut options = RemoteOptions::new("memory:///library");
        options.timeout = Duration::from_millis(500);
        options.objects = Some(self.0.clone());
        let store = Store::open_shared(folder.path(), 64 << 20, &options).unwrap();
        (folder, store)
    }

    /// Names of all objects.
    fn objects(&self) -> BTreeSet<String> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let listed: Vec<_> = runtime.block_on(self.0.list(None).try_collect()).unwrap();
        listed.into_iter().map(|object| object.location.to_string()).collect()
    }
}

fn aux() -> AuxTensors {
    let mut aux = AuxTensors::default();
    aux.push("t".to_owned(), vec![2], Buffer::F32(vec![1.0, 2.0]));
    aux
}

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < Duration::from_secs(30), "{what}");
        thread::sleep(Duration::from_millis(5));
    }
}

fn sent(store: &Store) {
    wait_for("all is sent", || store.remote_stats().unwrap().pending == 0);
}

/// The index, which holds keys alone, is all that is left.
fn left(folder: &TempDir) -> Vec<String> {
    let names = files(folder.path()).into_iter().map(|path| path.file_name().unwrap().to_owned());
    names.map(|name| name.into_string().unwrap()).filter(|name| !name.starts_with("index.")).collect()
}

/// Two chunks whose keys begin alike, so that their objects are listed together.
fn neighbours() -> (Chunk, Chunk) {
    let one = numbered(1, 3);
    let shard = |chunk: &Chunk| chunk.key().to_string()[..2].to_owned();
    let other = (2..).map(|first| numbered(first, 3)).find(|other| shard(other) == shard(&one));
    (one, other.unwrap())
}

#[test]
fn a_deleted_chunk_is_gone_from_every_tier_and_its_neighbour_is_not() {
    let library = Library::new();
    let (folder, store) = library.machine();
    let (chunk, other) = neighbours();
    for chunk in [&chunk, &other] {
        store.put(chunk.clone()).unwrap();
        store.put_aux_tensors(chunk.id(), "one", aux()).unwrap();
        store.put_aux_tensors(chunk.id(), "two", aux()).unwrap();
    }
    sent(&store);
    assert_eq!(library.objects().len(), 6);
    store.delete(&[chunk.key()]).unwrap();
    let is_other = |name: &String| name.contains(&other.key().to_string());
    assert!(library.objects().len() == 3 && library.objects().iter().all(is_other));
    assert!(left(&folder).len() == 3 && left(&folder).iter().all(is_other), "{:?}", left(&folder));
    assert!(
        store.get(chunk.id()).unwrap().is_none() && store.aux_tensors(chunk.id(), "one").unwrap().is_none()
    );
    assert!(store.get(other.id()).unwrap().is_some());
    store.delete(&[chunk.key()]).unwrap();
    // A machine without the files deletes the objects as well, also those of kinds that it does not know.
    let (_folder, second) = library.machine();
    second.delete(&[other.key(), chunk.key()]).unwrap();
    assert_eq!(library.objects().len(), 0);
    // Who began to compute it before does not bring it back, and who wants it anew does.
    assert!(matches!(store.put(chunk.clone()).unwrap(), PutOutcome::Deleted));
    let put = store.put_aux_tensors(chunk.id(), "one", aux()).unwrap();
    assert!(matches!(put, PutOutcome::Deleted) && !store.contains(chunk.id()));
    store.admit(|| vec![chunk.key()]);
    store.put(chunk).unwrap();
    sent(&store);
    assert_eq!(library.objects().len(), 1);
}

#[test]
fn an_upload_under_way_does_not_land_after_the_deletion() {
    let library = Library::new();
    let (folder, store) = library.machine();
    library.slow(|config| config.wait_put_per_call = Duration::from_millis(300));
    let chunks = [numbered(1, 3), numbered(2, 3)];
    for chunk in &chunks {
        store.put(chunk.clone()).unwrap();
    }
    // The first travels, the second waits.
    thread::sleep(Duration::from_millis(100));
    store.delete(&[chunks[0].key(), chunks[1].key()]).unwrap();
    assert_eq!((library.objects().len(), store.remote_stats().unwrap().pending), (0, 0));
    thread::sleep(Duration::from_millis(800));
    assert_eq!((library.objects().len(), left(&folder).len()), (0, 0));
}

#[test]
fn what_the_object_store_does_not_delete_is_told_and_deleted_the_next_time() {
    let library = Library::new();
    let (folder, store) = library.machine();
    let chunk = numbered(1, 3);
    store.put(chunk.clone()).unwrap();
    store.put_aux_tensors(chunk.id(), "one", aux()).unwrap();
    sent(&store);
    library.slow(|config| config.wait_delete_per_call = Duration::from_secs(5));
    let error = store.delete(&[chunk.key()]).unwrap_err();
    assert!(matches!(&error, StoreError::NotDeleted { url, .. } if url == "memory:///library"), "{error}");
    assert!(error.to_string().contains("safe"), "{error}");
    assert_eq!((library.objects().len(), left(&folder).len()), (2, 0));
    library.slow(|config| *config = ThrottleConfig::default());
    store.delete(&[chunk.key()]).unwrap();
    assert_eq!(library.objects().len(), 0);
}

#[test]
fn a_chunk_that_is_fetched_while_it_is_deleted_is_not_kept() {
    let library = Library::new();
    let (_folder, first) = library.machine();
    let chunk = numbered(1, 3);
    first.put(chunk.clone()).unwrap();
    first.put_aux_tensors(chunk.id(), "one", aux()).unwrap();
    sent(&first);
    let (folder, second) = library.machine();
    library.slow(|config| config.wait_get_per_call = Duration::from_millis(200));
    thread::scope(|scope| {
        let fetched = scope.spawn(|| second.prefetch(&[chunk.id().into()], &["one"], true));
        thread::sleep(Duration::from_millis(100));
        second.delete(&[chunk.key()]).unwrap();
        fetched.join().unwrap();
    });
    thread::sleep(Duration::from_millis(200));
    assert!(!second.contains(chunk.id()) && !second.has_aux_tensors(chunk.id(), "one"));
    assert_eq!((left(&folder).len(), library.objects().len()), (0, 0));
}

#[test]
fn a_chunk_that_is_read_while_it_is_removed_is_read_whole_and_not_kept() {
    let folder = tempdir().unwrap();
    let chunk = chunk_of(ChunkId { layers: 3, ..id(refrain_kernels::Dtype::F16) }, 1);
    Store::open(folder.path(), 0).unwrap().put(chunk.clone()).unwrap();
    let store = Store::open(folder.path(), 1 << 20).unwrap();
    let reader = store.reader(chunk.id()).unwrap().unwrap();
    assert!(reader.layer(0).is_some());
    store.delete(&[chunk.key()]).unwrap();
    assert!(reader.layer(1).is_some() && reader.layer(2).is_some());
    assert!(!store.contains(chunk.id()) && store.get(chunk.id()).unwrap().is_none());
}
