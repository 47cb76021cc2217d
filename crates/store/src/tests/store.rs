use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, SystemTime};

use refrain_kernels::Dtype;
use tempfile::{TempDir, tempdir};

use super::{chunk, chunk_of, content, id, numbered, raw};
use crate::disk::Phantom;
use crate::{Chunk, ChunkId, ChunkKey, Problem, PutOutcome, Scope, Store, StoreError};

const MIB: u64 = 1 << 20;

pub(super) fn open(dir: &TempDir) -> Store {
    Store::open(dir.path().join("chunks"), MIB).unwrap()
}

pub(super) fn path(store: &Store, chunk: &Chunk) -> PathBuf {
    store.disk().path(&chunk.key())
}

/// Every file below the folder.
pub(super) fn files(dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(self::files(&path));
        } else if !path.file_name().unwrap().to_string_lossy().starts_with("index.") {
            files.push(path);
        }
    }
    files
}

pub(super) fn stored(outcome: PutOutcome) -> u64 {
    match outcome {
        PutOutcome::Stored { bytes } => bytes,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_chunk_survives_the_store() {
    let dir = tempdir().unwrap();
    for (dtype, seed) in [(Dtype::F16, 1), (Dtype::Bf16, 2), (Dtype::F32, 3)] {
        let (chunk, store) = (chunk_of(id(dtype), seed), open(&dir));
        assert!(!store.contains(chunk.id()));
        assert!(store.get(chunk.id()).unwrap().is_none());
        let bytes = stored(store.put(chunk.clone()).unwrap());
        assert_eq!(bytes, fs::metadata(path(&store, &chunk)).unwrap().len());
        assert!(matches!(store.put(chunk.clone()).unwrap(), PutOutcome::Known));
        assert!(store.get(chunk.id()).unwrap().is_some());
        let again = open(&dir);
        assert!(again.contains(chunk.id()));
        for _ in 0..2 {
            assert_eq!(content(&again.get(chunk.id()).unwrap().unwrap()), content(&chunk));
        }
        let (first, second) = (store.stats(), again.stats());
        assert_eq!((first.memory_hits, first.disk_hits, first.misses, first.stored), (1, 0, 1, 1));
        assert_eq!((second.memory_hits, second.disk_hits, second.misses), (1, 1, 0));
        assert_eq!((first.bytes_written, second.bytes_read), (bytes, chunk.bytes() as u64));
        assert!(again.take_repairs().is_empty());
    }
    assert_eq!(files(dir.path()).len(), 3);
}

#[test]
fn a_store_without_a_folder_keeps_chunks_in_memory() {
    let store = Store::in_memory(MIB);
    assert!(matches!(store.put(chunk()).unwrap(), PutOutcome::MemoryOnly));
    assert_eq!(content(&store.get(chunk().id()).unwrap().unwrap()).3, raw(&chunk()));
    assert_eq!(store.list(Scope::All).unwrap().chunks[0].path, None);
    assert_eq!(store.show(&chunk().key()).unwrap().token_ids, chunk().tokens());
    assert_eq!(store.resolve(&chunk().key().to_string()[..3], Scope::All).unwrap(), chunk().key());
    assert_eq!(store.verify(|_| ()).unwrap().whole, 0);
    assert!(store.remove(&chunk().key()).unwrap());
    assert!(store.get(chunk().id()).unwrap().is_none());
    assert!(store.folder().is_none());
}

/// Threads that read one chunk together find its broken layer once: none returns before the file has been removed.
#[test]
fn a_broken_layer_read_by_many_threads_is_removed_before_any_of_them_goes_on() {
    for _ in 0..50 {
        let dir = tempdir().unwrap();
        let (chunk, store) = (chunk(), open(&dir));
        stored(store.put(chunk.clone()).unwrap());
        let (store, path) = (open(&dir), path(&store, &chunk));
        let mut bytes = chunk.to_bytes();
        *bytes.last_mut().unwrap() ^= 4;
        fs::write(&path, bytes).unwrap();
        let reader = store.reader(chunk.id()).unwrap().unwrap();
        let together = Barrier::new(4);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    together.wait();
                    assert!(reader.layer(1).is_none());
                    assert!(store.reader(chunk.id()).unwrap().is_none());
                });
            }
        });
        assert_eq!((store.take_repairs().len(), store.stats().removed), (1, 1));
    }
}

/// The log names a file that was removed, and why, once.
#[test]
fn a_removed_file_is_told_in_the_log() {
    let (dir, logs) = (tempdir().unwrap(), tempdir().unwrap());
    let (chunk, store) = (chunk(), open(&dir));
    stored(store.put(chunk.clone()).unwrap());
    let (store, path, log) = (open(&dir), path(&store, &chunk), logs.path().join("log"));
    fs::write(&path, &chunk.to_bytes()[..100]).unwrap();
    let writer = std::sync::Mutex::new(fs::File::create(&log).unwrap());
    let subscriber = tracing_subscriber::fmt().with_writer(writer).with_ansi(false).finish();
    // Beside a single subscriber, the thread of another test that comes to the message first would turn it off for all.
    let _another = tracing::Dispatch::new(tracing::subscriber::NoSubscriber::new());
    tracing::subscriber::with_default(subscriber, || {
        assert!(store.get(chunk.id()).unwrap().is_none());
        assert!(store.get(chunk.id()).unwrap().is_none());
    });
    let told = fs::read_to_string(log).unwrap();
    assert_eq!(told.matches(path.to_str().unwrap()).count(), 1, "{told}");
    let problem = store.take_repairs()[0].problem.to_string();
    assert!(told.contains("WARN") && told.contains(&problem), "{told}");
}

/// A file with any fault is removed, counted and told, and the chunk can be stored again.
#[test]
fn broken_files_are_removed_and_replaced() {
    let dir = tempdir().unwrap();
    let chunk = chunk();
    let good = chunk.to_bytes();
    let data = good.len() - chunk.bytes();
    let flip = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 4;
        bytes
    };
    let other_model = ChunkId { model: [1; 32], ..chunk.id().clone() };
    let other_text = ChunkId { tokens: vec![5, 70_000, 6], ..chunk.id().clone() };
    let other_type = ChunkId { dtype: Dtype::Bf16, ..chunk.id().clone() };
    let other_namespace = ChunkId { namespace: "mine".into(), ..chunk.id().clone() };
    type Check = fn(&Problem) -> bool;
    let cases: Vec<(Vec<u8>, Check)> = vec![
        (flip(0), |p| matches!(p, Problem::Header(_) | Problem::Length { .. })),
        (flip(7), |p| matches!(p, Problem::Header(_))),
        (flip(20), |p| matches!(p, Problem::Header(_))),
        (flip(data), |p| *p == Problem::Checksum(0)),
        (flip(good.len() - 1), |p| *p == Problem::Checksum(1)),
        (Vec::new(), |p| matches!(p, Problem::Length { .. })),
        (good[..7].to_vec(), |p| matches!(p, Problem::Length { .. })),
        (good[..data].to_vec(), |p| matches!(p, Problem::Length { .. })),
        (good[..good.len() - 1].to_vec(), |p| matches!(p, Problem::Length { .. })),
        ([good.as_slice(), b"\0"].concat(), |p| matches!(p, Problem::Length { .. })),
        (vec![0; 4096], |p| matches!(p, Problem::Header(_))),
        (chunk_of(other_model, 1).to_bytes(), |p| *p == Problem::Identity("model")),
        (chunk_of(other_text, 1).to_bytes(), |p| *p == Problem::Identity("text (token ids)")),
        (chunk_of(other_type, 1).to_bytes(), |p| *p == Problem::Identity("element type")),
        (chunk_of(other_namespace, 1).to_bytes(), |p| *p == Problem::Identity("namespace")),
    ];
    for (index, (bytes, expected)) in cases.into_iter().enumerate() {
        for by_verify in [false, true] {
            let store = open(&dir);
            stored(store.put(chunk.clone()).unwrap());
            let (store, path) = (open(&dir), path(&store, &chunk));
            fs::write(&path, &bytes).unwrap();
            let repairs = if by_verify {
                store.verify(|_| ()).unwrap().failed
            } else {
                assert!(store.get(chunk.id()).unwrap().is_none(), "case {index}");
                assert_eq!(store.stats().misses, 1);
                store.take_repairs()
            };
            assert_eq!(repairs.len(), 1, "case {index}");
            let expected_here = |p: &Problem| expected(p) || by_verify && matches!(p, Problem::Identity(_));
            assert!(expected_here(&repairs[0].problem), "case {index}: {:?}", repairs[0]);
            assert!(repairs[0].removed && repairs[0].path == path);
            assert!(!path.exists());
            assert_eq!((store.stats().removed, store.stats().disk_hits), (1, 0));
            stored(store.put(chunk.clone()).unwrap());
            assert_eq!(raw(&open(&dir).get(chunk.id()).unwrap().unwrap()), raw(&chunk));
            store.remove(&chunk.key()).unwrap();
        }
    }
}

#[test]
fn swapped_files_are_found() {
    let dir = tempdir().unwrap();
    let (a, b) = (numbered(1, 3), numbered(2, 3));
    let store = open(&dir);
    stored(store.put(a.clone()).unwrap());
    stored(store.put(b.clone()).unwrap());
    let (store, spare) = (open(&dir), dir.path().join("spare"));
    fs::rename(path(&store, &a), &spare).unwrap();
    fs::rename(path(&store, &b), path(&store, &a)).unwrap();
    fs::rename(&spare, path(&store, &b)).unwrap();
    assert!(!store.contains(a.id()));
    assert_eq!(store.list(Scope::All).unwrap().unusable.len(), 2);
    assert!(store.show(&a.key()).unwrap_err().to_string().contains("another key than its name"));
    for chunk in [&a, &b] {
        assert!(store.get(chunk.id()).unwrap().is_none());
    }
    assert_eq!(store.stats().removed, 2);
    assert!(files(dir.path()).is_empty());
}

#[test]
fn files_of_an_unknown_version_are_left_alone() {
    let dir = tempdir().unwrap();
    let (store, chunk) = (open(&dir), chunk());
    stored(store.put(chunk.clone()).unwrap());
    let path = path(&store, &chunk);
    let text = fs::read(&path).unwrap();
    let at = text.windows(13).position(|w| w == br#""version":"1""#).unwrap() + 11;
    let mut newer = text.clone();
    newer[at] = b'9';
    fs::write(&path, &newer).unwrap();
    let store = open(&dir);
    assert!(store.get(chunk.id()).unwrap().is_none());
    assert_eq!(store.verify(|_| ()).unwrap().failed[0].problem, Problem::UnknownVersion("9".into()));
    assert_eq!(fs::read(&path).unwrap(), newer);
    assert_eq!((store.stats().removed, store.stats().unusable), (0, 2));
    let repairs = store.take_repairs();
    assert!(!repairs[0].removed && repairs[0].problem.to_string().contains("left alone"));
    // The name is ours: an equal name means an equal version, whatever the header says.
    stored(store.put(chunk.clone()).unwrap());
    assert!(open(&dir).get(chunk.id()).unwrap().is_some());
}

#[test]
fn what_the_system_cannot_read_is_left_alone() {
    let dir = tempdir().unwrap();
    let (store, chunk) = (open(&dir), chunk());
    fs::create_dir_all(path(&store, &chunk)).unwrap();
    assert!(store.get(chunk.id()).unwrap().is_none());
    assert!(matches!(store.take_repairs()[0].problem, Problem::Io(_)));
    assert!(matches!(store.put(chunk.clone()).unwrap(), PutOutcome::NotStored { .. }));
    assert!(store.get(chunk.id()).unwrap().is_some());
    assert!(path(&store, &chunk).is_dir());
}

/// A write may fail at any byte: nothing of it is left, and the chunk serves from memory.
#[test]
fn a_full_disk_loses_nothing() {
    let dir = tempdir().unwrap();
    let (first, chunk) = (numbered(1, 3), chunk());
    stored(open(&dir).put(first.clone()).unwrap());
    // The pinned chunk does not go to make room.
    open(&dir).pin(&[first.key()], true).unwrap();
    let len = chunk.to_bytes().len() as u64;
    for room in [0, 1, 8, 9, len - chunk.bytes() as u64, len - 1] {
        let store = open(&dir);
        store.disk().room.store(room, Relaxed);
        let outcome = store.put(chunk.clone()).unwrap();
        let PutOutcome::NotStored { error } = outcome else { panic!("{outcome:?}") };
        let message = error.to_string();
        assert!(message.contains("cannot write") && message.contains(&chunk.key().to_string()), "{message}");
        assert!(store.get(chunk.id()).unwrap().is_some());
        assert_eq!((store.stats().not_stored, store.stats().bytes_written), (1, 0));
        assert_eq!(files(dir.path()), [path(&store, &first)]);
        assert_eq!(store.list(Scope::All).unwrap().chunks.len(), 2);
        assert!(open(&dir).get(chunk.id()).unwrap().is_none());
    }
    let store = open(&dir);
    store.disk().room.store(len, Relaxed);
    stored(store.put(chunk.clone()).unwrap());
    assert_eq!(store.verify(|_| ()).unwrap().whole, 2);
}

/// A full disk takes neither a file nor the change of the index that withdraws its row.
#[test]
fn a_row_that_could_not_be_withdrawn_goes_with_the_next_write() {
    let dir = tempdir().unwrap();
    let (store, first) = (open(&dir), numbered(1, 3));
    stored(store.put(first.clone()).unwrap());
    let row = store.disk_tier().row(&first.key()).unwrap().unwrap();
    std::fs::remove_file(path(&store, &first)).unwrap();
    store.disk_tier().phantoms().push(Phantom { key: first.key(), row, removed: None });
    stored(store.put(numbered(2, 3)).unwrap());
    assert!(
        store.disk_tier().row(&first.key()).unwrap().is_none() && store.disk_tier().phantoms().is_empty()
    );
}

#[test]
fn verify_reads_everything_and_cleans_up() {
    let dir = tempdir().unwrap();
    let store = open(&dir);
    let chunks: Vec<Chunk> = (0..20).map(|i| numbered(i, 3)).collect();
    for chunk in &chunks {
        stored(store.put(chunk.clone()).unwrap());
    }
    let shard = path(&store, &chunks[0]).parent().unwrap().to_owned();
    let (stale, fresh, busy) = (shard.join(".tmp-stale"), shard.join(".tmp-fresh"), shard.join(".tmp-busy"));
    let old = SystemTime::now() - Duration::from_secs(3600);
    for path in [&stale, &fresh, &busy] {
        fs::write(path, b"half a chunk").unwrap();
    }
    File::options().write(true).open(&stale).unwrap().set_modified(old).unwrap();
    let writer = File::options().write(true).open(&busy).unwrap();
    writer.set_modified(old).unwrap();
    writer.lock().unwrap();
    let foreign = [store.folder().unwrap().join("notes.txt"), shard.join("0000.safetensors")];
    foreign.iter().for_each(|path| fs::write(path, b"mine").unwrap());
    fs::write(path(&store, &chunks[5]), b"broken").unwrap();

    let mut steps = Vec::new();
    let report = store.verify(|progress| steps.push(progress)).unwrap();
    assert_eq!((report.whole, report.bytes), (19, 19 * chunks[0].bytes() as u64));
    assert_eq!(report.failed.len(), 1);
    assert_eq!(report.stale, std::slice::from_ref(&stale));
    assert_eq!(report.in_progress, [busy.clone(), fresh.clone()]);
    assert_eq!(report.foreign.len(), 2);
    assert!(foreign.iter().all(|path| path.exists()));
    assert!(!stale.exists() && fresh.exists() && busy.exists());
    assert_eq!(steps.len(), 21);
    let last = steps.last().unwrap();
    assert_eq!((last.files, last.files_done, last.bytes), (20, 20, last.bytes_done));
    drop(writer);
    let report = store.verify(|_| ()).unwrap();
    assert_eq!((report.whole, report.failed.len(), report.stale), (19, 0, vec![busy]));
}

#[test]
fn chunks_are_listed_shown_and_removed() {
    let dir = tempdir().unwrap();
    let store = open(&dir);
    let foreign = chunk_of(ChunkId { model: [9; 32], ..id(Dtype::F32) }, 4);
    for chunk in [&chunk(), &foreign] {
        stored(store.put(chunk.clone()).unwrap());
    }
    let store = open(&dir);
    store.get(foreign.id()).unwrap().unwrap();
    let listing = store.list(Scope::All).unwrap();
    assert!(listing.chunks.is_sorted_by_key(|info| info.key) && listing.chunks.len() == 2);
    let info = listing.chunks.iter().find(|info| info.key == foreign.key()).unwrap();
    assert_eq!((info.model_hex(), info.dtype, info.in_memory), ("09".repeat(32), Dtype::F32, true));
    assert_eq!((info.tokens, info.layers, info.kv_heads, info.head_dim), (3, 2, 2, 4));
    assert_eq!((info.bytes, info.label.as_str()), (384, foreign.label()));
    let json = serde_json::to_value(&listing).unwrap();
    assert_eq!(json["chunks"][0]["key"], listing.chunks[0].key.to_string());
    let detail = store.show(&foreign.key()).unwrap();
    assert_eq!((&detail.info, detail.token_ids.as_slice()), (info, foreign.tokens()));
    assert!(store.remove(&foreign.key()).unwrap());
    assert!(!store.remove(&foreign.key()).unwrap());
    assert!(matches!(store.show(&foreign.key()), Err(StoreError::NoSuchChunk { .. })));
    assert_eq!(store.list(Scope::All).unwrap().chunks.len(), 1);
}

#[test]
fn a_unique_beginning_names_a_chunk() {
    let dir = tempdir().unwrap();
    let store = open(&dir);
    let mut keys: Vec<ChunkKey> = (0..40)
        .map(|i| numbered(i, 1))
        .map(|chunk| {
            stored(store.put(chunk.clone()).unwrap());
            chunk.key()
        })
        .collect();
    keys.sort();
    let store = open(&dir);
    for key in &keys {
        assert_eq!(store.resolve(&key.to_string(), Scope::All).unwrap(), *key);
        assert_eq!(store.resolve(&key.short().to_string().to_uppercase(), Scope::All).unwrap(), *key);
    }
    // 40 keys cannot have 40 different first digits.
    let shared = keys.windows(2).find(|w| w[0].to_string()[..1] == w[1].to_string()[..1]).unwrap();
    let prefix = &shared[0].to_string()[..1];
    let error = store.resolve(prefix, Scope::All).unwrap_err();
    assert!(error.to_string().contains(&shared[1].to_string()), "{error}");
    let StoreError::Ambiguous { candidates, .. } = error else { panic!() };
    assert!(candidates.iter().all(|key| key.to_string().starts_with(prefix)) && candidates.len() >= 2);
    let mut absent = keys[0].to_string();
    absent.replace_range(63.., if absent.ends_with('0') { "1" } else { "0" });
    assert!(matches!(store.resolve(&absent, Scope::All), Err(StoreError::NoSuchChunk { .. })));
    for bad in ["", "xyz", "../", &"0".repeat(65), "é"] {
        assert!(matches!(store.resolve(bad, Scope::All), Err(StoreError::Key(_))), "{bad}");
    }
}

#[test]
fn memory_stays_within_its_bound() {
    let dir = tempdir().unwrap();
    let budget = 20 * numbered(0, 50).weight();
    let store = Store::open(dir.path(), budget).unwrap();
    for i in 0..100 {
        stored(store.put(numbered(i, 50)).unwrap());
        assert!(store.stats().memory_bytes <= budget);
        // The latest chunk is at hand.
        assert!(store.get(numbered(i, 50).id()).unwrap().is_some());
    }
    assert_eq!(store.stats().memory_hits, 100);
    assert!(store.stats().memory_chunks >= 15);
    for i in 0..100 {
        assert_eq!(raw(&store.get(numbered(i, 50).id()).unwrap().unwrap()), raw(&numbered(i, 50)));
        assert!(store.stats().memory_bytes <= budget);
    }
    assert!(store.stats().disk_hits >= 80);
}

#[test]
fn chunks_larger_than_the_memory_are_read_every_time() {
    let dir = tempdir().unwrap();
    for budget in [0, 1, 1000] {
        let store = Store::open(dir.path().join(budget.to_string()), budget).unwrap();
        let large = numbered(3, 500);
        stored(store.put(large.clone()).unwrap());
        for hits in 1..3 {
            assert_eq!(raw(&store.get(large.id()).unwrap().unwrap()), raw(&large));
            assert_eq!((store.stats().disk_hits, store.stats().memory_bytes), (hits, 0));
        }
    }
}

/// Two stores on one folder, as two processes have them, with threads that write, read, break and remove.
#[test]
fn two_stores_on_one_folder_are_both_right() {
    let dir = tempdir().unwrap();
    // No memory, so that everything goes through the folder.
    let stores = [0, 1].map(|_| Store::open(dir.path(), 0).unwrap());
    let chunks: Vec<Chunk> = (0..8).map(|i| numbered(i, 20)).collect();
    std::thread::scope(|scope| {
        for (worker, store) in stores.iter().cycle().take(6).enumerate() {
            let chunks = &chunks;
            scope.spawn(move || {
                let mut random = super::Random(worker as u64 + 1);
                for _ in 0..60 {
                    let chunk = &chunks[random.below(chunks.len())];
                    match store.get(chunk.id()).unwrap() {
                        Some(read) => assert_eq!(raw(&read), raw(chunk)),
                        None => match store.put(chunk.clone()).unwrap() {
                            PutOutcome::Stored { .. } | PutOutcome::Known => {}
                            other => panic!("{other:?}"),
                        },
                    }
                    if random.below(8) == 0 {
                        store.remove(&chunk.key()).unwrap();
                    }
                    if random.below(16) == 0 {
                        store.verify(|_| ()).unwrap();
                        store.list(Scope::All).unwrap();
                    }
                }
            });
        }
    });
    // A whole file was never taken for a broken one, and nothing is left lying about.
    for store in &stores {
        assert_eq!(store.take_repairs(), []);
    }
    let report = stores[0].verify(|_| ()).unwrap();
    assert!(report.failed.is_empty() && report.stale.is_empty() && report.in_progress.is_empty());
    assert_eq!(files(dir.path()).len() as u64, report.whole);
}

#[test]
fn a_folder_that_cannot_be_is_a_clear_error() {
    let dir = tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, b"").unwrap();
    for path in [file.clone(), file.join("chunks")] {
        let message = Store::open(&path, MIB).unwrap_err().to_string();
        assert!(
            message.contains(path.to_str().unwrap()) || message.contains(file.to_str().unwrap()),
            "{message}"
        );
    }
}

#[test]
fn an_impossible_identity_is_an_error() {
    let store = Store::in_memory(MIB);
    let empty = ChunkId { tokens: vec![], ..id(Dtype::F16) };
    assert!(matches!(store.get(&empty), Err(StoreError::Shape { .. })));
    assert!(!store.contains(&empty));
}

#[test]
fn stores_are_shared_between_threads() {
    fn check<T: Send + Sync + Clone>(_: &T) {}
    check(&Store::in_memory(0));
    check(&chunk());
}

#[test]
fn layers_are_read_in_any_order_and_the_last_one_keeps_the_chunk() {
    let dir = tempdir().unwrap();
    let chunk = chunk();
    stored(open(&dir).put(chunk.clone()).unwrap());
    let store = open(&dir);
    let reader = store.reader(chunk.id()).unwrap().unwrap();
    assert_eq!(reader.id(), chunk.id());
    for (layer, seen) in [(1, 1), (1, 1), (0, 2)] {
        let read = reader.layer(layer).unwrap();
        assert_eq!(read.k().as_bytes(), chunk.layer(layer).k().as_bytes());
        assert_eq!(read.v().as_bytes(), chunk.layer(layer).v().as_bytes());
        assert_eq!(store.stats().bytes_read, seen * chunk.bytes() as u64 / 2);
        assert_eq!((reader.would_be_kept(), store.stats().memory_chunks), (seen < 2, seen / 2));
    }
    assert_eq!((store.stats().disk_hits, store.stats().misses), (1, 0));
    assert_eq!(content(&reader.chunk().unwrap()), content(&chunk));
    // From memory there is no file to read, and forgetting it brings the file back.
    fs::rename(path(&store, &chunk), dir.path().join("spare")).unwrap();
    let held = store.reader(chunk.id()).unwrap().unwrap();
    assert!(!held.would_be_kept() && held.layer(1).is_some());
    store.forget_memory();
    assert!(store.reader(chunk.id()).unwrap().is_none());
    assert_eq!(content(&held.chunk().unwrap()), content(&chunk));
}

/// However many threads meet a broken layer, the file is removed and told once; layers read before stay whole.
#[test]
fn a_layer_that_breaks_midway_is_told_once() {
    let dir = tempdir().unwrap();
    let chunk = chunk();
    for truncate in [false, true] {
        stored(open(&dir).put(chunk.clone()).unwrap());
        let store = open(&dir);
        let reader = store.reader(chunk.id()).unwrap().unwrap();
        let path = path(&store, &chunk);
        let mut bytes = fs::read(&path).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        bytes.truncate(if truncate { last } else { last + 1 });
        // In place, as an accident on the disk would.
        fs::write(&path, bytes).unwrap();
        assert_eq!(reader.layer(0).unwrap().k().as_bytes(), chunk.layer(0).k().as_bytes());
        std::thread::scope(|scope| {
            (0..4).for_each(|_| _ = scope.spawn(|| assert!(reader.layer(1).is_none())));
        });
        assert!(reader.chunk().is_none() && reader.layer(0).is_some());
        let repairs = store.take_repairs();
        assert_eq!(repairs.len(), 1);
        assert!(repairs[0].removed && !path.exists());
        let truncated = matches!(repairs[0].problem, Problem::Length { .. });
        assert_eq!((truncated, repairs[0].problem == Problem::Checksum(1)), (truncate, !truncate));
        let stats = store.stats();
        assert_eq!((stats.removed, stats.misses, stats.disk_hits, stats.memory_chunks), (1, 1, 0, 0));
    }
}

/// A chunk larger than the memory passes through it.
#[test]
fn layers_of_a_chunk_larger_than_the_memory_are_not_kept() {
    let dir = tempdir().unwrap();
    let store = Store::open(dir.path(), 100).unwrap();
    stored(store.put(chunk()).unwrap());
    let reader = store.reader(chunk().id()).unwrap().unwrap();
    for _ in 0..2 {
        assert_eq!(content(&reader.chunk().unwrap()), content(&chunk()));
        assert!(!reader.would_be_kept());
    }
    assert_eq!((store.stats().disk_hits, store.stats().bytes_read), (1, 2 * chunk().bytes() as u64));
}

/// Another process may remove or replace a file while it is read: a process that has it open reads on, and to others it is a chunk
/// that is not there, no broken one.
#[test]
fn a_file_that_changes_hands_midway_is_not_called_broken() {
    let dir = tempdir().unwrap();
    let chunk = chunk();
    let layers = (0..2).map(|layer| chunk.layer(layer)).collect();
    let equal = Chunk::new(chunk.id().clone(), "another, longer label", layers).unwrap();
    for (replace, is_open) in [(false, false), (true, false), (false, true), (true, true)] {
        stored(open(&dir).put(chunk.clone()).unwrap());
        let (store, other) = (open(&dir), open(&dir));
        let _others = if is_open { vec![] } else { store.other_open_files() };
        let reader = store.reader(chunk.id()).unwrap().unwrap();
        assert!(reader.layer(0).is_some());
        assert!(other.remove(&chunk.key()).unwrap());
        if replace {
            stored(other.put(equal.clone()).unwrap());
        }
        if is_open {
            assert_eq!(content(&reader.chunk().unwrap()), content(&chunk));
        } else {
            assert!(reader.layer(1).is_none() && reader.chunk().is_none());
        }
        assert_eq!((store.take_repairs(), store.stats().misses), (vec![], u64::from(!is_open)));
        assert_eq!(store.get(chunk.id()).unwrap().is_some(), replace || is_open);
        other.remove(&chunk.key()).unwrap();
    }
}
