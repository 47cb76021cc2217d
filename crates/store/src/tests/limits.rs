//! The folder's limit, the order of eviction, and the index that records both.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use redb::TableDefinition;
use refrain_kernels::{Buffer, Dtype};
use refrain_kv::AuxTensors;
use tempfile::{TempDir, tempdir};

use super::store::{files, path, stored};
use super::{chunk_of, numbered};
use crate::disk::eviction::choose_victims;
use crate::disk::{Disk, Phantom};
use crate::file_names::INDEX;
use crate::index::{COMMITS, Index, IndexRow, ROWS_READ, Tables};
use crate::{Chunk, ChunkId, ChunkKey, Limits, NamespaceKey, PutOutcome, Scope, Store, StoreError};

fn limited(dir: &TempDir, change: impl FnOnce(&mut Limits)) -> Store {
    let mut limits = Limits::memory(0);
    change(&mut limits);
    Store::open(dir.path(), limits).unwrap()
}

/// Bytes of a file of `numbered(n, 50)`, whatever single-digit `n` is.
fn size() -> u64 {
    numbered(1, 50).to_bytes().len() as u64
}

fn on_disk(store: &Store) -> Vec<ChunkKey> {
    let mut keys = store.disk().keys("").unwrap();
    keys.sort();
    keys
}

fn sorted(chunks: &[&Chunk]) -> Vec<ChunkKey> {
    let mut keys: Vec<_> = chunks.iter().map(|chunk| chunk.key()).collect();
    keys.sort();
    keys
}

/// Uses have a millisecond's precision.
pub(super) fn later() {
    std::thread::sleep(Duration::from_millis(3));
}

#[test]
fn the_least_recently_used_goes_also_after_a_restart() {
    let dir = tempdir().unwrap();
    let chunks: Vec<_> = (1..=5).map(|n| numbered(n, 50)).collect();
    let bound = 3 * size() + size() / 2;
    let store = limited(&dir, |limits| limits.disk = bound);
    for chunk in &chunks[..3] {
        stored(store.put(chunk.clone()).unwrap());
        later();
    }
    assert!(store.get(chunks[0].id()).unwrap().is_some());
    drop(store);
    let store = limited(&dir, |limits| limits.disk = bound);
    later();
    stored(store.put(chunks[3].clone()).unwrap());
    assert_eq!(on_disk(&store), sorted(&[&chunks[0], &chunks[2], &chunks[3]]));
    assert!(store.get(chunks[1].id()).unwrap().is_none());
    later();
    // A chunk that was put again was used.
    assert!(matches!(store.put(chunks[2].clone()).unwrap(), PutOutcome::Known));
    later();
    stored(store.put(chunks[4].clone()).unwrap());
    assert_eq!(on_disk(&store), sorted(&[&chunks[2], &chunks[3], &chunks[4]]));
    let stats = store.stats();
    assert_eq!((stats.evicted, stats.disk_chunks, stats.disk_bytes), (2, 3, 3 * size()));
}

#[test]
fn pinned_chunks_stay_and_what_does_not_fit_beside_them_is_not_stored() {
    let dir = tempdir().unwrap();
    let store = limited(&dir, |limits| limits.disk = 2 * size() + 1);
    let (a, b, c) = (numbered(1, 50), numbered(2, 50), numbered(3, 50));
    stored(store.put(a.clone()).unwrap());
    assert_eq!(store.pin(&[a.key(), c.key()], true).unwrap(), 1, "the second is not there");
    stored(store.put(b.clone()).unwrap());
    stored(store.put(c.clone()).unwrap());
    assert_eq!(on_disk(&store), sorted(&[&a, &c]));
    assert_eq!(store.pin(&[c.key()], true).unwrap(), 1);
    let PutOutcome::NotStored { error } = store.put(b.clone()).unwrap() else { panic!() };
    assert!(matches!(error, StoreError::NoRoom { pinned, .. } if pinned == 2 * size()), "{error}");
    assert!(error.to_string().contains("unpin some"), "{error}");
    assert_eq!(on_disk(&store), sorted(&[&a, &c]));
    let pinned = |store: &Store| store.list(Scope::All).unwrap().chunks.iter().filter(|c| c.pinned).count();
    assert_eq!(pinned(&store), 2);
    drop(store);
    let store = limited(&dir, |limits| limits.disk = 2 * size() + 1);
    assert_eq!(pinned(&store), 2);
    assert_eq!(store.pin(&[a.key()], false).unwrap(), 1);
    stored(store.put(b.clone()).unwrap());
    assert_eq!(on_disk(&store), sorted(&[&b, &c]));
    // Larger than all there may be: nothing goes for it in vain.
    let large = numbered(4, 500);
    assert!(matches!(store.put(large).unwrap(), PutOutcome::NotStored { error: StoreError::NoRoom { .. } }));
    assert_eq!(on_disk(&store), sorted(&[&b, &c]));
}

#[test]
fn a_namespace_has_its_quota_and_takes_no_room_of_others() {
    let dir = tempdir().unwrap();
    let store = limited(&dir, |limits| {
        limits.quota = 2 * (size() + 64);
        limits.quotas.insert("large".into(), 3 * (size() + 64));
    });
    let of = |namespace: &str, n: u32| {
        let chunk = numbered(n, 50);
        chunk_of(ChunkId { namespace: namespace.into(), ..chunk.id().clone() }, u64::from(n))
    };
    for n in 1..=4 {
        for namespace in ["small", "large"] {
            stored(store.put(of(namespace, n)).unwrap());
            later();
        }
    }
    let left = |namespace| {
        let chunks = store.list(Scope::Namespace(namespace)).unwrap().chunks;
        assert!(chunks.iter().all(|info| info.namespace == namespace));
        let mut keys: Vec<_> = chunks.iter().map(|info| info.key).collect();
        keys.sort();
        keys
    };
    assert_eq!(left("small"), sorted(&[&of("small", 3), &of("small", 4)]));
    assert_eq!(left("large"), sorted(&[&of("large", 2), &of("large", 3), &of("large", 4)]));
    assert_eq!(store.list(Scope::All).unwrap().chunks.len(), 5);
    assert!(left("").is_empty());
    // Neither is a key of one found from the other.
    let key = of("small", 4).key();
    assert_eq!(store.resolve(&key.to_string(), Scope::Namespace("small")).unwrap(), key);
    let error = store.resolve(&key.to_string(), Scope::Namespace("large")).unwrap_err();
    assert!(matches!(error, StoreError::NoSuchChunk { .. }));
}

#[test]
fn a_chunk_goes_when_its_time_is_over() {
    let dir = tempdir().unwrap();
    let mut limits = Limits::memory(1 << 20);
    limits.time_to_live = Some(Duration::from_secs(3600));
    let store = Store::open(dir.path(), limits).unwrap();
    let (a, b) = (numbered(1, 50), numbered(2, 50));
    for chunk in [&a, &b] {
        stored(store.put(chunk.clone()).unwrap());
        assert_eq!(store.pin(&[chunk.key()], true).unwrap(), 1);
    }
    let hour = store.list(Scope::All).unwrap().chunks[0].expires.unwrap();
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    assert!((now + 3590..=now + 3600).contains(&hour), "{hour} {now}");
    for (chunk, forget) in [(&a, false), (&b, true)] {
        assert!(store.contains(chunk.id()));
        assert!(store.expire(&chunk.key(), Some(SystemTime::now() - Duration::from_secs(1))).unwrap());
        if forget {
            store.forget_memory();
        }
        assert!(!store.contains(chunk.id()) && store.get(chunk.id()).unwrap().is_none());
    }
    assert!(store.take_repairs().is_empty(), "that is nothing broken");
    assert_eq!(on_disk(&store).len(), 2, "readers remove nothing");
    stored(store.put(a.clone()).unwrap());
    assert_eq!(on_disk(&store), [a.key()], "expired chunks go when one is stored");
    assert!(store.expire(&a.key(), None).unwrap());
    assert_eq!(store.list(Scope::All).unwrap().chunks[0].expires, None);
    stored(store.put(b.clone()).unwrap());
    assert!(store.expire(&b.key(), Some(SystemTime::UNIX_EPOCH)).unwrap());
    let report = store.gc().unwrap();
    assert_eq!((report.expired, report.evicted, report.chunks, report.freed), (1, 0, 1, size()));
    assert_eq!(on_disk(&store), [a.key()]);
}

#[test]
fn a_time_to_live_never_shortens_what_was_asked_for_and_begins_anew_when_it_was_over() {
    let dir = tempdir().unwrap();
    let plain = limited(&dir, |_| ());
    let hourly = limited(&dir, |limits| limits.time_to_live = Some(Duration::from_secs(3600)));
    let expires = |chunk: &Chunk| {
        let chunks = plain.list(Scope::All).unwrap().chunks;
        chunks.iter().find(|info| info.key == chunk.key()).unwrap().expires
    };
    let (a, b) = (numbered(1, 50), numbered(2, 50));
    stored(plain.put(a.clone()).unwrap());
    assert!(matches!(hourly.put(a.clone()).unwrap(), PutOutcome::Known));
    assert_eq!(expires(&a), None, "without an end is longer");
    stored(hourly.put(b.clone()).unwrap());
    let first = expires(&b).unwrap();
    plain.expire(&b.key(), Some(SystemTime::now() + Duration::from_secs(60))).unwrap();
    assert!(expires(&b).unwrap() < first);
    hourly.renew(&[b.key()]);
    assert!(expires(&b).unwrap() >= first);
    // A chunk whose time was over and that is stored again is not over at once.
    plain.expire(&b.key(), Some(SystemTime::UNIX_EPOCH)).unwrap();
    stored(plain.put(b.clone()).unwrap());
    assert_eq!(expires(&b), None);
    assert!(plain.get(b.id()).unwrap().is_some());
}

/// Another process stores the chunk again between the removal of its broken file and the correction of its row.
#[test]
fn a_chunk_that_is_stored_again_while_it_is_repaired_counts_its_bytes() {
    let dir = tempdir().unwrap();
    let (store, chunk) = (limited(&dir, |_| ()), numbered(1, 50));
    stored(store.put(chunk.clone()).unwrap());
    change_rows(dir.path(), |row| row.entered -= 3600);
    let repairing = Disk::open(dir.path(), Limits::memory(0), false).unwrap();
    let counted = repairing.row(&chunk.key()).unwrap().unwrap();
    fs::remove_file(path(&store, &chunk)).unwrap();
    stored(store.put(chunk.clone()).unwrap());
    repairing.uncount(Phantom { key: chunk.key(), row: counted, removed: Some(size()) });
    assert_eq!(store.stats().disk_bytes, size());
}

/// A broken file that is removed and computed again, time after time, counts once.
#[test]
fn a_repaired_chunk_counts_its_own_bytes() {
    let dir = tempdir().unwrap();
    let (store, chunk) = (limited(&dir, |_| ()), numbered(1, 50));
    stored(store.put(chunk.clone()).unwrap());
    store.pin(&[chunk.key()], true).unwrap();
    for _ in 0..3 {
        let mut broken = fs::read(path(&store, &chunk)).unwrap();
        *broken.last_mut().unwrap() ^= 1;
        fs::write(path(&store, &chunk), broken).unwrap();
        assert!(store.get(chunk.id()).unwrap().is_none());
        assert_eq!(store.stats().disk_bytes, 0);
        stored(store.put(chunk.clone()).unwrap());
        assert_eq!(store.stats().disk_bytes, size());
    }
    assert!(store.list(Scope::All).unwrap().chunks[0].pinned);
    // A row of an earlier build that counts too many bytes is corrected when the chunk is stored again.
    change_rows(dir.path(), |row| (row.bytes, row.entered) = (9 * size(), row.entered - 3600));
    fs::write(path(&store, &chunk), "broken").unwrap();
    stored(store.put(chunk).unwrap());
    assert_eq!(store.stats().disk_bytes, size());
}

/// A clock that was ahead for a time keeps no row and no temporary file for ever.
#[test]
fn what_a_clock_that_was_ahead_has_written_goes_as_any_other() {
    let dir = tempdir().unwrap();
    let (store, chunk) = (limited(&dir, |_| ()), numbered(1, 50));
    stored(store.put(chunk.clone()).unwrap());
    let year = 365 * 86400;
    change_rows(dir.path(), |row| {
        (row.entered, row.last_used) = (row.entered + year, row.last_used + 1000 * year)
    });
    let temporary = dir.path().join(".tmp-x");
    let file = fs::File::create(&temporary).unwrap();
    file.set_modified(SystemTime::now() + Duration::from_secs(year)).unwrap();
    drop(file);
    store.gc().unwrap();
    assert!(!temporary.exists());
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    change_rows(dir.path(), |row| assert!(row.last_used <= now.as_millis() as u64 + 60_000));
    fs::remove_file(path(&store, &chunk)).unwrap();
    assert_eq!(store.gc().unwrap().forgotten, 1);
}

/// Stored and removed by several at once, under a bound: the rows never say less than the files.
#[test]
fn removing_and_storing_at_once_never_counts_too_little() {
    let dir = tempdir().unwrap();
    let bound = 4 * size() + size() / 2;
    std::thread::scope(|scope| {
        for worker in 0..3_u32 {
            let store = limited(&dir, |limits| limits.disk = bound);
            scope.spawn(move || {
                for n in 0..20 {
                    let chunk = numbered(1 + (5 * worker + n) % 6, 50);
                    if (n + worker) % 3 == 0 {
                        store.remove(&chunk.key()).unwrap();
                    } else {
                        let outcome = store.put(chunk.clone()).unwrap();
                        assert!(!matches!(outcome, PutOutcome::NotStored { .. }), "{outcome:?}");
                        let mut aux = AuxTensors::default();
                        aux.push("t".to_owned(), vec![4], Buffer::zeros(Dtype::F32, 4));
                        store.put_aux_tensors(chunk.id(), &format!("kind-{worker}"), aux).unwrap();
                    }
                }
            });
        }
    });
    let taken: u64 = files(dir.path()).iter().map(|file| fs::metadata(file).unwrap().len()).sum();
    let store = limited(&dir, |limits| limits.disk = bound);
    assert!(store.stats().disk_bytes >= taken, "{} < {taken}", store.stats().disk_bytes);
    assert!(taken <= bound, "{taken} of {bound}");
    assert!(store.verify(|_| ()).unwrap().failed.is_empty());
}

/// While another process writes, or is stopped at it, reading goes on. A broken file that is removed meanwhile counts until the next write.
#[test]
fn reading_waits_for_no_writer() {
    let dir = tempdir().unwrap();
    let store = limited(&dir, |_| ());
    let chunk = numbered(1, 50);
    stored(store.put(chunk.clone()).unwrap());
    let other = Index::of(dir.path());
    other
        .write(|_| {
            let (done, wait) = std::sync::mpsc::channel();
            let (store, chunk) = (&store, &chunk);
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    for _ in 0..10 {
                        assert!(store.get(chunk.id()).unwrap().is_some());
                    }
                    let listed = store.list(Scope::All).unwrap().chunks.len();
                    let mut broken = fs::read(path(store, chunk)).unwrap();
                    *broken.last_mut().unwrap() ^= 1;
                    fs::write(path(store, chunk), broken).unwrap();
                    assert!(store.get(chunk.id()).unwrap().is_none());
                    done.send(listed).unwrap();
                });
                assert_eq!(wait.recv_timeout(Duration::from_secs(20)), Ok(1));
            });
            Ok(())
        })
        .unwrap();
    stored(store.put(numbered(2, 50)).unwrap());
    assert_eq!(store.stats().disk_bytes, size());
}

/// An index that another process has set aside, or removed, is used no more.
#[test]
fn an_index_that_is_replaced_while_it_is_open_is_opened_again() {
    let dir = tempdir().unwrap();
    let store = limited(&dir, |limits| limits.disk = 2 * size());
    stored(store.put(numbered(1, 50)).unwrap());
    fs::rename(dir.path().join(INDEX), dir.path().join("index.redb.broken")).unwrap();
    let other = limited(&dir, |limits| limits.disk = 2 * size());
    stored(other.put(numbered(2, 50)).unwrap());
    later();
    stored(store.put(numbered(3, 50)).unwrap());
    for store in [&store, &other] {
        assert_eq!((store.stats().disk_chunks, store.stats().disk_bytes), (2, 2 * size()));
    }
    assert_eq!(on_disk(&store).len(), 2);
}

/// Somebody clears the folder, which is a cache, while the program runs.
#[test]
fn a_folder_that_was_removed_is_made_again() {
    let dir = tempdir().unwrap();
    let root = dir.path().join("chunks");
    let store = Store::open(&root, Limits::memory(0)).unwrap();
    stored(store.put(numbered(1, 50)).unwrap());
    fs::remove_dir_all(&root).unwrap();
    stored(store.put(numbered(2, 50)).unwrap());
    assert_eq!(store.stats().disk_chunks, 1);
}

#[test]
fn aux_tensors_count_with_their_chunk_and_go_with_it() {
    let dir = tempdir().unwrap();
    let store = limited(&dir, |limits| limits.disk = 3 * size());
    let (a, b, c) = (numbered(1, 50), numbered(2, 50), numbered(3, 50));
    let aux = |elements: usize| {
        let mut aux = AuxTensors::default();
        aux.push("t".to_owned(), vec![elements], Buffer::zeros(Dtype::F32, elements));
        aux
    };
    stored(store.put(a.clone()).unwrap());
    later();
    stored(store.put(b.clone()).unwrap());
    let bytes = stored(store.put_aux_tensors(b.id(), "test", aux(10)).unwrap());
    assert_eq!(store.stats().disk_bytes, 2 * size() + bytes);
    assert!(matches!(store.put_aux_tensors(b.id(), "test", aux(10)).unwrap(), PutOutcome::Known));
    assert_eq!(store.stats().disk_bytes, 2 * size() + bytes);
    later();
    stored(store.put(c.clone()).unwrap());
    assert_eq!(on_disk(&store), sorted(&[&b, &c]));
    // An aux tensors file makes room as well, and not by its own chunk.
    later();
    stored(store.put_aux_tensors(b.id(), "large", aux(size() as usize / 4)).unwrap());
    assert_eq!(on_disk(&store), [b.key()]);
    assert!(store.remove(&b.key()).unwrap());
    assert!(files(dir.path()).is_empty());
    assert_eq!(store.stats().disk_bytes, 0);
}

#[test]
fn an_index_that_is_lost_or_broken_is_made_anew_and_loses_no_chunk() {
    let dir = tempdir().unwrap();
    let chunks: Vec<_> = (1..=3).map(|n| numbered(n, 50)).collect();
    let store = limited(&dir, |_| ());
    chunks.iter().for_each(|chunk| _ = stored(store.put(chunk.clone()).unwrap()));
    store.pin(&[chunks[0].key()], true).unwrap();
    drop(store);
    let index = dir.path().join(INDEX);
    let whole = fs::read(&index).unwrap();
    for case in 0..12 {
        match case {
            0 => fs::remove_file(&index).unwrap(),
            1 => fs::write(&index, b"").unwrap(),
            2 => fs::write(&index, b"not a database at all").unwrap(),
            3 => fs::write(&index, &whole[..whole.len() / 2]).unwrap(),
            4 => fs::write(&index, vec![0xff; whole.len()]).unwrap(),
            // One page after the other.
            n => {
                let (mut bytes, page) = (whole.clone(), (n - 5) * 4096);
                let end = bytes.len().min(page + 4096);
                bytes.get_mut(page..end).unwrap_or_default().fill(0x5a);
                fs::write(&index, bytes).unwrap();
            }
        }
        let store = limited(&dir, |limits| limits.disk = 3 * size());
        for chunk in &chunks {
            assert!(store.get(chunk.id()).unwrap().is_some(), "{case}");
        }
        assert_eq!(store.stats().disk_bytes, 3 * size(), "{case}");
        let set_aside = store.take_set_aside().is_some();
        assert!(set_aside || !(2..=4).contains(&case), "{case}");
        let report = store.gc().unwrap();
        assert_eq!((report.chunks, report.bytes, report.evicted), (3, 3 * size(), 0), "{case}");
        assert_eq!(files(dir.path()).len(), 3, "{case}");
    }
}

#[test]
fn gc_has_the_index_agree_with_the_files() {
    let dir = tempdir().unwrap();
    let store = limited(&dir, |_| ());
    let (a, b, c) = (numbered(1, 50), numbered(2, 50), numbered(3, 50));
    for chunk in [&a, &b] {
        stored(store.put(chunk.clone()).unwrap());
    }
    // Another program, or an earlier build, wrote one and removed another.
    let other = tempdir().unwrap();
    let elsewhere = Store::open(other.path(), 0).unwrap();
    stored(elsewhere.put(c.clone()).unwrap());
    fs::create_dir_all(path(&store, &c).parent().unwrap()).unwrap();
    fs::copy(path(&elsewhere, &c), path(&store, &c)).unwrap();
    fs::remove_file(path(&store, &a)).unwrap();
    let report = store.gc().unwrap();
    assert_eq!((report.entered, report.forgotten), (1, 0), "a row may come a minute before its file");
    age(dir.path());
    let report = store.gc().unwrap();
    assert_eq!((report.entered, report.forgotten, report.chunks), (0, 1, 2));
    assert_eq!(store.stats().disk_bytes, 2 * size());
    // A store with less room makes it.
    let store = limited(&dir, |limits| limits.disk = size());
    let report = store.gc().unwrap();
    assert_eq!((report.evicted, report.chunks, report.bytes, report.freed), (1, 1, size(), size()));
}

/// Others go on storing while a large folder is scanned, for longer than a row is young.
#[test]
fn a_chunk_that_was_stored_after_the_scan_keeps_its_row() {
    let dir = tempdir().unwrap();
    let store = limited(&dir, |_| ());
    stored(store.put(numbered(1, 50)).unwrap());
    age(dir.path());
    let mut report = crate::GcReport::default();
    store.disk_tier().reconcile_index(&[], false, &mut report).unwrap();
    assert_eq!((report.forgotten, report.chunks, report.bytes), (0, 1, size()));
}

#[test]
fn the_documents_of_a_server_are_none_of_verification_s_business() {
    let dir = tempdir().unwrap();
    let store = limited(&dir, |_| ());
    for name in ["documents.redb", "documents.redb.new", "notes.txt"] {
        fs::write(dir.path().join(name), "x").unwrap();
    }
    let report = store.verify(|_| ()).unwrap();
    assert_eq!(report.foreign, [dir.path().join("notes.txt")]);
}

/// Makes all rows an hour older.
pub(super) fn age(root: &Path) {
    change_rows(root, |row| row.entered -= 3600);
}

fn change_rows(root: &Path, change: impl Fn(&mut IndexRow)) {
    let index = Index::of(root);
    let aged = |tables: &mut Tables<'_>| {
        for (key, mut row) in tables.rows()? {
            change(&mut row);
            tables.set(&key, &row)?;
        }
        Ok(())
    };
    index.write(aged).unwrap();
}

/// Orders and totals say what follows from the rows.
pub(super) fn derived_tables_agree(root: &Path) {
    let check = |tables: &mut Tables<'_>| {
        let rows = tables.rows()?;
        let namespaces: BTreeSet<_> = rows.iter().map(|(_, row)| row.namespace.clone()).collect();
        assert_eq!(tables.namespaces()?, namespaces.iter().cloned().collect::<Vec<_>>());
        for scope in namespaces.iter().map(|name| Some(name.as_str())).chain([None]) {
            let is_within = |row: &IndexRow| scope.is_none_or(|name| name == row.namespace);
            let within: Vec<_> = rows.iter().filter(|(_, row)| is_within(row)).cloned().collect();
            let bytes = |pinned: &[bool]| {
                let counted = within.iter().filter(|(_, row)| pinned.contains(&row.pinned));
                counted.map(|(_, row)| row.bytes).sum()
            };
            let totals = tables.totals(scope)?;
            let expected = (within.len() as u64, bytes(&[true, false]), bytes(&[true]));
            assert_eq!((totals.chunks, totals.bytes, totals.pinned_bytes), expected, "{scope:?}");
            let mut by_use: Vec<_> = within.iter().filter(|(_, row)| !row.pinned).cloned().collect();
            by_use.sort_by_key(|(key, row)| (row.last_used, *key));
            let found: Vec<_> = tables.least_recently_used(scope)?.map(|row| row.ok().unwrap()).collect();
            assert_eq!(found, by_use, "{scope:?}");
        }
        let mut by_expiry: Vec<_> = rows.iter().filter(|(_, row)| row.expires != 0).cloned().collect();
        by_expiry.sort_by_key(|(key, row)| (row.expires, *key));
        assert_eq!(tables.expired(u64::MAX)?, by_expiry);
        Ok(())
    };
    Index::of(root).write(check).unwrap();
}

#[test]
fn two_stores_on_one_folder_keep_to_its_limit_together() {
    let dir = tempdir().unwrap();
    let bound = 5 * size() + size() / 2;
    std::thread::scope(|scope| {
        for writer in 0..3_u32 {
            let store = limited(&dir, |limits| limits.disk = bound);
            scope.spawn(move || {
                for n in 0..15 {
                    let outcome = store.put(numbered(1 + (7 * writer + n) % 9, 50)).unwrap();
                    assert!(!matches!(outcome, PutOutcome::NotStored { .. }), "{outcome:?}");
                }
            });
        }
    });
    let store = limited(&dir, |limits| limits.disk = bound);
    let taken: u64 = files(dir.path()).iter().map(|file| fs::metadata(file).unwrap().len()).sum();
    assert!(taken <= bound, "{taken} of {bound}");
    assert!(store.stats().disk_bytes <= bound);
    assert!(store.verify(|_| ()).unwrap().failed.is_empty());
}

fn row(bytes: u64, last_used: u64, namespace: &str) -> IndexRow {
    IndexRow { bytes, last_used, entered: 1, expires: 0, pinned: false, namespace: namespace.into() }
}

#[test]
fn victims_are_few_and_in_order() {
    let rows = [row(10, 5, "a"), row(20, 1, "a"), row(30, 3, "b"), row(40, 2, "b")];
    let gone = |disk, quota, new: Option<&IndexRow>| {
        let dir = tempdir().unwrap();
        let limits = Limits { disk, quota, ..Limits::memory(0) };
        let choose = |tables: &mut Tables<'_>| {
            for (row, n) in rows.iter().zip(0_u8..) {
                tables.set(&ChunkKey([n; 32]), row)?;
            }
            choose_victims(tables, new, &limits, true, 1_800_000_000)
        };
        let gone = Index::of(dir.path()).write(choose).unwrap();
        gone.into_iter().map(|(key, row)| (key.0[0], row.bytes)).collect::<Vec<_>>()
    };
    assert_eq!(gone(100, 100, None), []);
    assert_eq!(gone(99, 100, None), [(1, 20)]);
    assert_eq!(gone(100, 100, Some(&row(21, 9, "a"))), [(1, 20), (3, 40)]);
    assert_eq!(
        gone(1000, 45, Some(&row(10, 9, "a"))),
        [(3, 40)],
        "the other namespace is over its quota too"
    );
    assert_eq!(gone(1000, 39, Some(&row(10, 9, "a"))), [(1, 20), (3, 40)]);
    assert_eq!(gone(30, 1000, None), [(1, 20), (3, 40), (2, 30)]);
}

/// A folder whose index has `rows` rows of 50 namespaces besides those of the chunks that are put.
fn large_index(rows: u64, change: impl FnOnce(&mut Limits)) -> (TempDir, Store) {
    let dir = tempdir().unwrap();
    let store = limited(&dir, change);
    stored(store.put(numbered(1, 50)).unwrap());
    let enter = |tables: &mut Tables<'_>| {
        for n in 0..rows {
            let key = ChunkKey(*blake3::hash(&n.to_le_bytes()).as_bytes());
            tables.set(&key, &row(1000, 1_700_000_000_000 + n, &format!("namespace {}", n % 50)))?;
        }
        Ok(())
    };
    Index::of(dir.path()).write(enter).unwrap();
    (dir, store)
}

fn rows_read(work: impl FnOnce()) -> u64 {
    let before = ROWS_READ.get();
    work();
    ROWS_READ.get() - before
}

/// The part of the index that an operation reads does not grow with the index.
#[test]
fn storing_renewing_and_pinning_read_few_rows_of_a_large_index() {
    const ROWS: u64 = 10_000;
    let full = 1000 * ROWS + 3 * size();
    let (dir, store) = large_index(ROWS, |limits| {
        limits.disk = full;
        limits.quota = 1 << 30;
        limits.time_to_live = Some(Duration::from_secs(3600));
    });
    // The first one looks at the quota of every namespace.
    stored(store.put(numbered(2, 50)).unwrap());
    let few = 20;
    let read = rows_read(|| _ = stored(store.put(numbered(3, 50)).unwrap()));
    assert!(read <= few, "a put within the bound read {read} rows");
    assert_eq!(store.stats().evicted, 0);
    let victims = size().div_ceil(1000);
    let read = rows_read(|| _ = stored(store.put(numbered(4, 50)).unwrap()));
    assert_eq!(store.stats().evicted, victims);
    assert!(read <= few + victims, "a put that evicts {victims} chunks read {read} rows");
    let read = rows_read(|| assert!(matches!(store.put(numbered(4, 50)).unwrap(), PutOutcome::Known)));
    assert!(read <= few, "a put of a known chunk read {read} rows");
    let read = rows_read(|| assert_eq!(store.pin(&[numbered(4, 50).key()], true).unwrap(), 1));
    assert!(read <= few, "a pin read {read} rows");
    let read = rows_read(|| assert!(store.remove(&numbered(4, 50).key()).unwrap()));
    assert!(read <= few, "a removal read {read} rows");
    let large = numbered(5, 300_000);
    let read = rows_read(|| assert!(matches!(store.put(large).unwrap(), PutOutcome::NotStored { .. })));
    assert!(read <= few, "a put that cannot fit read {read} rows");
    let read = rows_read(|| assert_eq!(store.stats().disk_chunks, ROWS + 3 - victims));
    assert!(read <= few, "stats read {read} rows");
    derived_tables_agree(dir.path());
}

fn numbered_key(n: u32) -> ChunkKey {
    let mut key = [0; 32];
    key[..4].copy_from_slice(&n.to_le_bytes());
    ChunkKey(key)
}

/// A commit waits for the disk: storing, renewing and pinning take one each, and reading takes none.
#[test]
fn storing_renewing_and_pinning_commit_once() {
    let dir = tempdir().unwrap();
    let store = limited(&dir, |limits| limits.time_to_live = Some(Duration::from_secs(3600)));
    let (one, two) = (numbered(1, 50), numbered(2, 50));
    stored(store.put(one.clone()).unwrap());
    let commits = |work: &dyn Fn()| {
        let before = COMMITS.get();
        work();
        COMMITS.get() - before
    };
    assert_eq!(
        commits(&|| assert!(store.get(one.id()).unwrap().is_some())),
        0,
        "a use waits for a later commit"
    );
    let many_uses = || {
        (0..5000_u32).for_each(|n| store.disk_tier().touch(numbered_key(n)));
    };
    assert_eq!(commits(&many_uses), 0, "uses are written by another thread");
    assert_eq!(commits(&|| _ = stored(store.put(two.clone()).unwrap())), 1, "a put");
    let known = || assert!(matches!(store.put(two.clone()).unwrap(), PutOutcome::Known));
    assert_eq!(commits(&known), 1, "a put of a known chunk");
    assert_eq!(commits(&|| store.renew(&[one.key(), two.key()])), 1, "renewals of two chunks");
    let pin = || assert_eq!(store.pin(&[one.key(), two.key()], true).unwrap(), 2);
    assert_eq!(commits(&pin), 1, "pins of two chunks");
}

/// The listing of one namespace opens no file, and reads no row, of another.
#[test]
fn a_listing_of_one_namespace_reads_its_own_rows_alone() {
    let (dir, store) = large_index(1000, |_| ());
    let of = |namespace: &str, n: u32| {
        let chunk = numbered(n, 50);
        chunk_of(ChunkId { namespace: namespace.into(), ..chunk.id().clone() }, u64::from(n))
    };
    for n in 2..5 {
        stored(store.put(of("mine", n)).unwrap());
        stored(store.put(of("theirs", n)).unwrap());
    }
    // A broken file would be told if it were opened.
    fs::write(path(&store, &of("theirs", 2)), b"broken").unwrap();
    let read = rows_read(|| {
        let listing = store.list(Scope::Namespace("mine")).unwrap();
        let keys: Vec<_> = listing.chunks.iter().map(|info| info.key).collect();
        assert_eq!(keys, sorted(&[&of("mine", 2), &of("mine", 3), &of("mine", 4)]));
        assert!(listing.chunks.iter().all(|info| info.used.is_some()));
    });
    assert!(read <= 5, "{read} rows were read");
    assert_eq!(store.keys(Scope::Namespace("mine")).unwrap().len(), 3);
    drop(dir);
}

/// Rows of an earlier build are taken over: last uses, pins and times to live are kept.
#[test]
fn an_index_of_an_earlier_build_is_taken_over() {
    let dir = tempdir().unwrap();
    let chunks: Vec<_> = (1..=3).map(|n| numbered(n, 50)).collect();
    let store = limited(&dir, |_| ());
    chunks.iter().for_each(|chunk| _ = stored(store.put(chunk.clone()).unwrap()));
    drop(store);
    type Value = (u64, u64, u64, u64, bool, &'static str);
    const CHUNKS: TableDefinition<'static, &[u8; 32], Value> = TableDefinition::new("chunks, version 1");
    const COMPLETE: TableDefinition<'static, &str, bool> = TableDefinition::new("complete");
    let index = dir.path().join(INDEX);
    for is_complete in [true, false] {
        fs::remove_file(&index).unwrap();
        let database = redb::Builder::new()
            .set_concurrency_mode(redb::ConcurrencyMode::MultiWriter)
            .create(&index)
            .unwrap();
        let write = database.begin_write().unwrap();
        let mut table = write.open_table(CHUNKS).unwrap();
        // The third has no row yet where the earlier build was interrupted.
        let known = if is_complete { 3 } else { 2 };
        for (n, chunk) in chunks[..known].iter().enumerate() {
            let expires = if n == 1 { 4_000_000_000 } else { 0 };
            table.insert(&chunk.key().0, (size(), 1000 * n as u64, 1, expires, n == 0, "shared")).unwrap();
        }
        drop(table);
        if is_complete {
            write.open_table(COMPLETE).unwrap().insert("", true).unwrap();
        }
        write.commit().unwrap();
        drop(database);
        let store = limited(&dir, |limits| limits.disk = 3 * size());
        let listed = store.list(Scope::Namespace("shared")).unwrap().chunks;
        let of = |n: usize| listed.iter().find(|info| info.key == chunks[n].key()).unwrap();
        assert_eq!((of(0).pinned, of(1).pinned), (true, false));
        assert_eq!((of(0).expires, of(1).expires), (None, Some(4_000_000_000)));
        assert_eq!((of(1).used, of(2).used == Some(2)), (Some(1), is_complete));
        assert_eq!((store.stats().disk_chunks, store.stats().disk_bytes), (3, 3 * size()));
        assert!(store.take_set_aside().is_none());
        derived_tables_agree(dir.path());
    }
    let store = limited(&dir, |limits| limits.disk = 3 * size());
    stored(store.put(numbered(4, 50)).unwrap());
    assert_eq!(
        on_disk(&store),
        sorted(&[&chunks[0], &chunks[2], &numbered(4, 50)]),
        "the second was used first"
    );
}

#[test]
fn a_namespace_follows_from_the_credential_and_the_key() {
    let dir = tempdir().unwrap();
    let key = NamespaceKey::of_folder(dir.path()).unwrap();
    assert!(key == NamespaceKey::of_folder(dir.path()).unwrap(), "it stays");
    let one = key.namespace(Some("sk-one"));
    assert_eq!((one.len(), key.namespace(None).as_str()), (32, ""));
    assert_eq!(one, key.namespace(Some("sk-one")));
    assert_ne!(one, key.namespace(Some("sk-two")));
    assert_ne!(one, NamespaceKey::of_folder(tempdir().unwrap().path()).unwrap().namespace(Some("sk-one")));
    assert!(
        !format!("{key:?}").contains(&fs::read_to_string(dir.path().join("namespace.key")).unwrap()[..8])
    );
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        let mode = fs::metadata(dir.path().join("namespace.key")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
    // It is the store's own file, and no stranger's.
    let store = limited(&dir, |_| ());
    assert!(store.verify(|_| ()).unwrap().foreign.is_empty());
    fs::write(dir.path().join("namespace.key"), "abc").unwrap();
    let error = NamespaceKey::of_folder(dir.path()).unwrap_err();
    assert!(error.to_string().contains("64 hexadecimal digits"), "{error}");
    let error = NamespaceKey::read(&dir.path().join("absent.key")).unwrap_err();
    assert!(error.to_string().contains("cannot read the key") && error.to_string().contains("absent.key"));
    let known: NamespaceKey = "00".repeat(32).parse().unwrap();
    fs::write(dir.path().join("other.key"), format!("{}\n", "00".repeat(32))).unwrap();
    assert!(NamespaceKey::read(&dir.path().join("other.key")).unwrap() == known);
    assert_eq!(known.namespace(Some("sk-one")), "45233e63ad50d2d19c7b8b3dd315d4b1");
}
