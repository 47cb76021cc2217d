//! Collecting garbage: nothing that a document names is deleted, though others work or die meanwhile.

use std::mem::forget;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Instant, SystemTime};

use refrain_store::ChunkKey;

use super::*;
use crate::conformance::{key, put, remove_all};
use crate::error::Error;
use crate::shared::objects::{DOCUMENT, place_of};
use crate::shared::{Collector, GarbageOptions, GarbageReport};

/// A time that is over at once.
const NOW: Duration = Duration::ZERO;
/// A time that does not end in a test.
const LONG: Duration = Duration::from_secs(24 * 3600);

fn options(unused: Duration, grace: Duration) -> GarbageOptions {
    GarbageOptions { unused, grace, lease: Duration::from_millis(200) }
}

fn chunk_name(key: &ChunkKey) -> String {
    format!("{}/{key}.safetensors", &key.to_string()[..2])
}

/// Writes a chunk, with what a method keeps beside it.
fn put_chunk(objects: &Objects, key: ChunkKey) {
    objects.put(&chunk_name(&key), vec![7; 100]).unwrap();
    let beside = chunk_name(&key).replace(".safetensors", ".sam_kv.aux");
    objects.put(&beside, vec![7; 10]).unwrap();
}

fn has_chunk(objects: &Objects, key: ChunkKey) -> bool {
    objects.exist(vec![chunk_name(&key)]).unwrap() == [true]
}

fn collect(objects: &Objects, options: &GarbageOptions) -> GarbageReport {
    Collector::begin(objects, options).unwrap().delete().unwrap()
}

/// A machine with a document of chunk 1; chunks 2 and 3 have no document.
fn machine(bucket: &dyn Bucket) -> Machine {
    let machine = bucket.machine();
    [1, 2, 3].map(key).into_iter().for_each(|key| put_chunk(&machine.objects, key));
    put(&machine.documents, "a tenant", "named", &[1]).unwrap();
    machine
}

#[test]
fn what_no_document_names_is_noted_and_then_deleted() {
    for bucket in [Box::new(Memory::new()) as Box<dyn Bucket>, Box::new(Folder(tempdir().unwrap()))] {
        let one = machine(&*bucket);
        let others = ["02/notes.txt", "jobs/02/manifest.json", "02/0202.safetensors"];
        for name in others {
            one.objects.put(name, b"x".to_vec()).unwrap();
        }
        let found = collect(&one.objects, &options(NOW, NOW));
        let expected = GarbageReport {
            documents: 1,
            chunks: 3,
            bytes: 330,
            unused: 2,
            unused_bytes: 220,
            ..GarbageReport::default()
        };
        assert_eq!(found, expected, "the first look only notes");
        // One comes to have a document meanwhile.
        put(&one.documents, "", "late", &[3]).unwrap();
        let found = collect(&one.objects, &options(NOW, NOW));
        assert_eq!((found.documents, found.unused, found.due), (2, 1, 1));
        assert_eq!((found.deleted, found.deleted_bytes), (1, 110));
        assert_eq!([1, 2, 3].map(|n| has_chunk(&one.objects, key(n))), [true, false, true]);
        let left = one.names();
        assert!(others.iter().all(|name| left.contains(*name)), "{left:?}");
        assert!(!left.iter().any(|name| name.contains(&key(2).to_string()) || name.contains("lease")));
        assert_eq!(collect(&one.objects, &options(NOW, NOW)).unused, 0);
        // It is written again, and noted anew.
        put_chunk(&one.objects, key(2));
        assert_eq!(collect(&one.objects, &options(NOW, NOW)).due, 0);
    }
}

#[test]
fn what_is_young_or_was_noted_just_now_stays() {
    let one = machine(&Memory::new());
    for _ in 0..3 {
        assert_eq!(collect(&one.objects, &options(LONG, NOW)).unused, 0);
    }
    for _ in 0..3 {
        let found = collect(&one.objects, &options(NOW, LONG));
        assert_eq!((found.unused, found.due, found.deleted), (2, 0, 0));
    }
    assert_eq!(collect(&one.objects, &options(NOW, NOW)).deleted, 2);
}

#[test]
fn a_document_that_comes_after_the_look_keeps_its_chunks() {
    let bucket = Memory::new();
    let one = machine(&bucket);
    collect(&one.objects, &options(NOW, NOW));
    let collector = Collector::begin(&one.objects, &options(NOW, NOW)).unwrap();
    assert_eq!(collector.report().due, 2);
    put(&bucket.machine().documents, "another", "late", &[2]).unwrap();
    assert_eq!(collector.delete().unwrap().deleted, 1);
    assert_eq!([1, 2, 3].map(|n| has_chunk(&one.objects, key(n))), [true, true, false]);
}

/// Keys that lie beside a document count, and a document that cannot be read stops everything.
#[test]
fn what_names_are_not_known_keep_all() {
    let bucket = Memory::new();
    let one = machine(&bucket);
    // A second machine stores the same document with another key: an object beside it.
    put(&bucket.machine().documents, "a tenant", "named", &[2]).unwrap();
    collect(&one.objects, &options(NOW, NOW));
    let broken = place_of("", &format!("doc-{}", "0".repeat(24))).name(DOCUMENT);
    one.objects.put(&broken, b"{}".to_vec()).unwrap();
    let error = Collector::begin(&one.objects, &options(NOW, NOW)).unwrap_err().to_string();
    assert!(error.contains(&broken), "{error}");
    one.objects.delete(&broken).unwrap();
    assert_eq!(collect(&one.objects, &options(NOW, NOW)).deleted, 1);
    assert_eq!([1, 2, 3].map(|n| has_chunk(&one.objects, key(n))), [true, true, false]);

    let none = Memory::new().machine();
    put_chunk(&none.objects, key(1));
    let error = Collector::begin(&none.objects, &options(NOW, NOW)).unwrap_err().to_string();
    assert!(error.contains("no document"), "{error}");
}

#[test]
fn one_collector_works_at_a_time_and_a_dead_one_is_replaced() {
    let one = machine(&Memory::new());
    let patient = GarbageOptions { lease: Duration::from_secs(20), ..options(NOW, NOW) };
    let first = Collector::begin(&one.objects, &options(NOW, NOW)).unwrap();
    thread::scope(|scope| {
        let second = scope.spawn(|| Collector::begin(&one.objects, &patient).map(drop));
        thread::sleep(Duration::from_millis(500));
        assert!(!second.is_finished(), "it waits for a sign of life");
        assert_eq!(first.delete().unwrap().deleted, 0);
        // It has seen that the lease was given back: somebody lived.
        assert!(matches!(second.join().unwrap(), Err(Error::Garbage(_))));
    });
    // Killed after its look, with its lease.
    forget(Collector::begin(&one.objects, &options(NOW, NOW)).unwrap());
    let began = Instant::now();
    let late = Collector::begin(&one.objects, &options(NOW, NOW)).unwrap();
    assert!(began.elapsed() >= Duration::from_millis(200));
    assert_eq!(late.delete().unwrap().deleted, 2);
    assert!(!one.names().iter().any(|name| name.contains("lease")));
}

/// Writers and readers work while collectors come, and are killed where they are.
#[test]
fn what_is_named_stays_while_all_work_and_collectors_die() {
    let bucket = Memory::new();
    let one = machine(&bucket);
    let unused = Duration::from_secs(2);
    thread::scope(|scope| {
        let writers: Vec<_> = (0..2u8)
            .map(|writer| {
                let machine = bucket.machine();
                scope.spawn(move || {
                    // The whole of it, with its connection.
                    let machine: Machine = machine;
                    let mut kept = Vec::new();
                    for n in (10 + 100 * writer)..(110 + 100 * writer) {
                        let began = Instant::now();
                        put_chunk(&machine.objects, key(n));
                        // Every third chunk is left without a document.
                        if n % 3 != 0 {
                            put(&machine.documents, "", &format!("of {n}"), &[n]).unwrap();
                            // A writer that was held up for longer has no right to its chunk.
                            kept.extend((began.elapsed() < unused).then_some(n));
                        }
                        // What was named before is there to be read.
                        assert!(kept.iter().step_by(7).all(|n| has_chunk(&machine.objects, key(*n))));
                        thread::sleep(Duration::from_millis(30));
                    }
                    kept
                })
            })
            .collect();
        let mut deleted = 0;
        let mut turns = 0;
        while !writers.iter().all(|writer| writer.is_finished()) || deleted < 20 {
            turns += 1;
            assert!(turns < 5000, "{deleted} were deleted");
            let Ok(collector) = Collector::begin(&one.objects, &options(unused, Duration::from_secs(1)))
            else {
                continue;
            };
            match turns % 3 {
                0 => forget(collector),
                _ => deleted += collector.delete().unwrap().deleted,
            }
        }
        let kept: Vec<u8> = writers.into_iter().flat_map(|writer| writer.join().unwrap()).collect();
        assert!(kept.len() > 100, "{} were in time", kept.len());
        assert!(kept.iter().all(|n| has_chunk(&one.objects, key(*n))));
    });
    assert!(has_chunk(&one.objects, key(1)) && !has_chunk(&one.objects, key(2)));
}

/// A process that was killed while it wrote an object has left its bytes in the folder, which no listing has.
#[test]
fn what_a_killed_process_has_left_in_a_folder_goes_when_it_is_old() {
    let folder = Folder(tempdir().unwrap());
    let one = folder.machine();
    put(&one.documents, "", "text", &[1]).unwrap();
    let library = folder.0.path().join("library");
    std::fs::create_dir(library.join(".snapshot")).unwrap();
    // A shard that cannot be read does not stop the others.
    std::fs::write(library.join("0a"), "").unwrap();
    let names = ["changes/old.json#1", "changes/young.json#1", ".snapshot/of another program#1"];
    let left = names.map(|name| leave(&library.join(name), 2 * LONG));
    leave(&left[1], NOW);
    collect(&one.objects, &options(LONG, LONG));
    assert_eq!(left.map(|path| path.exists()), [false, true, true]);
}

/// A process that was killed while it wrote a document has left its text in the folder.
#[test]
fn what_a_killed_process_has_left_of_a_document_goes_with_it() {
    let folder = Folder(tempdir().unwrap());
    let one = folder.machine();
    let id = put(&one.documents, "", "text", &[1]).unwrap().id;
    let place = folder.0.path().join("library").join(place_of("", &id).folder());
    let old = leave(&place.join("document.json#1"), Duration::from_secs(120));
    let young = leave(&place.join("document.json#2"), NOW);
    remove_all(&one.documents, "", &id);
    assert_eq!(
        [old, young].map(|path| path.exists()),
        [false, true],
        "a writer may be at work on the young one"
    );
}

/// Leaves a file that was last written some time ago.
fn leave(path: &Path, age: Duration) -> PathBuf {
    std::fs::File::create(path).unwrap().set_modified(SystemTime::now() - age).unwrap();
    path.to_owned()
}
