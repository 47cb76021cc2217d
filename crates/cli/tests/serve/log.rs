//! A server's log and metrics tell the outcome of each request.

use super::*;

/// The options of a server of a tiny model, which lies in `model`.
pub(super) fn tiny_in(model: &Path) -> [&str; 4] {
    ["--model", model.to_str().unwrap(), "--prefix", "none"]
}

pub(super) fn tiny() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama")
}

impl Server {
    fn get(&self, path: &str) -> String {
        let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        self.send(request.as_bytes())
    }

    /// Sends a chat under an id, and does not wait for its answer.
    fn begin(&self, id: &str, body: &str) -> TcpStream {
        let head = format!("content-type: application/json\r\ncontent-length: {}", body.len());
        let head =
            format!("POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-request-id: {id}\r\n{head}");
        let mut stream = self.connect();
        write!(stream, "{head}\r\nconnection: close\r\n\r\n{body}").unwrap();
        stream
    }

    /// Lines of the log that have all of these words.
    fn logged(&self, words: &[&str]) -> Vec<String> {
        let log = std::fs::read_to_string(self.home.path("log")).unwrap();
        log.lines().filter(|line| words.iter().all(|word| line.contains(word))).map(str::to_owned).collect()
    }

    /// Waits until the log has a line with all of these words.
    fn until_logged(&self, words: &[&str]) {
        let began = Instant::now();
        while self.logged(words).is_empty() {
            assert!(began.elapsed() < Duration::from_secs(60), "{words:?}: {:?}", self.logged(&[]));
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn probes_are_logged_only_where_they_fail() {
    let home = Home::new();
    let (keys, model) = (home.path("keys"), tiny());
    let keys = keys.to_str().unwrap();
    home.run(&["key", "new", "anna", "--file", keys]).good();
    let more = ["--api-key-file", keys, "--metrics-auth"];
    let server = Server::start(home, &[&tiny_in(&model)[..], &more].concat());
    for (path, status) in [("/health", 200), ("/ready", 200), ("/metrics", 401), ("/v1/methods", 200)] {
        let answer = server.get(path);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{answer}");
    }
    let responded = server.logged(&["responded"]);
    assert_eq!(responded.len(), 2, "{responded:?}");
    assert!(responded[0].contains("/metrics") && responded[0].contains("401"), "{responded:?}");
    assert!(responded[1].contains("/v1/methods"), "{responded:?}");
}

/// A copy of the tiny model whose last projection has NaNs.
pub(super) fn damaged(home: &Home) -> PathBuf {
    let damage = |bytes: &mut [u8]| {
        let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..data]).unwrap();
        if let Some(end) = header["lm_head.weight"]["data_offsets"][1].as_u64() {
            let end = data + end as usize;
            bytes[end - 128..end].fill(0xff);
        }
    };
    for file in std::fs::read_dir(tiny()).unwrap().map(Result::unwrap) {
        let mut bytes = std::fs::read(file.path()).unwrap();
        if file.path().extension().is_some_and(|extension| extension == "safetensors") {
            damage(&mut bytes);
        }
        home.write(&format!("damaged/{}", file.file_name().display()), bytes);
    }
    home.path("damaged")
}

#[test]
fn failed_requests_are_counted_and_the_log_has_their_ids_and_reasons() {
    let home = Home::new();
    let model = damaged(&home);
    let server = Server::start(home, &tiny_in(&model));
    for (id, stream) in [("whole-1", false), ("stream-1", true)] {
        let body =
            format!(r#"{{"messages":[{{"role":"user","content":"Hi"}}],"max_tokens":4,"stream":{stream}}}"#);
        let mut answer = String::new();
        server.begin(id, &body).read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 500"), "{answer}");
        assert_eq!(server.logged(&[id, "a request failed", "finite"]).len(), 1, "{:?}", server.logged(&[]));
        assert_eq!(server.logged(&[id, "\"failed\"", "server_error"]).len(), 1);
    }
    let metrics = server.get("/metrics");
    for count in [
        r#"refrain_http_requests_total{status="500"} 2"#,
        r#"refrain_request_failed_total{code="server_error"} 2"#,
    ] {
        assert!(metrics.contains(count), "{count}: {metrics}");
    }
}

#[test]
fn the_log_says_why_an_answer_was_broken_off() {
    if !real_model() {
        return;
    }
    let body = |stream: bool| {
        format!(
            r#"{{"messages":[{{"role":"user","content":"Tell me of the sea."}}],"max_tokens":1500,"min_tokens":1500,"stream":{stream}}}"#
        )
    };
    let server = Server::start(Home::new(), &["--request-timeout", "2s"]);
    let mut answer = String::new();
    server.begin("late-1", &body(true)).read_to_string(&mut answer).unwrap();
    assert!(answer.contains("timeout"), "{answer}");
    server.until_logged(&["late-1", "cancelled", "timeout"]);
    drop(server);
    let server = Server::start(Home::new(), &[]);
    let whole = server.begin("left-1", &body(false));
    server.until_logged(&["left-1", "asked"]);
    drop(whole);
    server.until_logged(&["left-1", "the client left", "499"]);
    server.until_logged(&["left-1", "cancelled", "client_left"]);
    assert!(server.get("/metrics").contains(r#"refrain_http_requests_total{status="499"} 1"#));
}
