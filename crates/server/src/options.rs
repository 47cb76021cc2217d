//! Settings of a server.

use std::path::PathBuf;
use std::time::Duration;

use axum::http::HeaderMap;
use refrain::engine::Instructions;
use refrain::store::NamespaceKey;
use tracing::Span;

use crate::api_keys::ApiKeys;

/// Bounds on the work that a server accepts and does at a time.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Limits {
    /// Most tokens that a sequence proposes at a time from what was said before.
    pub num_speculative_tokens: usize,
    /// Most sequences that are decoded together.
    pub max_num_seqs: usize,
    /// Most requests that wait.
    pub max_queued_requests: usize,
    /// Most bytes of keys and values of all sequences that are being prefilled or decoded. On a device with memory of its own, prompts under
    /// way count too, and what is free there bounds it.
    pub kv_cache_memory_bytes: usize,
    /// Whether `kv_cache_memory_bytes` was asked for. Otherwise it is lowered to the part that weights and caches leave of this machine's memory, or of
    /// its control group's.
    pub kv_cache_memory_given: bool,
    /// Most tokens of a request: of the documents to ingest, or of prompt and answer.
    pub max_tokens_per_request: usize,
    /// Most tokens of an answer for which the request gives no number. None: as many as the context leaves, within the part of
    /// `kv_cache_memory_bytes` that each of `max_num_seqs` has, or 2,048 where these are more.
    pub default_max_tokens: Option<usize>,
    /// Most time that a request may take, from its arrival on.
    pub request_timeout: Duration,
    /// Whether requests of several keys share the server: then one key may have three quarters of the queue and of the sequences.
    pub has_keys: bool,
}

impl Limits {
    /// The part of a limit that one key may take.
    pub(crate) fn of_key(&self, limit: usize) -> usize {
        if self.has_keys { (limit * 3 / 4).max(1) } else { limit }
    }
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            num_speculative_tokens: 10,
            max_num_seqs: 32,
            max_queued_requests: 256,
            kv_cache_memory_bytes: 4 << 30,
            kv_cache_memory_given: false,
            max_tokens_per_request: 1 << 20,
            default_max_tokens: None,
            request_timeout: Duration::from_secs(600),
            has_keys: false,
        }
    }
}

/// Settings of a server.
#[derive(Debug)]
#[non_exhaustive]
pub struct Options {
    /// Name of the model in requests.
    pub served_model_name: String,
    /// Fusion method of requests that name none, such as `drift:charge=0.2`.
    pub method: String,
    /// Why that method is chosen, for people.
    pub method_reason: String,
    /// The prefix that the engine's chunks are prefilled behind, as it was asked for.
    pub prefix: String,
    /// Eviction policy of requests that name none, such as `full`.
    pub evict: String,
    /// Text of a chat's prompt before and after its documents; system message and history come from the request.
    pub instructions: Instructions,
    /// Bounds on the work that is accepted.
    pub limits: Limits,
    /// Most bytes of a request's body.
    pub max_body: usize,
    /// Most documents of a request.
    pub max_documents_per_request: usize,
    /// Most time in which a request's head and body may arrive, and in which a client must take what it is sent.
    pub body_timeout: Duration,
    /// Most time that requests may go on when the server shuts down.
    pub shutdown_timeout: Duration,
    /// The API keys that are accepted. Where there are none, no request needs a key.
    pub api_keys: ApiKeys,
    /// Whether `/metrics` needs an API key, where requests do.
    pub metrics_auth: bool,
    /// The secret from which the namespaces of API keys are derived, and with which a gateway signs whose a request is.
    pub namespace_key: Option<NamespaceKey>,
    /// Folder of the stored documents; without one they are held in memory.
    pub folder: Option<PathBuf>,
    /// How often what other machines have changed of the documents is looked for, where the engine's store has an object store. None:
    /// the documents stay on this machine.
    pub sync_interval: Option<Duration>,
    /// Whether the server listens on a loopback address. If so, and no API key is needed, requests whose `Host` is another
    /// name are refused: a web page could have its own name resolve to this machine.
    pub is_local: bool,
    /// Names that the `Host` of a request may have beside `localhost` and addresses.
    pub allowed_hosts: Vec<String>,
    /// Most bytes of the titles and texts that are stored for one API key.
    pub document_quota: u64,
    /// Gives a request's span the parent that its headers name, before the span begins. None: each request is a trace of its own.
    pub set_parent: Option<fn(&Span, &HeaderMap)>,
    /// Origins of web pages that may send requests, `*` for all; none by default.
    pub allowed_origins: Vec<String>,
}

impl Options {
    /// Default settings for a model of this name.
    pub fn new(served_model_name: impl Into<String>) -> Options {
        Options {
            served_model_name: served_model_name.into(),
            method: "drift:charge=0.3".to_owned(),
            method_reason: "near vanilla, since nothing is known of the model".to_owned(),
            prefix: "none".to_owned(),
            evict: "full".to_owned(),
            instructions: Instructions::default(),
            limits: Limits::default(),
            max_body: 16 << 20,
            max_documents_per_request: 256,
            body_timeout: Duration::from_secs(30),
            shutdown_timeout: Duration::from_secs(30),
            api_keys: ApiKeys::default(),
            metrics_auth: false,
            namespace_key: None,
            folder: None,
            sync_interval: Some(Duration::from_secs(5)),
            is_local: true,
            allowed_hosts: Vec::new(),
            document_quota: 1 << 30,
            set_parent: None,
            allowed_origins: Vec::new(),
        }
    }
}
