//! A real disk that is full: a small tmpfs, where this machine lets one be mounted.

use std::path::Path;
use std::process::{Command, Stdio};

use tempfile::{TempDir, tempdir};

use super::store::{files, stored};
use super::{content, numbered};
use crate::file_names::INDEX;
use crate::{Limits, PutOutcome, Store};

/// A file system of some MiB; it goes when it is dropped.
struct Tmpfs(TempDir);

impl Tmpfs {
    fn new(mib: usize) -> Option<Tmpfs> {
        let folder = tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={mib}m"), "tmpfs"])
            .arg(folder.path())
            .stderr(Stdio::null())
            .status();
        if mounted.is_ok_and(|status| status.success()) {
            return Some(Tmpfs(folder));
        }
        eprintln!("skipped: no tmpfs can be mounted here");
        None
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}

#[test]
fn a_full_disk_stores_nothing_more_and_breaks_nothing() {
    let Some(disk) = Tmpfs::new(4) else { return };
    let store = Store::open(disk.path(), Limits::memory(64 << 20)).unwrap();
    let chunks: Vec<_> = (1..=80).map(|n| numbered(n, 1000)).collect();
    let (mut there, mut refused) = (Vec::new(), Vec::new());
    for chunk in &chunks {
        match store.put(chunk.clone()).unwrap() {
            PutOutcome::Stored { .. } => there.push(chunk),
            PutOutcome::NotStored { .. } => refused.push(chunk),
            other => panic!("{other:?}"),
        }
        // In memory it serves, stored or not.
        assert_eq!(content(&store.get(chunk.id()).unwrap().unwrap()), content(chunk));
    }
    assert!(there.len() > 10 && refused.len() > 10, "{} {}", there.len(), refused.len());
    assert_eq!(store.stats().not_stored as usize, refused.len());
    let check = |store: &Store, there: &[&crate::Chunk]| {
        let report = store.verify(|_| ()).unwrap();
        assert!(report.failed.is_empty() && report.in_progress.is_empty(), "{report:?}");
        assert_eq!(report.whole as usize, there.len());
        store.forget_memory();
        for chunk in there {
            assert_eq!(content(&store.get(chunk.id()).unwrap().unwrap()), content(chunk));
        }
    };
    check(&store, &there);
    drop(store);
    // Also for a process that opens it on the full disk.
    let store = Store::open(disk.path(), Limits::memory(64 << 20)).unwrap();
    check(&store, &there);
    // With room again it goes on.
    for chunk in there.drain(..5) {
        assert!(store.remove(&chunk.key()).unwrap());
    }
    stored(store.put(refused[0].clone()).unwrap());
    there.push(refused[0]);
    check(&store, &there);
    assert_eq!(files(disk.path()).len(), there.len());
}

/// Not even the index fits: chunks serve from memory, and what is there is read.
#[test]
fn without_room_for_an_index_nothing_is_stored() {
    let Some(disk) = Tmpfs::new(1) else { return };
    std::fs::write(disk.path().join("ballast"), vec![0; (1 << 20) - 8192]).unwrap();
    let store = Store::open(disk.path().join("chunks"), Limits::memory(1 << 20)).unwrap();
    let outcome = store.put(numbered(1, 50)).unwrap();
    assert!(matches!(outcome, PutOutcome::NotStored { .. }), "{outcome:?}");
    assert!(store.get(numbered(1, 50).id()).unwrap().is_some());
    drop(store);
    std::fs::remove_file(disk.path().join("ballast")).unwrap();
    let store = Store::open(disk.path().join("chunks"), Limits::memory(1 << 20)).unwrap();
    stored(store.put(numbered(1, 50)).unwrap());
    assert!(disk.path().join("chunks").join(INDEX).exists());
}
