//! A real S3 server for tests: moto, from the Python package index.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

#[path = "needs.rs"]
#[allow(clippy::duplicate_mod, reason = "other tests of a crate use it without moto")]
mod needs;
#[path = "ports.rs"]
#[allow(clippy::duplicate_mod, reason = "other tests of a crate use it without moto")]
mod ports;

/// A server with an empty bucket, killed when it is dropped.
pub(crate) struct Moto {
    server: Child,
    pub(crate) port: u16,
    bucket: &'static str,
}

impl Drop for Moto {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

impl Moto {
    /// Starts a server; none, saying so, where moto is not installed.
    #[allow(dead_code, reason = "some tests read the log")]
    pub(crate) fn start(bucket: &'static str) -> Option<Moto> {
        Moto::start_with_log(bucket, Stdio::null())
    }

    /// Starts a server that writes a line to `log` for each request.
    pub(crate) fn start_with_log(bucket: &'static str, log: Stdio) -> Option<Moto> {
        let python = std::env::var("REFRAIN_PYTHON").unwrap_or_else(|_| "python3".to_owned());
        let has_moto =
            Command::new(&python).args(["-c", "import moto.server"]).stderr(Stdio::null()).status();
        if !has_moto.is_ok_and(|status| status.success()) {
            needs::skip(
                "moto",
                format!("{python} has no moto (pip install 'moto[server]', or REFRAIN_PYTHON)"),
            );
            return None;
        }
        let port = ports::own_port();
        let server = Command::new(&python)
            .args(["-m", "moto.server", "-H", "127.0.0.1", "-p", &port.to_string()])
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut moto = Moto { server, port, bucket };
        let began = Instant::now();
        while !moto.send("GET", "").is_ok_and(|answer| is_of_moto(&answer)) {
            let ended = moto.server.try_wait().unwrap();
            assert!(
                ended.is_none() && began.elapsed() < Duration::from_secs(60),
                "moto does not start: {ended:?}"
            );
            thread::sleep(Duration::from_millis(50));
        }
        moto.request("PUT", "");
        Some(moto)
    }

    /// The answer to a request for what is below the bucket: moto verifies no signature.
    pub(crate) fn request(&self, method: &str, path: &str) -> Vec<u8> {
        let answer = self.send(method, path).unwrap();
        assert!(answer.starts_with(b"HTTP/1.1 2"), "{}", String::from_utf8_lossy(&answer));
        answer
    }

    fn send(&self, method: &str, path: &str) -> std::io::Result<Vec<u8>> {
        let mut server = TcpStream::connect(("127.0.0.1", self.port))?;
        let request = format!(
            "{method} /{}{path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\nconnection: close\r\n\
             authorization: AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, Signature=0\r\n\r\n",
            self.bucket
        );
        server.write_all(request.as_bytes())?;
        let mut answer = Vec::new();
        server.read_to_end(&mut answer)?;
        Ok(answer)
    }

    /// Names of all objects, ascending.
    #[allow(dead_code, reason = "not all tests that start a server list it")]
    pub(crate) fn names(&self) -> Vec<String> {
        let listed = String::from_utf8(self.request("GET", "?list-type=2")).unwrap();
        let name = |rest: &str| Some(rest.split_once("</Key>")?.0.to_owned());
        listed.split("<Key>").skip(1).filter_map(name).collect()
    }
}

/// Whether an answer is of the server that moto runs on, and of no other program at its port.
fn is_of_moto(answer: &[u8]) -> bool {
    String::from_utf8_lossy(answer).contains("Server: Werkzeug")
}

/// Settings of a client that reaches the server at this port, by the names that they have in the environment.
pub(crate) fn settings(port: u16) -> Vec<(String, String)> {
    let endpoint = format!("http://127.0.0.1:{port}");
    [
        ("AWS_ENDPOINT", endpoint.as_str()),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .into()
}
