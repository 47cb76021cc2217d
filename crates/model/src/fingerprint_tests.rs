use std::fs::OpenOptions;
use std::io::{Seek, SeekFrom, Write};

use super::*;
use crate::testing::TestFolder;

/// The hash of the file at `path`, and how many pieces were hashed for it.
fn print(path: &Path, memory: &Path) -> ([u8; 32], usize) {
    let mut pieces = 0;
    let count = |done, total| {
        pieces += 1;
        assert!(done == pieces && done <= total, "{done} of {total}");
    };
    let hash = of(&[b"a model"], &[&FileBytes::map(path).unwrap()], Some(memory), count);
    (hash, pieces)
}

fn flip(path: &Path, at: u64) {
    let mut file = OpenOptions::new().write(true).open(path).unwrap();
    file.seek(SeekFrom::Start(at)).unwrap();
    file.write_all(&[1]).unwrap();
}

#[test]
fn a_large_file_is_hashed_once_and_again_after_every_edit() {
    let folder = TestFolder::new();
    let memory = folder.path().join("cache/hashes.json");
    let path = folder.write("large", vec![0; PIECE + REMEMBERED]);
    let (first, pieces) = print(&path, &memory);
    assert_eq!(pieces, 2);
    assert_eq!(print(&path, &memory), (first, 0), "remembered");
    let copy = folder.write("copy", vec![0; PIECE + REMEMBERED]);
    assert_eq!(print(&copy, &memory), (first, 2), "the name does not matter");

    let modified = std::fs::metadata(&path).unwrap().modified().unwrap();
    flip(&path, 12_345_678);
    let (edited, pieces) = print(&path, &memory);
    assert!(edited != first && pieces == 2);
    assert_eq!(print(&path, &memory), (edited, 0));
    assert_eq!(print(&copy, &memory), (first, 0), "each file has its own entry");
    if cfg!(unix) {
        flip(&path, 12_345_679);
        OpenOptions::new().write(true).open(&path).unwrap().set_modified(modified).unwrap();
        let (hidden, pieces) = print(&path, &memory);
        assert!(hidden != edited && pieces == 2, "the time of modification was set back");
    }
    assert_eq!(
        std::fs::read_dir(memory.parent().unwrap()).unwrap().count(),
        1,
        "nothing but the memory stays"
    );
}

#[test]
fn a_memory_that_is_damaged_or_cannot_be_written_changes_nothing() {
    let folder = TestFolder::new();
    let path = folder.write("large", vec![7; REMEMBERED]);
    let memory = folder.path().join("hashes.json");
    let (hash, _) = print(&path, &memory);
    for damaged in ["", "{", "[1]", r#"{"/a":{"size":1}}"#, "\0\0"] {
        folder.write("hashes.json", damaged);
        assert_eq!(print(&path, &memory), (hash, 1), "{damaged:?}");
        assert_eq!(print(&path, &memory), (hash, 0), "{damaged:?} was replaced");
    }
    let file = folder.write("file", "");
    assert_eq!(print(&path, &file.join("hashes.json")), (hash, 1));
    assert_eq!(of(&[b"a model"], &[&FileBytes::map(&path).unwrap()], None, |_, _| ()), hash);
}

#[test]
fn a_file_that_changed_after_it_was_opened_is_not_remembered() {
    let folder = TestFolder::new();
    let memory = folder.path().join("hashes.json");
    let path = folder.write("large", vec![7; REMEMBERED]);
    let opened = FileBytes::map(&path).unwrap();
    std::fs::rename(folder.write("new", vec![8; REMEMBERED]), &path).unwrap();
    let old = of(&[], &[&opened], Some(&memory), |_, _| ());
    let new = of(&[], &[&FileBytes::map(&path).unwrap()], Some(&memory), |_, _| ());
    assert_ne!(old, new);
}

#[test]
fn small_files_are_hashed_every_time() {
    let folder = TestFolder::new();
    let (path, memory) = (folder.write("small", vec![7; 1000]), folder.path().join("hashes.json"));
    let (hash, pieces) = print(&path, &memory);
    assert!(pieces == 0 && !memory.exists());
    flip(&path, 999);
    assert_ne!(print(&path, &memory).0, hash);
}

#[test]
fn parts_and_files_do_not_run_into_each_other() {
    let files = [FileBytes::Owned(b"ab".to_vec()), FileBytes::Owned(b"c".to_vec())];
    let moved = [FileBytes::Owned(b"a".to_vec()), FileBytes::Owned(b"bc".to_vec())];
    let of =
        |parts: &[&[u8]], files: &[FileBytes]| of(parts, &files.iter().collect::<Vec<_>>(), None, |_, _| ());
    assert_ne!(of(&[b"x"], &files), of(&[b"x"], &moved));
    assert_ne!(of(&[b"x", b""], &files), of(&[b"", b"x"], &files));
}
