//! Documents on a disk that is full: a small tmpfs, where this machine lets one be mounted.

use std::fs::{File, read_dir};
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use tempfile::TempDir;

use super::tests::{new_document, with_a_chunk};
use super::*;

/// A file system of some MiB; it goes when it is dropped.
struct Tmpfs(TempDir);

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

impl Tmpfs {
    fn new(options: &str) -> Option<Tmpfs> {
        let folder = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(folder.path()).stderr(Stdio::null());
        if mount.status().is_ok_and(|status| status.success()) {
            return Some(Tmpfs(folder));
        }
        crate::needs::skip("tmpfs", "no tmpfs can be mounted here");
        None
    }

    /// The only file of a chunk.
    fn chunk_file(&self) -> PathBuf {
        let entries = |folder: &Path| read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let of_chunks = |path: &PathBuf| path.extension().is_some_and(|end| end == "safetensors");
        let folders = entries(self.0.path()).filter(|path| path.is_dir());
        folders.flat_map(|folder| entries(&folder).collect::<Vec<_>>()).find(of_chunks).unwrap()
    }
}

/// Appends to a file until the disk is full.
fn fill(file: &Path) {
    let mut file = File::options().create(true).append(true).open(file).unwrap();
    while file.write_all(&[0; 4096]).is_ok() {}
}

/// A document of 1 MiB.
fn large(index: usize) -> NewDocument {
    let text = index.to_string().repeat(1 << 20);
    NewDocument { document: Document { title: String::new(), text }, ..new_document(index) }
}

#[test]
fn chunks_make_room_for_documents_on_a_full_disk() {
    let Some(disk) = Tmpfs::new("size=16m") else { return };
    let folder = disk.0.path();
    let (engine, _) = with_a_chunk(folder);
    let documents = LocalDocuments::open(Some(folder), u64::MAX).unwrap();
    let corpus = Corpus::unindexed(&engine, Box::new(documents)).unwrap();
    let chunk = disk.chunk_file();
    fill(&chunk);
    let id = corpus.put(&engine, vec![large(1)]).unwrap().remove(0).id;
    assert!(!chunk.exists());
    let ballast = folder.join("ballast");
    fill(&ballast);
    let error = corpus.put(&engine, vec![large(2)]).unwrap_err();
    let message = error.to_string();
    assert!(matches!(error, Error::DiskFull { .. }), "{message}");
    assert!(message.contains("documents.redb") && message.contains("make room there"), "{message}");
    std::fs::remove_file(ballast).unwrap();
    corpus.put(&engine, vec![large(2)]).unwrap();
    assert_eq!(corpus.documents().document("", &id).unwrap().text.len(), 1 << 20);
}
