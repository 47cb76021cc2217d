//! The server through its socket: official clients, and clients that mean no good.

mod log;
#[cfg(all(feature = "otlp", unix))]
mod spans;

use std::io::{BufRead, BufReader, Read};
use std::net::TcpStream;
use std::process::Child;
use std::time::{Duration, Instant};

use super::*;

/// A server of its own, which ends with this.
struct Server {
    child: Child,
    /// `127.0.0.1:PORT`
    address: String,
    home: Home,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    fn start(home: Home, more: &[&str]) -> Server {
        Server::start_in(home, more, &[])
    }

    fn start_in(home: Home, more: &[&str], environment: &[(&str, &str)]) -> Server {
        let words = [&["serve", "--port", "0", "--json"], more].concat();
        let mut command = home.command(&words);
        command.envs(environment.iter().copied());
        Server::of(home, command)
    }

    /// The server that a command starts in `home`.
    fn of(home: Home, mut command: Command) -> Server {
        let log = std::fs::File::create(home.path("log")).unwrap();
        let mut child = command.stdout(Stdio::piped()).stderr(log).spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut text = String::new();
        while !text.contains('}') && output.read_line(&mut text).unwrap() > 0 {}
        let said: Value = serde_json::from_str(&text).unwrap();
        let address = said["url"].as_str().unwrap().rsplit_once('/').unwrap().1.to_owned();
        Server { child, address, home }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(240))).unwrap();
        stream
    }

    /// Sends bytes, and gives all that comes back.
    fn send(&self, bytes: &[u8]) -> String {
        let mut stream = self.connect();
        stream.write_all(bytes).unwrap();
        let mut answer = Vec::new();
        // A server that refuses may close before it has read all.
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    fn post(&self, body: &str) -> String {
        let head =
            format!("content-type: application/json\r\ncontent-length: {}\r\nconnection: close", body.len());
        self.send(
            format!("POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n{head}\r\n\r\n{body}")
                .as_bytes(),
        )
    }

    fn is_alive(&self) -> bool {
        self.send(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").contains("\"ok\"")
    }
}

pub(super) fn python() -> String {
    std::env::var("REFRAIN_PYTHON").unwrap_or_else(|_| "python3".to_owned())
}

#[test]
fn official_clients_drive_the_server() {
    if !real_model() {
        return;
    }
    let home = Home::new();
    let keys = home.path("keys");
    let key = home.run(&["key", "new", "anna", "--file", keys.to_str().unwrap()]).good().out;
    let server = Server::start(home, &["--api-key-file", keys.to_str().unwrap()]);
    drive("clients.py", "clients", &[&format!("http://{}", server.address), key.trim()]);
}

/// Runs a script of `tests/e2e`, which is skipped where `need` is not there.
fn drive(script: &str, need: &str, arguments: &[&str]) {
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/e2e").join(script);
    let ran = Command::new(python()).arg(script).args(arguments).output().unwrap();
    let said = String::from_utf8_lossy(&ran.stdout).into_owned() + &String::from_utf8_lossy(&ran.stderr);
    match ran.status.code() {
        Some(77) => needs::skip(need, said.trim()),
        code => assert_eq!(code, Some(0), "{said}"),
    }
}

#[test]
fn the_page_is_used_by_keyboard_and_can_be_read() {
    if !real_model() {
        return;
    }
    let server = Server::start(Home::new(), &[]);
    // The model says which method requests get that name none, and why.
    let models = server.send(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    for said in [r#""method":"drift""#, r#""method_reason":"built in"#, r#""prefix":"averaged""#] {
        assert!(models.contains(said), "{said} is not in {models}");
    }
    drive("page.py", "page", &[&format!("http://{}", server.address)]);
}

/// Bytes of memory that the server holds, when it has been left alone for a while.
#[cfg(target_os = "linux")]
fn memory(server: &Server) -> u64 {
    std::thread::sleep(Duration::from_secs(3));
    let text = server.send(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    assert!(text.contains("refrain_num_requests_running 0\n"), "{text}");
    let line = text.lines().find_map(|line| line.strip_prefix("process_resident_memory_bytes "));
    line.unwrap().trim().parse().unwrap()
}

#[cfg(target_os = "linux")]
#[test]
fn memory_is_back_at_its_level_after_a_crowd() {
    if !real_model() {
        return;
    }
    let server = Server::start(Home::new(), &["--max-num-seqs", "8"]);
    let crowd = || {
        std::thread::scope(|scope| {
            for client in 0..12 {
                let server = &server;
                scope.spawn(move || {
                    for turn in 0..2 {
                        let (n, tokens) = (1 + (client + turn) % 4, 4 + 3 * (client % 5));
                        let document = |i: usize| format!(r#"{{"text":"{}"}}"#, format!("Wheel {i} has spokes. ").repeat(20 * i));
                        let documents = (1..=n).map(document).collect::<Vec<_>>().join(",");
                        let body = format!(
                            r#"{{"messages":[{{"role":"user","content":"How many?"}}],"max_tokens":{tokens},"documents":[{documents}]}}"#
                        );
                        if (client + turn) % 5 > 0 {
                            let answer = server.post(&body);
                            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
                            continue;
                        }
                        // Some do not wait.
                        let mut stream = server.connect();
                        let head = format!("content-type: application/json\r\ncontent-length: {}", body.len());
                        write!(stream, "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n{head}\r\n\r\n{body}").unwrap();
                        std::thread::sleep(Duration::from_millis(30));
                    }
                });
            }
        });
        memory(&server)
    };
    let (level, after) = (crowd(), [crowd(), crowd()]);
    let most = level + level / 10 + (32 << 20);
    eprintln!("{level} bytes at first, then {after:?}");
    assert!(after[1] <= most, "{level} bytes at first, then {after:?}");
}

/// An object store that has nothing, and is silent from then on that it is told to be.
#[cfg(feature = "remote")]
fn object_store(silent: &'static std::sync::atomic::AtomicBool) -> String {
    let store = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", store.local_addr().unwrap());
    std::thread::spawn(move || {
        let mut held = Vec::new();
        for mut stream in store.incoming().map_while(Result::ok) {
            let mut head = [0; 4096];
            let _ = stream.read(&mut head);
            if silent.load(std::sync::atomic::Ordering::Relaxed) {
                held.push(stream);
                continue;
            }
            let _ =
                stream.write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            // A connection that is closed while its body comes is reset, and the client takes that for an object store that fails.
            std::thread::spawn(move || {
                let _ = stream.shutdown(std::net::Shutdown::Write);
                let _ = std::io::copy(&mut stream, &mut std::io::sink());
            });
        }
    });
    url
}

#[cfg(feature = "remote")]
#[test]
fn a_request_that_waits_for_an_object_store_holds_up_nobody_else() {
    static SILENT: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);
    if !real_model() {
        return;
    }
    let url = object_store(&SILENT);
    let environment = [
        ("AWS_ENDPOINT", url.as_str()),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ACCESS_KEY_ID", "x"),
        ("AWS_SECRET_ACCESS_KEY", "y"),
    ];
    let remote = ["--remote", "s3://chunks/refrain", "--remote-timeout", "4s", "--remote-policy", "fetch"];
    let server = Server::start_in(Home::new(), &remote, &environment);
    let mut stream = server.connect();
    let body = r#"{"messages":[{"role":"user","content":"Tell me of the sea."}],"max_tokens":1500,"min_tokens":1500,"stream":true}"#;
    let head = format!("content-type: application/json\r\ncontent-length: {}", body.len());
    write!(stream, "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n{head}\r\n\r\n{body}").unwrap();
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let mut tokens = || lines.by_ref().find(|line| line.contains("\"retained\""));
    tokens().unwrap();
    SILENT.store(true, std::sync::atomic::Ordering::Relaxed);
    let began = Instant::now();
    let (meanwhile, answer) = std::thread::scope(|scope| {
        let asks = r#"{"messages":[{"role":"user","content":"How many?"}],"max_tokens":2,"documents":[{"text":"28 spokes."}]}"#;
        let other = scope.spawn(|| server.post(asks));
        let mut meanwhile = 0;
        while !other.is_finished() && tokens().is_some() {
            // Those that were written before the other was begun arrive at once; a server that was held up sends some when it no longer is.
            meanwhile += usize::from((1..3).contains(&began.elapsed().as_secs()));
        }
        (meanwhile, other.join().unwrap())
    });
    let waited = began.elapsed();
    assert!(answer.starts_with("HTTP/1.1 200") && waited > Duration::from_secs(3), "{waited:?} {answer}");
    assert!(meanwhile > 4, "{meanwhile} tokens while the other waited {waited:?}");
}

const SECRET: &str = "The vault opens with 4711.";

#[test]
fn logs_have_what_was_said_only_where_that_is_asked_for() {
    if !real_model() {
        return;
    }
    let body = format!(
        r#"{{"messages":[{{"role":"user","content":"How does it open?"}}],"max_tokens":2,"documents":[{{"text":"{SECRET}"}}]}}"#
    );
    for (filter, told) in [("debug", false), ("info,refrain::text=trace", true)] {
        let home = Home::new();
        let keys = home.path("keys");
        let key = home.run(&["key", "new", "anna", "--file", keys.to_str().unwrap()]).good().out;
        let server = Server::start(home, &["--log", filter, "--api-key-file", keys.to_str().unwrap()]);
        let head = format!(
            "content-type: application/json\r\ncontent-length: {}\r\nauthorization: Bearer {}\r\nx-request-id: mine-1\r\nconnection: close",
            body.len(),
            key.trim()
        );
        let request =
            format!("POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n{head}\r\n\r\n{body}");
        let answer = server.send(request.as_bytes());
        assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("x-request-id: mine-1"), "{answer}");
        let log = std::fs::read_to_string(server.home.path("log")).unwrap();
        let answered = log.lines().find(|line| line.contains("answered")).unwrap();
        assert!(answered.contains("mine-1") && answered.contains("anna"), "{answered}");
        assert!(!log.contains(key.trim()), "{log}");
        // The number alone can be part of a duration in the log.
        assert_eq!(log.contains(SECRET), told, "{log}");
    }
}

#[test]
fn metrics_need_a_key_where_the_environment_says_so() {
    if !real_model() {
        return;
    }
    for (value, status) in [("true", "401"), ("false", "200")] {
        let home = Home::new();
        let keys = home.path("keys");
        home.run(&["key", "new", "anna", "--file", keys.to_str().unwrap()]).good();
        let options = ["--api-key-file", keys.to_str().unwrap()];
        let server = Server::start_in(home, &options, &[("REFRAIN_METRICS_AUTH", value)]);
        let answer = server.send(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{answer}");
    }
}

#[test]
fn clients_that_mean_no_good_are_refused_and_the_server_lives() {
    if !real_model() {
        return;
    }
    let server = Server::start(Home::new(), &["--body-timeout", "1s", "--max-body", "1MiB"]);
    // A hundred megabytes, announced and unannounced.
    let announced = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 104857600\r\n\r\n";
    assert!(server.send(announced.as_bytes()).starts_with("HTTP/1.1 413"));
    let mut stream = server.connect();
    stream
        .write_all(b"POST /v1/documents HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        .unwrap();
    let piece = format!("10000\r\n{}\r\n", "x".repeat(1 << 16));
    let sent = (0..1600).take_while(|_| stream.write_all(piece.as_bytes()).is_ok()).count();
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    assert!(sent < 1600 || answer.starts_with("HTTP/1.1 413"), "{sent} {answer}");
    assert!(server.is_alive());
    // Heads and bodies that never end.
    let began = Instant::now();
    let mut slow: Vec<TcpStream> = (0..50).map(|_| server.connect()).collect();
    for (index, stream) in slow.iter_mut().enumerate() {
        let part: &[u8] = match index % 2 {
            0 => b"GET /health HTTP/1.1\r\nx-slow: ",
            _ => b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{",
        };
        stream.write_all(part).unwrap();
    }
    assert!(server.is_alive());
    for mut stream in slow {
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
    }
    assert!(began.elapsed() < Duration::from_secs(20), "they are left after a second: {:?}", began.elapsed());
    // Bodies of any bytes.
    let mut random = 7_u64;
    let good = r#"{"messages":[{"role":"user","content":"Hi"}],"max_tokens":2,"documents":[{"text":"a"}]}"#;
    for _ in 0..300 {
        let mut body = good.as_bytes().to_vec();
        for _ in 0..1 + random % 4 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let at = (random >> 33) as usize % body.len();
            match random % 3 {
                0 => body[at] = (random >> 20) as u8,
                1 => _ = body.remove(at),
                _ => body.insert(at, b"{}[]\",:0-e\\"[(random >> 40) as usize % 11]),
            }
        }
        let head =
            format!("content-type: application/json\r\ncontent-length: {}\r\nconnection: close", body.len());
        let mut bytes =
            format!("POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n{head}\r\n\r\n").into_bytes();
        bytes.extend(body);
        let answer = server.send(&bytes);
        let status: u16 = answer.split(' ').nth(1).unwrap_or("0").parse().unwrap_or(0);
        assert!((200..500).contains(&status), "{answer}");
    }
    assert!(server.post(good).starts_with("HTTP/1.1 200"));
}

/// A shell's usual limit of open files is below the connections that a server takes.
#[cfg(target_os = "linux")]
#[test]
fn a_server_takes_more_connections_than_the_soft_limit_has_files() {
    let home = Home::new();
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    let mut command = Command::new("sh");
    home.settle(&mut command).args([
        "-c",
        "ulimit -S -n 300; exec \"$@\"",
        "sh",
        env!("CARGO_BIN_EXE_refrain"),
    ]);
    command.args(["serve", "--port", "0", "--json", "--prefix", "none", "--model"]).arg(model);
    let server = Server::of(home, command);
    let _idle: Vec<TcpStream> = (0..400).map(|_| server.connect()).collect();
    let mut probe = server.connect();
    probe.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    probe.write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    probe.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

/// Asked to stop, it ends what is under way, and then itself.
#[cfg(unix)]
#[test]
fn a_server_that_is_told_to_stop_ends_its_answers_first() {
    if !real_model() {
        return;
    }
    let mut server = Server::start(Home::new(), &[]);
    let mut stream = server.connect();
    let body =
        r#"{"messages":[{"role":"user","content":"Tell me of the sea."}],"max_tokens":120,"min_tokens":120}"#;
    let head =
        format!("content-type: application/json\r\ncontent-length: {}\r\nconnection: close", body.len());
    write!(stream, "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n{head}\r\n\r\n{body}").unwrap();
    std::thread::sleep(Duration::from_millis(500));
    let pid = server.child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"completion_tokens\":120"), "{answer}");
    assert!(server.child.wait().unwrap().success());
    let log = std::fs::read_to_string(server.home.path("log")).unwrap();
    assert!(log.contains("stopping: 1 request under way may go on for 30s"), "{log}");
}

/// A server keeps its store's documents to itself while it runs: other commands say what to do, and a script learns it by the status.
#[test]
fn commands_on_the_store_of_a_running_server_name_it() {
    let home = Home::new();
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    let file = home.write("bolts.md", "A stem bolt is tightened to 5 Nm.");
    let (model, file) = (model.to_str().unwrap(), file.to_str().unwrap());
    let options = ["--model", model, "--prefix", "none"];
    let server = Server::start(home, &options);
    let remedy = ["`refrain serve`", "POST /v1/documents"];
    let run = |words: &[&str]| server.home.run(&[words, &options].concat());
    run(&["documents", "ls"]).failed(1, &remedy);
    run(&["ask", "--search", "How tight?"]).failed(1, &remedy);
    run(&["ingest", file]).failed(3, &remedy);
}
