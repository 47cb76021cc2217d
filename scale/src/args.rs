//! The command line.

use std::ffi::OsStr;
use std::fmt::Display;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::builder::{BoolishValueParser, RangedU64ValueParser, Resettable};
use clap::{ArgAction, Args, CommandFactory as _, Parser, Subcommand, ValueEnum};
use refrain::AUTO;
use refrain::engine::{DeviceChoice, Instructions, Prefix};
use refrain::kernels::{Dtype, Precision};
use refrain::quantities::{Quota, SyncInterval, parse_duration, parse_size, parse_tokens};
use refrain::store::{FetchPolicy, KvQuantization, NamespaceKey};

use crate::simulated::Simulation;

/// Refrain on many machines: workers that answer, and gateways that send each request to the worker that holds its chunks.
#[derive(Debug, Parser)]
#[command(name = "refrain-scale", version)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The command line. An environment variable that is empty is one that is not set.
pub(crate) fn command() -> clap::Command {
    with_environment(Cli::command())
}

fn with_environment(command: clap::Command) -> clap::Command {
    let is_empty = |variable: &OsStr| std::env::var_os(variable).is_some_and(|value| value.is_empty());
    let command = command.mut_args(|arg| match arg.get_env().is_some_and(is_empty) {
        true => arg.env(Resettable::Reset),
        false => arg,
    });
    command.mut_subcommands(with_environment)
}

/// A value, or none for `auto`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OrAuto<T>(pub(crate) Option<T>);

impl<T: FromStr<Err: Display>> FromStr for OrAuto<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<OrAuto<T>, String> {
        if text == AUTO {
            return Ok(OrAuto(None));
        }
        text.parse().map(|value| OrAuto(Some(value))).map_err(|error| format!("{error}, or {AUTO}"))
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Answer requests of gateways, and of clients that come directly
    Worker(Box<Worker>),
    /// Answer clients by workers
    Gateway(Box<Gateway>),
    /// Ask a worker or a gateway whether it takes requests
    Probe(Probe),
}

/// How workers are found, and how requests and reports travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Discovery {
    /// By a list of addresses; requests by HTTP
    None,
    /// By files in a folder (DYN_FILE_KV), on one machine; requests by TCP
    File,
    /// By etcd (ETCD_ENDPOINTS); requests by TCP
    Etcd,
}

/// How a gateway chooses among workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Rule {
    /// The least expected time to the first token: waiting, computing, and loading or prefilling what a worker lacks
    Cost,
    /// Most tokens held, among workers within one request of the least loaded
    Tessera,
}

impl From<Rule> for refrain_route::Rule {
    fn from(rule: Rule) -> refrain_route::Rule {
        match rule {
            Rule::Cost => refrain_route::Rule::Cost,
            Rule::Tessera => refrain_route::Rule::Tessera { slack: 1 },
        }
    }
}

/// Options of workers and gateways.
#[derive(Debug, Args)]
pub(crate) struct Common {
    /// Address to listen on
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", value_parser = parse_host, env = "REFRAIN_HOST")]
    pub(crate) host: IpAddr,
    /// Port to listen on; 0 for any free one
    #[arg(long, value_name = "PORT", default_value_t = 8080, env = "REFRAIN_PORT")]
    pub(crate) port: u16,
    /// Secret that gateways and workers share, 64 hexadecimal digits (`openssl rand -hex 32`): the namespaces of API keys are derived from
    /// it, and gateways sign with it whose a request is. Give it by the variable, since other users can see command lines
    #[arg(
        long,
        value_name = "KEY",
        env = "REFRAIN_NAMESPACE_KEY",
        hide_env_values = true,
        value_parser = parse_key,
        required_unless_present = "namespace_key_file"
    )]
    pub(crate) namespace_key: Option<NamespaceKey>,
    /// File with that secret, where --namespace-key does not give it
    #[arg(long, value_name = "FILE", env = "REFRAIN_NAMESPACE_KEY_FILE")]
    pub(crate) namespace_key_file: Option<PathBuf>,
    /// How workers are found
    #[arg(long, value_name = "HOW", default_value = "none", env = "REFRAIN_DISCOVERY")]
    pub(crate) discovery: Discovery,
    /// Namespace of the workers in the discovery
    #[arg(long, value_name = "NAME", default_value = "refrain", env = "REFRAIN_DISCOVERY_NAMESPACE")]
    pub(crate) discovery_namespace: String,
    /// Most bytes of a request's body
    #[arg(long, value_name = "SIZE", default_value = "16MiB", value_parser = parse_size, env = "REFRAIN_MAX_BODY")]
    pub(crate) max_body: u64,
    /// Most time in which a request's head and body may arrive
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_duration, env = "REFRAIN_BODY_TIMEOUT")]
    pub(crate) body_timeout: Duration,
    /// Most time that running requests may go on when the program stops
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_duration, env = "REFRAIN_SHUTDOWN_TIMEOUT")]
    pub(crate) shutdown_timeout: Duration,
    /// Log filter: error, warn, info, debug, or by module as in `info,tantivy=warn`
    #[arg(long, value_name = "FILTER", default_value = "info", env = "REFRAIN_LOG")]
    pub(crate) log: String,
}

impl Common {
    /// The secret that gateways and workers share.
    ///
    /// # Errors
    /// If its file holds none.
    pub(crate) fn key(&self) -> Result<NamespaceKey> {
        match (&self.namespace_key, &self.namespace_key_file) {
            (Some(key), _) => Ok(key.clone()),
            (None, Some(file)) => Ok(NamespaceKey::read(file)?),
            (None, None) => bail!("give --namespace-key or --namespace-key-file"),
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct Worker {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Model: a known name, a GGUF file, a Hugging Face folder, or `hf:ORG/NAME[@REVISION][:FILE]`
    #[arg(long, value_name = "MODEL", default_value = "smollm2-135m", env = "REFRAIN_MODEL")]
    pub(crate) model: String,
    /// Folder of the models that `refrain pull` fetches by name [default: ~/.cache/refrain/models]
    #[arg(long, value_name = "FOLDER", env = "REFRAIN_MODELS")]
    pub(crate) models: Option<PathBuf>,
    /// Name of the model in requests [default: the value of --model]
    #[arg(long, value_name = "NAME", env = "REFRAIN_SERVED_MODEL_NAME")]
    pub(crate) served_model_name: Option<String>,
    /// Folder of this worker's chunk store, which no other process uses
    #[arg(long, value_name = "FOLDER", env = "REFRAIN_STORE")]
    pub(crate) store: PathBuf,
    /// Object store that the workers share chunks through: s3://BUCKET/PREFIX, gs://…, az://… or file:///FOLDER
    #[arg(long, value_name = "URL", env = "REFRAIN_REMOTE")]
    pub(crate) remote: Option<String>,
    /// How long the object store may be silent before it is left alone for a while
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = parse_duration, env = "REFRAIN_REMOTE_TIMEOUT")]
    pub(crate) remote_timeout: Duration,
    /// Whether chunks that the object store may have are fetched or computed: auto takes what is expected to be faster by measured rates,
    /// and computes a chunk that comes late. A simulated worker decides by the rates that it is given
    #[arg(long, value_name = "POLICY", default_value = "auto", env = "REFRAIN_REMOTE_POLICY")]
    pub(crate) remote_policy: FetchPolicy,
    /// Most bytes of chunks held in memory
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = parse_size, env = "REFRAIN_MEMORY")]
    pub(crate) memory: u64,
    /// Most bytes of the store's folder: the least recently used chunks go, also where the disk is full earlier, and pinned ones stay
    #[arg(long, value_name = "SIZE", default_value = "32GiB", value_parser = parse_size, env = "REFRAIN_DISK")]
    pub(crate) disk: u64,
    /// Most bytes of each namespace in the store's folder, or of one: 2GiB,shared=20GiB [default: no bound of their own]
    #[arg(long, value_name = "[NAMESPACE=]SIZE", value_delimiter = ',', env = "REFRAIN_QUOTA")]
    pub(crate) quota: Vec<Quota>,
    /// How long stored chunks stay, such as 12h or 30d [default: as long as there is room]
    #[arg(long, value_name = "TIME", value_parser = parse_duration, env = "REFRAIN_TTL")]
    pub(crate) ttl: Option<Duration>,
    /// How often the worker looks for documents that others have added to the object store, changed or removed; off keeps documents on this
    /// machine, where gateways find them at one worker alone
    #[arg(long, value_name = "TIME", default_value = "5s", env = "REFRAIN_SYNC_INTERVAL")]
    pub(crate) sync_interval: SyncInterval,
    /// Device that computes: cpu, cuda (an NVIDIA GPU; cuda:1 is the second), or auto. cuda is experimental
    #[arg(long, value_name = "DEVICE", default_value = "cpu", env = "REFRAIN_DEVICE")]
    pub(crate) device: DeviceChoice,
    /// Most bytes of chunks kept in the memory of a GPU, so that those which many prompts use are copied there once; at most an eighth of what is
    /// free there is taken, and 0 keeps none
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = parse_size, env = "REFRAIN_DEVICE_CACHE")]
    pub(crate) device_cache: u64,
    /// Threads; 0 for one a core
    #[arg(long, value_name = "N", default_value_t = 0, env = "REFRAIN_THREADS")]
    pub(crate) threads: usize,
    /// How weights are kept and multiplied: bf16, q8, f32, or auto (the nearest to the model's files)
    #[arg(long, value_name = "TYPE", default_value = AUTO, env = "REFRAIN_COMPUTE")]
    pub(crate) compute: OrAuto<Precision>,
    /// Keep packed weights in a file beside the model, from which later starts read them
    #[arg(long, value_name = "BOOL", action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_value = "true",
          default_missing_value = "true", hide_possible_values = true, value_parser = BoolishValueParser::new(),
          env = "REFRAIN_KEEP_PACKED")]
    pub(crate) keep_packed: bool,
    /// Use only chunks that were computed with the same precision and kernels, where answers must not differ in a bit by which worker
    /// computed a chunk first
    #[arg(long, value_name = "BOOL", action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_value = "false",
          default_missing_value = "true", hide_possible_values = true, value_parser = BoolishValueParser::new(),
          env = "REFRAIN_STRICT_NUMERICS")]
    pub(crate) strict_numerics: bool,
    /// Most tokens whose share of a layer is computed in one step: others get their turn between steps
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..), env = "REFRAIN_UBATCH_SIZE")]
    pub(crate) ubatch_size: u32,
    /// Type of cached keys and values: f16, bf16 or f32
    #[arg(long, value_name = "TYPE", default_value = "f16", env = "REFRAIN_KV")]
    pub(crate) kv: Dtype,
    /// Type of stored keys and values: exact, q8 or q4
    #[arg(long, value_name = "TYPE", default_value = "exact", env = "REFRAIN_STORE_DTYPE")]
    pub(crate) store_dtype: KvQuantization,
    /// Most tokens of a chunk
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = RangedU64ValueParser::<usize>::new().range(1..),
          env = "REFRAIN_CHUNK_TOKENS")]
    pub(crate) chunk_tokens: usize,
    /// Tokens right before a chunk in its document that it is prefilled behind, at most, or `all` of them: documents in one piece
    #[arg(long, value_name = "N", default_value = "0", value_parser = parse_tokens, env = "REFRAIN_LEFT_TOKENS")]
    pub(crate) left_tokens: usize,
    /// Tokens that stand before every chunk while it is prefilled; auto is what is safe for the model
    #[arg(long, value_name = "PREFIX", default_value = AUTO, env = "REFRAIN_PREFIX")]
    pub(crate) prefix: OrAuto<Prefix>,
    /// Fusion method of requests that name none; auto is the model's own choice
    #[arg(long, value_name = "METHOD", default_value = AUTO, env = "REFRAIN_METHOD")]
    pub(crate) method: String,
    /// Eviction policy of requests that name none
    #[arg(long, value_name = "POLICY", default_value = "full", env = "REFRAIN_EVICT")]
    pub(crate) evict: String,
    /// File that `refrain calibrate` wrote [default: the model's, in refrain/calibration in the user's data folder]
    #[arg(long, value_name = "FILE", env = "REFRAIN_CALIBRATION")]
    pub(crate) calibration: Option<PathBuf>,
    /// Text between the documents and the question of a chat
    #[arg(
        long,
        value_name = "TEXT",
        default_value = Instructions::default().before_question,
        hide_default_value = true,
        env = "REFRAIN_INSTRUCTION"
    )]
    pub(crate) instruction: String,
    /// Most tokens that are proposed at a time from prompt and answer, and verified in one step; 0 proposes none
    #[arg(long, value_name = "N", default_value_t = 10, env = "REFRAIN_NUM_SPECULATIVE_TOKENS")]
    pub(crate) num_speculative_tokens: usize,
    /// Most sequences decoded together
    #[arg(long, value_name = "N", default_value_t = 32, env = "REFRAIN_MAX_NUM_SEQS")]
    pub(crate) max_num_seqs: usize,
    /// Most requests that wait; further ones are refused, and the gateway sends them to another worker
    #[arg(long, value_name = "N", default_value_t = 256, env = "REFRAIN_MAX_QUEUED_REQUESTS")]
    pub(crate) max_queued_requests: usize,
    /// Most bytes of keys and values of all running sequences; on a GPU no more than are free there
    /// [default: 4GiB, or what weights and caches leave of the memory that this machine, or its container, has]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, env = "REFRAIN_KV_CACHE_MEMORY_BYTES")]
    pub(crate) kv_cache_memory_bytes: Option<u64>,
    /// Most bytes of keys and values of answered prompts that are kept for prompts which begin alike (prefix caching); 0 keeps none
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = parse_size, env = "REFRAIN_PREFIX_CACHE_MEMORY_BYTES")]
    pub(crate) prefix_cache_memory_bytes: u64,
    /// Most bytes of the titles and texts stored for one API key
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = parse_size, env = "REFRAIN_DOCUMENT_QUOTA")]
    pub(crate) document_quota: u64,
    /// Most documents of a request
    #[arg(long, value_name = "N", default_value_t = 256, env = "REFRAIN_MAX_DOCUMENTS_PER_REQUEST")]
    pub(crate) max_documents_per_request: usize,
    /// Most tokens of a request: of the documents to ingest, or of prompt and answer
    #[arg(long, value_name = "N", default_value_t = 1 << 20, env = "REFRAIN_MAX_TOKENS_PER_REQUEST")]
    pub(crate) max_tokens_per_request: usize,
    /// Most tokens of an answer for which the request gives no number [default: to the end of the context, within the part of
    /// --kv-cache-memory-bytes that each of --max-num-seqs has, or 2048 where these are more]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), env = "REFRAIN_DEFAULT_MAX_TOKENS")]
    pub(crate) default_max_tokens: Option<u32>,
    /// Most time that a request may take, waiting included
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse_duration, env = "REFRAIN_REQUEST_TIMEOUT")]
    pub(crate) request_timeout: Duration,
    /// Sleeps instead of computing: tokens a second of prefill and of decoding, bytes of a token's keys and values, which are stored in real
    /// chunk files, bytes a second out of the object store and seconds until the first, and what the worker is taken for: number of the
    /// model, and its numerics
    #[arg(long, value_name = "prefill=N,decode=N,bytes=N,remote=N,latency=N,model=N,numerics=TEXT")]
    pub(crate) simulate: Option<Simulation>,
}

#[derive(Debug, Args)]
pub(crate) struct Gateway {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Addresses of the workers, http://HOST:PORT, where --discovery is none: `refrain-scale worker` or `refrain serve`
    #[arg(long, value_name = "URL", value_delimiter = ',', env = "REFRAIN_WORKERS")]
    pub(crate) workers: Vec<String>,
    /// How workers are chosen
    #[arg(long, value_name = "RULE", default_value = "cost", env = "REFRAIN_RULE")]
    pub(crate) rule: Rule,
    /// File of the accepted API keys (`refrain key new`); without it, no request needs a key
    #[arg(long, value_name = "FILE", env = "REFRAIN_API_KEY_FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Certificate chain (PEM) for TLS; a new one is in use within a minute
    #[arg(long, value_name = "FILE", requires = "ssl_keyfile", env = "REFRAIN_SSL_CERTFILE")]
    pub(crate) ssl_certfile: Option<PathBuf>,
    /// Private key (PEM) of the certificate
    #[arg(long, value_name = "FILE", requires = "ssl_certfile", env = "REFRAIN_SSL_KEYFILE")]
    pub(crate) ssl_keyfile: Option<PathBuf>,
    /// Names of the gateway beside localhost and addresses; requests to other names are refused while it listens on a loopback address and
    /// needs no API key
    #[arg(long, value_name = "NAME", value_delimiter = ',', env = "REFRAIN_ALLOWED_HOSTS")]
    pub(crate) allowed_hosts: Vec<String>,
    /// Origins of web pages that may send requests, * for all
    #[arg(long, value_name = "ORIGIN", value_delimiter = ',', env = "REFRAIN_ALLOWED_ORIGINS")]
    pub(crate) allowed_origins: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Probe {
    /// Address of the worker or gateway, https://HOST:PORT where it has TLS [default: http://127.0.0.1 with --port]
    #[arg(value_name = "URL")]
    pub(crate) url: Option<String>,
    /// Port of this machine, where no address is given
    #[arg(long, value_name = "PORT", default_value_t = 8080, env = "REFRAIN_PORT")]
    pub(crate) port: u16,
}

/// An address, or `localhost`.
fn parse_host(text: &str) -> Result<IpAddr, String> {
    if text == "localhost" {
        return Ok(Ipv4Addr::LOCALHOST.into());
    }
    text.parse().map_err(|_| {
        "give an address of this machine, as 127.0.0.1 or 0.0.0.0, and the port by --port".to_owned()
    })
}

fn parse_key(text: &str) -> Result<NamespaceKey, String> {
    text.trim().parse().map_err(|()| "it is not 64 hexadecimal digits".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent() {
        super::Cli::command().debug_assert();
    }
}
