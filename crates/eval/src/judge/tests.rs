//! A judge asked over a real connection.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread::JoinHandle;

use serde_json::Value;

use super::*;

/// A request: its first line and headers, lowercase, and its body.
pub(crate) struct Got {
    pub(crate) head: String,
    pub(crate) body: Value,
}

/// A server that gives one reply (status and body) a connection, then ends.
pub(crate) fn server(replies: Vec<(u16, String)>) -> (String, JoinHandle<Vec<Got>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    let serve = move || {
        let mut served = Vec::new();
        for (status, body) in replies {
            let (stream, _) = listener.accept().unwrap();
            served.push(answer(stream, status, &body));
        }
        served
    };
    (url, std::thread::spawn(serve))
}

fn answer(mut stream: TcpStream, status: u16, reply: &str) -> Got {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        assert!(reader.read_line(&mut head).unwrap() > 0, "ended within the head: {head}");
    }
    head = head.to_lowercase();
    let length = head.split_once("content-length: ").unwrap().1;
    let mut body = vec![0; length.split("\r\n").next().unwrap().parse().unwrap()];
    reader.read_exact(&mut body).unwrap();
    let length = reply.len();
    write!(stream, "HTTP/1.1 {status} X\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{reply}")
        .unwrap();
    Got { head, body: serde_json::from_slice(&body).unwrap() }
}

pub(crate) fn says(content: &str) -> (u16, String) {
    let message = serde_json::json!({"role": "assistant", "content": content});
    (200, serde_json::json!({"id": "x", "choices": [{"index": 0, "message": message}]}).to_string())
}

/// One that does not wait long before it asks again.
pub(crate) fn judge(url: &str, key: Option<&str>) -> Judge {
    Judge {
        pause: Duration::from_millis(5),
        ..Judge::new(url, "llama", key.map(String::from), ureq::Agent::config_builder())
    }
}

const ASKING: JudgeOptions =
    JudgeOptions { temperature: 0.95, top_p: Some(0.95), max_tokens: 50, seed: Some(42) };

#[test]
fn the_reply_is_the_first_choice() {
    let (url, server) = server(vec![says("Yes, \"so\".\n")]);
    assert_eq!(
        judge(&format!("{url}/"), Some("sk-1")).ask("Is it\u{e9}?", &ASKING).unwrap(),
        "Yes, \"so\".\n"
    );
    let got = server.join().unwrap();
    assert!(got[0].head.starts_with("post /v1/chat/completions http/1.1\r\n"), "{}", got[0].head);
    assert!(got[0].head.contains("authorization: bearer sk-1\r\n"));
    assert!(got[0].head.contains("content-type: application/json"));
    let message = serde_json::json!({"role": "user", "content": "Is it\u{e9}?"});
    let expected = serde_json::json!({
        "model": "llama", "messages": [message], "temperature": 0.95, "top_p": 0.95, "max_tokens": 50, "seed": 42
    });
    assert_eq!(got[0].body, expected);
}

#[test]
fn what_is_not_asked_for_is_not_sent() {
    let nothing = (200, r#"{"choices": [{"message": {"content": null}}]}"#.into());
    let (url, server) = server(vec![nothing]);
    let options = JudgeOptions { temperature: 0.5, max_tokens: 9, ..JudgeOptions::default() };
    // No reply is not "no".
    assert!(judge(&url, None).ask("p", &options).unwrap_err().to_string().contains("no reply in it"));
    let got = server.join().unwrap();
    assert!(!got[0].head.contains("authorization"));
    assert!(got[0].body.get("seed").is_none() && got[0].body.get("top_p").is_none());
}

#[test]
fn a_busy_endpoint_is_asked_again() {
    let (url, server) = server(vec![(500, "oops".into()), (429, "slow".into()), says("no")]);
    assert_eq!(judge(&url, None).ask("p", &ASKING).unwrap(), "no");
    let got = server.join().unwrap();
    assert_eq!(got.len(), 3);
    assert_eq!(got[0].body, got[2].body);
}

#[test]
fn an_endpoint_that_stays_busy_is_given_up() {
    let (url, server) = server((0..4).map(|i| (503, format!("down {i}"))).collect());
    let error = judge(&url, None).ask("p", &ASKING).unwrap_err();
    assert!(matches!(error, Error::Judge { passing: true, .. }), "{error:?}");
    let error = error.to_string();
    assert!(error.contains(&url) && error.contains("503") && error.contains("down 3"), "{error}");
    assert_eq!(server.join().unwrap().len(), 4);
}

#[test]
fn a_refusal_is_final_and_does_not_show_the_key() {
    let (url, server) = server(vec![(401, format!("Wrong key sk-secret. {}", "long ".repeat(1000)))]);
    let judge = judge(&url, Some("sk-secret"));
    let error = judge.ask("p", &ASKING).unwrap_err();
    assert!(matches!(error, Error::Judge { passing: false, .. }), "{error:?}");
    for text in [error.to_string(), format!("{error:?}"), format!("{judge:?}")] {
        assert!(!text.contains("secret"), "{text}");
        assert!(text.contains("/v1/chat/completions") && text.len() < 500, "{text}");
    }
    let text = error.to_string();
    assert!(text.contains("401") && text.contains("Wrong key ***. long"), "{text}");
    assert_eq!(server.join().unwrap().len(), 1);
}

#[test]
fn a_key_is_not_shown_where_the_excerpt_ends() {
    let (url, server) = server(vec![(403, format!("{}sk-secret", "\u{e9}".repeat(EXCERPT - 6)))]);
    let error = judge(&url, Some("sk-secret")).ask("p", &ASKING).unwrap_err().to_string();
    assert!(error.ends_with("\u{e9}***"), "{error}");
    server.join().unwrap();
}

#[test]
fn a_reply_that_is_no_completion_is_shown() {
    for (body, expected) in [("<html>", "no chat completion"), (r#"{"choices": []}"#, "no reply in it")] {
        let (url, server) = server(vec![(200, body.into())]);
        let error = judge(&url, None).ask("p", &ASKING).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains(body) && error.contains(&url), "{error}");
        server.join().unwrap();
    }
}

#[test]
fn an_endpoint_that_is_not_there_is_named() {
    // A port that was free a moment ago.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = format!("http://{address}/v1");
    let error = judge(&url, None).ask("p", &ASKING).unwrap_err().to_string();
    assert!(error.contains(&url) && error.to_lowercase().contains("connection"), "{error}");
    let error = judge("no url", None).ask("p", &ASKING).unwrap_err().to_string();
    assert!(error.starts_with("judge no url/chat/completions: "), "{error}");
}
