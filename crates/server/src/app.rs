//! What all requests share, and who asks.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::http::uri::Authority;
use axum::http::{HeaderMap, StatusCode, header};
use refrain_engine::{Document, Engine, Instructions, PromptChunk};
use refrain_eviction::{Eviction, POLICIES};
use refrain_fusion::{FusionMethod, METHODS};
use refrain_registry::Selected;
use refrain_store::NamespaceKey;
use serde_json::Value;
use tokio::sync::Semaphore;

use crate::error::{Problem, Result};
use crate::keys::Keys;
use crate::library::{Kept, Library};
use crate::metrics::Metrics;
use crate::schedule::Scheduler;
use crate::search::Search;
use crate::work::Limits;
use crate::{Error, api};

/// What tokenises or parses at a time.
const PREPARING: usize = 2;

/// How a server serves.
#[derive(Debug)]
#[non_exhaustive]
pub struct Options {
    /// What the model is called.
    pub model: String,
    /// Fusion method of requests that name none, such as `a3:ratio=0.2`.
    pub method: String,
    /// Eviction policy of requests that name none, such as `full`.
    pub evict: String,
    /// How much there may be at once.
    pub limits: Limits,
    /// Most bytes of a request's body.
    pub body: usize,
    /// Most documents of a request.
    pub documents: usize,
    /// How long a request's head and body may take to arrive.
    pub arrival: Duration,
    /// How long answers under way have when the server is told to stop.
    pub drain: Duration,
    /// Who is let in; nobody has to show a key if it is empty.
    pub keys: Keys,
    /// What the namespaces of keys are derived with.
    pub namespace_key: Option<NamespaceKey>,
    /// Where documents are kept; in memory if there is none.
    pub folder: Option<PathBuf>,
    /// Whether requests come from this machine alone. Then pages that other names lead here are refused, unless keys are needed.
    pub local: bool,
    /// Names beside `localhost` that the server goes by.
    pub hosts: Vec<String>,
    /// Most bytes of the texts that are kept for one key.
    pub library: u64,
    /// Origins of pages that may ask, `*` for all; none by default.
    pub cors: Vec<String>,
}

impl Options {
    /// For a model of this name, with everything else as it is by default.
    pub fn new(model: impl Into<String>) -> Options {
        Options {
            model: model.into(),
            method: "a3".to_owned(),
            evict: "full".to_owned(),
            limits: Limits::default(),
            body: 16 << 20,
            documents: 256,
            arrival: Duration::from_secs(30),
            drain: Duration::from_secs(30),
            keys: Keys::default(),
            namespace_key: None,
            folder: None,
            local: true,
            hosts: Vec::new(),
            library: 1 << 30,
            cors: Vec::new(),
        }
    }
}

/// What all requests share. Cheap to clone.
#[derive(Clone)]
pub struct App(pub(crate) Arc<Shared>);

pub(crate) struct Shared {
    pub(crate) engine: Engine,
    pub(crate) options: Options,
    pub(crate) scheduler: Scheduler,
    pub(crate) library: Library,
    pub(crate) search: Search,
    pub(crate) metrics: Metrics,
    pub(crate) started: u64,
    /// Bytes of bodies that are on their way.
    pub(crate) arriving: AtomicUsize,
    /// Places of what tokenises or parses.
    preparing: Semaphore,
    stopping: AtomicBool,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.scheduler.end();
    }
}

/// Who asks: the engine sees the chunks of their namespace, and no others.
#[derive(Debug)]
pub(crate) struct Caller {
    pub(crate) engine: Engine,
    pub(crate) name: String,
}

impl Caller {
    pub(crate) fn namespace(&self) -> &str {
        &self.engine.settings().namespace
    }
}

/// A fusion method.
pub(crate) type Method = Arc<dyn FusionMethod>;

impl App {
    /// A server of an engine, ready to answer.
    ///
    /// # Errors
    /// If its documents cannot be opened, an option makes no sense, or no thread can be started.
    pub fn new(engine: Engine, options: Options) -> std::result::Result<App, Error> {
        METHODS.parse(&options.method)?;
        POLICIES.parse(&options.evict)?;
        if !options.keys.is_empty() && options.namespace_key.is_none() {
            return Err(Error::NoNamespaceKey);
        }
        let metrics = Metrics::new();
        let (library, kept) = Library::open(options.folder.as_deref(), options.library)?;
        let scheduler = Scheduler::start(options.limits.clone(), metrics.clone()).map_err(Error::Thread)?;
        let search = Search::new().map_err(|problem| Error::Documents(problem.message))?;
        let app = App(Arc::new(Shared {
            engine,
            options,
            scheduler,
            library,
            search,
            metrics,
            started: seconds(),
            arriving: AtomicUsize::new(0),
            preparing: Semaphore::new(PREPARING),
            stopping: AtomicBool::new(false),
        }));
        app.index_all(kept).map_err(|problem| Error::Documents(problem.message))?;
        Ok(app)
    }

    /// Enters all documents into the search.
    fn index_all(&self, all: Vec<(String, Kept)>) -> Result<()> {
        let mut by_namespace: std::collections::BTreeMap<String, Vec<Kept>> = Default::default();
        for (namespace, kept) in all {
            by_namespace.entry(namespace).or_default().push(kept);
        }
        for (namespace, kept) in by_namespace {
            let mut entries = Vec::with_capacity(kept.len());
            for kept in kept {
                let chunks = self.0.engine.chunks(std::slice::from_ref(&kept.document))?;
                entries.push((kept.id, chunks.iter().map(|chunk| self.text(chunk)).collect()));
            }
            self.0.search.add(&namespace, entries)?;
        }
        Ok(())
    }

    /// The text of a chunk.
    pub(crate) fn text(&self, chunk: &PromptChunk) -> String {
        self.0.engine.tokenizer().decode(&chunk.tokens, false)
    }

    /// Does what takes memory and time before there is work for the schedule; few at once, on threads that may wait.
    pub(crate) async fn prepared<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        // It is never closed.
        let _place = self.0.preparing.acquire().await.map_err(|error| Problem::internal(&error))?;
        api::aside(work).await
    }

    /// Refuses what came by a name that others have led here: a page of theirs could read all that needs no key.
    ///
    /// # Errors
    /// If it did.
    pub(crate) fn check_host(&self, headers: &HeaderMap) -> Result<()> {
        let Options { local, keys, hosts, .. } = &self.0.options;
        let Some(host) = headers.get(header::HOST).filter(|_| *local && keys.is_empty()) else {
            return Ok(());
        };
        let authority = host.to_str().ok().and_then(|host| host.parse::<Authority>().ok());
        let name = authority.as_ref().map_or("", |authority| authority.host()).to_ascii_lowercase();
        let is_address = name.trim_matches(['[', ']']).parse::<IpAddr>().is_ok();
        if is_address || name == "localhost" || name.ends_with(".localhost") || hosts.contains(&name) {
            return Ok(());
        }
        let message = format!("this server does not go by the name {name:?}; --hosts gives it further ones");
        Err(Problem { code: Some("unknown_host"), ..Problem::new(StatusCode::FORBIDDEN, message) })
    }

    /// Who asks, by the key that they show.
    ///
    /// # Errors
    /// If it is none that is let in.
    pub(crate) fn caller(&self, headers: &HeaderMap) -> Result<Caller> {
        let Shared { engine, options, .. } = &*self.0;
        if options.keys.is_empty() {
            return Ok(Caller { engine: engine.clone(), name: String::new() });
        }
        let shown = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let key = shown.and_then(|value| value.split_once(' '));
        let key = key.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")).map(|(_, key)| key.trim());
        let refused = |message: &str| Problem {
            code: Some("invalid_api_key"),
            ..Problem::new(StatusCode::UNAUTHORIZED, message)
        };
        let key = key.ok_or_else(|| refused("an API key is needed: Authorization: Bearer KEY"))?;
        let name = options.keys.name(key).ok_or_else(|| refused("the API key is not known here"))?;
        let namespace = options.namespace_key.as_ref().map(|of| of.namespace(Some(key))).unwrap_or_default();
        let engine = engine.in_namespace(&namespace, engine.settings().shared.as_deref());
        Ok(Caller { engine, name: name.to_owned() })
    }

    /// The fusion method that a request gives in `field`, or the server's own.
    ///
    /// # Errors
    /// If the name or an option is not known, or a value does not fit.
    pub(crate) fn method(&self, field: &str, given: Option<&Value>) -> Result<Selected<Method>> {
        let selected = match given {
            Some(value) => METHODS.select_json(value),
            None => METHODS.select(&self.0.options.method),
        };
        selected.map_err(|error| Problem::field(field, error.to_string()))
    }

    /// The eviction policy that a request gives in `field`, or the server's own.
    ///
    /// # Errors
    /// If the name or an option is not known, or a value does not fit.
    pub(crate) fn policy(&self, field: &str, given: Option<&Value>) -> Result<Selected<Eviction>> {
        let selected = match given {
            Some(value) => POLICIES.select_json(value),
            None => POLICIES.select(&self.0.options.evict),
        };
        selected.map_err(|error| Problem::field(field, error.to_string()))
    }

    /// Prefills documents and keeps them for everybody who needs no key; says how many.
    ///
    /// # Errors
    /// If they cannot be prefilled or kept.
    pub async fn keep(&self, documents: Vec<Document>) -> std::result::Result<usize, Problem> {
        let caller = Caller { engine: self.0.engine.clone(), name: String::new() };
        let method = self.method("method", None)?;
        let count = documents.len();
        let ingest = api::Ingest::submit(self.clone(), caller, documents, method.built, true).await?;
        ingest.kept().await?;
        Ok(count)
    }

    /// Whether the server is about to stop.
    pub(crate) fn is_stopping(&self) -> bool {
        self.0.stopping.load(Relaxed)
    }

    /// Takes no more work, and waits until what is there is done, or [`Options::drain`] is over.
    pub fn drain(&self) {
        self.0.stopping.store(true, Relaxed);
        self.0.scheduler.drain(self.0.options.drain);
        self.0.engine.store().flush();
    }
}

/// What stands around documents and question in a chat.
pub(crate) fn instructions(system: Option<String>, history: Vec<refrain_model::Message>) -> Instructions {
    Instructions {
        system,
        before_documents: "Answer the question from these documents.\n\n".to_owned(),
        before_question: "Answer the question from the documents above.\nQuestion: ".to_owned(),
        history,
    }
}

/// A document's title, or the beginning of its text.
pub(crate) fn title(document: &Document) -> String {
    let title = document.title.trim();
    let title =
        if title.is_empty() { document.text.trim().lines().next().unwrap_or_default() } else { title };
    title.trim_start_matches('#').trim().chars().take(80).collect()
}

/// Seconds since 1970.
pub(crate) fn seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
