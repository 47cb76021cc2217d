//! A real S3 server (moto, from the Python package index) behind a proxy that can refuse deletions, and drop all connections.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use refrain::store::RemoteOptions;

const BUCKET: &str = "chunks";

pub(crate) struct S3 {
    server: Child,
    server_port: u16,
    proxy_port: u16,
    pub(crate) refuses_deletions: Arc<AtomicBool>,
    pub(crate) is_away: Arc<AtomicBool>,
}

impl Drop for S3 {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

impl S3 {
    /// A server with an empty bucket; none where moto is not installed.
    pub(crate) fn start() -> Option<S3> {
        let python = std::env::var("REFRAIN_PYTHON").unwrap_or_else(|_| "python3".to_owned());
        let has_moto =
            Command::new(&python).args(["-c", "import moto.server"]).stderr(Stdio::null()).status();
        if !has_moto.is_ok_and(|status| status.success()) {
            eprintln!("skipped: {python} has no moto (pip install 'moto[server]', or REFRAIN_PYTHON)");
            return None;
        }
        let server_port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let server = Command::new(&python)
            .args(["-m", "moto.server", "-H", "127.0.0.1", "-p", &server_port.to_string()])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy_port = listener.local_addr().unwrap().port();
        let s3 = S3 {
            server,
            server_port,
            proxy_port,
            refuses_deletions: Arc::default(),
            is_away: Arc::default(),
        };
        let began = Instant::now();
        while TcpStream::connect(("127.0.0.1", server_port)).is_err() {
            assert!(began.elapsed() < Duration::from_secs(60), "moto does not start");
            thread::sleep(Duration::from_millis(50));
        }
        let (refuses, is_away) = (s3.refuses_deletions.clone(), s3.is_away.clone());
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let (refuses, is_away) = (refuses.clone(), is_away.clone());
                thread::spawn(move || pass(client, server_port, &refuses, &is_away));
            }
        });
        s3.request("PUT", &format!("/{BUCKET}"));
        Some(s3)
    }

    /// A request past the proxy: moto verifies no signature.
    fn request(&self, method: &str, path: &str) -> Vec<u8> {
        let mut server = TcpStream::connect(("127.0.0.1", self.server_port)).unwrap();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\nconnection: close\r\n\
             authorization: AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, Signature=0\r\n\r\n"
        );
        server.write_all(request.as_bytes()).unwrap();
        let mut answer = Vec::new();
        server.read_to_end(&mut answer).unwrap();
        assert!(answer.starts_with(b"HTTP/1.1 2"), "{}", String::from_utf8_lossy(&answer));
        answer
    }

    /// Names of all objects, ascending.
    pub(crate) fn names(&self) -> Vec<String> {
        let listed = self.request("GET", &format!("/{BUCKET}?list-type=2"));
        let listed = String::from_utf8(listed).unwrap();
        let name = |rest: &str| Some(rest.split_once("</Key>")?.0.to_owned());
        listed.split("<Key>").skip(1).filter_map(name).collect()
    }

    /// Names and bytes of all objects. The head of the server's answer is among the bytes.
    pub(crate) fn objects(&self) -> Vec<(String, Vec<u8>)> {
        let get = |name: String| (name.clone(), self.request("GET", &format!("/{BUCKET}/{name}")));
        self.names().into_iter().map(get).collect()
    }

    pub(crate) fn options(&self) -> RemoteOptions {
        let mut options = RemoteOptions::new(format!("s3://{BUCKET}/library"));
        let endpoint = format!("http://127.0.0.1:{}", self.proxy_port);
        options.options = [
            ("AWS_ENDPOINT", endpoint.as_str()),
            ("AWS_ALLOW_HTTP", "true"),
            ("AWS_REGION", "us-east-1"),
            ("AWS_ACCESS_KEY_ID", "key"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into();
        options
    }
}

/// Passes a connection on while the proxy is not away, unless its request is a deletion, of one object or of several, that is to be
/// refused.
fn pass(mut client: TcpStream, server_port: u16, refuses: &AtomicBool, is_away: &AtomicBool) {
    let mut server = TcpStream::connect(("127.0.0.1", server_port)).unwrap();
    let (mut down, mut to_client) = (server.try_clone().unwrap(), client.try_clone().unwrap());
    thread::spawn(move || {
        let _ = std::io::copy(&mut down, &mut to_client);
        let _ = to_client.shutdown(Shutdown::Both);
    });
    let mut request = [0; 1 << 14];
    while let Ok(read) = client.read(&mut request)
        && read > 0
        && !is_away.load(Relaxed)
    {
        let line = request[..read].split(|byte| *byte == b'\r').next().unwrap_or_default();
        let is_deletion = line.starts_with(b"DELETE ")
            || line.starts_with(b"POST ") && line.windows(7).any(|part| part == b"?delete");
        if is_deletion && refuses.load(Relaxed) {
            let answer = b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
            let _ = client.write_all(answer);
            break;
        }
        if server.write_all(&request[..read]).is_err() {
            break;
        }
    }
    let _ = server.shutdown(Shutdown::Both);
}
