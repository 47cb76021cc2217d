//! The state that all requests share.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use axum::http::uri::Authority;
use axum::http::{HeaderMap, StatusCode, header};
use refrain::corpus::{Corpus, DocumentStore};
use refrain::engine::Engine;
use refrain::eviction::{Eviction, POLICIES};
use refrain::fusion::{FusionMethod, METHODS};
use refrain::registry::Selected;
use serde_json::Value;
use tokio::sync::Semaphore;

use crate::api_error::{ApiError, Result};
use crate::blocking::spawn_blocking;
use crate::clock::unix_seconds;
use crate::error::Error;
use crate::metrics::Metrics;
use crate::options::{Limits, Options};
use crate::scheduler::Scheduler;
use crate::tenant::Tenant;

/// Most requests that are tokenised or parsed at a time.
const MAX_PREPROCESSING: usize = 2;

/// Most requests whose files are read at a time. A PDF may take minutes, which must not hold up [`App::preprocess`].
const MAX_READING: usize = 2;

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
    reading: Arc<Semaphore>,
    is_stopping: AtomicBool,
}

impl Drop for ServerState {
    fn drop(&mut self) {
        self.scheduler.abort();
    }
}

/// A fusion method.
pub(crate) type Method = Arc<dyn FusionMethod>;

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
        let metrics = Metrics::new(engine.numerics());
        let documents = DocumentStore::open(options.folder.as_deref(), options.document_quota)?;
        let corpus = Corpus::open(&engine, documents)?;
        let limits = Limits { has_keys: !options.api_keys.is_empty(), ..options.limits.clone() };
        let scheduler = Scheduler::start(limits, metrics.clone()).map_err(Error::Thread)?;
        let state = ServerState {
            engine,
            options,
            scheduler,
            corpus,
            metrics,
            started: unix_seconds(),
            bytes_in_flight: AtomicUsize::new(0),
            preprocessing: Semaphore::new(MAX_PREPROCESSING),
            reading: Arc::new(Semaphore::new(MAX_READING)),
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

    /// Runs `work`, which reads the files of a request. Only few requests do so at a time, also when their clients have left.
    ///
    /// # Errors
    /// If `work` fails.
    pub(crate) async fn read_files<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        // The semaphore is never closed.
        let permit = self.state.reading.clone().acquire_owned().await;
        let permit = permit.map_err(|error| ApiError::internal(&error))?;
        spawn_blocking(move || {
            let _permit = permit;
            work()
        })
        .await
    }

    /// Refuses a request that a browser sends for a page of another origin which is not allowed: browsers send forms without
    /// asking the server first. Programs send neither of the headers that tell it.
    ///
    /// # Errors
    /// If the page's origin is neither the server's own nor allowed.
    pub(crate) fn check_origin(&self, headers: &HeaderMap) -> Result<()> {
        let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or("null"));
        let (site, origin, host) = (text("sec-fetch-site"), text("origin"), text("host"));
        let allowed = &self.state.options.allowed_origins;
        let is_allowed = |origin: &str| allowed.iter().any(|known| known == "*" || known == origin);
        let is_own = |origin: &str| {
            let address = origin.split_once("://").map(|(_, address)| address);
            address.zip(host).is_some_and(|(address, host)| address.eq_ignore_ascii_case(host))
        };
        let is_taken = match (site, origin) {
            (_, Some(origin)) if is_allowed(origin) => true,
            (Some(site), _) => ["same-origin", "none"].contains(&site),
            (None, Some(origin)) => is_own(origin),
            (None, None) => true,
        };
        if is_taken {
            return Ok(());
        }
        let message = "a page of another origin cannot send a form; --allowed-origins names those that can";
        Err(ApiError { code: Some("unknown_origin"), ..ApiError::new(StatusCode::FORBIDDEN, message) })
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
