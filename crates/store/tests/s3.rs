//! Chunks shared through a real S3 server (moto, from the Python package index), also through a network that delays, refuses
//! and breaks connections. Skipped, saying so, where moto is not installed.
#![cfg(feature = "remote")]

#[path = "../../../tests/common/moto.rs"]
mod moto;

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use refrain_kernels::{Buffer, Dtype};
use refrain_kv::AuxTensors;
use refrain_store::{BosPolicy, Chunk, ChunkId, KvQuantization, Layer, Limits, RemoteOptions, Store};
use tempfile::{TempDir, tempdir};

use self::moto::{Moto, settings};

const BUCKET: &str = "chunks";

/// A server, and the network before it.
struct S3 {
    moto: Moto,
    network: Arc<Network>,
}

#[derive(Debug, Default)]
struct Network {
    port: AtomicU32,
    server: AtomicU32,
    /// Milliseconds before anything is passed on.
    delay: AtomicU64,
    /// Of a hundred connections, so many are answered with 500, broken half-way, or never answered.
    refuse: AtomicU64,
    cut: AtomicU64,
    hang: AtomicU64,
    /// Bytes of an answer after which the rest waits until this is 0 again; 0 passes all.
    hold: AtomicU64,
    /// Whether a client that wants to write is told that it may not.
    read_only: AtomicBool,
    /// Whether a client that asks for an object's head is told that there is none.
    unseen: AtomicBool,
    count: AtomicU64,
}

#[test]
fn a_test_that_must_not_be_skipped_fails_without_what_it_needs() {
    let mut test = std::process::Command::new(std::env::current_exe().unwrap());
    test.args(["--exact", "what_one_machine_stores_another_uses"]);
    let ran = test.env("REFRAIN_TEST_ALL", "c++,moto").env("REFRAIN_PYTHON", "/bin/false").output().unwrap();
    let said = String::from_utf8_lossy(&ran.stdout) + String::from_utf8_lossy(&ran.stderr);
    assert!(!ran.status.success() && said.contains("REFRAIN_TEST_ALL names moto"), "{said}");
}

/// A server with an empty bucket; none where moto is not installed.
fn s3() -> Option<S3> {
    let moto = Moto::start(BUCKET)?;
    let network = Arc::new(Network::default());
    network.server.store(moto.port.into(), Relaxed);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    network.port.store(listener.local_addr().unwrap().port().into(), Relaxed);
    let passing = network.clone();
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let network = passing.clone();
            thread::spawn(move || network.pass(client));
        }
    });
    Some(S3 { moto, network })
}

impl Network {
    /// What is to become of the next connection, by turns rather than by chance: a share of any hundred is exact.
    fn turn(&self) -> u64 {
        self.count.fetch_add(1, Relaxed).wrapping_mul(37) % 100
    }

    fn pass(&self, mut client: TcpStream) {
        thread::sleep(Duration::from_millis(self.delay.load(Relaxed)));
        let (turn, refuse) = (self.turn(), self.refuse.load(Relaxed));
        let (cut, hang) = (refuse + self.cut.load(Relaxed), self.hang.load(Relaxed));
        if turn < refuse {
            let mut request = [0; 4096];
            let _ = client.read(&mut request);
            let answer =
                b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
            let _ = client.write_all(answer);
            return;
        }
        if turn >= 100 - hang {
            thread::sleep(Duration::from_secs(30));
            return;
        }
        let server = TcpStream::connect(("127.0.0.1", self.server.load(Relaxed) as u16)).unwrap();
        let (mut up, mut down) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        let mut to_server = server.try_clone().unwrap();
        let mut answered = client.try_clone().unwrap();
        let (read_only, unseen) = (self.read_only.load(Relaxed), self.unseen.load(Relaxed));
        thread::spawn(move || {
            let mut request = [0; 1 << 14];
            while let Ok(read) = up.read(&mut request)
                && read > 0
            {
                let status = match &request[..read] {
                    [b'P', b'U', b'T', b' ', ..] if read_only => Some("403 Forbidden"),
                    [b'H', b'E', b'A', b'D', b' ', ..] if unseen => Some("404 Not Found"),
                    _ => None,
                };
                if let Some(status) = status {
                    let answer =
                        format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
                    let _ = answered.write_all(answer.as_bytes());
                    break;
                }
                if to_server.write_all(&request[..read]).is_err() {
                    break;
                }
            }
            let _ = to_server.shutdown(Shutdown::Write);
        });
        let most = if turn < cut { 700 } else { u64::MAX };
        let hold = self.hold.load(Relaxed);
        if hold > 0 {
            let _ = std::io::copy(&mut Read::take(&mut down, hold), &mut client);
            while self.hold.load(Relaxed) > 0 {
                thread::sleep(Duration::from_millis(5));
            }
        }
        let _ = std::io::copy(&mut Read::take(&mut down, most), &mut client);
        let _ = client.shutdown(Shutdown::Both);
        let _ = server.shutdown(Shutdown::Both);
    }
}

impl S3 {
    /// Names of all objects.
    fn objects(&self) -> BTreeSet<String> {
        self.moto.names().into_iter().collect()
    }

    fn options(&self) -> RemoteOptions {
        let mut options = RemoteOptions::new(format!("s3://{BUCKET}/library"));
        options.options = settings(self.network.port.load(Relaxed) as u16);
        options.timeout = Duration::from_secs(1);
        options
    }

    fn machine(&self) -> (TempDir, Store) {
        let folder = tempdir().unwrap();
        let store = Store::open_shared(folder.path(), Limits::memory(64 << 20), &self.options()).unwrap();
        (folder, store)
    }
}

fn chunk(n: u32) -> Chunk {
    labelled(n, &format!("chunk {n}"))
}

fn labelled(n: u32, label: &str) -> Chunk {
    let id = ChunkId {
        model: [7; 32],
        dtype: Dtype::F16,
        quantization: KvQuantization::Exact,
        layers: 2,
        kv_heads: 2,
        head_dim: 8,
        bos: BosPolicy::None,
        prefix: None,
        numerics: None,
        namespace: String::new(),
        tokens: (0..100).map(|t| n * 1000 + t).collect(),
    };
    let kv = |seed: u32| {
        let mut buffer = Buffer::zeros(Dtype::F16, 100 * 16);
        let values: Vec<f32> = (0..1600_u32).map(|i| (i * 31 + seed * 17 + n) as f32 % 97.0).collect();
        buffer.write_f32(0, &values);
        buffer
    };
    let layer = |k, v| Layer::exact(kv(k).as_slice(), kv(v).as_slice());
    Chunk::new(id, label, vec![layer(1, 2), layer(3, 4)]).unwrap()
}

fn aux(n: u32) -> AuxTensors {
    let mut aux = AuxTensors::default();
    aux.push("t".to_owned(), vec![2], Buffer::F32(vec![n as f32, 1.0]));
    aux
}

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < Duration::from_secs(60), "{what}");
        thread::sleep(Duration::from_millis(20));
    }
}

fn sent(store: &Store) {
    wait_for("all is sent", || store.remote_stats().is_some_and(|stats| stats.pending == 0));
}

#[test]
fn what_one_machine_stores_another_uses() {
    let Some(s3) = s3() else { return };
    let (_a, first) = s3.machine();
    for n in 1..=5 {
        first.put(chunk(n)).unwrap();
    }
    first.put_aux_tensors(chunk(2).id(), "test", aux(2)).unwrap();
    sent(&first);
    assert_eq!(s3.objects().len(), 6);
    let (folder, second) = s3.machine();
    let ids: Vec<_> = (1..=6).map(|n| chunk(n).id().clone()).collect();
    let wanted: Vec<_> = ids.iter().map(Into::into).collect();
    assert_eq!(second.prefetch(&wanted, &["test"], true).chunks, 5);
    for n in 1..=5 {
        let found = second.get(chunk(n).id()).unwrap().unwrap();
        assert_eq!(found.to_bytes(), first.get(chunk(n).id()).unwrap().unwrap().to_bytes());
    }
    assert!(second.get(chunk(6).id()).unwrap().is_none());
    assert_eq!(*second.aux_tensors(chunk(2).id(), "test").unwrap().unwrap(), aux(2));
    let stats = second.remote_stats().unwrap();
    assert_eq!((stats.fetched, stats.pending, stats.sent, stats.failures), (6, 0, 0, 0), "{stats:?}");
    // What was brought is on disk: no network is needed any more.
    drop(second);
    let alone = Store::open(folder.path(), 0).unwrap();
    assert!((1..=5).all(|n| alone.get(chunk(n).id()).unwrap().is_some()));
}

#[test]
fn a_broken_object_is_never_used_and_replaced() {
    let Some(s3) = s3() else { return };
    s3.network.hang.store(100, Relaxed);
    let (folder, first) = s3.machine();
    first.put(chunk(1)).unwrap();
    first.put(chunk(2)).unwrap();
    drop(first);
    // The file of one text under the name of another, as an accident may leave it, and so it is shared.
    let key = chunk(1).key().to_string();
    let name = format!("{}/{key}.safetensors", &key[..2]);
    std::fs::write(folder.path().join(&name), chunk(2).to_bytes()).unwrap();
    s3.network.hang.store(0, Relaxed);
    let first = Store::open_shared(folder.path(), Limits::memory(0), &s3.options()).unwrap();
    sent(&first);
    let objects = s3.objects();
    assert!(
        objects.len() == 2 && objects.contains(&format!("library/{name}")),
        "{name} {objects:?} {:?}",
        first.remote_stats()
    );
    drop((first, folder));
    let (_folder, second) = s3.machine();
    let found = (1..=2).filter(|n| second.get(chunk(*n).id()).unwrap().is_some()).count();
    assert_eq!(found, 1);
    wait_for("it is found broken", || second.remote_stats().unwrap().broken == 1);
    assert_eq!(s3.objects().len(), 2, "a request deletes nothing");
    for n in 1..=2 {
        second.put(chunk(n)).unwrap();
    }
    sent(&second);
    let stats = second.remote_stats().unwrap();
    assert_eq!((stats.replaced, stats.sent, s3.objects().len()), (1, 1, 2), "{stats:?}");
    let (_folder, third) = s3.machine();
    assert!((1..=2).all(|n| third.get(chunk(n).id()).unwrap().is_some()));
}

/// The server refuses to write over what another machine has brought between the question whether it is there and the request.
#[test]
fn an_object_of_another_machine_stays() {
    let Some(s3) = s3() else { return };
    let (_a, first) = s3.machine();
    first.put(chunk(1)).unwrap();
    sent(&first);
    s3.network.unseen.store(true, Relaxed);
    let (folder, second) = s3.machine();
    second.put(labelled(1, "another machine")).unwrap();
    wait_for("it is refused", || second.remote_stats().unwrap().stuck.is_some());
    let stats = second.remote_stats().unwrap();
    assert_eq!((stats.sent, stats.pending, stats.down), (0, 1, None));
    drop(second);
    s3.network.unseen.store(false, Relaxed);
    let second = Store::open_shared(folder.path(), Limits::memory(0), &s3.options()).unwrap();
    sent(&second);
    let stats = second.remote_stats().unwrap();
    assert!(stats.sent == 0 && stats.already_there > 0, "{stats:?}");
    let (_c, third) = s3.machine();
    assert_eq!(third.get(chunk(1).id()).unwrap().unwrap().label(), "chunk 1");
}

/// An object store that cannot be asked by condition, as its user says, is used without.
#[test]
fn conditional_requests_can_be_turned_off() {
    let Some(s3) = s3() else { return };
    let folder = tempdir().unwrap();
    let mut options = s3.options();
    options.options.push(("AWS_CONDITIONAL_PUT".to_owned(), "disabled".to_owned()));
    let store = Store::open_shared(folder.path(), Limits::memory(0), &options).unwrap();
    store.put(chunk(1)).unwrap();
    sent(&store);
    let stats = store.remote_stats().unwrap();
    assert_eq!((stats.sent, stats.failures, s3.objects().len()), (1, 0, 1), "{stats:?}");
}

/// Delays, errors and broken connections: whatever arrives is whole, and in the end all arrives.
#[test]
fn a_bad_network_breaks_nothing() {
    let Some(s3) = s3() else { return };
    s3.network.delay.store(30, Relaxed);
    s3.network.refuse.store(20, Relaxed);
    s3.network.cut.store(20, Relaxed);
    let (_a, first) = s3.machine();
    for n in 1..=8 {
        first.put(chunk(n)).unwrap();
    }
    sent(&first);
    assert_eq!(s3.objects().len(), 8);
    let (_b, second) = s3.machine();
    for n in 1..=8 {
        wait_for("it is brought", || {
            let found = second.get(chunk(n).id()).unwrap();
            if let Some(found) = &found {
                assert_eq!(found.to_bytes(), first.get(chunk(n).id()).unwrap().unwrap().to_bytes());
            }
            found.is_some()
        });
    }
    assert_eq!(second.remote_stats().unwrap().broken, 0, "what is cut off is not taken for broken");
}

/// A server that never answers costs one wait, and what was put meanwhile is sent when it is back, also by another process.
#[test]
fn an_absent_server_slows_nothing_and_loses_nothing() {
    let Some(s3) = s3() else { return };
    s3.network.hang.store(100, Relaxed);
    let (folder, store) = s3.machine();
    let began = Instant::now();
    for n in 1..=20 {
        assert!(store.get(chunk(n).id()).unwrap().is_none());
        store.put(chunk(n)).unwrap();
        assert!(store.get(chunk(n).id()).unwrap().is_some());
    }
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
    let stats = store.remote_stats().unwrap();
    assert!(stats.down.is_some() && stats.skipped > 10 && stats.pending == 20, "{stats:?}");
    drop(store);
    assert_eq!(s3.objects().len(), 0);
    s3.network.hang.store(0, Relaxed);
    let store = Store::open_shared(folder.path(), Limits::memory(0), &s3.options()).unwrap();
    sent(&store);
    assert_eq!(s3.objects().len(), 20);
}

/// A layer is used while later ones still travel; another request for the same chunk meanwhile gets it from the same download, and
/// what stops half-way is as if it were not there, and is fetched whole the next time.
#[test]
fn layers_are_used_while_later_ones_still_travel() {
    let Some(s3) = s3() else { return };
    let (_a, first) = s3.machine();
    let (chunk, bytes) = (chunk(1), chunk(1).to_bytes().len() as u64);
    first.put(chunk.clone()).unwrap();
    sent(&first);
    let (folder, second) = s3.machine();
    // Nearly all of the last layer is missing: of what is held back the answer's own header is a part.
    s3.network.hold.store(bytes - 4000, Relaxed);
    let reader = second.reader(chunk.id()).unwrap().unwrap();
    let other = second.reader(chunk.id()).unwrap().unwrap();
    for reader in [&reader, &other] {
        assert_eq!(reader.layer(0).unwrap().k().as_bytes(), chunk.layer(0).k().as_bytes());
        let some = reader.tokens(0, &[5..7, 99..100]).unwrap();
        let held = refrain_store::ChunkReader::from(chunk.clone());
        assert_eq!(some.v().as_bytes(), held.tokens(0, &[5..7, 99..100]).unwrap().v().as_bytes());
    }
    assert!(!second.contains(chunk.id()) && !reader.would_be_kept() && reader.bytes_read() == 0);
    thread::scope(|scope| {
        let last = scope.spawn(|| reader.layer(1).unwrap().v().as_bytes().to_vec());
        s3.network.hold.store(0, Relaxed);
        assert_eq!(last.join().unwrap(), chunk.layer(1).v().as_bytes());
    });
    assert_eq!(other.chunk().unwrap().to_bytes(), chunk.to_bytes());
    wait_for("it is stored", || second.contains(chunk.id()));
    assert_eq!(second.remote_stats().unwrap().fetched, 1);
    drop((reader, other, second));
    assert!(Store::open(folder.path(), 0).unwrap().get(chunk.id()).unwrap().is_some());

    let (_c, third) = s3.machine();
    s3.network.hold.store(bytes - 4000, Relaxed);
    let reader = third.reader(chunk.id()).unwrap().unwrap();
    assert!(reader.layer(0).is_some());
    let began = Instant::now();
    assert!(reader.layer(1).is_none() && reader.chunk().is_none() && reader.layer(0).is_some());
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
    assert_eq!((third.stats().removed, third.stats().unusable), (0, 0));
    assert!(third.get(chunk.id()).unwrap().is_none());
    s3.network.hold.store(0, Relaxed);
    wait_for("it is fetched again", || third.get(chunk.id()).unwrap().is_some());
    assert_eq!(third.remote_stats().unwrap().broken, 0);
}

/// A library that may only be read is read, says what is in the way of writing, and takes what was put when it may be written.
#[test]
fn a_read_only_library_is_read_and_what_is_put_waits() {
    let Some(s3) = s3() else { return };
    let (_a, first) = s3.machine();
    first.put(chunk(1)).unwrap();
    sent(&first);
    s3.network.read_only.store(true, Relaxed);
    let (folder, second) = s3.machine();
    second.put(chunk(2)).unwrap();
    wait_for("it is refused", || second.remote_stats().unwrap().stuck.is_some());
    assert!(second.get(chunk(1).id()).unwrap().is_some());
    wait_for("it is counted", || second.remote_stats().unwrap().fetched == 1);
    let stats = second.remote_stats().unwrap();
    assert_eq!((stats.pending, stats.down), (1, None));
    assert_eq!(s3.objects().len(), 1);
    drop(second);
    s3.network.read_only.store(false, Relaxed);
    let second = Store::open_shared(folder.path(), Limits::memory(0), &s3.options()).unwrap();
    sent(&second);
    assert_eq!((s3.objects().len(), second.remote_stats().unwrap().stuck), (2, None));
}
