//! Spans of requests, which a collector gets.

use super::log::{damaged, tiny, tiny_in};
use super::*;

/// The status `ERROR` of a span, as OTLP writes it.
const ERROR: [u8; 4] = [122, 2, 24, 2];

#[test]
fn spans_go_to_a_collector() {
    let model = tiny();
    let start = |more: &[&str], environment: &[(&str, &str)]| {
        Server::start_in(Home::new(), &[&tiny_in(&model), more].concat(), environment)
    };
    spans_arrive(200, |url| start(&["--otlp-traces-endpoint", url], &[]));
    for variable in ["REFRAIN_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"] {
        spans_arrive(200, |url| start(&[], &[(variable, url)]));
    }
    let named = [("OTEL_SERVICE_NAME", "library-2")];
    let spans = spans_arrive(200, |url| start(&["--otlp-traces-endpoint", url], &named));
    assert!(contains(&spans, b"library-2") && !contains(&spans, &ERROR), "{spans:?}");
    assert!(!contains(&spans, b"/health"), "{spans:?}");
}

#[test]
fn the_span_of_a_request_that_fails_says_so() {
    let spans = spans_arrive(500, |url| {
        let home = Home::new();
        let model = damaged(&home);
        Server::start(home, &[&tiny_in(&model)[..], &["--otlp-traces-endpoint", url]].concat())
    });
    assert!(contains(&spans, &ERROR), "{spans:?}");
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

/// The request by which a server sends spans.
fn export(stream: &mut TcpStream) -> Vec<u8> {
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let (mut got, mut piece) = (Vec::new(), [0; 1 << 16]);
    while let Ok(n @ 1..) = stream.read(&mut piece) {
        got.extend(&piece[..n]);
        let Some(end) = got.windows(4).position(|part| part == b"\r\n\r\n") else { continue };
        let head = String::from_utf8_lossy(&got[..end]).to_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length:")).unwrap();
        if got.len() >= end + 4 + length.trim().parse::<usize>().unwrap() {
            break;
        }
    }
    got
}

/// A collector gets the spans of a request, by its name, as parts of its caller's trace.
fn spans_arrive(status: u16, start: impl Fn(&str) -> Server) -> Vec<u8> {
    let collector = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", collector.local_addr().unwrap());
    let (told, collected) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for mut stream in collector.incoming().map_while(Result::ok) {
            told.send(export(&mut stream)).unwrap();
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").unwrap();
        }
    });
    let mut server = start(&url);
    let body = r#"{"messages":[{"role":"user","content":"Hi"}],"max_tokens":4,"min_tokens":4}"#;
    let head = format!(
        "content-type: application/json\r\nx-request-id: followed-1\r\ntraceparent: 00-{}-{}-01\r\ncontent-length: {}",
        "5a".repeat(16),
        "6b".repeat(8),
        body.len()
    );
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{head}\r\n\r\n{body}"
    );
    assert!(server.is_alive());
    let answer = server.send(request.as_bytes());
    assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{answer}");
    let pid = server.child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    assert!(server.child.wait().unwrap().success());
    // A server that ends has had its last spans taken.
    let spans: Vec<u8> = collected.try_iter().flatten().collect();
    assert!(spans.starts_with(b"POST /v1/traces "), "{spans:?}");
    for part in
        ["refrain", "followed-1", "request", "queue", "prefill", "decode", "http.response.status_code"]
    {
        assert!(contains(&spans, part.as_bytes()), "{part}: {spans:?}");
    }
    for ids in [&[0x5a; 16][..], &[0x6b; 8]] {
        assert!(contains(&spans, ids), "{ids:?}: {spans:?}");
    }
    spans
}
