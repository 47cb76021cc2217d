//! The command line.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use refrain::AUTO;
use refrain::engine::Prefix;
use refrain::kernels::{Dtype, Precision};
use refrain::quantities::{parse_duration, parse_size};
use refrain::store::{KvQuantization, NamespaceKey};

use crate::simulated::Simulation;

/// Refrain on many machines: workers that answer, and gateways that send each request to the worker that holds its chunks.
#[derive(Debug, Parser)]
#[command(name = "refrain-scale", version)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
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
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", env = "REFRAIN_HOST")]
    pub(crate) host: IpAddr,
    /// Port to listen on; 0 for any free one
    #[arg(long, value_name = "PORT", default_value_t = 8080, env = "REFRAIN_PORT")]
    pub(crate) port: u16,
    /// Secret that gateways and workers share, 64 hexadecimal digits (`openssl rand -hex 32`): the namespaces of API keys are derived from
    /// it, and gateways sign with it whose a request is. Give it by the variable, since other users can see command lines
    #[arg(long, value_name = "KEY", env = "REFRAIN_NAMESPACE_KEY", hide_env_values = true, value_parser = parse_key)]
    pub(crate) namespace_key: NamespaceKey,
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
    /// Most bytes of chunks held in memory
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = parse_size, env = "REFRAIN_MEMORY")]
    pub(crate) memory: u64,
    /// Most bytes of the store's folder
    #[arg(long, value_name = "SIZE", default_value = "32GiB", value_parser = parse_size, env = "REFRAIN_DISK")]
    pub(crate) disk: u64,
    /// Threads; 0 for one a core
    #[arg(long, value_name = "N", default_value_t = 0, env = "REFRAIN_THREADS")]
    pub(crate) threads: usize,
    /// How weights are kept and multiplied: bf16, q8 or f32 [default: the nearest to the model's files]
    #[arg(long, value_name = "TYPE", env = "REFRAIN_COMPUTE")]
    pub(crate) compute: Option<Precision>,
    /// Type of cached keys and values: f16, bf16 or f32
    #[arg(long, value_name = "TYPE", default_value = "f16", env = "REFRAIN_KV")]
    pub(crate) kv: Dtype,
    /// Type of stored keys and values: exact, q8 or q4
    #[arg(long, value_name = "TYPE", default_value = "exact", env = "REFRAIN_STORE_DTYPE")]
    pub(crate) store_dtype: KvQuantization,
    /// Most tokens of a chunk
    #[arg(long, value_name = "N", default_value_t = 512, env = "REFRAIN_CHUNK_TOKENS")]
    pub(crate) chunk_tokens: usize,
    /// Tokens that stand before every chunk while it is prefilled [default: what is safe for the model]
    #[arg(long, value_name = "PREFIX", env = "REFRAIN_PREFIX")]
    pub(crate) prefix: Option<Prefix>,
    /// Fusion method of requests that name none; auto is the model's own choice
    #[arg(long, value_name = "METHOD", default_value = AUTO, env = "REFRAIN_METHOD")]
    pub(crate) method: String,
    /// Eviction policy of requests that name none
    #[arg(long, value_name = "POLICY", default_value = "full", env = "REFRAIN_EVICT")]
    pub(crate) evict: String,
    /// Most sequences decoded together
    #[arg(long, value_name = "N", default_value_t = 32, env = "REFRAIN_MAX_NUM_SEQS")]
    pub(crate) max_num_seqs: usize,
    /// Most requests that wait; further ones are refused, and the gateway sends them to another worker
    #[arg(long, value_name = "N", default_value_t = 256, env = "REFRAIN_MAX_QUEUED_REQUESTS")]
    pub(crate) max_queued_requests: usize,
    /// Most time that a request may take, waiting included
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse_duration, env = "REFRAIN_REQUEST_TIMEOUT")]
    pub(crate) request_timeout: Duration,
    /// Sleeps instead of computing: tokens a second of prefill and of decoding, bytes of a token's keys and values, which are stored in real
    /// chunk files, and what the worker is taken for: number of the model, and its numerics
    #[arg(long, value_name = "prefill=N,decode=N,bytes=N,model=N,numerics=TEXT")]
    pub(crate) simulate: Option<Simulation>,
}

#[derive(Debug, Args)]
pub(crate) struct Gateway {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Addresses of the workers, http://HOST:PORT, where --discovery is none: `refrain-scale worker` or `refrain serve`
    #[arg(
        long,
        value_name = "URL",
        value_delimiter = ',',
        env = "REFRAIN_WORKERS",
        required_if_eq("discovery", "none")
    )]
    pub(crate) workers: Vec<String>,
    /// How workers are chosen
    #[arg(long, value_name = "RULE", default_value = "cost", env = "REFRAIN_RULE")]
    pub(crate) rule: Rule,
    /// File of the accepted API keys (`refrain key new`); without it, no request needs a key
    #[arg(long, value_name = "FILE", env = "REFRAIN_API_KEY_FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Certificate chain (PEM) for TLS
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
    /// Address of the worker or gateway
    #[arg(value_name = "URL", default_value = "http://127.0.0.1:8080")]
    pub(crate) url: String,
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
