//! Opening the documents' file: on a full disk, half made, and while another program has it.

use std::io;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use redb::backends::FileBackend;
use redb::{Builder, StorageBackend};

use super::*;
use crate::conformance::{list, put};

/// A file that takes nothing while the disk is full.
#[derive(Debug)]
struct Disk(FileBackend, Arc<AtomicBool>);

impl Disk {
    fn room(&self) -> io::Result<()> {
        if self.1.load(Relaxed) { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }
}

impl StorageBackend for Disk {
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        if len > self.0.len()? {
            self.room()?;
        }
        self.0.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write(offset, data)
    }
}

/// A full disk takes no transaction, and an opening needs none.
#[test]
fn documents_are_read_while_the_disk_is_full() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("documents");
    std::fs::write(&file, "").unwrap();
    let is_full = Arc::new(AtomicBool::new(false));
    let open = |is_shared| {
        let (file, is_full) = (file.clone(), is_full.clone());
        let open = move || {
            let file = std::fs::File::options().read(true).write(true).open(&file)?;
            Builder::new().create_with_backend(Disk(FileBackend::new(file)?, is_full.clone()))
        };
        LocalDocuments::with(open, None, u64::MAX, is_shared)
    };
    for is_shared in [false, true] {
        let kept = list(&open(is_shared).unwrap(), "").len();
        let mut store = open(is_shared).unwrap();
        put(&store, "", &format!("{is_shared}"), &[1]).unwrap();
        is_full.store(true, Relaxed);
        // Free pages are filled up first.
        let mut more = 0;
        while put(&store, "", &format!("{is_shared} {more} {}", "x".repeat(1 << 20)), &[1]).is_ok() {
            more += 1;
        }
        for _ in 0..3 {
            drop(store);
            store = open(is_shared).unwrap();
            assert_eq!(list(&store, "").len(), kept + 1 + more);
        }
        is_full.store(false, Relaxed);
    }
}

/// The documents' file can be made once there is room for it, whatever an attempt on a full disk has left.
#[test]
fn a_file_that_is_half_made_does_not_have_the_name() {
    let folder = tempfile::tempdir().unwrap();
    let mount = |options: &str| {
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(folder.path()).stderr(Stdio::null());
        mount.status().is_ok_and(|status| status.success())
    };
    let open = || LocalDocuments::open(Some(folder.path()), u64::MAX).map(drop);
    let mut refused = 0;
    for room in [4, 8, 16, 32] {
        if !mount(&format!("size={room}k")) {
            return crate::needs::skip("tmpfs", "no tmpfs can be mounted here");
        }
        let full = open();
        let with_room = mount("remount,size=64m").then(&open);
        Command::new("umount").arg("-l").arg(folder.path()).status().unwrap();
        refused += usize::from(full.is_err());
        with_room.unwrap().unwrap();
    }
    assert!(refused > 0);
}

/// A command that has the file for a moment stands in no other's way.
#[test]
fn an_opening_waits_for_a_program_that_has_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let open = || LocalDocuments::open(Some(folder.path()), u64::MAX);
    let first = open().unwrap();
    thread::scope(|scope| {
        let second = scope.spawn(|| open().map(drop));
        // It meets the lock meanwhile.
        thread::sleep(2 * PAUSE);
        drop(first);
        second.join().unwrap().unwrap();
    });
}

/// A remark about the documents costs no other program anything, and no rewriting of the file.
#[test]
fn an_opening_at_once_leaves_the_file_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let first = LocalDocuments::open(Some(folder.path()), u64::MAX).unwrap();
    let kept = put(&first, "", "kept", &[1]).unwrap();
    let removed = put(&first, "", "a removed document", &[2]).unwrap();
    let at_once = || LocalDocuments::open_at_once(folder.path());
    assert!(matches!(at_once(), Err(Error::InUse { .. })));
    first.remove("", &removed.id, &[]).unwrap();
    drop(first);
    let is_purged = || {
        let bytes = std::fs::read(folder.path().join(DOCUMENTS)).unwrap();
        !bytes.windows(b"a removed document".len()).any(|part| part == b"a removed document")
    };
    assert_eq!(list(&at_once().unwrap(), ""), [kept]);
    assert!(!is_purged());
    drop(LocalDocuments::open(Some(folder.path()), u64::MAX).unwrap());
    assert!(is_purged());
}
