//! Workers on a real S3 server (moto, from the Python package index) behind a network that delays, refuses and breaks connections. Skipped,
//! saying so, where moto is not installed.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use crate::answers::{comparable, question};
use crate::harness::{Client, PATIENCE, Plane, Workers, tiny_model};

const BUCKET: &str = "chunks";
/// Distinct questions that are asked.
const QUESTIONS: usize = 16;
/// Distinct documents of theirs, of one chunk each.
const DOCUMENTS: usize = 8;

/// What the network does to connections.
#[derive(Debug, Default)]
struct Network {
    /// Milliseconds before anything is passed on.
    delay: AtomicU64,
    /// Of a hundred connections, so many are answered with 500, broken off in the answer, or closed at once.
    failing: AtomicU64,
    cut: AtomicU64,
    closed: AtomicU64,
    connections: AtomicU64,
    /// Connections that were not passed on whole.
    spoiled: AtomicU64,
}

/// An S3 server, ended when this is dropped, and the network before it.
struct S3 {
    server: Child,
    server_port: u16,
    port: u16,
    network: Arc<Network>,
}

impl Drop for S3 {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl S3 {
    /// A server with an empty bucket; none where moto is not installed.
    fn start() -> Option<S3> {
        let python = std::env::var("REFRAIN_PYTHON").unwrap_or_else(|_| "python3".to_owned());
        let has_moto =
            Command::new(&python).args(["-c", "import moto.server"]).stderr(Stdio::null()).status();
        if !has_moto.is_ok_and(|status| status.success()) {
            eprintln!("skipped: {python} has no moto (pip install 'moto[server]', or REFRAIN_PYTHON)");
            return None;
        }
        let server_port = free_port();
        let mut server = Command::new(&python);
        server.args(["-m", "moto.server", "-H", "127.0.0.1", "-p", &server_port.to_string()]);
        let server = server.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (port, network) = (listener.local_addr().unwrap().port(), Arc::new(Network::default()));
        let s3 = S3 { server, server_port, port, network: network.clone() };
        let began = Instant::now();
        while TcpStream::connect(("127.0.0.1", server_port)).is_err() {
            assert!(began.elapsed() < PATIENCE * 2, "moto does not start");
            thread::sleep(Duration::from_millis(50));
        }
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let network = network.clone();
                thread::spawn(move || network.pass(client, server_port));
            }
        });
        s3.request("PUT", &format!("/{BUCKET}"));
        Some(s3)
    }

    /// A request past the network: moto verifies no signature.
    fn request(&self, method: &str, path: &str) -> String {
        let mut server = TcpStream::connect(("127.0.0.1", self.server_port)).unwrap();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        );
        server.write_all(head.as_bytes()).unwrap();
        let mut answer = String::new();
        server.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 2"), "{answer}");
        answer
    }

    /// Chunks in the bucket.
    fn chunks(&self) -> usize {
        self.request("GET", &format!("/{BUCKET}?list-type=2")).matches(".safetensors</Key>").count()
    }

    /// The URL of a library behind a port, and the variables with which it is found.
    fn library(port: u16) -> (String, Vec<(&'static str, String)>) {
        let variables = [
            ("AWS_ENDPOINT", format!("http://127.0.0.1:{port}")),
            ("AWS_ALLOW_HTTP", "true".to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("AWS_ACCESS_KEY_ID", "key".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "secret".to_owned()),
        ];
        (format!("s3://{BUCKET}/library"), variables.into())
    }
}

impl Network {
    fn pass(&self, mut client: TcpStream, server_port: u16) {
        // By turns rather than by chance: a share of any hundred is exact.
        let turn = self.connections.fetch_add(1, Relaxed).wrapping_mul(37) % 100;
        thread::sleep(Duration::from_millis(self.delay.load(Relaxed)));
        let closed = self.closed.load(Relaxed);
        let failing = closed + self.failing.load(Relaxed);
        let cut = failing + self.cut.load(Relaxed);
        self.spoiled.fetch_add(u64::from(turn < cut), Relaxed);
        if turn < closed {
            return;
        }
        if turn < failing {
            let _ = client.read(&mut [0; 4096]);
            let answer =
                b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
            let _ = client.write_all(answer);
            return;
        }
        let server = TcpStream::connect(("127.0.0.1", server_port)).unwrap();
        let (mut up, mut to_server) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        thread::spawn(move || {
            let _ = std::io::copy(&mut up, &mut to_server);
            let _ = to_server.shutdown(Shutdown::Write);
        });
        let most = if turn < cut { 700 } else { u64::MAX };
        let _ = std::io::copy(&mut Read::take(&server, most), &mut client);
        let _ = client.shutdown(Shutdown::Both);
        let _ = server.shutdown(Shutdown::Both);
    }

    /// Sets milliseconds of delay, and shares of failing, cut and closed connections in a hundred.
    fn set(&self, [delay, failing, cut, closed]: [u64; 4]) {
        self.delay.store(delay, Relaxed);
        self.failing.store(failing, Relaxed);
        self.cut.store(cut, Relaxed);
        self.closed.store(closed, Relaxed);
        self.connections.store(0, Relaxed);
        self.spoiled.store(0, Relaxed);
    }
}

/// Asks all questions of a gateway before fresh workers on the library at `port`, checks all answers, and waits until the bucket has so many
/// chunks. Gives the number of chunks that were prefilled.
async fn ask_all(s3: &S3, port: u16, right: &[String], what: &str, chunks: usize) -> u64 {
    let model = tiny_model();
    let options = ["--model", &model, "--chunk-tokens=64", "--threads=1", "--served-model-name=tiny"];
    let folder = tempfile::tempdir().unwrap();
    let workers = Workers::on(&Plane::List, 2, &options, folder, S3::library(port));
    let gateway = Plane::List.gateway(&workers.refs(), &[]);
    let client = Client::of(&gateway.url);
    client.workers(2).await;
    let started = Instant::now();
    let asks = (0..QUESTIONS).map(|index| {
        let client = client.clone();
        async move {
            let (status, answer) = client.chat(&question(index)).await;
            assert_eq!(status, 200, "{what}, question {index}: {answer}");
            let prefilled = answer["refrain"]["stats"]["prefilled_chunks"].as_u64().unwrap();
            (index, prefilled, comparable(answer))
        }
    });
    let mut prefilled = 0;
    for (index, of_answer, answer) in futures_util::future::join_all(asks).await {
        assert_eq!(answer, right[index], "{what}, question {index}");
        prefilled += of_answer;
    }
    let seconds = started.elapsed().as_secs_f64();
    eprintln!("{what}: {QUESTIONS} answers in {seconds:.1} s, {prefilled} chunks prefilled");
    while s3.chunks() < chunks {
        assert!(started.elapsed() < PATIENCE, "{what}: {} chunks were sent", s3.chunks());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    prefilled
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_are_equal_whatever_the_object_store_does() {
    let Some(s3) = S3::start() else { return };
    let model = tiny_model();
    let options = ["--model", &model, "--chunk-tokens=64", "--threads=1", "--served-model-name=tiny"];
    let alone = Workers::start(&Plane::List, 1, &options);
    let client = Client::of(&alone.running[0].url);
    let mut right = Vec::new();
    for index in 0..QUESTIONS {
        let (status, answer) = client.chat(&question(index)).await;
        assert_eq!(status, 200, "{answer}");
        right.push(comparable(answer));
    }
    // Chunks come into the bucket while a tenth of all connections fails, and later workers find them there.
    s3.network.set([0, 10, 0, 0]);
    ask_all(&s3, s3.port, &right, "a tenth fails", DOCUMENTS).await;
    s3.network.set([0; 4]);
    let with_all = ask_all(&s3, s3.port, &right, "nothing fails", DOCUMENTS).await;
    for (what, faults, spoils) in [
        ("300 ms of delay", [300, 0, 0, 0], false),
        ("2 s of delay", [2000, 0, 0, 0], false),
        ("a tenth fails", [0, 10, 0, 0], true),
        ("a third of the answers is cut", [0, 0, 33, 0], true),
        ("a third of the connections is closed", [0, 0, 0, 33], true),
        ("a bit of all", [100, 10, 10, 10], true),
        ("everything is closed", [0, 0, 0, 100], true),
    ] {
        s3.network.set(faults);
        ask_all(&s3, s3.port, &right, what, 0).await;
        assert!(s3.network.connections.load(Relaxed) > 0, "{what}: the object store was not asked");
        assert_eq!(s3.network.spoiled.load(Relaxed) > 0, spoils, "{what}");
    }
    let without = ask_all(&s3, free_port(), &right, "connections are refused", 0).await;
    assert!(
        with_all < without,
        "{with_all} chunks were prefilled though all were there, {without} without any"
    );
}
