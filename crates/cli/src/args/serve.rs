//! Options of `refrain serve` and `refrain key`.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueHint};

use crate::output::{parse_duration, parse_size};

#[derive(Debug, Args)]
pub(crate) struct Serve {
    /// Address to listen on; 0.0.0.0 or :: for all of this machine's
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub(crate) host: IpAddr,
    /// Port to listen on; 0 for any that is free
    #[arg(long, value_name = "PORT", default_value_t = 8080)]
    pub(crate) port: u16,
    /// What the model is called in requests [default: as --model says]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Text, Markdown or JSONL (title, text) files, or folders of them, to keep before the first request
    #[arg(long, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(crate) docs: Vec<PathBuf>,
    /// Fusion method of requests that name none
    #[arg(long, value_name = "METHOD", default_value = "a3")]
    pub(crate) method: String,
    /// Eviction policy of requests that name none
    #[arg(long, value_name = "POLICY", default_value = "full")]
    pub(crate) evict: String,
    /// File of the API keys that are let in (`refrain key new`); without it everybody is who can reach the address
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) api_keys: Option<PathBuf>,
    /// Certificate chain (PEM) to speak TLS with
    #[arg(long, value_name = "FILE", requires = "tls_key", value_hint = ValueHint::FilePath)]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Its private key (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert", value_hint = ValueHint::FilePath)]
    pub(crate) tls_key: Option<PathBuf>,
    /// Names that the server goes by, beside localhost and addresses; others are refused while it listens on this machine alone
    /// and no key is needed
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub(crate) hosts: Vec<String>,
    /// Origins of web pages that may ask, * for all
    #[arg(long, value_name = "ORIGIN", value_delimiter = ',')]
    pub(crate) cors: Vec<String>,
    /// Most answers decoded together
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub(crate) answers: usize,
    /// Most requests that wait; further ones are refused with 429
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub(crate) queue: usize,
    /// Most bytes of keys and values of the answers under way
    #[arg(long, value_name = "SIZE", default_value = "4GiB", value_parser = parse_size)]
    pub(crate) kv_cache: u64,
    /// How long a request may take, waiting included
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse_duration)]
    pub(crate) deadline: Duration,
    /// How long a request may take to arrive
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_duration)]
    pub(crate) arrival: Duration,
    /// How long answers under way have when the server is told to stop
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_duration)]
    pub(crate) drain: Duration,
    /// Most bytes of a request
    #[arg(long, value_name = "SIZE", default_value = "16MiB", value_parser = parse_size)]
    pub(crate) body: u64,
    /// Most bytes of the texts that are kept for one key
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = parse_size)]
    pub(crate) library: u64,
    /// Most documents of a request
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub(crate) documents: usize,
    /// OpenTelemetry collector that spans of requests are sent to by OTLP over HTTP, such as http://localhost:4318
    #[cfg(feature = "otlp")]
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT", value_hint = ValueHint::Url)]
    pub(crate) otlp: Option<String>,
    /// Most tokens of a request: of its documents, or of its prompt and answer
    #[arg(long, value_name = "N", default_value_t = 1 << 20)]
    pub(crate) tokens: usize,
    /// What is logged: error, warn, info, debug, or by module as in `info,tantivy=warn`; `info,refrain::text=trace` has
    /// prompts and answers as well
    #[arg(long, value_name = "FILTER", default_value = "info")]
    pub(crate) log: String,
}

/// API keys of the server
#[derive(Debug, Subcommand)]
pub(crate) enum Key {
    /// Make a key, and print it: it is stored nowhere, only its hash is
    New {
        /// Whose it is
        #[arg(value_name = "NAME")]
        name: String,
        /// File of the keys, new or to add to
        #[arg(long, value_name = "FILE", default_value = "refrain-keys", value_hint = ValueHint::FilePath)]
        file: PathBuf,
    },
}
