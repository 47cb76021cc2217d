//! The state that all requests share.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use axum::http::uri::Authority;
use axum::http::{HeaderMap, StatusCode, header};
use refrain_engine::{Document, Engine};
use refrain_eviction::{Eviction, POLICIES};
use refrain_fusion::{FusionMethod, METHODS};
use refrain_registry::Selected;
use serde_json::Value;
use tokio::sync::Semaphore;

use crate::api_error::{ApiError, Result};
use crate::blocking::spawn_blocking;
use crate::clock::unix_seconds;
use crate::corpus::{Corpus, DocumentStore, NewDocument};
use crate::error::Error;
use crate::metrics::Metrics;
use crate::options::Options;
use crate::scheduler::Scheduler;
use crate::tenant::Tenant;

/// Most requests that are tokenised or parsed at a time.
const MAX_PREPROCESSING: usize = 2;

/// A server without a socket. A clone is cheap and shares everything.
#[derive(Clone)]
pub struct App {
    pub(crate) state: Arc<ServerState>,
}

pub(crate) struct ServerState {
    pub(crate) engine: Engine,
    pub(crate) options: Options,
    pub(crate) scheduler: Scheduler,
    pub(crate) corpus: Corpus,
    pub(crate) metrics: Metrics,
    /// Seconds since 1970 at which the server started.
    pub(crate) started: u64,
    /// Bytes of bodies that are being received.
    pub(crate) bytes_in_flight: AtomicUsize,
    preprocessing: Semaphore,
    is_stopping: AtomicBool,
}

impl Drop for ServerState {
    fn drop(&mut self) {
        self.scheduler.abort();
    }
}

/// A fusion method.
pub(crate) type Method = Arc<dyn FusionMethod>;

/// A text that tells tokenizers with the same vocabulary apart, for [`segmentation`].
const PROBE: &str = "Hello,  world's 12345 tokens\n\tdef f(x): return x²; Straße, 螺栓用五牛米, ψηφιακό 🦀";

/// Identifies the tokenizer and the chunk size, which decide how documents are cut: a hash of the vocabulary, of the token
/// ids of a probe text, and of the chunk size.
fn segmentation(engine: &Engine) -> Result<String> {
    let tokenizer = engine.tokenizer();
    let mut hasher = blake3::Hasher::new_derive_key("refrain segmentation of documents, version 1");
    hasher.update(&(engine.settings().chunk_tokens as u64).to_le_bytes());
    for id in 0..tokenizer.vocab_size() as u32 {
        let bytes = tokenizer.bytes_of(id);
        hasher.update(&(bytes.len() as u64).to_le_bytes()).update(&bytes);
    }
    let probe = Document { title: String::new(), text: PROBE.to_owned() };
    for token in engine.chunks(&[probe])?.iter().flat_map(|chunk| &chunk.tokens) {
        hasher.update(&token.to_le_bytes());
    }
    Ok(hasher.finalize().to_hex().to_string())
}

impl App {
    /// A server for an engine.
    ///
    /// # Errors
    /// If the stored documents cannot be opened or indexed, an option is wrong, or the compute thread cannot be started.
    pub fn new(engine: Engine, options: Options) -> std::result::Result<App, Error> {
        METHODS.parse(&options.method)?;
        POLICIES.parse(&options.evict)?;
        if !options.api_keys.is_empty() && options.namespace_key.is_none() {
            return Err(Error::NoNamespaceKey);
        }
        let metrics = Metrics::new();
        let documents = DocumentStore::open(options.folder.as_deref(), options.document_quota)?;
        let corpus = index(&engine, documents).map_err(|error| Error::Index(error.message))?;
        let scheduler = Scheduler::start(options.limits.clone(), metrics.clone()).map_err(Error::Thread)?;
        let state = ServerState {
            engine,
            options,
            scheduler,
            corpus,
            metrics,
            started: unix_seconds(),
            bytes_in_flight: AtomicUsize::new(0),
            preprocessing: Semaphore::new(MAX_PREPROCESSING),
            is_stopping: AtomicBool::new(false),
        };
        Ok(App { state: Arc::new(state) })
    }

    /// Runs `work`, such as tokenising, which takes time and memory before the scheduler knows of the request. Only few
    /// requests do so at a time.
    ///
    /// # Errors
    /// If `work` fails.
    pub(crate) async fn preprocess<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        // The semaphore is never closed.
        let permit = self.state.preprocessing.acquire().await;
        let _permit = permit.map_err(|error| ApiError::internal(&error))?;
        spawn_blocking(work).await
    }

    /// Refuses a request whose `Host` is not one of the server's names, where no API key protects it: a web page could have
    /// its own name resolve to this machine, and read what the server answers.
    ///
    /// # Errors
    /// If the name is not one of the server's.
    pub(crate) fn check_host(&self, headers: &HeaderMap) -> Result<()> {
        let Options { is_local, api_keys, allowed_hosts, .. } = &self.state.options;
        let Some(host) = headers.get(header::HOST).filter(|_| *is_local && api_keys.is_empty()) else {
            return Ok(());
        };
        let authority = host.to_str().ok().and_then(|host| host.parse::<Authority>().ok());
        let name = authority.as_ref().map_or("", |authority| authority.host()).to_ascii_lowercase();
        let is_address = name.trim_matches(['[', ']']).parse::<IpAddr>().is_ok();
        if is_address || name == "localhost" || name.ends_with(".localhost") || allowed_hosts.contains(&name)
        {
            return Ok(());
        }
        let message =
            format!("{name:?} is not a name of this server; --allowed-hosts gives it further names");
        Err(ApiError { code: Some("unknown_host"), ..ApiError::new(StatusCode::FORBIDDEN, message) })
    }

    /// The tenant whose API key a request shows.
    ///
    /// # Errors
    /// If a key is needed, and the request shows none that is accepted.
    pub(crate) fn tenant(&self, headers: &HeaderMap) -> Result<Tenant> {
        let ServerState { engine, options, .. } = &*self.state;
        if options.api_keys.is_empty() {
            return Ok(Tenant { engine: engine.clone(), name: String::new() });
        }
        let shown = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let key = shown.and_then(|value| value.split_once(' '));
        let key = key.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")).map(|(_, key)| key.trim());
        let refused = |message: &str| ApiError {
            code: Some("invalid_api_key"),
            ..ApiError::new(StatusCode::UNAUTHORIZED, message)
        };
        let key = key.ok_or_else(|| refused("an API key is needed: Authorization: Bearer KEY"))?;
        let name = options.api_keys.name(key).ok_or_else(|| refused("the API key is unknown"))?;
        let namespace = options.namespace_key.as_ref().map(|of| of.namespace(Some(key))).unwrap_or_default();
        let engine = engine.in_namespace(&namespace, engine.settings().shared.as_deref());
        Ok(Tenant { engine, name: name.to_owned() })
    }

    /// The fusion method that a request gives in `field`, or the server's default.
    ///
    /// # Errors
    /// If the name or an option is unknown, or a value does not fit its option.
    pub(crate) fn method(&self, field: &str, given: Option<&Value>) -> Result<Selected<Method>> {
        let selected = match given {
            Some(value) => METHODS.select_json(value),
            None => METHODS.select(&self.state.options.method),
        };
        selected.map_err(|error| ApiError::field(field, error.to_string()))
    }

    /// The eviction policy that a request gives in `field`, or the server's default.
    ///
    /// # Errors
    /// If the name or an option is unknown, or a value does not fit its option.
    pub(crate) fn policy(&self, field: &str, given: Option<&Value>) -> Result<Selected<Eviction>> {
        let selected = match given {
            Some(value) => POLICIES.select_json(value),
            None => POLICIES.select(&self.state.options.evict),
        };
        selected.map_err(|error| ApiError::field(field, error.to_string()))
    }

    /// Whether the server is shutting down.
    pub(crate) fn is_stopping(&self) -> bool {
        self.state.is_stopping.load(Relaxed)
    }

    /// Takes no more requests, and waits for those that are running, for at most [`Options::shutdown_timeout`].
    pub fn drain(&self) {
        self.state.is_stopping.store(true, Relaxed);
        self.state.scheduler.drain(self.state.options.shutdown_timeout);
        self.state.engine.store().flush();
    }
}

/// The corpus of the stored documents, all of them indexed.
fn index(engine: &Engine, documents: DocumentStore) -> Result<Corpus> {
    let corpus = Corpus::new(documents, segmentation(engine)?)?;
    let cut = |namespace: &str, document: Document| {
        let engine = engine.in_namespace(namespace, None);
        cut_document(&engine, document, false)
    };
    corpus.index_all(cut, |tokens| engine.tokenizer().decode(tokens, false))?;
    Ok(corpus)
}

/// Cuts a document into chunks. Its keys are those of the chunks, and with `with_contexts` also those of the whole
/// document, which some methods use.
///
/// # Errors
/// If the text cannot be tokenised.
pub(crate) fn cut_document(engine: &Engine, document: Document, with_contexts: bool) -> Result<NewDocument> {
    let chunks = engine.chunks(std::slice::from_ref(&document))?;
    Ok(NewDocument {
        keys: engine.keys_of(&chunks, with_contexts),
        chunk_texts: chunks.iter().map(|chunk| engine.tokenizer().decode(&chunk.tokens, false)).collect(),
        chunks: chunks.into_iter().map(|chunk| chunk.tokens).collect(),
        document,
    })
}
