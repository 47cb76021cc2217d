//! The server through its socket: official clients, and clients that mean no good.

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
    _home: Home,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    fn start(home: Home, more: &[&str]) -> Server {
        let words = [&["serve", "--port", "0", "--json", "--log", "warn"], more].concat();
        let mut child = home.command(&words).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut text = String::new();
        while !text.contains('}') && output.read_line(&mut text).unwrap() > 0 {}
        let said: Value = serde_json::from_str(&text).unwrap();
        let address = said["url"].as_str().unwrap().rsplit_once('/').unwrap().1.to_owned();
        Server { child, address, _home: home }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
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
        self.send(format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{head}\r\n\r\n{body}").as_bytes())
    }

    fn is_alive(&self) -> bool {
        self.send(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").contains("\"ok\"")
    }
}

fn python() -> String {
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
    let server = Server::start(home, &["--api-keys", keys.to_str().unwrap()]);
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/e2e/clients.py");
    let ran = Command::new(python())
        .args([script.to_str().unwrap(), &format!("http://{}", server.address), key.trim()])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stdout).into_owned() + &String::from_utf8_lossy(&ran.stderr);
    match ran.status.code() {
        Some(77) => eprintln!("{said}"),
        code => assert_eq!(code, Some(0), "{said}"),
    }
}

#[test]
fn clients_that_mean_no_good_are_refused_and_the_server_lives() {
    if !real_model() {
        return;
    }
    let server = Server::start(Home::new(), &["--arrival", "1s", "--body", "1MiB"]);
    // A hundred megabytes, announced and unannounced.
    let announced = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 104857600\r\n\r\n";
    assert!(server.send(announced.as_bytes()).starts_with("HTTP/1.1 413"));
    let mut stream = server.connect();
    stream
        .write_all(b"POST /v1/documents HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
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
            _ => b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{",
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
            format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{head}\r\n\r\n").into_bytes();
        bytes.extend(body);
        let answer = server.send(&bytes);
        let status: u16 = answer.split(' ').nth(1).unwrap_or("0").parse().unwrap_or(0);
        assert!((200..500).contains(&status), "{answer}");
    }
    assert!(server.post(good).starts_with("HTTP/1.1 200"));
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
    write!(stream, "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{head}\r\n\r\n{body}").unwrap();
    std::thread::sleep(Duration::from_millis(500));
    let pid = server.child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"completion_tokens\":120"), "{answer}");
    assert!(server.child.wait().unwrap().success());
}
