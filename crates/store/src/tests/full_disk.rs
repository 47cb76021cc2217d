//! A real disk that is full: a small tmpfs, where this machine lets one be mounted.

#[path = "../../../../tests/common/needs.rs"]
mod needs;

use std::path::Path;
use std::process::{Command, Stdio};

use tempfile::{TempDir, tempdir};

use super::limits::later;
use super::store::{files, stored};
use super::{content, numbered};
use crate::file_names::INDEX;
use crate::{Chunk, Limits, PutOutcome, Store};

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
        needs::skip("tmpfs", "no tmpfs can be mounted here");
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
fn a_full_disk_has_room_made_by_the_least_recently_used_and_breaks_nothing() {
    let Some(disk) = Tmpfs::new(4) else { return };
    let store = Store::open(disk.path(), Limits::memory(64 << 20)).unwrap();
    let chunks: Vec<_> = (1..=80).map(|n| numbered(n, 1000)).collect();
    for chunk in &chunks {
        stored(store.put(chunk.clone()).unwrap());
        // In memory it serves.
        assert_eq!(content(&store.get(chunk.id()).unwrap().unwrap()), content(chunk));
    }
    let there = |store: &Store| {
        let report = store.verify(|_| ()).unwrap();
        assert!(report.failed.is_empty() && report.in_progress.is_empty(), "{report:?}");
        store.forget_memory();
        let read = |chunk: &&Chunk| {
            let found = store.get(chunk.id()).unwrap();
            found.is_some_and(|found| content(&found) == content(chunk))
        };
        let read = chunks.iter().filter(read).count();
        assert_eq!(report.whole as usize, read);
        read
    };
    let kept = there(&store);
    assert!((11..70).contains(&kept), "{kept}");
    assert_eq!((store.stats().evicted as usize, store.stats().not_stored), (80 - kept, 0));
    assert!(store.get(chunks[79].id()).unwrap().is_some());
    // Pinned chunks stay, and new ones are not stored.
    let keys: Vec<_> = chunks.iter().map(Chunk::key).collect();
    store.pin(&keys, true).unwrap();
    let refused: Vec<_> = (81..=84).map(|n| store.put(numbered(n, 1000)).unwrap()).collect();
    let is_refused = |outcome: &PutOutcome| matches!(outcome, PutOutcome::NotStored { error } if error.to_string().contains("make room there"));
    assert!(refused.iter().all(is_refused), "{refused:?}");
    assert_eq!((there(&store), store.stats().not_stored), (kept, 4));
    drop(store);
    // A process that opens it on the full disk reads it as well.
    let store = Store::open(disk.path(), Limits::memory(64 << 20)).unwrap();
    assert_eq!(there(&store), kept);
    // With room again it goes on.
    let last = chunks[79].key();
    assert!(store.remove(&last).unwrap());
    stored(store.put(numbered(81, 1000)).unwrap());
    assert_eq!(files(disk.path()).len(), kept);
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

/// Documents are in the folder as well, and chunks can be computed again.
#[test]
fn a_write_beside_the_chunks_has_room_made_by_the_least_recently_used() {
    let dir = tempdir().unwrap();
    let store = Store::open(dir.path(), Limits::memory(0)).unwrap();
    let chunks: Vec<_> = (1..=4).map(|n| numbered(n, 50)).collect();
    for chunk in &chunks {
        stored(store.put(chunk.clone()).unwrap());
        later();
    }
    store.pin(&[chunks[0].key()], true).unwrap();
    let there = || chunks.iter().map(|chunk| store.contains(chunk.id())).collect::<Vec<_>>();
    // The outcome of a write that fails so often, and how often it was tried.
    let write = |bytes: u64, failures: usize, failure: &'static str| {
        let mut tries = 0;
        let write = || {
            tries += 1;
            if tries > failures { Ok(()) } else { Err(failure) }
        };
        let outcome = store.write_beside(bytes, write, |error| *error == "full");
        (outcome, tries)
    };
    assert_eq!(write(1, 0, "full"), (Ok(()), 1));
    assert_eq!(write(1, 1, "broken"), (Err("broken"), 1));
    assert_eq!(there(), [true; 4]);
    assert_eq!(write(1, 1, "full"), (Ok(()), 2));
    assert_eq!(there(), [true, false, true, true]);
    assert_eq!(write(u64::MAX, 2, "full"), (Err("full"), 2));
    assert_eq!(there(), [true, false, false, false]);
    assert_eq!(write(1, 2, "full"), (Err("full"), 1), "nothing is left that may go");
    assert_eq!(store.evicted(), 3);
}
