//! Shared documents over object stores in memory, in a folder, and over S3.

mod away;
mod garbage;
#[path = "../../../../../tests/common/moto.rs"]
mod moto;
mod objects;
mod replicas;
mod s3;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use object_store::memory::InMemory;
use object_store::throttle::{ThrottleConfig, ThrottledStore};
use refrain_store::{Limits, Objects, RemoteOptions, Store};
use tempfile::{TempDir, tempdir};

use crate::conformance;
use crate::document_store::DocumentStore;
use crate::notes::SharingState;
use crate::shared::SharedDocuments;

/// An object store that machines share.
trait Bucket {
    fn options(&self) -> RemoteOptions;

    /// A machine with nothing in its folder.
    fn machine(&self) -> Machine {
        Machine::in_folder(Arc::new(tempdir().unwrap()), &self.options())
    }
}

/// An object store in memory that can be made slow.
struct Memory(Arc<ThrottledStore<InMemory>>);

impl Memory {
    fn new() -> Memory {
        Memory(Arc::new(ThrottledStore::new(InMemory::new(), ThrottleConfig::default())))
    }

    /// Has every request wait longer than machines do, or none.
    fn hang(&self, hangs: bool) {
        let wait = if hangs { Duration::from_secs(3600) } else { Duration::ZERO };
        self.0.config_mut(|config| {
            config.wait_get_per_call = wait;
            config.wait_put_per_call = wait;
            config.wait_delete_per_call = wait;
            config.wait_list_per_call = wait;
        });
    }
}

impl Bucket for Memory {
    fn options(&self) -> RemoteOptions {
        let mut options = RemoteOptions::new("memory:///library");
        options.timeout = Duration::from_millis(300);
        options.objects = Some(self.0.clone());
        options
    }
}

/// A folder that machines share.
struct Folder(TempDir);

impl Bucket for Folder {
    fn options(&self) -> RemoteOptions {
        let mut options = RemoteOptions::new(format!("file://{}/library", self.0.path().display()));
        // A busy machine may be slow.
        options.timeout = Duration::from_secs(60);
        options
    }
}

/// A machine with its replica.
struct Machine {
    documents: SharedDocuments,
    objects: Objects,
    _store: Store,
    folder: Arc<TempDir>,
    options: RemoteOptions,
}

impl Machine {
    fn in_folder(folder: Arc<TempDir>, options: &RemoteOptions) -> Machine {
        let store = Store::open_shared(folder.path(), Limits::memory(0), options).unwrap();
        let objects = store.objects().unwrap();
        let documents = SharedDocuments::open(Some(folder.path()), u64::MAX, objects.clone()).unwrap();
        Machine { documents, objects, _store: store, folder, options: options.clone() }
    }

    /// The machine after its program was ended and started again.
    fn restarted(self) -> Machine {
        let Machine { documents, objects, _store, folder, options } = self;
        drop((documents, objects, _store));
        Machine::in_folder(folder, &options)
    }

    /// Names of all objects but those of changes and those that remember removals.
    fn names(&self) -> BTreeSet<String> {
        let names = self.objects.list("", None).unwrap().into_iter().map(|object| object.name);
        let is_other = |name: &str| name.starts_with("changes/") || name.ends_with("/removed");
        names.filter(|name| !is_other(name) && name != "library.json").collect()
    }

    /// Has the next time list all documents.
    fn list_next(&self) {
        self.was_away(600);
    }

    /// Has the machine have listed all documents so many seconds ago.
    fn was_away(&self, seconds: u64) {
        let state = self.documents.local.sharing_state().unwrap();
        let listed = crate::notes::now().as_secs() - seconds;
        self.documents.local.set_sharing_state(&SharingState { listed, ..state }).unwrap();
    }
}

/// The ids, times, pins and texts that a machine has.
fn contents(machine: &Machine) -> Vec<(String, u64, bool, String)> {
    let text = |id: &str| machine.documents.local.document("", id).unwrap().text;
    let listed = conformance::list(&machine.documents, "").into_iter();
    listed.map(|one| (one.id.clone(), one.created, one.pinned, text(&one.id))).collect()
}

/// Holds documents of a bucket against the battery. Each store has a bucket of its own.
fn check(bucket: &dyn Fn() -> Box<dyn Bucket>) {
    let kept = RefCell::new(Vec::new());
    conformance::check(&|quota| {
        let bucket = bucket();
        let folder = tempdir().unwrap();
        let store = Store::open_shared(folder.path(), Limits::memory(0), &bucket.options()).unwrap();
        let documents = SharedDocuments::open(None, quota, store.objects().unwrap()).unwrap();
        kept.borrow_mut().push((bucket, folder, store));
        Box::new(documents) as Box<dyn DocumentStore>
    });
}

#[test]
fn documents_shared_in_memory_conform() {
    check(&|| Box::new(Memory::new()));
}

#[test]
fn documents_shared_in_a_folder_conform() {
    check(&|| Box::new(Folder(tempdir().unwrap())));
}
