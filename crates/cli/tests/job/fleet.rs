//! Machines of a test that share an object store: a folder, or a real S3 server (moto, from the Python package index).

use std::fs::File;

use super::moto::Moto;
use super::*;

/// Machines that share an object store, each with a home of its own.
pub(super) struct Fleet {
    pub(super) homes: Vec<Home>,
    pub(super) job: String,
    environment: Vec<(String, String)>,
}

/// The end of a job whose runners were killed.
pub(super) struct Killed {
    pub(super) kills: usize,
    pub(super) seconds: f64,
    /// Exit status of the first runner that ended by itself.
    pub(super) status: i32,
}

impl Fleet {
    pub(super) fn new(machines: usize, job: String, environment: Vec<(String, String)>) -> Fleet {
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
    server: Moto,
    home: Home,
}

impl S3 {
    /// Starts one; none where moto is not installed.
    pub(super) fn start() -> Option<S3> {
        let home = Home::new();
        let log = File::create(home.path("log")).unwrap();
        Some(S3 { server: Moto::start_with_log("bucket", log.into())?, home })
    }

    pub(super) fn environment(&self) -> Vec<(String, String)> {
        moto::settings(self.server.port)
    }

    /// The content of an object of the bucket, as JSON.
    pub(super) fn json(&self, name: &str) -> Value {
        let answer = String::from_utf8(self.server.request("GET", &format!("/{name}"))).unwrap();
        serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
    }

    /// The names below a folder of the bucket that end so.
    pub(super) fn names(&self, folder: &str, end: &str) -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        let mut after = String::new();
        loop {
            let page = format!("?list-type=2&max-keys=1000&prefix={folder}/&start-after={after}");
            let listed = String::from_utf8(self.server.request("GET", &page)).unwrap();
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
