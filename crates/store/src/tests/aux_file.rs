//! Aux tensors beside chunks.

use std::fs::{self, File};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, SystemTime};

use proptest::prelude::*;
use refrain_kernels::{Buffer, Dtype};
use refrain_kv::AuxTensors;
use safetensors::SafeTensors;
use serde_json::{Value, json};
use tempfile::{TempDir, tempdir};

use super::store::{files, open, path, stored};
use super::{Random, chunk, forged, mutate, numbered, parts};
use crate::aux_file::{decode, encode};
use crate::{Chunk, ChunkInfo, ChunkKey, Problem, PutOutcome, Scope, Store, StoreError};

const KIND: &str = "sam_kv-64";

/// Numbers of a type that follow from `seed`.
fn buffer(dtype: Dtype, len: usize, seed: u64) -> Buffer {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let values: Vec<f32> = (0..len).map(|_| random.next() as i16 as f32 / 512.0).collect();
    let mut buffer = Buffer::zeros(dtype, len);
    buffer.write_f32(0, &values);
    buffer
}

/// Tensors of these names, types and sizes.
fn aux_of(tensors: &[(&str, Dtype, &[usize])]) -> AuxTensors {
    let mut aux = AuxTensors::default();
    for (index, (name, dtype, shape)) in tensors.iter().enumerate() {
        aux.push(*name, *shape, buffer(*dtype, shape.iter().product(), index as u64 + 1));
    }
    aux
}

/// Narrow elements first, so that the file has another order; one tensor has no element, one no size.
fn aux() -> AuxTensors {
    aux_of(&[
        ("keys", Dtype::F16, &[1, 3]),
        ("a \"mean\" ü", Dtype::F32, &[2, 2]),
        ("none", Dtype::Bf16, &[4, 0]),
        ("scale", Dtype::F32, &[]),
        ("values", Dtype::Bf16, &[5]),
    ])
}

fn key() -> ChunkKey {
    chunk().key()
}

fn bytes() -> Vec<u8> {
    encode(&key(), KIND, 1_700_000_000, &aux()).unwrap()
}

fn aux_path(store: &Store, chunk: &Chunk, kind: &str) -> PathBuf {
    store.disk().aux_path(&chunk.key(), kind)
}

fn age(path: &Path) {
    let old = SystemTime::now() - Duration::from_secs(3600);
    File::options().write(true).open(path).unwrap().set_modified(old).unwrap();
}

fn put(store: &Store, chunk: &Chunk, kind: &str) -> PutOutcome {
    store.put_aux_tensors(chunk.id(), kind, aux()).unwrap()
}

fn get(store: &Store, chunk: &Chunk, kind: &str) -> Option<AuxTensors> {
    store.aux_tensors(chunk.id(), kind).unwrap().map(|aux| AuxTensors::clone(&aux))
}

#[test]
fn the_file_is_a_safetensors_file() {
    let (bytes, aux) = (bytes(), aux());
    assert_eq!(decode(&bytes, &key(), KIND).unwrap(), aux);
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(tensors.len(), 5);
    for tensor in aux.tensors() {
        let found = tensors.tensor(&tensor.name).unwrap();
        assert_eq!(
            (found.shape(), found.data()),
            (tensor.shape.as_slice(), tensor.data.as_slice().as_bytes())
        );
        let offset = found.data().as_ptr().addr() - bytes.as_ptr().addr();
        assert!(offset.is_multiple_of(tensor.data.dtype().size()), "{}", tensor.name);
    }
    let (length, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let entries = metadata.metadata().as_ref().unwrap();
    assert_eq!(entries["data.blake3"], blake3::hash(&bytes[8 + length..]).to_hex().as_str());
    assert_eq!((entries["format"].as_str(), entries["version"].as_str()), ("refrain-summary", "1"));
    assert_eq!((entries["chunk"].as_str(), entries["kind"].as_str()), (key().to_string().as_str(), KIND));
    assert_eq!(entries["created"], "1700000000");
    let empty = encode(&key(), KIND, 0, &AuxTensors::default()).unwrap();
    assert_eq!(decode(&empty, &key(), KIND).unwrap(), AuxTensors::default());
}

/// Files of earlier builds stay readable: change the format version before changing this.
#[test]
fn bytes_stay_what_they_are() {
    assert_eq!(
        blake3::hash(&bytes()).to_string(),
        "a99e61b84d7cc52244569e0bb25f46ea72779bf477d15d27dd13d298ab2e8ee0"
    );
}

#[test]
fn every_flipped_bit_every_truncation_and_every_tail_is_found() {
    let bytes = bytes();
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << bit;
            let found = decode(&flipped, &key(), KIND);
            assert!(found.is_err(), "bit {bit} of byte {at}: {found:?}");
        }
        assert!(decode(&bytes[..at], &key(), KIND).is_err(), "{at} bytes");
    }
    for tail in [1, 8, 4096] {
        let longer = [bytes.as_slice(), &vec![0; tail]].concat();
        assert!(matches!(decode(&longer, &key(), KIND), Err(Problem::Length { .. })));
    }
    let mut flipped = bytes.clone();
    *flipped.last_mut().unwrap() ^= 1;
    assert_eq!(decode(&flipped, &key(), KIND), Err(Problem::DataChecksum));
    for length in [u64::MAX, u64::MAX - 7, 1 << 40, (1 << 20) + 1, 1 << 20] {
        assert!(decode(&[&length.to_le_bytes(), b"{}".as_slice()].concat(), &key(), KIND).is_err());
    }
    assert!(decode(&[], &key(), KIND).is_err());
}

#[test]
fn forged_headers_are_refused() {
    let forge = |change: &dyn Fn(&mut Value)| decode(&forged(&bytes(), change), &key(), KIND);
    assert_eq!(forge(&|_| ()), Ok(aux()));
    let header = |change: &dyn Fn(&mut Value)| match forge(change) {
        Err(Problem::Header(message)) => message,
        other => panic!("{other:?}"),
    };
    let listed = |list: Value| header(&|j| j["__metadata__"]["tensors"] = list.to_string().into());
    let all = || -> Vec<Value> {
        serde_json::from_str(parts(&bytes()).0["__metadata__"]["tensors"].as_str().unwrap()).unwrap()
    };
    // Other sizes of as many elements, another type of the same width, another name, another order in the file.
    let with = |index: usize, tensor: Value| {
        let mut list = all();
        list[index] = tensor;
        listed(list.into())
    };
    assert!(with(0, json!(["keys", "f16", [3, 1]])).contains("'keys'"));
    assert!(with(0, json!(["keys", "bf16", [1, 3]])).contains("'keys'"));
    assert!(with(0, json!(["key", "f16", [1, 3]])).contains("'key'"));
    assert!(with(4, json!(["keys", "bf16", [5]])).contains("twice"));
    assert!(with(4, json!(["__metadata__", "bf16", [5]])).contains("keeps for itself"));
    assert!(with(0, json!(["keys", "i64", [1, 3]])).contains("'tensors' has no meaning"));
    assert!(with(2, json!(["none", "bf16", [usize::MAX, 2, 0]])).contains("address space"));
    assert!(with(2, json!(["none", "bf16", [usize::MAX / 2]])).contains("address space"));
    listed(json!([["keys", "f16"]]));
    listed(json!({}));
    let mut reversed = all();
    reversed.swap(1, 3);
    listed(reversed.into());
    assert!(listed(all()[1..].into()).contains("4 tensors"));
    header(&|j| j["keys"]["dtype"] = "BF16".into());
    header(&|j| j["keys"]["shape"] = json!([3]));
    header(&|j| j["keys"]["data_offsets"] = json!([0, 6]));
    for name in ["format", "chunk", "kind", "created", "tensors", "data.blake3"] {
        let message = header(&|j| _ = j["__metadata__"].as_object_mut().unwrap().remove(name));
        assert!(message.contains(name), "{message}");
    }
    header(&|j| j["__metadata__"]["created"] = "yesterday".into());
    assert!(header(&|j| j["__metadata__"]["format"] = "refrain-chunk".into()).contains("refrain-summary"));
    assert_eq!(
        forge(&|j| j["__metadata__"]["version"] = "2".into()),
        Err(Problem::UnknownVersion("2".into()))
    );
    // A whole file of something else.
    assert_eq!(decode(&bytes(), &key(), "other"), Err(Problem::Identity("kind")));
    assert_eq!(decode(&bytes(), &numbered(1, 2).key(), KIND), Err(Problem::Identity("chunk")));
    assert!(decode(&chunk().to_bytes(), &key(), KIND).is_err() && Chunk::from_bytes(&bytes()).is_err());
}

#[test]
fn what_the_format_has_no_room_for_is_not_written() {
    let (dir, chunk) = (tempdir().unwrap(), chunk());
    let store = open(&dir);
    let many: Vec<String> = (0..20_000).map(|i| i.to_string()).collect();
    let many: Vec<(&str, Dtype, &[usize])> =
        many.iter().map(|name| (name.as_str(), Dtype::F16, [1].as_slice())).collect();
    for (kind, aux) in [("many", aux_of(&many)), ("meta", aux_of(&[("__metadata__", Dtype::F32, &[])]))] {
        assert!(matches!(encode(&key(), KIND, 0, &aux), Err(Problem::Header(_))));
        let outcome = store.put_aux_tensors(chunk.id(), kind, aux).unwrap();
        let PutOutcome::NotStored { error } = outcome else { panic!("{outcome:?}") };
        assert!(error.to_string().contains("cannot write"), "{error}");
    }
    assert!(files(dir.path()).is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn aux_tensors_survive_the_round_trip(
        tensors in prop::collection::btree_map(
            "\\PC{0,8}",
            (prop::sample::select(vec![Dtype::F32, Dtype::F16, Dtype::Bf16]), prop::collection::vec(0_usize..5, 0..4)),
            0..6,
        ),
        cut in 0.0..1.0_f64,
        seed in any::<u64>(),
    ) {
        let mut given: Vec<(&str, Dtype, &[usize])> =
            tensors.iter().map(|(name, (dtype, shape))| (name.as_str(), *dtype, shape.as_slice())).collect();
        let turn = (seed as usize).checked_rem(given.len()).unwrap_or(0);
        given.rotate_left(turn);
        let aux = aux_of(&given);
        let file = encode(&key(), KIND, 5, &aux).unwrap();
        prop_assert_eq!(decode(&file, &key(), KIND), Ok(aux.clone()));
        prop_assert!(decode(&file[..(cut * file.len() as f64) as usize], &key(), KIND).is_err());
        // No change of the file gives anybody anything else.
        let mut random = Random(seed | 1);
        for _ in 0..50 {
            let mut broken = file.clone();
            (0..=random.below(3)).for_each(|_| mutate(&mut broken, &bytes(), &mut random));
            if let Ok(read) = decode(&broken, &key(), KIND) {
                prop_assert!(read == aux || read == self::aux());
            }
        }
    }
}

#[test]
fn aux_tensors_survives_the_store() {
    let (dir, chunk) = (tempdir().unwrap(), chunk());
    let store = open(&dir);
    assert!(get(&store, &chunk, KIND).is_none() && !store.has_aux_tensors(chunk.id(), KIND));
    stored(store.put(chunk.clone()).unwrap());
    let bytes = stored(put(&store, &chunk, KIND));
    assert_eq!(bytes, fs::metadata(aux_path(&store, &chunk, KIND)).unwrap().len());
    assert!(matches!(put(&store, &chunk, KIND), PutOutcome::Known));
    stored(store.put_aux_tensors(chunk.id(), "other", AuxTensors::default()).unwrap());
    let again = open(&dir);
    assert!(again.has_aux_tensors(chunk.id(), KIND) && !again.has_aux_tensors(chunk.id(), "third"));
    // Read once, then from memory, until that is forgotten.
    for _ in 0..3 {
        assert_eq!(get(&again, &chunk, KIND), Some(aux()));
        assert_eq!(again.stats().bytes_read, aux().bytes() as u64);
    }
    fs::remove_file(aux_path(&again, &chunk, KIND)).unwrap();
    assert!(again.has_aux_tensors(chunk.id(), KIND) && get(&again, &chunk, KIND).is_some());
    again.forget_memory();
    assert!(!again.has_aux_tensors(chunk.id(), KIND) && get(&again, &chunk, KIND).is_none());
    assert_eq!(get(&again, &chunk, "other"), Some(AuxTensors::default()));
    assert!(again.take_repairs().is_empty() && again.stats().misses == 0);
}

#[test]
fn a_store_without_a_folder_keeps_aux_tensors_in_memory() {
    let (store, chunk) = (Store::in_memory(1 << 20), chunk());
    assert!(matches!(put(&store, &chunk, KIND), PutOutcome::MemoryOnly));
    store.put(chunk.clone()).unwrap();
    assert_eq!(get(&store, &chunk, KIND), Some(aux()));
    let info = info(&store);
    assert_eq!((info.aux_kinds, info.aux_bytes), (vec![KIND.to_owned()], 0));
    store.remove(&chunk.key()).unwrap();
    assert!(get(&store, &chunk, KIND).is_none() && !store.has_aux_tensors(chunk.id(), KIND));
}

/// The only chunk of a store.
fn info(store: &Store) -> ChunkInfo {
    let listing = store.list(Scope::All).unwrap();
    assert_eq!((listing.chunks.len(), listing.unusable.len()), (1, 0));
    assert_eq!(store.show(&listing.chunks[0].key).unwrap().info, listing.chunks[0]);
    listing.chunks[0].clone()
}

#[test]
fn aux_tensors_are_listed_and_go_with_their_chunk() {
    let (dir, chunk, other) = (tempdir().unwrap(), chunk(), numbered(7, 3));
    let store = open(&dir);
    stored(store.put(chunk.clone()).unwrap());
    let bytes = stored(put(&store, &chunk, "b")) + stored(put(&store, &chunk, "a"));
    put(&store, &other, "a");
    for store in [&store, &open(&dir)] {
        let info = info(store);
        assert_eq!((info.aux_kinds, info.aux_bytes), (vec!["a".to_owned(), "b".to_owned()], bytes));
    }
    assert_eq!(store.resolve(&chunk.key().to_string(), Scope::All).unwrap(), chunk.key());
    assert!(matches!(
        store.resolve(&other.key().to_string(), Scope::All),
        Err(StoreError::NoSuchChunk { .. })
    ));
    assert!(store.remove(&chunk.key()).unwrap());
    assert!(get(&store, &chunk, "a").is_none() && !store.has_aux_tensors(chunk.id(), "b"));
    // Those of others stay.
    assert_eq!(files(dir.path()), [aux_path(&store, &other, "a")]);
    assert!(get(&store, &other, "a").is_some());
}

/// A file with any fault is removed, counted and told, and the aux tensors can be stored again.
#[test]
fn broken_files_are_removed_and_replaced() {
    let (dir, chunk, good) = (tempdir().unwrap(), chunk(), bytes());
    stored(open(&dir).put(chunk.clone()).unwrap());
    let flip = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 4;
        bytes
    };
    let cases = [
        flip(3),
        flip(30),
        flip(good.len() - 1),
        good[..good.len() - 1].to_vec(),
        Vec::new(),
        vec![0; 4096],
        encode(&chunk.key(), "other", 0, &aux()).unwrap(),
        encode(&numbered(1, 3).key(), KIND, 0, &aux()).unwrap(),
        chunk.to_bytes(),
    ];
    for (index, bytes) in cases.into_iter().enumerate() {
        for by_verify in [false, true] {
            let store = open(&dir);
            let path = aux_path(&store, &chunk, KIND);
            fs::write(&path, &bytes).unwrap();
            let repairs = if by_verify {
                let report = store.verify(|_| ()).unwrap();
                assert_eq!((report.whole, report.aux_files, report.orphans.len()), (1, 0, 0));
                report.failed
            } else {
                assert!(get(&store, &chunk, KIND).is_none(), "case {index}");
                store.take_repairs()
            };
            assert_eq!((repairs.len(), &repairs[0].path), (1, &path), "case {index}");
            assert!(repairs[0].removed && !path.exists());
            assert_eq!((store.stats().removed, store.stats().unusable), (1, 0));
            stored(put(&store, &chunk, KIND));
            assert_eq!(get(&open(&dir), &chunk, KIND), Some(aux()));
        }
    }
    // A broken file is replaced without being asked for.
    let store = open(&dir);
    fs::write(aux_path(&store, &chunk, KIND), b"broken").unwrap();
    assert!(!store.has_aux_tensors(chunk.id(), KIND));
    stored(put(&store, &chunk, KIND));
    assert_eq!(get(&open(&dir), &chunk, KIND), Some(aux()));
}

#[test]
fn files_of_an_unknown_version_are_left_alone() {
    let (dir, chunk) = (tempdir().unwrap(), chunk());
    let store = open(&dir);
    let newer = forged(&bytes(), |json| json["__metadata__"]["version"] = "2".into());
    let path = aux_path(&store, &chunk, KIND);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, &newer).unwrap();
    age(&path);
    assert!(get(&store, &chunk, KIND).is_none() && !store.has_aux_tensors(chunk.id(), KIND));
    let report = store.verify(|_| ()).unwrap();
    assert_eq!(report.failed[0].problem, Problem::UnknownVersion("2".into()));
    assert_eq!((report.aux_files, report.orphans.len()), (0, 0));
    let repairs = store.take_repairs();
    assert!(repairs.len() == 2 && repairs.iter().all(|repair| !repair.removed));
    // The name says nothing of the version, so that writing would replace what a newer program wrote.
    let outcome = put(&store, &chunk, KIND);
    let PutOutcome::NotStored { error: StoreError::Unusable { problem, .. } } = outcome else { panic!() };
    assert_eq!(problem, Problem::UnknownVersion("2".into()));
    assert_eq!(get(&store, &chunk, KIND), Some(aux()));
    assert_eq!((fs::read(&path).unwrap(), store.stats().unusable), (newer, 2));
}

#[test]
fn verify_removes_aux_tensors_without_a_chunk() {
    let dir = tempdir().unwrap();
    let store = open(&dir);
    let chunks = [0, 1, 2, 3].map(|i| numbered(i, 3));
    for chunk in &chunks {
        stored(store.put(chunk.clone()).unwrap());
        stored(put(&store, chunk, "zz"));
        stored(put(&store, chunk, "aa"));
        age(&aux_path(&store, chunk, "aa"));
    }
    let mut steps = Vec::new();
    let report = store.verify(|progress| steps.push(progress)).unwrap();
    assert_eq!((report.whole, report.aux_files, report.orphans.len()), (4, 8, 0));
    let bytes = chunks[0].bytes() + 2 * aux().bytes();
    assert_eq!((report.bytes, report.foreign.len()), (4 * bytes as u64, 0));
    let last = steps.last().unwrap();
    assert_eq!((steps.len(), last.files, last.files_done, last.bytes), (13, 12, 12, last.bytes_done));
    assert_eq!(last.bytes, files(dir.path()).iter().map(|path| path.metadata().unwrap().len()).sum::<u64>());

    // One chunk is gone, and one is broken: the young aux tensors stay for now.
    fs::remove_file(path(&store, &chunks[1])).unwrap();
    fs::write(path(&store, &chunks[2]), b"broken").unwrap();
    let report = store.verify(|_| ()).unwrap();
    let mut expected = [1, 2].map(|i| aux_path(&store, &chunks[i], "aa"));
    expected.sort();
    assert_eq!((report.whole, report.aux_files, report.failed.len()), (2, 6, 1));
    assert_eq!(report.orphans, expected);
    assert!(expected.iter().all(|path| !path.exists()));
    let writer = File::options().write(true).open(aux_path(&store, &chunks[1], "zz")).unwrap();
    writer.lock().unwrap();
    [1, 2].iter().for_each(|i| age(&aux_path(&store, &chunks[*i], "zz")));
    let report = store.verify(|_| ()).unwrap();
    assert_eq!((report.aux_files, report.orphans), (5, vec![aux_path(&store, &chunks[2], "zz")]));
}

/// A write may fail at any byte: nothing of it is left, and the aux tensors serves from memory.
#[test]
fn a_full_disk_leaves_nothing_behind() {
    let (dir, chunk) = (tempdir().unwrap(), chunk());
    let len = stored(put(&open(&dir), &chunk, KIND));
    fs::remove_file(aux_path(&open(&dir), &chunk, KIND)).unwrap();
    for room in [0, 1, 8, 9, len - aux().bytes() as u64, len - 1] {
        let store = open(&dir);
        store.disk().room.store(room, Relaxed);
        let outcome = put(&store, &chunk, KIND);
        let PutOutcome::NotStored { error } = outcome else { panic!("{outcome:?}") };
        assert!(error.to_string().contains("cannot write") && error.to_string().contains(KIND), "{error}");
        assert_eq!(get(&store, &chunk, KIND), Some(aux()));
        assert_eq!((store.stats().not_stored, store.stats().bytes_written), (1, 0));
        assert!(files(dir.path()).is_empty() && get(&open(&dir), &chunk, KIND).is_none());
    }
    let store = open(&dir);
    store.disk().room.store(len, Relaxed);
    assert_eq!(stored(put(&store, &chunk, KIND)), len);
}

/// Aux tensors take a sixteenth of the memory, however many there are.
#[test]
fn memory_stays_within_its_bound() {
    let dir = tempdir().unwrap();
    let large = || aux_of(&[("all", Dtype::F32, &[1000])]);
    // Room for about four of them; none at all.
    for (budget, most) in [(16 * 20_000, 4), (16 * 3000, 0)] {
        let store = Store::open(dir.path().join(budget.to_string()), budget).unwrap();
        let chunks: Vec<Chunk> = (0..20).map(|i| numbered(i, 2)).collect();
        for chunk in &chunks {
            stored(store.put_aux_tensors(chunk.id(), KIND, large()).unwrap());
        }
        for chunk in &chunks {
            assert_eq!(get(&store, chunk, KIND), Some(large()));
        }
        let read = store.stats().bytes_read / 4000;
        assert!((20 - most..=20).contains(&read), "{read} of 20 read from disk");
        assert_eq!(store.stats().memory_chunks, 0);
    }
}

#[test]
fn names_that_are_no_kinds_are_refused() {
    let (dir, chunk) = (tempdir().unwrap(), chunk());
    let store = open(&dir);
    let longest = "k".repeat(40);
    stored(put(&store, &chunk, &longest));
    assert!(get(&store, &chunk, &longest).is_some());
    for bad in ["", "A", "a.b", "a/b", "..", "ä", " ", &"k".repeat(41)] {
        assert!(catch_unwind(AssertUnwindSafe(|| put(&store, &chunk, bad))).is_err(), "{bad}");
        assert!(catch_unwind(AssertUnwindSafe(|| get(&store, &chunk, bad))).is_err(), "{bad}");
        assert!(catch_unwind(AssertUnwindSafe(|| store.has_aux_tensors(chunk.id(), bad))).is_err(), "{bad}");
    }
    // Files that are called alike are not the store's.
    let (shard, key) = (path(&store, &chunk).parent().unwrap().to_owned(), chunk.key().to_string());
    let foreign = [
        format!("{key}.summary"),
        format!("{key}..summary"),
        format!("{key}.Kind.summary"),
        format!("{key}.a.b.summary"),
        format!("{}.kind.summary", key.to_uppercase()),
        format!("{}.kind.summary", &key[1..]),
        format!("{}.kind.summary", numbered(1, 1).key()),
    ];
    foreign.iter().for_each(|name| fs::write(shard.join(name), b"mine").unwrap());
    let report = store.verify(|_| ()).unwrap();
    assert_eq!((report.foreign.len(), report.aux_files, report.failed.len()), (7, 1, 0));
    store.remove(&chunk.key()).unwrap();
    assert_eq!(files(dir.path()).len(), 7);
}

#[test]
fn threads_share_aux_tensors() {
    let dir: TempDir = tempdir().unwrap();
    let stores = [0, 1 << 20].map(|memory| Store::open(dir.path(), memory).unwrap());
    let chunks: Vec<Chunk> = (0..4).map(|i| numbered(i, 3)).collect();
    std::thread::scope(|scope| {
        for (worker, store) in stores.iter().cycle().take(4).enumerate() {
            let chunks = &chunks;
            scope.spawn(move || {
                let mut random = Random(worker as u64 + 1);
                for _ in 0..60 {
                    let chunk = &chunks[random.below(chunks.len())];
                    match get(store, chunk, KIND) {
                        Some(read) => assert_eq!(read, aux()),
                        None => assert!(!matches!(put(store, chunk, KIND), PutOutcome::NotStored { .. })),
                    }
                    if random.below(8) == 0 {
                        store.remove(&chunk.key()).unwrap();
                    }
                    if random.below(16) == 0 {
                        store.verify(|_| ()).unwrap();
                    }
                }
            });
        }
    });
    assert!(stores.iter().all(|store| store.take_repairs().is_empty()));
    let report = stores[0].verify(|_| ()).unwrap();
    assert_eq!(files(dir.path()).len() as u64, report.aux_files);
}
