//! Runners that are killed again and again until the job is done, over a folder and over a real S3 server (moto, from the Python package
//! index; skipped, saying so, where it is not installed).

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use super::*;

const RUNNERS: usize = 4;
const DOCUMENTS: usize = 60;

/// Machines that share an object store, each with a home of its own.
struct Fleet {
    homes: Vec<Home>,
    job: String,
    environment: Vec<(&'static str, String)>,
}

impl Fleet {
    fn new(job: String, environment: Vec<(&'static str, String)>) -> Fleet {
        Fleet { homes: (0..RUNNERS).map(|_| Home::new()).collect(), job, environment }
    }

    fn command(&self, machine: usize, words: &[&str]) -> Command {
        let mut command = self.homes[machine].command(words);
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }

    fn json(&self, words: &[&str]) -> Value {
        let words: Vec<&str> = words.iter().copied().chain(["--json"]).collect();
        let ran = Ran::of(self.command(0, &words).output().unwrap()).good();
        serde_json::from_str(&ran.out).unwrap()
    }

    fn start(&self, machine: usize) -> Child {
        let index = machine.to_string();
        let words =
            ["job", "run", "--job", &self.job, "--claim-timeout", "1s", "--index", &index, "--threads", "1"];
        self.command(machine, &words).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }

    /// Kills one runner after another, and starts each again, until one of them says that all is done. Gives how many were killed.
    fn work(&self) -> usize {
        let mut runners: Vec<Child> = (0..RUNNERS).map(|machine| self.start(machine)).collect();
        let (mut killed, began) = (0, Instant::now());
        // Each lives long enough to take a dead one's shard over.
        let mut last = Instant::now();
        loop {
            assert!(began.elapsed() < Duration::from_secs(240), "the job never ends");
            std::thread::sleep(Duration::from_millis(20));
            if last.elapsed() > Duration::from_millis(900) {
                runners[killed % RUNNERS].kill().unwrap();
                (killed, last) = (killed + 1, Instant::now());
            }
            for (machine, runner) in runners.iter_mut().enumerate() {
                let Some(status) = runner.try_wait().unwrap() else { continue };
                if status.code() == Some(0) {
                    for runner in &mut runners {
                        let _ = runner.kill();
                        runner.wait().unwrap();
                    }
                    return killed;
                }
                assert_eq!(status.code(), None, "a runner ended by itself");
                *runner = self.start(machine);
            }
        }
    }
}

fn check(fleet: &Fleet, remote: &str, file: &str, chunks: impl Fn() -> BTreeSet<String>) {
    let words = ["--job", &fleet.job, "--remote", remote, "--shard-documents", "3"];
    let planned = fleet.json(&[&["job", "plan", "ingest", file], &SETTINGS[..], &words].concat());
    assert_eq!((&planned["shards"], &planned["items"]), (&json!(20), &json!(DOCUMENTS)));
    let killed = fleet.work();
    assert!(killed > 0, "none was killed");
    let status = fleet.json(&["job", "status", "--job", &fleet.job]);
    assert_eq!((&status["complete"], &status["failed"]), (&json!(true), &json!([])), "{killed} were killed");
    assert_eq!(chunks(), chunks_of_one_ingest(file), "{killed} were killed");
    let machine = Home::new();
    let mut list = machine.command(&["documents", "ls", "--remote", remote, "--json"]);
    list.envs(fleet.environment.iter().map(|(name, value)| (name, value)));
    let listed: Value = serde_json::from_str(&Ran::of(list.output().unwrap()).good().out).unwrap();
    let titles =
        listed["documents"].as_array().unwrap().iter().map(|document| document["title"].as_str().unwrap());
    let found: BTreeSet<String> = titles.clone().map(str::to_owned).collect();
    assert_eq!(titles.count(), DOCUMENTS, "each once");
    assert_eq!(found, (0..DOCUMENTS).map(|n| format!("Bearing {n}")).collect());
}

#[test]
fn killed_runners_leave_every_document_once_in_a_folder() {
    let home = Home::new();
    let file = passages(&home, DOCUMENTS);
    let fleet = Fleet::new(url(&home, "job"), Vec::new());
    check(&fleet, &url(&home, "library"), &file, || names(&home.path("library"), ".safetensors"));
}

/// A server with an empty bucket.
struct S3 {
    server: Child,
    port: u16,
}

impl Drop for S3 {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

impl S3 {
    fn start() -> Option<S3> {
        let python = std::env::var("REFRAIN_PYTHON").unwrap_or_else(|_| "python3".to_owned());
        let has_moto =
            Command::new(&python).args(["-c", "import moto.server"]).stderr(Stdio::null()).status();
        if !has_moto.is_ok_and(|status| status.success()) {
            eprintln!("skipped: {python} has no moto (pip install 'moto[server]', or REFRAIN_PYTHON)");
            return None;
        }
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let server = Command::new(&python)
            .args(["-m", "moto.server", "-H", "127.0.0.1", "-p", &port.to_string()])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut s3 = S3 { server, port };
        wait_for(&mut s3.server, || TcpStream::connect(("127.0.0.1", port)).is_ok());
        s3.request("PUT", "/bucket");
        Some(s3)
    }

    /// The answer to a request; moto asks for no signature.
    fn request(&self, method: &str, path: &str) -> String {
        let mut server = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        );
        server.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        server.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 2"), "{answer}");
        answer
    }

    fn environment(&self) -> Vec<(&'static str, String)> {
        let fixed = [("AWS_ALLOW_HTTP", "true"), ("AWS_ACCESS_KEY_ID", "x"), ("AWS_SECRET_ACCESS_KEY", "x")];
        let fixed = fixed
            .into_iter()
            .chain([("AWS_REGION", "us-east-1")])
            .map(|(name, value)| (name, value.to_owned()));
        fixed.chain([("AWS_ENDPOINT", format!("http://127.0.0.1:{}", self.port))]).collect()
    }

    /// The names of the chunks below the library.
    fn chunks(&self) -> BTreeSet<String> {
        let listed = self.request("GET", "/bucket?list-type=2&prefix=library/&max-keys=1000");
        let keys = listed.split("<Key>library/").skip(1).filter_map(|part| part.split_once("</Key>"));
        keys.map(|(key, _)| key.to_owned()).filter(|key| key.ends_with(".safetensors")).collect()
    }
}

#[test]
fn killed_runners_leave_every_document_once_in_s3() {
    let Some(s3) = S3::start() else { return };
    let home = Home::new();
    let file = passages(&home, DOCUMENTS);
    let fleet = Fleet::new("s3://bucket/jobs/one".to_owned(), s3.environment());
    check(&fleet, "s3://bucket/library", &file, || s3.chunks());
}
