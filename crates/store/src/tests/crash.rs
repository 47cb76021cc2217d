//! Processes are killed at any moment while they store, evict, pin, remove and tidy up.
//!
//! A child is this test program itself, run with [`FOLDER`] set. It says on standard output what it has been promised.
//! `REFRAIN_CRASHES` is how many times; 50 if it is not set.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, SystemTime};

use refrain_kernels::Buffer;
use refrain_kv::AuxTensors;
use tempfile::tempdir;

use super::limits::{age, derived_tables_agree};
use super::store::files;
use super::{Random, content, numbered};
use crate::folder::{FolderEntry, classify};
use crate::{ChunkKey, Limits, PutOutcome, Store};

const FOLDER: &str = "REFRAIN_CRASH_FOLDER";
const SEED: &str = "REFRAIN_CRASH_SEED";
const DISK: &str = "REFRAIN_CRASH_DISK";
/// Different chunks.
const CHUNKS: usize = 24;
/// Tokens of each.
const TOKENS: usize = 300;

fn chunk(n: usize) -> crate::Chunk {
    numbered(n as u32, TOKENS)
}

fn aux(n: usize) -> AuxTensors {
    let mut aux = AuxTensors::default();
    aux.push("t".to_owned(), vec![500], Buffer::F32(vec![n as f32; 500]));
    aux
}

fn open(folder: &Path, disk: u64) -> Store {
    Store::open(folder, Limits { disk, ..Limits::memory(0) }).unwrap()
}

/// Work of a child until it is killed. Its word is true from then on, until it says otherwise: before it takes
/// something back, and after it has been promised something.
#[test]
#[ignore = "run by the test of crashes, as a process of its own"]
fn child() {
    let Ok(folder) = env::var(FOLDER) else { return };
    let number = |name| env::var(name).unwrap().parse::<u64>().unwrap();
    let (store, mut random) = (open(Path::new(&folder), number(DISK)), Random(number(SEED)));
    let mut out = std::io::stdout();
    let mut say = |what: &str, n: usize| {
        writeln!(out, "{what} {n}").unwrap();
        out.flush().unwrap();
    };
    say("began", 0);
    loop {
        let n = random.below(CHUNKS);
        let chunk = chunk(n);
        match random.below(12) {
            0..=5 => match store.put(chunk).unwrap() {
                PutOutcome::NotStored { error } => panic!("{error}"),
                _ => say("stored", n),
            },
            6 => drop(store.put_aux_tensors(chunk.id(), "test", aux(n)).unwrap()),
            7 => drop(store.get(chunk.id()).unwrap()),
            // A quarter of them may be pinned: there is room for these.
            8 if n < CHUNKS / 4 => {
                if store.pin(&[chunk.key()], true).unwrap() == 1 {
                    say("pinned", n);
                }
            }
            9 => {
                say("removing", n);
                store.remove(&chunk.key()).unwrap();
            }
            10 => drop(store.gc().unwrap()),
            _ => store.flush(),
        }
    }
}

fn start(folder: &Path, disk: u64, seed: u64) -> Child {
    Command::new(env::current_exe().unwrap())
        .args(["--exact", "tests::crash::child", "--ignored", "--nocapture", "--test-threads=1"])
        .env(FOLDER, folder)
        .env(DISK, disk.to_string())
        .env(SEED, seed.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Kills children after a while, and returns what they said in order.
fn kill(children: Vec<Child>, after: Duration) -> Vec<Vec<(String, usize)>> {
    let readers: Vec<_> = children
        .into_iter()
        .map(|mut child| {
            let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
            // It is killed some time after it began, not while it starts.
            while !lines.next().expect("the child begins").unwrap().ends_with("began 0") {}
            (child, lines)
        })
        .collect();
    std::thread::sleep(after);
    let said = readers.into_iter().map(|(mut child, lines)| {
        assert!(child.try_wait().unwrap().is_none(), "it ended by itself: {:?}", {
            let mut text = String::new();
            std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut text).unwrap();
            text
        });
        child.kill().unwrap();
        child.wait().unwrap();
        let parse = |line: String| {
            let (what, n) = line.split_once(' ')?;
            Some((what.to_owned(), n.parse().ok()?))
        };
        lines.filter_map(|line| parse(line.ok()?)).collect()
    });
    said.collect()
}

#[test]
fn nothing_is_wrong_or_lost_whenever_a_process_is_killed() {
    let crashes = env::var("REFRAIN_CRASHES").map_or(50, |crashes| crashes.parse().unwrap());
    let mut random = Random(0x1234_5678_9abc_def1);
    let size = chunk(1).to_bytes().len() as u64;
    let numbers: BTreeMap<ChunkKey, usize> = (0..CHUNKS).map(|n| (chunk(n).key(), n)).collect();
    let (mut killed, mut evicted) = (0, false);
    // A busy machine stores little before a kill: it goes on until the bound was reached.
    while killed < crashes || crashes >= 20 && !evicted && killed < 20 * crashes {
        // A folder lives through some crashes: without a bound, or with one that is reached again and again.
        let dir = tempdir().unwrap();
        let disk = if random.below(2) == 0 { u64::MAX } else { size * CHUNKS as u64 / 2 };
        let (mut committed, mut pinned) = (BTreeSet::new(), BTreeSet::new());
        for _ in 0..5 {
            let children = 1 + random.below(2);
            let started = (0..children).map(|_| start(dir.path(), disk, random.next() | 1)).collect();
            let said = kill(started, Duration::from_micros(random.below(60_000) as u64));
            killed += 1;
            // Words of two at once have no order: a chunk that one of them takes back is promised no more.
            let taken_back: BTreeSet<usize> =
                said.iter().flatten().filter(|(what, _)| what == "removing").map(|(_, n)| *n).collect();
            for said in &said {
                for (what, n) in said {
                    match what.as_str() {
                        "stored" => _ = committed.insert(*n),
                        "pinned" => _ = pinned.insert(*n),
                        _ => _ = (committed.remove(n), pinned.remove(n)),
                    }
                }
            }
            if children > 1 {
                committed.retain(|n| !taken_back.contains(n));
                pinned.retain(|n| !taken_back.contains(n));
            }
            check(dir.path(), disk, &numbers, &committed, &pinned);
            evicted |= disk < u64::MAX && committed.len() * size as usize > disk as usize;
        }
    }
    assert!(crashes < 20 || evicted, "the bound was never reached");
}

fn check(
    folder: &Path,
    disk: u64,
    numbers: &BTreeMap<ChunkKey, usize>,
    committed: &BTreeSet<usize>,
    pinned: &BTreeSet<usize>,
) {
    let store = open(folder, disk);
    let report = store.verify(|_| ()).unwrap();
    assert!(report.failed.is_empty() && report.foreign.is_empty(), "{report:?}");
    assert_eq!(report.index_problem, None);
    assert_eq!(store.take_set_aside(), None, "the index survives");
    let there: BTreeSet<usize> = store.disk().keys("").unwrap().iter().map(|key| numbers[key]).collect();
    for n in &there {
        assert_eq!(content(&store.get(chunk(*n).id()).unwrap().unwrap()).3, content(&chunk(*n)).3);
    }
    let promised = if disk == u64::MAX { committed } else { pinned };
    assert!(promised.is_subset(&there), "{promised:?} were promised, {there:?} are there");
    let size =
        |found: &[std::path::PathBuf]| found.iter().map(|f| fs::metadata(f).unwrap().len()).sum::<u64>();
    let is_temporary = |path: &Path| matches!(classify(folder, path.to_owned()), FolderEntry::Temporary(_));
    let (temporary, whole): (Vec<_>, Vec<_>) = files(folder).into_iter().partition(|path| is_temporary(path));
    assert!(size(&whole) <= disk, "{} of {disk}", size(&whole));
    // A minute later nothing is left of the writer, and the index says what there is.
    let minute_ago = SystemTime::now() - Duration::from_secs(120);
    for file in temporary.iter().chain(&whole) {
        File::options().write(true).open(file).unwrap().set_modified(minute_ago).unwrap();
    }
    age(folder);
    derived_tables_agree(folder);
    let report = store.gc().unwrap();
    assert_eq!(report.stale.len(), temporary.len());
    let left = files(folder);
    assert_eq!(report.chunks as usize, there.len());
    assert_eq!(report.bytes, size(&left));
    // Nothing but chunks, and aux tensors of these.
    let keys: BTreeSet<_> = there.iter().map(|n| chunk(*n).key()).collect();
    assert!(left.iter().all(|f| classify(folder, f.clone()).key().is_some_and(|key| keys.contains(key))));
}
