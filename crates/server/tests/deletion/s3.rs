//! A real S3 server (moto, from the Python package index) behind a proxy that can refuse deletions, and drop all connections.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use refrain::store::{FetchPolicy, RemoteOptions};

use super::moto::{Moto, settings};

const BUCKET: &str = "chunks";

pub(crate) struct S3 {
    moto: Moto,
    proxy_port: u16,
    pub(crate) refuses_deletions: Arc<AtomicBool>,
    pub(crate) is_away: Arc<AtomicBool>,
}

impl S3 {
    /// A server with an empty bucket; none where moto is not installed.
    pub(crate) fn start() -> Option<S3> {
        let moto = Moto::start(BUCKET)?;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (server_port, proxy_port) = (moto.port, listener.local_addr().unwrap().port());
        let s3 = S3 { moto, proxy_port, refuses_deletions: Arc::default(), is_away: Arc::default() };
        let (refuses, is_away) = (s3.refuses_deletions.clone(), s3.is_away.clone());
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let (refuses, is_away) = (refuses.clone(), is_away.clone());
                thread::spawn(move || pass(client, server_port, &refuses, &is_away));
            }
        });
        Some(s3)
    }

    /// Names of all objects, ascending.
    pub(crate) fn names(&self) -> Vec<String> {
        self.moto.names()
    }

    /// Names and bytes of all objects. The head of the server's answer is among the bytes.
    pub(crate) fn objects(&self) -> Vec<(String, Vec<u8>)> {
        let get = |name: String| (name.clone(), self.moto.request("GET", &format!("/{name}")));
        self.names().into_iter().map(get).collect()
    }

    pub(crate) fn options(&self) -> RemoteOptions {
        let mut options = RemoteOptions::new(format!("s3://{BUCKET}/library"));
        options.options = settings(self.proxy_port);
        // What is measured decides nothing here.
        options.policy = FetchPolicy::Fetch;
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
