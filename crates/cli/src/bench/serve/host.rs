//! The servers that are measured: those of this process, and one that runs already.

use std::net::{Ipv4Addr, SocketAddr};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use refrain::engine::{Document, Engine};
use refrain::fusion::METHODS;
use refrain::store::NamespaceKey;
use refrain_server::{ApiKeys, App, Listener, Options};
use serde::Serialize;
use serde_json::{Value, json};

use super::client::{Client, agent};
use crate::args::{self, Feature};

/// Documents brought in one request.
const AT_ONCE: usize = 64;
/// Pause before the server is asked for its memory.
const REST: Duration = Duration::from_secs(2);
/// Bytes of the prefix cache, as `refrain serve` has it.
const PREFIX_CACHE: usize = 1 << 30;

/// A server's settings that are compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub(super) struct Variant {
    /// The features that the server lacks.
    pub(super) without: Option<Feature>,
}

impl Variant {
    /// The server as it is by default, and one without each of the features.
    pub(super) fn of(compared: &[Feature]) -> Vec<Variant> {
        let without = compared.iter().map(|feature| Variant { without: Some(*feature) });
        std::iter::once(Variant::default()).chain(without).collect()
    }

    pub(super) fn name(self) -> &'static str {
        match self.without {
            None => "default",
            Some(Feature::PrefixCaching) => "no prefix caching",
            Some(Feature::Speculation) => "no speculation",
        }
    }
}

/// The source of a benchmark's servers.
pub(super) enum Host {
    /// One that runs already, with the keys that its clients have.
    Running { url: String, keys: Vec<String> },
    /// Servers of this process on one engine.
    Own { engine: Box<Engine>, folder: tempfile::TempDir, keys: Vec<String>, max_num_seqs: usize },
}

/// A server on which requests are measured.
pub(super) struct Target {
    pub(super) url: String,
    /// A key for each group of clients; one empty entry where the server needs none.
    pub(super) keys: Vec<Option<String>>,
    /// Ids of the documents, by key.
    pub(super) ids: Vec<Vec<String>>,
    server: Option<LocalServer>,
}

/// Bytes of a server's memory.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Memory {
    /// All of the process.
    pub(super) process: u64,
    /// The bytes of it that the prefix cache keeps.
    pub(super) prefix_cache: u64,
}

/// A server in this process.
struct LocalServer {
    stop: tokio::sync::oneshot::Sender<()>,
    thread: thread::JoinHandle<()>,
}

impl Host {
    /// Servers on an engine, with as many keys as the options say.
    pub(super) fn own(engine: Engine, folder: tempfile::TempDir, args: &args::ServeBench) -> Result<Host> {
        let path = folder.path().join(KEYS);
        let keys = if args.keys < 2 { 0 } else { args.keys };
        let keys = (1..=keys).map(|n| ApiKeys::add(&path, &format!("key-{n}")));
        let keys = keys.collect::<Result<Vec<String>, _>>()?;
        Ok(Host::Own { engine: Box::new(engine), folder, keys, max_num_seqs: args.max_num_seqs })
    }

    /// Has the store keep the documents in every form that measurements ask for. A chunk that stands first in a prompt may be another one than
    /// elsewhere, which no ingest computes: a request over each document alone does.
    pub(super) fn prepare(&self, methods: &[&str], documents: &[Document]) -> Result<()> {
        let server = self.serve(Variant::default(), methods, documents)?;
        let reusing =
            methods.iter().filter(|method| METHODS.parse(method).is_ok_and(|method| method.reuses()));
        for method in reusing {
            for (key, ids) in server.ids.iter().enumerate() {
                ids.iter().for_each(|id| ask(&server.client(key), method, id));
            }
        }
        server.stop();
        Ok(())
    }

    /// A server with nothing in its prefix cache, and with the documents: ready for the methods.
    pub(super) fn serve(&self, variant: Variant, methods: &[&str], documents: &[Document]) -> Result<Target> {
        let (url, server, keys) = match self {
            Host::Running { url, keys } => (url.clone(), None, keys),
            Host::Own { engine, folder, keys, max_num_seqs } => {
                let bytes = if variant.without == Some(Feature::PrefixCaching) { 0 } else { PREFIX_CACHE };
                let mut options = Options::new("bench");
                options.limits.max_num_seqs = *max_num_seqs;
                if variant.without == Some(Feature::Speculation) {
                    options.limits.num_speculative_tokens = 0;
                }
                options.shutdown_timeout = Duration::from_secs(2);
                options.limits.request_timeout = Duration::from_secs(24 * 3600);
                if !keys.is_empty() {
                    options.api_keys = ApiKeys::read(&folder.path().join(KEYS))?;
                    options.namespace_key = Some(NamespaceKey::of_folder(folder.path())?);
                }
                let (server, url) = LocalServer::start(engine.with_prefix_cache(bytes), options)?;
                (url, Some(server), keys)
            }
        };
        let keys: Vec<Option<String>> = match keys.as_slice() {
            [] => vec![None],
            keys => keys.iter().cloned().map(Some).collect(),
        };
        let mut target = Target { url, keys, ids: Vec::new(), server };
        for key in 0..target.keys.len() {
            let mut ids = Vec::new();
            if !documents.is_empty() {
                for method in methods {
                    ids = bring(&target.client(key), method, documents)?;
                }
            }
            target.ids.push(ids);
        }
        Ok(target)
    }
}

/// Name of the file of keys.
const KEYS: &str = "bench-keys";

impl Target {
    /// A client with the key of this index.
    pub(super) fn client(&self, key: usize) -> Client<'_> {
        Client { url: &self.url, key: self.keys[key].as_deref() }
    }

    /// The server's memory, a while after its last answer.
    pub(super) fn memory(&self) -> Option<Memory> {
        thread::sleep(REST);
        let mut response = agent(&self.url).get(format!("{}/metrics", self.url)).call().ok()?;
        let text = response.body_mut().read_to_string().ok()?;
        let bytes = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim().parse::<f64>().ok().map(|bytes| bytes as u64)
        };
        let process = bytes("process_resident_memory_bytes ")?;
        Some(Memory { process, prefix_cache: bytes("refrain_prefix_cache_bytes ").unwrap_or(0) })
    }

    /// Ends a server of this process.
    pub(super) fn stop(self) {
        if let Some(LocalServer { stop, thread }) = self.server {
            let _ = stop.send(());
            let _ = thread.join();
        }
    }
}

impl LocalServer {
    fn start(engine: Engine, options: Options) -> Result<(LocalServer, String)> {
        let app = App::new(engine, options)?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let listener = runtime.block_on(Listener::bind(address, None))?;
        let url = format!("http://{}", listener.address()?);
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let thread = thread::spawn(move || {
            runtime.block_on(listener.serve(app, async {
                let _ = stopped.await;
            }));
        });
        Ok((LocalServer { stop, thread }, url))
    }
}

/// Has the server keep the documents, ready for a method; their ids.
fn bring(client: &Client<'_>, method: &str, documents: &[Document]) -> Result<Vec<String>> {
    let mut ids = Vec::new();
    for some in documents.chunks(AT_ONCE) {
        let response = client.post("/v1/documents", &json!({ "documents": some, "method": method }));
        let response = response.with_context(|| format!("{} does not answer", client.url))?;
        let text = response.into_body().read_to_string()?;
        let kept: Value = serde_json::from_str(&text)?;
        if let Some(why) = kept["error"]["message"].as_str() {
            anyhow::bail!("the documents cannot be brought: {why}");
        }
        let some = kept["data"].as_array().into_iter().flatten().filter_map(|kept| kept["id"].as_str());
        ids.extend(some.map(str::to_owned));
    }
    Ok(ids)
}

/// Asks for one token over a document. A request that fails here fails while it is measured, too, and is counted there.
fn ask(client: &Client<'_>, method: &str, id: &str) {
    let body = json!({
        "messages": [{ "role": "user", "content": "?" }], "documents": [{ "id": id }], "max_tokens": 1, "refrain": { "method": method },
    });
    let answer = client.post("/v1/chat/completions", &body);
    // The chunk is stored before the answer ends.
    let _ = answer.map(|answer| answer.into_body().read_to_string());
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use refrain::engine::{Instructions, Prefix, Settings};
    use refrain::eviction::Eviction;
    use refrain::store::Store;

    use super::*;

    #[test]
    fn chunks_that_stand_first_are_computed_before_a_server_is_measured() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/tiny/llama");
        let settings = Settings { chunk_tokens: 64, ..Settings::default() };
        let engine = Engine::open(Path::new(path), Store::in_memory(1 << 24), settings, |_, _| ()).unwrap();
        let around = Instructions::default();
        let engine = engine.with_prefix(&Prefix::Averaged, || engine.system_part(&around)).unwrap();
        let document = |wheel: u32| {
            let text = format!("Wheel {wheel} has 2{wheel} spokes and a valve of brass.");
            [Document { title: String::new(), text }]
        };
        let folder = tempfile::tempdir().unwrap();
        let host = Host::Own { engine: Box::new(engine.clone()), folder, keys: Vec::new(), max_num_seqs: 2 };
        let computed = |documents: &[Document]| {
            let prompt = engine.prompt(documents, "Which valve?", &around).unwrap();
            let method = METHODS.parse("pie").unwrap();
            engine.measure(&prompt, &method, Eviction::full()).unwrap().prefilled_chunks
        };
        host.serve(Variant::default(), &["pie"], &document(1)).unwrap().stop();
        assert_ne!(computed(&document(1)), 0, "an ingest computes what stands elsewhere");
        host.prepare(&["vanilla", "pie"], &document(2)).unwrap();
        assert_eq!(computed(&document(2)), 0);
    }
}
