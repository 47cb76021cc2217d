//! Chunks carried from one store to another.

use std::fs;

use refrain_kernels::Buffer;
use refrain_kv::AuxTensors;
use tempfile::tempdir;

use super::store::{files, open, path, stored};
use super::{content, numbered};
use crate::archive::{export, import};
use crate::{ChunkId, Scope, Store};

fn aux() -> AuxTensors {
    let mut aux = AuxTensors::default();
    aux.push("t".to_owned(), vec![5], Buffer::F32(vec![1.0, 2.0, 3.0, 4.0, 5.0]));
    aux
}

#[test]
fn an_archive_brings_chunks_and_aux_tensors_as_they_were() {
    let (from, to) = (tempdir().unwrap(), tempdir().unwrap());
    let (source, target) = (open(&from), open(&to));
    let chunks: Vec<_> = (1..=3).map(|n| numbered(n, 40)).collect();
    for chunk in &chunks {
        stored(source.put(chunk.clone()).unwrap());
    }
    stored(source.put_aux_tensors(chunks[1].id(), "test-1", aux()).unwrap());
    fs::write(path(&source, &chunks[2]), b"broken").unwrap();
    let keys = source.disk().keys("").unwrap();
    let (mut archive, mut last) = (Vec::new(), None);
    let report = export(&source, &keys, &mut archive, |progress| last = Some(progress)).unwrap();
    assert_eq!((report.chunks, report.aux_files, report.left_out.len()), (2, 1, 1));
    let total = report.bytes + 6;
    assert_eq!(last.map(|last| (last.bytes, last.bytes_done)), Some((Some(total), report.bytes)));

    let brought = import(&target, archive.as_slice(), None, |_| ()).unwrap();
    assert_eq!((brought.chunks, brought.aux_files, brought.known), (2, 1, 0));
    assert_eq!(brought.bytes, report.bytes);
    for chunk in &chunks[..2] {
        assert_eq!(content(&target.get(chunk.id()).unwrap().unwrap()), content(chunk));
        assert_eq!(fs::read(path(&target, chunk)).unwrap(), fs::read(path(&source, chunk)).unwrap());
    }
    assert_eq!(*target.aux_tensors(chunks[1].id(), "test-1").unwrap().unwrap(), aux());
    let again = import(&target, archive.as_slice(), None, |_| ()).unwrap();
    assert_eq!((again.chunks, again.known), (0, 2));

    // Into a namespace: other names, the same keys and values.
    import(&target, archive.as_slice(), Some("theirs"), |_| ()).unwrap();
    assert_eq!(target.list(Scope::Namespace("theirs")).unwrap().chunks.len(), 2);
    let id = ChunkId { namespace: "theirs".into(), ..chunks[1].id().clone() };
    let moved = target.get(&id).unwrap().unwrap();
    assert_eq!(content(&moved).3, content(&chunks[1]).3);
    assert_eq!(*target.aux_tensors(&id, "test-1").unwrap().unwrap(), aux());
    assert!(target.verify(|_| ()).unwrap().failed.is_empty());
}

/// Nothing but whole chunks gets in of any archive, and nothing lands outside the store.
#[test]
fn an_archive_is_not_believed() {
    let (from, to) = (tempdir().unwrap(), tempdir().unwrap());
    let (source, target) = (open(&from), open(&to));
    let (chunk, other) = (numbered(1, 40), numbered(2, 40));
    stored(source.put(chunk.clone()).unwrap());
    stored(source.put_aux_tensors(chunk.id(), "test", aux()).unwrap());
    let good = fs::read(path(&source, &chunk)).unwrap();
    let mut flipped = good.clone();
    flipped[good.len() - 1] ^= 1;
    let name = |chunk: &crate::Chunk| {
        let key = chunk.key().to_string();
        format!("{}/{key}.safetensors", &key[..2])
    };
    let beside = |chunk: &crate::Chunk| name(chunk).replace(".safetensors", ".test.summary");
    let aux_file = fs::read(source.disk().aux_path(&chunk.key(), "test")).unwrap();
    let entries = [
        ("notes.txt".to_owned(), b"hello".to_vec()),
        (beside(&chunk), aux_file.clone()),
        (name(&other), good.clone()),
        (name(&chunk), flipped),
        (name(&chunk), good[..good.len() / 2].to_vec()),
        (name(&chunk), good),
        (beside(&other), aux_file),
    ];
    let mut archive = tar::Builder::new(Vec::new());
    for (name, bytes) in &entries {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        archive.append_data(&mut header, name, bytes.as_slice()).unwrap();
    }
    // A name that leads elsewhere, written past the builder's own check.
    let mut header = tar::Header::new_gnu();
    let evil = format!("../{}", name(&chunk));
    header.as_old_mut().name[..evil.len()].copy_from_slice(evil.as_bytes());
    header.set_size(0);
    header.set_cksum();
    archive.append(&header, std::io::empty()).unwrap();
    let archive = archive.into_inner().unwrap();
    let report = import(&target, archive.as_slice(), None, |_| ()).unwrap();
    assert_eq!((report.chunks, report.aux_files, report.left_out.len()), (1, 0, 7), "{report:?}");
    assert_eq!(files(to.path()).len(), 1);
    assert!(target.verify(|_| ()).unwrap().failed.is_empty());
    // Cut off anywhere: what came before is kept, the rest is told.
    let fresh = tempdir().unwrap();
    let fresh = Store::open(fresh.path(), 0).unwrap();
    assert!(import(&fresh, &archive[..archive.len() / 2], None, |_| ()).is_err());
    assert!(
        import(&fresh, &b"this is no archive, but more than one block of text long"[..], None, |_| ())
            .is_err()
    );
}

/// A few bytes that say they are terabytes.
#[test]
fn a_sparse_archive_takes_no_memory() {
    let chunk = numbered(1, 40);
    let key = chunk.key().to_string();
    let mut header = tar::Header::new_gnu();
    header.set_path(format!("{}/{key}.safetensors", &key[..2])).unwrap();
    header.set_entry_type(tar::EntryType::GNUSparse);
    header.set_size(0);
    let gnu = header.as_gnu_mut().unwrap();
    gnu.realsize.copy_from_slice(b"40000000000\0");
    gnu.sparse[0].offset.copy_from_slice(b"40000000000\0");
    gnu.sparse[0].numbytes.copy_from_slice(b"00000000000\0");
    header.set_cksum();
    let mut archive = tar::Builder::new(Vec::new());
    archive.append(&header, std::io::empty()).unwrap();
    let archive = archive.into_inner().unwrap();
    let store = Store::in_memory(1 << 20);
    let report = import(&store, archive.as_slice(), None, |_| ()).unwrap();
    assert_eq!((report.chunks, report.left_out.len()), (0, 1));
}
