//! The hub's interface: the files of a repository, and name, commit and size of each.
//!
//! The client of the hub's own crate waits without an end, trusts no authority of the system's, and sends the token to other hosts.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use hf_hub::Repo;
use refrain::{hub_setting, hub_token};
use serde::Deserialize;
use ureq::config::{ConfigBuilder, RedirectAuthHeaders};
use ureq::http::{Response, Uri};
use ureq::typestate::AgentScope;
use ureq::{Agent, Body};

use crate::http;

/// Longest wait for a connection.
const CONNECT: Duration = Duration::from_secs(10);

/// Longest silence of the hub.
const SILENCE: Duration = Duration::from_secs(60);

/// Most redirections of a request.
const REDIRECTIONS: u32 = 10;

/// A client of the hub that the environment names.
pub(super) struct Client {
    endpoint: String,
    token: Option<String>,
    agent: Agent,
}

/// Name, commit and size of a file, as the hub gives them.
pub(super) struct Metadata {
    /// Name of the file's bytes; of a large file their SHA-256.
    pub(super) etag: String,
    /// The commit that the revision stands for.
    pub(super) commit: String,
    pub(super) size: u64,
}

impl Client {
    pub(super) fn from_env() -> Client {
        let endpoint = hub_setting("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_owned());
        Client::new(endpoint.trim_end_matches('/'), http::config(), SILENCE)
    }

    fn new(endpoint: &str, config: ConfigBuilder<AgentScope>, silence: Duration) -> Client {
        let config = config
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
            .timeout_connect(Some(CONNECT))
            .timeout_per_read(Some(silence));
        Client { endpoint: endpoint.to_owned(), token: hub_token(), agent: config.build().into() }
    }

    /// The names of a repository's files.
    pub(super) fn files(&self, repo: &Repo) -> Result<Vec<String>> {
        #[derive(Deserialize)]
        struct Info {
            siblings: Vec<Sibling>,
        }
        #[derive(Deserialize)]
        struct Sibling {
            rfilename: String,
        }
        let url = format!("{}/api/{}", self.endpoint, repo.api_url());
        let info: Info = self.get(&url, None, REDIRECTIONS)?.into_body().read_json()?;
        Ok(info.siblings.into_iter().map(|sibling| sibling.rfilename).collect())
    }

    /// The URL of a file.
    pub(super) fn url(&self, repo: &Repo, file: &str) -> String {
        format!("{}/{}/resolve/{}/{file}", self.endpoint, repo.url(), repo.url_revision())
    }

    /// Metadata of the file at a URL. The hub gives them before it redirects to where a large file lies.
    pub(super) fn metadata(&self, url: &str) -> Result<Metadata> {
        const FIRST: Option<&str> = Some("bytes=0-0");
        let mut told = self.get(url, FIRST, 0)?;
        // A repository that was renamed redirects within the hub.
        let mut redirections = 0;
        while let Some(path) = header(&told, "location").filter(|path| is_path(path)) {
            if redirections == REDIRECTIONS {
                bail!("the hub redirects {url} again and again");
            }
            redirections += 1;
            let hub: Uri = url.parse()?;
            let authority = hub.authority().context("the hub's address has no host")?;
            told =
                self.get(&format!("{}://{authority}{path}", hub.scheme_str().unwrap_or("https")), FIRST, 0)?;
        }
        let lacking = |name: &str| format!("the hub's answer for {url} has no {name}");
        let etag = header(&told, "x-linked-etag").or_else(|| header(&told, "etag"));
        let etag = etag.with_context(|| lacking("etag"))?.replace('"', "");
        let commit = header(&told, "x-repo-commit").with_context(|| lacking("x-repo-commit"))?.to_owned();
        if told.status().is_redirection() {
            told = self.get(url, FIRST, REDIRECTIONS)?;
        }
        let size = header(&told, "content-range").and_then(|range| range.rsplit('/').next()?.parse().ok());
        Ok(Metadata { etag, commit, size: size.with_context(|| lacking("length of the file"))? })
    }

    /// The answer to a request of a file's bytes from `start` on.
    pub(super) fn rest(&self, url: &str, start: u64) -> Result<Response<Body>> {
        self.get(url, Some(&format!("bytes={start}-")), REDIRECTIONS)
    }

    fn get(&self, url: &str, range: Option<&str>, redirections: u32) -> Result<Response<Body>> {
        let mut request = self.agent.get(url).config().max_redirects(redirections).build();
        if let Some(range) = range {
            request = request.header("Range", range);
        }
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        match request.call() {
            Ok(response) => Ok(response),
            // The hub has answered.
            Err(error @ ureq::Error::StatusCode(_)) => Err(error.into()),
            Err(error) => Err(error).with_context(|| format!("{} cannot be reached", self.endpoint)),
        }
    }
}

fn header<'a>(response: &'a Response<Body>, name: &str) -> Option<&'a str> {
    response.headers().get(name)?.to_str().ok()
}

/// Whether a redirection stays on its host.
fn is_path(location: &str) -> bool {
    location.starts_with('/') && !location.starts_with("//")
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    /// A hub of one connection, which says this much and then nothing.
    fn silent(said: &'static str) -> Client {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(said.as_bytes()).unwrap();
            // The client has gone where this ends.
            let _ = stream.read_to_end(&mut Vec::new());
        });
        Client::new(&url, http::config_for(&url), Duration::from_millis(200))
    }

    /// A server that gives these answers, one a connection. Returns its port, and the requests when all were given.
    fn scripted(answers: Vec<String>) -> (u16, thread::JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let serve = move |answer: String| {
            let (mut stream, _) = listener.accept().unwrap();
            let mut head = vec![0; 4096];
            let read = stream.read(&mut head).unwrap();
            let answer = format!("HTTP/1.1 {answer}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n");
            stream.write_all(answer.as_bytes()).unwrap();
            String::from_utf8_lossy(&head[..read]).to_ascii_lowercase()
        };
        (port, thread::spawn(move || answers.into_iter().map(serve).collect()))
    }

    #[test]
    fn a_large_file_is_told_of_by_the_hub_and_lies_elsewhere() {
        let sized = "206 Partial Content\r\nContent-Range: bytes 0-0/70000";
        let (port, elsewhere) = scripted(vec![sized.to_owned()]);
        let renamed = "307 Moved\r\nLocation: /new/name/resolve/main/f".to_owned();
        let stored = format!(
            "302 Found\r\nLocation: http://localhost:{port}/bytes\r\nETag: \"x\"\r\nX-Linked-ETag: \"abc\"\r\nX-Repo-Commit: c0ffee"
        );
        let (port, hub) = scripted(vec![renamed.clone(), stored.clone(), renamed, stored]);
        let url = format!("http://127.0.0.1:{port}");
        let mut client = Client::new(&url, http::config_for(&url), SILENCE);
        client.token = Some("secret".to_owned());
        let told = client.metadata(&format!("{}/old/name/resolve/main/f", client.endpoint)).unwrap();
        assert_eq!((&*told.etag, &*told.commit, told.size), ("abc", "c0ffee", 70_000));
        let asked = hub.join().unwrap();
        assert!(asked[1].starts_with("get /new/name/resolve/main/f "), "{asked:?}");
        assert!(
            asked.iter().all(|head| head.contains("bearer secret") && head.contains("bytes=0-0")),
            "{asked:?}"
        );
        // The token is for the hub alone.
        let asked = elsewhere.join().unwrap();
        assert!(asked[0].contains("bytes=0-0") && !asked[0].contains("secret"), "{asked:?}");
    }

    #[test]
    fn a_hub_that_falls_silent_is_given_up() {
        let client = silent("");
        let error = client.metadata(&format!("{}/a/b/resolve/main/c", client.endpoint)).err().unwrap();
        assert!(format!("{error:#}").contains("cannot be reached: timeout"), "{error:#}");
        let client = silent("HTTP/1.1 206 Partial Content\r\nContent-Length: 9\r\n\r\nhalf");
        let mut rest = client.rest(&client.endpoint, 0).unwrap().into_body().into_reader();
        let mut read = Vec::new();
        assert!(rest.read_to_end(&mut read).is_err());
        assert_eq!(read, b"half");
    }
}
