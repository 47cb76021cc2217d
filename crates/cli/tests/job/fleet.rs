//! Machines of a test that share an object store: a folder, or a real S3 server (moto, from the Python package index).

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use super::*;

/// Machines that share an object store, each with a home of its own.
pub(super) struct Fleet {
    pub(super) homes: Vec<Home>,
    pub(super) job: String,
    environment: Vec<(&'static str, String)>,
}

/// The end of a job whose runners were killed.
pub(super) struct Killed {
    pub(super) kills: usize,
    pub(super) seconds: f64,
    /// Exit status of the first runner that ended by itself.
    pub(super) status: i32,
}

impl Fleet {
    pub(super) fn new(machines: usize, job: String, environment: Vec<(&'static str, String)>) -> Fleet {
        Fleet { homes: (0..machines).map(|_| Home::new()).collect(), job, environment }
    }

    fn command(&self, machine: usize, words: &[&str]) -> Command {
        let mut command = self.homes[machine].command(words);
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }

    /// What a command on the first machine prints.
    pub(super) fn json(&self, words: &[&str]) -> Value {
        let words: Vec<&str> = words.iter().copied().chain(["--json"]).collect();
        let ran = Ran::of(self.command(0, &words).output().unwrap()).good();
        serde_json::from_str(&ran.out).unwrap()
    }

    fn start(&self, machine: usize) -> Child {
        let index = machine.to_string();
        let job = ["job", "run", "--job", &self.job, "--index", &index, "--threads", "1"];
        // So many deaths at one document are not by chance, however often runners are killed.
        let words = [&job[..], &["--claim-timeout", "1s", "--tries", "10"]].concat();
        self.command(machine, &words).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }

    /// Starts a runner on each machine, kills one after the other so that each lives for `life`, and starts it again, until one of
    /// them says that the job is done.
    pub(super) fn run_and_kill(&self, life: Duration, longest: Duration) -> Killed {
        let machines = self.homes.len();
        let mut runners: Vec<Child> = (0..machines).map(|machine| self.start(machine)).collect();
        let (mut kills, began) = (0, Instant::now());
        let mut last = Instant::now();
        let status = 'done: loop {
            assert!(
                began.elapsed() < longest,
                "{kills} were killed: {}",
                self.json(&["job", "status", "--job", &self.job])
            );
            std::thread::sleep(Duration::from_millis(20));
            if last.elapsed() > life / machines as u32 {
                runners[kills % machines].kill().unwrap();
                (kills, last) = (kills + 1, Instant::now());
            }
            for (machine, runner) in runners.iter_mut().enumerate() {
                match runner.try_wait().unwrap().map(|status| status.code()) {
                    None => {}
                    Some(None) => *runner = self.start(machine),
                    Some(Some(status)) => break 'done status,
                }
            }
        };
        for runner in &mut runners {
            let _ = runner.kill();
            runner.wait().unwrap();
        }
        Killed { kills, seconds: began.elapsed().as_secs_f64(), status }
    }
}

/// An S3 server with an empty bucket, and a log of its requests.
pub(super) struct S3 {
    server: Child,
    port: u16,
    home: Home,
}

impl Drop for S3 {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

impl S3 {
    /// Starts one; none where moto is not installed.
    pub(super) fn start() -> Option<S3> {
        let python = std::env::var("REFRAIN_PYTHON").unwrap_or_else(|_| "python3".to_owned());
        let has_moto =
            Command::new(&python).args(["-c", "import moto.server"]).stderr(Stdio::null()).status();
        if !has_moto.is_ok_and(|status| status.success()) {
            eprintln!("skipped: {python} has no moto (pip install 'moto[server]', or REFRAIN_PYTHON)");
            return None;
        }
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let home = Home::new();
        let server = Command::new(&python)
            .args(["-m", "moto.server", "-H", "127.0.0.1", "-p", &port.to_string()])
            .stdout(Stdio::null())
            .stderr(File::create(home.path("log")).unwrap())
            .spawn()
            .unwrap();
        let mut s3 = S3 { server, port, home };
        wait_for(&mut s3.server, || TcpStream::connect(("127.0.0.1", port)).is_ok());
        s3.request("PUT", "/bucket");
        Some(s3)
    }

    /// The answer to a request, with a signature that moto does not verify.
    fn request(&self, method: &str, path: &str) -> String {
        let mut server = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request, \
             SignedHeaders=host, Signature=x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        );
        server.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        server.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 2"), "{answer}");
        answer
    }

    pub(super) fn environment(&self) -> Vec<(&'static str, String)> {
        let fixed = [
            ("AWS_ALLOW_HTTP", "true"),
            ("AWS_ACCESS_KEY_ID", "x"),
            ("AWS_SECRET_ACCESS_KEY", "x"),
            ("AWS_REGION", "us-east-1"),
        ];
        let fixed = fixed.map(|(name, value)| (name, value.to_owned())).into_iter();
        fixed.chain([("AWS_ENDPOINT", format!("http://127.0.0.1:{}", self.port))]).collect()
    }

    /// The content of an object of the bucket, as JSON.
    pub(super) fn json(&self, name: &str) -> Value {
        let answer = self.request("GET", &format!("/bucket/{name}"));
        serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
    }

    /// The names below a folder of the bucket that end so.
    pub(super) fn names(&self, folder: &str, end: &str) -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        let mut after = String::new();
        loop {
            let listed = self.request(
                "GET",
                &format!("/bucket?list-type=2&max-keys=1000&prefix={folder}/&start-after={after}"),
            );
            let keys = listed.split("<Key>").skip(1).filter_map(|part| part.split_once("</Key>"));
            let keys: Vec<&str> = keys.map(|(key, _)| key).collect();
            let Some(last) = keys.last() else { return names };
            after = (*last).to_owned();
            let below = keys.iter().filter_map(|key| key.strip_prefix(folder)?.strip_prefix('/'));
            names.extend(below.filter(|key| key.ends_with(end)).map(str::to_owned));
        }
    }

    /// Requests of a method for chunks below `library` that had this status.
    pub(super) fn chunk_requests(&self, method: &str, status: u16) -> usize {
        let log = std::fs::read_to_string(self.home.path("log")).unwrap();
        let asked = format!("\"{method} /bucket/library/");
        let answered = format!(".safetensors HTTP/1.1\" {status} ");
        log.lines().filter(|line| line.contains(&asked) && line.contains(&answered)).count()
    }
}
