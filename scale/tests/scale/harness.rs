//! Processes of `refrain-scale` on loopback, and a client of HTTP.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::{Request, Response};
use hyper_util::client::legacy::Client as HyperClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};

/// Most time that a process may take to start: a busy machine builds other things meanwhile.
const START: Duration = Duration::from_secs(60);
/// Most time that a test waits for what must happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// The secret that gateways and workers of tests share.
pub(crate) const KEY: &str = "5ca1ab1e5ca1ab1e5ca1ab1e5ca1ab1e5ca1ab1e5ca1ab1e5ca1ab1e5ca1ab1e";

/// A program that runs until this is dropped.
pub(crate) struct Process {
    child: Child,
    /// Where it listens.
    pub(crate) url: String,
}

impl Process {
    /// Starts `refrain-scale`, and waits for the line with its address.
    pub(crate) fn start(arguments: &[&str], environment: &[(&str, String)]) -> Process {
        let mut command = Command::new(env!("CARGO_BIN_EXE_refrain-scale"));
        command.args(arguments).env("REFRAIN_NAMESPACE_KEY", KEY);
        let shows = std::env::var("REFRAIN_TEST_LOG").is_ok();
        command.env("REFRAIN_LOG", if shows { "info" } else { "error" });
        command.envs(environment.iter().map(|(name, value)| (*name, value)));
        Process::listening(&mut command)
    }

    /// Starts a program that prints its address, `http://…`, among the words of a line.
    pub(crate) fn listening(command: &mut Command) -> Process {
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        // From here on the process ends with its value, also where it never says its address.
        let mut process = Process { child, url: String::new() };
        let out = BufReader::new(process.child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || out.lines().map_while(Result::ok).for_each(|line| _ = sender.send(line)));
        let deadline = Instant::now() + START;
        loop {
            let line = lines.recv_timeout(deadline.saturating_duration_since(Instant::now()));
            let line = line.unwrap_or_else(|_| panic!("{command:?} has not said where it listens"));
            if let Some(url) = line.split_whitespace().find(|word| word.starts_with("http://")) {
                process.url = url.trim_end_matches("/v1").to_owned();
                return process;
            }
        }
    }

    pub(crate) fn port(&self) -> &str {
        self.url.rsplit(':').next().unwrap()
    }

    /// Seconds of a processor's time that the process has taken.
    pub(crate) fn cpu_seconds(&self) -> f64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        // The name in brackets may have blanks. Times are in hundredths of a second on every Linux of today.
        let mut fields = stat.rsplit_once(')').unwrap().1.split_whitespace().skip(11);
        let mut ticks = || fields.next().unwrap().parse::<f64>().unwrap();
        (ticks() + ticks()) / 100.0
    }

    /// Ends the process as a machine that fails would: without a word.
    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Sends a signal: `STOP`, `CONT`, `TERM`.
    pub(crate) fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([&format!("-{name}"), &self.child.id().to_string()]).status();
        assert!(sent.unwrap().success());
    }

    /// The exit status, once the process has ended.
    pub(crate) fn wait(&mut self) -> std::process::ExitStatus {
        let deadline = Instant::now() + START;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("{} has not ended", self.url);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// How the processes of a test find one another.
#[derive(Clone, Debug)]
pub(crate) enum Plane {
    /// By a list of addresses.
    List,
    /// By Dynamo's discovery, with these variables.
    #[cfg(feature = "dynamo")]
    Dynamo(&'static str, Vec<(&'static str, String)>),
}

/// Dynamo's listeners on loopback.
#[cfg(feature = "dynamo")]
pub(crate) fn loopback() -> Vec<(&'static str, String)> {
    let hosts = ["DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST"];
    let mut variables: Vec<_> = hosts.into_iter().map(|name| (name, "127.0.0.1".to_owned())).collect();
    variables.push(("DYN_LOG", "error".to_owned()));
    variables
}

/// Discovery by files in a folder.
#[cfg(feature = "dynamo")]
pub(crate) fn by_file(folder: &Path) -> Plane {
    let mut variables = loopback();
    variables.push(("DYN_FILE_KV", folder.to_str().unwrap().to_owned()));
    Plane::Dynamo("file", variables)
}

impl Plane {
    pub(crate) fn discovery(&self) -> &'static str {
        match self {
            Plane::List => "none",
            #[cfg(feature = "dynamo")]
            Plane::Dynamo(discovery, _) => discovery,
        }
    }

    pub(crate) fn environment(&self) -> Vec<(&'static str, String)> {
        match self {
            Plane::List => Vec::new(),
            #[cfg(feature = "dynamo")]
            Plane::Dynamo(_, variables) => variables.clone(),
        }
    }

    pub(crate) fn gateway(&self, workers: &[&Process], more: &[&str]) -> Process {
        let urls = workers.iter().map(|worker| worker.url.as_str()).collect::<Vec<_>>().join(",");
        let mut arguments = vec!["gateway", "--port", "0", "--discovery", self.discovery()];
        if matches!(self, Plane::List) {
            arguments.extend(["--workers", &urls]);
        }
        arguments.extend(more);
        Process::start(&arguments, &self.environment())
    }
}

/// Workers with chunk stores in a folder, on one object store there.
pub(crate) struct Workers {
    pub(crate) folder: tempfile::TempDir,
    plane: Plane,
    /// Options of all workers.
    options: Vec<String>,
    /// The object store, and the variables with which it is found.
    remote: String,
    environment: Vec<(&'static str, String)>,
    pub(crate) running: Vec<Process>,
}

impl Workers {
    /// Workers on a folder that stands for an object store.
    pub(crate) fn start(plane: &Plane, number: usize, options: &[&str]) -> Workers {
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join("library");
        std::fs::create_dir(&library).unwrap();
        Workers::on(plane, number, options, folder, (format!("file://{}", library.display()), Vec::new()))
    }

    /// Workers with chunk stores in `folder`, on this object store, which is found with these variables.
    pub(crate) fn on(
        plane: &Plane,
        number: usize,
        options: &[&str],
        folder: tempfile::TempDir,
        (remote, environment): (String, Vec<(&'static str, String)>),
    ) -> Workers {
        let options = options.iter().map(ToString::to_string).collect();
        let (plane, running) = (plane.clone(), Vec::new());
        let mut workers = Workers { folder, plane, options, remote, environment, running };
        for index in 0..number {
            let worker = workers.spawn(index, "0");
            workers.running.push(worker);
        }
        workers
    }

    /// Starts a further worker, with other options, which those that are started from now on have as well.
    pub(crate) fn add(&mut self, options: &[&str]) {
        self.options = options.iter().map(ToString::to_string).collect();
        let worker = self.spawn(self.running.len(), "0");
        self.running.push(worker);
    }

    /// Has a worker finish what it does, and starts another one, with other options, at its address.
    pub(crate) fn replace(&mut self, index: usize, options: &[&str]) {
        self.options = options.iter().map(ToString::to_string).collect();
        self.running[index].signal("TERM");
        assert!(self.running[index].wait().success());
        let port = self.running[index].port().to_owned();
        self.running[index] = self.spawn(index, &port);
    }

    fn spawn(&self, index: usize, port: &str) -> Process {
        let store = self.folder.path().join(format!("worker{index}"));
        let mut arguments = vec!["worker", "--port", port, "--discovery", self.plane.discovery()];
        let store = store.to_str().unwrap().to_owned();
        arguments.extend(["--store", &store, "--remote", &self.remote]);
        arguments.extend(self.options.iter().map(String::as_str));
        let mut environment = self.plane.environment();
        environment.extend(self.environment.clone());
        Process::start(&arguments, &environment)
    }

    /// The folder that stands for an object store.
    pub(crate) fn library(&self) -> PathBuf {
        self.folder.path().join("library")
    }

    /// Kills a worker and starts it again at its address.
    pub(crate) fn restart(&mut self, index: usize) {
        self.running[index].kill();
        let port = self.running[index].port().to_owned();
        self.running[index] = self.spawn(index, &port);
    }

    pub(crate) fn refs(&self) -> Vec<&Process> {
        self.running.iter().collect()
    }
}

/// A client of HTTP. A clone is cheap and shares its connections.
#[derive(Clone)]
pub(crate) struct Client {
    client: HyperClient<HttpConnector, Full<Bytes>>,
    url: String,
    headers: Vec<(&'static str, String)>,
}

impl Client {
    pub(crate) fn of(url: &str) -> Client {
        let client = HyperClient::builder(TokioExecutor::new()).build_http();
        Client { client, url: url.to_owned(), headers: Vec::new() }
    }

    /// The client with one more header.
    pub(crate) fn with(&self, name: &'static str, value: impl Into<String>) -> Client {
        let mut client = self.clone();
        client.headers.push((name, value.into()));
        client
    }

    pub(crate) async fn send(
        &self,
        method: &str,
        path: &str,
        body: &Value,
    ) -> Response<hyper::body::Incoming> {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.url))
            .header("content-type", "application/json");
        for (name, value) in &self.headers {
            request = request.header(*name, value);
        }
        let sent = self.client.request(request.body(Full::new(Bytes::from(body))).unwrap());
        tokio::time::timeout(PATIENCE * 2, sent).await.expect("no answer in time").unwrap()
    }

    /// Status and text of an answer.
    pub(crate) async fn text(&self, method: &str, path: &str, body: &Value) -> (u16, String) {
        let response = self.send(method, path, body).await;
        let status = response.status().as_u16();
        let text = tokio::time::timeout(PATIENCE * 2, response.into_body().collect()).await;
        let text = text.expect("no whole answer in time").unwrap().to_bytes();
        (status, String::from_utf8(text.to_vec()).unwrap())
    }

    /// Status and value of an answer.
    pub(crate) async fn value(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        let (status, text) = self.text(method, path, body).await;
        (status, serde_json::from_str(&text).unwrap_or_else(|_| json!(text)))
    }

    pub(crate) async fn chat(&self, body: &Value) -> (u16, Value) {
        self.value("POST", "/v1/chat/completions", body).await
    }

    /// Waits until a gateway knows so many workers.
    pub(crate) async fn workers(&self, number: usize) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let (_, workers) = self.value("GET", "/workers", &Value::Null).await;
            if workers.as_object().is_some_and(|workers| workers.len() == number) {
                return workers;
            }
            assert!(Instant::now() < deadline, "{number} workers are wanted, not {workers}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// The text of an answer.
pub(crate) fn content(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("no answer: {answer}"))
}

/// A chat with a simulated worker: a question about a document of so many words.
pub(crate) fn simulated_chat(question: usize, document: usize, words: usize) -> Value {
    let text: Vec<String> = (0..words).map(|word| format!("d{document}w{word}")).collect();
    json!({
        "messages": [{ "role": "user", "content": format!("question {question}") }],
        "documents": [{ "text": text.join(" ") }], "max_tokens": 4,
    })
}

/// The random-weight model of the golden tests.
pub(crate) fn tiny_model() -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tiny/llama").to_str().unwrap().to_owned()
}
