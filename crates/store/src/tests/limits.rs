//! What the folder may take, who goes first, and the index that knows it.

use std::fs;
use std::time::{Duration, SystemTime};

use refrain_kernels::{Buffer, Dtype};
use refrain_kv::Summary;
use tempfile::{TempDir, tempdir};

use super::store::{files, path, stored};
use super::{chunk_of, numbered};
use crate::index::{FILE, Index};
use crate::limits::{Row, victims};
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
    let mut keys = store.disk().keys().unwrap();
    keys.sort();
    keys
}

fn sorted(chunks: &[&Chunk]) -> Vec<ChunkKey> {
    let mut keys: Vec<_> = chunks.iter().map(|chunk| chunk.key()).collect();
    keys.sort();
    keys
}

/// Uses have a millisecond's precision.
fn later() {
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
    // What was put again was used.
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
    assert!(store.pin(&a.key(), true).unwrap());
    assert!(!store.pin(&c.key(), true).unwrap(), "it is not there");
    stored(store.put(b.clone()).unwrap());
    stored(store.put(c.clone()).unwrap());
    assert_eq!(on_disk(&store), sorted(&[&a, &c]));
    assert!(store.pin(&c.key(), true).unwrap());
    let PutOutcome::NotStored { error } = store.put(b.clone()).unwrap() else { panic!() };
    assert!(matches!(error, StoreError::NoRoom { pinned, .. } if pinned == 2 * size()), "{error}");
    assert!(error.to_string().contains("unpin some"), "{error}");
    assert_eq!(on_disk(&store), sorted(&[&a, &c]));
    let pinned = |store: &Store| store.list(Scope::All).unwrap().chunks.iter().filter(|c| c.pinned).count();
    assert_eq!(pinned(&store), 2);
    drop(store);
    let store = limited(&dir, |limits| limits.disk = 2 * size() + 1);
    assert_eq!(pinned(&store), 2);
    assert!(store.pin(&a.key(), false).unwrap());
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
        assert!(store.pin(&chunk.key(), true).unwrap());
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
        assert!(!path(&store, chunk).exists(), "removed when it was asked for");
    }
    assert!(store.take_repairs().is_empty(), "that is nothing broken");
    stored(store.put(a.clone()).unwrap());
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
    hourly.renew(b.id());
    assert!(expires(&b).unwrap() >= first);
    // What was over and is stored again is not over at once.
    plain.expire(&b.key(), Some(SystemTime::UNIX_EPOCH)).unwrap();
    stored(plain.put(b.clone()).unwrap());
    assert_eq!(expires(&b), None);
    assert!(plain.get(b.id()).unwrap().is_some());
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
                        let mut summary = Summary::default();
                        summary.push("t".to_owned(), vec![4], Buffer::zeros(Dtype::F32, 4));
                        store.put_summary(chunk.id(), &format!("kind-{worker}"), summary).unwrap();
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

/// While another process writes, or is stopped at it, reading goes on.
#[test]
fn reading_waits_for_no_writer() {
    let dir = tempdir().unwrap();
    let store = limited(&dir, |_| ());
    let chunk = numbered(1, 50);
    stored(store.put(chunk.clone()).unwrap());
    let other = Index::of(dir.path());
    other
        .change(|_| {
            let (done, wait) = std::sync::mpsc::channel();
            let (store, chunk) = (&store, &chunk);
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    for _ in 0..10 {
                        assert!(store.get(chunk.id()).unwrap().is_some());
                    }
                    done.send(store.list(Scope::All).unwrap().chunks.len()).unwrap();
                });
                assert_eq!(wait.recv_timeout(Duration::from_secs(20)), Ok(1));
            });
            Ok((crate::index::Changes::new(), ()))
        })
        .unwrap();
}

/// An index that another process has set aside, or removed, is used no more.
#[test]
fn an_index_that_is_replaced_while_it_is_open_is_opened_again() {
    let dir = tempdir().unwrap();
    let store = limited(&dir, |limits| limits.disk = 2 * size());
    stored(store.put(numbered(1, 50)).unwrap());
    fs::rename(dir.path().join(FILE), dir.path().join("index.redb.broken")).unwrap();
    let other = limited(&dir, |limits| limits.disk = 2 * size());
    stored(other.put(numbered(2, 50)).unwrap());
    later();
    stored(store.put(numbered(3, 50)).unwrap());
    for store in [&store, &other] {
        assert_eq!((store.stats().disk_chunks, store.stats().disk_bytes), (2, 2 * size()));
    }
    assert_eq!(on_disk(&store).len(), 2);
}

#[test]
fn summaries_count_with_their_chunk_and_go_with_it() {
    let dir = tempdir().unwrap();
    let store = limited(&dir, |limits| limits.disk = 3 * size());
    let (a, b, c) = (numbered(1, 50), numbered(2, 50), numbered(3, 50));
    let summary = |elements: usize| {
        let mut summary = Summary::default();
        summary.push("t".to_owned(), vec![elements], Buffer::zeros(Dtype::F32, elements));
        summary
    };
    stored(store.put(a.clone()).unwrap());
    later();
    stored(store.put(b.clone()).unwrap());
    let bytes = stored(store.put_summary(b.id(), "test", summary(10)).unwrap());
    assert_eq!(store.stats().disk_bytes, 2 * size() + bytes);
    assert!(matches!(store.put_summary(b.id(), "test", summary(10)).unwrap(), PutOutcome::Known));
    assert_eq!(store.stats().disk_bytes, 2 * size() + bytes);
    later();
    stored(store.put(c.clone()).unwrap());
    assert_eq!(on_disk(&store), sorted(&[&b, &c]));
    // A summary makes room as well, and not by its own chunk.
    later();
    stored(store.put_summary(b.id(), "large", summary(size() as usize / 4)).unwrap());
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
    store.pin(&chunks[0].key(), true).unwrap();
    drop(store);
    let index = dir.path().join(FILE);
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

/// As if all rows had been entered an hour ago.
pub(super) fn age(root: &std::path::Path) {
    let index = Index::of(root);
    let aged =
        |(key, row): (&ChunkKey, &Row)| (*key, Some(Row { written: row.written - 3600, ..row.clone() }));
    index.change(|rows| Ok((rows.iter().map(aged).collect(), ()))).unwrap();
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

#[test]
fn victims_are_few_and_in_order() {
    let row = |bytes, used, namespace: &str| Row {
        bytes,
        used,
        written: 1,
        expires: 0,
        pinned: false,
        namespace: namespace.into(),
    };
    let rows = [row(10, 5, "a"), row(20, 1, "a"), row(30, 3, "b"), row(40, 2, "b")];
    let rows = rows.into_iter().zip(0_u8..).map(|(row, n)| (ChunkKey([n; 32]), row)).collect();
    let gone = |disk, quota, new: Option<&Row>| {
        let limits = Limits { disk, quota, ..Limits::memory(0) };
        let gone = victims(&rows, new, &limits).unwrap();
        gone.into_iter().map(|(key, bytes)| (key.0[0], bytes)).collect::<Vec<_>>()
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
    let known: NamespaceKey = "00".repeat(32).parse().unwrap();
    assert_eq!(known.namespace(Some("sk-one")), "45233e63ad50d2d19c7b8b3dd315d4b1");
}
