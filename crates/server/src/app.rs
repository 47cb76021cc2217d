//! The state that all requests share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use axum::http::{HeaderMap, StatusCode};
use refrain::AUTO;
use refrain::corpus::{Corpus, LocalDocuments, SyncThread, open_documents};
use refrain::engine::Engine;
use refrain::eviction::{Eviction, POLICIES};
use refrain::fusion::{FusionMethod, METHODS};
use refrain::registry::Selected;
use serde_json::Value;

use crate::api_error::{ApiError, Result};
use crate::blocking::spawn_permitted;
use crate::body::BytesInFlight;
use crate::clock::unix_seconds;
use crate::error::Error;
use crate::gateway::{HeldLog, TENANT_HEADER, signed_tenant};
use crate::host_memory::within_host;
use crate::metrics::Metrics;
use crate::options::{Limits, Options};
use crate::permits::{Permit, Permits};
use crate::queue::MAX_INGESTS;
use crate::scheduler::Scheduler;
use crate::tenant::Tenant;

/// Most requests that are tokenised or parsed at a time.
const MAX_PREPROCESSING: usize = 2;

/// Most grammars that are compiled at a time. Time is exponential in the intersections of a grammar (20 s for fourteen), and `llguidance` counts its
/// fuel only afterwards, so that lower bounds would refuse schemas and save no time. That must not hold up [`App::preprocess`] either.
const MAX_COMPILING: usize = 2;

/// Most files that are read at a time. A PDF may take minutes, which must not hold up [`App::preprocess`].
const MAX_READING: usize = 2;

/// Most requests that read, pin or remove stored documents at a time. A removal may wait for long, and many would take all threads that may block.
const MAX_ON_DOCUMENTS: usize = 16;

/// A server without a socket. A clone is cheap and shares everything.
#[derive(Clone)]
pub struct App {
    pub(crate) state: Arc<ServerState>,
}

pub(crate) struct ServerState {
    pub(crate) engine: Engine,
    pub(crate) options: Options,
    pub(crate) scheduler: Scheduler,
    pub(crate) corpus: Arc<Corpus>,
    /// Brings the documents in line with other machines, where they are shared.
    _sync_thread: Option<SyncThread>,
    pub(crate) metrics: Metrics,
    pub(crate) held: HeldLog,
    /// Seconds since 1970 at which the server started.
    pub(crate) started: u64,
    /// Bytes of bodies that are being received, or are held.
    pub(crate) bytes_in_flight: BytesInFlight,
    preprocessing: Permits,
    compiling: Permits,
    reading: Permits,
    documents: Permits,
    is_stopping: AtomicBool,
}

impl Drop for ServerState {
    fn drop(&mut self) {
        self.scheduler.abort();
    }
}

/// The limits of a server whose requests fit into the memory of the engine's device, or into the host's where it has none of its own.
///
/// # Errors
/// If no request would fit.
fn within_memory(engine: &Engine, limits: Limits) -> std::result::Result<Limits, Error> {
    let decoded = limits.max_num_seqs.saturating_mul(1 + limits.num_speculative_tokens);
    let Some(memory) = engine.request_memory(decoded, MAX_INGESTS)? else {
        return Ok(within_host(engine, limits));
    };
    let (asked, left) =
        (limits.kv_cache_memory_bytes, usize::try_from(memory.requests).unwrap_or(usize::MAX));
    if asked <= left {
        tracing::info!("{memory}; --kv-cache-memory-bytes gives them {asked} bytes");
        return Ok(limits);
    }
    tracing::warn!("{memory}, fewer than the {asked} bytes of --kv-cache-memory-bytes");
    Ok(Limits { kv_cache_memory_bytes: left, ..limits })
}

/// A fusion method.
pub(crate) type Method = Arc<dyn FusionMethod>;

impl App {
    /// A server for an engine.
    ///
    /// # Errors
    /// If the stored documents cannot be opened or indexed, an option is wrong, or a thread cannot be started.
    pub fn new(engine: Engine, options: Options) -> std::result::Result<App, Error> {
        METHODS.parse(&options.method)?;
        POLICIES.parse(&options.evict)?;
        if !options.api_keys.is_empty() && options.namespace_key.is_none() {
            return Err(Error::NoNamespaceKey);
        }
        let metrics = Metrics::new(engine.numerics(), &engine.decoder().device().name());
        let (folder, quota) = (options.folder.as_deref(), options.document_quota);
        let documents = match options.sync_interval {
            Some(_) => open_documents(engine.store(), folder, quota)?,
            None => Box::new(LocalDocuments::open(folder, quota)?),
        };
        let corpus = Arc::new(Corpus::open(&engine, documents)?);
        let shared = options.sync_interval.filter(|_| corpus.sharing().is_some());
        metrics.set_sync_interval(shared);
        let sync_thread = shared
            .map(|interval| SyncThread::start(corpus.clone(), engine.clone(), interval))
            .transpose()
            .map_err(Error::Thread)?;
        // A gateway with the namespace key sends requests of several keys, which it has checked itself.
        let has_keys = !options.api_keys.is_empty() || options.namespace_key.is_some();
        let limits = within_memory(&engine, Limits { has_keys, ..options.limits.clone() })?;
        let permits = |limit| Permits::new(limit, limits.of_key(limit));
        let (preprocessing, compiling) = (permits(MAX_PREPROCESSING), permits(MAX_COMPILING));
        let (reading, documents) = (permits(MAX_READING), permits(MAX_ON_DOCUMENTS));
        let bytes_in_flight = BytesInFlight::new(&options, &limits);
        let own = engine.settings().namespace.clone();
        let scheduler = Scheduler::start(limits, metrics.clone(), own).map_err(Error::Thread)?;
        let state = ServerState {
            engine,
            options,
            scheduler,
            corpus,
            _sync_thread: sync_thread,
            metrics,
            held: HeldLog::new(),
            started: unix_seconds(),
            bytes_in_flight,
            preprocessing,
            compiling,
            reading,
            documents,
            is_stopping: AtomicBool::new(false),
        };
        Ok(App { state: Arc::new(state) })
    }

    /// The time at which a request that arrived then is late.
    pub(crate) fn deadline(&self, arrived: Instant) -> Instant {
        arrived + self.state.options.limits.request_timeout
    }

    /// Runs `work` of the key with this namespace, such as tokenising, which takes time and memory before the scheduler knows of the request.
    /// Only few requests do so at a time, also when their clients have left, and keys take turns.
    ///
    /// # Errors
    /// If its turn does not come before `deadline`, or `work` fails.
    pub(crate) async fn preprocess<T: Send + 'static>(
        &self,
        namespace: &str,
        deadline: Instant,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        spawn_permitted((&self.state.preprocessing, namespace), deadline, |_permit| work()).await
    }

    /// Runs `work` of the key with this namespace, which compiles a grammar. Only few grammars are compiled at a time, also when their clients have
    /// left, and keys take turns.
    ///
    /// # Errors
    /// If its turn does not come before `deadline`, or `work` fails.
    pub(crate) async fn compile_grammar<T: Send + 'static>(
        &self,
        namespace: &str,
        deadline: Instant,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        spawn_permitted((&self.state.compiling, namespace), deadline, |_permit| work()).await
    }

    /// Runs `work` of the key with this namespace, which reads a file of a request and holds its permit until nothing is read any more. Only few files
    /// are read at a time, also when their clients have left, and keys take turns.
    ///
    /// # Errors
    /// If its turn does not come before `deadline`, or `work` fails.
    pub(crate) async fn read_file<T: Send + 'static>(
        &self,
        namespace: &str,
        deadline: Instant,
        work: impl FnOnce(Permit) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        spawn_permitted((&self.state.reading, namespace), deadline, work).await
    }

    /// Runs `work` on the stored documents of a tenant. Only few requests do so at a time, also when their clients have left, and keys take turns.
    ///
    /// # Errors
    /// If its turn does not come within the time of a request, or `work` fails.
    pub(crate) async fn on_documents<T: Send + 'static>(
        &self,
        tenant: Tenant,
        work: impl FnOnce(&Corpus, &Tenant) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (corpus, namespace) = (self.state.corpus.clone(), tenant.namespace().to_owned());
        let permits = (&self.state.documents, namespace.as_str());
        let deadline = self.deadline(Instant::now());
        spawn_permitted(permits, deadline, move |_permit| work(&corpus, &tenant)).await
    }

    /// The tenant whom a gateway has signed a request of.
    ///
    /// # Errors
    /// If the request has no signature, or one that was not made with this server's namespace key.
    pub(crate) fn signed_tenant(&self, headers: &HeaderMap) -> Result<Tenant> {
        let ServerState { engine, options, .. } = &*self.state;
        let signed = headers.get(TENANT_HEADER).and_then(|value| value.to_str().ok());
        let tenant =
            options.namespace_key.as_ref().zip(signed).and_then(|(key, value)| signed_tenant(key, value));
        let (name, namespace) = tenant.ok_or_else(|| ApiError {
            code: Some("invalid_gateway"),
            ..ApiError::new(
                StatusCode::UNAUTHORIZED,
                format!("{TENANT_HEADER} is for gateways that have this server's --namespace-key"),
            )
        })?;
        let engine = engine.in_namespace(namespace, engine.settings().shared.as_deref());
        Ok(Tenant { engine, name: name.to_owned() })
    }

    /// The tenant whom a gateway has signed a request of, or whose API key it shows.
    ///
    /// # Errors
    /// If the signature is wrong, or a key is needed and the request shows none that is accepted.
    pub(crate) fn tenant(&self, headers: &HeaderMap) -> Result<Tenant> {
        if headers.contains_key(TENANT_HEADER) {
            return self.signed_tenant(headers);
        }
        let ServerState { engine, options, .. } = &*self.state;
        if options.api_keys.is_empty() {
            return Ok(Tenant { engine: engine.clone(), name: String::new() });
        }
        let (name, key) = options.api_keys.shown(headers)?;
        let namespace = options.namespace_key.as_ref().map(|of| of.namespace(Some(key))).unwrap_or_default();
        let engine = engine.in_namespace(&namespace, engine.settings().shared.as_deref());
        Ok(Tenant { engine, name: name.to_owned() })
    }

    /// The fusion method that a request gives in `field`, or the server's default where it gives none or `auto`.
    ///
    /// # Errors
    /// If the name or an option is unknown, or a value does not fit its option.
    pub(crate) fn method(&self, field: &str, given: Option<&Value>) -> Result<Selected<Method>> {
        let selected = match given.filter(|value| *value != AUTO) {
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

    /// Tells the number of requests under way: those that are computed, and those that wait for it. The returned function keeps nothing open.
    pub fn requests_under_way(&self) -> impl Fn() -> usize + use<> {
        let scheduler = self.state.scheduler.clone();
        move || {
            let (decoded, others, _) = scheduler.load();
            decoded + others
        }
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use axum::body::Body;
    use axum::http::{Request, header};
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use refrain::store::NamespaceKey;
    use serde_json::json;
    use tokio::sync::mpsc::unbounded_channel;
    use tokio::time::timeout;
    use tower::ServiceExt as _;

    use super::*;
    use crate::body::parsed_bytes;
    use crate::router;
    use crate::testing::tiny_engine;

    #[tokio::test]
    async fn bodies_count_as_in_flight_until_their_requests_are_preprocessed() {
        let app = App::new(tiny_engine(), Options::new("tiny")).unwrap();
        let mut permits = Vec::new();
        for _ in 0..MAX_PREPROCESSING {
            permits.push(app.state.preprocessing.acquire("").await.unwrap());
        }
        let in_flight = || app.state.bytes_in_flight.all();
        let send = |path: &str, body: &str| {
            let request = Request::post(path).header(header::CONTENT_TYPE, "application/json");
            Box::pin(router(app.clone()).oneshot(request.body(Body::from(body.to_owned())).unwrap()))
        };
        let chat = |user: String| {
            let messages = json!([{ "role": "user", "content": "How tight is a bolt?" }]);
            json!({ "messages": messages, "max_tokens": 1, "user": user }).to_string()
        };
        let (small, large) = (chat(String::new()), chat("x".repeat(100_000)));
        let document = json!({ "title": "Torque", "text": "A bolt is tight." }).to_string();
        let requests = [
            ("/v1/chat/completions", &small, parsed_bytes(small.as_bytes())),
            ("/v1/chat/completions", &large, large.len()),
            (
                "/tokenize",
                &json!({ "prompt": "A bolt" }).to_string(),
                parsed_bytes(br#"{"prompt":"A bolt"}"#),
            ),
            ("/v1/documents", &document, "TorqueA bolt is tight.".len()),
        ];
        for (path, body, bytes) in requests {
            let mut answer = send(path, body);
            assert!(timeout(Duration::from_millis(100), &mut answer).await.is_err(), "{path}");
            assert_eq!(in_flight(), bytes, "{path}");
            drop(answer);
            assert_eq!(in_flight(), 0, "{path}");
        }
        drop(permits);
        assert_eq!(send("/v1/chat/completions", &large).await.unwrap().status(), 200);
        assert_eq!(in_flight(), 0);
    }

    /// A response repeats fields of its request until its end, and nothing else of it.
    #[tokio::test]
    async fn what_a_response_repeats_counts_until_its_end() {
        let app = App::new(tiny_engine(), Options::new("tiny")).unwrap();
        let text = "x".repeat(100_000);
        let body = json!({ "input": "How tight is a bolt?", "instructions": "Be brief.", "stream": true,
            "max_output_tokens": 4, "user": text });
        let request = Request::post("/v1/responses").header(header::CONTENT_TYPE, "application/json");
        let request = request.body(Body::from(body.to_string())).unwrap();
        let response = router(app.clone()).oneshot(request).await.unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(app.state.bytes_in_flight.all(), parsed_bytes(br#"["Be brief.",null,null,null,null]"#));
        drop(response);
        assert_eq!(app.state.bytes_in_flight.all(), 0);
    }

    #[tokio::test]
    async fn requests_on_stored_documents_take_turns() {
        let app = App::new(tiny_engine(), Options::new("tiny")).unwrap();
        let mut permits = Vec::new();
        for _ in 0..MAX_ON_DOCUMENTS {
            permits.push(app.state.documents.acquire("").await.unwrap());
        }
        let mut waiting = Vec::new();
        for (method, path, status) in [
            ("GET", "/v1/documents", 200),
            ("GET", "/v1/documents/doc-1", 404),
            ("DELETE", "/v1/documents/doc-1", 404),
            ("POST", "/v1/documents/doc-1/pin", 404),
        ] {
            let request =
                Request::builder().method(method).uri(path).header(header::CONTENT_TYPE, "application/json");
            let mut answer = Box::pin(router(app.clone()).oneshot(request.body(Body::from("{}")).unwrap()));
            assert!(timeout(Duration::from_millis(100), &mut answer).await.is_err(), "{method} {path}");
            waiting.push((answer, status));
        }
        drop(permits);
        for (answer, status) in waiting {
            assert_eq!(timeout(Duration::from_secs(60), answer).await.unwrap().unwrap().status(), status);
        }
    }

    /// The files count too, which are held in memory until the last is read.
    #[tokio::test]
    async fn texts_of_an_upload_count_as_in_flight_while_its_files_wait() {
        let app = App::new(tiny_engine(), Options::new("tiny")).unwrap();
        let in_flight = || app.state.bytes_in_flight.all();
        let mut permits = Vec::new();
        for _ in 0..MAX_READING {
            permits.push(app.state.reading.acquire("").await.unwrap());
        }
        let file = |text: &str| json!({ "file": { "name": "a.txt", "data": STANDARD.encode(text) } });
        let documents =
            json!([{ "title": "Torque", "text": "A bolt is tight." }, file("A saddle."), file("A lever.")]);
        let request = Request::post("/v1/documents").header(header::CONTENT_TYPE, "application/json");
        let body = Body::from(json!({ "documents": documents }).to_string());
        let mut answer = Box::pin(router(app.clone()).oneshot(request.body(body).unwrap()));
        assert!(timeout(Duration::from_millis(100), &mut answer).await.is_err());
        let given = "TorqueA bolt is tight.A saddle.A lever.".len();
        assert_eq!(in_flight(), given);
        // The turn of the first file comes, the second one waits behind another request.
        let mut next = Box::pin(app.state.reading.acquire("other"));
        assert!(timeout(Duration::from_millis(10), &mut next).await.is_err());
        permits.pop();
        let _next = timeout(Duration::from_secs(60), async {
            tokio::select! { permit = next => permit, _ = &mut answer => panic!("a file was not waited for") }
        });
        let _next = _next.await.unwrap().unwrap();
        assert!(timeout(Duration::from_millis(100), &mut answer).await.is_err());
        let read = "aA saddle.".len();
        assert_eq!(in_flight(), given + read);
        drop(permits);
        assert_eq!(timeout(Duration::from_secs(60), answer).await.unwrap().unwrap().status(), 200);
        assert_eq!(in_flight(), 0);
    }

    #[tokio::test]
    async fn late_work_is_not_begun() {
        let app = App::new(tiny_engine(), Options::new("tiny")).unwrap();
        let late = Some(ApiError::timeout());
        let work = || -> Result<()> { panic!("late work has begun") };
        let now = Instant::now();
        assert_eq!(app.preprocess("", now, work).await.err(), late, "a permit is free");
        assert_eq!(app.compile_grammar("", now, work).await.err(), late);
        assert_eq!(app.read_file("", now, move |_| work()).await.err(), late);
    }

    /// Each step of a request waits for a permit. The later ones have what the earlier ones have left of the request's time.
    #[tokio::test]
    async fn the_steps_of_a_request_wait_within_its_time_all_together() {
        let mut options = Options::new("tiny");
        options.limits.request_timeout = Duration::from_secs(2);
        let app = App::new(tiny_engine(), options).unwrap();
        let acquire = async |permits: &Permits| {
            [permits.acquire("").await.unwrap(), permits.acquire("").await.unwrap()]
        };
        let (preprocessing, _compiling) =
            (acquire(&app.state.preprocessing).await, acquire(&app.state.compiling).await);
        let messages = json!([{ "role": "user", "content": "How tight is a bolt?" }]);
        let body = json!({ "messages": messages, "response_format": { "type": "json_object" } }).to_string();
        let request = Request::post("/v1/chat/completions").header(header::CONTENT_TYPE, "application/json");
        let began = Instant::now();
        let mut answer = Box::pin(router(app.clone()).oneshot(request.body(Body::from(body)).unwrap()));
        assert!(timeout(Duration::from_millis(1200), &mut answer).await.is_err());
        drop(preprocessing);
        assert_eq!(answer.await.unwrap().status(), 504);
        assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
    }

    #[tokio::test]
    async fn one_keys_work_leaves_room_for_another_keys() {
        let key: NamespaceKey = "5e".repeat(32).parse().unwrap();
        let options = Options { namespace_key: Some(key), ..Options::new("tiny") };
        let app = App::new(tiny_engine(), options).unwrap();
        for permits in [&app.state.preprocessing, &app.state.compiling, &app.state.reading] {
            let _held = permits.acquire("crowd").await.unwrap();
            let mut second = Box::pin(permits.acquire("crowd"));
            assert!(timeout(Duration::from_millis(10), &mut second).await.is_err());
            timeout(Duration::from_secs(60), permits.acquire("other")).await.unwrap().unwrap();
        }
    }

    #[tokio::test]
    async fn requests_whose_clients_have_left_count_until_their_preprocessing_ends() {
        let app = App::new(tiny_engine(), Options::new("tiny")).unwrap();
        let (began, mut begun) = unbounded_channel();
        let mut releases = Vec::new();
        for _ in 0..MAX_PREPROCESSING {
            let ((release, released), app, began) = (channel::<()>(), app.clone(), began.clone());
            releases.push(release);
            let request = tokio::spawn(async move {
                let work = move || {
                    let _ = began.send(());
                    let _ = released.recv();
                    Ok(())
                };
                app.preprocess("", app.deadline(Instant::now()), work).await
            });
            begun.recv().await.unwrap();
            request.abort();
            assert!(request.await.unwrap_err().is_cancelled());
        }
        let mut third = Box::pin(app.preprocess("", app.deadline(Instant::now()), || Ok(3)));
        assert!(timeout(Duration::from_millis(200), &mut third).await.is_err(), "the first two still work");
        drop(releases.pop());
        assert_eq!(timeout(Duration::from_secs(60), third).await.unwrap().unwrap(), 3);
    }
}
