use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use redb::StorageBackend;
use refrain_engine::Document;
use refrain_store::ChunkKey;

use super::*;
use crate::migration;
use crate::purge::mark_unpurged;
use crate::tables::{REMOVALS, display_title, document_id};

/// A file in memory that counts the bytes read from it and refuses to be written or read where it is told to.
#[derive(Clone, Debug, Default)]
pub(crate) struct Disk {
    bytes: Arc<Mutex<Vec<u8>>>,
    pub(crate) is_full: Arc<AtomicBool>,
    is_unreadable: Arc<AtomicBool>,
    read: Arc<AtomicU64>,
}

impl StorageBackend for Disk {
    fn len(&self) -> io::Result<u64> {
        Ok(self.bytes.lock().unwrap().len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        if self.is_unreadable.load(Relaxed) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.read.fetch_add(out.len() as u64, Relaxed);
        out.copy_from_slice(&self.bytes.lock().unwrap()[offset as usize..][..out.len()]);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.bytes.lock().unwrap().resize(len as usize, 0);
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        if self.is_full.load(Relaxed) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.bytes.lock().unwrap()[offset as usize..][..data.len()].copy_from_slice(data);
        Ok(())
    }
}

impl Disk {
    pub(crate) fn open(&self, quota: u64) -> LocalDocuments {
        let disk = self.clone();
        let open = move || Builder::new().set_cache_size(1 << 20).create_with_backend(disk.clone());
        LocalDocuments::with(open, None, quota, false).unwrap()
    }
}

fn document(title: &str, text: &str) -> Document {
    Document { title: title.to_owned(), text: text.to_owned() }
}

fn key(byte: u8) -> ChunkKey {
    ChunkKey([byte; 32])
}

/// Stores a document of one chunk with these keys.
fn put(store: &LocalDocuments, namespace: &str, document: &Document, keys: &[u8]) -> Result<StoredDocument> {
    put_at(store, namespace, document, keys, 5)
}

/// Stores a document of one chunk with these keys, at a time.
fn put_at(
    store: &LocalDocuments,
    namespace: &str,
    document: &Document,
    keys: &[u8],
    created: u64,
) -> Result<StoredDocument> {
    let new = NewDocument {
        document: document.clone(),
        chunks: vec![vec![1, 2, 3]],
        chunk_texts: vec![document.text.clone()],
        keys: keys.iter().copied().map(key).collect(),
    };
    store.put(namespace, &new, "test", created)
}

fn list(store: &LocalDocuments, namespace: &str) -> Vec<StoredDocument> {
    store.list(namespace, "", usize::MAX).unwrap().0
}

/// A title that was given is shown as it is, and the first line of a text without one as its heading.
#[test]
fn documents_are_shown_by_title_or_first_line() {
    let shown = |title: &str, text: &str| display_title(&document(title, text));
    assert_eq!(shown(" #42 invoice ", "# Other"), "#42 invoice");
    assert_eq!(shown("###", "text"), "###");
    let path = "minutes/".repeat(20);
    assert_eq!(shown(&path, ""), path);
    assert_eq!(shown(&"é".repeat(1001), ""), format!("{}…", "é".repeat(999)));
    assert_eq!(shown(" ", "\n## A heading\n# Other"), "A heading");
    assert_eq!(shown("", "###\ntext"), "###");
    assert_eq!(shown("", &"é".repeat(80)), "é".repeat(80));
    assert_eq!(shown("", &"é".repeat(81)), format!("{}…", "é".repeat(79)));
}

#[test]
fn documents_are_kept_apart_by_namespace_and_over_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let store = LocalDocuments::open(Some(folder.path()), 15).unwrap();
    assert_eq!(store.all().unwrap(), []);
    let (one, two) = (document("a", "bc"), document("ab", "c"));
    let first = put(&store, "x", &one, &[1, 2]).unwrap();
    let second = put(&store, "x", &two, &[2, 3]).unwrap();
    assert_ne!(first.id, second.id, "a title is no text");
    put(&store, "", &one, &[9]).unwrap();
    put(&store, "xy", &one, &[8]).unwrap();
    store.set_pinned("x", &first.id, true).unwrap();
    let again = put_at(&store, "x", &one, &[1, 2], 6).unwrap();
    assert_eq!((again.pinned, again.created, again.chunk_keys), (true, 5, 2));
    assert!(matches!(store.get("y", &first.id).unwrap_err(), Error::NotFound(_)));
    assert!(matches!(store.document("y", &first.id).unwrap_err(), Error::NotFound(_)));
    assert_eq!(store.document("x", &first.id).unwrap(), one);
    assert_eq!(store.chunks("x", &first.id).unwrap(), [[1, 2, 3]]);
    let both = list(&store, "x");
    assert_eq!(both.len(), 2);
    assert_eq!(store.list("x", "", 1).unwrap(), (both[..1].to_vec(), true));
    assert_eq!(store.list("x", &both[0].id, 1).unwrap(), (both[1..].to_vec(), false));
    let all = store.all().unwrap();
    assert_eq!(all.len(), 4);
    let twice = LocalDocuments::open(Some(folder.path()), 15).map(|_| ()).unwrap_err();
    assert!(twice.to_string().contains("another engine of this one, has it open"));
    drop(store);
    let store = LocalDocuments::open(Some(folder.path()), 6).unwrap();
    assert_eq!(store.all().unwrap(), all);
    // A document that is ingested for another method has the chunks of both.
    put(&store, "x", &one, &[4]).unwrap();
    let full = put(&store, "x", &document("", "d"), &[]).unwrap_err();
    assert!(matches!(full, Error::QuotaExceeded { stored: 6, quota: 6, new: 1 }), "{full}");
    assert_eq!(store.chunk_keys("x", &first.id).unwrap(), [1, 2, 4].map(key));
    assert_eq!(store.remove("x", &first.id, &[key(5), key(3)]).unwrap().keys, [1, 4, 5].map(key));
    store.finish_removal("x", &first.id, &[1, 4, 5].map(key)).unwrap();
    assert!(matches!(store.remove("x", &first.id, &[]).unwrap_err(), Error::NotFound(_)));
    put(&store, "x", &document("", "d"), &[]).unwrap();
    assert_eq!((list(&store, "x").len(), list(&store, "").len()), (2, 1));
    assert_eq!(store.chunk_keys("xy", &list(&store, "xy")[0].id).unwrap(), [key(8)]);
}

#[test]
fn chunks_are_pinned_while_a_pinned_document_has_them() {
    let store = LocalDocuments::open(None, 1 << 10).unwrap();
    let ids = [("a", [1, 2]), ("b", [2, 3]), ("c", [3, 4])]
        .map(|(text, keys)| put(&store, "", &document("", text), &keys).unwrap().id);
    let pinned = || store.pinned_keys("", &[1, 2, 3, 4].map(key)).unwrap();
    let keys = |bytes: &[u8]| -> BTreeSet<ChunkKey> { bytes.iter().copied().map(key).collect() };
    store.set_pinned("", &ids[0], true).unwrap();
    store.set_pinned("", &ids[1], true).unwrap();
    assert_eq!(pinned(), keys(&[1, 2, 3]));
    assert!(store.pinned_keys("x", &[key(1)]).unwrap().is_empty(), "another namespace");
    store.set_pinned("", &ids[1], false).unwrap();
    assert_eq!(pinned(), keys(&[1, 2]));
    // A removal tells the chunks of a pinned document alone.
    assert_eq!(store.remove("", &ids[0], &[]).unwrap().unpinned, [1, 2].map(key));
    assert_eq!(store.remove("", &ids[2], &[]).unwrap().unpinned, []);
    assert_eq!(pinned(), keys(&[]));
}

/// A document that could not be written takes nothing of the quota, and the store goes on once there is room again.
#[test]
fn a_full_disk_costs_neither_quota_nor_the_store() {
    let disk = Disk::default();
    let store = disk.open(10);
    put(&store, "", &document("", "12"), &[1]).unwrap();
    disk.is_full.store(true, Relaxed);
    for _ in 0..3 {
        let error = put(&store, "", &document("", "12345678"), &[2]).unwrap_err();
        assert!(matches!(error, Error::DiskFull { .. }), "{error:?}");
    }
    disk.is_full.store(false, Relaxed);
    // The first attempt may find the database as the full disk had left it.
    let _ = put(&store, "", &document("", "12345678"), &[2]);
    put(&store, "", &document("", "12345678"), &[2]).unwrap();
    assert_eq!(list(&store, "").len(), 2);
    assert!(matches!(put(&store, "", &document("", "1"), &[]).unwrap_err(), Error::QuotaExceeded { .. }));
}

/// Documents are read again as soon as the disk gives them, without a write in between.
#[test]
fn a_failed_read_costs_no_later_one() {
    let disk = Disk::default();
    // More than the database keeps in memory.
    let text = document("", &"x".repeat(4 << 20));
    let id = put(&disk.open(u64::MAX), "", &text, &[]).unwrap().id;
    let store = disk.open(u64::MAX);
    disk.is_unreadable.store(true, Relaxed);
    for _ in 0..3 {
        assert!(matches!(store.document("", &id), Err(Error::Database(_) | Error::Open { .. })));
    }
    disk.is_unreadable.store(false, Relaxed);
    assert_eq!(store.document("", &id).unwrap(), text);
}

/// The file is opened again by several threads that have met one failure, and within a purge, which holds the turn to write.
#[test]
fn threads_that_meet_a_failure_open_the_file_again_and_wait_for_none_of_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let store = LocalDocuments::open(Some(folder.path()), u64::MAX).unwrap();
    let id = put(&store, "", &document("", "text"), &[]).unwrap().id;
    let fail = || Failure::from(redb::StorageError::Io(io::ErrorKind::TimedOut.into()));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| store.database.read(|_| -> Transacted<()> { Err(fail()) }).unwrap_err());
        }
    });
    store.database.rewrite_if(|_| Err(fail()), |_, _| Ok(())).unwrap_err();
    assert_eq!(store.document("", &id).unwrap().text, "text");
}

/// Another program may make a new file under the name.
#[test]
fn a_file_that_was_moved_away_is_not_written_to_and_the_next_one_is_not_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let open = || LocalDocuments::open(Some(folder.path()), u64::MAX).unwrap();
    let (first, file) = (open(), folder.path().join(DOCUMENTS));
    let id = put(&first, "", &document("", "first"), &[]).unwrap().id;
    first.database.write(mark_unpurged).unwrap();
    let is_moved = |outcome: Result<()>| matches!(outcome, Err(Error::Moved { path }) if path == file);
    let change = |store: &LocalDocuments| put(store, "", &document("", "late"), &[]).map(drop);
    std::fs::rename(&file, folder.path().join("moved")).unwrap();
    assert!(is_moved(change(&first)) && is_moved(first.purge()));
    let second = open();
    let other = put(&second, "", &document("", "second"), &[]).unwrap().id;
    assert!(is_moved(change(&first)) && is_moved(first.purge()));
    // The documents of the file that was moved can still be read.
    assert_eq!(first.document("", &id).unwrap().text, "first");
    drop((first, second));
    assert_eq!(open().document("", &other).unwrap().text, "second");
}

/// The number of chunks is another machine's until they are cut here, and may be any.
#[test]
fn token_ids_go_with_their_document_whatever_its_number_of_chunks() {
    let store = LocalDocuments::open(None, u64::MAX).unwrap();
    for chunks in [0, u32::MAX] {
        let stored = put(&store, "", &document("", "text"), &[]).unwrap();
        let other = put(&store, "", &document("", "other"), &[]).unwrap();
        let row = serde_json::to_vec(&StoredDocument { chunks, ..stored.clone() }).unwrap();
        let replace = |transaction: &WriteTransaction| {
            transaction.open_table(METADATA)?.insert(("", stored.id.as_str()), row.as_slice())?;
            Ok(())
        };
        store.database.write(replace).unwrap();
        store.remove("", &stored.id, &[]).unwrap();
        assert!(store.chunks("", &stored.id).unwrap().is_empty());
        assert_eq!(store.chunks("", &other.id).unwrap().len(), 1);
    }
}

/// Listing, pinning, removing and reading one chunk do not read the texts.
#[test]
fn texts_are_read_only_where_they_are_asked_for() {
    let disk = Disk::default();
    let store = disk.open(u64::MAX);
    let (count, size) = (64, 100_000);
    let ids: Vec<String> = (0..count)
        .map(|index| {
            let text = format!("{index} {}", "x".repeat(size));
            put(&store, "", &document("", &text), &[index as u8, 200]).unwrap().id
        })
        .collect();
    drop(store);
    let store = disk.open(u64::MAX);
    let read_by = |work: &dyn Fn()| {
        let before = disk.read.load(Relaxed);
        work();
        disk.read.load(Relaxed) - before
    };
    let all = (count as usize * size) as u64;
    let listed = read_by(&|| assert_eq!(list(&store, "").len(), 64));
    assert!(listed < all / 20, "{listed} of {all} bytes");
    let changed = read_by(&|| {
        store.set_pinned("", &ids[3], true).unwrap();
        assert_eq!(store.pinned_keys("", &[key(3), key(200)]).unwrap().len(), 2);
        store.set_pinned("", &ids[3], false).unwrap();
        store.remove("", &ids[4], &[]).unwrap();
        assert_eq!(store.chunk("", &ids[5], 0).unwrap(), [1, 2, 3]);
    });
    assert!(changed < all / 20, "{changed} of {all} bytes");
    let text = read_by(&|| assert!(store.document("", &ids[5]).unwrap().text.len() > size));
    assert!(text >= size as u64, "{text}");
}

#[test]
fn files_of_version_1_are_migrated() {
    let folder = tempfile::tempdir().unwrap();
    let one = document("", "# A heading\nand a text");
    let id = document_id(&one);
    {
        let database = Database::create(folder.path().join(DOCUMENTS)).unwrap();
        let transaction = database.begin_write().unwrap();
        let row = serde_json::json!({
            "id": id, "document": one, "created": 5, "pinned": true, "tokens": 9,
            "chunks": [key(1).to_string(), key(2).to_string()],
        });
        let json = row.to_string();
        let mut table = transaction.open_table(migration::TABLE).unwrap();
        table.insert(format!("name/space/{id}").as_str(), json.as_bytes()).unwrap();
        drop(table);
        transaction.commit().unwrap();
    }
    for _ in 0..2 {
        let store = LocalDocuments::open(Some(folder.path()), 25).unwrap();
        let stored = store.get("name/space", &id).unwrap();
        assert_eq!((stored.created, stored.pinned, stored.tokens, stored.chunks), (5, true, 9, 0));
        assert_eq!((stored.title.as_str(), stored.segmentation.as_str()), ("A heading", ""));
        assert_eq!(store.document("name/space", &id).unwrap(), one);
        assert_eq!(store.chunk_keys("name/space", &id).unwrap(), [1, 2].map(key));
        // Its bytes count against the quota.
        assert!(matches!(
            put(&store, "name/space", &document("", "four"), &[]).unwrap_err(),
            Error::QuotaExceeded { .. }
        ));
    }
}

/// Whether the bytes stand in any file of a folder.
fn stand_in(folder: &Path, bytes: &[u8]) -> bool {
    let read = |entry: io::Result<std::fs::DirEntry>| std::fs::read(entry.unwrap().path()).unwrap();
    let mut files = std::fs::read_dir(folder).unwrap().map(read);
    files.any(|file| file.windows(bytes.len()).any(|found| found == bytes))
}

#[test]
fn a_removed_document_leaves_no_byte_in_the_file_and_its_keys_until_they_are_deleted() {
    let folder = tempfile::tempdir().unwrap();
    let store = LocalDocuments::open(Some(folder.path()), u64::MAX).unwrap();
    let (secret, other) = (document("Zanzibar", &"quokka ledger ".repeat(2000)), document("", "spokes"));
    let id = put(&store, "x", &secret, &[1, 2]).unwrap().id;
    let kept = put(&store, "x", &other, &[2]).unwrap();
    assert!(stand_in(folder.path(), b"quokka ledger"));
    assert_eq!(store.remove("x", &id, &[key(3)]).unwrap().keys, [1, 3].map(key));
    store.purge().unwrap();
    for trace in [b"quokka ledger".as_slice(), b"Zanzibar"] {
        assert!(!stand_in(folder.path(), trace));
    }
    // The other document is what it was, also for the next server.
    assert_eq!((store.get("x", &kept.id).unwrap(), store.document("x", &kept.id).unwrap()), (kept, other));
    drop(store);
    let store = LocalDocuments::open(Some(folder.path()), u64::MAX).unwrap();
    assert_eq!(list(&store, "x").len(), 1);
    // A chunk that another document has got meanwhile stays.
    put(&store, "x", &document("", "third"), &[3]).unwrap();
    assert_eq!(store.remove("x", &id, &[]).unwrap().keys, [key(1)]);
    assert!(matches!(store.remove("y", &id, &[]).unwrap_err(), Error::NotFound(_)));
    store.finish_removal("x", &id, &[key(3)]).unwrap();
    assert_eq!(store.remove("x", &id, &[]).unwrap().keys, [key(1)], "that was another");
    store.finish_removal("x", &id, &[key(1), key(3)]).unwrap();
    assert!(matches!(store.remove("x", &id, &[]).unwrap_err(), Error::NotFound(_)));
}

/// A server that was killed between the removal and its end, or while it made the file anew, and one of an earlier build.
#[test]
fn an_interrupted_removal_is_purged_at_the_next_start() {
    let folder = tempfile::tempdir().unwrap();
    let secret = document("", &"quokka ledger ".repeat(2000));
    let open = || LocalDocuments::open(Some(folder.path()), u64::MAX).unwrap();
    // A file ends with the last page that is in use.
    let put_and_remove = |store: &LocalDocuments| {
        let id = put(store, "", &secret, &[]).unwrap().id;
        put(store, "", &document("", &"spokes ".repeat(4000)), &[]).unwrap();
        store.remove("", &id, &[]).unwrap();
    };
    let store = open();
    put_and_remove(&store);
    drop(store);
    assert!(stand_in(folder.path(), b"quokka ledger"));
    std::fs::write(folder.path().join("documents.redb.new"), "quokka ledger").unwrap();
    drop(open());
    assert!(!stand_in(folder.path(), b"quokka ledger"));

    let store = open();
    put_and_remove(&store);
    store
        .database
        .write(|transaction| {
            // As an earlier build has left it.
            transaction.delete_table(REMOVALS)?;
            transaction.delete_table(super::super::tables::UNPURGED)?;
            Ok(())
        })
        .unwrap();
    drop(store);
    assert!(stand_in(folder.path(), b"quokka ledger"));
    drop(open());
    assert!(!stand_in(folder.path(), b"quokka ledger"));
}

/// Documents are read, listed and changed while the file is made anew.
#[test]
fn a_purge_loses_no_change() {
    let folder = tempfile::tempdir().unwrap();
    let store = LocalDocuments::open(Some(folder.path()), u64::MAX).unwrap();
    let first = put(&store, "", &document("", "first"), &[1]).unwrap();
    std::thread::scope(|scope| {
        let purging = scope.spawn(|| {
            for index in 0..20 {
                let id = put(&store, "", &document("removed", &index.to_string()), &[]).unwrap().id;
                store.remove("", &id, &[]).unwrap();
                store.purge().unwrap();
            }
        });
        let mut count = 0;
        while !purging.is_finished() {
            put(&store, "", &document("kept", &count.to_string()), &[2]).unwrap();
            count += 1;
            assert_eq!(store.get("", &first.id).unwrap(), first);
        }
        assert_eq!(list(&store, "").len(), count + 1);
    });
}

#[test]
fn documents_of_one_machine_conform() {
    crate::conformance::check(&|quota| Box::new(LocalDocuments::open(None, quota).unwrap()));
}

#[cfg(unix)]
#[test]
fn only_their_owner_reads_the_documents() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    let (above, file) = (folder.path().join("store"), folder.path().join("store/documents.redb"));
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let store = LocalDocuments::open(Some(&above), u64::MAX).unwrap();
    assert_eq!((mode(&above), mode(&file)), (0o700, 0o600));
    let id = put(&store, "", &document("", "secret"), &[]).unwrap().id;
    store.remove("", &id, &[]).unwrap();
    store.purge().unwrap();
    assert_eq!(mode(&file), 0o600, "made anew");
    drop(store);
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
    drop(LocalDocuments::open(Some(&above), u64::MAX).unwrap());
    assert_eq!(mode(&file), 0o600, "of an earlier build");
}

/// Damage is told when the file is opened, or has met bytes that nothing uses.
#[test]
fn a_damaged_file_gives_no_wrong_text() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("documents.redb");
    let open = || LocalDocuments::open(Some(folder.path()), u64::MAX);
    let store = open().unwrap();
    let text = document("", &"The stem bolt is tightened to 5 newton metres. ".repeat(200));
    let id = put(&store, "", &text, &[1]).unwrap().id;
    let (listed, chunks) = (list(&store, ""), store.chunks("", &id).unwrap());
    drop(store);
    let whole = std::fs::read(&file).unwrap();
    let at = whole.windows(9).position(|window| window == b"tightened").unwrap();
    let mut told = 0;
    // The first page is the header.
    for at in (4096..whole.len()).step_by(4099).chain([at]) {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        std::fs::write(&file, &bytes).unwrap();
        match open() {
            Ok(store) => {
                assert_eq!(
                    (list(&store, ""), store.chunks("", &id).unwrap()),
                    (listed.clone(), chunks.clone())
                );
                assert_eq!(store.document("", &id).unwrap(), text);
            }
            Err(error) => {
                let error = error.to_string();
                assert!(
                    error.contains("documents.redb is damaged: ") && error.contains("move it away"),
                    "{error}"
                );
                told += 1;
            }
        }
    }
    assert!(told > 1, "{told}");
    std::fs::write(&file, &whole[..whole.len() / 2]).unwrap();
    let error = open().map(drop).unwrap_err().to_string();
    assert!(error.contains("is damaged"), "{error}");
}

#[test]
fn a_text_of_another_document_is_damage() {
    let store = LocalDocuments::open(None, u64::MAX).unwrap();
    let id = put(&store, "", &document("", "five newton metres"), &[]).unwrap().id;
    let other = serde_json::to_vec(&document("", "nine newton metres")).unwrap();
    let replace = |transaction: &WriteTransaction| {
        transaction.open_table(TEXTS)?.insert(("", id.as_str()), other.as_slice())?;
        Ok(())
    };
    store.database.write(replace).unwrap();
    let error = store.document("", &id).unwrap_err().to_string();
    assert!(error.contains("the text of") && error.contains("is not the one that was stored"), "{error}");
    let error = store.database.read(|_| -> Transacted<()> { panic!("a page") }).unwrap_err();
    assert!(matches!(error, Error::Damaged { .. }), "{error}");
}
